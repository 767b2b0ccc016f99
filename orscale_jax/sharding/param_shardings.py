"""The shardings of parameters on Auto axes, which their types do not hold.

They come from an argument, or from the annotations of Flax and Haliax: ``init`` is given
the parameters in their boxes, and keeps the annotations for ``update``, to which
``nnx.Optimizer`` gives bare arrays. Shardings only determine where Newton–Schulz runs:
arrays that are sharded otherwise are resharded.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax import _checks
from orscale_jax.sharding import meshes, typed_sharding
from orscale_jax.trees.boxes import annotated_spec, is_box, unbox
from orscale_jax.trees.masks import mask_like
from orscale_jax.trees.names import Path, name_and_shape, names_on

PyTree: TypeAlias = Any
ParamShardings: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None

# By the path and shape of a parameter. The optimizer may be another object in ``update``:
# optax.inject_hyperparams builds it anew for every step.
_annotated: dict[tuple[Path, tuple[int, ...]], PartitionSpec] = {}


def note_annotations(params: PyTree) -> None:
    """Keep the annotations of parameters until those of the same names replace them."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    boxes = [(path, node) for path, node in nodes if is_box(node)]
    annotations = {
        (names_on(path), np.shape(unbox(box))): annotated_spec(box)
        for path, box in boxes
        if jax.tree.leaves(box)
    }
    says = any(spec is not None for spec in annotations.values())
    for key, spec in annotations.items():
        # If others are annotated, Flax takes one without annotation for replicated.
        if says:
            _annotated[key] = spec or PartitionSpec()
        else:
            _annotated.pop(key, None)


def specs_of(given: ParamShardings, tree: PyTree, mesh: AbstractMesh) -> PyTree | None:
    """The specs of the leaves of a tree on a mesh, or None if they are not known.

    Args:
      given: See ``param_shardings`` of :func:`orscale_jax.orscale`.
      tree: The gradients, without boxes.
      mesh: The mesh that they are on.

    Raises:
      ValueError: If what is given does not fit the tree or the mesh.
    """
    if given is not None:
        return _given_specs(given(tree) if callable(given) else given, tree, mesh)

    def annotated(path: Any, leaf: Any) -> PartitionSpec | str:
        spec = _annotated.get((names_on(path), np.shape(leaf)))
        return unknown if spec is None or _misfit(spec, np.shape(leaf), mesh) else spec

    unknown = "unknown"
    specs = jax.tree_util.tree_map_with_path(annotated, tree)
    return None if unknown in jax.tree.leaves(specs) else specs


def check(given: ParamShardings) -> None:
    """Refuse a mesh, for which there is another argument."""
    if isinstance(given, Mesh | AbstractMesh):
        _checks.refuse("param_shardings", given, "pass a mesh as mesh=")


def _given_specs(given: PyTree, tree: PyTree, mesh: AbstractMesh) -> PyTree:
    def of_subtree(path: Any, sharding: Any, subtree: PyTree) -> PyTree:
        spec = _spec(sharding)
        return jax.tree_util.tree_map_with_path(
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
    return jax.tree_util.tree_map_with_path(
        of_subtree, given, tree, is_leaf=_says_sharding
    )


def _says_sharding(node: Any) -> bool:
    return node is None or is_box(node) or isinstance(node, NamedSharding | PartitionSpec)


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
