"""Our language models with the recorded weights, and where each of these stands."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.pretrain.models import dense, moonlight
from examples.pretrain.models.moonlight import MoonlightConfig
from tests.examples.recorded import RecordedModel

recorded = functools.cache(RecordedModel)


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_weights(model, recording, place, dtype):
    weights = recording.ours(place, parameters(model), dtype)
    nnx.update(model, jax.tree.map(jnp.asarray, weights))
    return model


def place_of(name, names, first, scan):
    """Where ours has a parameter of PyTorch: its path, and its index there.

    Layers before the `first` of "blocks" are in "dense_blocks".
    """
    layer = re.match(r"(blocks|layers)\.(\d+)\.(.*)", name)
    if not layer:
        return names[name], ()
    number, rest = int(layer[2]), layer[3]
    stack = "blocks" if number >= first else "dense_blocks"
    expert = re.match(r"mlp\.experts\.(\d+)\.(\w+)_proj", rest)
    path = ("mixture", "experts", expert[2]) if expert else names[rest, stack]
    index = (int(expert[1]),) if expert else ()
    if stack == "dense_blocks":
        return (stack, number, *path), index
    if scan:
        return (stack, *path), (number - first, *index)
    return (stack, number - first, *path), index


def split_tokens(recording):
    """Inputs and targets."""
    tokens = jnp.asarray(recording["tokens"])
    return tokens[:, :-1], tokens[:, 1:]


DENSE_NAMES = {
    "tok_emb.weight": ("embed", "embedding"),
    "final_norm.weight": ("final_norm", "scale"),
    "lm_head.weight": ("head", "kernel"),
    ("norm1.weight", "blocks"): ("attention_norm", "scale"),
    ("norm2.weight", "blocks"): ("mlp_norm", "scale"),
    ("attn.qkv.weight", "blocks"): ("attention", "qkv", "kernel"),
    ("attn.out_proj.weight", "blocks"): ("attention", "out", "kernel"),
    ("mlp.gate.weight", "blocks"): ("mlp", "gate", "kernel"),
    ("mlp.up.weight", "blocks"): ("mlp", "up", "kernel"),
    ("mlp.down.weight", "blocks"): ("mlp", "down", "kernel"),
}


def recorded_dense(name, scan, dtype, **changes):
    """Our model with the recorded weights, and the places of the weights."""
    recording = recorded(name)
    config = dense.DenseConfig(
        vocab_size=recording.config["vocab_size"],
        width=recording.config["model_dim"],
        layers=recording.config["num_layers"],
        heads=recording.config["num_heads"],
        mlp={"relusqr": "relu2"}.get(recording.config["mlp_type"], "swiglu"),
        tied=recording.config["tie_weights"],
        scan=scan,
        dtype=dtype,
        param_dtype=dtype,
        **changes,
    )
    place = functools.partial(place_of, names=DENSE_NAMES, first=0, scan=scan)
    abstract = nnx.eval_shape(lambda: dense.Dense(config, nnx.Rngs(0)))
    return with_weights(abstract, recording, place, dtype), place


ATTENTION_NAMES = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "self_attn.q_proj.weight": ("attention", "query", "kernel"),
    "self_attn.kv_a_proj_with_mqa.weight": ("attention", "kv_down", "kernel"),
    "self_attn.kv_a_layernorm.weight": ("attention", "kv_norm", "scale"),
    "self_attn.kv_b_proj.weight": ("attention", "kv_up", "kernel"),
    "self_attn.o_proj.weight": ("attention", "out", "kernel"),
}
MOONLIGHT_NAMES = {
    "embed_tokens.weight": ("embed", "embedding"),
    "norm.weight": ("final_norm", "scale"),
    "lm_head.weight": ("head", "kernel"),
    **{
        (name, stack): path
        for name, path in ATTENTION_NAMES.items()
        for stack in ("dense_blocks", "blocks")
    },
    ("post_attention_layernorm.weight", "dense_blocks"): ("mlp_norm", "scale"),
    ("post_attention_layernorm.weight", "blocks"): ("mixture_norm", "scale"),
    **{
        (f"mlp.{part}_proj.weight", "dense_blocks"): ("mlp", part, "kernel")
        for part in ("gate", "up", "down")
    },
    ("mlp.gate.weight", "blocks"): ("mixture", "router", "kernel"),
    **{
        (f"mlp.shared_experts.{part}_proj.weight", "blocks"): (
            "mixture",
            "shared",
            part,
            "kernel",
        )
        for part in ("gate", "up", "down")
    },
}


def expert_layers(recording):
    return range(recording.config["dense"], recording.config["L"])


def recorded_moonlight(name, scan, dtype, **changes):
    """Our model with the recorded weights and biases, and the places of the weights."""
    recording = recorded(name)
    sizes = recording.config
    config = MoonlightConfig(
        vocab_size=sizes["V"],
        width=sizes["d"],
        layers=sizes["L"],
        dense_layers=sizes["dense"],
        dense_hidden=sizes["fd"],
        heads=sizes["H"],
        kv_rank=sizes["kvr"],
        nope_dim=sizes["nope"],
        rope_dim=sizes["rope"],
        value_dim=sizes["v"],
        experts=sizes["E"],
        experts_per_token=sizes["k"],
        shared_experts=sizes["S"],
        expert_hidden=sizes["fe"],
        routed_scale=sizes["factor"],
        aux=sizes["aux"],
        rope_base=sizes["theta"],
        norm_eps=sizes["eps"],
        scan=scan,
        dtype=dtype,
        param_dtype=dtype,
        **changes,
    )
    place = functools.partial(
        place_of, names=MOONLIGHT_NAMES, first=sizes["dense"], scan=scan
    )
    abstract = nnx.eval_shape(lambda: moonlight.Moonlight(config, nnx.Rngs(0)))
    model = with_weights(abstract, recording, place, dtype)
    biases = [recording[f"bias/{layer}"] for layer in expert_layers(recording)]
    model.routing_bias.set_value(jnp.asarray(np.stack(biases), dtype))
    return model, place
