"""Training with GPUs' float16 form, emulated: ``python -m tests.emulated_training``.

A model of the bytes of the standard library takes 300 steps of Muon, once with a float32
Q and twice with the form's: one rounding for each product with a sum, and two. It takes
a minute or two, and prints the final losses on held-out files, seed by seed.
"""

import functools
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import orthogonalize, scale_by_shape
from orscale_jax.newton_schulz.arithmetic import Start
from orscale_jax.newton_schulz.coefficients import PRESETS
from orscale_jax.newton_schulz.iteration import monic_newton_schulz
from orscale_jax.newton_schulz.platforms import GPU, NewtonSchulz
from orscale_jax.newton_schulz.restarts import monic_scales
from tests.newton_schulz.test_monic import FLOAT16, Emulated

STEPS, SEEDS, CONTEXT = 300, 6, 8
SHAPES = {"embed": (256, 32), "wide": (256, 512), "tall": (512, 128)}
SHAPES |= {"square": (128, 128), "head": (128, 256)}
MATRICES = ("wide", "tall", "square")


class Traced(Emulated):
    """The emulation within a compiled program, which keeps no sizes."""

    def add_product(self, c, beta, x, y):
        scaled = beta * self.product(x, y)
        if self.once:
            return (c.astype(jnp.float32) + scaled).astype(self.dtype)
        return c + scaled.astype(self.dtype)


def emulated(once: bool) -> optax.GradientTransformation:
    settings = NewtonSchulz.of(5, PRESETS["polar_express"], FLOAT16, "frobenius")
    arithmetic = Traced(FLOAT16, once=once)
    restarts = GPU.running(settings).restarts
    scales = monic_scales(settings.rows, restarts, arithmetic.scale)

    def q(m: jax.Array) -> jax.Array:
        x = arithmetic.scale * m / jnp.linalg.norm(m)
        start = Start(x.astype(FLOAT16))
        form = monic_newton_schulz.__wrapped__
        q = form(start, settings.rows, restarts, scales, arithmetic)
        return q.astype(m.dtype)

    return optax.stateless(lambda updates, _: jax.tree.map(q, updates))


def loss_fn(params: Any, windows: jax.Array) -> jax.Array:
    x = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    x = jax.nn.gelu(jax.nn.gelu(x @ params["wide"]) @ params["tall"])
    logits = (x + jax.nn.gelu(x @ params["square"])) @ params["head"]
    targets = windows[:, -1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def windows_of(data: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    starts = rng.integers(0, len(data) - CONTEXT - 1, count)
    return data[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def final_loss(
    polar: optax.GradientTransformation,
    text: np.ndarray,
    held_out: np.ndarray,
    seed: int,
) -> float:
    rate = optax.linear_schedule(5e-3, 0, STEPS)
    matrices = optax.chain(
        optax.trace(0.95, nesterov=True),
        polar,
        scale_by_shape(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(rate),
    )
    labels = {name: name in MATRICES for name in SHAPES}
    optimizer = optax.partition({True: matrices, False: optax.adam(3e-3)}, labels)
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    params = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }

    # XLA may otherwise leave out roundings.
    options = {"xla_allow_excess_precision": False}

    @functools.partial(jax.jit, compiler_options=options)
    def step(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(loss_fn)(params, windows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, rng = optimizer.init(params), np.random.default_rng(seed)
    for _ in range(STEPS):
        params, state = step(params, state, windows_of(text, 256, rng))
    checked = windows_of(held_out, 20_000, np.random.default_rng(99))
    return float(jax.jit(loss_fn)(params, checked))


def main() -> None:
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    data = np.frombuffer(b"".join(map(pathlib.Path.read_bytes, files)), np.uint8)
    text, held_out = data[:-60_000], data[-60_000:]
    forms: dict[str, Callable[[], optax.GradientTransformation]] = {
        "float32": lambda: orthogonalize(ns_dtype=jnp.float32),
        "float16, one rounding": lambda: emulated(True),
        "float16, two roundings": lambda: emulated(False),
    }
    losses = {}
    for name, polar in forms.items():
        found = [final_loss(polar(), text, held_out, seed) for seed in range(SEEDS)]
        losses[name] = np.array(found)
        print(f"{name}: {losses[name].round(4)}", flush=True)
    exact = losses.pop("float32")
    print(f"standard deviation between seeds: {exact.std(ddof=1):.4f}")
    for name, found in losses.items():
        apart = found - exact
        half = 2.571 * apart.std(ddof=1) / SEEDS**0.5  # Student's t over six seeds.
        print(f"{name} minus float32: {apart.mean():+.5f} ± {half:.5f}")


if __name__ == "__main__":
    main()
