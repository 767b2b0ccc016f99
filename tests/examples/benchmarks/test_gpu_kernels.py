"""The kernels of a step, compiled for an H100; `make test-gpu` has the compiler."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from examples.benchmarks import (
    ahead_of_time,
    hlo_cost,
    symmetric,
    topologies,
)
from examples.pretrain.meshes import MeshConfig, batch_sharding, in_effect, make_mesh
from examples.pretrain.models import attention
from examples.pretrain.models.dense import Dense, DenseConfig

pytest.importorskip("jax_cuda12_plugin", reason="no CUDA plugin: make test-gpu")
pytestmark = pytest.mark.compiled


def measured(case, contender, layers):
    options = ahead_of_time.Options(
        layers=layers, compiler_options=topologies.GPU_COMPILER_OPTIONS
    )
    target = ahead_of_time.target_of(ahead_of_time.CASES[case], "gpu")
    _, found = ahead_of_time.measure(case, contender, target, options)
    return found


@pytest.mark.parametrize(
    ("case", "contender", "layers", "kernels", "temporaries"),
    [
        ("f", "muon", None, 150, 262),
        ("f", "orscale", None, 172, 249),
        # Matrices of 128 rows have one stack, and those of 512, of two lengths each.
        ("u", "muon", None, 150, 28.6),
        # Fewer than one for each matrix.
        ("g", "muon", 120, 55, 3.1),
        ("g", "orscale", 120, 78, 3.9),
    ],
)
def test_kernels_and_mib_of_a_step(case, contender, layers, kernels, temporaries):
    found = measured(case, contender, layers)
    assert found.cost.kernels <= kernels
    assert found.memory.temp_size_in_bytes <= temporaries * 2**20
    # All but Gram matrices are added to something by their own kernels: of 24 and 12 wide
    # matrices with two restarts, of 12 square ones with four.
    if case == "f":
        added = [kernel.adds for kernel in found.kernels if kernel.flops]
        assert added.count(False) == 3 + 3 + 5 and added.count(True) == 14 + 14 + 10


@pytest.mark.parametrize("contender", ["muon", "orscale"])
def test_exchanges_run_beside_products(contender):
    """All but the first one out and the last one back, of three each way."""
    cost = measured("i", contender, None).cost
    assert cost.exposed_bytes <= 0.3 * cost.collective_bytes


@pytest.mark.parametrize("shape", [(24, 768, 3072), (12, 768, 768), (1, 2048, 2048)])
def test_the_symmetric_kernel_compiles(shape):
    """To one kernel, with tiles of either size."""
    sharding = jax.sharding.SingleDeviceSharding(topologies.h100s(1)[0])
    x = jax.ShapeDtypeStruct(shape, jnp.float16, sharding=sharding)
    c = x.update(shape=(*shape[:2], shape[1]))
    lowered = jax.jit(symmetric.symmetric_product, static_argnums=1).lower(c, 0.5, x, x)
    program = lowered.compile(compiler_options=topologies.GPU_COMPILER_OPTIONS)
    [kernel] = hlo_cost.kernels(program.as_text() or "")
    assert kernel.nbytes == 2 * (2 * x.size + 2 * c.size)


def gradient_text(heads, gpus=1, axis_types="auto"):
    """Of a decoder of two layers 128 wide on 8 sequences of 256 tokens."""
    sizes = MeshConfig(tensor=2 if gpus > 1 else 1, axis_types=axis_types)
    mesh = make_mesh(sizes, topologies.h100s(gpus))
    config = DenseConfig(
        vocab_size=64, width=128, layers=2, heads=heads, dtype="bfloat16"
    )
    model = nnx.eval_shape(lambda: Dense(config, nnx.Rngs(0)))
    graph, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32, sharding=batch_sharding(mesh))

    def gradient(params, tokens):
        return jax.grad(
            lambda params: nnx.merge(graph, params)(tokens).astype("float32").sum()
        )(params)

    if axis_types == "explicit":
        gradient = jax.sharding.auto_axes(gradient, out_sharding=jax.P())
    with in_effect(mesh):
        why = attention.choose("bfloat16", 256, *config.attention_features).why
        lowered = jax.jit(gradient).lower(params, tokens)
    options = topologies.GPU_COMPILER_OPTIONS
    return lowered.compile(compiler_options=options).as_text(), why


@pytest.mark.parametrize("gpus, axis_types", [(1, "auto"), (8, "auto"), (8, "explicit")])
def test_cudnn_computes_attention_and_its_gradient(gpus, axis_types):
    """A call each in each of two layers, and no array has all scores."""
    text, why = gradient_text(heads=2, gpus=gpus, axis_types=axis_types)
    assert why == "Attention is cuDNN's fused kernel, in bfloat16."
    assert text.count('"__cudnn$fmhaSoftmax"') == 2
    assert text.count('"__cudnn$fmhaSoftmaxBackward"') == 2
    local = 8 // max(gpus // 2, 1)
    assert f"bf16[{local},{2 if gpus == 1 else 1},256,64]" in text
    assert not re.search(r"[^d]\[\d+,\d+,256,256\]", text)


def test_heads_that_cudnn_refuses_are_written_out():
    text, why = gradient_text(heads=32)
    assert "written out: cuDNN refuses heads of 4 features: The head dim must" in why
    assert "__cudnn$fmha" not in text
