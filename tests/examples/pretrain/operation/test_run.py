"""Three optimizers in one process, from the first step to the report."""

import json
import shutil

import jax
import numpy as np
import pytest

from examples.pretrain import tasks
from examples.pretrain.meshes import make_mesh
from examples.pretrain.operation import logs, report
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.output import Output
from examples.pretrain.setup import learning_rates, set_up
from examples.pretrain.tasks import make_task
from tests.examples.pretrain import tiny

pytestmark = pytest.mark.extended

STEPS, OPTIONS = tiny.STEPS, tiny.OPTIONS


@pytest.fixture
def finished(tmp_path_factory):
    return tiny.finished_run(tmp_path_factory.getbasetemp())[0]


def by_optimizer(rows):
    names = dict.fromkeys(row["optimizer"] for row in rows)
    return {name: [row for row in rows if row["optimizer"] == name] for name in names}


def test_metrics_hold_every_step_of_every_optimizer(finished):
    metrics = by_optimizer(tiny.rows(finished / "metrics.csv"))
    assert list(metrics) == ["adamw", "muon", "orscale"]
    schedule = learning_rates(tiny.config(**OPTIONS).recipe)
    expected = [float(schedule(step)) for step in range(STEPS)]
    for rows in metrics.values():
        assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
        assert [int(row["tokens"]) for row in rows] == [
            64 * s for s in range(1, STEPS + 1)
        ]
        validated = [int(row["step"]) for row in rows if row["val_loss"]]
        assert validated == [50, 100, 120]
        rates = [float(row["learning_rate"]) for row in rows]
        np.testing.assert_allclose(rates, expected, rtol=1e-4)
        assert all(float(row["grad_norm"]) > 0 for row in rows)
        losses = [float(row["train_loss"]) for row in rows]
        assert np.mean(losses[-5:]) < losses[0] - 1  # It learns.


def test_optimizers_share_weights_and_batches(finished):
    metrics = by_optimizer(tiny.rows(finished / "metrics.csv"))
    first = {rows[0]["train_loss"] for rows in metrics.values()}
    assert len(first) == 1
    second = {name: float(rows[1]["train_loss"]) for name, rows in metrics.items()}
    # The first ratio is 1: `orscale` takes the first step of `muon`, and not of AdamW.
    assert second["orscale"] == pytest.approx(second["muon"], abs=2e-5)
    assert second["adamw"] != pytest.approx(second["muon"], abs=1e-3)
    last = {name: rows[-1]["train_loss"] for name, rows in metrics.items()}
    assert len(set(last.values())) == 3


def test_readouts_are_recorded_by_matrix(finished):
    assert not (finished / "adamw" / "history.csv").exists()
    rows = tiny.rows(finished / "orscale" / "history.csv")
    names = "attention.key attention.out attention.query attention.value mlp.down mlp.up"
    read = {*range(4, STEPS + 1, 4), *range(50, STEPS + 1, 50)}
    expected = [f"blocks.0.{name}.kernel" for name in names.split()] * len(read)
    assert [row["matrix"] for row in rows] == expected
    assert {int(row["step"]) for row in rows} == read
    metrics = by_optimizer(tiny.rows(finished / "metrics.csv"))["orscale"]
    for row in rows:
        assert float(row["calibration"]) > 0
        clipped = np.clip(float(row["raw_trust_ratio"]), 0.1, 5.0)
        assert float(row["trust_ratio"]) == pytest.approx(clipped, rel=1e-6)
        of_step = metrics[int(row["step"]) - 1]
        assert float(row["loss"]) == pytest.approx(float(of_step["train_loss"]), abs=1e-6)
    assert any(row["trust_ratio"] != "1" for row in rows)


def test_measurements_are_taken_now_and_then(finished):
    rows = tiny.rows(finished / "orscale" / "history.csv")
    measured = [row for row in rows if row["polar_error"]]
    assert {int(row["step"]) for row in measured} == {50, 100}
    for row in measured:
        assert float(row["polar_error"]) < 1
        assert 1 <= float(row["momentum_stable_rank"]) <= 16
    of_muon = tiny.rows(finished / "muon" / "history.csv")
    assert {row["trust_ratio"] for row in of_muon} == {""}
    assert all(float(row["weight_norm"]) > 0 for row in of_muon)


