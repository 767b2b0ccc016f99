"""The paper's claims, each with a verdict by the protocol's rules and its numbers."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from examples.study.statistics import (
    FAILS,
    HOLDS,
    OPEN,
    Interval,
    all_of,
    correlation,
    interval,
    tally,
    verdict,
)
from examples.study.study import COLUMNS, REFERENCE, Study


class Claim(NamedTuple):
    """A row of the table of verdicts."""

    text: str
    verdict: str
    evidence: str


Rule = Callable[[Study], Claim]
NOT_RUN = "not run yet"
_AT = {"inherited": "at the inherited rate", "own": "at each optimizer's own rate"}


def in_words(differences: Sequence[Interval]) -> str:
    """How many differences are sure, and their mean."""
    found = tally(differences)
    return (
        f"lower in {found.lower}, higher in {found.higher} of {len(differences)} "
        f"workloads, {found.mean:+.3f} nats on average"
    )


def claims(study: Study) -> list[Claim]:
    """All claims, in the protocol's order."""
    return [rule(study) for rule in RULES]


def zero_sweep(study: Study) -> Claim:
    first = study.differences("orscale", "inherited")
    second = study.differences(REFERENCE, "inherited", than="adamw")
    return Claim(
        "At the inherited rate OrScale is at least as good as Muon+Moonlight, which is "
        "at least as good as AdamW",
        all_of([verdict(first), verdict(second)]),
        f"OrScale − Muon+Moonlight: {in_words(first)}. Muon+Moonlight − AdamW: "
        f"{in_words(second)}",
    )


def tuned(study: Study) -> Claim:
    found = study.differences("orscale", "own")
    return Claim("The gain survives tuning", verdict(found), in_words(found))


def grows_with_experts(study: Study) -> Claim:
    found = []
    for name in study.workloads:
        dense = name.replace("mixture", "dense")
        if name != dense and dense in study.workloads:
            found.append(_difference_of_gains(study, name, dense))
    text = "The gain grows from dense models to mixtures"
    if not found:
        return Claim(text, NOT_RUN, "")
    return Claim(
        text,
        verdict(found),
        f"OrScale − Muon+Moonlight at the inherited rate, mixture minus dense: "
        f"{in_words(found)}",
    )


def _difference_of_gains(study: Study, one: str, other: str) -> Interval:
    gains = []
    for name in (one, other):
        ours = study.losses(name, "orscale", "inherited")
        theirs = study.losses(name, REFERENCE, "inherited")
        gains.append({seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs})
    seeds = gains[0].keys() & gains[1].keys()
    return interval([gains[0][seed] - gains[1][seed] for seed in sorted(seeds)])


def layer_wise(study: Study) -> Claim:
    verdicts, evidence = [], []
    for control, name in (("pooled", "one ratio for all"), ("replayed", "the replay")):
        for column in COLUMNS:
            found = study.differences("orscale", column, than=control)
            verdicts.append(verdict(found))
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
    gained = [-study.difference(n, "orscale", "inherited").mean for n in measured]
    kappa_eff = [study.gain(name, "kappa_eff") for name in measured]
    rho, found = correlation(kappa_eff, gained)
    along, _ = correlation([study.gain(name, "kappa") for name in measured], gained)
    below = sum(kappa < 1 for kappa in kappa_eff)
    return Claim(
        text,
        found,
        f"Spearman's ρ with the gain over {len(measured)} workloads {rho:+.2f} (κ along "
        f"the step {along:+.2f}); κ_eff is below 1 in {below} of them",
    )


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
    seen = [
        min(saturated) >= 0.995,
        1 <= abs(math.log2(retune)) <= 2,
        growth[0] >= 10,
    ]
    return Claim(
        "The ablations have the symptoms that the paper reports",
        HOLDS if all(seen) else FAILS if not any(seen) else OPEN,
        f"share at a bound {saturated[0]:.1%} (‖M̃‖) and {saturated[1]:.1%} (RMS(M̃)), "
        f"claimed 99.5–100 %; best rate without calibration {retune:g} × OrScale's, "
        f"claimed 2.5–3; growth with a decoupled decay {growth[0]:.2f}, OrScale's "
        f"{growth[1]:.2f}, claimed 10–50",
    )


def bfloat16_costs(study: Study) -> Claim:
    found = study.differences("orscale", "inherited", than="bfloat16_calibration")
    return Claim(
        "Calibration in bfloat16 raises the loss",
        verdict(found),
        f"OrScale − calibration in bfloat16: {in_words(found)}",
    )


def unclipped_survives(study: Study) -> Claim:
    runs = [
        run
        for name in study.workloads
        if study.has(name, "unclipped")
        for column in COLUMNS
        for run in study.runs(name, "unclipped", column).values()
    ]
    diverged = sum(run.diverged for run in runs)
    highest = max(max(run.uniform) for run in runs)
    found = study.differences("orscale", "inherited", than="unclipped")
    return Claim(
        "Without a clip, runs do not diverge",
        FAILS if diverged else HOLDS,
        f"{diverged} of {len(runs)} runs diverged; the mean ratio is at most "
        f"{highest:.1f}; OrScale − no clip: {in_words(found)}",
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
    high = max(ratios.values())
    return Claim(
        text,
        HOLDS if high < 1.05 else FAILS if min(ratios.values()) > 1.05 else OPEN,
        "seconds of a step over Muon+Moonlight's: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
    )


def anchors(study: Study) -> Claim:
    parts, better = [], []
    for arm, name in (("full_rank_anchor", "full rank"), ("largest_anchor", "largest")):
        for column in COLUMNS:
            found = study.differences(arm, column, than="orscale")
            better.append(verdict(found))
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
