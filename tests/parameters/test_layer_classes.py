"""The classes of layers, by the paths of models of many libraries."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from examples.benchmarks import models
from examples.study.controls import pooled
from orscale_jax import describe
from orscale_jax.diagnostics.summaries import class_labels
from orscale_jax.parameters.layer_classes import layer_classes


def of_paths(*paths, shape=(4, 4)):
    """The classes of parameters with these paths."""
    return layer_classes(
        {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path in paths}
    )


@pytest.mark.parametrize("name", ["moonlight", "gpt2", "tinyllama"])
def test_the_models_of_the_benchmarks(name):
    expected = {
        "q_proj": "attention query", "query": "attention query", "key": "attention key",
        "value": "attention value", "qkv": "attention qkv", "o_proj": "attention output",
        "out": "attention output", "kv_a_proj": "attention latent down",
        "kv_b_proj": "attention latent up", "router": "router", "wte": "embedding",
        "wpe": "embedding", "embedding": "embedding", "head": "head",
        "up": "mlp up", "down": "mlp down", "gate": "mlp gate",
    }  # fmt: skip
    expected |= {f"mlp.{role}": f"mlp {role}" for role in ("gate", "up", "down")}
    for name_, kind in (("experts", "routed expert"), ("shared", "shared expert")):
        expected |= {
            f"{name_}.{role}": f"{kind} {role}" for role in ("gate", "up", "down")
        }
    given = {"moonlight": {"data": 2, "expert": 2}} if name == "moonlight" else {}
    leaves = getattr(models, name)(*given.values())
    for path, layer in of_paths(*leaves).items():
        last = re.sub(r"^\d+\.", "", path)
        if last.endswith("bias"):
            assert layer == ("norm" if "norm" in last else "bias")
        else:
            assert layer == ("norm" if "norm" in last else expected[last]), path


ROUTED = {role: f"routed expert {role}" for role in ("gate", "up", "down")}
SHARED = {role: f"shared expert {role}" for role in ("gate", "up", "down")}
DENSE = {role: f"mlp {role}" for role in ("gate", "up", "down")}


def three(prefix, classes, names, end=""):
    roles = ("gate", "up", "down")
    return {
        f"{prefix}.{name}{end}": classes[role]
        for name, role in zip(names.split(), roles, strict=True)
    }


HF = "gate_proj up_proj down_proj"
MIXTRAL = "w1 w3 w2"
LLAMA = {
    "model.embed_tokens.weight": "embedding",
    "model.layers.0.self_attn.q_proj.weight": "attention query",
    "model.layers.0.self_attn.k_proj.weight": "attention key",
    "model.layers.0.self_attn.v_proj.weight": "attention value",
    "model.layers.0.self_attn.o_proj.weight": "attention output",
    "model.layers.0.self_attn.q_proj.bias": "bias",
    "model.layers.0.self_attn.q_norm.weight": "norm",
    "model.layers.0.input_layernorm.weight": "norm",
    "model.layers.0.post_attention_layernorm.weight": "norm",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
} | three("model.layers.0.mlp", DENSE, HF, ".weight")
MODELS = {
    "llama": LLAMA,
    "llama_meta": {
        "tok_embeddings.weight": "embedding",
        "layers.0.attention.wq.weight": "attention query",
        "layers.0.attention.wk.weight": "attention key",
        "layers.0.attention.wv.weight": "attention value",
        "layers.0.attention.wo.weight": "attention output",
        "layers.0.attention_norm.weight": "norm",
        "layers.0.ffn_norm.weight": "norm",
        "output.weight": "head",
    }
    | three("layers.0.feed_forward", DENSE, MIXTRAL, ".weight"),
    "mixtral": LLAMA
    | {"model.layers.0.block_sparse_moe.gate.weight": "router"}
    | three("model.layers.0.block_sparse_moe.experts.0", ROUTED, MIXTRAL, ".weight")
    | three("model.layers.0.block_sparse_moe.experts.1", ROUTED, MIXTRAL, ".weight"),
    "deepseek_v3": {
        "model.embed_tokens.weight": "embedding",
        "model.layers.0.self_attn.q_a_proj.weight": "attention latent down",
        "model.layers.0.self_attn.q_a_layernorm.weight": "norm",
        "model.layers.0.self_attn.q_b_proj.weight": "attention latent up",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "attention latent down",
        "model.layers.0.self_attn.kv_a_layernorm.weight": "norm",
        "model.layers.0.self_attn.kv_b_proj.weight": "attention latent up",
        "model.layers.0.self_attn.o_proj.weight": "attention output",
        "model.layers.1.mlp.gate.weight": "router",
        "model.layers.1.mlp.gate.e_score_correction_bias": "bias",
    }
    | three("model.layers.0.mlp", DENSE, HF, ".weight")
    | three("model.layers.1.mlp.experts.0", ROUTED, HF, ".weight")
    | three("model.layers.1.mlp.shared_experts", SHARED, HF, ".weight"),
    "deepseek_own": {
        "layers.0.attn.wq_a.weight": "attention latent down",
        "layers.0.attn.wq_b.weight": "attention latent up",
        "layers.0.attn.wkv_a.weight": "attention latent down",
        "layers.0.attn.wkv_b.weight": "attention latent up",
        "layers.0.attn.wo.weight": "attention output",
        "layers.0.attn.kv_norm.weight": "norm",
        "layers.0.attn.indexer.wq_b.weight": "other",
        "layers.1.ffn.gate.weight": "router",
        "layers.1.ffn.gate.bias": "bias",
    }
    | three("layers.0.ffn", DENSE, MIXTRAL, ".weight")
    | three("layers.1.ffn.experts.0", ROUTED, MIXTRAL, ".weight")
    | three("layers.1.ffn.shared_experts", SHARED, MIXTRAL, ".weight"),
    "latent_attention_of_the_paper": {
        "attention.w_dq": "attention latent down",
        "attention.w_uq": "attention latent up",
        "attention.w_dkv": "attention latent down",
        "attention.w_uk": "attention latent up",
        "attention.w_uv": "attention latent up",
        "attention.w_o": "attention output",
    },
    "megatron": {
        "layers.0.self_attention.linear_q_down_proj.weight": "attention latent down",
        "layers.0.self_attention.linear_kv_up_proj.weight": "attention latent up",
        "layers.0.self_attention.linear_qkv.weight": "attention qkv",
        "layers.0.self_attention.linear_proj.weight": "attention output",
        "layers.0.mlp.linear_fc1.weight": "mlp up",
        "layers.0.mlp.linear_fc2.weight": "mlp down",
        "output_layer.weight": "head",
    },
    "qwen2_moe": {
        "model.layers.0.mlp.gate.weight": "router",
        "model.layers.0.mlp.shared_expert_gate.weight": "router",
    }
    | three("model.layers.0.mlp.experts.0", ROUTED, HF, ".weight")
    | three("model.layers.0.mlp.shared_expert", SHARED, HF, ".weight"),
    "gpt_oss_and_llama4": {
        "layers.0.mlp.router.weight": "router",
        "layers.0.mlp.router.bias": "bias",
        "layers.0.mlp.experts.gate_up_proj": "routed expert gate up",
        "layers.0.mlp.experts.gate_up_proj_bias": "bias",
        "layers.0.mlp.experts.down_proj": "routed expert down",
        "layers.1.feed_forward.router.weight": "router",
        "layers.1.feed_forward.experts.gate_up_proj": "routed expert gate up",
    }
    | three("layers.1.feed_forward.shared_expert", SHARED, HF, ".weight"),
    "dbrx": {
        "blocks.0.ffn.router.layer.weight": "router",
        "blocks.0.norm_attn_norm.attn.Wqkv.weight": "attention qkv",
        "blocks.0.norm_attn_norm.attn.out_proj.weight": "attention output",
    }
    | three("blocks.0.ffn.experts.mlp", ROUTED, "w1 v1 w2"),
    "granite_moe": {
        "layers.0.block_sparse_moe.input_linear.weight": "routed expert up",
        "layers.0.block_sparse_moe.output_linear.weight": "routed expert down",
        "layers.0.block_sparse_moe.router.layer.weight": "router",
    },
    "gpt2": {
        "transformer.wte.weight": "embedding",
        "transformer.wpe.weight": "embedding",
        "transformer.h.0.ln_1.weight": "norm",
        "transformer.h.0.attn.c_attn.weight": "attention qkv",
        "transformer.h.0.attn.c_attn.bias": "bias",
        "transformer.h.0.attn.c_proj.weight": "attention output",
        "transformer.h.0.crossattention.q_attn.weight": "attention query",
        "transformer.h.0.crossattention.c_attn.weight": "attention kv",
        "transformer.h.0.crossattention.c_proj.weight": "attention output",
        "transformer.h.0.mlp.c_fc.weight": "mlp up",
        "transformer.h.0.mlp.c_proj.weight": "mlp down",
        "transformer.ln_f.weight": "norm",
    },
    "modded_nanogpt": {
        "embed.weight": "embedding",
        "value_embeds.0.weight": "embedding",
        "blocks.0.attn.qkv_w": "attention qkv",
        "blocks.1.attn.qkvo_w": "attention qkvo",
        "blocks.0.attn.c_proj.weight": "attention output",
        "blocks.0.attn.attn_gate.weight": "attention gate",
        "blocks.0.attn.lambdas": "other",
        "blocks.0.mlp.c_fc.weight": "mlp up",
        "blocks.0.mlp.c_proj.weight": "mlp down",
        "scalars": "other",
    },
    "gpt_j_and_neox": {
        "h.0.attn.out_proj.weight": "attention output",
        "h.0.mlp.fc_in.weight": "mlp up",
        "h.0.mlp.fc_out.weight": "mlp down",
        "layers.0.attention.query_key_value.weight": "attention qkv",
        "layers.0.attention.dense.weight": "attention output",
        "layers.0.mlp.dense_h_to_4h.weight": "mlp up",
        "layers.0.mlp.dense_4h_to_h.weight": "mlp down",
        "embed_in.weight": "embedding",
        "embed_out.weight": "head",
    },
    "opt": {
        "layers.0.self_attn.k_proj.weight": "attention key",
        "layers.0.self_attn_layer_norm.weight": "norm",
        "layers.0.fc1.weight": "mlp up",
        "layers.0.fc2.weight": "mlp down",
    },
    "bert": {
        "embeddings.word_embeddings.weight": "embedding",
        "encoder.layer.0.attention.self.query.weight": "attention query",
        "encoder.layer.0.attention.output.dense.weight": "attention output",
        "encoder.layer.0.attention.output.LayerNorm.weight": "norm",
        "encoder.layer.0.intermediate.dense.weight": "mlp up",
        "encoder.layer.0.output.dense.weight": "mlp down",
        "encoder.layer.0.output.LayerNorm.weight": "norm",
        "pooler.dense.weight": "other",
        "classifier.weight": "head",
    },
    "torch_layers": {
        "layers.0.self_attn.in_proj_weight": "attention qkv",
        "layers.0.self_attn.in_proj_bias": "bias",
        "layers.0.self_attn.out_proj.weight": "attention output",
        "layers.0.linear1.weight": "mlp up",
        "layers.0.linear2.weight": "mlp down",
        "layers.0.norm1.weight": "norm",
    },
    "t5": {
        "shared.weight": "embedding",
        "encoder.block.0.layer.0.SelfAttention.q.weight": "attention query",
        "encoder.block.0.layer.0.SelfAttention.o.weight": "attention output",
        "block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding",
        "decoder.block.0.layer.1.EncDecAttention.k.weight": "attention key",
        "encoder.block.0.layer.1.DenseReluDense.wi_0.weight": "mlp gate",
        "encoder.block.0.layer.1.DenseReluDense.wi_1.weight": "mlp up",
        "encoder.block.0.layer.1.DenseReluDense.wo.weight": "mlp down",
        "encoder.block.1.layer.1.DenseReluDense.wi.weight": "mlp up",
        "encoder.block.1.layer.1.DenseReluDense.wo.weight": "mlp down",
    },
    "maxtext": {
        "token_embedder.embedding": "embedding",
        "decoder.layers.self_attention.query.kernel": "attention query",
        "decoder.layers.self_attention.out.kernel": "attention output",
        "decoder.layers.self_attention.qkv_proj.kernel": "attention qkv",
        "decoder.layers.pre_self_attention_layer_norm.scale": "norm",
        "decoder.decoder_norm.scale": "norm",
        "decoder.logits_dense.kernel": "head",
        "decoder.moe_layers.self_attention.wkv_a.kernel": "attention latent down",
        "decoder.moe_layers.self_attention.kv_norm.scale": "norm",
        "decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.kernel": "router",
        "decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias": "bias",
        "decoder.layers.Llama4MoEBlock_0.MoeBlock_0.gate.kernel": "router",
        "decoder.layers.moe_block.gate.kernel": "router",
    }
    | three("decoder.layers.mlp", DENSE, "wi_0 wi_1 wo", ".kernel")
    | three("decoder.layers.moe_block", ROUTED, "wi_0 wi_1 wo")
    | three("decoder.layers.Llama4MoEBlock_0.MoeBlock_0", ROUTED, "wi_0 wi_1 wo")
    | three("decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0", ROUTED, "wi_0 wi_1 wo")
    | three(
        "decoder.moe_layers.DeepSeekMoeBlock_0.shared_experts",
        SHARED,
        "wi_0 wi_1 wo",
        ".kernel",
    ),
    "t5x_mixture": {
        "decoder.layers_0.relpos_bias.rel_embedding": "embedding",
        "decoder.layers_0.mlp.router.router_weights.w.kernel": "router",
        "decoder.layers_0.mlp.expert.wi.kernel": "routed expert up",
        "decoder.layers_0.mlp.expert.wo.kernel": "routed expert down",
        "decoder.layers_1.attention.out.kernel": "attention output",
    },
    "gemma": {
        "embedder.input_embedding": "embedding",
        "layers.0.attn.qkv_einsum.w": "attention qkv",
        "layers.1.attn.q_einsum.w": "attention query",
        "layers.1.attn.kv_einsum.w": "attention kv",
        "layers.0.attn.attn_vec_einsum.w": "attention output",
        "layers.0.attn._query_norm.scale": "norm",
        "layers.0.attn._key_norm.scale": "norm",
        "layers.0.mlp.gating_einsum": "mlp gate up",
        "layers.0.mlp.linear": "mlp down",
        "layers.1.mlp.gating_einsum.w": "mlp gate up",
        "layers.1.mlp.linear.w": "mlp down",
        "layers.2.moe.router_logits.w": "router",
        "layers.2.moe.gating_einsum.w": "routed expert gate up",
        "layers.2.moe.linear.w": "routed expert down",
        "final_norm.scale": "norm",
    },
    "levanter": {
        "embeddings.token_embeddings.weight": "embedding",
        "transformer.layers.stacked.self_attn.q_proj.weight": "attention query",
        "transformer.layers.stacked.mlp.gate.weight": "router",
        "lm_head.weight": "head",
    }
    | three("transformer.layers.stacked.mlp.experts", ROUTED, HF, ".weight"),
    "grug": {
        "token_embed": "embedding",
        "output_proj": "head",
        "blocks.0.rms_attn.weight": "norm",
        "blocks.0.attn.w_q": "attention query",
        "blocks.0.attn.w_k": "attention key",
        "blocks.0.attn.w_v": "attention value",
        "blocks.0.attn.w_o": "attention output",
        "blocks.0.attn.attn_gate": "attention gate",
        "blocks.0.mlp.mlp_up": "mlp up",
        "blocks.0.mlp.mlp_down": "mlp down",
        "blocks.1.mlp.router": "router",
        "blocks.1.mlp.router_bias": "bias",
        "blocks.2.mlp.expert_mlp.w_gate_up": "routed expert gate up",
        "blocks.2.mlp.expert_mlp.w_down": "routed expert down",
        "final_norm.weight": "norm",
    }
    | three("blocks.1.mlp.expert_mlp", ROUTED, "w_gate w_up w_down")
    | three("blocks.1.shared", SHARED, "w_gate w_up w_down"),
    "stacked_in_one_block": {
        "layers.norm": "norm",
        "layers.qkv": "attention qkv",
        "layers.out": "attention output",
        "layers.router": "router",
        "layers.gate_up": "routed expert gate up",
        "layers.down": "routed expert down",
    },
    "haiku": {
        "transformer/h0_attn/query.w": "attention query",
        "transformer/h0_attn/query.b": "bias",
        "transformer/h0_attn/linear.w": "attention output",
        "transformer/h0_mlp/~/linear_0.w": "mlp up",
        "transformer/h0_mlp/~/linear_1.w": "mlp down",
        "transformer/h0_ln_1.scale": "norm",
    },
    "switch_and_nllb": {
        "block.0.layer.1.mlp.router.classifier.weight": "router",
        "block.0.layer.1.mlp.experts.expert_0.wi.weight": "routed expert up",
        "layers.1.ffn.experts.expert_0.fc1.weight": "routed expert up",
        "layers.1.ffn.experts.expert_0.fc2.weight": "routed expert down",
    },
    "nnx": {
        "query.kernel": "attention query",
        "key.kernel": "attention key",
        "value.kernel": "attention value",
        "value.bias": "bias",
        "out.kernel": "attention output",
        "query_ln.scale": "norm",
    },
    "flaxmodels_gpt2": {
        "GPT2SelfAttention_0.Dense_0.kernel": "attention qkv",
        "GPT2SelfAttention_0.Dense_1.kernel": "attention output",
        "GPT2SelfAttention_0.Dense_1.bias": "bias",
        "GPT2MLP_0.Dense_0.kernel": "mlp up",
        "GPT2MLP_0.Dense_1.kernel": "mlp down",
        "LayerNorm_0.scale": "norm",
        "LayerNorm_0.bias": "norm",
    },
    "flaxmodels_resnet": {
        "BasicBlock_0.Conv_0.kernel": "convolution",
        "BasicBlock_0.BatchNorm_0.scale": "norm",
        "Dense_0.kernel": "other",  # No name says that it is the head.
        "Dense_0.bias": "bias",
    },
    "equinox": {
        "embedding.weight": "embedding",
        "attention.query_proj.weight": "attention query",
        "attention.key_proj.weight": "attention key",
        "attention.value_proj.weight": "attention value",
        "attention.output_proj.weight": "attention output",
        "norm.bias": "norm",
        "mlp.layers.0.weight": "mlp up",
        "mlp.layers.0.bias": "bias",
        "mlp.layers.1.weight": "mlp down",
        "deep.layers.0.weight": "other",
        "deep.layers.1.weight": "other",
        "deep.layers.2.weight": "other",
    },
    "equimo_vision_transformer": {
        "patch_embed.proj.weight": "embedding",
        "patch_embed.proj.bias": "bias",
        "global_pos_embed.weight": "embedding",
        "reg_tokens": "embedding",
        "blocks.0.blocks.0.prenorm.weight": "norm",
        "blocks.0.blocks.0.attn.qkv.weight": "attention qkv",
        "blocks.0.blocks.0.attn.proj.weight": "attention output",
        "blocks.0.blocks.0.ls1.gamma": "scale",
        "blocks.0.blocks.0.mlp.fc1.weight": "mlp up",
        "blocks.0.blocks.0.mlp.fc2.weight": "mlp down",
        "blocks.0.blocks.1.mlp.w12.weight": "mlp gate up",
        "blocks.0.blocks.1.mlp.w3.weight": "mlp down",
        "head.bias": "bias",
    },
    "equimo_convolutions": {
        "blocks.0.blocks.0.dwconv.weight": "convolution",
        "blocks.0.blocks.0.pwconv1.weight": "convolution",
        "blocks.0.blocks.0.ls.gamma": "scale",
        "blocks.0.downsample.conv.weight": "convolution",
        "blocks.0.downsample.norm.weight": "norm",
    },
    "linen": {
        "Conv_0.kernel": "convolution",
        "LayerNorm_0.bias": "norm",
        "mix.kernel": "other",
        "logits.kernel": "head",
        "encoderblock_0.MlpBlock_3.Dense_0.kernel": "mlp up",
        "encoderblock_0.MlpBlock_3.Dense_1.kernel": "mlp down",
        "encoderblock_0.MultiHeadDotProductAttention_1.out.kernel": "attention output",
        "posembed_input.pos_embedding": "embedding",
        "head.kernel": "head",
        "experts.Dense_0.kernel": "routed expert up",
        "experts.Dense_1.kernel": "routed expert down",
        "gated.mlp.Dense_0.kernel": "other",
        "gated.mlp.Dense_1.kernel": "other",
        "gated.mlp.Dense_2.kernel": "other",
        "WeightNorm_0.Dense_0.kernel": "other",
        "LayerNormMLP_0.wi_kernel": "mlp up",
        "LayerNormMLP_0.wo_kernel": "mlp down",
        "LayerNormMLP_0.scale": "norm",
    },
    "diffusion": {
        "down_blocks.0.attentions.0.proj_in.weight": "other",
        "down_blocks.0.attentions.0.proj_out.weight": "other",
        "down_blocks.0.attentions.0.blocks.0.attn1.to_q.weight": "attention query",
        "down_blocks.0.attentions.0.blocks.0.attn1.to_out.0.weight": "attention output",
        "down_blocks.0.attentions.0.blocks.0.ff.net.0.proj.weight": "other",
        "down_blocks.0.attentions.0.blocks.0.ff.net.2.weight": "mlp down",
        "down_blocks.0.resnets.0.conv1.weight": "convolution",
        "time_embedding.linear_1.weight": "embedding",
    },
    "whisper": {
        "encoder.conv1.weight": "convolution",
        "decoder.layers.0.encoder_attn.k_proj.weight": "attention key",
        "decoder.layers.0.encoder_attn.out_proj.weight": "attention output",
    },
    "swin": {
        "blocks.0.attn.relative_position_bias_table": "embedding",
        "blocks.0.attn.logit_scale": "scale",
    },
    "litgpt_and_distilbert": {
        "transformer.h.0.mlp.proj.weight": "mlp down",
        "transformer.h.0.mlp.fc_1.weight": "mlp gate",
        "transformer.h.0.mlp.fc_2.weight": "mlp up",
        "transformer.h.1.mlp.fc.weight": "mlp up",
        "transformer.h.1.mlp.proj.weight": "mlp down",
        "transformer.layer.0.attention.q_lin.weight": "attention query",
        "transformer.layer.0.attention.out_lin.weight": "attention output",
        "transformer.layer.0.ffn.lin1.weight": "mlp up",
        "transformer.layer.0.ffn.lin2.weight": "mlp down",
    },
    "linear_attention": {
        "layers.0.linear_attn.in_proj_qkvz.weight": "other",
        "layers.0.linear_attn.conv1d.weight": "convolution",
        "layers.0.linear_attn.A_log": "other",
        "layers.0.linear_attn.out_proj.weight": "attention output",
        "blocks.0.feed_forward.key.weight": "other",
        "blocks.0.feed_forward.value.weight": "other",
        "blocks.0.attention.receptance.weight": "other",
    },
    "shared_layers": {
        "shared_layers.0.self_attn.q_proj.weight": "attention query",
        "shared_layers.0.mlp.up_proj.weight": "mlp up",
        "shared_layers.0.q_proj.weight": "attention query",
    },
    "lists_of_arrays": {"experts.down.0": "routed expert down", "mlp.up.1": "mlp up"},
    "easylm": {  # The gains of its norms are called kernels.
        "transformer.wte.embedding": "embedding",
        "transformer.h.0.attention_norm.kernel": "norm",
        "transformer.h.0.ffn_norm.kernel": "norm",
        "transformer.h.0.attention.wq.kernel": "attention query",
        "transformer.ln_f.kernel": "norm",
    },
    "whisper_of_openai": {
        "encoder.blocks.0.attn.query.weight": "attention query",
        "encoder.blocks.0.mlp.0.weight": "mlp up",
        "encoder.blocks.0.mlp.2.weight": "mlp down",
        "encoder.blocks.0.mlp_ln.weight": "norm",
        "encoder.blocks.0.attn_ln.weight": "norm",
        "encoder.ln_post.weight": "norm",
    },
    "big_vision": {
        "cls": "embedding",
        "MAPHead_0/probe": "head",
        "Transformer/encoderblock/LayerNorm_0/scale": "norm",
        "Transformer/encoderblock/MlpBlock_0/Dense_0/bias": "bias",
        "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": "mlp up",
        "Transformer/encoderblock/MlpBlock_0/Dense_1/kernel": "mlp down",
        "pre_logits/kernel": "head",
    },
    "mamba": {
        "backbone.layers.0.mixer.A_log": "other",
        "backbone.layers.0.mixer.D": "other",
        "backbone.layers.0.mixer.dt_proj.weight": "other",
        "backbone.layers.0.mixer.dt_proj.bias": "bias",
        "backbone.norm_f.weight": "norm",
    },
    "dit_and_flux": {  # Networks that make scales and shifts for norms.
        "blocks.0.adaLN_modulation.1.weight": "other",
        "blocks.0.norm1.weight": "norm",
        "final_layer.norm_final.weight": "norm",
        "transformer_blocks.0.norm1.linear.weight": "other",
        "transformer_blocks.0.norm1_context.linear.weight": "other",
        "norm_out.linear.weight": "other",
        "transformer_blocks.0.attn.norm_q.weight": "norm",
        "double_blocks.0.img_attn.norm.query_norm.scale": "norm",
        "double_blocks.0.img_mod.lin.weight": "other",
        "y_embedder.embedding_table.weight": "embedding",
    },
    "keras": {
        "token_embedding/embeddings": "embedding",
        "layer_0/self_attention/query/kernel": "attention query",
        "layer_0/self_attention/query/bias": "bias",
        "layer_0/self_attention/attention_output/kernel": "attention output",
        "layer_0/self_attention_layer_norm/gamma": "norm",
        "layer_0/feedforward_output_dense/kernel": "mlp down",
        "logits/kernel": "head",
    },
    "tensorflow": {
        "embedding/embeddings:0": "embedding",
        "multi_head_attention/query/kernel:0": "attention query",
        "multi_head_attention/query/bias:0": "bias",
        "layer_normalization/gamma:0": "norm",
        "lm_head/kernel:0": "head",
    },
    "alphafold": {
        "evoformer/msa_column_attention//attention.gating_w": "attention gate",
        "evoformer/msa_column_attention//attention.gating_b": "bias",
        "evoformer/msa_column_attention//attention.output_w": "attention output",
        "evoformer/msa_column_attention//attention.output_b": "bias",
        "evoformer/triangle_multiplication_outgoing/left_norm_input.scale": "norm",
        "distogram_head/half_logits.weights": "head",
    },
    "praxis": {
        "params/lm/softmax/logits_ffn/linear/w": "head",
        "params/lm/softmax/logits_ffn/bias/b": "bias",
        "params/lm/embedding_lookup/emb_var": "embedding",
        "params/lm/x_layers_0/self_attention/per_dim_scale/per_dim_scale": "scale",
        "params/lm/x_layers_0/ff_layer/ffn_layer1/bias/b": "bias",
    },
    "megatron_and_fairseq": {
        "embedding.word_embeddings.weight": "embedding",
        "output_layer.weight": "head",
        "decoder.embed_tokens.weight": "embedding",
        "decoder.output_projection.weight": "head",
        "encoder.layernorm_embedding.weight": "norm",
    },
    "penzai": {  # By the parameters' labels.
        "transformer/block_0/pre_attention_norm/scale.weights.data_array": "norm",
        "transformer/block_0/attention/query.weights.data_array": "attention query",
        "transformer/block_0/attention/output.weights.data_array": "attention output",
        "transformer/block_0/mlp/gating_linear.weights.data_array": "mlp gate",
        "transformer/block_0/mlp/value_linear.weights.data_array": "mlp up",
        "transformer/block_0/mlp/out_linear.weights.data_array": "mlp down",
        "transformer/embedder.embeddings.data_array": "embedding",
        "transformer/lm_head.weights.data_array": "head",
    },
    "segment_anything": {
        "mask_decoder.iou_token.weight": "embedding",
        "mask_decoder.mask_tokens.weight": "embedding",
    },
    "without_a_class": {
        "mixer.in_proj.weight": "other",
        "mixer.dt_bias": "bias",
        "cell.weight_hh": "other",
        "stem.kernel": "other",
        "down_blocks.0.proj.kernel": "other",
        "blocks.0.attention.query.lora_a": "other",
        "blocks.0.adapter.down.kernel": "other",
        "experts.0.weight": "other",
        "experts.1.weight": "other",
        "critic.q.kernel": "other",
        "weight_v": "other",
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_classes_by_name_and_the_default_rule(name):
    """They agree, but a router's "classifier" or "logits" takes AdamW as well."""
    outside = {"embedding", "head", "norm", "scale", "bias"}
    tree = {path: jax.ShapeDtypeStruct((4, 4), jnp.float32) for path in MODELS[name]}
    for row in describe(tree).rows:
        assert row.layer_class == MODELS[name][row.path]
        router = row.layer_class == "router" and re.search("classifier|logits", row.path)
        assert (row.rule == "adamw") == (row.layer_class in outside or bool(router))


