"""The trainer's step against nanodo's, at the same sizes and with AdamW.

    git clone https://github.com/google-deepmind/nanodo
    python -m examples.benchmarks.nanodo --clone nanodo

nanodo's model (LayerNorm, learned positions, GELU) with the mean cross-entropy, against
the trainer's compiled step (RMSNorm, rotary positions, ReLU²), which also gives the norm
of the gradient. Everything is float32. The two are timed in turns.
"""

import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from examples.benchmarks.timing import in_turns
from examples.pretrain.configs import DEMOS
from examples.pretrain.kinds import make_task
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.setup import learning_rates, set_up
from examples.pretrain.step import compiled_step


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of the model and of a batch."""

    clone: pathlib.Path
    """The folder of nanodo's repository."""
    width: int = 256
    layers: int = 4
    heads: int = 8
    vocab_size: int = 8192
    seq_len: int = 256
    batch_size: int = 4
    scan: bool = False
    """Scan over our layers; nanodo's are apart."""
    turns: int = 20


def ours(options: Options, tokens: jax.Array) -> Callable[[], Any]:
    model = DenseConfig(
        vocab_size=options.vocab_size,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        fused_qkv=False,
        scan=options.scan,
    )
    demo = DEMOS["demo"]
    recipe = dataclasses.replace(
        demo.recipe_of("adamw"), seq_len=options.seq_len, batch_size=options.batch_size
    )
    config = dataclasses.replace(demo, recipe=recipe, model=model)
    mesh = make_mesh(config.mesh)
    setup = set_up(make_task(config), recipe, mesh)
    with in_effect(mesh):
        return stepping(compiled_step(setup, 1, tokens), setup.initial_state(), tokens)


def nanodos(options: Options, tokens: jax.Array) -> Callable[[], Any]:
    sys.path.insert(0, str(options.clone))
    from nanodo import model as nanodo  # type: ignore[import-not-found]

    model = nanodo.TransformerDo(
        nanodo.DoConfig(
            D=options.width,
            H=options.heads,
            L=options.seq_len,
            N=options.layers,
            V=options.vocab_size,
            F=4 * options.width,
            fsdp_enabled=False,
        )
    )
    params = model.init(jax.random.key(0), tokens[:, :-1])
    recipe = DEMOS["demo"].recipe
    optimizer = optax.adamw(learning_rates(recipe), b2=0.95, weight_decay=0.1)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits: jax.Array = model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            ).mean()

        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return stepping(
        jax.jit(step, donate_argnums=0), (params, optimizer.init(params)), tokens
    )


def stepping(step: Any, state: Any, tokens: jax.Array) -> Callable[[], Any]:
    held = [step(state, tokens)[0]]  # Compiles.

    def run() -> Any:
        held[0], metrics = step(held[0], tokens)
        return metrics

    return run


def main(options: Options) -> None:
    shape = (options.batch_size, options.seq_len + 1)
    tokens = jax.random.randint(
        jax.random.key(0), shape, 0, options.vocab_size, jnp.int32
    )
    runs = {"nanodo": nanodos(options, tokens), "ours": ours(options, tokens)}
    seconds = in_turns(runs, range(options.turns))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    pairs = zip(seconds["ours"], seconds["nanodo"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    print(
        f"a step: nanodo {medians['nanodo']:.3f} s, ours {medians['ours']:.3f} s, "
        f"ours / nanodo {ratio:.2f} (median of {options.turns} pairs)"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
