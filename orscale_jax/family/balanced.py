"""Muon with a Q whose vectors along the longer side have nearly one norm."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.optimizers import MuonArguments, Stage, Stages, build, muon_chain, takes
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms.matrices import Optimizer, broadcast
from orscale_jax.trees.boxes import PyTree


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Aurora(MuonArguments):
    r"""The arguments of :func:`aurora`.

    Args:
      pp_iterations: Passes through Newton–Schulz, at least 1. None: 2. May be traced.
      pp_beta: The exponent :math:`\beta`, at least 0. 0.5 divides by the norms of U.
    """

    pp_iterations: int | jax.Array | None = None  # No number: a wrapper would trace it.
    pp_beta: ArrayLike = 0.5


@takes(_Aurora)
def aurora(h: _Aurora) -> Optimizer:
    r"""Aurora: Muon with a Q whose vectors along the longer side have nearly one norm.

    Q stays orthogonal along the shorter side. For an ``(m, n)`` matrix with
    :math:`m > n`, whose rows :math:`i` are its inputs,

    .. math::

      X_{i,:} &= \tilde M_{i,:} / \|\tilde M_{i,:}\|, \\
      X_{i,:} &\leftarrow X_{i,:} / \|U_{i,:}\|^{2\beta} \quad \text{with} \quad
      U = \mathrm{NS}_k(X), \\
      Q &= \mathrm{NS}_k(X).

    The second line is repeated ``pp_iterations - 1`` times. If :math:`m < n`, the
    columns, which are the neurons, take the place of the rows. A square matrix takes
    Muon's step. All other matrices go through Newton–Schulz ``pp_iterations`` times, and
    on a mesh they are exchanged as often.

    Returns:
      An optimizer with Muon's state.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family
      >>> optimizer = family.aurora(1.0, consistent_rms=None, weight_decay=0, ns_steps=8)
      >>> params = {"kernel": jnp.array([[9.0, 0], [0, 1.0], [0, 0.1], [0.1, 0]])}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> print(jnp.linalg.norm(updates["kernel"], axis=1).round(3))  # √(2/4) each
      [0.707 0.707 0.707 0.707]

    References:
      Dewulf et al. 2026, arXiv:2606.27715, and the authors' code, which this follows
      (tilde-research/aurora-release, 3d79a5c, 8 May 2026). Its scale is
      ``scale_mode="shape_scaling"``. Its floor of 1e-7 under the norms is missing here: a
      step does not depend on the scale of the gradients.
    """
    return build(lambda s: muon_chain(s, balanced_polar_stage(h, s)), h)


def balanced_polar_stage(h: _Aurora, s: Stages) -> Stage:
    """M̃ to the Q of Aurora; a square matrix goes through Newton–Schulz once."""
    pp_iterations = 2 if h.pp_iterations is None else h.pp_iterations
    validate.count("pp_iterations", pp_iterations)
    validate.number("pp_beta", h.pp_beta, at_least=0)

    def divide(
        axes: MatrixAxes, x: jax.Array, by: jax.Array, exponent: ArrayLike = h.pp_beta
    ) -> jax.Array:
        """Vectors of x's longer side, over powers of the squared norms of others."""
        exponent = jnp.asarray(exponent, x.dtype)
        # Of (m, n), n is the longer side where m < n.
        for vectors, longer in ((axes.neurons, operator.lt), (axes.inputs, operator.gt)):
            chosen = axes.by_shape(longer, x)
            if np.any(chosen):
                square = vectors.reduce(jnp.sum, jnp.square(by))
                power = jnp.where(square == 0, 1, square) ** exponent
                x = x / jnp.where(chosen, broadcast(vectors, power, x), 1)
        return x

    def normalize(axes: MatrixAxes, x: jax.Array) -> jax.Array:
        """Vectors of the longer side, over their norms, whose squares may overflow."""
        largest = axes.reduce(largest_magnitude, x)
        x = x / broadcast(axes, jnp.where(largest == 0, 1, largest), x)
        return divide(axes, x, x, exponent=0.5)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        # Leaves that hold any matrix that is not square.
        leaves = s.matrices.structure.flatten_up_to(updates)
        axes = tuple(
            a if a and np.any(a.by_shape(operator.ne, x)) else None
            for a, x in zip(s.matrices.axes, leaves, strict=True)
        )
        rectangular = dataclasses.replace(s.matrices, axes=axes)
        again = s.polar(rectangular)

        def balance(_: ArrayLike, x: PyTree) -> PyTree:
            q, _ = again.update(x, state, params)
            return rectangular.map(divide, x, q)

        x = rectangular.map(normalize, updates)
        if validate.is_whole(pp_iterations):
            for i in range(1, int(pp_iterations)):
                x = balance(i, x)
        else:
            x = jax.lax.fori_loop(1, pp_iterations, balance, x)
        return s.orthogonalize.update(x, state, params)

    return optax.GradientTransformation(s.orthogonalize.init, update)
