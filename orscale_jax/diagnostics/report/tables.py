"""The tables of the page: key numbers, matrices, audit."""

import html
import math
import re
from collections.abc import Iterable, Sequence

import pandas as pd

from orscale_jax.diagnostics.report.run import Run

MAX_MATRICES = 200
EXTREMES = 40  # Rows at either end, where there are more matrices than that.
MAX_AUDIT_ROWS = 300

# Columns of the table of matrices, and their headings.
NUMBERS = {
    "trust_ratio": "r̂",
    "raw_trust_ratio": "r",
    "calibration": "c",
    "growth": "‖W‖/‖W₀‖",
    "direction_factor": "‖D₀‖/‖D‖",
    "weight_norm": "‖W‖",
    "direction_norm": "‖D‖",
    "relative_step": "η r̂ ‖D‖/‖W‖",
}
# Columns of flags, the value that is worth a note, and the note.
NOTES = (
    ("at_r_min", 1, "at r_min"),
    ("at_r_max", 1, "at r_max"),
    ("started", 0, "no update yet"),
    ("anchored", 0, "no calibration"),
)


def number(value: float) -> str:
    """A number with four digits; a dash where there is none."""
    if math.isnan(value):
        return "–"
    return f"{value:.4g}".replace("inf", "∞").replace("-", "−")


def prose(text: str) -> str:
    """A sentence in HTML; r_max and κ_eff have subscripts."""
    return re.sub(r"\b([rκ])_(\w+)", r"\1<sub>\2</sub>", html.escape(text))


def matrices_table(run: Run) -> str:
    """The last values of every matrix, or of those with extreme ratios."""
    rows = run.final.assign(
        direction_factor=run.final["raw_trust_ratio"] / run.final["growth"]
        if run.has("raw_trust_ratio", "growth")
        else math.nan
    )
    chosen, summary = rows, f"All {len(rows)} matrices at step {run.steps[-1]}"
    if len(rows) > MAX_MATRICES:
        ordered = rows.sort_values("trust_ratio", na_position="first")
        chosen = pd.concat([ordered[:EXTREMES], ordered[-EXTREMES:]])
        summary = (
            f"The {EXTREMES} matrices with the smallest and the {EXTREMES} with the "
            f"largest r̂ of {len(rows):,}, at step {run.steps[-1]}"
        )
    columns = [name for name in NUMBERS if name in rows and rows[name].notna().any()]
    headings = ["matrix", "class", *(NUMBERS[name] for name in columns), "note"]
    cells = [
        [
            row["matrix"],
            row["class"],
            *(number(row[name]) for name in columns),
            _note(row),
        ]
        for row in chosen.to_dict("records")
    ]
    table = html_table(headings, cells, words={0, 1, len(headings) - 1})
    return f"<details><summary>{summary}</summary>{table}</details>"


def audit_table(run: Run) -> str:
    """The table that ``orscale_jax.describe`` made before the run."""
    if run.audit is None or run.audit.empty:
        return (
            '<p class="absent">There is no audit.csv in the run folder. '
            "It holds the rows of orscale_jax.describe.</p>"
        )
    rows, headings = run.audit, [str(column) for column in run.audit.columns]
    summary = f"{len(rows):,} parameters"
    if len(rows) > MAX_AUDIT_ROWS:
        summary = f"The first {MAX_AUDIT_ROWS} of {summary}; audit.csv has the others"
    words = {
        index
        for index, name in enumerate(headings)
        if pd.to_numeric(rows[name].replace("", None), errors="coerce").isna().any()
    }
    cells = rows[:MAX_AUDIT_ROWS].astype(str).values.tolist()
    return (
        "<details><summary>"
        f"{summary}</summary>{html_table(headings, cells, words)}</details>"
    )


def tiles(numbers: Sequence[tuple[str, str]]) -> str:
    """Key numbers and what they are."""
    items = (
        f"<div><dt>{prose(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in numbers
    )
    return f'<dl class="tiles">{"".join(items)}</dl>'


def html_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: set[int]
) -> str:
    """A table in its own scroll box; columns of words are set to the left."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=word' if index in words else ''}>{html.escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line('td', cells)}</tr>" for cells in rows)
    return (
        '<div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{line('th', headings)}</tr></thead>\n<tbody>\n{body}\n</tbody>"
        "</table></div>"
    )


def _note(row: dict[str, float]) -> str:
    return ", ".join(note for column, value, note in NOTES if row.get(column) == value)