def test_a_gate_by_its_neighbours():
    def gate(*beside, above="mlp"):
        return of_paths(*(f"{above}.{name}" for name in ("gate", *beside)))[
            f"{above}.gate"
        ]

    assert gate("up", "down") == gate() == "mlp gate"
    assert gate("experts.up", "experts.down") == "router"
    assert gate("experts.up", "shared_experts.up", above="block") == "router"
    assert gate("up", "down", above="moe") == "routed expert gate"
    assert gate("wi_0", "wi_1", "wo", above="moe") == gate(above="moe") == "router"
    assert gate("gate_up", "down", above="moe") == "router"
    assert gate("router", "up", "down") == "routed expert gate"
    assert gate("router", "experts.w1", "up_proj", "w2", above="") == "router"
    assert gate("query", above="attention") == "attention gate"
    assert gate("value", above="cell") == "other"
    flat = of_paths("expert_gate", "expert_up", "shared_expert_gate", "shared_expert_up")
    kinds = ["routed expert", "shared expert"]
    roles = ["gate", "up"]
    assert list(flat.values()) == [f"{kind} {role}" for kind in kinds for role in roles]


def test_w1_to_w3_by_their_shapes():
    def classes(w1, w2, w3):
        shapes = {"w1": w1, "w2": w2, "w3": w3}
        layers = layer_classes({"mlp": {k: jnp.ones(shapes[k]) for k in shapes}})["mlp"]
        return " ".join(layer.split()[-1] for layer in layers.values())

    assert classes((2, 6), (6, 2), (2, 6)) == "gate down up"
    assert classes((2, 6), (2, 6), (6, 2)) == "gate up down"
    assert classes((4, 4), (4, 4), (4, 4)) == "gate down up"
    masked = {"w1": optax.MaskedNode(), "w2": optax.MaskedNode(), "w3": jnp.ones((2, 6))}
    assert layer_classes({"mlp": masked})["mlp"]["w3"] == "mlp up"


