"""The gain over Muon, from trust ratios, signal and curvature; with standard errors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.study.theory.per_matrix import vectors
from orscale_jax.diagnostics.step_gain import Estimate
from orscale_jax.trees.boxes import PyTree


class Gain(NamedTuple):
    r"""The quantities of the paper's section 4, each a scalar.

    They are defined with :math:`x_\ell = a_\ell / \sqrt{b_\ell}` and
    :math:`y_\ell = \hat r_\ell \sqrt{b_\ell}` over the matrices that count. Means,
    variances and correlations over :math:`\ell` give every matrix the same weight. A
    value is NaN where a quotient is 0/0: no matrix counts, or the signal or all ratios
    are zero.
    """

    #: Φ(r̂) = (Σ r̂ a)² / Σ b r̂², twice the largest decrease that one step guarantees.
    phi: jax.Array
    #: κ_eff = Φ(r̂) / Φ(1). Above 1, the ratios beat Muon at its best learning rate.
    kappa_eff: jax.Array
    #: κ_layer = max Φ / Φ(1) = Σ a²/b · Σ b / (Σ a)², the most that any ratios can gain.
    kappa_layer: jax.Array
    #: cos²θ_xy = Φ(r̂) / max Φ, 1 for the best ratios, r̂ ∝ a/b.
    alignment: jax.Array
    #: 1 − cos²θ between y and √b, 0 where all r̂ are equal (Theorem collapse).
    distance_to_collapse: jax.Array
    #: ν_r̂ = Var[y] / E[y]², the heterogeneity (S1).
    nu_r: jax.Array
    #: ν_√b = Var[√b] / E[√b]².
    nu_b: jax.Array
    #: ρ = corr(y, x), the alignment (S2); 0 where x or y is constant.
    rho: jax.Array
    #: 1 + ρ²ν_r̂ (1 + ν_√b) / (1 + ν_√b/ρ²), Theorem gain's bound without its δ(λ).
    lower_bound: jax.Array
    #: The number of matrices that count.
    matrices: jax.Array


class Kappas(NamedTuple):
    """The result of :func:`kappas`: scalars."""

    #: κ_eff and its standard error.
    kappa_eff: Estimate
    #: κ_layer, without what errors add to it, at least 1; and its standard error.
    kappa_layer: Estimate
    #: The number of matrices that count in :func:`gain`.
    matrices: jax.Array


def gain(trust_ratio: PyTree, signal: PyTree, curvature: PyTree) -> Gain:
    r"""Compute the gain of trust ratios over Muon in the paper's model of a step.

    .. math::

      \Phi(\hat r) = \frac{\big(\sum_\ell \hat r_\ell a_\ell\big)^2}
        {\sum_\ell b_\ell \hat r_\ell^2}, \qquad
      \kappa_{\mathrm{eff}} = \frac{\Phi(\hat r)}{\Phi(\mathbf 1)}
        = \frac{\cos^2\theta_{xy}}{\cos^2\theta_{x,\sqrt b}} .

    ``kappa_eff`` decides whether ratios help (the last equation, Lemma *geometric form*).
    Theorem *gain* does not: its conditions (S1) and (S2) are not
    sufficient, and ``kappa_eff`` can be below ``lower_bound``, even below 1, where both
    hold (``docs/study/theory.md``). The bound is reported because the paper states it. It
    claims nothing for :math:`\rho \le 0`, and the term :math:`\delta(\lambda)`, which the
    paper leaves open, is not subtracted.

    No result depends on the scale of the ratios. Only ``phi`` depends on the scales of
    the signal and the curvature.

    Args:
      trust_ratio: :math:`\hat r`: a vector over the matrices, or a tree of arrays with
        one entry for each matrix, in which None and :class:`optax.MaskedNode` are
        skipped. All matrices of all leaves form one vector.
      signal: :math:`a_\ell = \|\nabla_\ell f\|_*`, likewise.
      curvature: :math:`b_\ell = L_\ell p_\ell`, likewise. See :func:`curvature`.

    Returns:
      A :class:`Gain` of float32 scalars (float64 if anything given is). A matrix counts
      if its three numbers are finite and its curvature is positive: along a direction of
      negative curvature the model has no best step. ``matrices`` says how many do.

    Raises:
      ValueError: If the three do not have the same leaves and shapes.

    Example:
      >>> from examples.study.theory import gain
      >>> found = gain([1.0, 0.1], signal=[1.0, 0.1], curvature=[1.0, 10.0])
      >>> print(f"{found.kappa_eff:.2f} {found.kappa_layer:.2f}")
      8.43 9.10

    References:
      Lou & You, *OrScale*, section 4 and appendix A.
    """
    r, a, b = vectors(trust_ratio=trust_ratio, signal=signal, curvature=curvature)
    counts = jnp.isfinite(r) & jnp.isfinite(a) & jnp.isfinite(b) & (b > 0)
    # Everything below is in units of the largest entries: squares stay in range.
    r, _ = _in_units(jnp.where(counts, r, 0))
    a, a_unit = _in_units(jnp.where(counts, a, 0))
    root_b, root_b_unit = _in_units(jnp.sqrt(jnp.where(counts, b, 1)) * counts)
    x, x_unit = _in_units(jnp.where(counts, a / jnp.where(counts, root_b, 1), 0))
    y = r * root_b
    muon = jnp.square(jnp.sum(a)) / _square(root_b)
    phi = jnp.square(jnp.sum(r * a)) / _square(y)
    scores = _Scores(counts, jnp.sum(counts))
    nu_r, nu_b = scores.variation(y), scores.variation(root_b)
    rho = scores.correlation(x, y)
    return Gain(
        phi=jnp.square(a_unit / root_b_unit) * phi,
        kappa_eff=phi / muon,
        kappa_layer=jnp.square(x_unit) * _square(x) / muon,
        alignment=jnp.square(jnp.sum(x * y)) / (_square(x) * _square(y)),
        distance_to_collapse=_squared_sine(y, root_b),
        nu_r=nu_r,
        nu_b=nu_b,
        rho=rho,
        lower_bound=_lower_bound(jnp.square(rho), nu_r, nu_b),
        matrices=scores.number,
    )


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


class _Scores(NamedTuple):
    """Means, variations and correlations over the matrices that count."""

    counts: jax.Array
    number: jax.Array

    def mean(self, v: jax.Array) -> jax.Array:
        return jnp.sum(v) / self.number

    def centred(self, v: jax.Array) -> jax.Array:
        return jnp.where(self.counts, v - self.mean(v), 0)

    def variation(self, v: jax.Array) -> jax.Array:
        """Var[v] / E[v]²."""
        return self.mean(jnp.square(self.centred(v))) / jnp.square(self.mean(v))

    def correlation(self, v: jax.Array, w: jax.Array) -> jax.Array:
        dv, dw = self.centred(v), self.centred(w)
        varied = self._varies(v, dv) & self._varies(w, dw)
        product = jnp.sqrt(_square(dv)) * jnp.sqrt(_square(dw))
        rho = jnp.sum(dv * dw) / jnp.where(varied, product, 1)
        return jnp.where(varied, jnp.clip(rho, -1, 1), 0)

    def _varies(self, v: jax.Array, centred: jax.Array) -> jax.Array:
        """Whether v is more than a constant and rounding."""
        rounding = 16 * jnp.finfo(v.dtype).eps
        return jnp.max(jnp.abs(centred), initial=0) > rounding * jnp.max(
            jnp.abs(v), initial=0
        )


def _in_units(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The vector over its largest entry, and that entry; 1 for zero vectors."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(v), initial=0))
    unit = jnp.where(largest > 0, largest, 1)
    return v / unit, unit


def _square(v: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(v))


def _squared_sine(v: jax.Array, w: jax.Array) -> jax.Array:
    """The squared sine of the angle between two vectors, without cancellation."""
    v, w = (u / jnp.sqrt(_square(u)) for u in (v, w))
    return _square(v - jnp.sum(v * w) * w)


def _lower_bound(rho2: jax.Array, nu_r: jax.Array, nu_b: jax.Array) -> jax.Array:
    # Multiplied out by ρ², which may be 0.
    divisor = rho2 + nu_b
    term = jnp.square(rho2) * nu_r * (1 + nu_b) / jnp.where(divisor > 0, divisor, 1)
    return 1 + term


def _added(
    counts: jax.Array, values: tuple[jax.Array, ...], errors: tuple[jax.Array, ...]
) -> jax.Array:
    """The mean that errors of a and b add to Σ a²/b · Σ b / (Σ a)², leading terms."""
    a, b, a_err, b_err = (jnp.where(counts, v, 0) for v in (*values, *errors))
    safe = jnp.where(counts, b, 1)
    added = jnp.square(a_err) + jnp.square(a * b_err / safe)
    return jnp.sum(added / safe) * jnp.sum(b) / jnp.square(jnp.sum(a))
