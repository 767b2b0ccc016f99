"""Tunix's `PeftTrainer`: all parameters, adapters of Qwix, and a run that goes on."""

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

from orscale_jax import describe, muon, orscale
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
    for one, other in zip(
        *(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (whole, again)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_adapters_of_qwix(tmp_path):
    model = adapted(Qwen3(CONFIG, rngs=nnx.Rngs(0)))
    start = loss_of(model)
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    base = jax.tree.map(np.array, nnx.state(model, frozen))
    trainer, _ = trained(model, muon, nnx.LoRAParam, tmp_path, 6)
    rows = describe(nnx.state(model, nnx.LoRAParam), trainer.optimizer).rows
    assert {row.rule for row in rows} == {"matrix"} and len(rows) == 2 * 2 * 2
    assert loss_of(model) < start
    jax.tree.map(np.testing.assert_array_equal, base, nnx.state(model, frozen))
