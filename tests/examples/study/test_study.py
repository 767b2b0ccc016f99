"""What tables and claims say of results that are made up."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest
from PIL import Image

from examples import figure_style as style
from examples.study import claims, report
from examples.study.arms import ARMS, KNOWN
from examples.study.figures import FIGURES
from examples.study.gains import Gains
from examples.study.results import Result, best_rate_of
from examples.study.statistics import FAILS, HOLDS, OPEN
from examples.study.study import Study, read_study
from examples.study.tables import TABLES, markdown
from examples.study.workloads import SENSITIVITY, WORKLOADS

ROOT = pathlib.Path(__file__).parents[3]
BEST = {"adamw": 8e-3, "muon": 32e-3, "hyperball": 32e-3}
CLASSES = {"routed expert up": 5.0, "router": 2.0, "attention query": 3.0}
ABLATED = ("uncalibrated", "momentum_denominator", "momentum_rms_denominator")
_IMAGES = ("vision-small", "vision-large", "vision-small-small-init",
           "vision-large-small-init")  # fmt: skip
NAMES = ("dense-small", "dense-large", "mixture-small", "mixture-large")


def rows_of(arm, shift, best=16e-3, **changes):
    """Runs around a best rate; a seed adds its hundredth, and a little that differs."""
    noise = np.random.default_rng(len(arm)).normal(size=5)
    best = BEST.get(arm, best)
    rows = []
    for octave in range(-2, 3):
        rate = best * 2**octave
        inherited = 8e-3 * KNOWN[arm].rate
        seeds = range(5) if octave == 0 or rate == inherited else (0,)
        for seed in seeds:
            loss = 2 + shift + 0.1 * octave**2 + 0.01 * seed + 1e-4 * noise[seed]
            row = Result(
                arm, rate, seed, loss, False, 1.5, 0.3, 0.25,
                (3.0, loss), (1.0, 2.0), CLASSES,
            )  # fmt: skip
            rows.append(row.__class__(**(row.__dict__ | changes)))
    return rows


def study_of(shifts=None, names=NAMES, gains=()):
    """All arms, with losses shifted by some nats."""
    shifts = shifts or {}
    arms = [
        *ARMS,
        *ABLATED,
        "decoupled_weight_decay",
        "bfloat16_calibration",
        "unclipped",
    ]
    results = {
        name: tuple(
            row
            for arm in arms
            for row in rows_of(arm, shifts.get(arm, shifts.get((name, arm), 0.0)))
        )
        for name in names
    }
    seconds = {
        "dense-small": {"orscale": 1.03, "muon_moonlight": 1.0, "orscale_apart": 1.03}
    }
    return Study(results, tuple(gains), seconds)


@pytest.mark.parametrize(("shift", "expected"), [(-0.1, HOLDS), (0.1, FAILS), (0, OPEN)])
def test_a_gain_is_a_lower_loss_than_muon_moonlights(shift, expected):
    study = study_of({"orscale": shift})
    assert claims.tuned(study).verdict == expected
    assert claims.tuned(claims.without_first_seed(study)).verdict == expected
    found = study.difference("dense-small", "orscale", "own")
    assert found.mean == pytest.approx(shift, abs=1e-3)


def test_zero_sweep_asks_for_both_steps_of_the_ranking():
    assert claims.zero_sweep(study_of({"orscale": 0.01, "adamw": 0.9})).verdict == HOLDS
    assert claims.zero_sweep(study_of({"orscale": 0.03, "adamw": 0.9})).verdict == FAILS
    assert claims.zero_sweep(study_of({"orscale": -0.1, "adamw": -0.5})).verdict == FAILS


def test_an_arm_is_compared_with_a_reference_that_has_as_many_free_rates():
    study = study_of({"muon": -0.1, "muon_moonlight_apart": 0.1, "normuon": -0.1})
    lines = {line.split(" | ")[0]: line for line in TABLES["summary"](study).split("\n")}
    assert "| Muon+Moonlight, AdamW's rate apart | " in lines["| Muon (s = 1)"]
    assert lines["| Muon (s = 1)"].endswith("| -0.200 | 4 | 0 |")
    assert lines["| NorMuon"].endswith(
        "| Muon+Moonlight | -0.100 | 4 | 0 | -0.100 | 4 | 0 |"
    )


def test_a_seed_that_is_left_out_still_chooses_rates():
    rows = rows_of("orscale", 0.0)
    worst = [dataclasses.replace(r, loss=9.0) if r.rate == 16e-3 else r for r in rows]
    study = study_of()
    results = {**study.results, "dense-small": (*rows_of("adamw", 0.0), *worst)}
    study = dataclasses.replace(study, results=results)
    without = claims.without_first_seed(study)
    assert set(study.losses("dense-small", "orscale", "inherited")) == {0, 1, 2, 3, 4}
    assert set(without.losses("dense-small", "orscale", "inherited")) == {1, 2, 3, 4}
    for column in ("inherited", "own", "twice"):
        rates = (s.rate("dense-small", "orscale", column) for s in (study, without))
        assert next(rates) == next(rates)


def test_a_gain_that_one_ratio_has_too_is_not_layer_wise():
    gain = {"orscale": -0.1}
    assert claims.layer_wise(study_of(gain)).verdict == HOLDS
    of_all = gain | {"pooled": -0.2}
    assert claims.layer_wise(study_of(of_all)).verdict == FAILS
    as_good = gain | {"replayed": -0.1}
    assert claims.layer_wise(study_of(as_good)).verdict == OPEN


def test_growth_with_experts_compares_models_of_a_size():
    gains = {(name, "orscale"): -0.1 if "mixture" in name else 0.0 for name in NAMES}
    assert claims.grows_with_experts(study_of(gains)).verdict == HOLDS
    assert claims.grows_with_experts(study_of({"orscale": -0.1})).verdict == OPEN


@pytest.mark.parametrize(("slope", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_kappa_predicts_if_its_ranking_is_that_of_gains(slope, expected):
    names = [f"{kind}{end}" for kind in NAMES for end in ("", "-small-init")]
    shifts = {(name, "orscale"): -0.02 * i for i, name in enumerate(names)}
    gains = [
        Gains(name, 0, 100, 1 + 0.1 * i, 0.1, 1 + 0.1 * slope * i, 0.1, 0.3, 0.5)
        for i, name in enumerate(names)
    ]
    assert claims.kappa_ranks(study_of(shifts, names, gains)).verdict == expected


def test_kappa_that_only_tells_images_from_text_predicts_nothing():
    names = ["dense-small", "dense-large", "prose", "mixture-small", *_IMAGES]
    shifts = {(name, "orscale"): -0.02 * i for i, name in enumerate(names)}
    order = [3, 2, 1, 0, 4, 5, 6, 7]  # Within text the wrong way round.
    gains = [
        Gains(name, 0, 100, 1 + order[i], 0.1, 1 + order[i], 0.1, 0.3, 0.5)
        for i, name in enumerate(names)
    ]
    found = claims.kappa_ranks(study_of(shifts, names, gains))
    assert found.verdict != HOLDS
    assert "κ_eff +0.76" in found.evidence and "κ_eff -1.00" in found.evidence


def test_kappa_is_the_mean_of_what_could_be_measured():
    def row(step, kappa):
        return Gains("dense-small", 0, step, kappa, 0.1, math.nan, 0.1, 0.3, 0.5)

    study = study_of(gains=[row(100, 1.2), row(200, 1.4), row(300, math.nan)])
    assert study.gain("dense-small", "kappa") == pytest.approx(1.3)
    assert math.isnan(study.gain("dense-small", "kappa_eff"))
    assert math.isnan(study.gain("dense-large", "kappa"))
    assert "nan" not in TABLES["ratios"](study)


def test_nothing_is_said_of_mixtures_that_were_not_run():
    study = study_of(names=("dense-small", "dense-large"))
    assert claims.grows_with_experts(study) == (
        "The gain grows from dense models to mixtures",
        claims.NOT_RUN,
        "",
    )
    assert claims.classes_separate(study).verdict == claims.NOT_RUN


def test_a_workload_counts_once_all_its_arms_are_run_for_several_seeds():
    whole = study_of()
    assert whole.workloads == list(NAMES)
    rows = whole.results["dense-large"]
    for missing in (
        [r for r in rows if r.arm != "normuon"],
        [r for r in rows if r.arm != "normuon" or r.seed == 0],
    ):
        results = {**whole.results, "dense-large": tuple(missing)}
        study = dataclasses.replace(whole, results=results)
        assert "dense-large" not in study.workloads
        part = dataclasses.replace(study, arms=("orscale", "muon_moonlight", "adamw"))
        assert part.workloads == list(NAMES)


def test_other_rules():
    study = study_of()
    assert claims.classes_separate(study).verdict == HOLDS
    assert claims.wall_clock(study).verdict == HOLDS
    assert claims.unclipped_survives(study).verdict == HOLDS
    assert claims.anchors(study_of({"full_rank_anchor": -0.1})).verdict == FAILS
    assert claims.anchors(study_of({"largest_anchor": 0.1})).verdict == OPEN
    worse = {"full_rank_anchor": 0.1, "largest_anchor": 0.1}
    assert claims.anchors(study_of(worse)).verdict == HOLDS
    assert claims.bfloat16_costs(study_of({"bfloat16_calibration": 0.1})).verdict == HOLDS


def test_half_the_rate_is_no_symptom_and_twice_the_rate_does_not_show_one():
    study = study_of()
    assert claims.ablations(study).verdict == FAILS  # A quarter of the steps at a bound.
    for factor, expected in ((0.5, FAILS), (1, FAILS), (2, OPEN), (8, FAILS)):
        uncalibrated = rows_of("uncalibrated", 0.0, best=16e-3 * factor)
        others = [r for r in study.results["dense-small"] if r.arm != "uncalibrated"]
        results = {**study.results, "dense-small": (*others, *uncalibrated)}
        found = claims.ablations(dataclasses.replace(study, results=results))
        assert found.verdict == expected, factor


def test_runs_without_a_clip_count_once_and_only_if_it_would_have_bound():
    study = study_of()
    runs = len(NAMES) * 10  # Five seeds at each of two rates.
    assert f"0 of {runs} runs diverged; in 0 of them" in _unclipped(study)
    inside = {
        name: tuple(dataclasses.replace(r, at_bound=0.0) for r in rows)
        for name, rows in study.results.items()
    }
    free = dataclasses.replace(study, results=inside)
    assert f"0 of {runs} runs diverged; in {runs} of them" in _unclipped(free)
    assert claims.unclipped_survives(free).verdict == OPEN
    at_one_rate = {
        name: tuple(r for r in rows if r.rate == 8e-3 or r.arm != "unclipped")
        for name, rows in study.results.items()
    }
    once = dataclasses.replace(study, results=at_one_rate)
    assert f"0 of {runs // 2} runs" in _unclipped(once)


def _unclipped(study):
    return claims.unclipped_survives(study).evidence


@pytest.mark.parametrize(("apart", "expected"), [(1.0, FAILS), (0.8, OPEN), (1.25, OPEN)])
def test_parity_is_told_only_by_accurate_times(apart, expected):
    seconds = {"orscale": 1.2, "muon_moonlight": 1.0, "muon_moonlight_apart": apart}
    study = dataclasses.replace(study_of(), seconds={"dense-small": seconds})
    assert claims.wall_clock(study).verdict == expected


def test_rates_are_the_best_for_all_seeds_or_for_the_first():
    rows = rows_of("orscale", 0.0)
    lucky = dataclasses.replace(rows[0], loss=1.0)  # Seed 0 alone, at another rate.
    assert best_rate_of([lucky, *rows[1:]], for_all_seeds=True) == 16e-3
    assert best_rate_of([lucky, *rows[1:]], for_all_seeds=False) == 4e-3


def test_steps_are_counted_to_the_loss_of_tuned_muon_moonlight():
    study = study_of({"orscale": -0.5, "pooled": 0.5})
    share = study.share_of_steps("dense-small", "orscale")
    assert 0.1 < share < 1  # Between the validations at steps 30 and 60.
    assert math.isnan(study.share_of_steps("dense-small", "pooled"))


def test_muon_moonlight_needs_all_its_steps_for_its_own_loss():
    rows = rows_of("muon_moonlight", 0.0)
    rounded = [
        dataclasses.replace(r, losses=(3.0, round(r.loss + 5e-4, 3))) for r in rows
    ]
    results = {"dense-small": (*rows_of("adamw", 0.0), *rounded)}
    study = Study(results, (), {}, ("adamw", "muon_moonlight"))
    assert study.share_of_steps("dense-small", "muon_moonlight") == pytest.approx(0.2)


@pytest.mark.extended
def test_every_table_and_figure_is_made_of_a_whole_study(tmp_path):
    gains = [
        Gains(n, 0, 100, 1 + i, 0.1, 0.8 - i, 0.1, 0.3, 0.5) for i, n in enumerate(NAMES)
    ]
    shifts = {(name, "orscale"): -0.1 * i for i, name in enumerate(NAMES)}
    study = study_of(shifts, gains=gains)
    for name, table in TABLES.items():
        widths = {line.count("|") for line in table(study).split("\n") if line}
        assert widths and "nan" not in table(study), name
    widths = {False: style.WIDTH, True: style.NARROW}
    for name, draw in FIGURES.items():
        for narrow, width in widths.items():
            draw(study, tmp_path / f"{name}.png", narrow)
            drawn = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
            assert np.ptp(drawn) > 200 and drawn.shape[1] == width * style.DPI


def test_a_table_is_markdown():
    found = markdown(("", "a"), [("x", "1"), ("y", "2")])
    assert found == "|  | a |\n| --- | --: |\n| x | 1 |\n| y | 2 |"


_ORSCALE = "| OrScale | Muon+Moonlight | -0.100 | 4 | 0 | -0.100 | 4 | 0 |"


def test_tables_are_written_into_their_places():
    study = study_of({"orscale": -0.1})
    page = "Text.\n<!-- table: summary -->\n<!-- end -->\nMore.\n"
    found = report.with_tables(page, study)
    assert report.with_tables(found, study) == found
    page = page.replace("<!-- end", "old\n<!-- end")
    assert report.with_tables(page, study) == found
    assert "old" not in found and _ORSCALE in found
    assert found.startswith("Text.\n<!--") and found.endswith("<!-- end -->\nMore.\n")


@pytest.fixture(scope="module")
def study():
    return read_study(ROOT / "docs" / "data")


def test_the_paper_page_counts_the_verdicts(study):
    found = [claim.verdict for claim in claims.claims(study)]
    assert (found.count(HOLDS), found.count(FAILS), found.count(OPEN)) == (0, 3, 9)
    page = (ROOT / "docs" / "study" / "paper.md").read_text()
    assert "[None holds, 3 fail, 9 are inconclusive.]" in page


def test_the_results_are_whole(study):
    assert study.workloads == list(WORKLOADS) and study.variations == list(SENSITIVITY)
    assert {(g.workload, g.seed) for g in study.gains} == {
        (name, seed) for name in WORKLOADS for seed in (0, 1, 2)
    }
    for name in study.workloads:
        for arm in ARMS:
            for column in ("inherited", "own"):
                seeds = set(study.losses(name, arm, column))
                assert seeds == {0, 1, 2, 3, 4}, (name, arm, column)
            rates = sorted(study.search(name, arm))
            assert len(rates) >= 5
            assert rates[0] < study.rate(name, arm, "own") < rates[-1]
