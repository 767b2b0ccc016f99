"""The shapes of the matrices whose step is timed, and how many operations it takes."""

import math
from collections.abc import Mapping

from examples.benchmarks.contenders import NS_STEPS
from orscale_jax.newton_schulz import restarts

Shapes = Mapping[str, tuple[int, ...]]


def copies(count: int, shapes: Shapes) -> Shapes:
    return {f"{i}.{name}": shape for i in range(count) for name, shape in shapes.items()}


def stacked(count: int, shapes: Shapes) -> Shapes:
    """The same matrices as copies, each name a leaf of ``count`` layers."""
    return {name: (count, *shape) for name, shape in shapes.items()}


GPT2_BLOCK: Shapes = {  # As GPT-2 has them, query, key and value in one.
    "c_attn": (768, 2304),
    "c_proj": (768, 768),
    "c_fc": (768, 3072),
    "c_out": (3072, 768),
}
SPLIT_BLOCK: Shapes = {
    **dict.fromkeys(("query", "key", "value", "out"), (768, 768)),
    "up": (768, 3072),
    "down": (3072, 768),
}
DAVIDNET: Shapes = {
    "prep": (27, 64),
    "layer1": (576, 128),
    **dict.fromkeys(("res1a", "res1b"), (1152, 128)),
    "layer2": (1152, 256),
    "layer3": (2304, 512),
    **dict.fromkeys(("res3a", "res3b"), (4608, 512)),
}
CASES: dict[str, Shapes] = {
    "gpt2": copies(4, GPT2_BLOCK),
    "split": copies(4, SPLIT_BLOCK),
    "stacked": stacked(4, GPT2_BLOCK),
    "split-stacked": stacked(4, SPLIT_BLOCK),
    "1.1B": {
        **dict.fromkeys(("query", "out"), (2048, 2048)),
        **dict.fromkeys(("key", "value"), (2048, 256)),
        **dict.fromkeys(("gate", "up"), (2048, 5632)),
        "down": (5632, 2048),
    },
    "experts": {"experts": (64, 2048, 1408)},
    "davidnet": DAVIDNET,
    "tiny": copies(500, {"w": (32, 64)}),
    "tiny-stacked": stacked(500, {"w": (32, 64)}),
}
NAMES = {
    "gpt2": "4 blocks of GPT-2 124M",
    "split": "the same, query, key and value apart",
    "stacked": "the 4 blocks of GPT-2, stacked",
    "split-stacked": "the same, query, key and value apart, stacked",
    "1.1B": "a block of a 1.1B model",
    "experts": "64 experts of 2048×1408",
    "davidnet": "DavidNet",
    "tiny": "500 matrices of 32×64",
    "tiny-stacked": "the same, stacked",
}


def nominal_flops(shapes: Shapes) -> float:
    """Of the plain iteration, steps · (4m²n + 2m³) a matrix."""
    total = 0.0
    for *batch, m, n in shapes.values():
        total += math.prod(batch) * restarts.flops(m, n, NS_STEPS, NS_STEPS - 1)
    return total
