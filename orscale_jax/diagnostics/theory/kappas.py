"""κ_eff and κ_layer with standard errors, from estimates of signal and curvature."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax.diagnostics.matrices import vectors
from orscale_jax.diagnostics.theory.gain import gain
from orscale_jax.diagnostics.theory.jackknife import Estimate
from orscale_jax.trees.boxes import PyTree


class Kappas(NamedTuple):
    """The result of :func:`kappas`: scalars."""

    #: κ_eff and its standard error.
    kappa_eff: Estimate
    #: κ_layer, without what errors add to it, at least 1; and its standard error.
    kappa_layer: Estimate
    #: The number of matrices that count in :func:`gain`.
    matrices: jax.Array


@jax.jit
def kappas(trust_ratio: PyTree, signal: Estimate, curvature: Estimate) -> Kappas:
    r"""Gain of estimates, with the standard errors of its two main numbers.

    Errors are propagated to first order, as if they were independent. Errors of a and b
    raise :math:`\kappa_{\mathrm{layer}}`, which squares them: layers look more different
    than they are. The leading terms of that,
    :math:`\sum_\ell (\delta a_\ell^2 + (a_\ell \delta b_\ell / b_\ell)^2) / b_\ell \cdot
    \sum_\ell b_\ell / (\sum_\ell a_\ell)^2`, are subtracted.
    """
    r, a, b, a_error, b_error = vectors(
        trust_ratio=trust_ratio,
        signal=signal.value,
        curvature=curvature.value,
        signal_stderr=signal.stderr,
        curvature_stderr=curvature.stderr,
    )
    counts = jnp.isfinite(r) & jnp.isfinite(a) & jnp.isfinite(b) & (b > 0)

    def both(a: jax.Array, b: jax.Array) -> jax.Array:
        found = gain(r, a, b)
        return jnp.stack([found.kappa_eff, found.kappa_layer])

    def variance(slopes: jax.Array, error: jax.Array) -> jax.Array:
        masked = jnp.where(counts[None], slopes * error[None], 0)
        return jnp.sum(jnp.square(masked), axis=-1)

    slopes = jax.jacrev(both, (0, 1))(a, b)
    stderr = jnp.sqrt(variance(slopes[0], a_error) + variance(slopes[1], b_error))
    found = gain(r, a, b)
    added = _added(counts, (a, b), (a_error, b_error))
    headroom = jnp.maximum(found.kappa_layer - added, 1)
    return Kappas(
        kappa_eff=Estimate(found.kappa_eff, stderr[0]),
        kappa_layer=Estimate(headroom, stderr[1]),
        matrices=found.matrices,
    )


def _added(
    counts: jax.Array, values: tuple[jax.Array, ...], errors: tuple[jax.Array, ...]
) -> jax.Array:
    """The mean that errors of a and b add to Σ a²/b · Σ b / (Σ a)², leading terms."""
    a, b, a_err, b_err = (jnp.where(counts, v, 0) for v in (*values, *errors))
    safe = jnp.where(counts, b, 1)
    added = jnp.square(a_err) + jnp.square(a * b_err / safe)
    return jnp.sum(added / safe) * jnp.sum(b) / jnp.square(jnp.sum(a))
