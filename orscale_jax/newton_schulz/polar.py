r"""The polar factor of a matrix by Newton–Schulz iteration.

One step maps :math:`X \mapsto aX + (bA + cA^2)X` with :math:`A = XX^\top`, so that every
singular value is mapped by the odd quintic :math:`p(x) = ax + bx^3 + cx^5` and the
singular vectors do not change. :mod:`orscale_jax.newton_schulz.coefficients` has the
polynomials.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.newton_schulz import gram, preconditioning as _preconditioning, restarts
from orscale_jax.newton_schulz.arithmetic import Arithmetic, ColumnShards
from orscale_jax.newton_schulz.coefficients import (
    Coefficients,
    coefficient_table,
    row_at,
    rows_of,
)
from orscale_jax.newton_schulz.preconditioning import Start


@dataclasses.dataclass(frozen=True, eq=False)
class NewtonSchulz:
    """The settings of the iteration, already checked.

    Attributes:
      steps: The number of steps; may be traced.
      table: Coefficients of shape (rows, 3), from :func:`coefficient_table`; may be
        traced.
      preconditioning: ``"frobenius"`` or ``"aol"``.
      dtype: The dtype of the products' operands; None for the platform's default.
      by_strips: Whether large Gram matrices are computed in strips.
      hide_coefficients: Whether to hide the coefficients from the compiler: all steps
        then look the same to it, and it compiles one of them.
    """

    steps: int | jax.Array
    table: np.ndarray | jax.Array
    preconditioning: str
    dtype: DTypeLike | None = None
    by_strips: bool = False
    hide_coefficients: bool = False

    @property
    def traced(self) -> dict[str, jax.Array]:
        """The traced settings by name."""
        settings = {"steps": self.steps, "table": self.table}
        return {k: v for k, v in settings.items() if isinstance(v, jax.core.Tracer)}

    def with_traced(self, traced: Mapping[str, jax.Array]) -> "NewtonSchulz":
        """The same settings with other values of those that are traced."""
        return dataclasses.replace(
            self,
            steps=traced.get("steps", self.steps),
            table=traced.get("table", self.table),
        )

    @property
    def is_static(self) -> bool:
        """Whether steps and coefficients are known while tracing."""
        return isinstance(self.table, np.ndarray) and isinstance(
            self.steps, int | np.integer
        )

    @property
    def restarts(self) -> tuple[int, ...] | None:
        """The steps before which the Gram form restarts; None if steps are traced."""
        if not self.is_static:
            return None
        rows = rows_of(np.asarray(self.table), int(self.steps))
        return restarts.restart_steps(rows, self.arithmetic().unit)

    def arithmetic(self, columns: ColumnShards | None = None) -> Arithmetic:
        """The arithmetic of the products, for whole matrices or for column shards."""
        return Arithmetic(jnp.dtype(self.dtype), columns, self.by_strips)


def polar_factor(
    x: ArrayLike,
    *,
    steps: int | jax.Array = 5,
    coeffs: Coefficients = "polar_express",
    dtype: DTypeLike | None = None,
    preconditioning: str = "frobenius",
) -> jax.Array:
    r"""Approximate the polar factor :math:`UV^\top` of :math:`x = U \Sigma V^\top`.

    Newton–Schulz iteration on :math:`x / \|x\|_F`. The norm is computed in float32
    (float64 where ``x`` or ``dtype`` is float64) from scaled entries, so that the result
    does not depend on the scale of ``x`` and nothing overflows or underflows.
    Products accumulate in float32 and are rounded to ``dtype`` once each, whatever
    ``jax_default_matmul_precision`` says. A zero matrix gives zero; a matrix with a NaN
    or an infinity gives NaN.

    Where one side is more than 1.5 times the other, and steps and coefficients are known
    while tracing, the iteration runs on the Gram matrix (Zhang et al. 2026), as far as
    the dtype's rounding allows; ``docs/speed.md`` has more. Call it inside ``jax.jit``:
    outside, every call is compiled anew.

    Presets, with the range to which five steps bring normalized singular values in
    [1e-3, 1], and the relative error that each product may have without any singular
    value exploding (defined in ``docs/newton_schulz.md``):

    - ``"polar_express"``: [0.846, 1.142], margin 0.81 %; the greedy optimal sequence of
      Amsel et al. (arXiv:2505.16932), with lower bound 1e-3 and safety factor 1.02. Fewer
      steps take its prefix; more steps continue the construction and only bring singular
      values nearer to 1.
    - ``"jordan"``: [0.47, 1.21], margin 1.62 %; (3.4445, −4.7750, 2.0315) at every step
      (Jordan et al. 2024). More steps stay in a band around 1 and do not converge.
    - ``"dion"``: [0.47, 1.15], margin 1.42 %, 0.80 % where many steps follow; the
      five-row table of the modded-nanogpt speedrun and of Dion (arXiv:2504.05295).
      Beyond row 5 its last row repeats: a band around 1, without convergence.
    - ``"deepseek_v4"``, after its ten steps: [1.000, 1.001], margin 1.57 %; eight steps
      of ``"jordan"``, then two of (2, −1.5, 0.5) (DeepSeek-AI 2026). Fewer than ten steps
      are refused, unless their number is traced; in more, the last row repeats, and
      singular values converge to 1.

    A step rounds three times, by at most 0.39 % in bfloat16, by 0.05 % in float16, and
    every preset tolerates at least 0.74 % at any number of steps. Products that
    *accumulate* in bfloat16 have larger errors than the margins. For another lower bound,
    or more safety, see :func:`orscale_jax.polar_express_coefficients`.

    Args:
      x: Shape (..., m, n), real floating point. Leading axes are a batch.
      steps: Number of steps, at least 1. May be traced.
      coeffs: A preset, one ``(a, b, c)`` for all steps, or one per step. Where ``steps``
        is smaller than the table its prefix is taken (except for ``"deepseek_v4"``);
        where it is larger, the last row repeats.
      dtype: The dtype of the products' operands. ``None``: float16 on GPU, bfloat16 on
        TPU, float32 on CPU, decided by the platform that the program is compiled for.
        float16 has three more bits than bfloat16, and matrices are scaled so that its
        range is enough.
      preconditioning: ``"frobenius"``, or ``"aol"`` for another direction in fewer
        steps: each of the min(m, n) vectors on the shorter side (the rows of square
        matrices) is divided by its own :math:`(\sum_j |A_{ij}|)^{1/2}`, where A is their
        Gram matrix. The result is that of the scaled matrix, not of x (Boissin et al.
        2025, arXiv:2512.04632). Pass a table for four steps with it;
        ``docs/newton_schulz.md`` has one, and says what it costs in quality.

    Returns:
      Shape (..., m, n), of the dtype of ``x``.

    Raises:
      ValueError: If ``x`` is not a batch of real matrices, or an argument is not valid.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import polar_factor
      >>> q = polar_factor(jnp.diag(jnp.array([3.0, 0.5])), steps=8)
      >>> bool(jnp.allclose(q, jnp.eye(2), atol=1e-5))
      True

    References:
      Amsel et al. 2025, arXiv:2505.16932; Jordan et al. 2024,
      https://kellerjordan.github.io/posts/muon/; Ahn et al. 2025, arXiv:2504.05295;
      Boissin et al. 2025, arXiv:2512.04632; Zhang et al. 2026, *Gram Newton-Schulz*,
      https://dao-lab.ai/blog/2026/gram-newton-schulz; DeepSeek-AI 2026, *DeepSeek-V4*,
      section 2.4, https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro.
    """
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x has shape {x.shape} and dtype {x.dtype}: pass real floating-point "
            "matrices of shape (..., m, n) to polar_factor."
        )
    _checks.count("steps", steps)
    _checks.dtype("dtype", dtype)
    _preconditioning.check("preconditioning", preconditioning)
    settings = NewtonSchulz(steps, coefficient_table(coeffs, steps), preconditioning)
    on_cpu, on_tpu, on_gpu = (
        dataclasses.replace(settings, dtype=default if dtype is None else dtype)
        for default in (jnp.float32, jnp.bfloat16, jnp.float16)
    )
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: one_by_one(x, dataclasses.replace(on_cpu, by_strips=True)),
        tpu=lambda x: _in_one_pass(x, on_tpu),
        default=lambda x: _in_one_pass(x, on_gpu),
    )


def newton_schulz(
    xs: Sequence[jax.Array],
    settings: NewtonSchulz,
    columns: Sequence[ColumnShards | None] | None = None,
) -> list[jax.Array]:
    """Polar factors of normalized matrices, by the form that takes fewer FLOPs.

    Args:
      xs: Arrays of shape (..., m, n). The products of those that are unrolled are
        interleaved.
      settings: The iteration's settings, with a dtype.
      columns: For each array, the devices that hold the other columns of its matrices;
        None for whole matrices.
    """
    arithmetics = [settings.arithmetic(of_x) for of_x in columns or [None] * len(xs)]
    starts = [
        _preconditioning.start(x, settings.preconditioning, arithmetic)
        for x, arithmetic in zip(xs, arithmetics, strict=True)
    ]
    # A loop would copy the operands that it carries.
    unrolled = [
        i
        for i, (x, arithmetic) in enumerate(zip(xs, arithmetics, strict=True))
        if settings.is_static and (arithmetic.narrow or _by_gram(x, arithmetic))
    ]
    qs = {
        i: _newton_schulz(start, settings.table, settings.steps, arithmetics[i])
        for i, start in enumerate(starts)
        if i not in unrolled
    }
    if unrolled:
        some = _unrolled(
            [starts[i] for i in unrolled], settings, [arithmetics[i] for i in unrolled]
        )
        qs.update(zip(unrolled, some, strict=True))
    return [qs[i].astype(x.dtype) for i, x in enumerate(xs)]


def one_by_one(
    x: jax.Array, settings: NewtonSchulz, columns: ColumnShards | None = None
) -> jax.Array:
    """Loop over the matrices of a batch (CPU).

    XLA's batched products are slower than single ones there. The matrices need not be
    normalized.
    """

    def polar(x: jax.Array) -> jax.Array:
        # Its sums do not depend on the form of products: one trace serves all.
        arithmetic = settings.arithmetic(columns).plain
        normalized = _preconditioning.normalize(x, arithmetic)
        [q] = newton_schulz([normalized], settings, [columns])
        return q.astype(x.dtype)

    # A loop over an axis that the array's type says is sharded would gather it.
    if x.ndim == 2 or any(entry is not None for entry in jax.typeof(x).sharding.spec):
        return polar(x)
    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return jax.lax.map(polar, matrices).reshape(x.shape)


def _in_one_pass(x: jax.Array, settings: NewtonSchulz) -> jax.Array:
    """The polar factors of a batch, normalized in one pass (GPU and TPU)."""
    arithmetic = settings.arithmetic()

    def sums(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [arithmetic.sum(x) for x in xs]

    [normalized] = _preconditioning.normalize_all([x], arithmetic, sums)
    [q] = newton_schulz([normalized], settings)
    return q.astype(x.dtype)


def _by_gram(x: jax.Array, arithmetic: Arithmetic) -> bool:
    return restarts.is_cheaper(*arithmetic.whole_shape(x))


def _unrolled(
    starts: Sequence[Start], settings: NewtonSchulz, arithmetics: Sequence[Arithmetic]
) -> list[jax.Array]:
    """Newton–Schulz without a loop, restarted as rarely as is stable and cheaper."""
    table, steps = np.asarray(settings.table), int(settings.steps)
    every = tuple(range(1, steps))
    before = tuple(
        settings.restarts or () if _by_gram(start.x, arithmetic) else every
        for start, arithmetic in zip(starts, arithmetics, strict=True)
    )
    rows: gram.Rows = _of_scaled(rows_of(table, steps), arithmetics[0])
    if settings.hide_coefficients:
        scalar = functools.partial(jnp.asarray, dtype=arithmetics[0].accumulator)
        rows = jax.lax.optimization_barrier(jax.tree.map(scalar, rows))
    return gram.gram_newton_schulz(starts, rows, before, tuple(arithmetics))


def _of_scaled(rows: gram.Rows, arithmetic: Arithmetic) -> gram.Rows:
    """The rows for matrices of norm ``arithmetic.scale`` instead of 1."""
    if arithmetic.scale == 1:
        return rows
    first, *others = rows
    powers = (arithmetic.scale**power for power in (1, 3, 5))
    return [[x / power for x, power in zip(first, powers, strict=True)], *others]


def _newton_schulz(
    start: Start,
    table: np.ndarray | jax.Array,
    steps: int | jax.Array,
    arithmetic: Arithmetic,
) -> jax.Array:
    """The plain iteration, in a loop."""
    rounded = arithmetic.round
    row = row_at(table, arithmetic.accumulator)
    wide = arithmetic.is_wide(start.x)

    def step(row: Sequence[jax.Array], x: jax.Array, gram: jax.Array) -> jax.Array:
        a, b, c = row
        factor = rounded(gram)
        square = arithmetic.symmetric(factor, factor)
        polynomial = rounded(b * factor.astype(square.dtype) + c * square)
        left, right = (polynomial, x) if wide else (x, polynomial)
        product = arithmetic.product(left, right)
        return rounded(a * x.astype(product.dtype) + product)

    first, x = 0, start.x
    if start.gram is not None or arithmetic.scale != 1:
        [of_scaled] = _of_scaled([row(0)], arithmetic)
        gram = arithmetic.gram(x) if start.gram is None else start.gram
        first, x = 1, step(of_scaled, x, gram)
    return jax.lax.fori_loop(
        first, steps, lambda i, x: step(row(i), x, arithmetic.gram(x)), x
    )
