"""The tables of the page, as Markdown."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from examples.study.arms import ABLATIONS, ARMS, SENSITIVE
from examples.study.claims import claims, without_first_seed
from examples.study.statistics import Comparison, Interval, compare
from examples.study.study import (
    COLUMNS,
    REFERENCE,
    Cell,
    Column,
    Study,
    kind_of,
    reference_of,
)
from examples.study.workloads import SMALL_INIT

Table = Callable[[Study], str]
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, table_of: Callable[[str], str]) -> str:
    """A page with its tables anew.

    Args:
      page: With ``<!-- table: NAME -->`` and ``<!-- end -->`` around each of them.
      table_of: Makes the one of a name.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{table_of(found[2])}\n{found[3]}", page)


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are text, and the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(heading) - left)
    lines = [heading, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(study: Study) -> str:
    """The table of claims."""
    found = zip(claims(study), claims(without_first_seed(study)), strict=True)
    rows = [
        (f"{i}. {one.text}", f"**{one.verdict}**", other.verdict, one.evidence)
        for i, (one, other) in enumerate(found, 1)
    ]
    heading = ("claim", "verdict", "without seed 0", "numbers")
    return markdown(heading, rows, left=4)


def summary(study: Study) -> str:
    """Every arm against Muon+Moonlight, over all workloads.

    First those whose parameters share a rate, then those with AdamW's rate apart.
    """
    rows = []
    for arm, about in sorted(ARMS.items(), key=lambda item: not item[1].shared):
        if arm == REFERENCE or not any(study.has(n, arm) for n in study.workloads):
            continue
        than = reference_of(arm)
        cells = [about.label, ARMS[than].label]
        for column in COLUMNS:
            cells += _tally(study.differences(arm, column, than))
        rows.append(cells)
    return markdown(["", "minus", *_TALLIES], rows, left=2)


def means(study: Study) -> str:
    """What the two kinds of rates are worth, over all workloads and by kind."""
    rows = []
    for label, one, other in _PAIRS:
        cells = [label]
        for kind in ("", "text", "images"):
            found = study.compare(one, other, kind)
            sure = f"{found.lower} : {found.higher}"
            cells += [_interval(found.average), sure] if found.intervals else ["–"] * 2
        rows.append(cells)
    heading = ["all workloads", "lower : higher", "text", "", "images", ""]
    return markdown(["", *heading], rows)


def inherited(study: Study) -> str:
    """OrScale at the inherited rate, by kind of data and scale of initial weights."""
    rows = []
    for title, kind, small in (
        ("images", "images", None),
        ("text, small initial weights", "text", True),
        ("text, usual initial weights", "text", False),
    ):
        names = [
            name
            for name in study.workloads
            if kind_of(name) == kind and small in (None, name.endswith(SMALL_INIT))
        ]
        if not names:  # Of a part of the study.
            continue
        cells = Cell("orscale", "inherited"), Cell(REFERENCE, "inherited")
        found = compare([study.by_seed(name, *cells) for name in names])
        sure = f"{found.lower} : {found.higher}"
        rows.append([title, str(len(names)), _interval(found.average), sure])
    return markdown(["", "workloads", "mean", "lower : higher"], rows)


_APART = f"{REFERENCE}_apart"
_PAIRS = (
    ("OrScale − Muon+Moonlight, inherited rate",
     Cell("orscale", "inherited"), Cell(REFERENCE, "inherited")),
    ("OrScale − Muon+Moonlight, own rates",
     Cell("orscale", "own"), Cell(REFERENCE, "own")),
    ("the same, AdamW's rate apart in both",
     Cell("orscale_apart", "own"), Cell(_APART, "own")),
    ("Muon − Muon+Moonlight, AdamW's rate apart in both",
     Cell("muon", "own"), Cell(_APART, "own")),
    ("Hyperball − Muon+Moonlight, AdamW's rate apart in both",
     Cell("hyperball", "own"), Cell(_APART, "own")),
    ("Muon+Moonlight, own − inherited rate",
     Cell(REFERENCE, "own"), Cell(REFERENCE, "inherited")),
    ("the same, AdamW's rate apart",
     Cell(_APART, "own"), Cell(_APART, "inherited")),
    ("Muon+Moonlight, one rate − AdamW's apart, own rates",
     Cell(REFERENCE, "own"), Cell(_APART, "own")),
    ("Muon+Moonlight at twice AdamW's rate − OrScale at AdamW's",
     Cell(REFERENCE, "twice"), Cell("orscale", "inherited")),
)  # fmt: skip


def unlucky(study: Study) -> str:
    """Where the rate that the search found is worse than the inherited one."""
    rows = []
    for name in study.workloads:
        for arm, about in ARMS.items():
            if study.has(name, arm):
                by_seed = study.by_seed(name, Cell(arm, "own"), Cell(arm, "inherited"))
                if compare([by_seed]).average.mean > 0:
                    rates = (f"{study.rate(name, arm, c):.3g}" for c in COLUMNS)
                    shift = np.mean(list(by_seed.values()))
                    rows.append([about.label, f"`{name}`", *rates, f"{shift:+.3f}"])
    heading = ["", "", "inherited rate", "own rate", "loss, own − inherited"]
    return markdown(heading, rows, left=2)


_TALLIES = (
    "inherited rate",
    "lower in",
    "higher in",
    "own rate",
    "lower in",
    "higher in",
)


def _tally(found: Comparison) -> list[str]:
    if not found.intervals:
        return ["–"] * 3
    return [f"{found.average.mean:+.3f}", f"{found.lower}", f"{found.higher}"]


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
                cells_of = Cell(arm, column), Cell("orscale", column)
                cells += _tally(compare([study.by_seed(n, *cells_of) for n in names]))
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
                about.label + ("" if about.shared else "*"),
                _interval(study.difference(name, arm, "inherited", than="orscale")),
                _interval(study.difference(name, arm, "own", than="orscale")),
                _interval(study.difference(name, arm, "own", than=reference_of(arm))),
                f"{study.rate(name, arm, 'own'):.3g}",
                f"{study.mean(name, arm, 'inherited', 'at_bound'):.1%}",
                f"{study.mean(name, arm, 'inherited', 'growth'):.2f}",
            ]
        )
    heading = [
        "", "inherited rate", "own rate", "own rate, − Muon+Moonlight", "that rate",
        "at a bound", "growth",
    ]  # fmt: skip
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
    "inherited": inherited,
    "means": means,
    "unlucky": unlucky,
    "losses": losses,
    "steps": steps,
    "ratios": ratios,
    "anchors": anchors,
    "ablations": ablations,
    "sensitivity": sensitivity,
    "seconds": seconds,
}
