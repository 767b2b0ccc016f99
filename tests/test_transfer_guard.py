"""Under jax.transfer_guard("disallow"), as big_vision and others train.

What computes with arrays is in jax.jit, as Optax's own optimizers have to be: outside of
it, a Python number that meets an array is sent to the device. Functions that cannot be
jitted pass as they are.
"""

import types

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import orscale_jax
import orscale_jax.equinox
import orscale_jax.flax
import orscale_jax.haliax
from orscale_jax import diagnostics, family, muon, orscale

PARAMS = {"a": (8, 16), "b": (16, 8), "bias": (8,)}
OPTIMIZER = orscale(1e-3)


def init(key):
    names = zip(PARAMS.items(), jax.random.split(key, len(PARAMS)), strict=True)
    return {name: jax.random.normal(key, shape) for (name, shape), key in names}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["a"])
    return jnp.mean(jnp.square(hidden @ params["b"] + params["bias"][None]))


@pytest.fixture(scope="module")
def after_a_step():
    """The state of a training loop, on the device."""

    @jax.jit
    def step(key):
        params = init(key)
        state = OPTIMIZER.init(params)
        batches = jax.random.normal(key, (4, 2, 8))
        grads = jax.grad(loss_fn)(params, batches[0])
        updates, state = OPTIMIZER.update(grads, state, params)
        reading = diagnostics.read(state, params, learning_rate=1e-3)
        return params, grads, updates, state, reading, list(batches)

    names = ("params", "grads", "updates", "state", "reading", "batches")
    return types.SimpleNamespace(**dict(zip(names, step(jax.random.key(0)), strict=True)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


def haliax_linear():
    sides = hax.Axis("in", 4), hax.Axis("out", 8)
    return hax.nn.Linear.init(*sides, key=jax.random.key(0))


NUMBERS_OF = {  # The function, and a model of arrays.
    "linen": (orscale_jax.flax.linen_dimension_numbers, Linen),
    "nnx": (
        orscale_jax.flax.nnx_dimension_numbers,
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
    ),
    "equinox": (
        orscale_jax.equinox.dimension_numbers,
        lambda: eqx.nn.Linear(4, 8, key=jax.random.key(0)),
    ),
    "haliax": (orscale_jax.haliax.dimension_numbers, haliax_linear),
}


@pytest.mark.parametrize("library", NUMBERS_OF)
def test_dimension_numbers_of_models(library):
    dimension_numbers, model = NUMBERS_OF[library]
    arguments = [model()] + [jnp.ones((1, 4))] * (library == "linen")
    with jax.transfer_guard("disallow"):
        dimension_numbers(*arguments)


STEPS = {
    "orscale": lambda: orscale(1e-3),
    "schedule": lambda: orscale(optax.cosine_decay_schedule(1e-3, 10)),
    "muon": lambda: muon(1e-3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(orscale)(learning_rate=1e-3),
    **{
        name: lambda name=name: getattr(family, name)(1e-3)
        for name in ("hyperball", "normuon", "muon_plus", "cautious", "pooled")
    },
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name, after_a_step):
    """Built, traced and compiled under the guard."""
    now = after_a_step
    with jax.transfer_guard("disallow"):
        optimizer = STEPS[name]()
        state = jax.jit(optimizer.init)(now.params)
        updates, _ = jax.jit(optimizer.update)(now.grads, state, now.params)
    assert jax.tree.map(jnp.shape, updates) == PARAMS


SHAPES = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in PARAMS.items()}
EVERYWHERE = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec())
PLACED = {k: x.update(sharding=EVERYWHERE) for k, x in SHAPES.items()}
IN_JIT = {
    "polar_factor": lambda now: orscale_jax.polar_factor(now.params["a"]),
    "convert_state": lambda now: orscale_jax.convert_state(
        now.state, muon(1e-3), now.params
    ),
    "read": lambda now: diagnostics.read(now.state, now.params, learning_rate=1e-3),
    "summarize": lambda now: diagnostics.summarize(now.reading),
    "measure": lambda now: diagnostics.measure(now.state, now.params),
    "decompose": lambda now: diagnostics.decompose(now.reading),
    "gain": lambda now: diagnostics.gain(*[now.reading.weight_norm] * 3),
    "secant_smoothness": lambda now: diagnostics.secant_smoothness(
        [now.grads] * 2, [now.updates] * 2, now.updates
    ),
}
ON_THE_HOST = {
    "describe": lambda now: str(orscale_jax.describe(now.params, optimizer=OPTIMIZER)),
    "describe shapes": lambda now: str(orscale_jax.describe(SHAPES)),
    "by_path": lambda now: orscale_jax.by_path({"bias": "adamw"})(now.params),
    "state_shardings": lambda now: orscale_jax.state_shardings(OPTIMIZER, PLACED),
    "polar_express_coefficients": lambda now: orscale_jax.polar_express_coefficients(),
    "layer_classes": lambda now: diagnostics.layer_classes(now.params),
    "tabulate": lambda now: diagnostics.tabulate(now.reading),
    "find_problems": lambda now: diagnostics.find_problems(now.reading),
    "estimate": lambda now: diagnostics.estimate(loss_fn, now.params, now.batches),
    "step_gain": lambda now: diagnostics.step_gain(
        loss_fn, now.params, now.batches, now.reading
    ),
    "verdict": lambda now: diagnostics.verdict(
        now.reading,
        diagnostics.estimate(loss_fn, now.params, now.batches),
        now.params,
        gained=diagnostics.step_gain(loss_fn, now.params, now.batches, now.reading),
    ),
    "to_floats": lambda now: diagnostics.to_floats(
        {"norm": now.reading.weight_norm["a"]}
    ),
}


@pytest.mark.parametrize("name", IN_JIT)
def test_in_jit(name, after_a_step):
    with jax.transfer_guard("disallow"):
        jax.jit(lambda now: IN_JIT[name](types.SimpleNamespace(**now)))(
            vars(after_a_step)
        )


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_on_the_host(name, after_a_step):
    with jax.transfer_guard("disallow"):
        ON_THE_HOST[name](after_a_step)
