"""What the study's programs print is what README and the pages say.

test_pages.py recomputes the numbers of README and of the pages from the files alone.
"""

import functools
import re

import pytest

from examples.study import contrasts, repeat, third_tables
from examples.study.results import Runs
from examples.study.statistics import interval_of, markdown
from examples.study.third import Ladder
from tests.examples.pretrain.tiny import ROOT
from tests.examples.study.test_pages import STUDY, tables, the_table


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_pages_table():
    """But for its last row, which needs the surfaces of the searches."""
    found = [(*row[:2], str(row[2])) for row in contrasts.contrasts()]
    _, rows = next(tables(STUDY / "two_rates.md"))
    assert {tuple(row) for row in rows[:-1]} <= {*found} and len(rows) == 12


def test_the_readmes_table():
    text = (ROOT / "README.md").read_text()
    _, table = text.split("| models | mean, 95 % interval |\n")
    cells = [line.split("|")[3].strip() for line in table.split("\n\n")[0].splitlines()]
    rows = {over: found for label, over, found in contrasts.contrasts()}
    lowest, ladder = (
        functools.partial(third_tables.tuned, tried=True),
        Ladder(train=False),
    )
    for name, weights in third_tables.MEANS.items():
        rows[name] = interval_of(*lowest(ladder, weights))
    shown = {k: "{:+.3f} [{:+.3f}, {:+.3f}]".format(*x) for k, x in rows.items()}
    assert cells[1:] == [
        "; ".join(shown[over] for over in of_row)
        for of_row in (
            ["four dense models"],
            ["five mixtures, four with small initial weights"],
            ["mixtures minus dense: the two pairs"],
            ["small initial weights", "usual ones"],
            [over for over in shown if over.endswith("AdamW's rate")],
            ["six of text"],
        )
    ]
    twice = [x for label, _, x in contrasts.contrasts() if "`adamw`" in label]
    of = [f"{-x.mean:.3f} {{}}[{-x.high:.3f}, {-x.low:.3f}]" for x in twice]
    said = f"by {of[0]}), {of[1]}".format("nats on text (95 % interval ", "on images ")
    assert f"below AdamW's: {said}" in re.sub(r"\s+", " ", text)


def test_the_ladder():
    """Also its slope, by the page's first sentence on it and by least squares."""
    found = [row[1:] for row in contrasts.first_batch()]
    rows = the_table("two_rates", "experts")
    of_ladder = [*found[:5], found[6]]
    assert [row[1:4] for row in rows] == of_ladder
    page = re.sub(r"\s+", " ", (STUDY / "two_rates.md").read_text())
    assert f"slope for a doubling of the experts is {found[-1][2]}" in page
    assert f"on `like-16b`, by {found[7][2]}" in page


def test_a_repeat_has_the_settings_of_the_table(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(Runs, "losses", lambda _, *arguments: asked.append(arguments))
    repeat.repeat("dense-small", "orscale", tmp_path)
    assert asked == [((0.016, 0.064, None), range(100, 112))]


def test_a_table_is_markdown():
    found = markdown(("", "a"), [("x", "1"), ("y", "2")])
    assert found == "|  | a |\n| --- | --: |\n| x | 1 |\n| y | 2 |"
