"""The tables of the page, as Markdown."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from examples.study.arms import ABLATIONS, ARMS, SENSITIVE
from examples.study.claims import claims
from examples.study.statistics import Interval, tally
from examples.study.study import COLUMNS, REFERENCE, Column, Study
from examples.study.workloads import SMALL_INIT

Table = Callable[[Study], str]


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are text, and the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(heading) - left)
    lines = [heading, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(study: Study) -> str:
    """The table of claims."""
    rows = [
        (f"{i}. {claim.text}", f"**{claim.verdict}**", claim.evidence)
        for i, claim in enumerate(claims(study), 1)
    ]
    return markdown(("claim", "verdict", "numbers"), rows, left=3)


def summary(study: Study) -> str:
    """Every arm against Muon+Moonlight, over all workloads."""
    rows = []
    for arm, about in ARMS.items():
        if arm == REFERENCE or not any(study.has(n, arm) for n in study.workloads):
            continue
        cells = [about.label]
        for column in COLUMNS:
            cells += _tally(study.differences(arm, column))
        rows.append(cells)
    return markdown(["", *_TALLIES], rows)


_TALLIES = (
    "inherited rate",
    "lower in",
    "higher in",
    "own rate",
    "lower in",
    "higher in",
)


def _tally(found: Sequence[Interval]) -> list[str]:
    if not found:
        return ["–"] * 3
    of_all = tally(found)
    return [f"{of_all.mean:+.3f}", f"{of_all.lower}", f"{of_all.higher}"]


def losses(study: Study) -> str:
    """The loss of every arm in every workload, at both rates; a table for each kind."""
    title = {"inherited": "At the inherited rate", "own": "At its own best rate"}
    kinds = itertools.groupby(study.workloads, lambda name: name.split("-")[0])
    parts = []
    for names in [list(group) for _, group in kinds]:
        for column in COLUMNS:
            rows = [
                [about.label, *(_loss(study, name, arm, column) for name in names)]
                for arm, about in ARMS.items()
            ]
            heading = [title[column], *(f"`{name}`" for name in names)]
            parts.append(markdown(heading, rows))
    return "\n\n".join(parts)


def _loss(study: Study, workload: str, arm: str, column: Column) -> str:
    if not study.has(workload, arm):
        return "–"
    found = study.losses(workload, arm, column)
    rate = study.rate(workload, arm, column)
    return f"{np.mean(list(found.values())):.3f} ({rate:.3g})"


def steps(study: Study) -> str:
    """Steps to the final loss of tuned Muon+Moonlight, over its own.

    Without the arms that get there nowhere.
    """
    shares = {
        arm: [_share_of_steps(study, name, arm) for name in study.workloads]
        for arm in ARMS
        if arm != REFERENCE
    }
    arms = [arm for arm, found in shares.items() if not all(map(math.isnan, found))]
    rows = []
    for i, name in enumerate(study.workloads):
        found = [shares[arm][i] for arm in arms]
        rows.append([f"`{name}`", *("–" if math.isnan(x) else f"{x:.2f}" for x in found)])
    return markdown(["", *(ARMS[arm].label for arm in arms)], rows)


def _share_of_steps(study: Study, workload: str, arm: str) -> float:
    return study.share_of_steps(workload, arm) if study.has(workload, arm) else math.nan


def ratios(study: Study) -> str:
    """OrScale at the inherited rate: ratios, growth, and the theory's numbers."""
    rows = []
    for name in study.workloads:
        cells = [f"`{name}`", f"{study.uniform(name, 'orscale', 'inherited'):.2f}"]
        for field in ("spread", "growth"):
            cells.append(f"{study.mean(name, 'orscale', 'inherited', field):.2f}")
        cells.append(f"{study.mean(name, 'orscale', 'inherited', 'at_bound'):.1%}")
        for field in ("kappa", "kappa_eff", "nu", "rho"):
            value = study.gain(name, field)
            cells.append("–" if math.isnan(value) else f"{value:.2f}")
        cells.append(_interval(study.difference(name, "orscale", "inherited")))
        rows.append(cells)
    heading = ["", "mean r̂", "spread", "growth", "at a bound", "κ", "κ_eff", "ν", "ρ"]
    return markdown([*heading, "− Muon+Moonlight"], rows)


def anchors(study: Study) -> str:
    """OrScale with other anchors minus the paper's, by the scale of initial weights."""
    small = {name: name.endswith(SMALL_INIT) for name in study.workloads}
    rows = []
    for arm in ("full_rank_anchor", "largest_anchor"):
        for title, kind in (("1/fan-in", False), ("small", True)):
            names = [name for name in study.workloads if small[name] == kind]
            cells = [ARMS[arm].label, title]
            for column in COLUMNS:
                found = [study.difference(n, arm, column, "orscale") for n in names]
                cells += _tally(found)
            rows.append(cells)
    return markdown(["", "initial weights", *_TALLIES], rows, left=2)


def ablations(study: Study) -> str:
    """The ablations on the small decoder."""
    name, rows = "dense-small", []
    for arm, about in {"orscale": ARMS["orscale"], **ABLATIONS}.items():
        if not study.has(name, arm):
            continue
        rows.append(
            [
                about.label,
                _interval(study.difference(name, arm, "inherited", than="orscale")),
                _interval(study.difference(name, arm, "own", than="orscale")),
                f"{study.rate(name, arm, 'own'):.3g}",
                f"{study.mean(name, arm, 'inherited', 'at_bound'):.1%}",
                f"{study.mean(name, arm, 'inherited', 'growth'):.2f}",
            ]
        )
    heading = ["", "inherited rate", "own rate", "that rate", "at a bound", "growth"]
    return markdown(heading, rows)


def sensitivity(study: Study) -> str:
    """The small decoder with something else, at the inherited rate."""
    rows = []
    for name in ("dense-small", *study.variations):
        cells = [f"`{name}`"]
        for arm in SENSITIVE:
            if study.has(name, arm):
                found = study.losses(name, arm, "inherited")
                cells.append(f"{np.mean(list(found.values())):.3f}")
        for arm in SENSITIVE[2:]:
            cells.append(_interval(study.difference(name, arm, "inherited")))
        rows.append(cells)
    labels = [ARMS[arm].label for arm in SENSITIVE]
    return markdown(["", *labels, *(f"{x} − Muon+Moonlight" for x in labels[2:])], rows)


def seconds(study: Study) -> str:
    """Milliseconds of a step of every arm that was timed."""
    names = list(study.seconds)
    rows = []
    for arm, about in ARMS.items():
        found = [study.seconds[name].get(arm) for name in names]
        if any(found):
            cells = ("–" if x is None else f"{1000 * x:.1f}" for x in found)
            rows.append([about.label, *cells])
    return markdown(["", *(f"`{name}`" for name in names)], rows)


def _interval(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


TABLES: dict[str, Table] = {
    "verdicts": verdicts,
    "summary": summary,
    "losses": losses,
    "steps": steps,
    "ratios": ratios,
    "anchors": anchors,
    "ablations": ablations,
    "sensitivity": sensitivity,
    "seconds": seconds,
}
