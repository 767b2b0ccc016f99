"""The gain over Muon, from trust ratios, signal and curvature."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _checks
from orscale_jax.diagnostics.summaries import vector
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import quoted


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
    r, a, b = _vectors(trust_ratio=trust_ratio, signal=signal, curvature=curvature)
    counts = jnp.isfinite(r) & jnp.isfinite(a) & jnp.isfinite(b) & (b > 0)
    # Everything below is in units of the largest entries: squares stay in range.
    r, _ = _in_units(jnp.where(counts, r, 0))
    a, a_unit = _in_units(jnp.where(counts, a, 0))
    root_b, root_b_unit = _in_units(jnp.sqrt(jnp.where(counts, b, 1)) * counts)
    x, x_unit = _in_units(jnp.where(counts, a / jnp.where(counts, root_b, 1), 0))
    y, number = r * root_b, jnp.sum(counts)

    def square(v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(v))

    def centred(v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """v less its mean; Var[v] / E[v]²; whether v is more than a constant, rounded."""
        mean = jnp.sum(v) / number
        rest = jnp.where(counts, v - mean, 0)
        least = 16 * jnp.finfo(v.dtype).eps * jnp.max(jnp.abs(v), initial=0)
        varies = jnp.max(jnp.abs(rest), initial=0) > least
        return rest, square(rest) / number / jnp.square(mean), varies

    (dx, _, x_varies), (dy, nu_r, y_varies) = centred(x), centred(y)
    _, nu_b, _ = centred(root_b)
    product = jnp.sqrt(square(dx)) * jnp.sqrt(square(dy))
    both = x_varies & y_varies
    rho = jnp.where(both, jnp.sum(dx * dy) / jnp.where(both, product, 1), 0)
    rho = jnp.clip(rho, -1, 1)
    # The bound, multiplied out by ρ², which may be 0.
    divisor = jnp.square(rho) + nu_b
    term = rho**4 * nu_r * (1 + nu_b) / jnp.where(divisor > 0, divisor, 1)
    muon = jnp.square(jnp.sum(a)) / square(root_b)
    phi = jnp.square(jnp.sum(r * a)) / square(y)
    unit_y, unit_b = y / jnp.sqrt(square(y)), root_b / jnp.sqrt(square(root_b))
    return Gain(
        phi=jnp.square(a_unit / root_b_unit) * phi,
        kappa_eff=phi / muon,
        kappa_layer=jnp.square(x_unit) * square(x) / muon,
        alignment=jnp.square(jnp.sum(x * y)) / (square(x) * square(y)),
        # The squared sine, without cancellation.
        distance_to_collapse=square(unit_y - jnp.sum(unit_y * unit_b) * unit_b),
        nu_r=nu_r,
        nu_b=nu_b,
        rho=rho,
        lower_bound=1 + term,
        matrices=number,
    )


def curvature(
    smoothness: PyTree,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> PyTree:
    r"""Compute the curvature :math:`b_\ell = L_\ell p_\ell` of every matrix.

    :math:`p_\ell = \min(m_\ell, n_\ell)` bounds :math:`\|Q_\ell\|_F^2`: the squared norm
    of a polar factor is its rank. The function is linear: it also turns
    standard errors of L into b's.

    Args:
      smoothness: L, such as ``estimate(...).smoothness.value``.
      params: The parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.

    Returns:
      A tree like ``smoothness``.

    Raises:
      ValueError: If ``smoothness`` is not of these matrices.

    Example:
      >>> import jax.numpy as jnp
      >>> from examples.study.theory import curvature
      >>> print(curvature({"kernel": jnp.array(2.0)}, {"kernel": jnp.ones((3, 5))}))
      {'kernel': Array(6., dtype=float32)}

    References:
      Lou & You, *OrScale*, section 4.
    """

    def times_rank(axes: MatrixAxes, scalars: Any, leaf: Any) -> jax.Array:
        scalars, shape = jnp.asarray(scalars), axes.batch_shape(leaf)
        if scalars.shape != shape:
            raise ValueError(f"found shape {scalars.shape} for matrices of shape {shape}")
        rank = np.broadcast_to(axes.batch_by_shape(min, leaf), shape)
        return scalars * jnp.asarray(rank, compute_dtype(scalars))

    matrices = Matrices.of(weight_dimension_numbers, params)
    try:
        of_matrices = matrices.tree_of(matrices.leaves(unbox(smoothness)))
        return matrices.map(times_rank, of_matrices, unbox(params))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "smoothness must be a tree like the parameters, with an entry for each "
            f"matrix: {error}"
        ) from error


def _in_units(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The vector over its largest entry, and that entry; 1 for zero vectors."""
    largest = jnp.max(jnp.abs(v), initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    return v / unit, unit


def _vectors(**trees: PyTree) -> list[jax.Array]:
    """All entries of trees over the same matrices, in one order and one dtype."""
    leaves = {
        name: dict(jax.tree.leaves_with_path(unbox(tree))) for name, tree in trees.items()
    }
    first, expected = next(iter(leaves.items()))
    for name, found in leaves.items():
        for path, leaf in found.items():
            if not _checks.is_real(dtype := jnp.result_type(leaf)):
                raise ValueError(
                    f"{name}: {quoted(path)} has dtype {dtype}: pass real numbers, one "
                    "for each matrix."
                )
        if unmatched := [*(expected.keys() ^ found.keys())]:
            holder = first if unmatched[0] in expected else name
            raise ValueError(
                f"{first} and {name} must have the same matrices: {len(unmatched)} "
                f"leaves, such as {quoted(unmatched[0])} in {holder}, are in one of them "
                "only."
            )
        for path, leaf in expected.items():
            if np.shape(found[path]) != np.shape(leaf):
                raise ValueError(
                    f"{first} and {name} must have the same shapes, one entry for each "
                    f"matrix: {quoted(path)} is of shape {np.shape(leaf)} in {first} and "
                    f"{np.shape(found[path])} in {name}."
                )
    arrays = [list(map(jnp.asarray, of_tree.values())) for of_tree in leaves.values()]
    dtype = compute_dtype(arrays)
    return [vector(x).astype(dtype) if x else jnp.zeros(0, dtype) for x in arrays]
