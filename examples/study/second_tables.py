"""The tables of docs/study/two_rates.md, as Markdown, from the runs that are complete."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from examples.study import contrasts
from examples.study.arms import KNOWN
from examples.study.optima import Optima
from examples.study.questions import (
    ENDPOINTS,
    FIRST,
    LIST,
    REPORTED,
    SECOND,
    answers,
    comparison,
)
from examples.study.records import Cell, Record, Records, difference
from examples.study.search import is_inside
from examples.study.second import JOBS, REFERENCE, TEXTS
from examples.study.selection import selection
from examples.study.statistics import (
    Comparison,
    correlation,
    endpoint,
    in_words,
    interval,
)
from examples.study.tables import markdown
from examples.study.workloads import LADDER

MISSING = "not complete"
LEVEL = 0.05  # Of the list.
MUON, NORMUON = "muon", "normuon"
_TWO, _POOLED = ("orscale", REFERENCE), ("orscale", "pooled")
_COMPARED = ["difference", "over", "mean", "lower : higher"]


class Found(NamedTuple):
    """What the tables are made of.

    Attributes:
      records: The complete jobs.
      optima: Ratios by class of layers.
    """

    records: Records
    optima: Optima


def endpoints(found: Found) -> str:
    """The two endpoints and their verdicts."""
    rows = []
    for question, margin in ENDPOINTS:
        answer = comparison(question, found.records)
        cells = [question.text, question.over, *_cells(answer)]
        verdict = MISSING if answer is None else endpoint(answer.average, margin)
        rows.append([*cells, verdict])
    return markdown([*_COMPARED, "verdict"], rows, left=2)


def the_list(found: Found) -> str:
    """The list, with Holm's correction."""
    rows = []
    for i, (question, answer) in enumerate(
        zip(LIST, answers(found.records), strict=True), 1
    ):
        cells = [f"{i}. {question.text}", question.over]
        if answer is None:
            rows.append([*cells, *_cells(None), "", "", ""])
            continue
        p_values = (f"{p:.2g}" for p in (answer.p, answer.corrected))
        side = "higher" if answer.found.average.mean > 0 else "lower"
        verdict = side if answer.corrected < LEVEL else "no"
        rows.append([*cells, *_cells(answer.found), *p_values, verdict])
    heading = [*_COMPARED, "p", "p, corrected", "significant"]
    return markdown(heading, rows, left=2)


def reported(found: Found) -> str:
    """What is reported without a verdict."""
    rows = [
        [question.text, question.over, *_cells(comparison(question, found.records))]
        for question in REPORTED
    ]
    return markdown(_COMPARED, rows, left=2)


def _cells(found: Comparison | None) -> list[str]:
    if found is None:
        return [MISSING, ""]
    return [in_words(found.average), f"{found.lower} : {found.higher}"]


def text(found: Found) -> str:
    """The workloads of the first endpoint."""
    return _by_workload(found, FIRST.weights, REFERENCE)


def mixtures(found: Found) -> str:
    """The workloads of the second endpoint."""
    return _by_workload(found, SECOND.weights, "pooled")


def scales(found: Found) -> str:
    """Muon (s = 1) on text."""
    return _on_text(found, MUON, (MUON, REFERENCE), ("orscale", MUON))


def neurons(found: Found) -> str:
    """NorMuon on text."""
    return _on_text(found, NORMUON, (NORMUON, REFERENCE), (NORMUON, MUON))


def _on_text(found: Found, arm: str, *pairs: tuple[str, str]) -> str:
    rows = [
        [f"`{name}`", _rates(found, name, arm)]
        + [_number(found, name, *arms) for arms in pairs]
        for name in FIRST.weights
    ]
    labels = map(_label, pairs)
    return markdown(["workload", f"{KNOWN[arm].label}: rates", *labels], rows, left=2)


def others(found: Found) -> str:
    """The complete workloads that are neither text nor of the ladder."""
    known = {*TEXTS, *LADDER.values()}
    names = dict.fromkeys(job.workload for job in JOBS if job.workload not in known)
    complete = [name for name in names if difference(found.records, name, *_TWO)]
    return _by_workload(found, complete, REFERENCE)


def _by_workload(found: Found, names: Iterable[str], theirs: str) -> str:
    arms = ("orscale", theirs)
    rows = []
    for name in names:
        rates = (_rates(found, name, arm) for arm in arms)
        rows.append([f"`{name}`", *rates, _number(found, name, *arms)])
    labels = (KNOWN[arm].label for arm in arms)
    return markdown(["workload", *labels, _label(arms)], rows, left=3)


def _rates(found: Found, name: str, arm: str) -> str:
    record = found.records.get(Cell(name, arm))
    return MISSING if record is None else "{:.3g}, {:.3g}".format(*record.rates)


def _number(found: Found, name: str, ours: str, theirs: str) -> str:
    by_seed = difference(found.records, name, ours, theirs)
    return "–" if by_seed is None else in_words(interval(list(by_seed.values())))


def ladder(found: Found) -> str:
    """Differences by the number of experts."""
    rows = [
        [str(experts), *(_number(found, name, *arms) for arms in (_TWO, _POOLED))]
        for experts, name in LADDER.items()
    ]
    return markdown(["experts", *map(_label, (_TWO, _POOLED))], rows)


