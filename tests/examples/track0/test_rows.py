"""The search, the statistics and the table."""

import math

import numpy as np
import pytest
from scipy import stats

from examples.pretrain.errors import UsageError
from examples.track0 import __main__ as command, figure, table
from examples.track0.row import Cell, fresh_seeds, make_row
from examples.track0.runs import POINTS, Rates, Run, uniform_guess
from examples.track0.search import MOST_POINTS, search
from examples.track0.table import Difference, difference, share_of_steps, verdicts
from examples.track0.workloads import TEXTS, WORKLOADS


def bowl(matrices, others, depth=0.06):
    """A loss that is quadratic in both rates' logarithms."""

    def losses_at(points):
        return [
            1.9 + depth * (math.log2(x / matrices) ** 2 + math.log2(y / others) ** 2)
            for x, y in points
        ]

    return losses_at


@pytest.mark.parametrize("best", [(0.016, 0.064), (0.02, 0.05), (0.05, 0.03)])
def test_a_search_finds_the_lowest_point_to_an_eighth_of_an_octave(best):
    found = search(Rates(0.016, 0.064), bowl(*best))
    assert np.abs(np.log2(np.divide(found.rates, best))).max() <= 1 / 8 + 1e-6
    assert len(found.known) <= MOST_POINTS


def test_a_search_that_leads_nowhere_ends():
    with pytest.raises(UsageError, match="pass --guess"):
        search(Rates(0.016, 0.064), bowl(1e3, 1e3))


def test_a_row_that_diverges_says_so():
    workloads = {"code": WORKLOADS["code"]}
    guess = uniform_guess(workloads["code"])

    def runs(name, points, seeds):
        return [[Run((guess,) * POINTS, 0.1) for _ in seeds] for _ in points]

    with pytest.raises(UsageError, match="diverged"):
        make_row(workloads, runs)


def test_a_difference_is_paired_and_counts_the_searches():
    rng = np.random.default_rng(0)
    seeds, ours = rng.normal(size=24), rng.normal(size=(4, 24)) / 100
    theirs = np.zeros((4, 24)) + seeds
    found = difference(ours + seeds - 0.03, theirs)
    sample = ours.mean(0) - 0.03
    half = stats.t.ppf(0.975, 23) * math.hypot(
        stats.sem(sample), math.sqrt(2 / 4) * 0.0033
    )
    np.testing.assert_allclose(found.interval(), sample.mean() + half * np.array([-1, 1]))
    expected = 2 * stats.t.sf(abs(sample.mean()) / found.error, 23)
    np.testing.assert_allclose(found.p_value, expected)


def test_verdicts_need_size_and_three_of_four_texts():
    means = {
        "better": Difference(-0.03, 0.001, 23),
        "worse": Difference(+0.03, 0.001, 23),
        "small": Difference(-0.0049, 0.0001, 23),
        "two of four": Difference(-0.03, 0.001, 23),
    }
    columns = {name: [np.sign(d.mean)] * 4 for name, d in means.items()}
    columns["two of four"] = [-1, -1, 1, 1]
    expected = {"better": "better", "worse": "worse"}
    assert verdicts(means, columns) == {n: expected.get(n, "level") for n in means}


def test_verdicts_are_corrected_over_all_entries():
    one = {"a": Difference(-0.03, 0.013, 23)}
    assert 0.025 < one["a"].p_value < 0.05
    columns = {name: [-1] * 4 for name in "ab"}
    assert verdicts(one, columns) == {"a": "better"}
    two = one | {"b": Difference(-0.001, 0.013, 23)}
    assert verdicts(two, columns) == {"a": "level", "b": "level"}


@pytest.mark.parametrize(
    ("loss", "share"), [(4.0, 0.25), (2.5, 0.625), (1.0, 1.0), (0.5, math.nan)]
)
def test_the_share_of_steps_to_a_loss(loss, share):
    found = share_of_steps(np.array([4.0, 3.0, 2.0, 1.0]), loss)
    np.testing.assert_equal(found, share)


def row_of(offset, rates):
    """A row whose losses differ from another one's by an offset."""
    cells = {}
    for name, workload in WORKLOADS.items():
        curve = np.linspace(3, 2, POINTS) + offset
        runs = [Run(tuple(curve + s / 1e4), 0.01) for s in fresh_seeds(workload)]
        cells[name] = Cell(Rates(*rates), runs)
    return cells


def test_the_table_and_its_picture(capsys, monkeypatch, tmp_path):
    rows = {
        "muon": (0, (0.01, 0.02)),
        "mine": (-0.02, (0.02, 0.02)),
        "adamw": (0.1, (1, 1)),
    }
    entries = {
        name: table.Entry("orscale_jax:muon", row_of(*row)) for name, row in rows.items()
    }
    monkeypatch.setattr(command, "stored_entries", lambda: entries)
    command.main([])
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [line[0] for line in lines[2:6]] == [
        "`mine`",
        "`muon`",
        "`adamw`",
        "`normuon`",
    ]
    cells = dict(zip(lines[0], lines[2], strict=True))
    assert cells["verdict"] == "better" and cells["four texts"].startswith("-0.0200 [")
    assert all(cells[text] == "-0.0200" for text in TEXTS)
    assert cells["rates over `muon`'s"] == ", ".join(["2/1"] * len(TEXTS))
    assert lines[4][2] == "worse" and lines[5][1] == "not yet run"
    assert lines[4][-2] == "100"
    compared = table.compare(entries)
    assert list(compared) == ["mine", "adamw"]
    figure.draw(compared, tmp_path / "track0.png", narrow=True)
    assert (tmp_path / "track0_narrow.png").exists()


@pytest.mark.parametrize(
    "options",
    ["--processes 0", "--guess 0 1", "--name ../x", "--name adamw"],
)
def test_options_that_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        command.main([command.REFERENCE, *options.split()])
    assert options.split()[0] in capsys.readouterr().err.split("error:")[1]


def test_a_reference_of_other_code_is_refused_before_the_row(tmp_path):
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "reference.csv").write_text("# other code\n")
    with pytest.raises(UsageError, match="made with other code"):
        command.main(["orscale_jax.family:normuon", "--smoke", f"--out={tmp_path}"])
    assert not (tmp_path / "smoke" / "normuon.csv").exists()


@pytest.mark.extended
def test_the_table_on_the_page():
    page = table.STORED.parents[1] / "track0.md"
    assert f"\n{table.markdown(table.stored_entries())}\n" in page.read_text()
