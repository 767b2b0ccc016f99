"""The stage that scales every matrix by its shape."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.boundary import Stage, on_matrices
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices

SPECTRAL, SHAPE_SCALING, UNIT_RMS_NORM = "spectral", "shape_scaling", "unit_rms_norm"

# s² of a matrix of m inputs and n outputs, without the RMS. The names are those of
# Emerging-Optimizers. A matrix without entries has any scale.
_SQUARES: dict[str, Callable[[int, int], float]] = {
    SPECTRAL: max,
    SHAPE_SCALING: lambda m, n: max(1, n / max(m, 1)),
    UNIT_RMS_NORM: lambda m, n: n / max(m, 1),
}
_DEFAULT_RMS = 0.2


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scale s of every matrix: s² is the square of ``rms`` times ``square(m, n)``.

    Attributes:
      rms: A factor that may be traced; None for 1.
      square: A function of the matrix's inputs and outputs; None for s = 1.
    """

    rms: ArrayLike | None
    square: Callable[[int, int], float] | None

    @classmethod
    def of(cls, consistent_rms: ArrayLike | None, scale_mode: str = SPECTRAL) -> "Scale":
        """The scale that an optimizer has with these arguments.

        Raises:
          ValueError: If an argument is not valid, or the mode leaves a given
            ``consistent_rms`` without effect.
        """
        _checks.number("consistent_rms", consistent_rms, at_least=0, optional=True)
        _checks.choice("scale_mode", scale_mode, _SQUARES)
        if scale_mode == SPECTRAL:
            if consistent_rms is None:
                return cls(None, None)
            return cls(consistent_rms, _SQUARES[scale_mode])
        if _is_given(consistent_rms):
            remedy = f"it has no effect with scale_mode={scale_mode!r}; leave it out"
            _checks.refuse("consistent_rms", consistent_rms, remedy)
        return cls(None, _SQUARES[scale_mode])

    def known(self) -> "Scale":
        """The same scale, hashable: with a Python number for an RMS that is an array."""
        rms = None if self.rms is None else float(jax.device_get(self.rms))
        return dataclasses.replace(self, rms=rms)

    def value(self, m: int, n: int) -> float:
        """The scale s of a matrix, where the RMS is known."""
        rms = 1.0 if self.rms is None else float(jax.device_get(self.rms))
        return rms * self.without_rms(m, n)

    def without_rms(self, m: int, n: int) -> float:
        """The scale s of a matrix, divided by the RMS."""
        return 1.0 if self.square is None else math.sqrt(self.square(m, n))

    def square_of_norm(self, m: int, n: int) -> float:
        """The squared norm of sQ, over that of the RMS, for a Q of full rank."""
        return min(m, n) if self.square is None else self.square(m, n) * min(m, n)


def scale_by_shape(
    consistent_rms: ArrayLike | None = _DEFAULT_RMS,
    *,
    scale_mode: str = SPECTRAL,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every ``(m, n)`` matrix by :math:`s = \text{rms} \cdot \sqrt{\max(m, n)}`.

    The entries of a semi-orthogonal Q then have root mean square ``consistent_rms``,
    whatever its shape; 0.2 matches the updates of AdamW. The other modes follow other
    implementations; m is the number of inputs and n that of outputs:

    - ``"shape_scaling"``: :math:`s = \sqrt{\max(1, n / m)}`, as in Keller Jordan's Muon,
      :func:`optax.contrib.muon` and ``torch.optim.Muon``;
    - ``"unit_rms_norm"``: :math:`s = \sqrt{n / m}`, as in Scion and, by this name, in
      Megatron-LM: the root mean square of the outputs is at most that of the inputs.

    Args:
      consistent_rms: The root mean square; ``None`` for :math:`s = 1`. (In Optax's own
        ``scale_by_shape``, ``None`` stands for ``"shape_scaling"``.) The other modes do
        not use it, and refuse a number other than the default.
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
    return on_matrices(weight_dimension_numbers, shape_stage(scale))


def shape_stage(scale: Scale) -> Stage:
    """:func:`scale_by_shape` for given matrices."""

    def scaled(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
        dtype = compute_dtype(leaf)
        factor = jnp.asarray(axes.by_shape(scale.without_rms, leaf), dtype)
        if scale.rms is not None:
            factor = jnp.asarray(scale.rms, dtype) * factor
        return (factor * leaf.astype(dtype)).astype(leaf.dtype)

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        if scale.square is None:
            return optax.identity()
        return optax.stateless(lambda updates, _: matrices.map(scaled, updates))

    return stage


def _is_given(consistent_rms: ArrayLike | None) -> bool:
    """Whether a number differs from the default, which may come as an array."""
    if consistent_rms is None or isinstance(consistent_rms, jax.core.Tracer):
        return False
    return np.float32(jax.device_get(consistent_rms)) != np.float32(_DEFAULT_RMS)
