"""What the study's programs print is what README and the pages say.

test_pages.py recomputes the numbers of README and of the pages from the files alone.
"""

import re

import numpy as np
import pytest
from scipy import stats

from examples.study import contrasts, third_tables
from examples.study.statistics import Interval, holm, interval
from tests.examples.pretrain.tiny import ROOT
from tests.examples.study import test_pages as pages
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


def test_orscales_rates():
    page = ROOT / "docs" / "hyperparameters.md"
    rows = [rows for head, rows in tables(page) if "Workloads with a lower loss" in head]
    assert rows == [contrasts.orscale_at_multiples()]
    text = re.sub(r"\s+", " ", page.read_text())
    for label, over, found in contrasts.contrasts():
        if label.startswith("OrScale at twice"):
            assert "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found) in text, over


def cells_of(table):
    return [
        [cell.strip("` ") for cell in line.split("|")[1:-1]]
        for line in table.splitlines()[2:]
    ]


def test_the_third_studys_cells_and_contrasts():
    """As the pages have them, and as test_pages.py computes them."""
    rows = {name: told for name, *told in cells_of(third_tables.cells())}
    weights = dict(zip(pages.CELLS, np.eye(8).tolist(), strict=True))
    rungs = (pages.SLOPE, [-1, 1, 0, 0], [1, 0, 0, 0])
    weights |= {
        name: [x / 2 for x in (*of, *of)]
        for name, of in zip(third_tables.CONTRASTS, rungs, strict=True)
    }
    weights |= {"all": pages.INITS[0], "small minus usual": pages.INITS[-1]}
    for name, of in weights.items():
        by_seed = of @ np.array([pages.shared(cell) for cell in pages.CELLS])
        searched = [pages.told_of_searches(of, lowest) for lowest in (False, True)]
        assert rows[name] == [pages.told(by_seed), *searched], name
    at_one_rate = the_table("two_rates", "mixture of")
    searched = the_table("two_rates", "searched, small")
    for (n, *shared), (_, *tuned) in zip(at_one_rate, searched, strict=True):
        small, usual = rows[f"ladder-{n}-small-init"], rows[f"ladder-{n}"]
        found = [[x, y] for x, y in zip(small, usual, strict=True)]
        assert [shared, tuned] == [found[0], found[1] + found[2]]


def test_the_third_studys_endpoints_record_and_anchors():
    """As the pages have them."""
    page = re.sub(r"\s+", " ", (STUDY / "two_rates.md").read_text())
    rows = cells_of(third_tables.endpoints())
    verdicts = ["inconclusive"] * 2 + ["lower"] * 2 + ["inconclusive"]
    assert [row[-1] for row in rows] == verdicts
    for _, _, mean, p, _ in rows:
        assert mean in page and (not p or f"(p = {p}" in page)
    found = [row[3] for row in cells_of(third_tables.record()) if row[3]]
    rows = the_table("paper", "minus OrScale")
    assert sorted(found) == sorted(cell for row in rows for cell in row[3:])
    anchors = third_tables.anchors(("largest_anchor", "waited"), range(700, 712))
    assert cells_of(anchors) == the_table("two_rates", "after 8 sequences")
    for label, _, mean in cells_of(third_tables.advice("largest_anchor")):
        assert mean in page, label
        assert "rank" not in label or f"{label.split()[-1]} of the shorter side" in page
    within = Interval(0.001, -0.002, 0.004)
    assert third_tables.of_level(within) == "equal within the margin"


def test_an_interval_is_that_of_a_paired_t_test():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 5))
    found = interval(ours - theirs)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    np.testing.assert_allclose(found[1:], [expected.low, expected.high], rtol=1e-12)
    assert found.mean == pytest.approx(np.mean(ours - theirs))


def test_holm_multiplies_the_smallest_by_the_most_and_keeps_the_order():
    # By hand: 4 × 0.01, 3 × 0.02, then at least that, 1 × 0.5.
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []
