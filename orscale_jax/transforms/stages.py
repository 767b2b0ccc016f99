"""The stages beside Q and the ratio: s, λW, D = 0 without momentum."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, broadcast, on_matrices
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.nodes import TraceLog, broadcast_prefix, is_function, mask_like

SPECTRAL, SHAPE_SCALING, UNIT_RMS_NORM = "spectral", "shape_scaling", "unit_rms_norm"

# s² of a matrix of m inputs and n outputs, without the RMS. The names are those of
# Emerging-Optimizers. A matrix without entries has any scale.
_SQUARES: dict[str, Callable[[int, int], float]] = {
    SPECTRAL: max,
    SHAPE_SCALING: lambda m, n: max(1, n / max(m, 1)),
    UNIT_RMS_NORM: lambda m, n: n / max(m, 1),
}

#: Defaults of the paper's language-model configuration.
CONSISTENT_RMS, SCALE_MODE, WEIGHT_DECAY = 0.2, SPECTRAL, 0.1

Mask: TypeAlias = PyTree | Callable[[PyTree], PyTree]

MATRICES_ONLY = "matrices"  # The mask that an optimizer of this library makes itself.


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scale s of every matrix: s² is the square of ``rms`` times ``square(m, n)``."""

    rms: ArrayLike | None  # May be traced; None for 1.
    square: Callable[[int, int], float] | None  # Of inputs and outputs; None for s = 1.

    @classmethod
    def of(cls, consistent_rms: ArrayLike | None, scale_mode: str) -> "Scale":
        """The scale that an optimizer has with these arguments, which are checked."""
        validate.number("consistent_rms", consistent_rms, at_least=0, optional=True)
        validate.choice("scale_mode", scale_mode, _SQUARES)
        square = _SQUARES[scale_mode]
        if scale_mode == SPECTRAL:
            return cls(consistent_rms, None if consistent_rms is None else square)
        # None is true of the other modes. The default may come as an array.
        if not isinstance(consistent_rms, jax.core.Tracer | None):
            rms = jax.device_get(consistent_rms)
            if np.float32(rms) != np.float32(CONSISTENT_RMS):
                why = f"it has no effect with scale_mode={scale_mode!r}"
                remedy = f"leave it out, or pass scale_mode={SPECTRAL!r}"
                validate.refuse("consistent_rms", rms, f"{why}; {remedy}")
        return cls(None, square)

    def value(self, m: int, n: int) -> float:
        """The scale s of a matrix, where the RMS is known."""
        rms = 1.0 if self.rms is None else float(jax.device_get(self.rms))
        return rms * self.without_rms(m, n)

    def without_rms(self, m: int, n: int) -> float:
        """The scale s of a matrix, divided by the RMS."""
        return 1.0 if self.square is None else math.sqrt(self.square(m, n))


# What the audit reads: the matrices of each stage that scales.
scaled: TraceLog[tuple[Matrices, Scale]] = TraceLog("scales")


def scale_by_shape(
    consistent_rms: ArrayLike | None = CONSISTENT_RMS,
    *,
    scale_mode: str = SCALE_MODE,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every ``(m, n)`` matrix by :math:`s = \text{rms} \cdot \sqrt{\max(m, n)}`.

    The entries of a semi-orthogonal Q of any shape then have the root mean square
    ``consistent_rms``. The default, 0.2, matches the updates of AdamW. The other modes
    follow other implementations, where m is the number of inputs and n is the number of
    outputs:

    - ``"shape_scaling"``: :math:`s = \sqrt{\max(1, n / m)}`, as in Keller Jordan's Muon,
      :func:`optax.contrib.muon` and ``torch.optim.Muon``;
    - ``"unit_rms_norm"``: :math:`s = \sqrt{n / m}`, as in Scion and, by this name, in
      Megatron-LM. The root mean square of the outputs is at most the root mean square of
      the inputs.

    Args:
      consistent_rms: The root mean square; ``None`` for :math:`s = 1`. (In Optax's own
        ``scale_by_shape``, ``None`` stands for ``"shape_scaling"``.) The other modes do
        not use it, and refuse any value but the default.
      scale_mode: ``"spectral"``, as above, ``"shape_scaling"`` or ``"unit_rms_norm"``.
        The inputs are the reduction axes of the dimension numbers.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or, from ``update``, if a leaf is not a
        matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_shape
      >>> stage = scale_by_shape(0.2)
      >>> updates = {"kernel": jnp.ones((2, 100))}
      >>> print(stage.update(updates, stage.init(updates))[0]["kernel"][0, 0])
      2.0

    References:
      Liu et al. 2025, arXiv:2502.16982, section 2.2; Lou & You, *OrScale*, section 2;
      Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Pethick et al. 2025,
      arXiv:2502.07529.
    """
    scale = Scale.of(consistent_rms, scale_mode)
    if scale.square is None:
        return optax.identity()
    return on_matrices(weight_dimension_numbers, functools.partial(shape_stage, scale))


def where_nonzero(
    inner: optax.GradientTransformation,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Apply ``inner``, and replace its result by 0 for every matrix whose update is 0.

    OrScale computes D inside this wrapper. A matrix without momentum (an expert without
    tokens, a frozen branch) then rests, with :math:`D = 0` instead of :math:`D = \lambda
    W`. Numbers below the smallest normal number of float32 (of float64 for float64) count
    as zero.

    Args:
      inner: A transformation that keeps the updates' structure, such as
        :func:`optax.add_decayed_weights`.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with the state of ``inner``, which runs at every step.

    Raises:
      ValueError: From ``init`` and ``update``, if a leaf is not a matrix.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import where_nonzero
      >>> stage = where_nonzero(optax.add_decayed_weights(0.1))
      >>> params = {"kernel": jnp.ones((2, 2))}
      >>> zero = {"kernel": jnp.zeros((2, 2))}
      >>> print(stage.update(zero, stage.init(params), params)[0]["kernel"].max())
      0.0

    References:
      Lou & You, *OrScale*, Definition 2.
    """
    validate.transformation("inner", inner)
    stage = functools.partial(where_nonzero_stage, inner)
    return on_matrices(weight_dimension_numbers, stage)


def shape_stage(scale: Scale, matrices: Matrices) -> optax.GradientTransformation:
    """Q to sQ: :func:`scale_by_shape` for given matrices."""

    def times_s(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
        factor = jnp.asarray(axes.by_shape(scale.without_rms, leaf), leaf.dtype)
        if scale.rms is not None:
            factor = jnp.asarray(scale.rms, leaf.dtype) * factor
        return factor * leaf

    def init(params: PyTree) -> optax.EmptyState:
        matrices.require_whole(params)
        if not isinstance(scale.rms, jax.core.Tracer):  # Of optax.inject_hyperparams.
            scaled.note((matrices, scale))
        return optax.EmptyState()

    stage = optax.stateless(lambda updates, _: matrices.map(times_s, updates))
    if scale.square is None:
        stage = optax.identity()
    return stage._replace(init=init)


def decay_stage(
    weight_decay: ArrayLike | optax.Schedule, mask: PyTree | None
) -> optax.GradientTransformation:
    """Adds λW, where a resolved mask is not False."""
    stage = optax.add_decayed_weights(weight_decay)
    if mask is None:
        return stage
    # A function, since optax.masked would call a mask that is a callable tree.
    return optax.masked(stage, lambda tree: mask_like(mask, tree))


def resolve_mask(mask: Mask | None, tree: PyTree, matrices: PyTree) -> PyTree | None:
    """The mask for given parameters, where ``matrices`` stands for a string."""
    if isinstance(mask, str):
        return matrices
    mask = unbox(mask)
    if is_function(mask, _is_boolean):
        # optax.tree.map_params passes a placeholder without leaves.
        mask = mask(tree) if jax.tree.leaves(tree) else tree
    if mask is None or not jax.tree.leaves(tree):
        return mask
    mask = mask_like(mask, tree)
    remedy = "pass a tree of booleans with the parameters' structure, or a prefix of it"
    if jax.tree_util.all_leaves([mask]) and len(jax.tree.leaves(tree)) > 1:
        validate.refuse(
            "weight_decay_mask",
            mask,
            f"{remedy} with more than one leaf. To optax.inject_hyperparams, which takes "
            'functions for schedules, pass static_args="weight_decay_mask"',
        )
    for leaf in jax.tree.leaves(mask):  # Python takes others for True or False, too.
        if not _is_boolean(leaf):
            validate.refuse("weight_decay_mask", leaf, remedy)
    return broadcast_prefix(mask, tree, f"weight_decay_mask does not fit: {remedy}")


def _is_boolean(leaf: Any) -> bool:
    is_bool = jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.bool)
    return is_bool and np.ndim(leaf) == 0


def where_nonzero_stage(
    inner: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """:func:`where_nonzero` for given matrices."""
    inner = optax.with_extra_args_support(inner)

    def largest(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
        # Where the maxima of several devices are compared, a NaN may lose.
        sizes = jnp.where(jnp.isnan(leaf), jnp.ones_like(leaf), jnp.abs(leaf))
        return axes.reduce(functools.partial(jnp.max, initial=0), sizes)

    def keep(axes: MatrixAxes, leaf: jax.Array, size: jax.Array) -> jax.Array:
        # Some platforms flush subnormal numbers to zero, some only where they round. NaN
        # is no zero.
        zero = size < jnp.finfo(size.dtype).tiny
        return jnp.where(broadcast(axes, zero, leaf), jnp.zeros_like(leaf), leaf)

    def init(params: PyTree) -> Any:
        matrices.require_whole(params)
        return inner.init(params)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        if typed_sharding.mesh_of(matrices.leaves(updates), None) is None:
            # On one device, the sum is a single kernel. On CPUs XLA would write an abs
            # to memory, which the scale of Newton–Schulz takes, too.
            [sizes] = matrices.sums(lambda x: jnp.maximum(x, -x), updates)
        else:
            # A mesh would exchange sums together with some of the norms, which depend on
            # them, and then needs more exchanges.
            sizes = matrices.map(largest, updates)
        updates, state = inner.update(updates, state, params, **extra_args)
        return matrices.map(keep, updates, sizes), state

    return optax.GradientTransformationExtraArgs(init, update)
