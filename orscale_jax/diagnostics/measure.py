"""Measurements on a slower clock: singular values, convergence."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from orscale_jax.diagnostics.reading import entries_of, matrices_of
from orscale_jax.newton_schulz.polar import polar_factor
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.momentum import TRACE, TRACE_SCALE, decode
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.checks import state_arrays
from orscale_jax.trees.names import Path, name_and_shape, names_on

MEASUREMENTS = ("momentum_stable_rank", "polar_error")


def measure(
    state: Any,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    polar: Callable[[jax.Array], jax.Array] = polar_factor,
) -> dict[str, PyTree]:
    r"""Measure the momentum M of every matrix and its polar factor Q.

    Call it every hundred steps or so: it computes quantities that the update has not
    computed, unlike :func:`read`. Q is the polar factor of the M in the state. With
    Nesterov's momentum, the optimizer uses the polar factor of :math:`\mu M + G` instead,
    but the state does not hold G. The measurements are:

    ``"momentum_stable_rank"``
      :math:`\|M\|_F^2 / \|M\|_2^2`, between 1 and min(m, n); 0 for a zero matrix. Costs
      the singular values of M.
    ``"polar_error"``
      :math:`\|Q^\top Q - I\|_F / \sqrt{\min(m, n)}`, of the smaller Gram matrix: 0 for an
      orthogonal Q, 1 for a zero Q. It is small if Newton–Schulz has converged. Costs a
      Newton–Schulz and a product.

    Singular values of large matrices take many times as long as Newton–Schulz. Sharded
    matrices are gathered on every device.

    Args:
      state: A state as in :func:`read`, of an optimizer with momentum.
      params: As in :func:`read`.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      polar: The function that makes the polar factors of an array of shape (..., m, n).
        The default is :func:`orscale_jax.polar_factor`. If the optimizer has other
        settings of Newton–Schulz than the defaults, pass them, for example with
        ``functools.partial(polar_factor, steps=8)``.

    Returns:
      Trees with one entry per matrix, by name, in float32 (float64 for float64), to be
      passed to :meth:`History.append` as ``measurements``.

    Raises:
      ValueError: If :func:`read` would refuse the state, or if it has no momentum for
        these matrices.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics, orscale
      >>> optimizer = orscale(1e-3)
      >>> params = {"up": jnp.eye(3, 4)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> measured = diagnostics.measure(state, params)
      >>> print(measured["momentum_stable_rank"]["up"].round(3))
      3.0
    """
    params = unbox(trained(params, state))
    state = unbox(getattr(state, "opt_state", state))
    if (like := entries_of(state)) is None:  # Of other optimizers with momentum, too.
        matrices = Matrices.of(weight_dimension_numbers, params)
    else:
        matrices = matrices_of(params, weight_dimension_numbers, like)
    momenta = _momenta(state, matrices, params)
    columns = zip(*(_measured(polar, m) for m in momenta), strict=True)
    trees = map(matrices.scalars_of_batches, columns)
    return dict(zip(MEASUREMENTS, trees, strict=True))


# Compiled once for equal shapes.
@functools.partial(jax.jit, static_argnums=0)
def _measured(polar: Callable[..., Any], m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The measurements of matrices of shape (*batch, m, n)."""
    values = jnp.linalg.svd(m, compute_uv=False)
    largest = jnp.max(values, axis=-1, initial=0, keepdims=True)
    # In this order, since squares may overflow or underflow.
    shares = jnp.square(values / jnp.where(largest == 0, 1, largest))
    q = polar(m)
    # By default accelerators would round the operands to fewer bits than the error has.
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    short = min(q.shape[-2:])
    gram = product(q.mT, q) if q.shape[-1] == short else product(q, q.mT)
    error = gram - jnp.broadcast_to(jnp.eye(short, dtype=q.dtype), gram.shape)
    norm = jnp.sqrt(jnp.sum(jnp.square(error), axis=(-2, -1)))
    return jnp.sum(shares, axis=-1), norm / max(short, 1) ** 0.5


def _momenta(state: Any, matrices: Matrices, params: PyTree) -> list[jax.Array]:
    """M of all matrices, in the order of :meth:`Matrices.batches`."""
    found: dict[tuple[str, Path], jax.Array] = {}
    wanted = set(map(names_on, matrices.paths))
    for entry in state_arrays(state, params, by_structure=True):
        if entry.field in (TRACE, TRACE_SCALE) and entry.owner in wanted:
            if (entry.field, entry.owner) in found:
                raise ValueError(
                    f"the state has two momenta for parameter {entry.name}, as if that "
                    "of another optimizer were beside it: pass the state of one of them."
                )
            array = typed_sharding.gather(jnp.asarray(entry.array))
            found[entry.field, entry.owner] = array
    momenta = []
    for path, leaf in zip(matrices.paths, matrices.leaves(params), strict=True):
        momentum = found.get((TRACE, names_on(path)))
        if momentum is None:
            raise ValueError(
                f"the state has no momentum for parameter {name_and_shape(path, leaf)}: "
                "pass the state of the optimizer that updates it, and its dimension "
                "numbers."
            )
        if (scale := found.get((TRACE_SCALE, names_on(path)))) is not None:
            momentum = decode(momentum, scale, jnp.float32)
        momenta.append(momentum.astype(compute_dtype(momentum)))
    return [
        typed_sharding.gather(part, (part.ndim - 2, part.ndim - 1))
        for part in matrices.batches(matrices.tree_of(momenta))
    ]
