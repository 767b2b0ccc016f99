"""Estimates with standard errors, from one sample per micro-batch."""

import jax
import jax.numpy as jnp

from orscale_jax.diagnostics.step_gain import Estimate, estimate_of, spread

# The bias that may remain in a nuclear norm, as a part of the distance between the sums
# of raised and lowered singular values. Measured under noise of 0.1 to 3 per entry (8 and
# 16 samples; 8 × 6 and 48 × 32): 0.00 to 0.07 of it for low rank and for pure noise, 0.02
# to 0.2 for a power law, 0.06 to 0.27 for equal singular values, most at the noise's
# level; that of the plain nuclear norm is 0.4 to 0.97. Two standard errors then hold the
# truth in 72 % of the draws at worst, and in 85 to 100 % of most.
REMAINING_BIAS = 0.1


def mean(samples: jax.Array) -> Estimate:
    """Mean of samples along the first axis."""
    count = len(samples)
    value = jnp.mean(samples, axis=0)
    return estimate_of(value, jnp.std(samples, axis=0, ddof=1) / jnp.sqrt(count))


def noise(squares: jax.Array) -> Estimate:
    """Standard deviation from squared distances of samples to their mean.

    Args:
      squares: Shape (samples, ...).
    """
    count = len(squares)
    total = jnp.sum(squares, axis=0, keepdims=True)
    value = jnp.sqrt(total[0] / (count - 1))
    if count < 3:
        return Estimate(value, jnp.full_like(value, jnp.nan))
    # A sample that is left out moves the mean of the others, too.
    others = (total - squares * (count / (count - 1))) / (count - 2)
    return estimate_of(value, spread(jnp.sqrt(jnp.maximum(others, 0))))


def nuclear_norm(spectra: jax.Array, projections: jax.Array) -> Estimate:
    r"""Nuclear norm of the mean of noisy matrices, without most of the noise's bias.

    Noise raises the singular values :math:`\sigma_k` of a mean. It also rotates the
    singular vectors: the projections :math:`\pi_k = u_k^\top G v_k` of a matrix that is
    not part of the mean are smaller than the true singular values. To second order in the
    noise, both errors have the same size. The estimate is
    :math:`\sum_k \mathrm{sign}(\pi_k) \sqrt{\sigma_k |\pi_k|}` of their means; a
    direction that is noise alone has :math:`\pi_k = 0` in the mean.

    Args:
      spectra: Singular values of the means of all samples but one, of shape
        (samples, ..., k).
      projections: The left-out sample on the singular vectors, of the same shape.
    """
    count = len(spectra)
    raised, lowered = (jnp.mean(x, axis=0, keepdims=True) for x in (spectra, projections))
    others = (count * lowered - projections) / (count - 1)
    sampling = spread(_geometric(spectra, others))
    remaining = REMAINING_BIAS * jnp.sum(raised - lowered, axis=-1)[0]
    return estimate_of(_geometric(raised, lowered)[0], jnp.hypot(sampling, remaining))


def _geometric(raised: jax.Array, lowered: jax.Array) -> jax.Array:
    roots = jnp.sign(lowered) * jnp.sqrt(raised * jnp.abs(lowered))
    return jnp.sum(roots, axis=-1)
