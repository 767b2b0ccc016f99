"""The parameters of models that are trained, and how they are sharded."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims


class Leaf(NamedTuple):
    """A parameter; without numbers it takes AdamW."""

    shape: tuple[int, ...]
    spec: P = P()
    numbers: Dims | None = None


Leaves = Mapping[str, Leaf]
Mesh = Mapping[str, int]
# How a matrix is sharded, by its name, rows and columns.
Rule = Callable[[str, int, int], P]
Shapes = Mapping[str, tuple[int, int]]


class Dense(NamedTuple):
    """The sizes of a decoder with SwiGLU and grouped queries."""

    layers: int
    hidden: int
    width: int
    keys: int  # Columns of keys, and of values.
    vocabulary: int


class Mixture(NamedTuple):
    """The sizes of a mixture of experts with latent attention, as DeepSeek-V3's."""

    hidden: int
    layers: int
    dense: int  # How many of the first layers have one feed-forward network,
    width: int  # and its width.
    experts: int  # In each of the other layers,
    expert: int  # and the width of each.
    shared: int  # The width of the experts that are always active.
    heads: int  # Their keys have 128 + 64 entries, their values 128.
    queries: int | None  # The width of the queries' latent vector, where there is one.
    vocabulary: int


TINYLLAMA = Dense(22, 2048, 5632, 256, 32000)
LLAMA2_7B = Dense(32, 4096, 11008, 4096, 32000)
LLAMA3_70B = Dense(80, 8192, 28672, 1024, 128256)
MOONLIGHT = Mixture(2048, 27, 1, 10944, 64, 1408, 2816, 16, None, 163840)
DEEPSEEK_V3 = Mixture(7168, 61, 3, 18432, 256, 2048, 2048, 128, 1536, 129280)
KIMI_K2 = Mixture(7168, 61, 1, 18432, 384, 2048, 2048, 64, 1536, 163840)
LATENT = 512  # The width of the keys' and values' latent vector.


def matrix(rows: int, columns: int, spec: P) -> Leaf:
    return Leaf((rows, columns), spec, Dims(0, 1))


def experts(count: int, rows: int, columns: int, spec: P) -> Leaf:
    return Leaf((count, rows, columns), spec, Dims(1, 2))


def of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> Leaves:
    """Matrices, or batches of them."""
    return {
        name: Leaf(shape, P(), Dims(len(shape) - 2, len(shape) - 1))
        for name, shape in shapes.items()
    }


def layers(count: int, block: Leaves, first: int = 0) -> Leaves:
    return {
        f"{i}.{name}": leaf
        for i in range(first, first + count)
        for name, leaf in block.items()
    }


def over_all(mesh: Mesh) -> Rule:
    """Over all devices, by rows, or by columns where rows do not divide.

    A mesh with an axis "expert" that does not divide either way shards both.
    """
    axes, devices = tuple(mesh), math.prod(mesh.values())

    def rule(name: str, rows: int, columns: int) -> P:
        if rows % devices == 0:
            return P(axes, None)
        if columns % devices == 0 or len(axes) == 1:
            return P(None, axes)
        return P(axes[-1], axes[0])

    return rule


def megatron(name: str, rows: int, columns: int) -> P:
    by_rows = name in ("embedding", "out", "down")
    return P("tensor", "fsdp") if by_rows else P("fsdp", "tensor")


def dense(rule: Rule, sizes: Dense) -> Leaves:
    hidden, norm = sizes.hidden, Leaf((sizes.hidden,))
    attention = {
        "query": (hidden, hidden),
        "key": (hidden, sizes.keys),
        "value": (hidden, sizes.keys),
        "out": (hidden, hidden),
    }
    block = _matrices(rule, {**attention, **_swiglu(hidden, sizes.width)})
    return {
        **_ends(rule, hidden, sizes.vocabulary),
        **layers(sizes.layers, {**block, "norm1": norm, "norm2": norm}),
    }


