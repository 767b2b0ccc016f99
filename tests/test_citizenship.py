"""What every Optax transformation owes its users, for each optimizer."""

import collections
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import orscale_jax
from orscale_jax import diagnostics, family, muon, orscale
from tests.everything import (
    OPTIMIZERS,
    PUBLIC,
    STAGES,
    WRAPPERS,
    functions_of,
    same,
)
from tests.runs import (
    EXPLICIT,
    NUMBERS,
    SHAPES,
    assert_close,
    assert_same_bits,
    first_update,
    mesh_of,
    placed,
    run,
    step_of,
    tree,
    types_of,
)

ROOT = Path(__file__).parents[1]
# Others have the same stages, in another order or with other hyperparameters.
FAST = ("orscale", "muon", "int8_momentum", "hyperball", "normuon")


CHAINED = (
    "orthogonalize",
    "scale_by_shape",
    "scale_by_calibrated_trust_ratio",
    "scale_by_path",
)


def chained(rate, weight_dimension_numbers, weight_decay=None):
    """Public stages in one chain without decay."""
    del weight_decay
    matrices = {name: x for name, x in weight_dimension_numbers.items() if x}
    numbers = {"weight_dimension_numbers": weight_dimension_numbers}
    stages = (STAGES[name](same, **numbers) for name in CHAINED)
    chain = optax.chain(optax.trace(0.9), *stages, optax.scale_by_learning_rate(rate))

    def label(path, _):
        return "matrix" if path[0].key in matrices else "adamw"

    def labels(params):
        return jax.tree.map_with_path(label, params)

    groups = {"matrix": chain, "adamw": optax.adamw(rate)}
    return optax.partition(groups, labels)


@pytest.fixture(params=(*FAST, "chained"))
def build(request):
    make = chained if request.param == "chained" else OPTIMIZERS[request.param]
    return functools.partial(make, weight_dimension_numbers=NUMBERS)


def train(optimizer, steps, params=None):
    """The parameters and the state after some steps."""
    return run(optimizer, tree(0) if params is None else params, steps, tree)[-1]


assert_trees_close = functools.partial(assert_close, atol=1e-7)


def rounding(build):
    """The error of updates: Hyperball's round as weights do."""
    return {"atol": 3e-6} if getattr(build, "func", build) is family.hyperball else {}


def test_everything_public_that_makes_a_transformation_is_tested():
    """The family is in the table as it is; stages and wrappers are written there."""
    made = {
        name
        for name, make in functions_of(orscale_jax).items() | functions_of(family).items()
        if "GradientTransformation" in str(inspect.signature(make).return_annotation)
    }
    assert made == {*PUBLIC, *STAGES, *WRAPPERS} and len(made) > 12


def test_no_backend_is_started_before_init():
    """Neither by imports nor by optimizers: `jax.distributed` comes after both."""
    program = """
import importlib, pkgutil
import jax, optax, orscale_jax
for module in pkgutil.walk_packages(orscale_jax.__path__, "orscale_jax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from tests.everything import OPTIMIZERS, STAGES, WRAPPERS, same
from tests.runs import NUMBERS
schedule = optax.linear_schedule(0.1, 0.0, 10)
for build in OPTIMIZERS.values():
    build(schedule, weight_decay=schedule, weight_dimension_numbers=NUMBERS)
    optax.inject_hyperparams(build, static_args=("weight_decay",))(0.1)
for build in STAGES.values():
    build(same, weight_dimension_numbers=NUMBERS)
for wrap in WRAPPERS.values():
    wrap(orscale_jax.orscale(0.1), same)
jax.config.update("jax_num_cpu_devices", 2)  # It is refused where a backend runs.
"""
    # Without -W error: to import Haliax gives warnings.
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("ns_dtype", ["float16", "bfloat16", "float32"])
def test_the_precision_of_the_models_products_is_not_the_optimizers(ns_dtype):
    """Nor that of measurements: an algorithm may narrow operands and sums."""
    params = tree(0)
    optimizer = orscale(0.1, ns_dtype=ns_dtype, weight_dimension_numbers=NUMBERS)

    def everything(params, state):
        updates, state = optimizer.update(params, state, params)
        measured = diagnostics.measure(state, params, NUMBERS)
        return updates, state, measured

    given = params, optimizer.init(params)
    expected = str(jax.make_jaxpr(everything)(*given))
    assert "dot_general" in expected
    with jax.default_matmul_precision("F16_F16_F16"):
        assert str(jax.make_jaxpr(everything)(*given)) == expected


