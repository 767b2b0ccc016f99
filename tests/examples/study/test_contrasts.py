"""What the study's programs print is what README and the pages say.

test_pages.py recomputes the numbers of README and of the pages from the files alone.
"""

import re

import pytest

from examples.study import contrasts, repeat
from examples.study.results import Runs
from examples.study.statistics import markdown
from tests.examples.pretrain.tiny import ROOT
from tests.examples.study.test_pages import STUDY, tables, the_table


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_pages_table():
    """But for its last row, which needs the surfaces of the searches."""
    found = [(*row[:2], str(row[2])) for row in contrasts.contrasts()]
    _, rows = next(tables(STUDY / "two_rates.md"))
    assert {tuple(row) for row in rows[:-1]} <= {*found} and len(rows) == 15


def test_the_readmes_table():
    text = (ROOT / "README.md").read_text()
    table = re.findall(r"^\|.* − .*\|\n", text, re.MULTILINE)
    shown = [[cell.strip() for cell in line.split("|")[3:5]] for line in table]
    rows = {(label, over): found for label, over, found in contrasts.contrasts()}
    ratio = "OrScale − Muon+Moonlight"
    asked = [
        ("Muon+Moonlight − AdamW", "six of text"),
        (ratio, "four dense models"),
        (ratio, "eight mixtures"),
        (ratio, "one of them, `like-16b`, planned"),
    ]
    found = [rows[x] for x in asked]
    assert shown == [[f"{x.mean:+.3f}", f"[{x.low:+.3f}, {x.high:+.3f}]"] for x in found]
    twice = [x for label, _, x in contrasts.contrasts() if "`adamw`" in label]
    for x in twice[:2]:
        assert f"{-x.mean:.3f} nats per" in text
        assert f"[{-x.high:.3f}, {-x.low:.3f}]" in text


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
