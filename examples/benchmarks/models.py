"""The parameters of models that are trained, and how they are sharded."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims


class Leaf(NamedTuple):
    """A parameter; without numbers it takes AdamW."""

    shape: tuple[int, ...]
    spec: P = P()
    numbers: Dims | None = None


Leaves = Mapping[str, Leaf]


def matrix(rows: int, columns: int, spec: P) -> Leaf:
    return Leaf((rows, columns), spec, Dims(0, 1))


def experts(count: int, rows: int, columns: int, spec: P) -> Leaf:
    return Leaf((count, rows, columns), spec, Dims(1, 2))


def named(name: str, part: Leaves) -> Leaves:
    return {f"{name}.{end}": leaf for end, leaf in part.items()}


def layers(count: int, block: Leaves, first: int = 0) -> Leaves:
    return {
        name: leaf
        for i in range(first, first + count)
        for name, leaf in named(str(i), block).items()
    }


def over_all(mesh: Mapping[str, int], rows: int, columns: int) -> Leaf:
    """A matrix sharded over all devices: by rows, or by columns if rows do not divide."""
    by_rows = rows % math.prod(mesh.values()) == 0
    spec = P(tuple(mesh), None) if by_rows else P(None, tuple(mesh))
    return matrix(rows, columns, spec)


def swiglu(mesh: Mapping[str, int], hidden: int, width: int) -> Leaves:
    return {
        "gate": over_all(mesh, hidden, width),
        "up": over_all(mesh, hidden, width),
        "down": over_all(mesh, width, hidden),
    }


def moonlight(mesh: Mapping[str, int]) -> Leaves:
    """Moonlight-16B-A3B, experts over the last axis of the mesh.

    Experts are also sharded by rows over the other axes.
    """
    *others, expert_axis = mesh
    sharded = functools.partial(over_all, mesh)
    hidden, ffn, latent, heads = 2048, 1408, 512, 16
    attention: Leaves = {
        "q_proj": sharded(hidden, heads * 192),
        "kv_a_proj": sharded(hidden, latent + 64),
        "kv_a_norm": Leaf((latent,)),
        "kv_b_proj": sharded(latent, heads * 256),
        "o_proj": sharded(heads * 128, hidden),
        "input_norm": Leaf((hidden,)),
        "post_norm": Leaf((hidden,)),
    }
    spec = P(expert_axis, tuple(others) or None, None)
    mixture: Leaves = {
        "router": sharded(hidden, 64)._replace(numbers=None),
        "experts.gate": experts(64, hidden, ffn, spec),
        "experts.up": experts(64, hidden, ffn, spec),
        "experts.down": experts(64, ffn, hidden, spec),
        **named("shared", swiglu(mesh, hidden, 2 * ffn)),
    }
    return {
        "embedding": sharded(163840, hidden)._replace(numbers=None),
        "head": sharded(hidden, 163840)._replace(numbers=None),
        "norm": Leaf((hidden,)),
        **layers(27, attention),
        **named("0.mlp", swiglu(mesh, hidden, 10944)),
        **layers(26, mixture, first=1),
    }


def gpt2() -> Leaves:
    """GPT-2 124M, query, key and value in one matrix, on every device."""
    norms = ("norm1", "norm2")
    biases = {
        "qkv": 2304,
        "out": 768,
        "up": 3072,
        "down": 768,
        "norm1": 768,
        "norm2": 768,
    }
    return {
        "wte": Leaf((50257, 768)),
        "wpe": Leaf((1024, 768)),
        "norm.scale": Leaf((768,)),
        "norm.bias": Leaf((768,)),
        **layers(
            12,
            {
                "qkv": matrix(768, 2304, P()),
                "out": matrix(768, 768, P()),
                "up": matrix(768, 3072, P()),
                "down": matrix(3072, 768, P()),
                **{f"{name}.scale": Leaf((768,)) for name in norms},
                **{f"{name}.bias": Leaf((size,)) for name, size in biases.items()},
            },
        ),
    }


def tinyllama() -> Leaves:
    """TinyLlama 1.1B as Megatron shards it, its other axis over "fsdp"."""
    columns, rows = P("fsdp", "tensor"), P("tensor", "fsdp")
    return {
        "embedding": Leaf((32000, 2048), rows),
        "head": Leaf((2048, 32000), columns),
        "norm": Leaf((2048,)),
        **layers(
            22,
            {
                "query": matrix(2048, 2048, columns),
                "key": matrix(2048, 256, columns),
                "value": matrix(2048, 256, columns),
                "out": matrix(2048, 2048, rows),
                "gate": matrix(2048, 5632, columns),
                "up": matrix(2048, 5632, columns),
                "down": matrix(5632, 2048, rows),
                "norm1": Leaf((2048,)),
                "norm2": Leaf((2048,)),
            },
        ),
    }


def first(count: int, leaves: Leaves) -> Leaves:
    """What belongs to the first layers, or to none."""
    numbers = {name: name.split(".")[0] for name in leaves}
    return {
        name: leaf
        for name, leaf in leaves.items()
        if not numbers[name].isdigit() or int(numbers[name]) < count
    }
