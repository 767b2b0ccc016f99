"""The audit of a mixture of experts, right and wrong, as pictures for the documentation.

python -m examples.audit docs
"""

import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from optax.contrib import MuonDimensionNumbers as Dims

from examples import figure_style as style
from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    Description,
    by_path,
    describe,
    orscale,
)

# Fewer columns than the table has: they are to be read at the width of a page.
SHOWN = ("parameter", "rule", "class", "matrices", "m × n", "check")
LAYERS, EMBED, HIDDEN, EXPERTS, VOCABULARY = 24, 2048, 1408, 64, 102400
MODEL = f"for a mixture of {LAYERS} layers with {EXPERTS} experts"
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


def table(description: Description) -> list[str]:
    """The lines of the table, of the columns that are shown."""
    lines = str(description).splitlines()
    spans = [match.span() for match in re.finditer("─+", lines[1])]
    shown = [span for span in spans if lines[0][slice(*span)].strip() in SHOWN]
    last = lines.index(lines[1], 2)
    return [
        "  ".join(line.ljust(500)[slice(*span)] for span in shown)
        for line in lines[:last]
    ]


def draw(
    title: str, description: Description, remarks: Mapping[str, str], path: pathlib.Path
) -> None:
    """The table as a picture; a line with a remark is in colour, the remark below it."""
    written: list[tuple[str, str]] = [(title, style.BLACK), ("", style.INK)]
    for line in table(description):
        remark = remarks.get(line.split(" ")[0])
        written.append((line, style.VERMILION if remark else style.INK))
        if remark:
            written.append((f"  ↑ {remark}", style.VERMILION))
    figure = Figure(figsize=(style.WIDTH, 0.185 * (len(written) + 1)))
    width = max(len(line) for line, _ in written)
    size = min(0.96 * style.WIDTH * 72 / (0.602 * width), style.NORMAL)
    for number, (line, color) in enumerate(written):
        figure.text(
            0.015, 1 - (number + 1) / (len(written) + 1), line,
            family="DejaVu Sans Mono", fontsize=size, color=color,
        )  # fmt: skip
    style.save(figure, path)


def main(folder: pathlib.Path) -> None:
    draw(f"The right rules, {MODEL}", audit(RIGHT), {}, folder / "audit.png")
    draw(f"Careless rules, {MODEL}", audit(WRONG), REMARKS, folder / "audit_wrong.png")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
