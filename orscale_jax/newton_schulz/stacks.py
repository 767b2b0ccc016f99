"""Polar factors of many arrays on one device: stacks of matrices, a few chunks at a time.

An accelerator runs few large kernels faster than many small ones, and they compile once
for all layers. The price of a stack of matrices of one shape is a copy into it, a copy
out of it, and its memory, which is limited. A CPU takes the matrices of a stack one after
another, and saves only compile time; the leaves in a stack are limited, since XLA
compiles one kernel for each position in it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


def on_one_device(platform: Platform, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Polar factors of arrays ``(*batch, m, n)``, in the platform's dtype."""
    packed = platform.pack(xs)
    limits = platform.limits
    keys = [StackKey.of(x) for x in packed]
    plan = plan_stacks(keys, limits.stack_bytes, limits.stack_length)
    stacks = stack(packed, plan)
    if platform.normalizes == "stack":
        stacks = platform.normalized([*map(by_rows, stacks)])
    qs = polar_in_chunks(platform, stacks, [None] * len(stacks))
    if platform.normalizes == "stack":
        qs = [*map(by_rows, qs)]
    return platform.unpack(unstack(qs, plan, like=xs))


def plan_stacks(
    keys: Sequence[StackKey], stack_bytes: int, stack_length: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Plan which arrays share a stack: their indices, one tuple for each stack.

    Arrays of one key are stacked along a new axis, in stacks of about one length. Axes
    are never merged, since arrays may be sharded over them: layers of experts share a
    stack with layers of experts alone. An array that exceeds ``stack_bytes`` is alone.
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
        if len(xs) > 1:
            xs = [jnp.stack([x if x.shape[-2] <= x.shape[-1] else x.mT for x in xs])]
        stacks += xs
    return stacks


def unstack(
    stacks: Sequence[jax.Array], plan: Sequence[Sequence[int]], like: Sequence[jax.Array]
) -> list[jax.Array]:
    """Invert :func:`stack`, to arrays of the shapes of ``like``."""
    xs: dict[int, jax.Array] = {}
    for members, stacked in zip(plan, stacks, strict=True):
        parts = [stacked] if len(members) == 1 else stacked
        for i, x in zip(members, parts, strict=True):
            xs[i] = x if x.shape == like[i].shape else x.mT
    return [xs[i] for i in range(len(like))]


def polar_in_chunks(
    platform: Platform, xs: Sequence[jax.Array], columns: Sequence[Any]
) -> list[jax.Array]:
    """Polar factors of packed matrices, a few chunks at a time, which bounds memory.

    Only batch axes are divided, except those that are sharded by their types: each device
    already holds a part of these. ``columns`` are, for each array, the devices that hold
    the other columns of its matrices; None for whole matrices.
    """
    iteration, limits = platform.iteration, platform.limits
    if platform.normalizes == "matrix":
        return [one_by_one(x, iteration, on) for x, on in zip(xs, columns, strict=True)]
    qs: list[list[jax.Array]] = [[] for _ in xs]
    chunks = []
    for i, x in enumerate(xs):
        # Along the first axis; 0 if one entry exceeds the limit, and has batch axes.
        each, length = x.size // len(x) * x.dtype.itemsize, len(x)
        divisible = x.ndim > 2 and not typed_sharding.is_sharded(x)
        if divisible and length * each > limits.chunk_bytes:
            length = max(int(x.ndim == 3), limits.chunk_bytes // each)
        if len(x) > limits.interleave * length:
            qs[i] = [_in_a_loop(platform, x, length)]
        else:
            chunks += [(i, x[at : at + length]) for at in range(0, len(x), length)]
    for turn in _turns(chunks, columns, limits):
        of_turn = [columns[i] for i, _ in turn]
        results = newton_schulz([chunk for _, chunk in turn], iteration, of_turn)
        for (i, _), q in zip(turn, results, strict=True):
            qs[i].append(q)
    return [some[0] if len(some) == 1 else jnp.concatenate(some) for some in qs]


def _turns(
    chunks: Sequence[tuple[int, jax.Array]], columns: Sequence[Any], limits: Limits
) -> list[list[tuple[int, jax.Array]]]:
    """The chunks that go through Newton–Schulz together."""
    if not limits.joint_grams:
        each = limits.interleave
        return [[*chunks[at : at + each]] for at in range(0, len(chunks), each)]

    def form(chunk: tuple[int, jax.Array]) -> tuple[int, bool]:
        m, n = sorted(chunk[1].shape[-2:])
        return m, is_cheaper(m, n)

    turns: list[list[tuple[int, jax.Array]]] = []
    for (m, _), alike in itertools.groupby(sorted(chunks, key=form, reverse=True), form):
        room = 0.0
        for i, x in alike:
            grams = math.prod(x.shape[:-2]) * m * m
            share = max(grams / limits.joint_grams, x.nbytes / limits.chunk_bytes)
            if columns[i] is not None or typed_sharding.is_sharded(x):
                share = math.inf  # Alone.
            if share > room:
                turns.append([])
                room = 1.0
            turns[-1].append((i, x))
            room -= share
    return turns


def _in_a_loop(platform: Platform, x: jax.Array, length: int) -> jax.Array:
    """The factors of one array: in a loop over equal chunks, then of the remainder."""

    def in_chunks(x: jax.Array) -> jax.Array:
        return polar_in_chunks(platform, [x], [None])[0]

    if not length:
        return jax.lax.map(in_chunks, x)
    interleave = platform.limits.interleave
    turns = math.ceil(len(x) / (length * interleave))
    length = math.ceil(len(x) / (turns * interleave))
    turns = len(x) // (length * interleave)
    whole = turns * interleave * length

    def turn(i: jax.Array, x: jax.Array) -> jax.Array:
        starts: list[Any] = [(i * interleave + k) * length for k in range(interleave)]
        chunks = [jax.lax.dynamic_slice_in_dim(x, start, length) for start in starts]
        results = newton_schulz(chunks, platform.iteration)
        for start, q in zip(starts, results, strict=True):
            x = jax.lax.dynamic_update_slice_in_dim(x, q, start, axis=0)
        return x

    results = jax.lax.fori_loop(0, turns, turn, x[:whole])
    if whole == len(x):
        return results
    return jnp.concatenate([results, in_chunks(x[whole:])])
