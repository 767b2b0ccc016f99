"""Levanter's own Trainer: a tiny Llama trains, and resumes from its checkpoint."""

import dataclasses
import functools
import importlib.util
import inspect
import time
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.client
if not importlib.util.find_spec("levanter"):
    pytest.skip("make clients installs it", allow_module_level=True)

import haliax as hax
import haliax.nn.loss
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.distributed import DistributedConfig
from levanter.models import lm_model
from levanter.models.llama import LlamaConfig
from levanter.optim.config import AdamConfig
from levanter.optim.muon import MuonConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig, initialize

from orscale_jax import assert_same_on
from tests.clients.pages import run_page
from tests.runs import mesh_of

STEPS, SAVED = 6, 3
VOCAB = hax.Axis("vocab", 64)
# What one version has and another has not.
OLD = hasattr(lm_model, "compute_next_token_loss")
LENGTH = {field.name for field in dataclasses.fields(LlamaConfig)} & {
    "seq_len",
    "max_seq_len",
}
LLAMA = LlamaConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=32,
    intermediate_dim=64,
    **dict.fromkeys(LENGTH, 32),
)


@functools.cache  # Its class is registered once.
def config_of_the_page():
    names = {"__name__": __name__, "MODEL_CONFIG": LLAMA, "VOCAB": VOCAB}
    return run_page("trainers.md", **names)["MuonConfig"]


def examples():
    """A cycle of tokens, which can be learnt."""
    starts = np.random.default_rng(0).integers(64, size=256)
    rows = (starts[:, None] + 3 * np.arange(32)) % 64
    position = hax.Axis("position", 32)
    return [
        lm_model.LmExample.causal(hax.named(jnp.asarray(row, jnp.int32), position))
        for row in rows
    ]


def loss_fn(model, example, *, key=None):
    if OLD:
        return lm_model.compute_next_token_loss(model, example, key=key)
    return model.compute_next_token_loss(example, key=key)


def accepted(function, **kwargs):
    names = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in names}


def trainer_config(folder, saved):
    ray = {}
    if OLD:
        from levanter.distributed import RayConfig

        ray = {"ray": RayConfig(auto_start_cluster=False)}
    return TrainerConfig(
        id="trial",
        num_train_steps=STEPS,
        train_batch_size=8,
        tracker=NoopConfig(),
        require_accelerator=False,
        distributed=DistributedConfig(initialize_jax_distributed=False),
        log_jaxprs=False,
        log_xla_hlo=False,
        load_checkpoint=saved is not None,
        load_checkpoint_path=saved,
        checkpointer=CheckpointerConfig(
            base_path=str(folder),
            save_interval=timedelta(hours=1),
            keep=[{"every": SAVED}],
        ),
        **ray,
    )


def run(folder, config, saved=None):
    kwargs = accepted(ListAsyncDataset, is_complete=True)
    dataset = ListAsyncDataset(examples(), **kwargs)  # On no mesh yet.
    trainer_settings = trainer_config(folder, saved)
    initialize(trainer_settings)
    losses = []
    with Trainer(trainer_settings, config.build(STEPS), loss_fn) as trainer:
        state = trainer.initial_state(
            jax.random.PRNGKey(1),
            model_init=lambda: LLAMA.build(VOCAB, key=jax.random.PRNGKey(0)),
        )
        loader = trainer.data_loader(dataset).iter_from_step(int(state.step))
        info = None
        for info in trainer.training_steps(state, loader):
            losses.append(float(info.loss))
        trainer.run_hooks(info, force=True)
    return losses, info.state


def saved(folder):
    """The path of a checkpoint, which the older Levanter writes in the background."""
    for _ in range(600):
        if (folder / "metadata.json").exists():
            return str(folder)
        time.sleep(0.1)
    raise AssertionError(f"after a minute, {folder} is incomplete")


def allow_weights_as_mask(monkeypatch):
    """The older Levanter is older than JAX's rule that a mask is boolean."""
    reduced = haliax.nn.loss.maybe_reduce_loss
    monkeypatch.setattr(
        haliax.nn.loss,
        "maybe_reduce_loss",
        lambda array, how, axis, where: reduced(
            array, how, axis, None if where is None else where != 0
        ),
    )


@pytest.mark.parametrize(
    "config", [lambda: AdamConfig, config_of_the_page], ids=["adam", "muon"]
)
def test_levanter_trains_and_resumes(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # It writes logs here.
    if OLD:
        allow_weights_as_mask(monkeypatch)
    config = config()(learning_rate=0.01, warmup=2)
    losses, whole = run(tmp_path, config)
    assert len(losses) == STEPS and losses[-1] < losses[0]
    checkpoint = saved(tmp_path / "trial" / f"step-{SAVED}")
    again, resumed = run(tmp_path, config, checkpoint)
    np.testing.assert_allclose(again, losses[-len(again) :], atol=1e-5)
    assert len(again) < STEPS
    for x, y in zip(
        jax.tree.leaves(whole.opt_state), jax.tree.leaves(resumed.opt_state), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [lambda: AdamConfig, lambda: MuonConfig, config_of_the_page],
    ids=["adam", "their-muon", "muon"],
)
def test_an_update_on_a_mesh_is_that_of_one_device(config):
    mesh = mesh_of({"replica": 1, "data": 4, "model": 2})
    axes = {"embed": "data"} | dict.fromkeys(("mlp", "kv_head", "vocab"), "model")
    build = lambda: LLAMA.build(VOCAB, key=jax.random.PRNGKey(0))  # noqa: E731
    with jax.set_mesh(mesh), hax.axis_mapping(axes):
        model = hax.named_jit(lambda: hax.shard(build()), axis_resources=axes)()
        optimizer = config()(learning_rate=0.01, warmup=2).build(STEPS)
        certificate = assert_same_on(mesh, optimizer, model)
    assert certificate.bytes_sent
