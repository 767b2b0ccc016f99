"""Stacks of matrices of one shape from many leaves, for Newton–Schulz.

An accelerator runs few large kernels faster than many small ones, and they compile once
for all layers. The price is a copy into the stack, a copy out of it, and its memory,
which is limited. A CPU takes the matrices of a stack one after another, and saves only
compile time. There the number of leaves in a stack is limited, too, since XLA compiles
one kernel for each position in it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.sharding import typed_sharding


class StackKey(NamedTuple):
    """What arrays of matrices in one stack have in common.

    The shape is ``(*batch, m, n)`` with ``m <= n``: tall matrices are transposed. The
    sharding is that of the batch axes, where types have it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: tuple[Any, ...] = ()

    @classmethod
    def of(cls, x: jax.Array) -> "StackKey":
        """The key of an array of shape ``(*batch, m, n)``."""
        batch = tuple(typed_sharding.spec(x)[:-2])
        return cls((*x.shape[:-2], *sorted(x.shape[-2:])), x.dtype, batch)


def plan_stacks(
    keys: Sequence[StackKey], stack_bytes: int, stack_length: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Plan which arrays share a stack.

    They are stacked along a new axis. Axes are never merged, since arrays may be sharded
    over them: layers of experts share a stack with layers of experts alone. An array that
    exceeds ``stack_bytes`` is alone, and a stack has at most ``stack_length`` arrays.

    Returns the arrays' indices, one tuple per stack and each index once, in order. Stacks
    of one key differ in length by at most one.
    """
    alike: dict[StackKey, list[int]] = {}
    for index, key in enumerate(keys):
        alike.setdefault(key, []).append(index)
    stacks = []
    for key, members in alike.items():
        nbytes = math.prod(key.shape) * key.dtype.itemsize
        fitting = max(1, stack_bytes // max(1, nbytes))
        fitting = min(fitting, stack_length or fitting)
        parts = np.array_split(members, math.ceil(len(members) / fitting))
        stacks += [tuple(part.tolist()) for part in parts]
    return tuple(sorted(stacks))


def stack(
    matrices: Sequence[jax.Array], plan: Sequence[Sequence[int]]
) -> list[jax.Array]:
    """Stacks of arrays ``(*batch, m, n)``; an array that is alone is not stacked."""
    stacks = []
    for members in plan:
        xs = [matrices[i] for i in members]
        wide = (x if x.shape[-2] <= x.shape[-1] else x.mT for x in xs)
        stacks.append(xs[0] if len(xs) == 1 else jnp.stack([*wide]))
    return stacks


def unstack(
    stacks: Sequence[jax.Array],
    plan: Sequence[Sequence[int]],
    like: Sequence[jax.Array],
) -> list[jax.Array]:
    """Invert :func:`stack`, to arrays of the shapes of ``like``."""
    xs: dict[int, jax.Array] = {}
    for members, stacked in zip(plan, stacks, strict=True):
        parts = [stacked] if len(members) == 1 else stacked
        for i, x in zip(members, parts, strict=True):
            xs[i] = x if x.shape == like[i].shape else x.mT
    return [xs[i] for i in range(len(like))]
