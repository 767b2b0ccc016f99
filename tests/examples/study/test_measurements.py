"""What is measured beside the runs, and the runner's processes."""

import io
import math

import jax
import numpy as np
import pytest
from rich.console import Console

from examples.study import classes, gains, plan, repeat
from examples.study.arms import ARMS
from examples.study.results import read_results
from examples.study.runs import Trainer
from examples.study.search import Rates
from examples.study.seconds import Stepper, read_seconds
from examples.study.workloads import Workload
from tests.examples.pretrain import tiny


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    data = tiny.write_texts(tmp_path_factory.mktemp("texts"))
    config = tiny.config(data=(str(data),))
    return Trainer(Workload("tiny", config), ARMS["orscale"])


@pytest.mark.extended
def test_a_step_is_timed(trainer):
    stepper = Stepper(trainer)
    assert all(0 < stepper.seconds() < 60 for _ in range(2))


def test_seconds_are_read_by_workload_and_arm(tmp_path):
    path = tmp_path / "seconds.csv"
    assert read_seconds(path) == {}
    path.write_text("workload,arm,seconds\nprose,muon,0.25\nprose,adamw,0.125\n")
    assert read_seconds(path) == {"prose": {"muon": 0.25, "adamw": 0.125}}


def test_theory_is_measured_on_batches_that_come_after_the_run(trainer):
    unseen = gains.batches_after(trainer, seed=0)
    run = list(trainer.batches(0))
    assert len(unseen) == gains.BATCHES
    first = [np.asarray(jax.tree.leaves(batch)[0]) for batch in (*run, *unseen)]
    assert len({batch.tobytes() for batch in first}) == len(run) + gains.BATCHES


def test_the_mean_of_a_class_is_over_that_of_all_matrices():
    found = classes.class_means(
        {"up": np.array([1.0, 4.0]), "down": np.array([8.0, -1.0]), "q": np.array([0.0])}
    )
    middle = (1 * 4 * 8) ** (1 / 3)
    assert found == pytest.approx({"up": 2 / middle, "down": 8 / middle})


@pytest.mark.slow
def test_ratios_and_their_optima_are_measured_by_class(trainer):
    rows = list(classes.along(trainer, Rates(0.003, 0.003), seed=0))
    assert {step for step, _ in rows} == {2, 4}
    named = {row["class"]: row for step, row in rows if step == 4}
    assert set(named) >= {"attention query", "mlp up", "mlp down"}
    expected = trainer.train(Rates(0.003, 0.003), seed=0).class_ratio
    assert set(named) <= set(expected)
    optima = [float(row["optimum"]) for row in named.values()]
    assert min(optima) < 1 < max(optima)
    assert all(0.5 < float(row["ratio"]) < 2 for row in named.values())


@pytest.mark.slow
def test_theory_is_measured_at_a_third_and_at_two_thirds_of_a_run(trainer, tmp_path):
    rows = list(gains.gains_along(trainer, Rates(0.003, 0.003), seed=0))
    assert [(row.workload, row.step) for row in rows] == [("tiny", 2), ("tiny", 4)]
    for row in rows:
        assert 0 < row.kappa < 2 and 0 < row.kappa_eff < 2
        # NaN if the curvature is negative without one of the batches.
        assert row.kappa_stderr > 0 or math.isnan(row.kappa_stderr)
        assert row.kappa_eff_stderr > 0 and row.nu >= 0 and -1 <= row.rho <= 1
    gains._write(tmp_path / "gains.csv", rows)
    for read, row in zip(gains.read_gains(tmp_path / "gains.csv"), rows, strict=True):
        assert (read.step, read.seed) == (row.step, row.seed)
        assert math.isclose(read.kappa, row.kappa, rel_tol=1e-3)


@pytest.mark.slow
def test_runs_of_the_first_study_are_repeated_with_the_losses_that_they_had(tmp_path):
    recorded = plan.table_of(tiny.ROOT / "docs" / "data", "dense-small").read_text()
    wanted = ("arm,", "adamw,0.008,0,", "muon,0.016,0,")
    lines = [line for line in recorded.splitlines() if line.startswith(wanted)]
    tables, out = tmp_path / "tables", tmp_path / "out"
    for folder in (tables, out):
        folder.mkdir()
    plan.table_of(tables, "dense-small").write_text("\n".join(lines) + "\n")
    arms = ("adamw", "muon")
    options = repeat.Options(("dense-small",), arms, tables, out, processes=1)
    for new in ("adamw: 1 new runs", "adamw: 0 new runs"):
        said = io.StringIO()
        repeat.run(options, Console(file=said))
        assert new in said.getvalue()
    found = read_results(plan.table_of(out, "dense-small"))
    expected = read_results(plan.table_of(tables, "dense-small"))
    for one, other in zip(found, expected, strict=True):
        assert (one.arm, one.rate, one.seed) == (other.arm, other.rate, other.seed)
        assert one.adam_rate == 0.008
        assert one.loss == pytest.approx(other.loss, abs=1e-3)