def signature(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


@pytest.mark.extended
def test_scan_equals_the_loop_and_jit_of_init(build):
    """Without an intermediate NaN."""
    optimizer = build(1e-2)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *[tree(s + 1) for s in range(4)])

    def step(carry, grads):
        return step_of(optimizer)(*carry, grads), None

    with jax.debug_nans(True):
        expected = train(optimizer, 4)
        carry = tree(0), jax.jit(optimizer.init)(tree(0))
        found = jax.lax.scan(step, carry, grads)[0]
    assert_trees_close(found, expected, **rounding(build))


@pytest.mark.extended
def test_vmap_over_seeds(build):
    optimizer = build(1e-2)
    each = [(tree(seed), tree(seed + 1)) for seed in (10, 20)]
    params, grads = jax.tree.map(lambda *x: jnp.stack(x), *each)
    state = jax.vmap(optimizer.init)(params)
    updates, _ = jax.jit(jax.vmap(optimizer.update))(grads, state, params)
    alone = [optimizer.update(g, optimizer.init(p), p)[0] for p, g in each]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    assert_trees_close(updates, expected, **rounding(build))


@pytest.mark.quick_first_case
def test_steps_of_every_device_inside_shard_map(build):
    """The state is made there, of parameters that vary over the devices."""
    optimizer = build(1e-2)

    def train(params):
        def step(carry, _):
            return step_of(optimizer)(*carry, carry[0]), None

        start = params, optimizer.init(params)
        return jax.lax.scan(step, start, length=2)[0][0]

    def of_device(params):
        trained = train(jax.tree.map(lambda x: x[0], params))
        return jax.tree.map(lambda x: x[None], trained)

    each = [tree(0), tree(1)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    specs = {"in_specs": P("d"), "out_specs": P("d")}
    apart = jax.shard_map(of_device, mesh=mesh_of({"d": 2}), **specs)
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *map(train, each))
    assert_trees_close(jax.jit(apart)(stacked), expected, **rounding(build))


@pytest.mark.extended
def test_donation_and_one_compilation(build):
    init, update = build(optax.linear_schedule(1e-2, 1e-3, 10))
    once = optax.GradientTransformation(init, chex.assert_max_traces(update, 1))
    step = step_of(once, donate_argnums=(0, 1))
    params = tree(0)
    state = jax.jit(init)(params)
    for seed in range(5):
        old = jax.tree.leaves((params, state))
        params, state = step(params, state, tree(seed + 1))
        assert all(leaf.is_deleted() for leaf in old if leaf.ndim > 1)


@pytest.mark.quick_first_case
def test_a_second_step_outside_of_jit_compiles_nothing(build, caplog):
    optimizer, params = build(1e-2), tree(0)
    _, state = optimizer.update(tree(1), optimizer.init(params), params)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        optimizer.update(tree(1), state, params)
        assert "XLA compilation" not in caplog.text
        jax.jit(lambda x: x + 1)(1.0)
    assert "XLA compilation" in caplog.text


@pytest.mark.parametrize("static", [(), ("ns_steps", "momentum")])
def test_nor_does_one_of_an_optimizer_that_is_made_anew(static, caplog):
    """`inject_hyperparams` makes one at every step."""
    optimizer = optax.inject_hyperparams(orscale, static_args=static)(1e-2)
    params, gradients = ({"w": tree(seed)["w"]} for seed in (0, 1))
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    _, state = optimizer.update(gradients, state, params)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        optimizer.update(gradients, state, params)
    assert "XLA compilation" not in caplog.text


@pytest.mark.quick_first_case
@pytest.mark.compiled
def test_no_host_callbacks_and_no_float64_in_the_program(build):
    optimizer = build(1e-2)
    state = optimizer.init(tree(0))
    text = jax.jit(optimizer.update).lower(tree(1), state, tree(0)).as_text()
    assert "callback" not in text and "f64" not in text


@pytest.mark.quick_first_case
def test_low_precision_parameters_are_updated_in_float32(build):
    """D = λW + sQ is not rounded on the way."""
    exact = tree(0, jnp.bfloat16)
    params = jax.tree.map(lambda p: p.astype(jnp.float32), exact)
    optimizer = build(1e-2)
    low, _ = optimizer.update(tree(1), optimizer.init(exact), exact)
    high, _ = optimizer.update(tree(1), optimizer.init(params), params)
    assert_trees_close(low["w"], high["w"], rtol=1e-6, **rounding(build))
    assert_trees_close(low["stack"], high["stack"], rtol=1e-6, **rounding(build))


