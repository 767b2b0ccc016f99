"""How long a step takes to compile, by the number of layers, as a Markdown table.

    python -m examples.benchmarks.compile_time                  # some minutes on a CPU
    python -m examples.benchmarks.compile_time --layers 12 48   # half a minute

Blocks of GPT-2 124M, four matrices each: every matrix a leaf of its own, and then layers
that are scanned, of which each leaf has all; nothing is run. JAX's caches are emptied
before each program, and none is kept on disk. Cells are seconds of tracing and lowering +
of compilation. "dot" counts the matrix products in the compiled program, a loop's once.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro

from examples.benchmarks.contenders import contenders, last_two_axes, step_of
from examples.benchmarks.shapes import GPT2_BLOCK, Shapes, copies, stacked


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    layers: tuple[int, ...] = (12, 48, 192)
    """Numbers of blocks."""
    optimizers: tuple[str, ...] = ("optax.adamw", "optax.contrib.muon", "muon", "orscale")
    """Of optax.adamw, optax.contrib.muon, muon and orscale."""


class Cost(NamedTuple):
    """The seconds that one program takes to compile, and its matrix products."""

    lowering: float
    compilation: float
    products: int


def cost(optimizer: optax.GradientTransformation, shapes: Shapes) -> Cost:
    """What the program of a donated step takes."""
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    state = jax.eval_shape(optimizer.init, params)
    jax.clear_caches()
    began = time.perf_counter()
    lowered = step.lower(params, state, params)
    halfway = time.perf_counter()
    compiled = lowered.compile()
    ended = time.perf_counter()
    products = (compiled.as_text() or "").count(" dot(")
    return Cost(halfway - began, ended - halfway, products)


def main(options: Options) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    optimizers = contenders(last_two_axes, "float32")
    cost(optimizers["orscale"], GPT2_BLOCK)  # What is loaded once is loaded now.
    heads = [f"{layers} layers, s | dot" for layers in options.layers]
    print("| | " + " | ".join(heads) + " |")
    print("| --- |" + " --: | --: |" * len(heads))
    for form, note in ((copies, ""), (stacked, ", scanned")):
        for name in options.optimizers:
            costs = (cost(optimizers[name], form(n, GPT2_BLOCK)) for n in options.layers)
            cells = (
                f"{c.lowering:.1f} + {c.compilation:.1f} | {c.products}" for c in costs
            )
            print(f"| {name}{note} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
