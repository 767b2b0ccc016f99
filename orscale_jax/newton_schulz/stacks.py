"""Polar factors of many arrays on one device: stacks of matrices, a few chunks at a time.

An accelerator runs few large kernels faster than many small ones, and they compile once
for all layers. The price of a stack of matrices of one shape is a copy into it, a copy
out of it, and its memory, which is limited. A CPU takes the matrices of a stack one after
another, and saves only compile time; the leaves in a stack are limited, since one kernel
fills it from all of them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.newton_schulz.arithmetic import Columns
from orscale_jax.newton_schulz.fusion import by_rows
from orscale_jax.newton_schulz.iteration import newton_schulz, one_by_one
from orscale_jax.newton_schulz.platforms import Limits, Platform
from orscale_jax.newton_schulz.restarts import is_cheaper
from orscale_jax.sharding import typed_sharding


class StackKey(NamedTuple):
    """What arrays of matrices in one stack have in common."""

    shape: tuple[int, ...]  # (*batch, m, n) with m <= n: tall matrices are transposed.
    dtype: np.dtype[Any]
    sharding: tuple[Any, ...] = ()  # Of the batch axes, where types have it.

    @classmethod
    def of(cls, x: jax.Array) -> "StackKey":
        """The key of an array of shape ``(*batch, m, n)``."""
        batch = tuple(typed_sharding.spec(x)[:-2])
        return cls((*x.shape[:-2], *sorted(x.shape[-2:])), x.dtype, batch)

    @property
    def side(self) -> tuple["StackKey", bool]:
        """All but the longer side, and which form of Newton–Schulz its length allows."""
        return self._replace(shape=self.shape[:-1]), is_cheaper(*self.shape[-2:])


def on_one_device(platform: Platform, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Polar factors of arrays ``(*batch, m, n)``, in the platform's dtype."""
    packed = platform.pack(xs)
    plan = plan_stacks([StackKey.of(x) for x in packed], platform.limits)
    stacks = stack(packed, plan)
    if platform.normalizes == "stack":
        stacks = platform.normalized([*map(by_rows, stacks)])
    qs = polar_in_chunks(platform, stacks, [None] * len(stacks))
    if platform.normalizes == "stack":
        qs = [*map(by_rows, qs)]
    return platform.unpack(unstack(qs, plan, xs, platform.hides_offsets))


