"""Tunix's `PeftTrainer`: all parameters, adapters of Qwix, on a mesh, and a resume."""

import contextlib
import dataclasses
import importlib.util

import pytest

pytestmark = pytest.mark.client
if not importlib.util.find_spec("tunix"):
    pytest.skip("make clients installs it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft import peft_trainer, utils

from orscale_jax import assert_same_on, describe, muon, orscale
from orscale_jax.flax import nnx_dimension_numbers


@pytest.fixture(autouse=True)
def _as_their_models_need():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


CONFIG = ModelConfig(
    num_layers=2, vocab_size=32, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8,
    num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
)  # fmt: skip


def batches(count):
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, 32)
    mask = jnp.ones_like(tokens)
    return [peft_trainer.TrainingInput(tokens, mask)] * count


def model_inputs(x):
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": utils.build_positions_from_mask(x.input_mask > 0),
        "attention_mask": utils.make_causal_attn_mask(x.input_mask > 0),
    }


def adapted(model):
    provider = qwix.LoraProvider(module_path=".*q_proj|.*gate_proj", rank=4, alpha=2.0)
    tokens = jnp.zeros((1, 12), jnp.int32)
    positions = jnp.arange(12)[None]
    mask = jnp.ones((1, 12, 12), bool)
    return qwix.apply_lora_to_model(
        model, provider, tokens, positions=positions, cache=None, attention_mask=mask
    )


HEADS = {
    r"attn\.(q|k|v)_proj": Dims(0, (1, 2)),  # (inputs, heads, features)
    r"attn\.o_proj": Dims((0, 1), 2),  # (heads, features, outputs)
}


def trained(model, make, wrt, folder, steps, **options):
    overrides = HEADS if wrt is nnx.Param else None
    numbers = nnx_dimension_numbers(model, wrt=wrt, overrides=overrides)
    optimizer = make(0.02, weight_dimension_numbers=numbers, **options)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, max_steps=steps, checkpoint_root_directory=str(folder)
    )
    trainer = peft_trainer.PeftTrainer(model, optimizer, config)
    trainer = trainer.with_gen_model_input_fn(model_inputs)
    before = trainer.train_steps
    trainer.train(batches(steps))
    return trainer, before


def loss_of(model):
    [x] = batches(1)
    return float(peft_trainer._default_loss_fn(model, **model_inputs(x)))


@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("make", [muon, orscale])
def test_all_parameters_and_a_run_that_goes_on(make, options, tmp_path):
    whole, parts = (Qwen3(CONFIG, rngs=nnx.Rngs(0)) for _ in range(2))
    start = loss_of(whole)
    trainer, _ = trained(whole, make, nnx.Param, tmp_path / "whole", 6, **options)
    rows = describe(nnx.state(whole, nnx.Param), trainer.optimizer).rows
    rules = {row.path: row.rule for row in rows}
    assert rules["embedder.input_embedding"] == "adamw"
    projections = {rule for path, rule in rules.items() if "_proj" in path}
    assert projections == {"matrix"}
    assert loss_of(whole) < start - 0.5
    trained(parts, make, nnx.Param, tmp_path / "parts", 3, **options)
    again = Qwen3(CONFIG, rngs=nnx.Rngs(5))
    _, before = trained(again, make, nnx.Param, tmp_path / "parts", 6, **options)
    assert before == 3
    equal(whole, again, 1e-5)


@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("make", [muon, orscale])
def test_adapters_of_qwix_and_a_run_that_goes_on(make, options, tmp_path):
    model, again = (adapted(Qwen3(CONFIG, rngs=nnx.Rngs(0))) for _ in range(2))
    start = loss_of(model)
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    base = jax.tree.map(np.array, nnx.state(model, frozen))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer, _ = trained(model, make, nnx.LoRAParam, whole, 6, **options)
    rows = describe(nnx.state(model, nnx.LoRAParam), trainer.optimizer).rows
    assert {row.rule for row in rows} == {"matrix"} and len(rows) == 2 * 2 * 2
    assert loss_of(model) < start
    jax.tree.map(np.testing.assert_array_equal, base, nnx.state(model, frozen))
    for steps in (3, 6):
        _, before = trained(again, make, nnx.LoRAParam, parts, steps, **options)
    assert before == 3
    equal(model, again, 1e-5)


def equal(one, other, tolerance):
    pairs = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (one, other))
    for x, y in zip(*pairs, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("make", [muon, orscale])
def test_the_same_on_a_mesh(make, options, tmp_path):
    """As their programs shard a model: four parts of its width, two of its heads.

    Each part has whole blocks of the 8-bit momentum, as the page says.
    """
    config = dataclasses.replace(CONFIG, num_kv_heads=2, embed_dim=128, hidden_dim=256)
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=axes)

    @nnx.jit
    def create():
        model = Qwen3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        where = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, where))
        return model

    models = []
    for name, on in (("alone", contextlib.nullcontext()), ("mesh", mesh)):
        with on:
            models.append(create() if name == "mesh" else Qwen3(config, rngs=nnx.Rngs(0)))
            trainer, _ = trained(
                models[-1], make, nnx.Param, tmp_path / name, 3, **options
            )
    up = models[-1].layers[0].mlp.up_proj.kernel[...]
    assert not up.sharding.is_fully_replicated
    mu = [x for path, x in jax.tree.leaves_with_path(nnx.state(trainer.optimizer))
          if "up_proj" in jax.tree_util.keystr(path) and x.shape == up.shape]  # fmt: skip
    assert mu and all(x.sharding.is_equivalent_to(up.sharding, 2) for x in mu)
    # A sum in another order may move an 8-bit code of the momentum by one.
    equal(*models, 1e-3)
    assert assert_same_on(mesh, trainer.optimizer, models[-1]).bytes_sent


def test_which_parameters_are_matrices():
    model = nnx.eval_shape(lambda: Qwen3(CONFIG, rngs=nnx.Rngs(0)))
    numbers = nnx_dimension_numbers(model, overrides=HEADS)
    rows = describe(model, muon(2e-5, weight_dimension_numbers=numbers)).rows
    matrices = {row.path for row in rows if row.rule == "matrix"}
    assert matrices == {row.path for row in rows if "_proj." in row.path}
