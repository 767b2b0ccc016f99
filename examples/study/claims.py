"""The paper's claims, each with a verdict by the protocol's rules and its numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from examples.study.statistics import (
    FAILS,
    HOLDS,
    OPEN,
    Comparison,
    all_of,
    compare,
    correlation,
    interval,
    paired,
    verdict,
)
from examples.study.study import COLUMNS, REFERENCE, Cell, Study, kind_of


class Claim(NamedTuple):
    """A row of the table of verdicts."""

    text: str
    verdict: str
    evidence: str


Rule = Callable[[Study], Claim]
NOT_RUN = "not run yet"
# In nats: what "at least as good" may be worse by. Set after the runs.
AS_GOOD = 0.02
# By how much the seconds of equal arithmetic may differ at most for parity to be seen.
PARITY = 1.05
# Arms whose steps are the same arithmetic.
_SAME_STEP = tuple((arm, f"{arm}_apart") for arm in (REFERENCE, "orscale"))
_AT = {"inherited": "at the inherited rate", "own": "at each optimizer's own rate"}


def in_words(found: Comparison) -> str:
    """How many differences are significant, and their mean with its interval."""
    mean, low, high = found.average
    return (
        f"lower in {found.lower}, higher in {found.higher} of {len(found.intervals)} "
        f"workloads, {mean:+.3f} [{low:+.3f}, {high:+.3f}] nats on average"
    )


def claims(study: Study) -> list[Claim]:
    """All claims, in the protocol's order."""
    return [rule(study) for rule in RULES]


def without_first_seed(study: Study) -> Study:
    """The study without the seed that the searches for rates began with."""
    return dataclasses.replace(study, without=frozenset({0}))


def zero_sweep(study: Study) -> Claim:
    first = study.differences("orscale", "inherited")
    second = study.differences(REFERENCE, "inherited", than="adamw")
    return Claim(
        "At the inherited rate OrScale is at least as good as Muon+Moonlight, which is "
        "at least as good as AdamW",
        all_of([verdict(found.intervals, AS_GOOD) for found in (first, second)]),
        f"OrScale − Muon+Moonlight: {in_words(first)}; {_as_good(first)}. "
        f"Muon+Moonlight − AdamW: {in_words(second)}; {_as_good(second)}",
    )


def _as_good(found: Comparison) -> str:
    signs = [difference.minus(AS_GOOD).sign for difference in found.intervals]
    below, above = signs.count(-1), signs.count(1)
    return f"significantly below +{AS_GOOD} in {below} and above in {above}"


def tuned(study: Study) -> Claim:
    found = study.differences("orscale", "own")
    without = without_first_seed(study).differences("orscale", "own")
    return Claim(
        "The gain survives tuning of one rate for all parameters",
        verdict(found.intervals),
        f"{in_words(found)}. Without seed 0: {in_words(without)}",
    )


def grows_with_experts(study: Study) -> Claim:
    cells = Cell("orscale", "inherited"), Cell(REFERENCE, "inherited")
    pairs = {name: name.replace("mixture", "dense") for name in study.workloads}
    found = compare(
        [
            paired(study.by_seed(name, *cells), study.by_seed(dense, *cells))
            for name, dense in pairs.items()
            if name != dense and dense in study.workloads
        ]
    )
    text = "The gain grows from dense models to mixtures"
    if not found.intervals:
        return Claim(text, NOT_RUN, "")
    return Claim(
        text,
        verdict(found.intervals),
        f"OrScale − Muon+Moonlight at the inherited rate, mixture minus dense: "
        f"{in_words(found)}",
    )


def layer_wise(study: Study) -> Claim:
    verdicts, evidence = [], []
    for control, name in (("pooled", "one ratio for all"), ("replayed", "the replay")):
        for column in COLUMNS:
            found = study.differences("orscale", column, than=control)
            verdicts.append(verdict(found.intervals))
            evidence.append(f"OrScale − {name} {_AT[column]}: {in_words(found)}")
    return Claim(
        "The gain is layer-wise: one ratio for all, or a schedule, would give less",
        all_of(verdicts),
        ". ".join(evidence),
    )


