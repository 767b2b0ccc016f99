"""The cases of a verdict: when each applies, and what it says."""

import math
from collections.abc import Callable
from typing import TypeAlias

# By name, as in :class:`examples.study.theory.verdict.Verdict`.
Facts: TypeAlias = dict[str, float]

# From here on the bounds, not the ratios, decide most of the step (Theorem collapse).
SATURATED_SHARE = 0.5
# Standard deviation of log r̂. To first order κ_eff is within 2·0.02·√(κ_layer − 1) of 1:
# a percent or two at the headrooms of 1.1 to 1.3 that the paper expects.
UNIFORM_SPREAD = 0.02
# The smallest effect of interest: a κ this close to 1 counts as 1. A learning rate that
# is off by a factor of 1 ± x loses x² of the decrease: 5 % is what one off by 22 % costs.
SMALLEST_EFFECT = 0.05
# Where κ is further from 1 than this many standard errors, it counts as different.
STANDARD_ERRORS = 2
# With larger standard errors the linear propagation that makes them does not hold.
LARGEST_STDERR = 0.25
# κ_eff of a smaller share of the matrices than this is not that of the run.
LEAST_SHARE = 0.5


def _muon_at(facts: Facts) -> str:
    return f"Muon at {facts['uniform']:.2g} × the learning rate"


def _how_many(facts: Facts, name: str) -> str:
    return f"{facts[name]:.0f} of {facts['matrices']:.0f} matrices"


def _deciding(facts: Facts) -> tuple[float, float]:
    """κ and its standard error: along the step if that is known, or the model's."""
    name = "kappa_step" if "kappa_step" in facts else "kappa_eff"
    return facts[name], facts[f"{name}_stderr"]


def _kappa_eff(facts: Facts) -> str:
    return f"κ_eff {facts['kappa_eff']:.3f} ± {facts['kappa_eff_stderr']:.3f}"


def _kappa(facts: Facts) -> str:
    if "kappa_step" not in facts:
        return _kappa_eff(facts)
    kappa, error = _deciding(facts)
    along = f"κ {kappa:.3f} ± {error:.3f} along the step"
    if "kappa_eff" not in facts:
        return along
    return f"{along}, and in the paper's model {_kappa_eff(facts)}"


def _of_possible(facts: Facts) -> str:
    if "kappa_step" in facts:
        return _kappa(facts)
    # What errors add is subtracted from κ_layer, but not from κ_eff.
    possible = max(facts["kappa_layer"], facts["kappa_eff"])
    return f"{_kappa(facts)} of a possible {possible:.3f}"


def _effect(facts: Facts) -> float:
    """κ − 1 if it is not small, and further from 0 than its errors; else 0."""
    kappa, error = _deciding(facts)
    least = max(SMALLEST_EFFECT, STANDARD_ERRORS * error)
    return kappa - 1 if abs(kappa - 1) > least else 0.0


def _not_measured(facts: Facts) -> str | None:
    if facts["measured"]:
        return None
    return f"not enough data to tell: {_how_many(facts, 'measured')} have a ratio yet"


def _saturated(facts: Facts) -> str | None:
    share, bound = max((facts[f"at_{bound}"], bound) for bound in ("r_max", "r_min"))
    if share < SATURATED_SHARE:
        return None
    return (
        f"saturated: {share:.0%} of the matrices are at {bound}, and take their step "
        "from the bound, not from their ratio"
    )


def _uniform(facts: Facts) -> str | None:
    if facts["spread"] > UNIFORM_SPREAD:
        return None
    return f"uniform: this is {_muon_at(facts)} ({_how_many(facts, 'measured')} measured)"


def _no_statistics(facts: Facts) -> str | None:
    if {"kappa_eff", "kappa_step"} & {*facts}:
        return None
    return (
        f"not enough data to tell: ratios differ by a factor of "
        f"{math.exp(facts['spread']):.2f} around {facts['uniform']:.2g}; whether that "
        "helps takes step_gain(), or the statistics of estimate()"
    )


def _negative_curvature(facts: Facts) -> str | None:
    kappa, _ = _deciding(facts)
    if not math.isnan(kappa):
        return None
    return (
        "not enough data to tell: the measured curvature is negative, so that no "
        "learning rate is best; measure later in the run, or on more micro-batches"
    )


def _too_noisy(facts: Facts) -> str | None:
    _, error = _deciding(facts)
    whole = "kappa_step" in facts
    enough = whole or facts["counted"] >= LEAST_SHARE * facts["measured"]
    if enough and error <= LARGEST_STDERR:
        return None
    if whole:
        return f"not enough data to tell: {_kappa(facts)}"
    return (
        f"not enough data to tell: {_kappa(facts)}, from {_how_many(facts, 'counted')} "
        "with positive curvature"
    )


def _wrong_way(facts: Facts) -> str | None:
    if _effect(facts) >= 0:
        return None
    return f"the ratios point the wrong way: {_of_possible(facts)}"


def _homogeneous(facts: Facts) -> str | None:
    if "kappa_step" in facts:
        return None
    most = facts["kappa_layer"] + STANDARD_ERRORS * facts["kappa_layer_stderr"]
    if not most <= 1 + SMALLEST_EFFECT:
        return None
    return (
        f"too homogeneous to matter: no ratios could gain more than κ_layer "
        f"{facts['kappa_layer']:.3f} ± {facts['kappa_layer_stderr']:.3f}"
    )


def _gain(facts: Facts) -> str | None:
    if _effect(facts) <= 0:
        return None
    return f"in the gain regime: {_of_possible(facts)}"


def _neutral(facts: Facts) -> str | None:
    kappa, error = _deciding(facts)
    if abs(kappa - 1) + STANDARD_ERRORS * error > SMALLEST_EFFECT:
        return None
    return (
        f"the ratios neither help nor hurt: {_of_possible(facts)}, and less than "
        f"{SMALLEST_EFFECT:.0%} from 1 counts as none"
    )


def _undecided(facts: Facts) -> str:
    return f"not enough data to tell: {_of_possible(facts)}"


#: The cases in the order in which they are tried: each says its sentence, or None.
RULES: dict[str, Callable[[Facts], str | None]] = {
    "not measured": _not_measured,
    "saturated": _saturated,
    "uniform": _uniform,
    "no statistics": _no_statistics,
    "negative curvature": _negative_curvature,
    "too noisy": _too_noisy,
    "wrong way": _wrong_way,
    "homogeneous": _homogeneous,
    "gain": _gain,
    "neutral": _neutral,
    "undecided": _undecided,
}
