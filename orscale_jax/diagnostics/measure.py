"""Measurements on a slower clock: singular values, convergence, angles."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import _checks
from orscale_jax.newton_schulz.polar import polar_factor
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms import momentum as int8_blocks
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.momentum import Int8TraceState
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import name_and_shape, names_on, quoted
from orscale_jax.trees.nodes import nodes_of

PolarFactor = Callable[[jax.Array], jax.Array]


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1)))


def _stable_rank(x: jax.Array) -> jax.Array:
    values = jnp.linalg.svd(x, compute_uv=False)
    largest = jnp.max(values, axis=-1, initial=0, keepdims=True)
    # In this order, since squares may overflow or underflow.
    return jnp.sum(jnp.square(values / jnp.where(largest == 0, 1, largest)), axis=-1)


def _polar_error(q: jax.Array) -> jax.Array:
    m, n = q.shape[-2:]
    # By default accelerators would round the operands to fewer bits than the error has.
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    gram = product(q.mT, q) if m >= n else product(q, q.mT)
    error = gram - jnp.broadcast_to(jnp.eye(min(m, n), dtype=q.dtype), gram.shape)
    return _norm(error) / max(min(m, n), 1) ** 0.5


def _angle(a: jax.Array, b: jax.Array) -> jax.Array:
    norms = _norm(a) * _norm(b)
    cosine = jnp.sum(a * b, axis=(-2, -1)) / jnp.where(norms == 0, 1, norms)
    return jnp.degrees(jnp.arccos(jnp.clip(cosine, -1, 1)))


# Measurements of the momentum, of shape (*batch, m, n), and of that of an earlier step.
_MEASUREMENTS: dict[str, Callable[[jax.Array, jax.Array, PolarFactor], jax.Array]] = {
    "momentum_stable_rank": lambda m, *_: _stable_rank(m),
    "polar_error": lambda m, _, polar: _polar_error(polar(m)),
    "direction_angle": lambda m, before, polar: _angle(polar(m), polar(before)),
}
NEEDS_PREVIOUS = frozenset({"direction_angle"})


def measure(
    state: Any,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    names: Sequence[str] = ("momentum_stable_rank", "polar_error"),
    previous: Any = None,
    polar: PolarFactor = polar_factor,
) -> dict[str, PyTree]:
    r"""Measure the momentum M of every matrix and its polar factor Q.

    Call it every hundredth step or so: unlike :func:`read`, it computes. Q is the polar
    factor of the M in the state. With Nesterov's momentum, the optimizer uses the polar
    factor of :math:`\mu M + G` instead, and the state does not hold G. By name:

    ``"momentum_stable_rank"``
      :math:`\|M\|_F^2 / \|M\|_2^2`, between 1 and min(m, n); 0 for a zero matrix. Costs
      the singular values of M.
    ``"polar_error"``
      :math:`\|Q^\top Q - I\|_F / \sqrt{\min(m, n)}`, of the smaller Gram matrix: 0 for an
      orthogonal Q, 1 for a zero one. Did Newton–Schulz converge? Costs a Newton–Schulz
      and a product.
    ``"direction_angle"``
      The angle between the Q of ``previous`` and this Q, in degrees: how much the
      direction turned in between. Costs two Newton–Schulz.

    Singular values of large matrices take many times as long as Newton–Schulz. Sharded
    matrices are gathered on every device.

    Args:
      state: A state as in :func:`read`, of an optimizer with momentum.
      params: The parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      names: The names of the measurements to take.
      previous: A state of an earlier step, for ``"direction_angle"``.
      polar: Makes the polar factors of an array of shape (..., m, n):
        :func:`orscale_jax.polar_factor`, with the optimizer's settings if it has others
        than the defaults (``functools.partial(polar_factor, steps=8)``).

    Returns:
      Trees with one entry per matrix, by name, in float32 (float64 for float64), to be
      passed to :meth:`History.append` as ``measurements``.

    Raises:
      ValueError: If a name is not known, ``previous`` is missing, or a state has no
        momentum for these matrices.

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
    for name in names:
        _checks.choice("names", name, tuple(_MEASUREMENTS))
    if previous is None and NEEDS_PREVIOUS & {*names}:
        raise ValueError(
            f"{sorted(NEEDS_PREVIOUS & {*names})} compares two states: pass previous=, "
            "the optimizer's state of an earlier step."
        )
    matrices = Matrices.of(weight_dimension_numbers, params)
    now = whole_parts(matrices, _momenta(state, matrices, params))
    before = now
    if previous is not None:
        before = whole_parts(matrices, _momenta(previous, matrices, params))
    measured = [
        _measured(tuple(names), polar, *pair) for pair in zip(now, before, strict=True)
    ]
    return {
        name: matrices.entries_of_parts([part[name] for part in measured])
        for name in names
    }


# Jitted, so that equal shapes are compiled once, and only what is requested.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _measured(
    names: tuple[str, ...], polar: PolarFactor, now: jax.Array, before: jax.Array
) -> dict[str, jax.Array]:
    return {name: _MEASUREMENTS[name](now, before, polar) for name in names}


def _momenta(state: Any, matrices: Matrices, params: PyTree) -> PyTree:
    """M of the leaves of matrices, whole on every device."""
    state = unbox(getattr(state, "opt_state", state))
    traces: dict[Any, Any] = {}
    for node in nodes_of(state, optax.TraceState, Int8TraceState):
        for path, array in jax.tree.leaves_with_path(_trace(node)):
            if names_on(path) in traces:
                raise ValueError(
                    f"the state has two momenta for parameter {quoted(path)}, as if that"
                    " of another optimizer were beside it: pass the state of one of them."
                )
            traces[names_on(path)] = array
    pairs = zip(matrices.paths, matrices.leaves(unbox(params)), strict=True)
    return matrices.tree_of(
        [_momentum(traces.get(names_on(path)), path, leaf) for path, leaf in pairs]
    )


def _trace(node: optax.TraceState | Int8TraceState) -> PyTree:
    """M, in float32 if its state has 8 bits."""
    if isinstance(node, optax.TraceState):
        return node.trace

    def decoded(codes: Any, scales: Any) -> jax.Array:
        return int8_blocks.decode(_whole(codes), _whole(scales), jnp.float32)

    return jax.tree.map(decoded, node.trace, node.trace_scale)


def _whole(array: Any) -> jax.Array:
    """The array, whole on every device."""
    return typed_sharding.gather(jnp.asarray(array))


def _momentum(array: Any, path: Any, leaf: Any) -> jax.Array:
    if array is None:
        raise ValueError(
            f"the state has no momentum for parameter {name_and_shape(path, leaf)}: pass "
            "the state of the optimizer that updates it, and its dimension numbers."
        )
    whole = _whole(array)
    return whole.astype(compute_dtype(whole))


def whole_parts(matrices: Matrices, tree: PyTree) -> list[jax.Array]:
    """The parts of :meth:`Matrices.parts` in float32 or wider, without sharded matrices.

    Singular values need whole matrices, so matrices on Explicit axes are gathered.
    """
    wide = matrices.map(lambda _, leaf: leaf.astype(compute_dtype(leaf)), tree)
    return [
        typed_sharding.gather(part, (part.ndim - 2, part.ndim - 1))
        for part in matrices.parts(wide)
    ]