@pytest.mark.extended
def test_schedules_are_followed(build):
    rates, decays = [1e-2, 3e-2], [0.1, 0.3]

    def piecewise(values):
        return lambda count: jnp.asarray(values)[count]

    scheduled = build(piecewise(rates), weight_decay=piecewise(decays))
    params, state = tree(0), build(1.0).init(tree(0))
    for step, (rate, decay) in enumerate(zip(rates, decays, strict=True), 1):
        optimizer = build(rate, weight_decay=decay)
        updates, state = optimizer.update(tree(step), state, params)
        params = optax.apply_updates(params, updates)
    assert_trees_close(train(scheduled, 2)[0], params, **rounding(build))


@pytest.mark.extended
@pytest.mark.parametrize("name", FAST)
def test_inject_hyperparams_without_static_args(name):
    factory = OPTIMIZERS[name]
    params, grads = ({key: tree(seed)[key] for key in ("w", "b")} for seed in (0, 1))
    injected = optax.inject_hyperparams(factory)(learning_rate=1e-3, ns_steps=5)
    state = jax.jit(injected.init)(params)
    update = jax.jit(chex.assert_max_traces(injected.update, 1))

    def assert_as(plain, *keys):
        expected, _ = plain.update(grads, plain.init(params), params)
        found, after = update(grads, state, params)
        assert signature(after) == signature(state)
        for key in keys:
            assert_trees_close(found[key], expected[key], **rounding(factory))

    assert_as(factory(1e-3), "w", "b")
    # Numeric hyperparameters may change without another compilation.
    state.hyperparams["learning_rate"] = jnp.float32(2e-3)
    state.hyperparams["ns_steps"] = jnp.asarray(7)
    state.hyperparams["weight_decay"] = jnp.float32(0.3)
    assert_as(factory(2e-3, ns_steps=7, weight_decay=0.3), "w")


LARGER = {"w": (24, 64), "v": (24, 64), "t": (64, 24), "s": (32, 32), "b": (16,)}
WRAPPED = {
    "alone": lambda build: build(1e-3),
    "MultiSteps": lambda build: optax.MultiSteps(build(1e-3), 4),
    "partition": lambda build: optax.partition(
        {True: build(1e-3), False: optax.sgd(0.1)}, {name: name != "v" for name in LARGER}
    ),
    "masked": lambda build: optax.masked(
        build(1e-3), {name: name != "v" for name in LARGER}
    ),
}


def on_matrices(optimizer, platform):
    """How often a program has each operation on matrices, and its number of loops."""
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in LARGER.items()}
    state = jax.eval_shape(optimizer.init, params)
    traced = jax.jit(optimizer.update).trace(params, state, params)
    counts = collections.Counter()
    for line in traced.lower(lowering_platforms=(platform,)).as_text().splitlines():
        [operation] = re.findall(r"= \"?stablehlo\.(\w+)", line) or [None]
        shapes = re.findall(r"tensor<(\d+x\d\w+)>", line)
        # A scalar that is an array is broadcast, and one that is known a constant.
        known = operation in (None, "constant", "broadcast_in_dim")
        if operation == "while" or (shapes and not known):
            counts[operation, *sorted(set(shapes))] += 1
    return counts


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "name, where",
    [
        ("muon", "alone"),
        *((name, "alone") for name in OPTIMIZERS if name != "muon"),
        *(("orscale", where) for where in WRAPPED if where != "alone"),
    ],
)
def test_inject_hyperparams_changes_no_form_of_the_program(name, where):
    """It makes arrays of all defaults that are numbers; no form may depend on one."""
    build, wrap = OPTIMIZERS[name], WRAPPED[where]
    for platform in ("cpu", "cuda", "tpu"):
        found = on_matrices(wrap(optax.inject_hyperparams(build)), platform)
        expected = on_matrices(wrap(build), platform)
        assert found == expected
        assert sum(n for key, n in found.items() if key[0] == "dot_general") > 9


@pytest.mark.parametrize("argument", ["mu_dtype", "ns_dtype"])
def test_inject_hyperparams_mistakes_a_scalar_type_for_a_schedule(argument):
    params = {"w": tree(0)["w"]}
    injected = optax.inject_hyperparams(orscale)
    with pytest.raises(ValueError, match=f'{argument}=Array.*inject_hyper.*"bfloat16"'):
        injected(1e-3, **{argument: jnp.bfloat16}).init(params)
    state = injected(1e-3, mu_dtype="bfloat16").init(params)
    assert optax.tree.get(state, "trace")["w"].dtype == jnp.bfloat16