def plan_stacks(keys: Sequence[StackKey], limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Plan which arrays share a stack: their indices, one tuple for each stack.

    Arrays of one key are stacked along a new axis, in stacks of about one length. Axes
    are never merged, since arrays may be sharded over them: layers of experts share a
    stack with layers of experts alone. An array that exceeds ``stack_bytes`` is alone.
    Small matrices that differ only in their longer side, and not in their form of
    Newton–Schulz, are padded to one length.
    """
    grams: Counter[Any] = Counter()  # The entries of those of one shorter side.
    for key in keys:
        grams[key.side] += math.prod(key.shape[:-1]) * key.shape[-2]
    alike: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        padded = grams[key.side] <= limits.padded_grams
        alike.setdefault(key.side if padded else key, []).append(index)
    stacks = []
    for members in alike.values():
        key = max((keys[i] for i in members), key=lambda key: key.shape[-1])
        nbytes = math.prod(key.shape) * key.dtype.itemsize
        fitting = max(1, limits.stack_bytes // max(1, nbytes))
        fitting = min(fitting, limits.stack_length or fitting)
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
        if len(xs) > 1:
            wide = [x if x.shape[-2] <= x.shape[-1] else x.mT for x in xs]
            length = max(x.shape[-1] for x in wide)
            for i, x in enumerate(wide):  # Zero columns stay zero.
                if x.shape[-1] < length:
                    missing = (0, length - x.shape[-1])
                    wide[i] = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), missing])
            xs = [jnp.stack(wide)]
        stacks += xs
    return stacks


def unstack(
    stacks: Sequence[jax.Array],
    plan: Sequence[Sequence[int]],
    like: Sequence[jax.Array],
    hides_offsets: bool = False,
) -> list[jax.Array]:
    """Invert :func:`stack`, to arrays of the shapes of ``like``."""
    apart = _at_hidden_offsets if hides_offsets else list
    xs: dict[int, jax.Array] = {}
    for members, stacked in zip(plan, stacks, strict=True):
        parts = [stacked] if len(members) == 1 else apart(stacked)
        for i, x in zip(members, parts, strict=True):
            longer = max(like[i].shape[-2:])
            x = x[..., :longer] if x.shape[-1] > longer else x
            xs[i] = x if x.shape == like[i].shape else x.mT
    return [xs[i] for i in range(len(like))]


def _at_hidden_offsets(stacked: jax.Array) -> list[jax.Array]:
    """The entries of a stack, at offsets that XLA does not know.

    XLA for CPUs compiles equal kernels once. A kernel that has an entry of a stack among
    its operands equals those for the other entries only if the offset is an operand, too.
    """
    first = stacked[(0,) * stacked.ndim]
    zero = (jnp.isnan(first) & (first > 0)).astype(np.int32)  # XLA does not find it out.
    indices = [np.array([i, i + 1], np.int32) for i in range(len(stacked))]
    return [
        jax.lax.dynamic_index_in_dim(stacked, jnp.asarray(index)[zero], keepdims=False)
        for index in indices
    ]


def polar_in_chunks(
    platform: Platform, xs: Sequence[jax.Array], columns: Sequence[Columns | None]
) -> list[jax.Array]:
    """Polar factors of packed matrices, a few chunks at a time, which bounds memory.

    Only batch axes are divided, except those that are sharded by their types: each device
    already holds a part of these. ``columns`` are those of :func:`newton_schulz`.
    """
    limits = platform.limits
    if platform.normalizes == "matrix":
        return [one_by_one(x, platform, on) for x, on in zip(xs, columns, strict=True)]
    qs: list[list[jax.Array]] = [[] for _ in xs]
    chunks = []
    for i, x in enumerate(xs):
        # The first axis is divided, unless that is not allowed or not necessary.
        fitting = limits.chunk_bytes // (x.size // len(x) * x.dtype.itemsize)
        if x.ndim == 2 or typed_sharding.is_sharded(x) or fitting >= len(x):
            length = len(x)
        elif fitting == 0 and x.ndim > 3:  # Each entry is divided in turn.
            qs[i] = [jax.lax.map(lambda x: polar_in_chunks(platform, [x], [None])[0], x)]
            continue
        else:
            length = max(1, fitting)
        if len(x) > limits.interleave * length:
            qs[i] = [_in_a_loop(platform, x, length)]
        else:
            chunks += [(i, x[at : at + length]) for at in range(0, len(x), length)]
    for at in range(0, len(chunks), limits.interleave):
        turn = chunks[at : at + limits.interleave]
        of_turn = [columns[i] for i, _ in turn]
        results = newton_schulz([chunk for _, chunk in turn], platform, of_turn)
        for (i, _), q in zip(turn, results, strict=True):
            qs[i].append(q)
    return [*map(jnp.concatenate, qs)]


def _in_a_loop(platform: Platform, x: jax.Array, length: int) -> jax.Array:
    """The factors of one array: in a loop over equal chunks, then of the remainder."""
    interleave = platform.limits.interleave
    turns = math.ceil(len(x) / (length * interleave))
    length = math.ceil(len(x) / (turns * interleave))
    turns = len(x) // (length * interleave)
    whole = turns * interleave * length

    def turn(i: jax.Array, x: jax.Array) -> jax.Array:
        starts: list[Any] = [(i * interleave + k) * length for k in range(interleave)]
        chunks = [jax.lax.dynamic_slice_in_dim(x, start, length) for start in starts]
        results = newton_schulz(chunks, platform)
        for start, q in zip(starts, results, strict=True):
            x = jax.lax.dynamic_update_slice_in_dim(x, q, start, axis=0)
        return x

    results = jax.lax.fori_loop(0, turns, turn, x[:whole])
    if whole == len(x):
        return results
    remainder = polar_in_chunks(platform, [x[whole:]], [None])
    return jnp.concatenate([results, *remainder])
