"""What is measured beside the runs, and the runner's processes."""

import io
import math

import jax
import numpy as np
import pytest
from rich.console import Console

from examples.study import gains, plan, runner
from examples.study.arms import ARMS
from examples.study.results import read_results
from examples.study.runs import Trainer
from examples.study.seconds import Stepper, read_seconds
from examples.study.workloads import Workload
from tests.examples.pretrain import tiny


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    data = tiny.write_texts(tmp_path_factory.mktemp("texts"))
    config = tiny.config(data=(str(data),))
    return Trainer(Workload("tiny", config), ARMS["orscale"], adam_rate=0.003)


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


@pytest.mark.slow
def test_theory_is_measured_at_a_third_and_at_two_thirds_of_a_run(trainer, tmp_path):
    rows = list(gains.gains_along(trainer, rate=0.003, seed=0))
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
def test_a_run_that_is_missing_is_done_again_with_the_loss_that_it_had(tmp_path):
    recorded = plan.table_of(tiny.ROOT / "docs" / "data", "dense-small").read_text()
    lines = [x for x in recorded.splitlines() if x.startswith(("arm,", "adamw,"))]
    table = plan.table_of(tmp_path, "dense-small")
    table.write_text("\n".join(x for x in lines if "adamw,0.004,1," not in x) + "\n")
    options = runner.Options(("dense-small",), ("adamw",), out=tmp_path, processes=1)
    said = io.StringIO()
    runner.run(options, Console(file=said))
    assert "dense-small adamw: 1 new runs" in said.getvalue()
    expected = tmp_path / "expected.csv"
    expected.write_text("\n".join(lines) + "\n")
    for one, other in zip(read_results(table), read_results(expected), strict=True):
        assert (one.arm, one.rate, one.seed) == (other.arm, other.rate, other.seed)
        assert one.loss == pytest.approx(other.loss, abs=1e-3)
