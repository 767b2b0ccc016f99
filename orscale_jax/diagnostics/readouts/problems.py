"""Warnings during training: what a reading shows, what it means and what to do."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from orscale_jax.diagnostics.per_matrix import leaf_of
from orscale_jax.diagnostics.readouts.reading import Reading
from orscale_jax.diagnostics.readouts.tabulate import tabulate

Table: TypeAlias = Mapping[str, Any]  # Columns of equal length; also a data frame.

#: The share of all matrices at one bound from which the ratio counts as saturated.
SATURATED_SHARE = 0.5
#: Below this ‖D₀‖/‖D‖, the direction on which c was anchored counts as one of low rank:
#: directions are now twice as large, so the ratio is half of what ‖W‖/‖W₀‖ gives it.
LOW_RANK_FACTOR = 0.5
#: From this ‖W‖/‖W₀‖ on, the norm counts as running away: the paper saw 10 to 50 with a
#: decoupled decay (its Table 4).
RUNAWAY_GROWTH = 10.0
#: The relative step above which one step undoes the work of many.
LARGE_STEP = 0.1
#: ‖QᵀQ − I‖/√min(m, n) above which Newton–Schulz has missed a quarter of the directions.
POLAR_ERROR = 0.5


class Problem(NamedTuple):
    """A problem that :func:`find_problems` has found."""

    #: The problem in a few words.
    title: str
    #: The matrices that have it.
    matrices: tuple[str, ...]
    #: Its meaning.
    meaning: str
    #: The remedy.
    remedy: str

    def __str__(self) -> str:
        """One line for a terminal or a log."""
        shown = ", ".join(self.matrices[:3])
        others = f" and {len(self.matrices) - 3} more" * (len(self.matrices) > 3)
        return f"{self.title}: {shown}{others}. {self.meaning} {self.remedy}"


@dataclasses.dataclass(frozen=True)
class _Check:
    """A problem, the columns that show it, and whether each matrix has it."""

    title: str
    columns: tuple[str, ...]
    found: Callable[..., Any]
    meaning: str
    remedy: str
    least_share: float = 0.0  # The share of all matrices from which it counts.
    optional: tuple[str, ...] = ()  # More columns, NaN where the table lacks them.


def find_problems(reading: Reading | Table) -> list[Problem]:
    r"""Find what is wrong in a reading, with what it means and what to do.

    - a number that is not finite;
    - saturation: at least half of the matrices at the same bound;
    - a c that was anchored on a direction of low rank: :math:`\|D_0\| < \|D\|/2`;
    - a runaway: :math:`\|W\| > 10 \|W_0\|`, the symptom of a decoupled decay;
    - a relative step above 0.1;
    - a matrix that never moves, though it has had updates: it is zero, its ratio is 0, or
      its steps are zero while others move;
    - an expert without an update so far, where others of its stack have had one;
    - a matrix that never anchored, though it has had updates, or that has no initial
      scale;
    - a Newton–Schulz that has not converged, if there is a column ``polar_error`` (see
      :func:`measure`).

    Args:
      reading: From :func:`read` (it is fetched from the device); or columns of numbers by
        name, as from :func:`tabulate` or in the rows of one step of a :class:`History`.

    Returns:
      The problems, the most urgent first; an empty list if there are none.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics, orscale
      >>> optimizer = orscale(0.5)
      >>> params = {"up": 0.01 * jnp.eye(4)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> reading = diagnostics.read(state, params, learning_rate=0.5)
      >>> [problem] = diagnostics.find_problems(reading)
      >>> print(problem)
      Large steps: up. The last step was more than 0.1 of ... Lower the learning rate ...

    References:
      Lou & You, *OrScale*, section 5.5 and Table 4, for saturation and the runaway.
    """
    table: Table = tabulate(reading) if isinstance(reading, Reading) else reading
    problems = []
    for check in _CHECKS:
        if all(_has(table, name) for name in check.columns):
            columns = [np.asarray(table[name]) for name in check.columns]
            unknown = np.full(len(columns[0]), np.nan)
            columns += [np.asarray(table.get(name, unknown)) for name in check.optional]
            with np.errstate(all="ignore"):
                found = np.asarray(check.found(*columns), bool)
            if found.any() and found.mean() >= check.least_share:
                names = tuple(map(str, np.asarray(table["matrix"])[found]))
                problems.append(Problem(check.title, names, check.meaning, check.remedy))
    return problems


def _has(table: Table, name: str) -> bool:
    """Whether a column is there and, if it comes from a file, not empty."""
    if name not in table:
        return False
    column = np.asarray(table[name])
    always = name == "weight_norm" or column.dtype.kind != "f"
    return always or not np.isnan(column).all()


def _still(
    norm: np.ndarray,
    started: np.ndarray,
    ratio: np.ndarray,
    direction: np.ndarray,
    step: np.ndarray,
) -> np.ndarray:
    """Matrices that have had updates, and do not move."""
    alone = (step == 0) & (direction > 0) & (step > 0).any()
    return (started != 0) & ((norm == 0) | (ratio == 0) | alone)


def _at_one_bound(at: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Matrices at a bound; not at both, which is Muon on purpose (r_min = r_max)."""
    return (at != 0) & (other == 0)


def _direction_not_finite(
    norm: np.ndarray, direction: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """Matrices whose D is not finite; an optimizer without ratios has neither D nor c."""
    lacking = np.isnan(c) & ~np.isnan(c).all()
    return np.isfinite(norm) & ~np.isfinite(direction) & ~lacking


def _left_out(matrices: np.ndarray, started: np.ndarray) -> np.ndarray:
    """Matrices without an update in a stack in which others have had one."""
    busy = {leaf_of(name) for name, on in zip(matrices, started, strict=True) if on}
    return np.array([leaf_of(name) in busy for name in matrices]) & (started == 0)


_CHECKS = (
    _Check(
        "Not finite",
        ("weight_norm",),
        lambda norm: ~np.isfinite(norm),
        "The weights hold NaN or infinity.",
        "Restore the last checkpoint, and clip or skip such gradients "
        "(optax.apply_if_finite).",
    ),
    _Check(
        "Directions not finite",
        ("weight_norm", "direction_norm"),
        _direction_not_finite,
        "The last gradient or the momentum holds NaN or infinity.",
        "Clip or skip such gradients (optax.apply_if_finite).",
        optional=("calibration",),
    ),
    _Check(
        "Saturated at the upper bound",
        ("at_r_max", "at_r_min"),
        _at_one_bound,
        "The ratio is r_max for most matrices: this is Muon at r_max times the learning "
        "rate (Theorem collapse).",
        "Raise the learning rate and anchor c again, or raise r_max.",
        SATURATED_SHARE,
    ),
    _Check(
        "Saturated at the lower bound",
        ("at_r_min", "at_r_max"),
        _at_one_bound,
        "The ratio is r_min for most matrices: this is Muon at r_min times the learning "
        "rate (Theorem collapse).",
        "Look at the first directions, on which c is anchored; anchor c again.",
        SATURATED_SHARE,
    ),
    _Check(
        "Anchored on a direction of low rank",
        ("raw_trust_ratio", "growth", "anchored"),
        lambda r, growth, anchored: (r < LOW_RANK_FACTOR * growth) & (anchored != 0),
        "Directions are more than twice as large as the one on which c was anchored, "
        "as after a first gradient of low rank (few tokens, a small batch): the ratio is "
        "less than half of what ‖W‖ would give it otherwise, for good.",
        'Pass anchor="full_rank" or "largest", or anchor c again after the first steps.',
    ),
    _Check(
        "Weight norm runs away",
        ("growth",),
        lambda growth: growth > RUNAWAY_GROWTH,
        "‖W‖ has passed 10 times its initial value, and r grows with it.",
        "Couple the weight decay (orscale does), raise it, or lower r_max.",
    ),
    _Check(
        "Large steps",
        ("relative_step",),
        lambda step: (step > LARGE_STEP) & np.isfinite(step),
        "The last step was more than 0.1 of the matrix itself.",
        "Lower the learning rate or r_max, or warm up for longer.",
    ),
    _Check(
        "Never moves",
        ("weight_norm", "started"),
        _still,
        "These have received gradients, but their steps are zero.",
        "Look at r_max, consistent_rms, recorded ratios and masks, and at their learning "
        "rate (it is no problem at the first step of a warm-up from 0).",
        optional=("trust_ratio", "direction_norm", "relative_step"),
    ),
    _Check(
        "Without an update",
        ("matrix", "started"),
        _left_out,
        "These have received no gradient so far, but others of their stack have: experts "
        "without tokens.",
        "Look at the router and at the balance of its loads.",
    ),
    _Check(
        "Never anchored",
        ("calibration", "started"),
        lambda c, started: (c == 0) & (started != 0),
        "c is unset though there were updates: none of their directions was finite and "
        "not zero. The ratio is 1.",
        "Look at the gradients of these matrices.",
    ),
    _Check(
        "No initial scale",
        ("calibration",),
        np.isinf,
        "The matrix was zero at its first update: its ratio is 1 for good, as Muon's.",
        "Start it from small random weights if it is to have a ratio.",
    ),
    _Check(
        "Newton–Schulz has not converged",
        ("polar_error",),
        lambda error: error > POLAR_ERROR,
        "More than a quarter of the singular values of Q are far from 1: the momentum "
        "has low rank, or singular values below what the steps reach.",
        'Raise ns_steps, or pass ns_preconditioning="aol".',
    ),
)
