"""bfloat16 parameters that lose no update: a wrapper around a whole optimizer."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import validate
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.checks import require_shapes
from orscale_jax.trees.names import quoted
from orscale_jax.trees.nodes import is_absent, nodes_of

# A bfloat16 number is the upper half of a float32 number.
_UPPER = np.uint32(0xFFFF0000)
# bfloat16 numbers from here on differ by normal float32 numbers, or not at all: devices
# differ in what they do with subnormal ones.
_SMALLEST = np.float32(2.0**-118)
_bitcast = jax.lax.bitcast_convert_type


class MasterWeightsState(NamedTuple):
    """State of :func:`keep_master_weights`."""

    #: The bits of each master weight below those of its parameter, in a tree like the
    #: parameters. Arrays have their shapes and dtype uint16, or uint8 with ``bits=8``;
    #: ``optax.MaskedNode()`` stands for a parameter that is not bfloat16.
    low_bits: PyTree
    #: The state of the inner optimizer.
    inner_state: optax.OptState


def keep_master_weights(
    inner: optax.GradientTransformation, bits: int = 16
) -> optax.GradientTransformationExtraArgs:
    r"""Train bfloat16 parameters as if they were float32, or nearly so with ``bits=8``.

    A bfloat16 number is the upper half of a float32 number. The parameters hold the upper
    halves of float32 *master weights*, and the state holds the lower halves:

    .. math::

      \text{master} = \text{parameter} \cdot 2^{16} + \text{low bits}, \quad
      \text{as integers}.

    No update is lost, however small, and the memory is the same as with float32 weights.

    With ``bits=8`` a master weight has 24 bits and takes 3 bytes, its parameter included.
    Each new master weight is rounded to the nearest number of 24 bits, to an even one if
    two are as near. A step of more than :math:`2^{-16} |w|` always moves a weight w, and
    a step of less than :math:`2^{-17} |w|` is always lost. Use 16 bits at rates below
    1.5e-5 if AdamW trains weights near 1, such as the scales of norms.

    ``inner`` sees only the master weights, and gradients in float32. Its state therefore
    has the dtypes of float32 training, and the norms of :func:`orscale` are norms of the
    master weights. It returns float32 updates, with which :func:`optax.apply_updates`
    moves each parameter to exactly the upper half of its new master weight.

    Given the same gradients, master weights of 32 bits equal float32 weights to the bit,
    except that a weight below :math:`2^{-118}` (3e-36) in magnitude becomes zero. A
    parameter is its master weight rounded toward zero, which is smaller by less than one
    part in 128. The wrapper works elementwise, and gives the same result on every mesh.

    Put other transformations and wrappers inside, such as :func:`optax.chain`,
    :func:`optax.inject_hyperparams` and :func:`optax.apply_if_finite`, because an update
    that changes on its way to the parameter is wrong. :class:`optax.MultiSteps` may be
    inside or around it. Behind a mask that freezes a parameter, or a stage that changes
    updates, master weights drift, which ``describe(..., probe=True)`` shows. Code that
    changes parameters by other means changes only their upper halves.

    Args:
      inner: The whole optimizer, such as ``orscale(1e-3)`` or a chain that ends in one.
      bits: How many bits of a master weight the state holds: 16 or 8.

    Returns:
      A transformation with :class:`MasterWeightsState`. The updates of bfloat16
      parameters are float32; parameters of other dtypes have the updates of ``inner``.

    Raises:
      TypeError: In ``init``, if a parameter has fewer bits than float32 and is not
        bfloat16, such as float16: it is not the upper half of a float32 number.
      ValueError: At once, if ``bits`` is neither 16 nor 8. In ``update``, if ``params``
        is missing, or a parameter or its low bits have another shape or dtype than in
        ``init``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import keep_master_weights
      >>> def train(optimizer, params):
      ...     state = optimizer.init(params)
      ...     for _ in range(100):
      ...         updates, state = optimizer.update({"w": jnp.ones(1)}, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...     return params["w"]
      >>> params = {"w": jnp.ones(1, jnp.bfloat16)}
      >>> print(train(optax.sgd(1e-3), params))  # Less than half a unit: lost.
      [1]
      >>> print(train(keep_master_weights(optax.sgd(1e-3)), params))
      [0.898438]
      >>> print(train(keep_master_weights(optax.sgd(1e-3), bits=8), params))
      [0.898438]

    References:
      Micikevicius et al. 2018, *Mixed Precision Training*, arXiv:1710.03740; Zamirai et
      al. 2020, *Revisiting BFloat16 Training*, arXiv:2010.06192, for what is lost without
      master weights; Gonzalez Ortiz et al. 2026, *FlashOptim*, arXiv:2602.23349, for
      weights of 24 bits. Transformer Engine's ``store_param_remainders`` and
      modded-nanogpt's mantissa buffers keep the lower halves in the same way.
    """
    validate.transformation("inner", inner)
    if not validate.is_whole(bits) or bits not in (8, 16):
        validate.refuse("bits", bits, "pass 16 or 8")
    inner = optax.with_extra_args_support(inner)
    stored = jnp.dtype(f"uint{bits}")

    def init(params: PyTree) -> MasterWeightsState:
        def low_bits(path: Any, param: Any) -> Any:
            if _is_bfloat16(param):
                return jnp.zeros_like(param, stored)
            dtype = getattr(param, "dtype", jnp.float32)
            if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
                raise TypeError(
                    f"parameter {quoted(path)} is {dtype}, which is not the upper half "
                    "of float32: make it bfloat16 or float32."
                )
            return optax.MaskedNode()

        low = rebox(jax.tree.map_with_path(low_bits, unbox(params)), params)
        return MasterWeightsState(low, inner.init(_as_float32(params)))

    def update(
        updates: PyTree,
        state: MasterWeightsState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, MasterWeightsState]:
        require_shapes(updates, params)
        if any(low.dtype != stored for low in jax.tree.leaves(state.low_bits)):
            raise ValueError(
                f"the low bits in the state are not those of bits={bits}: pass the "
                "result of orscale_jax.convert_state(state, optimizer, params)."
            )
        masters = master_weights(state, params)
        steps, inner_state = inner.update(
            _as_float32(updates), state.inner_state, masters, **extra_args
        )
        trees = unbox((steps, masters, params, state.low_bits))
        structure: Any = jax.tree.structure(trees[0], is_leaf=lambda x: x is None)
        columns, moves = map(structure.flatten_up_to, trees), []
        for step, master, param, low in zip(*columns, strict=True):
            if step is None or is_absent(low):
                moves.append((step, low))
                continue
            new = (master + step).astype(jnp.float32)  # As optax.apply_updates has it.
            new = jnp.where(jnp.abs(new) < _SMALLEST, np.float32(0), new)
            new = jax.lax.reduce_precision(new, exponent_bits=8, mantissa_bits=7 + bits)
            lower = (_bitcast(new, jnp.uint32) >> (16 - bits)).astype(stored)
            moves.append((_update_to(new, param), typed_sharding.shard_like(lower, low)))
        changes, lows = (structure.unflatten(move[i] for move in moves) for i in (0, 1))
        after = MasterWeightsState(rebox(lows, state.low_bits), inner_state)
        return rebox(changes, updates), after

    return optax.GradientTransformationExtraArgs(init, update)


def master_weights(state: optax.OptState, params: PyTree) -> PyTree:
    """Return the float32 master weights of bfloat16 parameters, for example to export.

    Args:
      state: A state with one :class:`MasterWeightsState` in it, at any depth.
      params: The parameters of the same step.

    Returns:
      A tree like the parameters, with float32 master weights in place of those that are
      bfloat16.

    Raises:
      ValueError: If there is no :class:`MasterWeightsState` in the state or more than
        one, or it is of parameters of other shapes or dtypes.
    """
    states = nodes_of(state, MasterWeightsState)
    if len(states) != 1:
        raise ValueError(
            f"the state has {len(states)} MasterWeightsState instead of one: pass the "
            "state of one optimizer that keep_master_weights made, and then the "
            "parameters."
        )
    return with_master_weights(states, params)


def with_master_weights(states: Iterable[MasterWeightsState], params: PyTree) -> PyTree:
    """The parameters, with master weights for those that any of the states has."""

    def master(path: Any, low_bits: Any, param: Any) -> Any:
        if is_absent(low_bits):
            return param  # Without gradients, or of another dtype.
        if not _is_bfloat16(param):
            raise ValueError(
                f"parameter {quoted(path)} was bfloat16 and is {jnp.result_type(param)}: "
                "add updates with optax.apply_updates, which keeps the dtype of "
                "parameters."
            )
        if np.shape(low_bits) != param.shape:
            raise ValueError(
                f"parameter {quoted(path)} has shape {param.shape}, but its low bits "
                f"have shape {np.shape(low_bits)}: pass the state of these parameters."
            )
        low = typed_sharding.shard_like(jnp.asarray(low_bits), param)
        return _joined(param, low.astype(jnp.uint32) << (16 - 8 * low.dtype.itemsize))

    masters = unbox(params)
    for state in states:
        lows = unbox(state.low_bits)
        masters = jax.tree.map_with_path(master, lows, masters, is_leaf=is_absent)
    return rebox(masters, params)


@jax.custom_jvp
def _update_to(master: jax.Array, param: jax.Array) -> jax.Array:
    """The update that takes a parameter to the upper half of its new master weight."""
    bits = _bitcast(master, jnp.uint32) & _UPPER, _upper(param)
    new, old = (_bitcast(half, jnp.float32) for half in bits)
    # Exact, or the new one is so much larger that the error is rounded away. Infinity
    # stays infinity, and −0 + −0 = −0.
    return jnp.where(bits[0] == bits[1], np.float32(-0.0), new - old)


@_update_to.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    of_master, of_param = tangents
    return _update_to(*primals), of_master - of_param.astype(jnp.float32)


# Bits have no derivatives: a master weight counts as its parameter plus a constant.
@jax.custom_jvp
def _joined(param: jax.Array, low_bits: jax.Array) -> jax.Array:
    return _bitcast(_upper(param) | low_bits, jnp.float32)


@_joined.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    return _joined(*primals), tangents[0].astype(jnp.float32)


def _upper(param: jax.Array) -> jax.Array:
    """The bits of the float32 number that a bfloat16 number is."""
    return _bitcast(jnp.asarray(param), jnp.uint16).astype(jnp.uint32) << 16


def _as_float32(tree: PyTree) -> PyTree:

    def widened(x: Any) -> Any:
        if not _is_bfloat16(x):
            return x
        abstract = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jnp.float32) if abstract else jnp.asarray(x, jnp.float32)

    return jax.tree.map(widened, tree)


def _is_bfloat16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16
