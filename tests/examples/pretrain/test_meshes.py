"""A run on a mesh of several devices comes to what it comes to on one."""

import functools
import io

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from examples.pretrain.config import accumulation
from examples.pretrain.errors import UsageError
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import batch_shards, in_effect, make_mesh
from examples.pretrain.operation.checkpoint import Checkpoints
from examples.pretrain.setup import set_up
from examples.pretrain.step import compiled_step
from examples.pretrain.tasks import make_task
from tests.examples.pretrain import tiny

STEPS, BATCH, SEQ_LEN = 3, 16, 16
SIZES = {"model.width": 16, "model.heads": 2, "batch_size": BATCH, "seq_len": SEQ_LEN}
FSDP_TENSOR = {"mesh.fsdp": 2, "mesh.tensor": 2}
MIXTURE = {"demo": "demo-moe", "model.layers": 1, "model.dense_layers": 0}
EXPERT = MIXTURE | {"mesh.expert": 4}
IN_PARTS = {"per_device_batch": 2, "loss_chunks": 4, "model.remat": True}
EXPLICIT = {"mesh.axis_types": "explicit"}
# From 8 devices to 4, to 2 × 2, to 1.
CHAIN = [(8, {"mesh.fsdp": 8}), (4, {"mesh.fsdp": 2}), (4, FSDP_TENSOR), (1, {})]


class Trainer:
    """What the training program makes of options, on the first devices."""

    def __init__(self, devices=8, **options):
        self.config = tiny.config(**(SIZES | options))
        self.mesh = make_mesh(self.config.mesh, jax.devices()[:devices])
        task, recipe = make_task(self.config), self.config.recipe_of("orscale")
        self.setup = set_up(task, recipe, self.mesh, self.config.mesh.zero1)
        self.batches = Batches(examples(), BATCH, self.mesh)

    @functools.cached_property
    def program(self):
        shards, config = batch_shards(self.mesh), self.config
        parts = accumulation(config.recipe, shards, config.per_device_batch)
        return compiled_step(self.setup, parts, self.batches[0])

    def train(self, state=None, steps=range(STEPS)):
        """The state after some steps, and the loss of each."""
        with in_effect(self.mesh):
            state = state or self.setup.initial_state()
            losses = []
            for step in steps:
                state, metrics = self.program(state, self.batches[step])
                losses.append(float(metrics["loss"]))
        return state, losses


trainer = functools.cache(Trainer)


def examples():
    tokens = np.random.default_rng(0).integers(256, size=(64, SEQ_LEN + 1))
    return grain.MapDataset.source(list(tokens.astype(np.int32))).repeat()


def on_one_device(**options):
    return trainer(1, **options).train()


def assert_equal(result, expected):
    (state, losses), (expected_state, expected_losses) = result, expected
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    pairs = zip(named(state), named(expected_state), strict=True)
    for (name, leaf), (expected_name, expected_leaf) in pairs:
        assert name == expected_name
        one, other = np.asarray(leaf), np.asarray(expected_leaf)
        largest = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=1e-5 * largest, err_msg=name)


def named(tree):
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [
        FSDP_TENSOR,
        FSDP_TENSOR | EXPLICIT | IN_PARTS,
        pytest.param(FSDP_TENSOR | EXPLICIT, marks=pytest.mark.slow),
        pytest.param(FSDP_TENSOR | IN_PARTS, marks=pytest.mark.slow),
        pytest.param({"mesh.zero1": True} | EXPLICIT, marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_dense(options):
    assert_equal(trainer(**options).train(), on_one_device())


def specs(state, ends):
    """Where the arrays lie whose name ends like this: the weight, and its momentum."""
    return {
        name.partition(".")[0]: leaf.sharding.spec
        for name, leaf in named(state)
        if name.endswith(ends) and ("params" in name or ".trace." in name)
    }


def test_weights_and_moments_are_sharded_as_the_table_says():
    state = trainer(**FSDP_TENSOR).setup.initial_state()
    for ends, spec in {
        "query.kernel": P("fsdp", "tensor"),
        "attention.out.kernel": P("tensor", "fsdp"),
        "mlp.up.kernel": P("fsdp", "tensor"),
        "mlp.down.kernel": P("tensor", "fsdp"),
    }.items():
        assert specs(state, ends) == {"params": spec, "opt_state": spec}
    table = state["params"]["embed"]["embedding"]
    assert table.sharding.spec == P("tensor", "fsdp")
    assert table.addressable_shards[0].data.size == table.size // 4


@pytest.mark.extended
def test_zero1():
    """The optimizer's state is sharded over the replicas, too, and weights are not."""
    state, losses = trainer(**FSDP_TENSOR, **{"mesh.zero1": True}).train()
    assert_equal((state, losses), on_one_device())
    assert specs(state, "query.kernel") == {
        "params": P("fsdp", "tensor"),
        "opt_state": P(("fsdp", "data"), "tensor"),
    }


def test_zero1_within_fsdp_needs_auto_axes():
    with pytest.raises(UsageError, match=r"--mesh\.zero1"):
        tiny.config(**FSDP_TENSOR, **EXPLICIT, **{"mesh.zero1": True})


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [
        EXPERT,
        pytest.param(EXPERT | EXPLICIT, marks=pytest.mark.slow),
        pytest.param(
            EXPERT | {"per_device_batch": 1, "loss_chunks": 4, "model.remat": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(EXPERT | FSDP_TENSOR | {"mesh.expert": 2}, marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_mixture(options):
    assert_equal(trainer(**options).train(), on_one_device(**MIXTURE))


@pytest.mark.extended
def test_experts_are_sharded():
    state = trainer(**EXPERT, **{"mesh.fsdp": 2}).setup.initial_state()
    spec = P(None, "expert", "fsdp", None)
    assert specs(state, "experts.gate") == {"params": spec, "opt_state": spec}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("meshes", "options"),
    [
        ([(8, FSDP_TENSOR), (1, {})], {}),
        pytest.param(CHAIN, {}, marks=pytest.mark.slow),
        pytest.param(CHAIN, EXPLICIT, marks=pytest.mark.slow),
    ],
    ids=["8 to 1", "all", "all, explicit"],
)
def test_carries_on_with_other_devices(meshes, options, tmp_path):
    losses = []
    for start, (devices, mesh) in enumerate(meshes):
        there = trainer(devices, **mesh, **options)
        with Checkpoints(tmp_path, 2, Console(file=io.StringIO())) as checkpoints:
            restored = checkpoints.restore(there.setup)
            assert (restored and restored[1]) == (start or None)
            state, (loss,) = there.train(restored and restored[0], [start])
            checkpoints.save(start + 1, state)
        losses.append(loss)
    assert_equal((state, losses), trainer(1).train(steps=range(len(meshes))))
