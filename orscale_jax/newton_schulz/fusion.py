"""Small results of many arrays in few GPU kernels, and layouts that exports leave alone.

XLA merges kernels that read a common array. Otherwise each leaf would have its own kernel
for a small result such as its ratio, and a kernel takes longer to launch than to run.

A GPU reduces a large matrix in two kernels, the second of which has next to nothing to
do. Here each large array is reduced along its last axis first; then one kernel finishes
all arrays of one shape. Small arrays of one shape are stacked and reduced by one kernel.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from orscale_jax.sharding import typed_sharding

# The names of GPUs, as of ``jax.lax.platform_dependent``.
GPUS = ("cuda", "rocm")

# The most entries that XLA reduces to one in a single kernel.
_IN_ONE_KERNEL = 2**14
# The most entries of an array that is copied rather than given a kernel.
_SMALL = 2**14
# XLA concatenates up to 128 arrays in one kernel. It merges kernels that read different
# slices of an array only if the array has less than 1 KiB, 128 numbers of 8 bytes.
_ARRAYS = 126


def fuse_small_on_gpu(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays; on GPUs small ones of one shape are slices of a common array.

    Large arrays, and arrays on a mesh, are left alone.
    """
    return _on_gpus(_as_slices, list, xs)


def read_together(xs: Sequence[jax.Array], like: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays; accelerators read vectors, which must be replicated, together.

    Otherwise a TPU would take a kernel for each, and so would a GPU, to copy what is then
    replaced. A GPU reads those together that belong to arrays ``like`` of one shape.
    """
    vectors = {i: x for i, x in enumerate(xs) if x.ndim == 1}
    if len(vectors) < 2:
        return [*xs]
    shapes = [like[i].shape for i in vectors]

    def in_a_row(xs: Sequence[jax.Array]) -> Any:  # A TPU copies what it stacks.
        row = jax.lax.optimization_barrier(jnp.concatenate(xs))
        return [*jax.lax.split(row, [x.size for x in xs])]

    on: dict[str, Any] = {"cpu": list, "default": in_a_row}
    on |= dict.fromkeys(GPUS, lambda xs: _as_slices(xs, shapes))
    read = jax.lax.platform_dependent([*vectors.values()], **on)
    vectors |= zip(vectors, read, strict=True)
    return [vectors.get(i, x) for i, x in enumerate(xs)]


def _as_slices(xs: Sequence[jax.Array], like: Sequence[Any] = ()) -> list[jax.Array]:
    """The same arrays; small ones of equal types and ``like`` are cut from one array."""
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        if x.size <= _SMALL:
            alike.setdefault((jax.typeof(x), *like[i : i + 1]), []).append(i)
    results = [*xs]
    for members in alike.values():
        for start in range(0, len(members), _ARRAYS):
            some = members[start : start + _ARRAYS]
            if len(some) == 1:
                continue
            # The first one twice, so that the stack is not read whole: XLA would compute
            # everything at once, and cut the result with a kernel for each.
            stack = jnp.stack([xs[i] for i in (*some, some[0])])
            for i, x in zip(some, jax.lax.optimization_barrier(stack), strict=False):
                results[i] = x
    return results


def sum_all(
    groups: Sequence[Sequence[jax.Array]], axes: Sequence[tuple[int, ...]]
) -> list[Sequence[jax.Array]]:
    """The sums of every array over its group's axes, which are in ascending order.

    A group's arrays have one shape, and a GPU computes their sums in one pass: what
    several of them are made of is read once. On a mesh each group is reduced alone, since
    arrays of one shape may be sharded differently.
    """

    def alone(groups: Sequence[Sequence[jax.Array]]) -> list[Sequence[jax.Array]]:
        return [
            [jnp.sum(x, axis=along) for x in group]
            for group, along in zip(groups, axes, strict=True)
        ]

    def together(groups: Sequence[Sequence[jax.Array]]) -> list[Sequence[jax.Array]]:
        results: dict[int, Sequence[jax.Array]] = {}
        partial: dict[int, Sequence[jax.Array]] = {}
        alike: dict[Any, list[int]] = {}
        for i, (group, along) in enumerate(zip(groups, axes, strict=True)):
            if group[0].size <= _IN_ONE_KERNEL:
                partial[i], rest = group, along
            elif math.prod(group[0].shape[axis] for axis in along) <= _IN_ONE_KERNEL:
                results[i] = _in_one_pass(group, along)
                continue
            else:
                partial[i], rest = _in_one_pass(group, along[-1:]), along[:-1]
            # Not with arrays of other shapes, whose results would then be computed, and
            # their operands kept, until the last of all.
            kind = group[0].shape, *map(jax.typeof, partial[i]), rest
            alike.setdefault(kind, []).append(i)
        for (*_, rest), members in alike.items():
            stack = jnp.stack([x for i in members for x in partial[i]])
            finished = iter(jnp.sum(stack, axis=tuple(1 + axis for axis in rest)))
            results |= {i: [next(finished) for _ in partial[i]] for i in members}
        return [results[i] for i in range(len(groups))]

    return _on_gpus(together, alone, groups)


def _in_one_pass(xs: Sequence[jax.Array], axes: tuple[int, ...]) -> Sequence[jax.Array]:
    if len(xs) == 1:
        return [jnp.sum(xs[0], axis=axes)]
    zeros = [jnp.zeros((), x.dtype) for x in xs]
    return jax.lax.reduce([*xs], zeros, lambda x, y: [*map(jnp.add, x, y)], axes)


def with_layout(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Order an array's axes in memory, the outermost first; exports choose their own."""
    return _layout_p.bind(x, order=tuple(order))


def by_rows(x: jax.Array) -> jax.Array:
    return with_layout(x, range(x.ndim))


def _on_gpus(
    together: Callable[[Any], list[Any]],
    alone: Callable[[Any], list[Any]],
    xs: Sequence[Any],
) -> list[Any]:
    """``together`` on a GPU if arrays can be merged there, else ``alone``."""
    if len(xs) < 2 or typed_sharding.mesh_of(jax.tree.leaves(xs), None) is not None:
        return alone(xs)
    on_gpus: dict[str, Any] = dict.fromkeys(GPUS, together)
    return jax.lax.platform_dependent(list(xs), **on_gpus, default=alone)


# jax.export refuses layout constraints, whose names are not guaranteed to be stable.
_layout_p = Primitive("layout_unless_exported")


def _lower_layout(ctx: Any, x: Any, *, order: tuple[int, ...]) -> Any:
    exported = bool(ctx.module_context.lowering_parameters.for_export)

    def constrained(x: jax.Array) -> jax.Array:
        return x if exported else with_layout_constraint(x, Layout(order))

    return mlir.lower_fun(constrained, multiple_results=False)(ctx, x)


def _batch_layout(operands: Any, axes: Any, *, order: tuple[int, ...]) -> Any:
    outermost = jnp.moveaxis(operands[0], axes[0], 0)
    return with_layout(outermost, (0, *(axis + 1 for axis in order))), 0


_layout_p.def_impl(lambda x, *, order: with_layout_constraint(x, Layout(order)))
_layout_p.def_abstract_eval(lambda x, *, order: x)
ad.deflinear2(_layout_p, lambda x, _, **params: [_layout_p.bind(x, **params)])
batching.primitive_batchers[_layout_p] = _batch_layout
mlir.register_lowering(_layout_p, _lower_layout)