def test_a_dense_mlp_beside_a_router_and_its_experts():
    expected = {
        "0.router": "router",
        "0.experts.up": "routed expert up",
        "0.up": "mlp up",
    }
    assert of_paths(*expected) == expected
    del expected["0.experts.up"]
    assert of_paths(*expected) == expected | {"0.up": "routed expert up"}


# Trees and rules


def test_masked_leaves_and_empty_trees():
    masked = optax.MaskedNode()
    params = {"gate": jnp.ones((4, 2)), "experts": {"up": masked}, "b": None}
    assert layer_classes(params) == {
        "gate": "router",
        "experts": {"up": masked},
        "b": None,
    }
    assert layer_classes(params, {"experts": "mine"})["gate"] == "router"
    for nothing in ({}, masked, {"a": None}):
        assert layer_classes(nothing) == nothing
    assert layer_classes(jnp.ones((2, 3))) == "other"


@pytest.mark.parametrize("pairs", [dict, list, tuple, iter])
def test_rules_come_first_and_in_order(pairs):
    rules = {r"1\.query": "last query", re.compile("query"): "query", "^scan": "ssm"}
    params = {f"{i}.query": jnp.ones((2, 2)) for i in range(2)}
    params |= {"scan": jnp.ones((2, 2)), "lm_head": jnp.ones((2, 2))}
    given = rules if pairs is dict else pairs(rules.items())
    assert layer_classes(params, given) == {
        "0.query": "query", "1.query": "last query", "lm_head": "head", "scan": "ssm",
    }  # fmt: skip