def kappa_ranks(study: Study) -> Claim:
    text = "κ_eff predicts the ranking of workloads"
    measured = [n for n in study.workloads if math.isfinite(study.gain(n, "kappa_eff"))]
    if len(measured) < 3:
        return Claim(text, NOT_RUN, "")
    found = {name: _ranked(study, measured, name) for name in _PREDICTORS}
    texts = [name for name in measured if kind_of(name) == "text"]
    within = {name: _ranked(study, texts, name) for name in _PREDICTORS}
    below = sum(study.gain(name, "kappa_eff") < 1 for name in measured)
    return Claim(
        text,
        all_of([found["kappa_eff"][1], within["kappa_eff"][1]]),
        f"Spearman's ρ with the gain over {len(measured)} workloads: {_listed(found)}; "
        f"over the {len(texts)} of text alone: {_listed(within)}; κ_eff is below 1 in "
        f"{below} of {len(measured)}",
    )


_PREDICTORS = {"kappa_eff": "κ_eff", "kappa": "κ along the step", "growth": "growth"}


def _ranked(study: Study, names: list[str], predictor: str) -> tuple[float, str]:
    gained = [-study.difference(n, "orscale", "inherited").mean for n in names]
    if predictor == "growth":
        values = [study.mean(n, "orscale", "inherited", "growth") for n in names]
    else:
        values = [study.gain(name, predictor) for name in names]
    return correlation(values, gained)


def _listed(found: dict[str, tuple[float, str]]) -> str:
    rhos = {name: rho for name, (rho, _) in found.items() if math.isfinite(rho)}
    return ", ".join(f"{_PREDICTORS[name]} {rho:+.2f}" for name, rho in rhos.items())


def classes_separate(study: Study) -> Claim:
    found, evidence = [], []
    for name in study.workloads:
        if not name.startswith("mixture"):
            continue
        ratios = study.class_ratios(name, "orscale", "inherited")
        routed = _mean_of(ratios, "routed")
        router = _mean_of(ratios, "router")
        attention = _mean_of(ratios, "attention")
        found.append(routed > 4.9 and 1.5 < router < 2.5 and router < attention < routed)
        evidence.append(
            f"{name}: routed {routed:.2f}, attention {attention:.2f}, router {router:.2f}"
        )
    text = (
        "In a mixture, ratios separate by class: routed experts at the upper bound of 5, "
        "routers near 2, attention in between"
    )
    if not found:
        return Claim(text, NOT_RUN, "")
    return Claim(
        text,
        HOLDS if all(found) else OPEN if any(found) else FAILS,
        "; ".join(evidence),
    )


def _mean_of(ratios: dict[str, float], kind: str) -> float:
    logs = [math.log(ratio) for name, ratio in ratios.items() if name.startswith(kind)]
    return math.exp(float(np.mean(logs)))


def ablations(study: Study) -> Claim:
    name = "dense-small"
    saturated = [
        study.mean(name, arm, "inherited", "at_bound")
        for arm in ("momentum_denominator", "momentum_rms_denominator")
    ]
    growth = [
        study.mean(name, arm, "inherited", "growth")
        for arm in ("decoupled_weight_decay", "orscale")
    ]
    retune = study.rate(name, "uncalibrated", "own") / study.rate(name, "orscale", "own")
    # A grid of factor 2 tells no more than that the best rate is within √2 of its own.
    near = 2.5 / math.sqrt(2) < retune < 3 * math.sqrt(2)
    seen = [
        HOLDS if min(saturated) >= 0.995 else FAILS,
        OPEN if near else FAILS,
        HOLDS if growth[0] >= 10 else FAILS,
    ]
    return Claim(
        "The ablations have the symptoms that the paper reports",
        seen[0] if len(set(seen)) == 1 else OPEN,
        f"share at a bound {saturated[0]:.1%} (‖M̃‖) and {saturated[1]:.1%} (RMS(M̃)), "
        f"claimed 99.5–100 %; best rate without calibration {retune:g} × OrScale's on a "
        f"grid of 2, claimed 2.5–3; growth with a decoupled decay {growth[0]:.2f}, "
        f"OrScale's {growth[1]:.2f}, claimed 10–50",
    )


