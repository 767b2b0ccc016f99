"""What each platform does with matrices: the rows of one table.

Matrices are packed; then they are stacked (on one device) or sent (on a mesh); then they
go through Newton–Schulz, a few chunks at a time.

An accelerator runs few large kernels faster than many small ones, and they compile once
for all layers. The price of a stack of matrices of one shape is a copy into it, a copy
out of it, and its memory, which is limited. A CPU takes the matrices of a stack one after
another, and saves only compile time; the leaves in a stack are limited, since XLA
compiles one kernel for each position in it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.newton_schulz.arithmetic import normalize_all
from orscale_jax.newton_schulz.fusion import reduce_all, slices_of_stacks, with_layout
from orscale_jax.newton_schulz.hardware import H100, TPU_V5P, VIRTUAL, Hardware
from orscale_jax.newton_schulz.iteration import NewtonSchulz, newton_schulz, one_by_one
from orscale_jax.sharding import typed_sharding

_FLOAT32, _BFLOAT16, _FLOAT16 = map(np.dtype, (np.float32, jnp.bfloat16, np.float16))
DEFAULTS = NewtonSchulz.of(5, "polar_express", None, "frobenius")


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


class Limits(NamedTuple):
    """How much goes through Newton–Schulz at once."""

    stack_bytes: int  # The largest stack.
    chunk_bytes: int  # The largest part of a stack that goes through at once.
    stack_length: int | None = None  # The most arrays in a stack; None for any number.
    # The number of chunks whose products are interleaved: while one product runs, the
    # operands of the next are fetched.
    interleave: int = 1


@dataclasses.dataclass(frozen=True)
class Platform:
    """The way from matrices to their polar factors on one platform.

    Attributes:
      dtype: The dtype of Newton–Schulz's operands.
      limits: How much goes through Newton–Schulz at once.
      hardware: The rates by which plans for a mesh are compared.
      normalizes: What is normalized at once: a ``"leaf"`` where it is computed, a
        ``"stack"`` in few and large kernels, or a ``"matrix"`` in the loop over them,
        with Gram matrices in strips.
      hides_coefficients: Whether the compiler may not see coefficients.
      keeps_layouts: Whether stacks are filled in place, and shards keep the layout of
        parameters.
      partitioner_calls_back: Whether the compiler's partitioner asks for the program of
        one device.
      settings: The Newton–Schulz iteration that the user has chosen.
    """

    dtype: np.dtype[Any]
    limits: Limits
    hardware: Hardware
    normalizes: Literal["leaf", "stack", "matrix"] = "leaf"
    hides_coefficients: bool = False
    keeps_layouts: bool = False
    partitioner_calls_back: bool = True
    settings: NewtonSchulz = DEFAULTS

    def with_traced(self, traced: Mapping[str, Any]) -> Self:
        """The platform with other values of the settings that are traced."""
        settings = dataclasses.replace(self.settings, **traced)
        return dataclasses.replace(self, settings=settings)

    @property
    def iteration(self) -> NewtonSchulz:
        """The settings as this platform runs them."""
        return dataclasses.replace(
            self.settings,
            dtype=self.dtype,
            by_strips=self.normalizes == "matrix",
            hide_coefficients=self.hides_coefficients,
        )

    def packed_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which matrices of this dtype are stacked and sent: the narrower.

        The range of the operands' dtype is enough for normalized matrices. Others need
        that of their own dtype: bfloat16 has the range of float32, float16 does not.
        """
        packed = self.dtype if self.dtype.itemsize < dtype.itemsize else dtype
        has_range = jnp.finfo(packed).maxexp >= jnp.finfo(dtype).maxexp
        return packed if has_range or self.normalizes != "matrix" else dtype

    def pack(self, xs: Sequence[jax.Array], to_send: bool = False) -> list[jax.Array]:
        """Matrices as one device stacks them, or as they are sent over a mesh."""
        if self.normalizes == "leaf":
            return self.normalized(xs)
        dtypes = [self.packed_dtype(x.dtype) for x in xs]
        if self.normalizes == "matrix":
            return [x.astype(dtype) for x, dtype in zip(xs, dtypes, strict=True)]
        # A GPU computes norms in kernels of their own. The matrices, which wait for the
        # norms, are rounded before: to two bytes with the range of float32, of which XLA
        # keeps no wider copy.
        rounded = [
            x.astype(dtype if dtype.itemsize != 2 or dtype == x.dtype else _BFLOAT16)
            for x, dtype in zip(xs, dtypes, strict=True)
        ]
        rounded = jax.lax.optimization_barrier(rounded)
        if to_send:
            return self.normalized(rounded, at_once=True)
        # Tall matrices are transposed as they are stacked. Without row-major order, XLA
        # propagates the transposed layout to gradient, momentum and weight.
        return [with_layout(x, range(x.ndim)) for x in rounded]

    def normalized(
        self, xs: Sequence[jax.Array], at_once: bool = False
    ) -> list[jax.Array]:
        """Normalized matrices, in the dtype in which they are stacked and sent.

        ``at_once``: none before the norms of all are known. Otherwise XLA adds the norms
        of one exchange to the all-reduce after another, and no exchange runs beside
        products.
        """

        def sums(xs: Sequence[jax.Array]) -> list[jax.Array]:
            totals = reduce_all(jnp.sum, xs, [(x.ndim - 2, x.ndim - 1) for x in xs])
            if at_once:
                totals = jax.lax.optimization_barrier(totals)
            return [jnp.expand_dims(each, (-2, -1)) for each in slices_of_stacks(totals)]

        unit = normalize_all(xs, self.iteration.arithmetic(), sums)
        return [x.astype(self.packed_dtype(x.dtype)) for x in unit]

    def unpack(self, qs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Factors as one device keeps them: of GPUs the tall ones in row-major order."""
        if self.normalizes != "stack":
            return qs
        return [
            with_layout(q, range(q.ndim)) if q.shape[-2] > q.shape[-1] else q for q in qs
        ]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """A stack of matrices that do not leave their device."""
        if not self.keeps_layouts:
            return jnp.concatenate(parts)
        # XLA for TPUs computes the parts of a short concatenation first, and then copies
        # them: here each is computed in its place.
        if len(parts) == 1:
            return parts[0]
        lengths = [len(part) for part in parts]
        joined = jax.lax.empty((sum(lengths), *parts[0].shape[1:]), parts[0].dtype)
        for start, part in zip(itertools.accumulate([0, *lengths]), parts, strict=False):
            joined = jax.lax.dynamic_update_slice_in_dim(joined, part, start, axis=0)
        return joined

    def layout(self, shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Shards before they are sent, and their factors as soon as they return."""
        return [*map(parameter_layout, shards)] if self.keeps_layouts else shards


# One large product already keeps a CPU's caches and cores busy.
CPU = Platform(
    _FLOAT32,
    Limits(stack_bytes=2**28, chunk_bytes=2**20, stack_length=32),
    VIRTUAL,
    normalizes="matrix",
)
# Launching a kernel takes a GPU time, and every array between two kernels memory.
GPU = Platform(
    _FLOAT16, Limits(stack_bytes=2**28, chunk_bytes=5 * 2**23), H100, normalizes="stack"
)
# A TPU's kernel cannot prefetch the result of the kernel before it: between two products
# of one chunk it runs one of another. Operands of 16 MiB fit into the core's own memory.
TPU = Platform(
    _BFLOAT16,
    Limits(stack_bytes=2**24, chunk_bytes=2**24, interleave=2),
    TPU_V5P,
    hides_coefficients=True,
    keeps_layouts=True,
)
# Arrays on Auto axes with shardings that only XLA knows; libtpu's partitioner does not
# call back.
AUTO_TPU = Platform(_BFLOAT16, GPU.limits, TPU_V5P, partitioner_calls_back=False)
PLATFORMS = {"cpu": CPU, "gpu": GPU, "tpu": TPU, "tpu_auto": AUTO_TPU}


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


def polar_in_chunks(
    platform: Platform, xs: Sequence[jax.Array], columns: Sequence[Any]
) -> list[jax.Array]:
    """Polar factors of packed matrices, a few chunks at a time, which bounds memory.

    Only batch axes are divided, except those that are sharded by their types: each device
    already holds a part of these. ``columns`` are, for each array, the devices that hold
    the other columns of its matrices; None for whole matrices.
    """
    iteration, (_, chunk_bytes, _, interleave) = platform.iteration, platform.limits
    if platform.normalizes == "matrix":
        return [one_by_one(x, iteration, on) for x, on in zip(xs, columns, strict=True)]
    qs: list[list[jax.Array]] = [[] for _ in xs]
    chunks = []
    for i, x in enumerate(xs):
        # Along the first axis; 0 if one entry exceeds the limit, and has batch axes.
        each, length = x.size // len(x) * x.dtype.itemsize, len(x)
        divisible = x.ndim > 2 and not typed_sharding.is_sharded(x)
        if divisible and length * each > chunk_bytes:
            length = max(int(x.ndim == 3), chunk_bytes // each)
        if len(x) > interleave * length:
            qs[i] = [_in_a_loop(platform, x, length)]
        else:
            chunks += [(i, x[at : at + length]) for at in range(0, len(x), length)]
    for at in range(0, len(chunks), interleave):
        turn = chunks[at : at + interleave]
        of_turn = [columns[i] for i, _ in turn]
        results = newton_schulz([chunk for _, chunk in turn], iteration, of_turn)
        for (i, _), q in zip(turn, results, strict=True):
            qs[i].append(q)
    return [some[0] if len(some) == 1 else jnp.concatenate(some) for some in qs]


def parameter_layout(x: jax.Array) -> jax.Array:
    """Keep an array in the layout that a parameter of its shape has on TPUs.

    It orders the last two axes so that they take less padding. The compiler may otherwise
    choose the order that suits a result, and transpose the gradient and the
    momentum, in float32.
    """
    if x.ndim < 2:
        return x

    def padded(rows: int, columns: int) -> int:  # To whole tiles of 8 by 128.
        return math.ceil(rows / 8) * math.ceil(columns / 128)

    *batch, m, n = range(x.ndim)
    rows, columns = x.shape[-2:]
    swapped = padded(columns, rows) < padded(rows, columns)
    return with_layout(x, (*batch, n, m) if swapped else (*batch, m, n))


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