def test_rules_that_decide_nothing():
    params = {"router": jnp.ones((2, 2)), "up": jnp.ones((2, 2))}
    with pytest.raises(
        ValueError, match=r"'rooter' of layer_classes matches no param.*'up'"
    ):
        layer_classes(params, {"rooter": "router"})
    with pytest.raises(
        ValueError, match=r"'up' of layer_classes decides nothing: earlier"
    ):
        layer_classes(params, [("u", "a"), ("up", "b")])


@pytest.mark.parametrize(
    "rules, words",
    [
        ("up", "rules='up' is not valid: pass a mapping, or pairs, from regular expr"),
        (
            ["up"],
            "pass a mapping, or pairs, from regular expressions to names of classes",
        ),
        ({"(": "a"}, r"an expression of rules='\(' is not valid"),
        ({"up": 3}, r"rules\['up'\]=3 is not valid: pass the name of a class"),
        ({"up": ""}, r"rules\['up'\]='' is not valid: pass the name of a class"),
        ({"up": None}, r"rules\['up'\]=None is not valid"),
    ],
)
def test_invalid_rules(rules, words):
    with pytest.raises(ValueError, match=words):
        layer_classes({"up": jnp.ones((2, 2))}, rules)


@pytest.mark.extended
def test_classes_of_a_pooled_ratio():
    """Classes are taken as a tree and as a function, also where leaves are masked."""
    params = {
        "attention": {"query": jnp.eye(4), "out": 2 * jnp.eye(4)},
        "mlp": {"up": 3 * jnp.eye(4), "down": 4 * jnp.eye(4)},
        "norm": jnp.ones(4),
    }
    rules = {"attention": "attention", r"mlp": "mlp"}
    labels = layer_classes(params, rules)
    assert class_labels(labels, params, params) == labels
    assert class_labels(layer_classes, params, params) == layer_classes(params)

    def steps(classes):
        optimizer = pooled(0.1, classes=classes)
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = jax.jit(optimizer.update)(params, state, params)
        return jax.tree.leaves(updates)

    tree = steps(labels)
    for given in (
        functools.partial(layer_classes, rules=rules),
        {"attention": "a", "mlp": "m", "norm": None},
    ):
        assert all(map(jnp.array_equal, tree, steps(given)))
    own, function = steps(layer_classes(params)), steps(layer_classes)
    assert all(map(jnp.array_equal, own, function))
    assert not all(map(jnp.array_equal, own, tree))


def test_a_step_count_is_no_tree_of_parameters():
    injected = optax.inject_hyperparams(pooled)
    with pytest.raises(ValueError, match=r'^classes was called.* static_args="classes"'):
        injected(0.1, classes=layer_classes).init({"w": jnp.ones((2, 2))})
