"""The shardings of parameters on Auto axes, which their types do not hold.

They come from an argument, or from the parameters that ``init`` sees: from annotations of
Flax and Haliax, from arrays that are placed, and from types where ``state_shardings``
traces it. An optimizer keeps what its ``init`` has seen for its own ``update``, which
sees bare arrays and, under ``jax.jit``, no shardings.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax import validate
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, annotated_spec, is_box, unbox
from orscale_jax.trees.names import Path, name_and_shape, names_on
from orscale_jax.trees.nodes import TraceLog, broadcast_prefix, is_function

ParamShardings: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None

# A parameter's path and shape, and the axes of its mesh; None for that of annotations.
_Key: TypeAlias = tuple[Path, tuple[int, ...], tuple[tuple[str, int], ...] | None]


# Of optimizers that learn: what they knew before.
_learned: TraceLog[tuple["ParamSpecs", Any, Any]] = TraceLog("learned")


@contextlib.contextmanager
def audit() -> Iterator[None]:
    """A context at whose end optimizers forget what they have learned in it.

    One process of several may audit an optimizer alone. If the optimizer knew more there,
    the processes would compile different programs, and wait for each other forever.
    """
    with _learned.open() as before:
        try:
            yield
        finally:
            for specs, placed, typed in reversed(before):
                specs._placed, specs._typed = placed, typed


class ParamSpecs:
    """What an optimizer knows of the shardings of its parameters.

    A plain object of the optimizer's, equal to itself alone: functions that close over it
    stay hashable, and can be pickled.
    """

    def __init__(self, param_shardings: ParamShardings) -> None:
        """Take ``param_shardings`` of :func:`orscale_jax.orscale`."""
        if isinstance(param_shardings, Mesh | AbstractMesh):
            validate.refuse("param_shardings", param_shardings, "pass a mesh as mesh=")
        self._given = param_shardings
        # The specs that init has seen, the last one last: of arrays, and of types.
        self._placed: dict[_Key, list[PartitionSpec]] = {}
        self._typed: dict[_Key, PartitionSpec] = {}

    def learn(self, params: PyTree) -> None:
        """Keep the shardings of parameters, boxed or bare, that ``init`` sees."""
        _learned.note((self, self._placed.copy(), self._typed.copy()))
        nodes = jax.tree.leaves_with_path(params, is_leaf=is_box)
        nodes = [(path, node) for path, node in nodes if jax.tree.leaves(node)]
        boxes = [annotated_spec(node) for _, node in nodes if is_box(node)]
        annotated = any(spec is not None for spec in boxes)
        for path, node in nodes:
            leaf = unbox(node)
            if is_box(node):  # The last boxes count.
                self._placed.pop(_key(path, leaf), None)
            if annotated and is_box(node):
                # Flax takes one without annotation beside others for replicated.
                spec = annotated_spec(node) or PartitionSpec()
                self._placed[_key(path, leaf)] = [spec]
            elif (sharding := _sharding(leaf)) is not None:
                key = _key(path, leaf, sharding.mesh)
                axes = typed_sharding.axes_of(sharding.spec, np.ndim(leaf))
                spec = PartitionSpec(*(names or None for names in axes))
                if isinstance(leaf, jax.core.Tracer):
                    self._typed[key] = spec
                else:
                    others = (x for x in self._placed.get(key, []) if x != spec)
                    self._placed[key] = [*others, spec]

    def given(self, tree: PyTree, mesh: AbstractMesh | None) -> list[Any] | None:
        """The specs of the leaves by the argument, if there is one; a mesh fits them."""
        if (given := self._given) is None:
            return None
        if is_function(given, lambda x: _says_sharding(x) or hasattr(x, "sharding")):
            given = given(tree)
        return jax.tree.leaves(_given_specs(given, tree, mesh))

    def on(self, mesh: AbstractMesh, tree: PyTree) -> list[PartitionSpec | None]:
        """The specs of the leaves of a bare tree on a mesh; None where nobody says it."""
        if (given := self.given(tree, mesh)) is not None:
            return given
        specs, unknown, otherwise = [], [], []
        for path, leaf in jax.tree.leaves_with_path(tree):
            spec = self._learned(path, leaf, mesh)
            specs.append(spec)
            seen = self._placed.get(_key(path, leaf, mesh), [])
            name = f"parameter {name_and_shape(path, leaf)}"
            if spec is None:
                unknown.append(name)
            elif len(seen) > 1 and spec == seen[-1]:
                otherwise.append(f"{name} as {seen[-2]} and as {spec}")
        axes = f"on the mesh {dict(mesh.shape)}"
        if otherwise:
            warnings.warn(
                f"init has seen {otherwise[0]} {axes}. The optimizer assumes the latter: "
                "use an optimizer for each model, or pass param_shardings.",
                stacklevel=2,
            )
        if unknown:
            others = f" and {len(unknown) - 1} others" if unknown[1:] else ""
            warnings.warn(
                f"the sharding of {unknown[0]}{others} {axes} is not known, since types "
                "do not hold it on Auto axes. The optimizer assumes one, and updates "
                "have it where out_shardings do not say otherwise: pass param_shardings, "
                "or call init with placed parameters (outside of jax.jit), or "
                "state_shardings, before.",
                stacklevel=2,
            )
        return specs

    def _learned(self, path: Any, leaf: Any, mesh: AbstractMesh) -> PartitionSpec | None:
        """The spec of a leaf that fits the mesh, from the surest source that has one."""
        sharding = None if isinstance(leaf, jax.core.Tracer) else _sharding(leaf)
        key = _key(path, leaf, mesh)
        sources = [
            *self._placed.get(_key(path, leaf), []),
            *self._placed.get(key, [])[-1:],
            self._typed.get(key),
            sharding.spec
            if sharding is not None and sharding.mesh.shape == mesh.shape
            else None,
        ]
        fitting = (spec for spec in sources if spec is not None)
        return next((s for s in fitting if not _misfit(s, np.shape(leaf), mesh)), None)


def _key(path: Any, leaf: Any, mesh: Mesh | AbstractMesh | None = None) -> _Key:
    axes = None if mesh is None else tuple(mesh.shape.items())
    return names_on(path), np.shape(leaf), axes


def _sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of a placed array, or that of the type of a traced one.

    On Auto axes the type of a traced array says nothing.
    """
    if isinstance(leaf, jax.core.Tracer):
        typed: Any = jax.typeof(leaf).sharding
        known = typed.mesh.are_all_axes_explicit and not typed.mesh.empty
        return typed if known else None
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _says_sharding(node: Any) -> bool:
    return node is None or is_box(node) or isinstance(node, NamedSharding | PartitionSpec)


def _given_specs(prefix: PyTree, tree: PyTree, mesh: AbstractMesh | None) -> PyTree:
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
                validate.refuse(
                    "param_shardings",
                    node,
                    "pass a tree of jax.sharding.NamedSharding or PartitionSpec, or of "
                    "arrays (or jax.ShapeDtypeStruct) that have shardings",
                )
        if mesh is not None and (misfit := _misfit(spec, np.shape(leaf), mesh)):
            raise ValueError(
                f"param_shardings has {spec} for parameter {name_and_shape(path, leaf)}: "
                f"{misfit}. Pass the shardings that the parameters have."
            )
        return spec

    misfit = (
        "param_shardings must be a tree of the parameters' structure, or a prefix of it, "
        "with a jax.sharding.PartitionSpec (not a tuple) or NamedSharding for each leaf"
    )
    nodes = broadcast_prefix(prefix, tree, misfit, _says_sharding)
    return jax.tree.map_with_path(spec_of, tree, nodes)


def _misfit(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh
) -> str | None:
    """Why an array of this shape cannot be sharded so."""
    if len(spec) > len(shape):
        return "it has fewer axes"
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