def mixture(rule: Rule, of_experts: P, sizes: Mixture) -> Leaves:
    """With experts sharded in a way of their own."""
    hidden, heads, queries = sizes.hidden, sizes.heads, sizes.queries
    attention = {
        **({} if queries is None else {"q_a_proj": (hidden, queries)}),
        "q_proj": (queries or hidden, heads * 192),
        "kv_a_proj": (hidden, LATENT + 64),
        "kv_b_proj": (LATENT, heads * 256),
        "o_proj": (heads * 128, hidden),
    }
    norms = {"kv_a_norm": Leaf((LATENT,)), "input_norm": Leaf((hidden,)),
             "post_norm": Leaf((hidden,))}  # fmt: skip
    routed = {
        f"experts.{name}": experts(sizes.experts, *shape, of_experts)
        for name, shape in _swiglu(hidden, sizes.expert).items()
    }
    router = Leaf((hidden, sizes.experts), rule("router", hidden, sizes.experts))
    shared = _matrices(rule, _swiglu(hidden, sizes.shared, "shared."))
    mlp = _matrices(rule, _swiglu(hidden, sizes.width, "mlp."))
    block = {"router": router, **routed, **shared}
    return {
        **_ends(rule, hidden, sizes.vocabulary),
        **layers(sizes.layers, {**_matrices(rule, attention), **norms}),
        **layers(sizes.dense, mlp),
        **layers(sizes.layers - sizes.dense, block, first=sizes.dense),
    }


def tinyllama() -> Leaves:
    """TinyLlama 1.1B as Megatron shards it, its other axis over "fsdp"."""
    return dense(megatron, TINYLLAMA)


def moonlight(mesh: Mesh) -> Leaves:
    """Moonlight-16B-A3B, experts over the last axis of the mesh.

    Experts are also sharded by rows over the other axes.
    """
    *others, expert = mesh
    return mixture(over_all(mesh), P(expert, tuple(others) or None, None), MOONLIGHT)


def gpt2() -> Leaves:
    """GPT-2 124M, query, key and value in one matrix, on every device."""
    shapes = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072),
              "down": (3072, 768)}  # fmt: skip
    norms = {f"{norm}.scale": Leaf((768,)) for norm in ("norm1", "norm2")}
    biases = {name: columns for name, (_, columns) in shapes.items()}
    biases |= {"norm1": 768, "norm2": 768}
    block = {
        **{name: matrix(*shape, P()) for name, shape in shapes.items()},
        **norms,
        **{f"{name}.bias": Leaf((size,)) for name, size in biases.items()},
    }
    return {
        "wte": Leaf((50257, 768)),
        "wpe": Leaf((1024, 768)),
        "norm.scale": Leaf((768,)),
        "norm.bias": Leaf((768,)),
        **layers(12, block),
    }


def scanned_gpt2() -> Leaves:
    """Its matrices where a model scans over layers: an array for all twelve."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (768, 768))
    shapes |= {"up": (768, 3072), "down": (3072, 768)}
    stacked = {name: experts(12, *shape, P()) for name, shape in shapes.items()}
    return {"wte": Leaf((50257, 768)), **stacked}


def placed(leaves: Leaves, mesh: Any, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters on a mesh, without data."""
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, leaf.spec)
        )
        for name, leaf in leaves.items()
    }


def first(count: int, leaves: Leaves) -> Leaves:
    """What belongs to the first layers, or to none."""
    numbers = {name: name.split(".")[0] for name in leaves}
    return {
        name: leaf
        for name, leaf in leaves.items()
        if not numbers[name].isdigit() or int(numbers[name]) < count
    }


def _swiglu(hidden: int, width: int, prefix: str = "") -> Shapes:
    """A feed-forward network."""
    up, down = (hidden, width), (width, hidden)
    return {f"{prefix}gate": up, f"{prefix}up": up, f"{prefix}down": down}


def _matrices(rule: Rule, shapes: Shapes) -> Leaves:
    return {name: matrix(*shape, rule(name, *shape)) for name, shape in shapes.items()}


def _ends(rule: Rule, hidden: int, vocabulary: int) -> Leaves:
    """The embedding, the head and the last norm, which take AdamW."""
    shapes = {"embedding": (vocabulary, hidden), "head": (hidden, vocabulary)}
    ends = {name: Leaf(shape, rule(name, *shape)) for name, shape in shapes.items()}
    return {**ends, "norm": Leaf((hidden,))}
