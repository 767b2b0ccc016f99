"""Properties that hold for every input, on inputs that hypothesis draws."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import Phase, given, settings, strategies as st
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    family,
    muon,
    orscale,
    orthogonalize,
    polar_factor,
    scale_by_calibrated_trust_ratio,
)
from tests.runs import VISION, assert_same_bits

OPTIMIZERS = {
    "orscale": functools.partial(orscale, 1e-2),
    "vision": functools.partial(orscale, 1e-2, **VISION),
    "muon": functools.partial(muon, 1e-2),
    "full_rank": functools.partial(orscale, 1e-2, anchor="full_rank"),
    "largest": functools.partial(orscale, 1e-2, anchor="largest", anchor_steps=2),
    "hyperball": functools.partial(family.hyperball, 1e-2),
    "normuon": functools.partial(family.normuon, 1e-2),
}
RATIOS = ("calibration", "raw_trust_ratio", "trust_ratio")
SEEDS = st.integers(0, 2**32 - 1)


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def orthogonal(seed, size):
    return np.linalg.qr(normal(seed, (size, size), np.float64))[0]


def readout(state, name):
    found = optax.tree.get_all_with_path(state, name)
    return found[0][1] if found else {}


stage_update = jax.jit(orthogonalize(weight_dimension_numbers=Dims(1, 2)).update)
polar_64 = jax.jit(functools.partial(polar_factor, dtype=jnp.float64))


@pytest.mark.extended
@settings(max_examples=50)
@given(SEEDS, st.lists(st.integers(-99, 99), min_size=3, max_size=3))
def test_the_scale_of_each_matrix_does_not_matter(seed, exponents):
    """2**±99 is 1.6e∓30. Powers of two: the same result to the bit."""
    x = normal(seed, (3, 4, 6))
    scales = np.float32(2.0) ** np.asarray(exponents, np.float32)
    expected, _ = stage_update(x, optax.EmptyState())
    found, _ = stage_update(x * scales[:, None, None], optax.EmptyState())
    assert_same_bits(found, expected)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=(1, 2)), 2, rtol=0.3)


@pytest.mark.extended
@settings(max_examples=30)
@given(SEEDS, st.sampled_from([(4, 6), (6, 4), (5, 5)]))
def test_orthogonal_transforms_and_transposition_pass_through(seed, shape):
    x = normal(seed, shape, np.float64)
    u, v = orthogonal(seed + 1, shape[0]), orthogonal(seed + 2, shape[1])
    with jax.enable_x64(True):
        q = polar_64(x)
        np.testing.assert_allclose(polar_64(u @ x @ v.T), u @ q @ v.T, atol=1e-11)
        np.testing.assert_allclose(polar_64(x.T), q.T, atol=1e-11)
        np.testing.assert_allclose(polar_64(-x), -q, atol=1e-11)


# Name: batch axes of the leaf, and the leaf's shape; its matrices are (4, 5).
LAYOUTS = {
    "first": ((0,), (4, 4, 5), Dims(1, 2)),
    "middle": ((1,), (4, 4, 5), Dims(0, 2)),
    "last": ((2,), (4, 5, 4), Dims(0, 1)),
    "two": ((0, 2), (2, 4, 2, 5), Dims(1, 3)),
}


def lay_out(matrices, layout):
    """Four matrices (4, 4, 5) as one leaf of the layout."""
    batch, shape, _ = LAYOUTS[layout]
    stacked = matrices.reshape([shape[axis] for axis in batch] + [4, 5])
    return np.moveaxis(stacked, range(len(batch)), batch)


def take_apart(leaf, layout):
    """The inverse of :func:`lay_out`."""
    batch, _, _ = LAYOUTS[layout]
    return np.moveaxis(np.asarray(leaf), batch, range(len(batch))).reshape(4, 4, 5)


@functools.cache
def compiled(name, layout):
    optimizer = OPTIMIZERS[name](weight_dimension_numbers=LAYOUTS[layout][2])
    return optimizer, jax.jit(optimizer.update)


def trajectory(name, layout, weights, gradients):
    """Updates (4, 4, 5) and ratios (4,) of every step, by name."""
    optimizer, update = compiled(name, layout)
    params = jnp.asarray(lay_out(weights, layout))
    state, seen = optimizer.init(params), []
    for gradient in gradients:
        updates, state = update(jnp.asarray(lay_out(gradient, layout)), state, params)
        params = optax.apply_updates(params, updates)
        step = {"updates": take_apart(updates, layout)}
        if optax.tree.get_all_with_path(state, "trust_ratio"):
            step |= {ratio: np.ravel(readout(state, ratio)) for ratio in RATIOS}
        seen.append(step)
    return seen


ENTRIES = st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e30, -1e38, 1e-30, 1e-42, 1.0])


class TestStacks:
    @pytest.mark.extended
    @settings(max_examples=60)
    @given(
        st.sampled_from(sorted(OPTIMIZERS)),
        st.sampled_from(sorted(LAYOUTS)),
        SEEDS,
        st.integers(0, 3),
        st.lists(ENTRIES, min_size=4, max_size=4),
        st.booleans(),
    )
    def test_no_matrix_sees_another(self, name, layout, seed, index, values, whole):
        """To the bit, for four steps, whatever one matrix's gradients are."""
        weights, gradients = normal(seed, (4, 4, 5)), normal(seed + 1, (4, 4, 4, 5))
        expected = trajectory(name, layout, weights, gradients)
        for step, value in enumerate(values):
            gradients[(step, index) if whole else (step, index, 1, 2)] = value
        found = trajectory(name, layout, weights, gradients)
        others = [i for i in range(4) if i != index]
        for step, by_name in enumerate(found):
            for key, value in by_name.items():
                assert_same_bits(value[others], expected[step][key][others])
        if not np.isfinite(values).all():
            assert np.isnan(found[-1]["updates"][index]).all()

    @pytest.mark.extended
    @settings(max_examples=25)
    @given(
        st.sampled_from(sorted(OPTIMIZERS)),
        st.sampled_from(sorted(LAYOUTS)),
        SEEDS,
        st.permutations(range(4)),
    )
    def test_the_order_in_a_stack_does_not_matter(self, name, layout, seed, order):
        """To the bit."""
        weights, gradients = normal(seed, (4, 4, 5)), normal(seed + 1, (4, 4, 4, 5))
        expected = trajectory(name, layout, weights, gradients)
        found = trajectory(name, layout, weights[order], gradients[:, order])
        for step, by_name in enumerate(found):
            for key, value in by_name.items():
                assert_same_bits(value, expected[step][key][order])


