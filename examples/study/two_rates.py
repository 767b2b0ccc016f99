"""Write the tables of docs/study/two_rates.md into it, print them, and draw its figures.

    python -m examples.study.two_rates

All of it comes from the runs in ``docs/data/two_rates`` that are complete.
"""

import dataclasses
import pathlib

import tyro

from examples import figure_style as style
from examples.study.optima import read_optima
from examples.study.records import read_records
from examples.study.second import FOLDER
from examples.study.second_figures import FIGURES
from examples.study.second_tables import TABLES, Found
from examples.study.tables import fill


@dataclasses.dataclass(frozen=True)
class Options:
    """Write the second study's tables and draw its figures."""

    tables: pathlib.Path = FOLDER
    """Folder of the results."""
    page: pathlib.Path | None = pathlib.Path("docs/study/two_rates.md")
    """Where tables are written. None: nowhere."""
    figures: pathlib.Path = pathlib.Path("docs/study")
    """Folder of the figures."""


def read(folder: pathlib.Path) -> Found:
    """What a folder of results holds."""
    return Found(read_records(folder), read_optima(folder / "classes.csv"))


def with_tables(page: str, found: Found) -> str:
    """The page with the tables of the results."""
    return fill(page, lambda name: TABLES[name](found))


def main(options: Options) -> None:
    found = read(options.tables)
    for name, table in TABLES.items():
        print(f"{name}\n\n{table(found)}\n")
    if options.page is not None:
        options.page.write_text(with_tables(options.page.read_text(), found))
    for name, draw in FIGURES.items():
        path = options.figures / f"two_rates_{name}.png"
        draw(found, path)
        draw(found, style.narrow_path(path), narrow=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
