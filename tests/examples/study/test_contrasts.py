"""What the study's programs print is what README and the pages say.

The study is closed: each interval on the pages is one of tests/data/study_intervals.txt,
which test_pages.py and test_tuning.py of commit 11ff6128 recomputed from the runs.
"""

import re

import numpy as np
import pytest
from scipy import stats

from examples.study import contrasts, curves
from examples.study.statistics import holm, interval
from tests.examples.pretrain.tiny import ROOT

STUDY = ROOT / "docs" / "study"
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
# Not in blocks of code. The mean stands in front, unless words are between.
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INTERVAL = re.compile(r"(?:[+-]?\d+\.\d+ )?\[[+-]?\d+\.\d+, [+-]?\d+\.\d+\]")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def words(page):
    return re.sub(r"\s+", " ", CODE.sub("", page.read_text()))


def tables(page):
    """The tables of a page: columns by heading."""
    for block in re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE):
        rows = [
            [cell.strip(" *`") for cell in line[1:-1].split(" | ")]
            for line in block.splitlines()
        ]
        yield rows[0], rows[2:]


def the_table(page, heading):
    """The rows of the one table that has this heading."""
    [rows] = [rows for head, rows in tables(page) if heading in head]
    return rows


def test_intervals_are_those_that_were_recomputed():
    """A page may drop a number of a closed study, and may not change it."""
    approved = (ROOT / "tests" / "data" / "study_intervals.txt").read_text().splitlines()
    for page in PAGES:
        changed = {*INTERVAL.findall(words(page))} - {*approved}
        assert not changed, f"{page.name} has other intervals: {sorted(changed)}"


def test_the_pages_table():
    """But for its last row, which needs the surfaces of the searches."""
    found = [(*row[:2], str(row[2])) for row in contrasts.contrasts()]
    _, rows = next(tables(STUDY / "two_rates.md"))
    assert {tuple(row) for row in rows[:-1]} <= {*found} and len(rows) == 15


def test_the_differences_in_the_readme():
    readme = words(ROOT / "README.md")
    rows = {(label, over): found for label, over, found in contrasts.contrasts()}
    ratio = "OrScale − Muon+Moonlight"
    for over in (
        "four dense models",
        "eight mixtures",
        "one of them, `like-16b`, planned",
    ):
        x = rows[ratio, over]
        numbers = rf"\{x.mean:+.3f} nats( per byte)? \[{x.low:+.3f}, {x.high:+.3f}\]"
        assert re.search(numbers.replace(" +", " \\+").replace("[+", "[\\+"), readme), (
            over
        )
    gains = [x for label, _, x in contrasts.contrasts() if "`adamw`" in label][:2]
    for x in (*gains, rows["Muon+Moonlight − AdamW", "six of text"]):
        numbers = rf"{-x.mean:.3f} nats per (byte|byte of text|image) "
        assert re.search(rf"{numbers}\[{-x.high:.3f}, {-x.low:.3f}\]", readme)


def test_how_early_muon_passes_adamw():
    readme, every = words(ROOT / "README.md"), [*contrasts.TEXT, *contrasts.IMAGES]
    words_of = {True: "{:.0f} % of the steps [", False: "the share was {:.0f} % ["}
    for twice, text in words_of.items():
        mean, low, high = (100 * x for x in curves.mean_shares(every, twice))
        assert f"{text.format(mean)}{low:.0f}, {high:.0f}]" in readme
    shares = [100 * curves.shares(name).mean() for name in every]
    assert f"and {min(shares):.0f} to {max(shares):.0f} % by workload" in readme


def test_the_ladder():
    """Also its slope, by the page's first sentence on it and by least squares."""
    found = [row[1:] for row in contrasts.first_batch()]
    rows = the_table(STUDY / "two_rates.md", "experts")
    of_ladder = [*found[:5], found[6]]
    assert [row[1:4] for row in rows] == of_ladder
    page = words(STUDY / "two_rates.md")
    assert f"slope for a doubling of the experts is {found[-1][2]}" in page
    assert f"on `like-16b`, by {found[7][2]}" in page


def test_orscales_rates():
    page = ROOT / "docs" / "hyperparameters.md"
    rows = the_table(page, "Workloads with a lower loss")
    assert rows == contrasts.orscale_at_multiples()
    for label, over, found in contrasts.contrasts():
        if label.startswith("OrScale at twice"):
            assert "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found) in words(page), over


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
