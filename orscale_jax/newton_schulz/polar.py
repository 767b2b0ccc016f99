"""The public ``polar_factor``, of one array of matrices."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.newton_schulz.iteration import newton_schulz, one_by_one
from orscale_jax.newton_schulz.platforms import (
    PLATFORMS,
    Branch,
    NewtonSchulz,
    compiled_on_any_platform,
    on_any_platform,
)
from orscale_jax.sharding import typed_sharding


def polar_factor(
    x: ArrayLike,
    *,
    steps: int | jax.Array = 5,
    coeffs: Coefficients = "polar_express",
    dtype: DTypeLike | None = None,
    preconditioning: str = "frobenius",
) -> jax.Array:
    r"""Approximate the polar factor :math:`UV^\top` of :math:`x = U \Sigma V^\top`.

    The function runs the Newton–Schulz iteration on :math:`x / \|x\|_F`. The norm is
    computed in float32 (float64 where ``x`` or ``dtype`` is float64) from scaled entries,
    so that the result does not depend on the scale of ``x``. Products accumulate in
    float32 and are rounded to ``dtype`` once each, whatever
    ``jax_default_matmul_precision`` says. A zero matrix gives zero. A matrix with a NaN
    or an infinity gives NaN.

    If one side is more than 1.5 times as long as the other, and steps and coefficients
    are known while JAX traces, the iteration runs on the Gram matrix (Zhang et al.), as
    far as the rounding of the dtype allows. Matrices whose rows or columns are sharded on
    Explicit axes are gathered on each device; :func:`orthogonalize` spreads the work
    instead.

    The presets are ``"polar_express"``, ``"jordan"``, ``"dion"`` and ``"deepseek_v4"``,
    a sequence of ten steps. ``docs/newton_schulz.md`` has their sources, the ranges to
    which they bring singular values, and their *margins*: the relative errors that all
    products may have without any singular value exploding. A step rounds three times, by
    at most 0.39 % in bfloat16 and 0.05 % in float16, and every preset tolerates at least
    0.74 % at any number of steps. Products that *accumulate* in bfloat16 have larger
    errors. For another lower bound, or more safety, see
    :func:`orscale_jax.polar_express_coefficients`.

    Args:
      x: Shape (..., m, n), real floating point. Leading axes are a batch.
      steps: Number of steps, at least 1. May be traced.
      coeffs: A preset, one ``(a, b, c)`` for all steps, or one per step. Cubics, whose c
        is 0, take two products a step instead of three. Where ``steps`` is smaller than
        the table its prefix is taken (except for ``"deepseek_v4"``); where it is larger,
        the last row repeats.
      dtype: The dtype of the products' operands. ``None``: float16 on GPU, bfloat16 on
        TPU, float32 on CPU, decided by the platform that the program is compiled for.
        float16 has three more bits than bfloat16; matrices are scaled to fit its range.
      preconditioning: ``"frobenius"``, or ``"aol"`` for another direction in fewer
        steps: each of the min(m, n) vectors on the shorter side (the rows of square
        matrices) is divided by its own :math:`(\sum_j |A_{ij}|)^{1/2}`, where A is their
        Gram matrix. The result is that of the scaled matrix, not of x (Boissin et al.).
        Pass a table for four steps with it; ``docs/newton_schulz.md`` has one, and says
        what it costs in quality.

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
    settings = NewtonSchulz.of(steps, coeffs, dtype, preconditioning)
    if not x.size:
        return x  # The loop over matrices cannot be traced without one.
    run: Branch = compiled_on_any_platform if settings.is_static else on_any_platform
    [q] = run(_polar, settings, typed_sharding.gather(x, (x.ndim - 2, x.ndim - 1)))
    return typed_sharding.shard_like(q, x)


def _polar(name: str, settings: NewtonSchulz, x: jax.Array) -> list[jax.Array]:
    """One platform's branch, for whole matrices."""
    platform = PLATFORMS[name].running(settings)
    if platform.normalizes == "matrix":
        return [one_by_one(x, platform)]
    [q] = newton_schulz(platform.normalized([x]), platform)
    return [q.astype(x.dtype)]
