"""The report as one HTML page and its figures as PNG files."""

import html
import importlib.metadata
import importlib.resources
import pathlib
import string

import matplotlib

from orscale_jax.diagnostics.report import findings, gains, style, tables
from orscale_jax.diagnostics.report.figures import FIGURES, Entry
from orscale_jax.diagnostics.report.run import Run, read_run
from orscale_jax.diagnostics.report.tables import prose

MAX_NAMES = 6  # Names of matrices below a warning.


def write_report(
    folder: str | pathlib.Path, out: str | pathlib.Path | None = None
) -> pathlib.Path:
    """Write the report of a run.

    Args:
      folder: The run folder, with the ``history.csv`` of
        ``orscale_jax.diagnostics.History``.
      out: Where ``report.html`` and the figures go. Default: ``report`` in ``folder``.

    Returns:
      The path of the page, which needs no other file.

    Raises:
      RunError: No report can be made from this folder.
    """
    run = read_run(pathlib.Path(folder))
    out = pathlib.Path(folder) / "report" if out is None else pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sections = [_figure(entry, run, out) for entry in FIGURES]
    page = out / "report.html"
    page.write_text(_page(run, "\n".join(sections)), encoding="utf-8")
    return page


def _page(run: Run, figures: str) -> str:
    parts = importlib.resources.files(__package__)
    return string.Template(parts.joinpath("page.html").read_text("utf-8")).substitute(
        css=parts.joinpath("page.css").read_text("utf-8"),
        name=html.escape(run.name),
        facts=_facts(run),
        verdict=_verdict(run),
        tiles=tables.tiles(findings.key_numbers(run)),
        problems=_problems(run, findings.occurrences(run)),
        figures=figures,
        matrices=tables.matrices_table(run),
        audit=tables.audit_table(run),
        footer=_footer(run),
    )


def _facts(run: Run) -> str:
    classes = len(run.last["class"].unique())
    return (
        f"step {run.steps[-1]:,} · {_count(len(run.steps), 'recorded step')} · "
        f"{_count(run.matrices, 'matrix', 'matrices')} · "
        f"{_count(classes, 'class', 'classes')}"
    )


def _verdict(run: Run) -> str:
    found, step = gains.verdict_of(run)
    explanations = findings.explanations(run, found)
    sentences = "".join(f"<p>{prose(sentence)}</p>" for sentence in explanations)
    return (
        f'<h2 id="verdict">Verdict, at step {step:,}</h2>'
        f'<p class="headline">{prose(found.text)}</p>{sentences}'
    )


def _problems(run: Run, problems: list[findings.Occurrence]) -> str:
    if not problems:
        return (
            "<p>None: no recorded step shows one of the problems that are looked for.</p>"
        )
    items = "".join(_problem(run, problem) for problem in problems)
    return f'<ul class="problems">{items}</ul>'


def _problem(run: Run, found: findings.Occurrence) -> str:
    problem, names = found.problem, ", ".join(found.problem.matrices[:MAX_NAMES])
    if len(problem.matrices) > MAX_NAMES:
        names += f" and {len(problem.matrices) - MAX_NAMES:,} more"
    over = found.last != run.steps[-1]
    steps = f"steps {found.first:,} to {found.last:,}"
    if found.first == found.last:
        steps = f"step {found.last:,}"
    when = f"{_count(len(problem.matrices), 'matrix', 'matrices')}, {steps}" + (
        ", no longer at the last step" * over
    )
    return (
        f"<li{' class=over' * over}><h3>{html.escape(problem.title)}</h3>"
        f'<p class="names">{when}</p>'
        f"<p>{prose(problem.meaning)} {prose(problem.remedy)}</p>"
        f'<p class="names">{html.escape(names)}</p></li>'
    )


def _figure(entry: Entry, run: Run, out: pathlib.Path) -> str:
    """A section of the page; its PNG is written beside it."""
    image = out / f"{entry.name}.png"
    if reason := entry.left_out(run):
        image.unlink(missing_ok=True)  # It may be left from an earlier report.
        content = f'<p class="absent">Left out. {html.escape(reason)}</p>'
    else:
        with matplotlib.rc_context(style.RC):
            figure = entry.draw(run)
        image.write_bytes(style.png(figure))
        label = html.escape(f"{entry.title}. {entry.numbers(run)}")
        svg = style.svg(figure, entry.name)
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        content = (
            f'<figure role="group" aria-labelledby="{entry.name}">'
            f"{svg}<figcaption>{prose(entry.caption)}</figcaption></figure>"
        )
    return (
        f'<div class="figure"><h3 id="{entry.name}">{html.escape(entry.title)}</h3>'
        f"{content}</div>"
    )


def _footer(run: Run) -> str:
    shown = ""
    if len(run.shown_steps) < len(run.steps):
        shown = (
            f" The figures show {len(run.shown_steps):,} of the {len(run.steps):,} "
            "recorded steps, at equal distances."
        )
    version = importlib.metadata.version("orscale-jax")
    return f"Made from history.csv by orscale_jax {html.escape(version)}.{shown}"


def _count(number: int, one: str, more: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"