def test_what_is_wrong_is_said_once(tmp_path, capsys):
    data = tiny.write_texts(tmp_path / "texts")
    options = {"optimizer": ("orscale",), "learning_rate": 0.5, "log_every": 1}
    assert tiny.main(tiny.arguments(data, tmp_path / "run", **options)) == 0
    assert capsys.readouterr().out.count("Large steps") == 1


def setup_of(optimizer):
    config = tiny.config(**OPTIONS)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return set_up(make_task(config), config.recipe_of(optimizer), mesh)


def test_the_audit_is_of_the_optimizer_of_the_run(finished):
    def rows(optimizer):
        return {row.path: row for row in logs.audit(setup_of(optimizer)).rows}

    up = "blocks.0.mlp.up.kernel"  # 16×64
    assert rows("orscale")[up].scale == pytest.approx(0.2 * 64**0.5)
    for name in ("muon_unit_scale", "orscale_vision"):
        assert rows(name)[up].scale == 1
    assert rows("muon_unit_scale")[up].state_bytes == 4 * 16 * 64  # M.
    assert rows("adamw")[up].rule != "matrix" and rows("adamw")[up].scale is None
    written = {r["path"]: r for r in tiny.rows(finished / "orscale" / "audit.csv")}
    assert written[up]["scale"] == "1.6" and written[up]["state_bytes"]


def test_a_report(finished):
    assert "<html" in (finished / "orscale" / "report" / "report.html").read_text()
    for name in ("adamw", "muon"):  # Nothing of what there is not.
        assert not (finished / name / "report").exists()


def test_the_table_at_the_end(finished, capsys):
    metrics = by_optimizer(tiny.rows(finished / "metrics.csv"))
    report.write(finished, Output(width=200))
    shown = capsys.readouterr().out
    for name, rows in metrics.items():
        label = OPTIMIZERS[name].label
        (line,) = (line for line in shown.splitlines() if f"│ {label} " in line)
        assert f" {float(rows[-1]['val_loss']):.4f} " in line
        result = json.loads((finished / name / "result.json").read_text())
        assert result["parameters"] == 256 * 16 + 12 * 16**2 + 3 * 16


@pytest.mark.slow
def test_optimizers_come_one_by_one_too(finished, tmp_path_factory, tmp_path):
    """What one does depends on no other."""
    data = tiny.finished_run(tmp_path_factory.getbasetemp())[1]
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "muon")
    (tmp_path / "metrics.csv").unlink()
    options = OPTIONS | {"optimizer": ("muon",)}
    assert tiny.main(tiny.arguments(data, tmp_path, **options)) == 0
    again, before = (tiny.rows(out / "metrics.csv") for out in (tmp_path, finished))
    assert [r | {"seconds": ""} for r in again] == [r | {"seconds": ""} for r in before]


# Images.

IMAGES = """
    --recipe demo-vision --optimizer muon --model.widths 4 4 4 4
    --model.residual 1 --batch-size 20 --steps 3 --warmup-steps 1 --val-every 2
    --log-every 2 --cutout 4
"""


def test_images_are_trained_on_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "SHAPES_TO_TRAIN", 100)
    monkeypatch.setattr(tasks, "SHAPES_TO_VALIDATE", 40)
    assert tiny.main([*IMAGES.split(), "--out", str(tmp_path)]) == 0
    rows = tiny.rows(tmp_path / "metrics.csv")
    assert [row["images"] for row in rows] == ["20", "40", "60"]
    assert [bool(row["val_accuracy"]) for row in rows] == [False, True, True]
    history = tiny.rows(tmp_path / "muon" / "history.csv")
    assert all("conv" in row["class"] for row in history)
    assert {row["step"] for row in history} == {"2"}
    shown = capsys.readouterr().out
    assert "100 images to train on, 40 to validate on, from drawings of" in shown
    assert f"{float(rows[-1]['val_accuracy']):.2%}" in shown
    assert f" {float(rows[-1]['seconds']) / 3:.3f} " in shown