@pytest.mark.extended
def test_a_clip_before_it_and_extra_arguments_that_it_ignores(build):
    inner = build(1e-2)
    assert isinstance(inner, optax.GradientTransformationExtraArgs)
    chain = optax.chain(optax.clip_by_global_norm(1.0), inner)
    params, grads = tree(0), tree(1)
    found, _ = chain.update(
        grads, chain.init(params), params, value=1.0, unknown=None, measured=1.0
    )
    norm = optax.tree.norm(grads)
    clipped = jax.tree.map(lambda g: g / norm, grads)
    expected, _ = inner.update(clipped, inner.init(params), params)
    assert_trees_close(found, expected, **rounding(build))


def test_state_is_made_of_arrays_only_and_maps(build):
    optimizer = build(1e-2)
    state = optimizer.init(tree(0))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    mapped = optax.tree.map_params(optimizer, lambda leaf: leaf + 1, state)
    momenta = optax.tree.get_all_with_path(mapped, "trace")
    assert momenta and all((momentum["w"] == 1).all() for _, momentum in momenta)
    abstract = jax.eval_shape(optimizer.init, jax.eval_shape(lambda: tree(0)))
    assert signature(abstract) == signature(state)


@pytest.mark.extended
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_decay_mask_of_the_matrices(name):
    """It makes the same program as a mask that lists them."""

    def program(mask):
        optimizer = OPTIMIZERS[name](
            1e-2, weight_decay_mask=mask, weight_dimension_numbers=NUMBERS
        )
        state = jax.eval_shape(optimizer.init, tree(0))
        return str(jax.make_jaxpr(optimizer.update)(tree(1), state, tree(0)))

    assert program("matrices") == program({"w": True, "stack": True, "b": False})
    assert name not in FAST or program("matrices") != program(None)
    for wrong in ("matrix", "all", ""):
        with pytest.raises(
            ValueError, match=rf"weight_decay_mask='{wrong}' .*pass 'matrices', a tree"
        ):
            OPTIMIZERS[name](1e-2, weight_decay_mask=wrong)


def test_tools_that_look_for_parameters_in_the_state():
    """They call init with a placeholder, for which users' callables need not be made."""
    optimizer = orscale(
        1e-2,
        weight_decay_mask=lambda params: {name: params[name].ndim > 1 for name in SHAPES},
        weight_dimension_numbers=lambda params: {name: NUMBERS[name] for name in params},
    )

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    def found(change, field, **arguments):
        state = optimizer.init(tree(0))
        mapped = optax.tree.map_params(
            optimizer, change, state, tree(0), is_leaf=is_masked, **arguments
        )
        return optax.tree.get_all_with_path(mapped, field)[0][1]

    def shapes(leaf, param):
        return leaf if is_masked(leaf) else (leaf.shape, param.shape)

    assert found(shapes, "trace")["stack"] == (SHAPES["stack"], SHAPES["stack"])
    # Arrays per matrix do not have parameters' shapes, and no parameter's spec fits them.
    assert found(shapes, "numbers")["stack"].shape == (7, *SHAPES["stack"][:1])
    others = {"transform_non_params": lambda _: "replicated"}
    assert found(lambda *_: "sharded", "numbers", **others) == "replicated"


@pytest.mark.quick_first_case
def test_none_leaves_stay_none(build):
    params = tree(0) | {"absent": None}
    numbers = NUMBERS | {"absent": None}
    optimizer = build(1e-2, weight_dimension_numbers=numbers)
    updates, _ = optimizer.update(
        tree(1) | {"absent": None}, optimizer.init(params), params
    )
    assert updates["absent"] is None


