"""Every relative of OrScale against the float64 oracle, and what it promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import family, muon, orscale
from tests import leaves, oracle
from tests.everything import FAMILY
from tests.runs import Oracles, readout, run

RATE, STEPS = 0.01, 25
# Optimizer, and the arguments of the oracle's matrices.
CASES = {
    "muon": (muon, {"adaptive": False}),
    "hyperball": (family.hyperball, {"matrix": oracle.Sphere}),
    "normuon": (family.normuon, {"adaptive": False, "after_q": oracle.NeuronRMS}),
    "orscale_on_normuon": (family.orscale_on_normuon, {"after_q": oracle.NeuronRMS}),
    "aurora": (family.aurora, {"adaptive": False, "polar": oracle.balanced_polar}),
    "largest": (
        functools.partial(orscale, anchor="largest", anchor_steps=8),
        {"anchor": "largest", "anchor_steps": 8},
    ),
}
KEPT = {"after_q": lambda: oracle.NeuronRMS(0.5, 0.1, kept=True)}
WITH_OTHER_ARGUMENTS = {
    "normuon_kept": (
        functools.partial(family.normuon, norm="kept", b2=0.5, neuron_eps=0.1),
        KEPT | {"adaptive": False},
    ),
    "orscale_on_normuon_kept": (
        functools.partial(family.orscale_on_normuon, norm="kept", b2=0.5, neuron_eps=0.1),
        KEPT,
    ),
    "aurora_of_three": (
        functools.partial(family.aurora, pp_iterations=3, pp_beta=0.25),
        {"adaptive": False, "polar": lambda x: oracle.balanced_polar(x, 3, 0.25)},
    ),
}


def build(factory, numbers=leaves.DIMENSIONS):
    return factory(RATE, ns_dtype=jnp.float32, weight_dimension_numbers=numbers)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "name",
    [*CASES, *(pytest.param(n, marks=pytest.mark.slow) for n in WITH_OTHER_ARGUMENTS)],
)
def test_25_steps_against_float64_numpy(name, jit):
    factory, by_hand = (CASES | WITH_OTHER_ARGUMENTS)[name]
    few = name == "muon" or jit is not jax.jit
    tree, numbers = leaves.some(*(leaves.FEW if few else leaves.SHAPES))
    params = tree(0, 0.05)
    expected = Oracles(params, **by_hand)
    seen = run(build(factory, numbers), params, STEPS, tree, jit)
    for step, (_, state) in enumerate(seen):
        expected.step(tree(step + 1), RATE)
        if "anchor" in by_hand:
            ratios = readout(state, "trust_ratio")
            for leaf, matrices in expected.matrices.items():
                by_matrix = [matrix.clipped for matrix in matrices]
                np.testing.assert_allclose(np.ravel(ratios[leaf]), by_matrix, rtol=1e-5)
    expected.assert_close(seen[-1][0], 1e-5)


def test_every_relative_is_tested():
    assert {*FAMILY} <= {*CASES}


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (family.normuon, {"b2": 1.0}, r"b2=1.0 is not valid: pass a number in \[0, 1\)"),
        (family.normuon, {"neuron_eps": -1}, "neuron_eps=-1 is not valid"),
        (family.normuon, {"norm": "q"}, "norm='q' .* pass 'full_rank' or 'kept'"),
        (family.orscale_on_normuon, {"b2": 1.0}, "b2=1.0 is not valid"),
        (family.orscale_on_normuon, {"neuron_eps": -1}, "neuron_eps=-1 is not valid"),
        (family.orscale_on_normuon, {"norm": "q"}, "norm='q' is not valid"),
        (family.aurora, {"pp_iterations": 0}, "pp_iterations=0 .* pass a whole number"),
        (family.aurora, {"pp_iterations": 1.5}, "pp_iterations=1.5 is not valid"),
        (family.aurora, {"pp_beta": -1}, "pp_beta=-1 is not valid"),
        (orscale, {"anchor": "last"}, "anchor='last' is not valid: pass 'first' or"),
        (orscale, {"anchor_steps": 0}, "anchor_steps=0 is not valid"),
    ],
)
def test_bad_arguments(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(1e-3, **arguments)


class TestNeurons:
    """NorMuon: what a neuron is, and which norms come out."""

    def test_neurons_are_the_output_axes(self):
        """A query of (embed, heads, head size) has heads · head size neurons."""
        state = build(family.normuon).init(leaves.random_tree(0))
        shapes = jax.tree.map(jnp.shape, readout(state, "neuron_mean_square"))
        expected = {
            "convolution": (8,), "query": (3, 5), "out": (12,), "transposed": (16,),
            "experts": (2, 3, 6), "fused": (30,), "equal_rows": (2, 3, 8),
            "fused_rows": (2, 2, 6),
        }  # fmt: skip
        assert {name: shapes[name] for name in expected} == expected

    @pytest.mark.extended
    @pytest.mark.parametrize(
        "make",
        [family.normuon, functools.partial(family.normuon, neuron_eps=0.0)],
    )
    def test_zeros_stay_zeros(self, make):
        optimizer = make(0.1, weight_decay=0.0)
        grads = {"w": jnp.zeros((4, 3)), "part": jnp.eye(4, 3).at[0].set(0)}
        with jax.debug_nans(True):
            updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
        assert not updates["w"].any() and not updates["part"][0].any()
        assert updates["part"][1:].any(axis=1).tolist() == [True, True, False]

    @pytest.mark.extended
    @pytest.mark.parametrize("norm, expected", [("full_rank", 2.0), ("kept", 1.0)])
    def test_full_rank_norm_of_a_q_of_low_rank(self, norm, expected):
        grads = {"w": jnp.outer(jnp.arange(1.0, 9), jnp.arange(1.0, 5))}
        given = {"weight_decay": 0.0, "consistent_rms": None, "ns_steps": 10}
        optimizer = family.normuon(1.0, norm=norm, **given)
        updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
        assert np.linalg.norm(updates["w"]) == pytest.approx(expected, rel=1e-3)


class TestAurora:
    """A Q that is orthogonal and whose vectors on the longer side have one norm."""

    def q_of(self, grads, **arguments):
        """Q of leaves (*batch, m, n)."""
        optimizer = family.aurora(
            1.0,
            consistent_rms=None,
            weight_decay=0.0,
            ns_steps=10,
            ns_dtype=jnp.float32,
            weight_dimension_numbers=Dims(-2, -1),
            **arguments,
        )
        updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
        return jax.tree.map(lambda u: -np.asarray(u, np.float64), updates)

    @pytest.mark.extended
    def test_scales_of_gradients_vanish_and_zeros_stay(self):
        """A row of zeros, one that is zero beside the others, and a matrix of zeros."""
        w = jax.random.normal(jax.random.key(0), (8, 3)).at[0].set(0)
        tiny = w.at[0].set(1e-25)
        grads = {"w": w, "tiny": tiny, "zero": 0 * w, "large": 2.0**100 * w}
        with jax.debug_nans(True):
            q = self.q_of(grads)
        assert not q["w"][0].any() and not q["zero"].any()
        assert np.abs(q["tiny"][0]).max() < 1e-20
        np.testing.assert_array_equal(q["large"], q["w"])
        np.testing.assert_allclose(q["tiny"][1:], q["w"][1:], rtol=1e-5)

    @pytest.mark.parametrize("iterations", [1, 3])
    @pytest.mark.extended
    def test_traced_iterations(self, iterations):
        grads = {"w": jax.random.normal(jax.random.key(0), (6, 3))}
        found = self.q_of(grads, pp_iterations=jnp.asarray(iterations))["w"]
        expected = self.q_of(grads, pp_iterations=iterations)["w"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class TestHyperball:
    def test_norms_stay_over_1000_steps(self):
        params = {"w": 0.02 * jax.random.normal(jax.random.key(0), (2, 24, 16))}
        optimizer = family.hyperball(
            0.02, weight_dimension_numbers=Dims(1, 2), ns_steps=2
        )
        before = np.linalg.norm(np.asarray(params["w"], np.float64), axis=(1, 2))

        def step(carry, key):
            params, state = carry
            grads = {"w": jax.random.normal(key, (2, 24, 16))}
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params["w"]

        keys = jax.random.split(jax.random.key(1), 1000)
        _, seen = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        norms = np.linalg.norm(np.asarray(seen, np.float64), axis=(2, 3))
        assert np.abs(norms / before - 1).max() < 3e-6
        assert (np.linalg.norm(seen[-1] - params["w"], axis=(1, 2)) > before / 2).all()

    @pytest.mark.parametrize("rate", [0.0, 1e-3, 0.5])
    @pytest.mark.quick_first_case
    def test_the_angle_of_a_step(self, rate):
        """An update orthogonal to W turns it by arctan(η)."""
        optimizer = family.hyperball(rate)
        params, grads = {"w": jnp.diag(jnp.arange(3.0))}, {"w": jnp.eye(3, k=1)}
        changes, _ = optimizer.update(grads, optimizer.init(params), params)
        moved = optax.apply_updates(params, changes)["w"]
        cosine = jnp.vdot(moved, params["w"]) / jnp.vdot(params["w"], params["w"])
        assert float(cosine) == pytest.approx(np.cos(np.arctan(rate)), rel=1e-6)

    @pytest.mark.extended
    def test_a_matrix_without_update_stays_to_the_bit(self):
        params = {"w": jax.random.normal(jax.random.key(0), (3, 5, 4))}
        optimizer = family.hyperball(0.1, weight_dimension_numbers=Dims(1, 2))
        grads = {"w": params["w"].at[1].set(0)}
        state, elsewhere = optimizer.init(params), {"w": 3 * params["w"]}
        for weights in (params, elsewhere):
            updates, _ = optimizer.update(grads, state, weights)
            assert not updates["w"][1].any() and updates["w"][0].any()

    @pytest.mark.extended
    @pytest.mark.parametrize("w", [[[2.0]], [[2.0, 0.0], [0.0, 2.0]]])
    def test_a_step_to_zero_is_none(self, w):
        params, optimizer = {"w": jnp.array(w)}, family.hyperball(1.0)
        changes, _ = optimizer.update(params, optimizer.init(params), params)
        assert not changes["w"].any()

    @pytest.mark.extended
    def test_a_zero_matrix_is_refused(self):
        params = {"blocks": [{"out": jnp.ones((3, 2, 4)).at[1].set(0)}]}
        optimizer = family.hyperball(0.1, weight_dimension_numbers=Dims(1, 2))
        with pytest.raises(ValueError, match=r"'blocks.0.out' has a matrix that is zero"):
            optimizer.init(params)
        state = jax.jit(optimizer.init)(params)  # No value is known here.
        grads = jax.tree.map(jnp.ones_like, params)
        updates, _ = optimizer.update(grads, state, params)
        finite = jnp.isfinite(updates["blocks"][0]["out"]).all(axis=(1, 2))
        assert finite.tolist() == [True, False, True]

    @pytest.mark.extended
    def test_weights_put_elsewhere_return_to_their_norm(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        optimizer = family.hyperball(0.1)
        state, radius = optimizer.init(params), jnp.linalg.norm(params["w"])
        elsewhere = jax.tree.map(lambda w: 3 * w, params)
        updates, _ = optimizer.update(params, state, elsewhere)
        moved = optax.apply_updates(elsewhere, updates)["w"]
        assert float(jnp.linalg.norm(moved)) == pytest.approx(float(radius), rel=1e-6)


class TestAnchors:
    """On a first gradient of rank 1, after which gradients have full rank."""

    numbers = Dims(1, 2)

    @property
    def params(self):
        return {"w": 0.05 * jax.random.normal(jax.random.key(0), (3, 16, 9))}

    def gradients(self, step):
        full = jax.random.normal(jax.random.key(step), (3, 16, 9))
        low = jnp.ones((3, 16, 9))
        return {"w": low if step == 1 else 1e3 * full}

    def ratios(self, steps=6, **arguments):
        arguments = {"weight_dimension_numbers": self.numbers} | arguments
        optimizer = orscale(1e-5, ns_steps=10, ns_dtype=jnp.float32, **arguments)
        seen = run(optimizer, self.params, steps, self.gradients)
        return [readout(state, "trust_ratio")["w"] for _, state in seen], seen[-1][1]

    @pytest.mark.quick_first_case
    @pytest.mark.parametrize(
        "anchor, first, last", [("largest", 1, 1), ("first", 1, 1 / 3)]
    )
    def test_the_largest_returns_to_1_and_the_first_never_does(self, anchor, first, last):
        ratios, state = self.ratios(anchor=anchor, anchor_steps=4)
        np.testing.assert_allclose(ratios[0], first * np.ones(3), rtol=1e-4)
        np.testing.assert_allclose(ratios[-1], last * np.ones(3), rtol=0.1)
        count = 4 if anchor == "largest" else 1
        np.testing.assert_array_equal(readout(state, "anchor_count")["w"], [count] * 3)
