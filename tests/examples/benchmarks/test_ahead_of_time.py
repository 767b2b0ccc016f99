"""Steps that are compiled and not run, for devices that are there: eight of a CPU."""

import importlib.util
import math

import jax
import numpy as np
import pytest

from examples.benchmarks import ahead_of_time, hlo_cost
from examples.benchmarks.ahead_of_time import Options, Target, main, trained
from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.setup import set_up
from examples.pretrain.tasks import make_task
from orscale_jax.newton_schulz.hardware import H100
from tests.examples.pretrain import tiny

DEVICES = np.array(jax.devices()[:8])
HALVES = {i: i // 4 for i in range(8)}
TARGET = Target(DEVICES, HALVES, memory=10**9)


def on_cpu(case, platform):
    """Two halves of the devices for slices, or one."""
    if "dcn" in case.mesh:
        return Target(DEVICES.reshape(2, 4), HALVES)
    return Target(DEVICES, dict.fromkeys(HALVES, 0))


def table(capsys):
    """The rows of the table that was printed, by column."""
    head, _, *lines = (
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()
    )
    return [dict(zip(head, cells, strict=True)) for cells in lines]


@pytest.mark.extended
def test_a_layer_of_gpt2_on_eight_devices(capsys, tmp_path):
    contenders = ("optax.adamw", "optax.contrib.muon", "orscale", "orscale on Auto axes")
    options = Options(cases=("c",), contenders=contenders, layers=1, dump=tmp_path)
    ahead_of_time.step_table(options, on_cpu)
    rows = table(capsys)
    assert [row["optimizer"] for row in rows] == list(contenders)
    adamw, theirs, ours, on_auto_axes = rows
    # All four matrices on every device of theirs.
    m = 768
    of_all = sum(5 * (4 * m * m * n + 2 * m**3) for n in (m, 3 * m, 4 * m, 4 * m)) / 1e9
    assert float(theirs["GFLOP"]) == pytest.approx(of_all, rel=1e-3)
    assert float(ours["GFLOP"]) < of_all / 4
    assert on_auto_axes["GFLOP"] == ours["GFLOP"]
    assert float(adamw["GFLOP"]) == 0
    assert float(ours["collectives, MB"]) > 0 == float(theirs["collectives, MB"])
    training = 6 * 12 * m * m * 8192 / (0.6 * H100.flops_per_second)
    waited = float(ours["exposed, ms"]) / 1e3 / training
    assert float(ours["of AdamW's step, %"]) == pytest.approx(100 * waited, rel=1e-3)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(f"c.{name}.txt" for name in contenders)


def test_compiler_options_reach_the_compiler():
    changed = {"no_such": "ON"}
    options = Options("tpu", ("c",), ("optax.adamw",), 1, compiler_options=changed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such"):
        ahead_of_time.step_table(options, on_cpu)


@pytest.mark.extended
def test_what_comes_from_other_slices(capsys):
    options = Options(cases=("l", "o"), contenders=("orscale",), layers=8)
    ahead_of_time.step_table(options, on_cpu)
    across, experts = (float(row["from other slices, MB"]) for row in table(capsys))
    # Eight matrices in bfloat16, half of them from the other slice, both ways.
    assert across == pytest.approx(2 * 4 * 2048 * 8192 / 2 / 1e6, rel=1e-3)
    assert experts < 1e-3


def test_the_programs_that_a_platform_has():
    for case in ahead_of_time.CASES.values():
        if case.topology is None:
            with pytest.raises(ValueError, match="--platform gpu"):
                ahead_of_time.target_of(case, "tpu")


@pytest.mark.extended
def test_the_training_step_is_that_of_its_parts():
    """Arguments are a part of the state and the batch, the optimizer's part its own."""
    changes = {"mesh.fsdp": 8, "batch_size": 16, "per_device_batch": 1}
    config = tiny.config(**changes, optimizer=("orscale",))
    found = trained(config, "orscale", TARGET)
    mesh = make_mesh(config.mesh, list(DEVICES))
    setup = set_up(make_task(config), config.recipe_of("orscale"), mesh)
    shards = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(setup.abstract)
    ]
    batch = 2 * 17 * 4
    resident = found.memory.argument_size_in_bytes
    # But for scalars of the state that a step writes and does not read.
    assert resident == pytest.approx(sum(shards) + batch, rel=0.02)
    assert found.peak > resident
    assert found.available == TARGET.memory
    params, state = setup.abstract["params"], setup.abstract["opt_state"]
    with in_effect(setup.mesh):
        update = jax.jit(setup.optimizer.update)
        alone = hlo_cost.of(update.lower(params, state, params).compile().as_text())
    assert found.cost.flops > found.optimizer.flops == alone.flops > 0


@pytest.mark.extended
def test_a_row_for_each_optimizer(monkeypatch, capsys):
    monkeypatch.setattr(ahead_of_time, "find_target", lambda topology: TARGET)
    names = "--optimizer adamw optax_muon"
    sizes = "--model.layers 1 --model.width 16 --model.heads 2 --seq-len 8 --batch-size 8"
    assert main(f"{names} {sizes} --topology cpu".split()) == 0
    adamw, muon = table(capsys)
    assert [adamw["optimizer"], muon["optimizer"]] == ["AdamW", "optax.contrib.muon"]
    share = "optimizer's FLOP, %"
    assert float(muon[share]) > float(adamw[share]) == 0
    # Of a CPU the compiler estimates none.
    assert adamw["Mcycles"] == muon["Mcycles"] == "–"


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("a100:8", "is unknown. Choose h100 and a number, as h100:8, or TPUs of v4, v5e"),
        ("h100:12", "12 GPUs are no nodes"),
    ],
)
def test_impossible_topologies_are_refused(topology, message, capsys):
    assert main(["--topology", topology]) == 2
    assert f"error: --topology {topology}" in (told := capsys.readouterr().err)
    assert message in told


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="batch of 12 does not divide among 8 devices"):
        trained(tiny.config(batch_size=12), "adamw", TARGET)


@pytest.mark.parametrize(
    ("topology", "needed"), [("v5p:2x2x1", "libtpu"), ("h100:8", "jax_cuda12_plugin")]
)
def test_what_is_not_installed_is_named(topology, needed, capsys):
    if importlib.util.find_spec(needed) is not None:
        pytest.skip(f"{needed} is installed")
    assert main(["--topology", topology]) == 2
    error = capsys.readouterr().err
    assert f"error: --topology {topology}: " in error and "docs/sharding.md" in error
