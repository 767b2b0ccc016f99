"""Draw the study's figures, and write its tables into the page that shows them.

    python -m examples.study.report

Between ``<!-- table: NAME -->`` and ``<!-- end -->`` the page is made from the results.
"""

import dataclasses
import pathlib

import tyro

from examples import figure_style as style
from examples.study.arms import ARMS
from examples.study.figures import FIGURES, draw_summary
from examples.study.study import Study, read_study
from examples.study.tables import TABLES, fill


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw the study's figures and write its tables."""

    tables: pathlib.Path = pathlib.Path("docs/data")
    """Folder of the results."""
    page: pathlib.Path | None = pathlib.Path("docs/study/does_it_work.md")
    """Where tables are written. None: nowhere."""
    figures: pathlib.Path = pathlib.Path("docs/study")
    """Folder of the figures."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Workloads are shown once all of these were run."""


def with_tables(page: str, study: Study) -> str:
    """The page with the tables of the study."""
    return fill(page, lambda name: TABLES[name](study))


def draw_for_pages(study: Study, folder: pathlib.Path) -> None:
    """The figures for phones, and the one of the README."""
    for name, draw in FIGURES.items():
        draw(study, style.narrow_path(folder / f"study_{name}.png"), narrow=True)
    draw_summary(study, folder / "study_summary.png")


def main(options: Options) -> None:
    study = read_study(options.tables, options.arms)
    for name, draw in FIGURES.items():
        draw(study, options.figures / f"study_{name}.png")
    if options.page is not None:
        page = options.page.read_text()
        options.page.write_text(with_tables(page, study))
        draw_for_pages(study, options.figures)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