FIELDS = {"embedding": (5, 4), "kernel": (4, 3), "bias": (3,), "wide": (3, 4)}


def fields(seed):
    return {
        name: jnp.asarray(normal(seed + i, shape))
        for i, (name, shape) in enumerate(FIELDS.items())
    }


def two_steps(build, pack):
    """Updates and state of the second step on a container of :func:`fields`."""
    optimizer = build()
    params = pack(fields(0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for seed in (10, 20):
        updates, state = update(pack(fields(seed)), state, params)
        params = optax.apply_updates(params, updates)
    return params, updates, state


@functools.cache
def as_a_dict():
    return two_steps(OPTIMIZERS["orscale"], dict)


@settings(max_examples=6)
@given(st.permutations(sorted(FIELDS)), st.booleans())
def test_names_and_order_of_leaves_do_not_matter(order, rename):
    """To the bit. JAX sorts a dict's keys, so only new names change its order."""
    prefix = {field: f"{i}_{field}" if rename else field for i, field in enumerate(order)}

    def pack(tree):
        return {prefix[field]: tree[field] for field in order}

    _, found, _ = two_steps(OPTIMIZERS["orscale"], pack)
    _, expected, _ = as_a_dict()
    for field in FIELDS:
        assert_same_bits(found[prefix[field]], expected[field])


NAMES = tuple(FIELDS)
Tuple = NamedTuple("Tuple", [(name, Any) for name in NAMES])


STATIC = flax.struct.field(pytree_node=False, default="static")


def annotated(*bases, **more):
    fields = dict.fromkeys(NAMES, Any) | dict.fromkeys(more, Any)
    return type("Fields", bases, {"__annotations__": fields} | more)


Registered = jax.tree_util.register_dataclass(dataclasses.dataclass(annotated()))
Struct, Chex = flax.struct.dataclass(annotated(name=STATIC)), chex.dataclass(annotated())


class Module(annotated(eqx.Module)):
    activation: Any = jax.nn.relu

    def __call__(self, x):
        raise TypeError("The parameters are a tree, and not a function from one.")


class Network(nnx.Module):
    def __init__(self, tree):
        for name, leaf in tree.items():
            setattr(self, name, nnx.Param(leaf))


def equinox_module(tree):
    return eqx.filter(Module(**tree), eqx.is_inexact_array)


def by_attribute(container):
    return {name: getattr(container, name) for name in FIELDS}


def merged(dicts):
    return functools.reduce(lambda a, b: a | b, dicts)


def one_each(kind):
    return lambda tree: kind({name: leaf} for name, leaf in tree.items())


# Name: from a dict to the container, and back.
CONTAINERS = {
    "FrozenDict": (flax.core.freeze, flax.core.unfreeze),
    "nested": (lambda tree: {"a": {"b": tree}}, lambda tree: tree["a"]["b"]),
    **{
        kind.__name__ + str(i): (lambda tree, kind=kind: kind(**tree), by_attribute)
        for i, kind in enumerate((Tuple, Registered, Struct, Chex))
    },
    "equinox": (equinox_module, by_attribute),
    "nnx.State": (
        lambda tree: nnx.state(Network(tree), nnx.Param),
        lambda state: {name: state[name][...] for name in FIELDS},
    ),
    "list": (one_each(list), merged),
    "tuple": (one_each(tuple), merged),
}


class TestContainers:
    @pytest.mark.quick_first_case
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_the_container_does_not_matter(self, container):
        """To the bit, and updates come back in the container of the gradients."""
        pack, unpack = CONTAINERS[container]
        params, updates, state = two_steps(OPTIMIZERS["orscale"], pack)
        expected_params, expected, expected_state = as_a_dict()
        assert jax.tree.structure(updates) == jax.tree.structure(pack(fields(0)))
        for field in FIELDS:
            assert_same_bits(unpack(updates)[field], expected[field])
            assert_same_bits(unpack(params)[field], expected_params[field])
        for ratio in RATIOS:
            found = sorted(map(float, jax.tree.leaves(readout(state, ratio))))
            assert found == sorted(
                map(float, jax.tree.leaves(readout(expected_state, ratio)))
            )
            assert len(found) == 2  # kernel and wide: the embedding takes AdamW.


FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]


def draw_dtypes(kinds):
    return st.fixed_dictionaries({name: st.sampled_from(kinds) for name in FIELDS})


def abstract(dtypes):
    return {
        name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in FIELDS.items()
    }


def signature(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_never_change(name, double):
    """Each parameter and gradient has its own; updates have the dtypes of AdamW's."""
    kinds = FLOATS + [jnp.float64] * double

    # Shrinking a failure would take minutes, as every example is traced.
    @settings(max_examples=12, phases=[Phase.generate])
    @given(draw_dtypes(kinds), draw_dtypes(kinds), st.sampled_from([None, *kinds]))
    def check(params_dtypes, grads_dtypes, mu_dtype):
        optimizer = OPTIMIZERS[name](mu_dtype=mu_dtype)
        params, grads = abstract(params_dtypes), abstract(grads_dtypes)
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, grads, state, params)
        assert signature(after) == signature(state)
        adamw = optax.adamw(1e-3, mu_dtype=mu_dtype)
        theirs = jax.eval_shape(adamw.init, params)
        theirs, _ = jax.eval_shape(adamw.update, grads, theirs, params)
        assert signature(updates) == signature(theirs)
        for field in ("kernel", "wide"):
            momentum = readout(state, "trace")[field]
            assert momentum.dtype == (mu_dtype or params_dtypes[field])
            for ratio in filter(None, (readout(state, name) for name in RATIOS)):
                wide = jnp.promote_types(params_dtypes[field], jnp.float32)
                assert ratio[field].dtype == wide

    with jax.enable_x64(double):
        check()


@functools.partial(jax.jit, static_argnames="calibrate")
def ratio_step(direction, weight, state, r_min, r_max, eps, calibrate):
    """One step of the stage; its numbers are traced, so that it compiles once."""
    stage = scale_by_calibrated_trust_ratio(
        calibrate=calibrate,
        r_min=r_min,
        r_max=r_max,
        eps=eps,
        weight_dimension_numbers=Dims(1, 2),
    )
    state = stage.init(weight) if state is None else state
    return stage.update(direction, state, weight)


def norms(stack):
    with np.errstate(all="ignore"):
        return np.sqrt(np.square(stack).sum((1, 2)))


NUMBERS = "0 1e-42 1e-38 1e-30 1e-20 1e-6 1 7 1e6 1e18 1e19 1e20 3e38 inf -inf nan"
WILD = st.sampled_from([*map(float, NUMBERS.split())])
WILD_STEPS = st.lists(st.lists(WILD, min_size=6, max_size=6), min_size=5, max_size=5)
BOUNDS = st.floats(allow_nan=False, allow_subnormal=False, width=32) | st.sampled_from(
    [0.0, 0.1, 1.0, 5.0]
)


class TestTrustRatio:
    def steps(self, seed, wild, calibrate, r_min, r_max, eps):
        """(direction, weight, state) of every step: three matrices, of six scales."""
        state = None
        for step, scales in enumerate(np.asarray(wild, np.float32)):
            with np.errstate(all="ignore"):
                direction, weight = normal(seed + step, (2, 3, 2, 2)) * scales.reshape(
                    2, 3, 1, 1
                )
            numbers = (np.float32(x) for x in (r_min, r_max, eps))
            updates, state = ratio_step(direction, weight, state, *numbers, calibrate)
            assert updates.shape == direction.shape
            yield direction, weight, state

    @pytest.mark.extended
    @settings(max_examples=100)
    @given(
        SEEDS,
        WILD_STEPS,
        st.booleans(),
        st.tuples(BOUNDS, BOUNDS).map(sorted),
        st.sampled_from([0.0, 1e-6, 1.0]),
    )
    def test_it_is_clipped_or_nan(self, seed, wild, calibrate, bounds, eps):
        low, high = (np.float32(bound) for bound in bounds)
        for _, _, state in self.steps(seed, wild, calibrate, low, high, eps):
            ratio, raw = np.asarray(state.trust_ratio), np.asarray(state.raw_trust_ratio)
            assert (np.isnan(ratio) | ((low <= ratio) & (ratio <= high))).all()
            np.testing.assert_array_equal(np.isnan(ratio), np.isnan(raw))

    @pytest.mark.extended
    @settings(max_examples=100)
    @given(SEEDS, WILD_STEPS, st.sampled_from([0.0, 1e-6, 1.0]))
    def test_c_is_set_once(self, seed, wild, eps):
        """From 0 to a number or inf, and never again, to the bit."""
        before = np.zeros(3, np.float32)
        for direction, weight, state in self.steps(seed, wild, True, 0.1, 5.0, eps):
            c = np.array(state.calibration)
            assert (c >= 0).all()
            np.testing.assert_array_equal(c[before > 0], before[before > 0])
            new = (before == 0) & (c > 0)
            d, w = norms(direction), norms(weight)
            assert np.isfinite(d[new]).all() and (d[new] > 0).all()
            assert np.isfinite(w[new]).all()
            # Away from under- and overflow, c does come with the first direction.
            usual = (d > 1e-15) & (d < 1e15) & (w > 1e-15) & (w < 1e15)
            assert (c[usual] > 0).all()
            new &= usual
            np.testing.assert_allclose(
                c[new], w[new] / (d[new] + np.float32(eps)), rtol=1e-5
            )
            before = c
