"""What each platform does with matrices: the rows of one table.

Matrices are packed; then they are stacked (on one device) or sent (on a mesh); then they
go through Newton–Schulz, a few chunks at a time. The platform is known when a program is
compiled and not when it is traced: :func:`on_any_platform` gives each its branch.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from orscale_jax import validate
from orscale_jax.newton_schulz.arithmetic import (
    PRECONDITIONINGS,
    Arithmetic,
    Columns,
    normalize_all,
)
from orscale_jax.newton_schulz.coefficients import Coefficients, coefficient_table
from orscale_jax.newton_schulz.fusion import (
    by_rows,
    fuse_small_on_gpu,
    sum_all,
    with_layout,
)
from orscale_jax.newton_schulz.hardware import H100, TPU_V5P, VIRTUAL, Hardware
from orscale_jax.newton_schulz.restarts import Table, restart_steps

_FLOAT32, _BFLOAT16, _FLOAT16 = map(np.dtype, (np.float32, jnp.bfloat16, np.float16))
# A platform's name, what is chosen (hashable where it is compiled), and arrays.
Branch: TypeAlias = Callable[..., list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """What the user chooses, already checked; hashable unless some are traced."""

    steps: int | np.int32 | jax.Array  # May be traced; np.int32 stands for that.
    table: Table | jax.Array  # Of coefficient_table; may be traced.
    preconditioning: str  # "frobenius" or "aol".
    dtype: np.dtype[Any] | None = None  # Of the products' operands; None: the platform's.

    @classmethod
    def of(
        cls,
        steps: int | jax.Array,
        coeffs: Coefficients,
        dtype: DTypeLike | None,
        preconditioning: str,
        prefix: str = "",
    ) -> Self:
        """Check arguments, whose names in messages begin with a prefix."""
        validate.count(f"{prefix}steps", steps)
        validate.dtype(f"{prefix}dtype", dtype)
        validate.choice(f"{prefix}preconditioning", preconditioning, PRECONDITIONINGS)
        table = coefficient_table(coeffs, steps, prefix)
        traced = isinstance(steps, jax.core.Tracer)
        steps = jnp.int32(steps) if traced else int(jax.device_get(steps))
        known = None if dtype is None else jnp.dtype(dtype)
        return cls(steps, table, preconditioning, known)

    @property
    def traced(self) -> dict[str, jax.Array]:
        settings = {"steps": self.steps, "table": self.table}
        return {k: v for k, v in settings.items() if isinstance(v, jax.core.Tracer)}

    @property
    def is_static(self) -> bool:
        """Whether steps and coefficients are known while tracing."""
        return isinstance(self.steps, int) and isinstance(self.table, tuple)

    @property
    def rows(self) -> Table:
        """The coefficients of each step: beyond the table, those of its last row."""
        table = self.table
        assert isinstance(table, tuple)
        return tuple(table[min(i, len(table) - 1)] for i in range(int(self.steps)))


DEFAULT_STEPS = 5
DEFAULTS = NewtonSchulz.of(DEFAULT_STEPS, "polar_express", None, "frobenius")


class Limits(NamedTuple):
    """How much goes through Newton–Schulz at once."""

    stack_bytes: int  # The largest stack.
    chunk_bytes: int  # The largest part of a stack that goes through at once.
    stack_length: int | None = None  # The most arrays in a stack; None for any number.
    # The number of chunks whose products are interleaved: while one product runs, the
    # operands of the next are fetched.
    interleave: int = 1
    # The most entries of Gram matrices of one stack whose matrices are padded with zeros
    # to one length.
    padded_grams: int = 0


@dataclasses.dataclass(frozen=True)
class Platform:
    """The way from matrices to their polar factors on one platform."""

    dtype: np.dtype[Any]  # Of Newton–Schulz's operands.
    limits: Limits
    hardware: Hardware  # The rates by which plans for a mesh are compared.
    # What is normalized at once: a leaf where it is computed, a stack in few and large
    # kernels, or a matrix in the loop over them.
    normalizes: Literal["leaf", "stack", "matrix"] = "leaf"
    by_strips: bool = False  # Whether large Gram matrices are computed in strips.
    # Whether a kernel adds its product to an array, and rounds the sum: then float16
    # takes monic_newton_schulz.
    adds_products: bool = False
    # Whether the compiler may not see the coefficients: all steps then look the same to
    # it, and it compiles one of them.
    hides_coefficients: bool = False
    # Whether it may not see the offsets of a stack's entries, so that the kernels of all
    # leaves in a stack are equal, too.
    hides_offsets: bool = False
    # Whether stacks are filled in place, and shards keep the layout of parameters.
    keeps_layouts: bool = False
    settings: NewtonSchulz = DEFAULTS  # The iteration that the user has chosen.

    def running(self, settings: NewtonSchulz, stack_bytes: int | None = None) -> Self:
        """The platform with a user's settings and largest stack; None for its own."""
        limits = self.limits
        if stack_bytes is not None:
            chunk_bytes = min(stack_bytes, limits.chunk_bytes)
            limits = limits._replace(
                stack_bytes=stack_bytes, chunk_bytes=chunk_bytes, stack_length=None
            )
        dtype = np.dtype(settings.dtype or self.dtype)
        return dataclasses.replace(self, dtype=dtype, limits=limits, settings=settings)

    def with_traced(self, traced: Mapping[str, Any]) -> Self:
        """The platform with other values of the settings that are traced."""
        settings = dataclasses.replace(self.settings, **traced)
        return dataclasses.replace(self, settings=settings)

    @property
    def restarts(self) -> tuple[int, ...] | None:
        """The steps before which the Gram form restarts; None if steps are traced."""
        if not self.settings.is_static:
            return None
        return restart_steps(self.settings.rows, self.arithmetic().unit)

    def arithmetic(self, columns: Columns | None = None) -> Arithmetic:
        """The arithmetic of the products, for whole matrices or for column shards."""
        return Arithmetic(self.dtype, columns, self.by_strips)

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
        return [*map(by_rows, rounded)]

    def normalized(
        self, xs: Sequence[jax.Array], at_once: bool = False
    ) -> list[jax.Array]:
        """Normalized matrices, in the dtype in which they are stacked and sent.

        ``at_once``: none before the norms of all are known. Otherwise XLA adds the norms
        of one exchange to the all-reduce after another, and no exchange runs beside
        products.
        """

        def sums(xs: Sequence[jax.Array]) -> list[jax.Array]:
            found = sum_all([[x] for x in xs], [(x.ndim - 2, x.ndim - 1) for x in xs])
            totals = [total for [total] in found]
            if at_once:
                totals = jax.lax.optimization_barrier(totals)
            return [jnp.expand_dims(each, (-2, -1)) for each in fuse_small_on_gpu(totals)]

        unit = normalize_all(xs, self.arithmetic(), sums)
        return [x.astype(self.packed_dtype(x.dtype)) for x in unit]

    def unpack(self, qs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Factors as one device keeps them: of GPUs the tall ones in row-major order."""
        if self.normalizes != "stack":
            return qs
        return [by_rows(q) if q.shape[-2] > q.shape[-1] else q for q in qs]

    def concatenate(self, parts: Sequence[jax.Array]) -> jax.Array:
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
    by_strips=True,
    hides_offsets=True,
)
# Launching a kernel takes a GPU time, and every array between two kernels memory. An H100
# computes 132 tiles of a product at once: what takes no more is padded, to share them.
GPU = Platform(
    _FLOAT16,
    Limits(stack_bytes=2**28, chunk_bytes=2**27, padded_grams=132 * 128 * 256),
    H100,
    normalizes="stack",
    adds_products=True,
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
PLATFORMS = {"cpu": CPU, "gpu": GPU, "tpu": TPU}


def on_any_platform(branch: Branch, chosen: Any, *operands: Any) -> list[jax.Array]:
    """``branch(name, chosen, *operands)`` for each platform; the compiler keeps one."""
    on = {name: functools.partial(branch, name, chosen) for name in PLATFORMS}
    gpu = on.pop("gpu")  # JAX calls it "cuda" or "rocm".
    return jax.lax.platform_dependent(*operands, **on, default=gpu)


# Outside of `jax.jit`, a program that is compiled at the first call.
compiled_on_any_platform: Branch = jax.jit(on_any_platform, static_argnums=(0, 1))


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
