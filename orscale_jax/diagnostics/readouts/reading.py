"""The readouts of an optimizer: norms, ratios and steps of every matrix."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import names_on


class _Fields(NamedTuple):
    """The trees of a :class:`Reading`."""

    #: The ratio r̂ of the last update. 1 before the first one.
    trust_ratio: PyTree
    #: Its ratio r before the clip. 1 where it is not measured; NaN if D is not finite.
    raw_trust_ratio: PyTree
    #: The constant c, 0 while unset, 1 without calibration, inf without initial scale.
    calibration: PyTree
    #: ‖W'‖, of ``params``.
    weight_norm: PyTree
    #: ‖D‖ of the last update, 0 before the first one. It is the norm of sQ in an ablation
    #: that decouples the decay or measures the ratio on something else.
    direction_norm: PyTree
    #: η·r̂·‖D‖/‖W‖ of the last update, the fraction of itself by which W has moved.
    relative_step: PyTree
    #: ‖W'‖/‖W₀‖, where W₀ are the weights on which c was anchored, those at the first
    #: direction at which W was not zero. 1 before it; NaN if the state was restored from
    #: a checkpoint that has c but not ‖W₀‖.
    growth: PyTree
    #: Whether r̂ is at the lower bound.
    at_r_min: PyTree
    #: Whether r̂ is at the upper bound.
    at_r_max: PyTree
    #: Whether the matrix has received momentum that is not zero.
    started: PyTree
    #: Whether c is set, and finite.
    anchored: PyTree


class Reading(_Fields):
    r"""The result of :func:`read`: trees like the parameters.

    A leaf of matrices has an array with one entry per matrix, of shape ``()`` for a plain
    matrix, and dtype float32 (float64 for float64 parameters) or bool; every other leaf
    has :class:`optax.MaskedNode`. A field is None if the optimizer's state does not hold
    the quantity: :func:`orscale_jax.muon` has only ``weight_norm`` and ``started``. In a
    partition of several optimizers, leaves whose optimizer does not hold it are masked.

    The *last update* is the one that led to ``params``; :math:`W` are the weights before
    it, :math:`W'` those after it.
    """

    #: Which leaves are matrices, and along which axes. It holds no arrays, and stays
    #: through ``jax.jit``. None if :func:`read` has not made the reading.
    matrices: Matrices | None = None

    def _replace(self, **fields: Any) -> "Reading":
        return with_matrices(self.matrices, (self._asdict() | fields).values())


def with_matrices(matrices: Matrices | None, fields: Iterable[PyTree]) -> Reading:
    """A reading with these matrices."""
    reading = Reading(*fields)
    reading.matrices = matrices
    return reading


def _flatten(reading: Reading) -> tuple[list[tuple[Any, PyTree]], Matrices | None]:
    keys = map(jax.tree_util.GetAttrKey, reading._fields)
    return list(zip(keys, reading, strict=True)), reading.matrices


jax.tree_util.register_pytree_with_keys(Reading, _flatten, with_matrices)


def known_leaves(tree: PyTree, reading: Reading) -> list[jax.Array | None]:
    """A field of the reading, or a tree like it, at each leaf of matrices.

    None where the optimizer of a leaf does not hold the quantity.
    """
    found = {names_on(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    norms = jax.tree.leaves_with_path(reading.weight_norm)
    return [found.get(names_on(path)) for path, _ in norms]


def numbers_of(
    reading: Reading, params: PyTree, given: WeightDimensionNumbers
) -> WeightDimensionNumbers:
    """The dimension numbers of a reading's matrices; those given, if it has none.

    Raises:
      ValueError: If the parameters have another number of leaves than those of the
        reading, or the given numbers contradict the reading's.
    """
    if reading.matrices is None:
        return given
    axes_read = reading.matrices.axes
    structure: Any = jax.tree.structure(unbox(params))
    if structure.num_leaves != len(axes_read):
        raise ValueError(
            f"params has {structure.num_leaves} leaves, but the reading is of parameters "
            f"with {len(axes_read)}: pass those that read() was given."
        )
    if given is not None:
        pairs = zip(axes_read, Matrices.of(given, params).axes, strict=True)
        if any(axes is not None and axes != other for axes, other in pairs):
            raise ValueError(
                "weight_dimension_numbers are not those that read() was given: leave them"
                " out, since the reading has them."
            )
    return Matrices(structure, axes_read).axes_tree
