"""The audit of a mixture of experts, right and wrong, as pictures for the documentation.

python -m examples.audit docs
"""

import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    Description,
    by_path,
    describe,
    orscale,
)

LAYERS, EMBED, HIDDEN, EXPERTS, VOCABULARY = 24, 2048, 1408, 64, 102400
SHAPES = {
    "embed": (VOCABULARY, EMBED),
    "layers": {
        "norm": (LAYERS, EMBED),
        "qkv": (LAYERS, EMBED, 3072),  # 16 heads of queries, 4 of keys and of values.
        "out": (LAYERS, EMBED, EMBED),
        "router": (LAYERS, EMBED, EXPERTS),
        "gate_up": (LAYERS, EXPERTS, EMBED, 2 * HIDDEN),
        "down": (LAYERS, EXPERTS, HIDDEN, EMBED),
    },
    "lm_head": (EMBED, VOCABULARY),
}
RIGHT = by_path({
    "qkv": Blocks(1, 2, block_axis=2, blocks=(2048, 512, 512)),
    "gate_up": Blocks(-2, -1, block_axis=-1, blocks=2),
    r"\.(out|down)$": Dims(-2, -1),
    "norm|router": "adamw",
})  # fmt: skip
# What goes wrong most often, and where the table shows it.
WRONG = by_path({
    "qkv|out": Dims(1, 2),
    "gate_up|down": Dims((1, 2), 3),
    "norm": "matrix",
})  # fmt: skip
REMARKS = {
    "layers.down": "64 experts as rows of one matrix",
    "layers.gate_up": "the same, and gate and up as one",
    "layers.norm": "gains of 24 norms are no matrix",
    "layers.qkv": "three projections as one",
    "layers.router": 'found by "out"',
}


def audit(numbers: Callable[[Any], Any]) -> Description:
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    optimizer = orscale(1e-3, mu_dtype=jnp.bfloat16, weight_dimension_numbers=numbers)
    return describe(params, numbers, optimizer=optimizer)


def draw(
    description: Description, remarks: Mapping[str, str], path: pathlib.Path
) -> None:
    lines = str(description).splitlines()
    width = max(map(len, lines)) + max(map(len, remarks.values()), default=0)
    figure = plt.figure(figsize=(0.083 * width + 0.4, 0.19 * len(lines) + 0.2))
    for number, line in enumerate(lines):
        remark = remarks.get(line.split(" ")[0], "")
        figure.text(
            0.01,
            1 - (number + 1) / (len(lines) + 1),
            f"{line:{max(map(len, lines))}}   {remark}",
            family="DejaVu Sans Mono",
            fontsize=10,
            color="firebrick" if remark else "black",
        )
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    draw(audit(RIGHT), {}, folder / "audit.png")
    draw(audit(WRONG), REMARKS, folder / "audit_wrong.png")
