"""The check of a restored state before a run continues with it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.audit.state import AbstractState, leaves_by_path
from orscale_jax.family.sphere import InitialNormState
from orscale_jax.sharding import param_shardings
from orscale_jax.transforms.trust_ratio import CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.checks import require_state, state_arrays
from orscale_jax.trees.nodes import nodes_of

_CHANGED = 0.25  # A step does not change most matrices' norms by so much.


@param_shardings.audit()
def check_state(
    state: optax.OptState, optimizer: optax.GradientTransformation, params: PyTree
) -> None:
    """Refuse a restored state that does not belong to the optimizer and the parameters.

    Call it after a restore and before the first step, with any Optax optimizer. The state
    has to have the structure, shapes and kinds of dtypes of ``optimizer.init(params)``.
    The arrays of the parameters have to be finite. The states of :func:`orscale` and
    ``family.hyperball`` also hold the norms of the matrices, by which a state of another
    model is told from that of this one, even if all its names and shapes agree.

    Args:
      state: The restored state.
      optimizer: The optimizer, which may be a ``flax.nnx.Optimizer``.
      params: The restored parameters, or a model of Flax NNX.

    Raises:
      ValueError: If the state does not fit. The message names the array and the
        parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import check_state, muon
      >>> params, optimizer = {"kernel": jnp.eye(2)}, muon(1e-3)
      >>> check_state(optimizer.init(params), optimizer, params)
    """
    params = trained(params, optimizer)
    optimizer = getattr(optimizer, "tx", optimizer)
    bare, weights = unbox((state, params))
    # JAX would keep the trace of init itself, and a later init would learn nothing.
    wanted = jax.eval_shape(lambda params: optimizer.init(params), params)
    require_state(bare, unbox(wanted), weights)
    for entry in state_arrays(bare, weights, by_structure=True):
        if entry.owner is None or not jnp.issubdtype(entry.array.dtype, jnp.inexact):
            continue
        # c is infinite for a matrix that was zero.
        bad = jnp.isnan if entry.field == "numbers" else lambda x: ~jnp.isfinite(x)
        if jax.device_get(bad(entry.array).any()):
            raise ValueError(
                f"{entry.field} of parameter {entry.name} is not finite in the restored "
                "state: restore an earlier checkpoint."
            )
    kept, leaf_of = AbstractState.of(optimizer, params).kept, leaves_by_path(weights)
    stored = [node.weight_norm for node in nodes_of(bare, CalibratedTrustRatioState)]
    stored += [node.initial_norm for node in nodes_of(bare, InitialNormState)]
    changes: list[Any] = []
    for path, norms in (pair for tree in stored for pair in leaves_by_path(tree).items()):
        if (axes := kept[path].axes) is not None:
            now, then = map(np.ravel, jax.device_get((axes.norms(leaf_of[path]), norms)))
            changes += [*(abs(now - then)[then > 0] / then[then > 0])]
    # Matrices that were zero, such as half of LoRA's, grow fast at first.
    if changes and np.quantile(changes, 0.25, method="lower") > _CHANGED:
        raise ValueError(
            "the state is that of another model: the norms of most matrices in it differ "
            f"by more than {_CHANGED:.0%} from the parameters' norms. Restore both from "
            "one checkpoint."
        )
