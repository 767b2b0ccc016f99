"""Under jax.transfer_guard("disallow"), as big_vision and others train.

What computes with arrays is in jax.jit, as Optax's own optimizers have to be: outside of
it, a Python number that meets an array is sent to the device. Functions that cannot be
jitted pass as they are.
"""

import functools
import types

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import orscale_jax
import orscale_jax.equinox
import orscale_jax.flax
import orscale_jax.haliax
from orscale_jax import diagnostics, family, muon, orscale
from tests.everything import EXTRA, PUBLIC, STAGES, WRAPPERS
from tests.runs import NUMBERS, tree
from tests.test_docs import public_names

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
        found = {"params": params, "grads": grads, "updates": updates, "state": state}
        return found | {"reading": reading, "batches": list(batches)}

    return types.SimpleNamespace(**step(jax.random.key(0)))


@pytest.fixture
def guard(monkeypatch):
    """The guard as it is on a GPU: on a CPU it lets arrays become Python's or NumPy's."""
    on_device, asarray = type(jnp.ones(())), np.asarray

    def refuse(array, *_):
        raise AssertionError(f"an implicit transfer of {array.shape} to the host")

    def from_host(x, *args, **options):
        return refuse(x) if isinstance(x, on_device) else asarray(x, *args, **options)

    for name in ("__float__", "__int__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(on_device, name, refuse)
    monkeypatch.setattr(np, "asarray", from_host)
    with jax.transfer_guard("disallow"):
        yield


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


In, Out = hax.Axis("in", 4), hax.Axis("out", 8)
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
    "haliax": (
        orscale_jax.haliax.dimension_numbers,
        lambda: hax.nn.Linear.init(In, Out, key=jax.random.key(0)),
    ),
}


@pytest.mark.parametrize("library", NUMBERS_OF)
def test_dimension_numbers_of_models(library, request):
    dimension_numbers, model = NUMBERS_OF[library]
    arguments = [model()] + [jnp.ones((1, 4))] * (library == "linen")
    request.getfixturevalue("guard")
    dimension_numbers(*arguments)


NUMBER, COUNT = jnp.float32(0.5), jnp.int32(2)
STEPS = {
    **{name: functools.partial(make, 1e-3) for name, make in PUBLIC.items()},
    "schedule": lambda: orscale(optax.cosine_decay_schedule(1e-3, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(orscale)(learning_rate=1e-3),
}


def on_device(number):
    """An array of its kind, which was made before the guard was there."""
    return COUNT if isinstance(number, int) else NUMBER


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", STEPS)
def test_a_step(name, after_a_step, guard):
    now, optimizer = after_a_step, STEPS[name]()
    state = jax.jit(optimizer.init)(now.params)
    updates, _ = jax.jit(optimizer.update)(now.grads, state, now.params)
    assert jax.tree.map(jnp.shape, updates) == PARAMS


def traced(optimizer, params, **extra):
    state = jax.eval_shape(optimizer.init, params)
    updates, _ = jax.eval_shape(optimizer.update, params, state, params, **extra)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_traced_steps_with_numbers_on_the_device(guard, subtests):
    """Of stages, of which the steps above have many, and of wrappers."""
    params = jax.eval_shape(lambda: tree(0))
    matrices = {name: params[name] for name in ("w", "stack")}
    numbers = {"weight_dimension_numbers": {name: NUMBERS[name] for name in matrices}}
    for name, make in STAGES.items():
        with subtests.test(name):
            traced(make(on_device, **numbers), matrices, **EXTRA.get(name, {}))
    inner = orscale(
        1e-3, momentum=NUMBER, r_min=NUMBER, anchor="largest", anchor_steps=COUNT,
        weight_dimension_numbers=NUMBERS,
    )  # fmt: skip
    traced(inner, params)
    for name, wrap in WRAPPERS.items():
        with subtests.test(name):
            traced(wrap(inner, on_device), params)


def masters(params):
    """The master weights of these parameters in bfloat16."""
    weights = {k: x.astype(jnp.bfloat16) for k, x in params.items()}
    state = orscale_jax.keep_master_weights(orscale(1e-3)).init(weights)
    return orscale_jax.master_weights(state, weights)


SHAPES = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in PARAMS.items()}
EVERYWHERE = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec())
PLACED = {k: x.update(sharding=EVERYWHERE) for k, x in SHAPES.items()}


