"""Weight decay: of all entries, or cautious."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.checks import require_shapes
from orscale_jax.trees.nodes import is_function, mask_like, nodes_of

Mask: TypeAlias = PyTree | Callable[[PyTree], PyTree]

MATRICES = "matrices"  # The mask that an optimizer of this library makes itself.


def is_mask_function(mask: Mask | None) -> TypeGuard[Callable[[PyTree], PyTree]]:
    """Whether a mask is a function, not a tree of booleans that is callable too."""
    return is_function(mask, _is_boolean)


def _is_boolean(leaf: Any) -> bool:
    """Whether a leaf of a mask is a boolean, also as an array."""
    return jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.bool)


def check_mask(mask: Mask | None) -> None:
    """Refuse a string other than "matrices"."""
    if isinstance(mask, str) and mask != MATRICES:
        remedy = f"pass {MATRICES!r}, a tree of booleans or a function to one"
        _checks.refuse("weight_decay_mask", mask, remedy)


def resolve_mask(mask: Mask | None, tree: PyTree, matrices: PyTree) -> Mask | None:
    """The mask of a whole optimizer, given the tree of its parameters.

    Args:
      mask: A tree of booleans, a prefix of one, a function to one, "matrices", or None.
      tree: The parameters.
      matrices: The mask that "matrices" stands for.
    """
    if isinstance(mask, str):
        return matrices
    mask = unbox(mask)
    if is_mask_function(mask):
        # optax.tree.map_params passes a placeholder without leaves.
        mask = mask(tree) if jax.tree.leaves(tree) else tree
    if mask is not None and jax.tree.leaves(tree):
        mask = mask_like(mask, tree)
        _require_mask(mask, tree)
    return mask


def _require_mask(mask: PyTree, tree: PyTree) -> None:
    """Refuse masks that :func:`optax.masked` takes for True or rejects without a name."""
    remedy = "pass a tree of booleans with the parameters' structure, or a prefix of it"
    if len(jax.tree.leaves(tree)) > 1 and jax.tree_util.all_leaves([mask]):
        _checks.refuse(
            "weight_decay_mask",
            mask,
            f"{remedy} with more than one leaf. To optax.inject_hyperparams, which takes "
            'functions for schedules, pass static_args="weight_decay_mask"',
        )
    require_booleans("weight_decay_mask", mask)
    try:
        jax.tree.map(lambda *_: None, mask, tree)
    except ValueError as error:
        raise ValueError(f"weight_decay_mask does not fit: {remedy}: {error}") from error


def require_booleans(argument: str, mask: PyTree) -> None:
    """Refuse leaves that Python takes for True or False and that are neither."""
    for leaf in jax.tree.leaves(mask):
        if not _is_boolean(leaf):
            remedy = "pass a tree of booleans with the parameters' structure, or a prefix"
            _checks.refuse(argument, leaf, remedy)


def refuse_name(argument: str, mask: Mask | None) -> None:
    """Refuse "matrices" in a stage, which does not know the other parameters."""
    if isinstance(mask, str):
        remedy = "only a whole optimizer takes a string; pass a tree of booleans"
        _checks.refuse(argument, mask, remedy)


def add_decayed_weights(
    weight_decay: ArrayLike | optax.Schedule, mask: Mask | None
) -> optax.GradientTransformation:
    """:func:`optax.add_decayed_weights`, whose count does not advance before 0.2.7."""
    refuse_name("mask", mask)
    stage = (
        _by_schedule(weight_decay)
        if callable(weight_decay)
        else optax.add_decayed_weights(weight_decay)
    )
    if mask is None:
        return stage

    def mask_of(tree: PyTree) -> PyTree:
        given = mask(tree) if is_mask_function(mask) else mask
        require_booleans("mask", given)
        return mask_like(given, tree)

    return optax.masked(stage, mask_of)


def _by_schedule(schedule: Callable[[Any], Any]) -> optax.GradientTransformation:
    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
        now = optax.add_decayed_weights(schedule(state.count))
        decayed, _ = now.update(updates, optax.EmptyState(), params)
        return decayed, state._replace(count=optax.safe_increment(state.count))

    init = optax.add_decayed_weights(schedule).init
    return optax.GradientTransformation(init, update)


# Users' extra arguments reach the stages, too: none of them is called this.
DECAY = "orscale_jax.weight_decay"


def with_scheduled_decay(
    inner: optax.GradientTransformation, weight_decay: ArrayLike | optax.Schedule
) -> optax.GradientTransformation:
    """Run ``inner`` with the extra argument ``DECAY``: a schedule that gives λ now.

    A number needs none. Whoever needs λ calls it; others evaluate nothing.
    """
    if not callable(weight_decay):
        return inner
    inner = optax.with_extra_args_support(inner)
    # Optax's class, which has no public name; `init` itself would start the backend.
    scheduled = type(jax.eval_shape(optax.add_decayed_weights(weight_decay).init, ()))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        for node in nodes_of(state, scheduled):
            extra_args[DECAY] = lambda _, count=node.count: weight_decay(count)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def add_cautious_decayed_weights(
    weight_decay: ArrayLike | optax.Schedule = 0.0, mask: Mask | None = None
) -> optax.GradientTransformation:
    r"""Add weight decay only to the entries that the update itself shrinks.

    .. math::

      u \mapsto u + \lambda \, \mathbf{1}[u \odot W \geq 0] \odot W,

    entry by entry. It is for updates that are subtracted later: put it before
    :func:`optax.scale_by_learning_rate`.

    Where the decay is coupled, as in :func:`orscale_jax.family.cautious`, the result is
    D, and the ratio sees the decay that was applied. The ceiling of the ratio rises from
    :math:`1 / (c \lambda)` to :math:`\|W\| / (c \lambda \|W_+\|)`, with :math:`W_+` the
    entries that decay: by about :math:`\sqrt 2` where half of them do.

    Args:
      weight_decay: :math:`\lambda`, at least 0, or a schedule.
      mask: Tree of booleans (or a prefix of one, or a callable from the parameters to
        one): False for parameters that do not decay.

    Returns:
      A transformation with the state of :func:`optax.add_decayed_weights`.

    Raises:
      ValueError: If ``weight_decay`` is not valid, or ``params`` is missing from
        ``update``.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import add_cautious_decayed_weights
      >>> stage = add_cautious_decayed_weights(0.5)
      >>> params, updates = jnp.array([2.0, 2.0]), jnp.array([1.0, -1.0])
      >>> print(stage.update(updates, stage.init(params), params)[0])
      [ 2. -1.]

    References:
      Chen et al. 2025, *Cautious Weight Decay*, arXiv:2510.12402, Algorithm 1.
    """
    _checks.number("weight_decay", weight_decay, at_least=0, schedule=True)
    weight_decay = _checks.scheduled("weight_decay", weight_decay)
    stage = cautious(add_decayed_weights(weight_decay, mask))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        require_shapes(updates, params)
        new, new_state = stage.update(*unbox((updates, state, params)))
        return rebox(new, updates), rebox(new_state, state)

    return optax.GradientTransformation(stage.init, update)


def cautious(decay: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply ``decay``, but not where its sign is opposite to the update's."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        zeros = jax.tree.map(jnp.zeros_like, updates)
        decayed, state = decay.update(zeros, state, params)
        return jax.tree.map(_add_where_signs_agree, updates, decayed), state

    return optax.GradientTransformation(decay.init, update)


def _add_where_signs_agree(update: jax.Array, decayed: jax.Array) -> jax.Array:
    # Signs, since the product of two numbers may underflow or overflow.
    agree = jnp.sign(update) * jnp.sign(decayed) >= 0
    return jnp.where(agree, update + decayed, update)
