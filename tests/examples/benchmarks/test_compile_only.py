"""A step that is compiled and not run, for the eight devices of a CPU."""

import importlib.util
import math

import jax
import pytest

from examples.benchmarks import compile_only, hlo_cost
from examples.benchmarks.compile_only import Target, compiled, main
from examples.pretrain.errors import UsageError
from examples.pretrain.kinds import make_task
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.setup import set_up
from tests.examples.pretrain import tiny

TARGET = Target(jax.devices()[:8], memory=10**9)


@pytest.fixture(scope="module")
def config():
    changes = {"mesh.fsdp": 8, "batch_size": 16, "per_device_batch": 1}
    return tiny.config(**changes, optimizer=("orscale",))


@pytest.fixture(scope="module")
def setup(config):
    mesh = make_mesh(config.mesh, TARGET.devices)
    return set_up(make_task(config), config.recipe_of("orscale"), mesh)


@pytest.fixture(scope="module")
def found(config):
    return compiled(config, "orscale", TARGET)


@pytest.mark.extended
def test_arguments_are_a_devices_part_of_the_state_and_the_batch(found, setup):
    shards = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(setup.abstract)
    ]
    batch = 2 * 17 * 4
    # But for scalars of the state that a step writes and does not read.
    assert found.resident == pytest.approx(sum(shards) + batch, rel=0.02)
    assert found.peak > found.resident
    assert found.available == TARGET.memory


@pytest.mark.extended
def test_the_optimizers_part_is_what_it_costs_alone(found, setup):
    params, state = setup.abstract["params"], setup.abstract["opt_state"]
    with in_effect(setup.mesh):
        update = jax.jit(setup.optimizer.update)
        alone = hlo_cost.of(update.lower(params, state, params).compile().as_text())
    assert found.optimizer.flops == alone.flops > 0
    assert found.whole.flops > found.optimizer.flops


@pytest.mark.extended
def test_a_row_for_each_optimizer(monkeypatch, capsys):
    monkeypatch.setattr(compile_only, "find_target", lambda topology: TARGET)
    names = "--optimizer adamw optax_muon"
    sizes = "--model.layers 1 --model.width 16 --model.heads 2 --seq-len 8 --batch-size 8"
    assert main(f"{names} {sizes} --topology cpu".split()) == 0
    head, _, *lines = (
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()
    )
    adamw, muon = (dict(zip(head, line, strict=True)) for line in lines)
    assert [adamw["optimizer"], muon["optimizer"]] == ["AdamW", "optax.contrib.muon"]
    share = "optimizer's FLOP, %"
    assert float(muon[share]) > float(adamw[share]) == 0
    # Of a CPU the compiler estimates none.
    assert adamw["Mcycles"] == muon["Mcycles"] == "unknown"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--recipe demo", "--topology NAME: say for which devices to compile"),
        (
            "--topology a100:8",
            "--topology a100:8 is unknown. Choose h100 and a number, as h100:8, or TPUs",
        ),
        ("--topology h100:12", "--topology h100:12: 12 GPUs are no nodes"),
    ],
)
def test_impossible_commands_are_refused(options, message, capsys):
    assert main(options.split()) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="batch of 12 does not divide among 8 devices"):
        compiled(tiny.config(batch_size=12), "adamw", TARGET)


@pytest.mark.parametrize(
    ("topology", "needed"), [("v5p:2x2x1", "libtpu"), ("h100:8", "jax_cuda12_plugin")]
)
def test_what_is_not_installed_is_named(topology, needed, capsys):
    if importlib.util.find_spec(needed) is not None:
        pytest.skip(f"{needed} is installed")
    assert main(["--topology", topology]) == 2
    error = capsys.readouterr().err
    assert f"error: --topology {topology}: " in error and "docs/sharding.md" in error