def bfloat16_costs(study: Study) -> Claim:
    found = study.differences("orscale", "inherited", than="bfloat16_calibration")
    return Claim(
        "Calibration in bfloat16 raises the loss",
        verdict(found.intervals),
        f"OrScale − calibration in bfloat16: {in_words(found)}",
    )


def unclipped_survives(study: Study) -> Claim:
    runs = {
        (name, run.rate, seed): run
        for name in study.workloads
        if study.has(name, "unclipped")
        for column in COLUMNS
        for seed, run in study.runs(name, "unclipped", column).items()
    }
    free = {
        (name, run.rate, run.seed)
        for name in study.workloads
        for run in study.rows(name, "orscale")
        if run.at_bound == 0
    }
    tested = [run for key, run in runs.items() if key not in free]
    diverged = sum(run.diverged for run in runs.values())
    highest = max(max(run.uniform) for run in runs.values())
    return Claim(
        "Without a clip, runs do not diverge",
        FAILS if diverged else HOLDS if len(tested) > len(runs) / 2 else OPEN,
        f"{diverged} of {len(runs)} runs diverged; in {len(runs) - len(tested)} of them "
        f"no ratio reaches a bound, so that they test nothing; the mean ratio is at most "
        f"{highest:.1f}",
    )


def wider_valley(study: Study) -> Claim:
    pairs = [
        (study.valley(name, REFERENCE), study.valley(name, "orscale"))
        for name in study.workloads
    ]
    found = interval([theirs - ours for theirs, ours in pairs])
    theirs, ours = np.mean(pairs, axis=0)
    return Claim(
        "OrScale has the wider valley of learning rates",
        verdict([found]),
        f"{ours:.2f} octaves within 2 % of the best loss, Muon+Moonlight {theirs:.2f}; "
        f"difference {-found.mean:+.2f} [{-found.high:+.2f}, {-found.low:+.2f}] over "
        f"{len(pairs)} workloads",
    )


def wall_clock(study: Study) -> Claim:
    text = "A step takes as long as Muon's"
    if not study.seconds:
        return Claim(text, NOT_RUN, "")
    ratios = {
        name: seconds["orscale"] / seconds[REFERENCE]
        for name, seconds in study.seconds.items()
    }
    noise = max(
        max(seconds[arm] / seconds[other], seconds[other] / seconds[arm])
        for seconds in study.seconds.values()
        for arm, other in _SAME_STEP
        if arm in seconds and other in seconds
    )
    low, high = min(ratios.values()), max(ratios.values())
    return Claim(
        text,
        HOLDS if high * noise < PARITY else FAILS if low > PARITY * noise else OPEN,
        "seconds of a step over Muon+Moonlight's: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        + f"; two arms of equal arithmetic differ by up to a factor {noise:.2f}",
    )


def anchors(study: Study) -> Claim:
    parts, better = [], []
    for arm, name in (("full_rank_anchor", "full rank"), ("largest_anchor", "largest")):
        for column in COLUMNS:
            found = study.differences(arm, column, than="orscale")
            better.append(verdict(found.intervals))
            parts.append(f"{name} − the paper's, {_AT[column]}: {in_words(found)}")
    return Claim(
        "The paper's anchor is the one to recommend",
        FAILS if HOLDS in better else all_of([_reversed(v) for v in better]),
        ". ".join(parts),
    )


def _reversed(found: str) -> str:
    return {HOLDS: FAILS, FAILS: HOLDS}.get(found, found)


RULES: tuple[Rule, ...] = (
    zero_sweep,
    tuned,
    grows_with_experts,
    layer_wise,
    kappa_ranks,
    classes_separate,
    ablations,
    bfloat16_costs,
    unclipped_survives,
    wider_valley,
    wall_clock,
    anchors,
)
