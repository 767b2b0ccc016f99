"""The step that holds the gradients of one block at a time, against the usual one."""

import signal
import time

import jax
import numpy as np
import pytest

from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import make_mesh
from examples.pretrain.tasks import make_task, read_data
from examples.pretrain.train import make_trainer, train
from tests.examples.pretrain import tiny

DEEP = {"model.layers": 3, "model.scan": True, "clip": None}
OPTIONS = DEEP | {"one_layer_at_a_time": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_texts(tmp_path_factory.mktemp("layers") / "texts")


def trainer_of(data, optimizer, devices=1, per_device_batch=None, **changes):
    config = tiny.config(**{"data": (str(data),), "steps": 8} | changes)
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    recipe = config.recipe_of(optimizer)
    return make_trainer(
        make_task(config), read_data(config), recipe, mesh,
        per_device_batch=per_device_batch,
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    ("optimizer", "fused"),
    [
        ("muon", False),
        ("muon", True),
        ("adamw", False),
        ("orscale", False),
    ],
)
def test_the_losses_and_norms_are_those_of_the_usual_step(data, optimizer, fused):
    changes = {"model.fused_qkv": fused, "compute_dtype": "float32"}
    found, wanted = (
        trainer_of(data, optimizer, **options, **changes) for options in (OPTIONS, DEEP)
    )
    runs = []
    for trainer in (found, wanted):
        [interval] = train(trainer, trainer.setup.initial_state(), 0, lambda step: False)
        runs.append(interval)
    for name in ("loss", "grad_norm"):
        losses = [[metrics[name] for metrics in run.metrics] for run in runs]
        np.testing.assert_allclose(*losses, rtol=2e-4)
    for one, other in zip(
        *(jax.tree.leaves(run.state["params"]) for run in runs), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.extended
def test_a_killed_run_goes_on(data, tmp_path):
    options = OPTIONS | {"steps": 40, "log_every": 1, "checkpoint_every": 5}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = {
        out: tiny.arguments(data, out, optimizer=("muon",), **options)
        for out in (whole, killed)
    }
    assert tiny.main(arguments[whole]) == 0
    process = tiny.start(arguments[killed], hold=(20, killed / "never"))
    table = killed / "muon" / "metrics.csv"
    while process.poll() is None and not (table.exists() and len(tiny.rows(table)) > 10):
        time.sleep(0.01)
    process.kill()
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert tiny.main(arguments[killed]) == 0
    losses = [
        [row["train_loss"] for row in tiny.rows(out / "muon" / "metrics.csv")]
        for out in (whole, killed)
    ]
    assert len(losses[0]) == 40 and losses[0] == losses[1]
    states = [tiny.last_state(out / "muon") for out in (whole, killed)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.scan": False}, r"--model\.scan"),
        ({"demo": "demo-moe"}, "a dense decoder"),
        ({"clip": 1.0}, r"--clip None instead of 1\.0"),
        ({"devices": 2}, "for one device, but the mesh has 2"),
        ({"per_device_batch": 2}, "leave out --per-device-batch"),
    ],
)
def test_options_that_contradict(data, changes, said):
    with pytest.raises(UsageError, match=said):
        trainer_of(data, "muon", **(OPTIONS | changes))
