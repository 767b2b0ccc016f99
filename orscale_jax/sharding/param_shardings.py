"""The shardings of parameters on Auto axes, which their types do not hold.

They come from an argument, or from the annotations of Flax and Haliax: ``init`` is given
the parameters in their boxes, and keeps the annotations for ``update``, to which
``nnx.Optimizer`` gives bare arrays. Shardings only determine where Newton–Schulz runs:
arrays that are sharded otherwise are resharded.

Each optimizer keeps the annotations that its own ``init`` has seen. Those of all of them
are kept as well, for optimizers without any: :func:`optax.inject_hyperparams` builds its
optimizer anew for every step, so that the one in ``update`` was never initialized. Of
these common annotations the last ones count, and only where no others contradict them.
They stay as long as the process: of such an optimizer, and of the boxes that its ``init``
was given, nothing lives on that could say when to forget them.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax import _checks
from orscale_jax.sharding import meshes, typed_sharding
from orscale_jax.trees.boxes import PyTree, annotated_spec, is_box, unbox
from orscale_jax.trees.functions import is_function
from orscale_jax.trees.masks import mask_like
from orscale_jax.trees.names import Path, name_and_shape, names_on
from orscale_jax.trees.watch import Watch

ParamShardings: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None

# Specs by the path and shape of a parameter, None of a box that says nothing.
_Annotations: TypeAlias = dict[tuple[Path, tuple[int, ...]], PartitionSpec | None]

_common: _Annotations = {}  # The last ones.
_all: dict[tuple[Path, tuple[int, ...]], set[PartitionSpec]] = {}

initialized: Watch["ParamSpecs"] = Watch("shardings of parameters")


class ParamSpecs:
    """What an optimizer knows of the shardings of its parameters."""

    def __init__(self, given: ParamShardings) -> None:
        """Take what the user has given.

        Args:
          given: See ``param_shardings`` of :func:`orscale_jax.orscale`.

        Raises:
          ValueError: If it is a mesh.
        """
        if isinstance(given, Mesh | AbstractMesh):
            _checks.refuse("param_shardings", given, "pass a mesh as mesh=")
        self._given = given
        self._annotated: _Annotations | None = None  # Until init has seen boxes.

    def note_annotations(self, params: PyTree) -> None:
        """Keep the annotations of parameters in boxes instead of earlier ones."""
        initialized.note(self)
        nodes = jax.tree.leaves_with_path(params, is_leaf=is_box)
        boxes = [(path, node) for path, node in nodes if is_box(node)]
        if not boxes:
            return
        self._annotated = _annotations(boxes)
        _common.update(self._annotated)
        for key, spec in self._annotated.items():
            _all.setdefault(key, set()).update([] if spec is None else [spec])

    def on(self, mesh: AbstractMesh, tree: PyTree) -> PyTree | None:
        """The specs of the leaves of a tree on a mesh, or None if they are not known.

        Args:
          mesh: The mesh.
          tree: The gradients on it, without boxes.

        Raises:
          ValueError: If what is given does not fit the tree or the mesh.
        """
        if self._given is not None:
            given = self._given
            if is_function(given, _is_placed):
                given = given(tree)
            return _given_specs(given, tree, mesh)

        leaves = jax.tree.leaves_with_path(tree)
        specs = [self._annotation(path, leaf) for path, leaf in leaves]
        for spec, (_, leaf) in zip(specs, leaves, strict=True):
            if spec is None or _misfit(spec, np.shape(leaf), mesh):
                return None
        return jax.tree.unflatten(jax.tree.structure(tree), specs)

    def source(self, mesh: AbstractMesh, tree: PyTree) -> str:
        """Where the specs of a tree on a mesh of Auto axes come from, in words."""
        if self._given is not None:
            return "from param_shardings"
        return "unknown" if self.on(mesh, tree) is None else "from annotations"

    def _annotation(self, path: Any, leaf: Any) -> PartitionSpec | None:
        key = names_on(path), np.shape(leaf)
        if self._annotated is not None:
            return self._annotated.get(key)
        if len(_all.get(key, ())) > 1:
            warnings.warn(
                f"parameter {name_and_shape(path, leaf)} has been annotated in two ways "
                "in this process, and this optimizer (of optax.inject_hyperparams, or "
                "without init) cannot tell which is its own: the compiler's partitioner "
                "decides where Newton–Schulz runs. Pass param_shardings.",
                stacklevel=2,
            )
            return None
        return _common.get(key)


def _annotations(boxes: list[tuple[Any, Any]]) -> _Annotations:
    """The annotations of boxes, each after its path."""
    specs = {
        (names_on(path), np.shape(unbox(box))): annotated_spec(box)
        for path, box in boxes
        if jax.tree.leaves(box)
    }
    if all(spec is None for spec in specs.values()):
        return dict(specs)
    # If others are annotated, Flax takes one without annotation for replicated.
    return {key: spec or PartitionSpec() for key, spec in specs.items()}


def _given_specs(given: PyTree, tree: PyTree, mesh: AbstractMesh) -> PyTree:
    def of_subtree(path: Any, sharding: Any, subtree: PyTree) -> PyTree:
        spec = _spec(sharding)
        return jax.tree.map_with_path(
            lambda rest, leaf: _fitting(spec, path + rest, leaf, mesh), subtree
        )

    given = mask_like(given, tree, _says_sharding)
    try:
        jax.tree.map(lambda *_: None, given, tree, is_leaf=_says_sharding)
    except ValueError as error:
        raise ValueError(
            "param_shardings must be a tree of the parameters' structure, or a prefix of "
            "it, with a jax.sharding.PartitionSpec (not a tuple) or NamedSharding for "
            f"each leaf: {error}"
        ) from error
    return jax.tree.map_with_path(of_subtree, given, tree, is_leaf=_says_sharding)


def _says_sharding(node: Any) -> bool:
    return node is None or is_box(node) or isinstance(node, NamedSharding | PartitionSpec)


def _is_placed(node: Any) -> bool:
    return _says_sharding(node) or hasattr(node, "sharding")


def _fitting(
    spec: PartitionSpec, path: Any, leaf: Any, mesh: AbstractMesh
) -> PartitionSpec:
    misfit = _misfit(spec, np.shape(leaf), mesh)
    if misfit:
        raise ValueError(
            f"param_shardings has {spec} for parameter {name_and_shape(path, leaf)}: "
            f"{misfit}. Pass the shardings that the parameters have."
        )
    return spec


def _spec(node: Any) -> PartitionSpec:
    """The spec of a sharding, or of an array or box that has one; else replicated."""
    if isinstance(node, PartitionSpec):
        return node
    annotated = annotated_spec(node) if is_box(node) else None
    if annotated is not None:
        return annotated
    bare = unbox(node)
    sharding = getattr(bare, "sharding", bare)
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        _checks.refuse(
            "param_shardings",
            node,
            "pass a tree of jax.sharding.NamedSharding or PartitionSpec, or of arrays "
            "(or jax.ShapeDtypeStruct) that have shardings",
        )
    return PartitionSpec()


def _misfit(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh
) -> str | None:
    if len(spec) > len(shape):
        return f"it has {len(shape)} axes"
    axes = typed_sharding.axes_of(spec, len(shape))
    named = [name for names in axes for name in names]
    unknown = set(named).difference(mesh.axis_names)
    if unknown:
        return f"the mesh has the axes {mesh.axis_names}"
    mapped = meshes.mapped_axes().intersection(named)
    if mapped:
        return f"jax.vmap maps over {sorted(mapped)} here"
    if len(set(named)) < len(named):
        return "an axis of the mesh is named twice"
    for size, names in zip(shape, axes, strict=True):
        if size % math.prod(mesh.shape[name] for name in names):
            return f"{names} of the mesh {dict(mesh.shape)} do not divide {size}"
    return None
