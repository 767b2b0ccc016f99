"""The tables of the page, as Markdown."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from examples.study.arms import ABLATIONS, ARMS, SENSITIVE
from examples.study.claims import claims
from examples.study.statistics import Interval
from examples.study.study import COLUMNS, REFERENCE, Column, Study

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
            found = study.differences(arm, column)
            signs = [difference.sign for difference in found]
            mean = np.mean([difference.mean for difference in found])
            cells += [f"{mean:+.3f}", f"{signs.count(-1)}", f"{signs.count(1)}"]
        rows.append(cells)
    heading = ["", "inherited rate", "lower in", "higher in"]
    return markdown([*heading, "own rate", "lower in", "higher in"], rows)


def losses(study: Study) -> str:
    """The loss of every arm in every workload, at both rates."""
    names = study.workloads
    parts = []
    for column in COLUMNS:
        title = {"inherited": "At the inherited rate", "own": "At its own best rate"}
        rows = []
        for arm, about in ARMS.items():
            cells = [_loss(study, name, arm, column) for name in names]
            rows.append([about.label, *cells])
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
    """Steps to the final loss of tuned Muon+Moonlight, over its own."""
    rows = []
    for name in study.workloads:
        cells = [f"`{name}`"]
        for arm in ARMS:
            has = study.has(name, arm)
            share = study.share_of_steps(name, arm) if has else float("nan")
            cells.append("–" if np.isnan(share) else f"{share:.2f}")
        rows.append(cells)
    return markdown(["", *(about.label for about in ARMS.values())], rows)


def ratios(study: Study) -> str:
    """OrScale at the inherited rate: ratios, growth, and the theory's numbers."""
    rows = []
    for name in study.workloads:
        cells = [f"`{name}`", f"{study.uniform(name, 'orscale', 'inherited'):.2f}"]
        for field in ("spread", "growth"):
            cells.append(f"{study.mean(name, 'orscale', 'inherited', field):.2f}")
        cells.append(f"{study.mean(name, 'orscale', 'inherited', 'at_bound'):.1%}")
        found = [g for g in study.gains if g.workload == name]
        for field in ("kappa", "kappa_eff", "nu", "rho"):
            values = [getattr(g, field) for g in found]
            cells.append(f"{np.mean(values):.2f}" if values else "–")
        cells.append(_interval(study.difference(name, "orscale", "inherited")))
        rows.append(cells)
    heading = ["", "mean r̂", "spread", "growth", "at a bound", "κ", "κ_eff", "ν", "ρ"]
    return markdown([*heading, "− Muon+Moonlight"], rows)


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


def _interval(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


TABLES: dict[str, Table] = {
    "verdicts": verdicts,
    "summary": summary,
    "losses": losses,
    "steps": steps,
    "ratios": ratios,
    "ablations": ablations,
    "sensitivity": sensitivity,
}
