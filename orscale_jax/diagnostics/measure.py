"""Measurements on a slower clock: singular values, convergence, angles."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import validate
from orscale_jax.diagnostics.reading import held, matrices_of
from orscale_jax.newton_schulz.polar import polar_factor
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms import momentum as int8_blocks
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.momentum import Int8TraceState
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.names import Path, name_and_shape, names_on, quoted
from orscale_jax.trees.nodes import nodes_of

MEASUREMENTS = ("momentum_stable_rank", "polar_error", "direction_angle")


def measure(
    state: Any,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    names: Sequence[str] = ("momentum_stable_rank", "polar_error"),
    previous: Any = None,
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
    ``"direction_angle"``
      The angle between the Q of ``previous`` and this Q, in degrees. It says how far the
      direction has turned in between. Costs two Newton–Schulz.

    Singular values of large matrices take many times as long as Newton–Schulz. Sharded
    matrices are gathered on every device.

    Args:
      state: A state as in :func:`read`, of an optimizer with momentum.
      params: As in :func:`read`.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      names: The names of the measurements to take.
      previous: A state of an earlier step, for ``"direction_angle"``.
      polar: The function that makes the polar factors of an array of shape (..., m, n).
        The default is :func:`orscale_jax.polar_factor`. If the optimizer has other
        settings of Newton–Schulz than the defaults, pass them, for example with
        ``functools.partial(polar_factor, steps=8)``.

    Returns:
      Trees with one entry per matrix, by name, in float32 (float64 for float64), to be
      passed to :meth:`History.append` as ``measurements``.

    Raises:
      ValueError: If a name is not known, if ``previous`` is missing, if :func:`read`
        would refuse the state, or if a state has no momentum for these matrices.

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
    if isinstance(names, str):
        validate.refuse("names", names, "pass a sequence of names")
    names = tuple(names)
    for name in names:
        validate.choice("names", name, MEASUREMENTS)
    if previous is None and "direction_angle" in names:
        raise ValueError(
            "'direction_angle' compares two states: pass previous=, the optimizer's "
            "state of an earlier step."
        )
    params = unbox(trained(params, state))
    like = held(unbox(getattr(state, "opt_state", state)))
    if like is None:  # Of other optimizers with momentum, too.
        matrices = Matrices.of(weight_dimension_numbers, params)
    else:
        matrices = matrices_of(params, weight_dimension_numbers, like, "the state")
    now = before = _momenta(state, matrices, params)
    if previous is not None:
        before = _momenta(previous, matrices, params)
    pairs = zip(now, before, strict=True)
    measured = [_measured(names, polar, *pair) for pair in pairs]
    return {n: matrices.scalars_of_batches([part[n] for part in measured]) for n in names}


# Compiled once for equal shapes, and without the measurements that are not requested.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _measured(
    names: tuple[str, ...], polar: Callable[..., Any], now: jax.Array, before: jax.Array
) -> dict[str, jax.Array]:
    """The measurements of matrices of shape (*batch, m, n)."""

    def inner(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * y, axis=(-2, -1))

    values = jnp.linalg.svd(now, compute_uv=False)
    largest = jnp.max(values, axis=-1, initial=0, keepdims=True)
    # In this order, since squares may overflow or underflow.
    shares = jnp.square(values / jnp.where(largest == 0, 1, largest))
    q, earlier = polar(now), polar(before)
    # By default accelerators would round the operands to fewer bits than the error has.
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    m, n = q.shape[-2:]
    gram = product(q.mT, q) if m >= n else product(q, q.mT)
    error = gram - jnp.broadcast_to(jnp.eye(min(m, n), dtype=q.dtype), gram.shape)
    norms = jnp.sqrt(inner(q, q) * inner(earlier, earlier))
    cosine = inner(q, earlier) / jnp.where(norms == 0, 1, norms)
    measurements = (
        jnp.sum(shares, axis=-1),
        jnp.sqrt(inner(error, error)) / max(min(m, n), 1) ** 0.5,
        jnp.degrees(jnp.arccos(jnp.clip(cosine, -1, 1))),
    )
    by_name = dict(zip(MEASUREMENTS, measurements, strict=True))
    return {name: by_name[name] for name in names}


def _momenta(state: Any, matrices: Matrices, params: PyTree) -> list[jax.Array]:
    """M of all matrices, in the order of :meth:`Matrices.batches`."""
    traces: dict[Path, jax.Array] = {}
    wanted = set(map(names_on, matrices.paths))
    state = unbox(getattr(state, "opt_state", state))
    for node in nodes_of(state, optax.TraceState, Int8TraceState):
        tree = jax.tree.map(lambda x: typed_sharding.gather(jnp.asarray(x)), node)
        trace = tree.trace
        if isinstance(node, Int8TraceState):
            decode = functools.partial(int8_blocks.decode, dtype=jnp.float32)
            trace = jax.tree.map(decode, trace, tree.trace_scale)
        for path, array in jax.tree.leaves_with_path(trace):
            if names_on(path) in traces and names_on(path) in wanted:
                raise ValueError(
                    f"the state has two momenta for parameter {quoted(path)}, as if that"
                    " of another optimizer were beside it: pass the state of one of them."
                )
            traces[names_on(path)] = array
    for path, leaf in zip(matrices.paths, matrices.leaves(params), strict=True):
        if names_on(path) not in traces:
            raise ValueError(
                f"the state has no momentum for parameter {name_and_shape(path, leaf)}: "
                "pass the state of the optimizer that updates it, and its dimension "
                "numbers."
            )
    tree = matrices.tree_of([traces[names_on(path)] for path in matrices.paths])
    wide = matrices.map(lambda _, leaf: leaf.astype(compute_dtype(leaf)), tree)
    return [
        typed_sharding.gather(part, (part.ndim - 2, part.ndim - 1))
        for part in matrices.batches(wide)
    ]
