"""What readouts at every step cost a training step, in turns with one without.

    python -m examples.benchmarks.readouts
    python -m examples.benchmarks.readouts --width 768 --layers 12 --heads 12 \
        --vocab-size 50257 --seq-len 512 --batch-size 2 --turns 6
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import tyro

from examples.benchmarks.functional import experiment
from examples.benchmarks.timing import in_turns
from examples.pretrain.configs import DEMOS
from orscale_jax import diagnostics, orscale

SIZES = ("width", "layers", "heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class Options:
    """The model, of the demo's size by default, and how often to time it."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    vocab_size: int = 256
    seq_len: int = 128
    batch_size: int = 16
    turns: int = 60
    """Steps of each kind, one after the other."""


def steps(options: Options) -> tuple[dict[str, Callable[..., Any]], Any]:
    """The two steps, and the parameters and state that they begin with."""
    demo = DEMOS["demo"]
    recipe = dataclasses.replace(
        demo.recipe, seq_len=options.seq_len, batch_size=options.batch_size
    )
    sizes = {name: getattr(options, name) for name in SIZES}
    model: Any = dataclasses.replace(demo.model, **sizes)
    loss_fn, params, _, _ = experiment(
        dataclasses.replace(demo, recipe=recipe, model=model)
    )
    schedule = optax.cosine_decay_schedule(1e-3, 10_000)
    optimizer = orscale(schedule)
    classes = diagnostics.layer_classes(params)

    def plain(carry: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), {"loss": loss}

    def reading(carry: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        (params, state), scalars = plain(carry, tokens)
        found = diagnostics.read(state, params, learning_rate=schedule)
        return (params, state), scalars | diagnostics.summarize(found, classes)

    def alone(carry: Any) -> dict[str, jax.Array]:
        found = diagnostics.read(carry[1], carry[0], learning_rate=schedule)
        return diagnostics.summarize(found, classes)

    kinds = {"without": plain, "with": reading}
    compiled: dict[str, Callable[..., Any]] = {
        name: jax.jit(step, donate_argnums=0) for name, step in kinds.items()
    }
    compiled["alone"] = jax.jit(alone)
    return compiled, (params, jax.jit(optimizer.init)(params))


def main(options: Options) -> None:
    compiled, carry = steps(options)
    shape = (options.batch_size, options.seq_len + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, options.vocab_size)
    held = [carry]

    def step(kind: str) -> dict[str, jax.Array]:
        held[0], scalars = compiled[kind](held[0], tokens)
        return scalars

    kinds = {name: functools.partial(step, name) for name in ("without", "with")}
    alone = {"alone": lambda: compiled["alone"](held[0])}
    for run in (kinds | alone).values():  # Compiles.
        jax.block_until_ready(run())
    scalars = kinds["with"]()
    seconds = in_turns(kinds, range(options.turns))
    before, after = (np.array(seconds[name]) for name in kinds)
    times = in_turns(alone, range(20))["alone"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(held[0][0]))
    print(f"{parameters / 1e6:.1f}M parameters, {len(scalars) - 1} scalars a step")
    print(f"a step: {statistics.median(before):.4f} s, with readouts "
          f"{statistics.median(after):.4f} s")  # fmt: skip
    share = statistics.median(times) / statistics.median(before)
    print(
        f"readouts alone: {1e3 * statistics.median(times):.1f} ms, {share:.2%} of a step"
    )
    added = np.median(after / before) - 1
    spread = np.percentile(after / before, [25, 75]) - 1
    print(f"readouts add {added:+.2%} (median of {options.turns} pairs; half of them "
          f"between {spread[0]:+.1%} and {spread[1]:+.1%})")  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