def lowest(found: Found) -> str:
    """The arm with the lowest mean loss in each workload, and those level with it."""
    rows = []
    for name in dict.fromkeys(cell.workload for cell in found.records):
        losses = {
            cell.arm: statistics.fmean(record.losses.values())
            for cell, record in found.records.items()
            if cell.workload == name
        }
        best, *others = sorted(losses, key=losses.__getitem__)
        level = [KNOWN[arm].label for arm in others if _is_level(found, name, arm, best)]
        at = _rates(found, name, best)
        tried = str(len(losses))
        rows.append([f"`{name}`", KNOWN[best].label, at, "; ".join(level) or "–", tried])
    heading = [
        "workload",
        "lowest",
        "rates",
        "no significant difference, in order",
        "tried",
    ]
    return markdown(heading, rows, left=4)


def _is_level(found: Found, name: str, ours: str, theirs: str) -> bool:
    by_seed = difference(found.records, name, ours, theirs)
    return by_seed is not None and not interval(list(by_seed.values())).sign


def arms(found: Found) -> str:
    """The searches of each arm: where their best rates lie, and how well they choose."""
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in found.records):
        records = [r for r in found.records.values() if r.job.arm == arm and r.searched]
        if records:
            rows.append([KNOWN[arm].label, *_arm_cells(records)])
    return markdown(_ARMS, rows)


_ARMS = [
    "", "best rates inside", "AdamW's rate over the matrices': median, range",
    "choices that move", "octaves: matrices, AdamW", "excess, text", "excess, ladder",
]  # fmt: skip


def _arm_cells(records: Sequence[Record]) -> list[str]:
    times = [record.rates.adam / record.rates.matrix for record in records]
    found = {record.job.workload: selection(record) for record in records}
    chosen = {name: of for name, of in found.items() if of is not None}
    moves = [move for of in chosen.values() for move in of.moves]
    octaves = np.mean(np.abs(moves), axis=0) if moves else ()
    cells = [
        f"{sum(map(_inside, records))} of {len(records)}",
        f"{statistics.median(times):.1f}, {min(times):.1f} to {max(times):.1f}",
        f"{sum(map(any, moves))} of {len(moves)}",
        ", ".join(f"{mean:.2f}" for mean in octaves),
    ]
    for names in (TEXTS, tuple(LADDER.values())):
        excesses = [chosen[name].excess for name in names if name in chosen]
        whole = len(excesses) == len(names)
        cells.append(f"{np.mean(excesses):.4f}" if whole else "–")
    return cells


def _inside(record: Record) -> bool:
    return is_inside(record.best, record.searched)


def searches(found: Found) -> str:
    """Every search that is complete, by workload."""
    names = dict.fromkeys(cell.workload for cell in found.records)
    rows = [
        [f"`{name}`", KNOWN[cell.arm].label, *_search_cells(record)]
        for name in names
        for cell, record in found.records.items()
        if cell.workload == name and record.searched
    ]
    return markdown(_SEARCHES, rows, left=2)


_SEARCHES = [
    "workload", "", "best rates", "points", "inside", "diverged", "moves, octaves",
    "excess",
]  # fmt: skip


def _search_cells(record: Record) -> list[str]:
    runs = [run for of_point in record.searched.values() for run in of_point]
    diverged = (
        f"{sum(run.diverged for run in of)} of {len(of)}"
        for of in (runs, record.confirmed)
    )
    cells = [
        "{:.3g}, {:.3g}".format(*record.rates),
        str(len(record.searched)),
        "yes" if _inside(record) else "no",
        ", ".join(diverged),
    ]
    selected = selection(record)
    if selected is None:
        return [*cells, "–", "–"]
    farthest = np.max(np.abs(selected.moves), axis=0)
    return [*cells, ", ".join(f"{x:g}" for x in farthest), f"{selected.excess:.4f}"]


def classes(found: Found) -> str:
    """Ratios and r* by class of layers."""
    names = [cell.workload for cell in found.optima if cell.arm == "orscale"]
    known = sorted({name for of_cell in found.optima.values() for name in of_cell})
    rows = [[of, *(_ratios(found, name, of) for name in names)] for of in known]
    return markdown(["", *(f"`{name}`" for name in names)], rows)


def _ratios(found: Found, workload: str, of: str) -> str:
    ours = found.optima[Cell(workload, "orscale")].get(of)
    theirs = found.optima.get(Cell(workload, REFERENCE), {}).get(of)
    if ours is None:
        return ""
    along = "–" if theirs is None else f"{theirs.optimum:.2f}"
    return f"{ours.ratio:.2f}; {ours.optimum:.2f}, {along}"


def agreement(found: Found) -> str:
    """Whether ratio and r* rank classes alike, and what the ratio is worth there."""
    rows = []
    for cell, by_class in found.optima.items():
        if cell.arm == "orscale":
            name = cell.workload
            ratios = [x.ratio for x in by_class.values()]
            optima = [x.optimum for x in by_class.values()]
            rho, _ = correlation(ratios, optima)
            numbers = (_number(found, name, *arms) for arms in (_TWO, _POOLED))
            rows.append([f"`{name}`", str(len(by_class)), f"{rho:+.2f}", *numbers])
    heading = ["workload", "classes", "Spearman's ρ", *map(_label, (_TWO, _POOLED))]
    return markdown(heading, rows)


def _label(arms: tuple[str, str]) -> str:
    return " − ".join(KNOWN[arm].label for arm in arms)


TABLES: dict[str, Callable[[Found], str]] = {
    "endpoints": endpoints,
    "text": text,
    "mixtures": mixtures,
    "scales": scales,
    "neurons": neurons,
    "list": the_list,
    "reported": reported,
    "contrasts": lambda found: contrasts.contrasts(found.records),
    "ladder": ladder,
    "first_batch": lambda found: contrasts.first_batch(found.records),
    "others": others,
    "lowest": lowest,
    "arms": arms,
    "searches": searches,
    "classes": classes,
    "agreement": agreement,
}
