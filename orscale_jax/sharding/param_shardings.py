"""The shardings of parameters on Auto axes, which their types do not hold.

They come from an argument, or from the annotations of Flax and Haliax: ``init`` sees the
parameters in their boxes, and keeps the annotations for ``update``, to which
``nnx.Optimizer`` gives bare arrays. Those of all optimizers are kept as well, as long as
the process: :func:`optax.inject_hyperparams` builds its optimizer anew for every step, so
that the one in ``update`` was never initialized. Of these the last ones count, and only
where no others contradict them.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax import _checks
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, annotated_spec, is_box, unbox
from orscale_jax.trees.names import Path, name_and_shape, names_on
from orscale_jax.trees.nodes import broadcast_prefix, is_function

ParamShardings: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None

# A parameter's path and shape.
_Key: TypeAlias = tuple[Path, tuple[int, ...]]

UNKNOWN = "unknown: the compiler's partitioner divides the products"

# All annotations of this process, the last one last; None of a box that says nothing.
_common: dict[_Key, list[PartitionSpec | None]] = {}


class ParamSpecs:
    """What an optimizer knows of the shardings of its parameters."""

    def __init__(self, given: ParamShardings) -> None:
        """Take ``param_shardings`` of :func:`orscale_jax.orscale`."""
        if isinstance(given, Mesh | AbstractMesh):
            _checks.refuse("param_shardings", given, "pass a mesh as mesh=")
        self._given = given
        # Until init has seen boxes.
        self._annotated: dict[_Key, PartitionSpec | None] | None = None

    def note_annotations(self, params: PyTree) -> None:
        """Keep the annotations of parameters in boxes instead of earlier ones."""
        specs = {
            (names_on(path), np.shape(unbox(node))): annotated_spec(node)
            for path, node in jax.tree.leaves_with_path(params, is_leaf=is_box)
            if is_box(node) and jax.tree.leaves(node)
        }
        if not specs:
            return
        if any(spec is not None for spec in specs.values()):
            # If others are annotated, Flax takes one without annotation for replicated.
            specs = {key: spec or PartitionSpec() for key, spec in specs.items()}
        self._annotated = specs
        for key, spec in specs.items():
            seen = _common.setdefault(key, [])
            if spec in seen:
                seen.remove(spec)
            seen.append(spec)

    def on(self, mesh: AbstractMesh, tree: PyTree) -> PyTree | None:
        """The specs of a tree of bare leaves on a mesh; None if not all are known."""
        if self._given is not None:
            given = self._given
            if is_function(given, lambda x: _says_sharding(x) or hasattr(x, "sharding")):
                given = given(tree)
            return _given_specs(given, tree, mesh)
        specs = []
        for path, leaf in jax.tree.leaves_with_path(tree):
            key = names_on(path), np.shape(leaf)
            seen = _common.get(key, [None])
            if self._annotated is not None:
                seen = [self._annotated.get(key)]
            if sum(spec is not None for spec in seen) > 1:
                warnings.warn(
                    f"parameter {name_and_shape(path, leaf)} has been annotated in two "
                    "ways in this process, and this optimizer (of "
                    "optax.inject_hyperparams, or without init) cannot tell which is its "
                    "own: the compiler's partitioner decides where Newton–Schulz runs. "
                    "Pass param_shardings.",
                    stacklevel=2,
                )
                seen = [None]
            spec = seen[-1]
            fits = spec is not None and not _misfit(spec, np.shape(leaf), mesh)
            specs.append(spec if fits else None)
        if None in specs:
            return None
        return jax.tree.unflatten(jax.tree.structure(tree), specs)

    def source(self, mesh: AbstractMesh, tree: PyTree) -> str:
        """Where the specs of a tree on a mesh of Auto axes come from, in words."""
        if self._given is not None:
            return "from param_shardings"
        return UNKNOWN if self.on(mesh, tree) is None else "from annotations"


def _says_sharding(node: Any) -> bool:
    return node is None or is_box(node) or isinstance(node, NamedSharding | PartitionSpec)


def _given_specs(given: PyTree, tree: PyTree, mesh: AbstractMesh) -> PyTree:
    """A spec for each leaf of a tree, from a prefix of it."""

    def spec_of(path: Any, leaf: Any, node: Any) -> PartitionSpec:
        spec = annotated_spec(node) if is_box(node) else None
        if spec is None:
            bare = unbox(node)
            sharding = getattr(bare, "sharding", bare)
            spec = getattr(sharding, "spec", sharding)
            if spec is None or isinstance(spec, jax.sharding.Sharding):
                spec = PartitionSpec()
            elif not isinstance(spec, PartitionSpec):
                _checks.refuse(
                    "param_shardings",
                    node,
                    "pass a tree of jax.sharding.NamedSharding or PartitionSpec, or of "
                    "arrays (or jax.ShapeDtypeStruct) that have shardings",
                )
        if misfit := _misfit(spec, np.shape(leaf), mesh):
            raise ValueError(
                f"param_shardings has {spec} for parameter {name_and_shape(path, leaf)}: "
                f"{misfit}. Pass the shardings that the parameters have."
            )
        return spec

    misfit = (
        "param_shardings must be a tree of the parameters' structure, or a prefix of it, "
        "with a jax.sharding.PartitionSpec (not a tuple) or NamedSharding for each leaf"
    )
    nodes = broadcast_prefix(given, tree, misfit, _says_sharding)
    return jax.tree.map_with_path(spec_of, tree, nodes)


def _misfit(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh
) -> str | None:
    """Why an array of this shape cannot be sharded so."""
    if len(spec) > len(shape):
        return f"it has {len(shape)} axes"
    axes = typed_sharding.axes_of(spec, len(shape))
    named = [name for names in axes for name in names]
    if set(named).difference(mesh.axis_names):
        return f"the mesh has the axes {mesh.axis_names}"
    if mapped := typed_sharding.mapped_axes().intersection(named):
        return f"jax.vmap maps over {sorted(mapped)} here"
    if len(set(named)) < len(named):
        return "an axis of the mesh is named twice"
    for size, names in zip(shape, axes, strict=True):
        if size % math.prod(mesh.shape[name] for name in names):
            return f"{names} of the mesh {dict(mesh.shape)} do not divide {size}"
    return None