@pytest.mark.extended
def test_sharding_types_are_kept(build):
    specs = {"w": P("a", "b"), "stack": P("a", None, "b"), "b": P("b")}
    shapes = {"w": (8, 12), "stack": (4, 12, 8), "b": (4,)}
    optimizer = build(1e-2)
    alone = [tree(seed, shapes=shapes) for seed in (0, 1)]
    expected, _ = optimizer.update(alone[1], optimizer.init(alone[0]), alone[0])
    with jax.set_mesh(mesh := mesh_of({"a": 2, "b": 4}, EXPLICIT)):
        params, grads = (placed(values, mesh, specs) for values in alone)
        updates, state, after = first_update(optimizer, params, grads)
    assert types_of(updates) == types_of(grads)
    assert types_of(after) == types_of(state)
    for _, numbers in optax.tree.get_all_with_path(after, "numbers"):
        assert jax.typeof(numbers["stack"]).sharding.spec == P(None, "a")
    assert_trees_close(jax.tree.map(np.asarray, updates), expected, **rounding(build))


# What docs/troubleshooting.md promises of wrappers, bounds and messages.

RATE, LIMIT = 1e-2, 50.0


def scheduled(build, **arguments):
    return build(
        optax.linear_schedule(RATE, 0.0, 10),
        weight_dimension_numbers=NUMBERS,
        **arguments,
    )


@pytest.mark.quick_first_case
@pytest.mark.parametrize("spike", [1e3, np.nan])
@pytest.mark.parametrize("build", [orscale, muon, family.normuon, family.hyperball])
def test_a_skipped_step_leaves_no_trace(build, spike):
    """Also of a first step, which would set c."""
    inner = scheduled(build)
    optimizer = optax.conditionally_mask(
        inner, lambda step, *, norm, **_: norm <= LIMIT, forward_extra_args=True
    )

    @jax.jit
    def step(params, state, grads):
        norm = optax.tree.norm(grads)
        updates, state = optimizer.update(grads, state, params, norm=norm)
        return optax.apply_updates(params, updates), state

    params, state = tree(0), optimizer.init(tree(0))
    plain = tree(0), inner.init(tree(0))
    for number in range(4):
        if number in (0, 2):
            bad = jax.tree.map(lambda g: spike * g, tree(9))
            after, skipped = step(params, state, bad)
            assert_same_bits((after, skipped.inner_state), (params, state.inner_state))
            state = skipped
        params, state = step(params, state, tree(number + 1))
        plain = step_of(inner)(*plain, tree(number + 1))
        assert_close((params, state.inner_state), plain, atol=1e-7)
    assert state.step == 6


@pytest.mark.extended
def test_the_step_of_a_matrix_is_bounded():
    optimizer = scheduled(muon, weight_decay=0.0, momentum=0.5)
    params, state = tree(0), scheduled(muon).init(tree(0))
    for seed, scale in enumerate((1e-6, 1.0, 1e6)):
        grads = jax.tree.map(lambda g, scale=scale: scale * g, tree(seed))
        updates, state = optimizer.update(grads, state, params)
        for name in ("w", "stack"):
            rms = np.sqrt(np.mean(np.square(updates[name])))
            assert rms < 0.2 * RATE * 1.15  # Newton–Schulz is not exact.


@pytest.mark.parametrize("b2, bound", [(0.95, 1.16), (0.999, 7.3)])
def test_the_step_of_an_entry_of_adamw_is_bounded(b2, bound):
    """The worst gradients: g grows so that m is parallel to v in Cauchy–Schwarz."""
    b1, steps = 0.9, 10_000 if b2 > 0.99 else 500
    limit = (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))
    assert round(limit, 2 if b2 < 0.99 else 1) == bound
    worst = jnp.float32((b1 / b2) ** np.arange(60)[::-1])
    grads = jnp.concatenate([jnp.full(steps, worst[0]), worst])
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=0.0)

    def step(state, gradient):
        update, state = adam.update(gradient, state)
        return state, jnp.abs(update)

    _, updates = jax.lax.scan(step, adam.init(jnp.float32(0)), grads)
    assert 0.8 * limit < updates[steps:].max() <= limit * (1 + 1e-3)


@pytest.mark.parametrize("name", ["learning_rate", "adam_learning_rate"])
def test_a_negative_rate_is_told_how_to_ascend(name):
    rates = {"learning_rate": 0.1, name: -0.1}
    with pytest.raises(ValueError, match=rf"{name}=-0\.1 .* optax\.scale\(-1\)"):
        orscale(**rates)


def test_a_decay_of_adamw_that_the_mask_excludes_is_refused():
    for decay in (0.1, jnp.float32(0.1), lambda count: 0.0):
        with pytest.raises(ValueError, match=r"adam_weight_decay=.* has no effect"):
            muon(0.1, weight_decay_mask="matrices", adam_weight_decay=decay)
    muon(0.1, weight_decay_mask="matrices", adam_weight_decay=0.0)
