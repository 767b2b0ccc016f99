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


def places(**names):
    """Our path of each name of PyTorch, which stands beside it in one string of pairs.

    Those of "both" are in either stack of blocks.
    """
    pairs = {}
    for stack, text in names.items():
        words = iter(text.split())
        for name, path in zip(words, words, strict=True):
            path = tuple(path.split("."))
            if stack == "outside":
                pairs[f"{name}.weight"] = path
            else:
                stacks = ("blocks", "dense_blocks") if stack == "both" else (stack,)
                pairs |= {(f"{name}.weight", stack): path for stack in stacks}
    return pairs


DENSE_NAMES = places(
    outside="tok_emb embed.embedding  final_norm final_norm.scale",
    blocks="""norm1 attention_norm.scale  norm2 mlp_norm.scale
        attn.qkv attention.qkv.kernel  attn.out_proj attention.out.kernel
        mlp.up mlp.up.kernel  mlp.down mlp.down.kernel""",
)


def recorded_dense(name, scan, dtype, **changes):
    """Our model with the recorded weights, and the places of the weights."""
    recording = recorded(name)
    config = dense.DenseConfig(
        vocab_size=recording.config["vocab_size"],
        width=recording.config["model_dim"],
        layers=recording.config["num_layers"],
        heads=recording.config["num_heads"],
        scan=scan,
        dtype=dtype,
        param_dtype=dtype,
        **changes,
    )
    place = functools.partial(place_of, names=DENSE_NAMES, first=0, scan=scan)
    abstract = nnx.eval_shape(lambda: dense.Dense(config, nnx.Rngs(0)))
    return with_weights(abstract, recording, place, dtype), place


MOONLIGHT_NAMES = places(
    outside="embed_tokens embed.embedding  norm final_norm.scale  lm_head head.kernel",
    both="""input_layernorm attention_norm.scale  self_attn.q_proj attention.query.kernel
        self_attn.kv_a_proj_with_mqa attention.kv_down.kernel
        self_attn.kv_a_layernorm attention.kv_norm.scale
        self_attn.kv_b_proj attention.kv_up.kernel
        self_attn.o_proj attention.out.kernel""",
    dense_blocks="""post_attention_layernorm mlp_norm.scale
        mlp.gate_proj mlp.gate.kernel  mlp.up_proj mlp.up.kernel
        mlp.down_proj mlp.down.kernel""",
    blocks="""post_attention_layernorm mixture_norm.scale  mlp.gate mixture.router.kernel
        mlp.shared_experts.gate_proj mixture.shared.gate.kernel
        mlp.shared_experts.up_proj mixture.shared.up.kernel
        mlp.shared_experts.down_proj mixture.shared.down.kernel""",
)


def expert_layers(recording):
    return range(recording.config["dense"], recording.config["L"])


def recorded_moonlight(name, scan, dtype, **changes):
    """Our model with the recorded weights and biases, and the places of the weights."""
    recording = recorded(name)
    s = recording.config
    config = MoonlightConfig(
        vocab_size=s["V"], width=s["d"], layers=s["L"], dense_layers=s["dense"],
        dense_hidden=s["fd"], heads=s["H"], kv_rank=s["kvr"], nope_dim=s["nope"],
        rope_dim=s["rope"], value_dim=s["v"], experts=s["E"], experts_per_token=s["k"],
        shared_experts=s["S"], expert_hidden=s["fe"], routed_scale=s["factor"],
        aux=s["aux"], rope_base=s["theta"], norm_eps=s["eps"], scan=scan, dtype=dtype,
        param_dtype=dtype, **changes,
    )  # fmt: skip
    place = functools.partial(
        place_of, names=MOONLIGHT_NAMES, first=s["dense"], scan=scan
    )
    abstract = nnx.eval_shape(lambda: moonlight.Moonlight(config, nnx.Rngs(0)))
    model = with_weights(abstract, recording, place, dtype)
    biases = [recording[f"bias/{layer}"] for layer in expert_layers(recording)]
    model.routing_bias.set_value(jnp.asarray(np.stack(biases), dtype))
    return model, place