def clip(params):
    optimizer = orscale_jax.qk_clip(
        lambda params, factors: {
            "a": params["a"] * factors.query[None, :, None],
            "b": params["b"] * factors.key[None, :, None],
        }
    )
    params = {k: jnp.reshape(params[k], (4, 2, 16)) for k in ("a", "b")}
    logits = jnp.array([200.0, 50.0])
    return optimizer.update(params, optimizer.init(params), params, max_logits=logits)


def two_layers(params):
    """A step of two layers, from their first state on."""
    stacked, optimizer = {"w": jnp.stack([params["a"]] * 2)}, muon(1e-3)
    state = orscale_jax.init_layers(optimizer, stacked)
    x = params["a"].T
    y, pull = orscale_jax.vjp_layers(
        lambda p, x: x @ p["w"] @ p["w"].T, optimizer, stacked, state, x
    )
    return pull(y)


IN_JIT = {
    "vjp_layers": lambda now: two_layers(now.params),
    "master_weights": lambda now: masters(now.params),
    "qk_clip": lambda now: clip(now.params),
    "polar_factor": lambda now: orscale_jax.polar_factor(now.params["a"]),
    "convert_state": lambda now: orscale_jax.convert_state(
        now.state, muon(1e-3), now.params
    ),
    "read": lambda now: diagnostics.read(now.state, now.params, learning_rate=1e-3),
    "summarize": lambda now: diagnostics.summarize(now.reading),
    "measure": lambda now: diagnostics.measure(now.state, now.params),
}
ON_THE_HOST = {
    "describe": lambda now: str(orscale_jax.describe(now.params, OPTIMIZER)),
    "describe shapes": lambda now: str(orscale_jax.describe(SHAPES)),
    "check_state": lambda now: orscale_jax.check_state(now.state, OPTIMIZER, now.params),
    "by_path": lambda now: orscale_jax.by_path({"bias": "adamw"})(now.params),
    "state_shardings": lambda now: orscale_jax.state_shardings(OPTIMIZER, PLACED),
    "polar_express_coefficients": lambda now: orscale_jax.polar_express_coefficients(),
    "layer_names": lambda now: diagnostics.layer_names(now.params),
    "tabulate": lambda now: diagnostics.tabulate(now.reading),
    "find_problems": lambda now: diagnostics.find_problems(now.reading),
    "convert_state": lambda now: orscale_jax.convert_state(  # Of a job that goes on.
        now.state, family.normuon(1e-3), now.params
    ),
}


@pytest.mark.parametrize("name", IN_JIT)
def test_in_jit(name, after_a_step, guard):
    function = jax.jit(lambda now: IN_JIT[name](types.SimpleNamespace(**now)))
    function(vars(after_a_step))


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_on_the_host(name, after_a_step, guard):
    ON_THE_HOST[name](after_a_step)


def test_what_a_loop_writes(after_a_step, tmp_path, guard):
    now, loss = after_a_step, after_a_step.reading.weight_norm["a"]
    path = tmp_path / "history.csv"
    history = diagnostics.History(path, measurements=["norm"], scalars=["loss"])
    measured = {"norm": now.reading.weight_norm}
    history.append(1, now.reading, measured, loss=loss)


@pytest.mark.parametrize("module", ["", ".diagnostics", ".family"])
def test_every_public_function_is_here(module):
    # The second one is for tests, which copy arrays; the third is tried with vjp_layers.
    exempt = {"family", "assert_same_on", "init_layers"}
    tested = exempt.union(STEPS, STAGES, WRAPPERS, IN_JIT, ON_THE_HOST)
    names = {name.rsplit(".", 1)[-1] for name in public_names("orscale_jax" + module)}
    assert {name for name in names if name[0].islower()} <= tested


def test_the_guard_is_that_of_a_gpu(after_a_step, guard):
    norm = after_a_step.reading.weight_norm["a"]
    for implicit in (float, bool, np.asarray, lambda x: x.item()):
        with pytest.raises(AssertionError, match="implicit transfer"):
            implicit(norm)
    jax.device_get(norm)
