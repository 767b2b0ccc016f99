"""What the second protocol leaves out while runs are missing; its figures."""

import csv
import dataclasses
import functools
import statistics

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from examples import figure_style as style
from examples.study import questions, two_rates
from examples.study.plan import Runs
from examples.study.questions import FIRST, LIST
from examples.study.records import Cell, difference, read_records
from examples.study.second import REFERENCE, TEXTS, job_of
from examples.study.second_figures import FIGURES
from examples.study.selection import redrawn
from examples.study.statistics import NOT_TOLD, endpoint
from tests.examples.pretrain.tiny import ROOT

FOLDER = ROOT / "docs" / "data" / "two_rates"


@pytest.fixture(scope="module")
def found():
    """What the tables hold; no run is done for it."""

    def refuse(self):
        raise AssertionError("A run would be done.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runs, "_trainer", property(refuse))
        return two_rates.read(FOLDER)


@functools.cache
def by_rates(workload, arm, first_seed=100):
    """From the table itself: losses of the seeds that no search saw, by both rates."""
    losses = {}
    with (FOLDER / f"{workload}.csv").open() as file:
        for row in csv.DictReader(file):
            if row["arm"] == arm and int(row["seed"]) >= first_seed:
                rates = row["rate"], row["adam_rate"]
                losses.setdefault(rates, {})[int(row["seed"])] = float(row["loss"])
    return losses


def losses(workload, arm):
    """Losses by seed and rates of an arm; None if a seed is missing.

    A replay asks for more runs of OrScale, at the rates of its own.
    """
    seeds = set(job_of(workload, arm).seeds)
    whole = {rates: x for rates, x in by_rates(workload, arm).items() if set(x) == seeds}
    if len(whole) > 1:
        replay = set(by_rates(workload, "replayed"))
        whole = {rates: x for rates, x in whole.items() if rates not in replay} or whole
    return next(((x, rates) for rates, x in whole.items()), None)


def by_hand(differences):
    mean = statistics.fmean(differences)
    error = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)
    return mean, mean - error, mean + error


def of_workload(name, other=REFERENCE, ours="orscale"):
    """Differences by seed; None unless both arms are complete."""
    both = losses(name, ours), losses(name, other)
    if None in both:
        return None
    (ours, _), (theirs, _) = both
    return [ours[seed] - theirs[seed] for seed in sorted(ours)]


DENSE, PAIRED = TEXTS[:4], TEXTS[4:]


def test_a_search_whose_seeds_agree_has_no_excess(found):
    record = found.records[Cell("dense-small", REFERENCE)]
    same = {point: runs[:1] * 3 for point, runs in record.searched.items()}
    assert redrawn(dataclasses.replace(record, searched=same)) == (0.0, 0.0)
    assert redrawn(record)[1] > 0


def lines_of(name):
    return (FOLDER / f"{name}.csv").read_text().splitlines()


def write(folder, name, lines):
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def test_what_is_not_complete_is_not_reported(tmp_path):
    lines = lines_of("prose")
    missing = [x for x in lines if x.startswith("orscale,") and ",111," in x]
    write(tmp_path, "prose", [line for line in lines if line not in missing])
    records = read_records(tmp_path)
    assert Cell("prose", REFERENCE) in records and Cell("prose", "orscale") not in records
    assert difference(records, "prose", "orscale", REFERENCE) is None
    assert questions.comparison(FIRST, records) is None
    assert endpoint(questions.interval([0.01, -0.01]), 0.005) == NOT_TOLD


def test_missing_runs_leave_the_list_its_length(tmp_path):
    write(tmp_path, "like-16b", lines_of("like-16b"))
    answers = questions.answers(read_records(tmp_path))
    [place] = [i for i, answer in enumerate(answers) if answer is not None]
    assert len(answers) == 12 and LIST[place].over == "`like-16b`"
    p = stats.ttest_1samp(of_workload("like-16b"), 0).pvalue
    assert answers[place].p == pytest.approx(p)
    assert answers[place].corrected == pytest.approx(12 * p)


def test_runs_that_a_replay_asked_for_are_not_those_at_the_best_rates(tmp_path):
    lines = lines_of("prose")
    of_seeds, (rate, _) = losses("prose", "orscale")
    fresh = [line for line in lines if line.startswith(f"orscale,{rate},1")]
    assert len(fresh) == len(of_seeds)
    moved = [line.replace(f",{rate},", ",0.0226274,", 1) for line in fresh]
    write(tmp_path, "prose", lines + moved)
    assert read_records(tmp_path)[Cell("prose", "orscale")].losses == of_seeds


@pytest.mark.extended
def test_the_figures(found, tmp_path):
    widths = {False: style.WIDTH, True: style.NARROW}
    for name, draw in FIGURES.items():
        for narrow, width in widths.items():
            draw(found, tmp_path / f"{name}.png", narrow)
            drawn = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
            assert np.ptp(drawn) > 200 and drawn.shape[1] == width * style.DPI
