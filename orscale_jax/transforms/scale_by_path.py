"""Numbers that multiply the updates of some parameters, by expressions over paths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.parameters import path_rules
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.names import Path, name_and_shape, names_on
from orscale_jax.trees.nodes import is_masked, leaves_and_masks


def scale_by_path(
    rules: path_rules.ByExpression[ArrayLike],
) -> optax.GradientTransformation:
    r"""Multiply the updates of some parameters: their learning rate, after an optimizer.

    It has no state, and works after any optimizer of Optax:
    ``optax.chain(optax.adamw(1e-3), scale_by_path({"embed": 0.1}))``. If the update
    contains weight decay, the decay is multiplied as well. After
    :func:`~orscale_jax.family.hyperball`, matrices no longer keep their norms. Put it
    inside of :func:`keep_master_weights`, not after it: bfloat16 parameters would no
    longer follow their master weights.

    Args:
      rules: A mapping, or a sequence of pairs, from regular expressions over the paths,
        as in :func:`by_path`, to positive numbers. The first expression that matches
        applies. Updates that no expression matches stay as they are. If a leaf holds
        several layers, an array in place of a number gives each layer its own factor. The
        array has the lengths of the first axes of the leaf, such as ``(24,)``, or as many
        axes as the leaf, with length 1 along all axes but those of layers, such as ``(1,
        24, 1)``.

    Returns:
      A transformation. Updates keep their shapes, dtypes and shardings; the product is
      rounded once, from float32 or a wider dtype.

    Raises:
      ValueError: At once, if an expression or a number is not valid. From ``init`` and
        ``update``, if an expression applies to no parameter (the message names the
        nearest paths), or an array does not fit a leaf.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import muon, scale_by_path
      >>> rates = jnp.array([1.0, 0.5])  # Of two layers.
      >>> optimizer = optax.chain(
      ...     muon(1e-3, weight_dimension_numbers={"blocks": None, "head": None}),
      ...     scale_by_path({"head": 0.1, "blocks": rates}),
      ... )
      >>> params = {"blocks": jnp.ones((2, 4)), "head": jnp.ones(4)}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> print(updates["blocks"][:, 0], updates["head"][0])
      [-0.0011  -0.00055] -0.00011
    """
    pairs = path_rules.compiled(rules, "rules", "positive numbers", _checked)

    def factors(tree: PyTree) -> dict[Path, ArrayLike]:
        """The factor of each leaf that an expression matches, which broadcasts to it."""
        leaves = leaves_and_masks(tree)
        if not leaves:  # As in matrix_axes.
            return {}
        factor_of = path_rules.values(pairs, leaves, "scale_by_path")
        for path, leaf in leaves:
            shape, lengths = np.shape(factor_of.get(names_on(path), 1.0)), np.shape(leaf)
            fits = len(shape) <= len(lengths) and all(
                n in (1, length) for n, length in zip(shape, lengths, strict=False)
            )
            if not fits and not is_masked(leaf):
                raise ValueError(
                    f"the array of scale_by_path for {name_and_shape(path, leaf)} has "
                    f"shape {shape}: pass a number, or an array with the lengths of the "
                    "leaf's first axes, or with as many axes as the leaf, with 1 along "
                    "all but those of layers. A narrower expression before this one "
                    "gives the leaf another number."
                )
        return factor_of

    def init(params: PyTree) -> optax.EmptyState:
        factors(unbox(params))  # Checks the rules.
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.EmptyState]:
        bare = unbox(updates)
        factor_of = factors(bare)

        def times(path: Any, leaf: Any) -> Any:
            if (given := factor_of.get(names_on(path))) is None:
                return leaf
            x = jnp.asarray(leaf)
            wide = jnp.promote_types(x.dtype, jnp.float32)
            factor = jnp.asarray(given, wide)
            factor = jnp.expand_dims(factor, tuple(range(factor.ndim, x.ndim)))
            spec = zip(factor.shape, typed_sharding.spec(x), strict=True)
            entries = [axes if n > 1 else None for n, axes in spec]
            factor = typed_sharding.shard_as(factor, x, entries)
            return (factor * x.astype(wide)).astype(x.dtype)

        return rebox(jax.tree.map_with_path(times, bare), updates), state

    return optax.GradientTransformation(init, update)


def _checked(name: str, value: Any) -> ArrayLike:
    """The factor, if it is positive and finite or not known yet."""
    remedy = (
        "pass a positive finite number, or an array of them for stacked layers. A group "
        "of optax.partition freezes parameters or gives them a schedule"
    )
    known = isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
    if not known or not validate.is_real(getattr(value, "dtype", type(value))):
        validate.refuse(name, value, remedy)
    validate.not_rounded(name, value)
    if not isinstance(value, jax.core.Tracer):
        with np.errstate(over="ignore", under="ignore"):
            finite = np.asarray(jax.device_get(value)).astype(np.float32)
        if not (np.isfinite(finite) & (finite > 0)).all():
            validate.refuse(name, value, remedy)
    return value
