"""Every relative of OrScale against the float64 oracle, and what it promises."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers,
    convert_state,
    family,
    muon,
    orscale,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
)
from orscale_jax.transforms.matrices import on_matrices
from orscale_jax.transforms.relatives import (
    cautious_stage,
    initial_norm_stage,
    neuron_rms_stage,
    normalize_stage,
)
from orscale_jax.transforms.stages import decay_stage
from tests import leaves, oracle
from tests.runs import RELATIVES, Oracles, readout, run

RATE, STEPS = 0.01, 25
AURORA_AND_MUON = family.aurora, muon
NEURONS_ALONE = functools.partial(oracle.unit_vectors, order=["neurons"])
BOTH = functools.partial(oracle.unit_vectors, order=["inputs", "neurons"])
# Optimizer, and the arguments of the oracle's matrices.
CASES = {
    "muon_plus": (family.muon_plus, {"adaptive": False, "after_q": lambda: BOTH}),
    "hyperball": (family.hyperball, {"matrix": oracle.Sphere}),
    "normuon": (family.normuon, {"adaptive": False, "after_q": oracle.NeuronRMS}),
    "normuon_kept": (
        functools.partial(family.normuon, norm="kept", b2=0.5, eps=0.1),
        {"adaptive": False, "after_q": lambda: oracle.NeuronRMS(0.5, 0.1, kept=True)},
    ),
    "orscale_on_normuon": (family.orscale_on_normuon, {"after_q": oracle.NeuronRMS}),
    "orscale_on_normuon_kept": (
        functools.partial(family.orscale_on_normuon, norm="kept", b2=0.5, neuron_eps=0.1),
        {"after_q": lambda: oracle.NeuronRMS(0.5, 0.1, kept=True)},
    ),
    "muon_plus_neurons": (
        functools.partial(family.muon_plus, order="neurons"),
        {"adaptive": False, "after_q": lambda: NEURONS_ALONE},
    ),
    "aurora": (family.aurora, {"adaptive": False, "polar": oracle.balanced_polar}),
    "aurora_of_three": (
        functools.partial(family.aurora, pp_iterations=3, pp_beta=0.25),
        {"adaptive": False, "polar": lambda x: oracle.balanced_polar(x, 3, 0.25)},
    ),
    "cautious": (family.cautious, {"cautious": True}),
    "full_rank": (
        functools.partial(orscale, anchor="full_rank"),
        {"anchor": "full_rank"},
    ),
    "full_rank_without_s": (
        functools.partial(orscale, anchor="full_rank", consistent_rms=None),
        {"anchor": "full_rank", "rms": None},
    ),
    "largest": (
        functools.partial(orscale, anchor="largest", anchor_steps=8),
        {"anchor": "largest", "anchor_steps": 8},
    ),
}
SLOW = {
    "normuon_kept",
    "orscale_on_normuon_kept",
    "aurora_of_three",
    "muon_plus_neurons",
    "full_rank_without_s",
}


def neuron_rms(b2=0.95, eps=1e-8, norm="full_rank", numbers=None):
    """The stage of NorMuon alone."""
    return on_matrices(numbers, functools.partial(neuron_rms_stage, b2, eps, norm))


def initial_norm(learning_rate, numbers=None):
    """The stage of Hyperball alone."""
    return on_matrices(numbers, functools.partial(initial_norm_stage, learning_rate))


def build(factory, **arguments):
    given = {"ns_dtype": jnp.float32, "weight_dimension_numbers": leaves.DIMENSIONS}
    return factory(RATE, **(given | arguments))


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES],
)
def test_25_steps_against_float64_numpy(name):
    factory, by_hand = CASES[name]
    params = leaves.random_tree(0, 0.05)
    expected = Oracles(params, **by_hand)
    seen = run(build(factory), params, STEPS)
    for step, (_, state) in enumerate(seen):
        expected.step(leaves.random_tree(step + 1), RATE)
        for leaf, ratios in (
            readout(state, "trust_ratio").items() if "anchor" in by_hand else ()
        ):
            by_matrix = [matrix.clipped for matrix in expected.matrices.get(leaf, ())]
            np.testing.assert_allclose(np.ravel(ratios), by_matrix, rtol=1e-5)
    expected.assert_close(seen[-1][0], 1e-5)


def test_every_relative_is_tested():
    tested = {*CASES}
    for name in RELATIVES:
        assert name in tested or name.removesuffix("_anchor") in tested


@pytest.mark.parametrize("name", RELATIVES)
def test_arguments_are_orscales_and_their_own(name):
    parameters = inspect.signature(getattr(family, name)).parameters
    plain = inspect.signature(orscale).parameters
    own = {"b2", "eps", "norm", "order"}
    own |= {"pp_iterations", "pp_beta", "neuron_eps"}
    for key, parameter in parameters.items():
        assert parameter.kind == plain.get(key, parameter).kind
        assert key in own or parameter.default == plain[key].default
        if key not in plain:
            assert f"\n  {key}: " in inspect.getdoc(getattr(family, name))
    with pytest.raises(TypeError, match="unexpected keyword argument 'b3'"):
        getattr(family, name)(1e-3, b3=2)


def some(*names):
    """Parameters and gradients of a few leaves, with their dimension numbers."""
    numbers = {name: leaves.DIMENSIONS[name] for name in names}

    def tree(seed, scale=1.0):
        everything = leaves.random_tree(seed, scale)
        return {name: everything[name] for name in names}

    return tree, {"weight_dimension_numbers": numbers, "ns_dtype": jnp.float32}


def assert_same_run(found, expected, tolerance=0.0):
    for (weights, _), (others, _) in zip(found, expected, strict=True):
        for name, weight in weights.items():
            assert leaves.relative_error(weight, others[name]) <= tolerance, name


class TestLimits:
    """Each relative in the limit in which it is OrScale or Muon."""

    @pytest.mark.extended
    def test_one_direction_of_largest_is_the_papers_anchor(self):
        tree, given = some("tall", "experts", "grouped_query")
        arguments = {"anchor": "largest", "anchor_steps": 1} | given
        largest = run(orscale(0.1, **arguments), tree(0, 0.1), 10, tree)
        plain = run(orscale(0.1, **given), tree(0, 0.1), 10, tree)
        assert_same_run(largest, plain, 5e-7)  # Two programs, which round apart.
        for (_, found), (_, expected) in zip(largest, plain, strict=True):
            found, expected = (readout(s, "calibration") for s in (found, expected))
            chex.assert_trees_all_close(found, expected, rtol=1e-6)

    @pytest.mark.extended
    def test_no_decay_is_not_cautious(self):
        tree, given = some("tall", "experts")
        given["weight_decay"] = 0.0
        cautious = run(family.cautious(0.1, **given), tree(0), 3, tree)
        assert_same_run(cautious, run(orscale(0.1, **given), tree(0), 3, tree), 1e-7)


class TestNeurons:
    """NorMuon and Muon+: what a neuron is, and which norms come out."""

    @pytest.mark.extended
    def test_without_memory_all_neurons_have_one_norm(self):
        q = {"kernel": jax.random.normal(jax.random.key(0), (3, 8, 5))}
        stage = neuron_rms(0.0, numbers=Dims(1, 2))
        updates, _ = stage.update(q, stage.init(q))
        norms = np.linalg.norm(updates["kernel"], axis=1)
        np.testing.assert_allclose(norms, np.ones((3, 5)), rtol=1e-6)

    def test_neurons_are_the_output_axes(self):
        """A query of (embed, heads, head size) has heads · head size neurons."""
        params = leaves.random_tree(0)
        state = build(family.normuon).init(params)
        shapes = jax.tree.map(jnp.shape, readout(state, "neuron_mean_square"))
        assert shapes["convolution"] == (8,)
        assert shapes["query"] == (3, 5)
        assert shapes["out"] == (12,)
        assert shapes["transposed"] == (16,)
        assert shapes["experts"] == (2, 3, 6)
        assert shapes["fused"] == (30,)
        assert shapes["equal_rows"] == (2, 3, 8)
        assert shapes["fused_rows"] == (2, 2, 6)

    @pytest.mark.extended
    def test_a_weak_neuron_is_raised(self):
        q = jnp.array([[1.0, 0.01], [1.0, 0.01], [-1.0, 0.01]])
        stage = neuron_rms(0.9)
        updates, _ = stage.update({"w": q}, stage.init({"w": q}))
        np.testing.assert_allclose(jnp.abs(updates["w"]), 1 / np.sqrt(3), rtol=1e-4)

    @pytest.mark.extended
    @pytest.mark.parametrize(
        "stage",
        [
            neuron_rms(),
            neuron_rms(eps=0.0),
            on_matrices(
                None, functools.partial(normalize_stage, ["inputs", "neurons"], 1e-8)
            ),
        ],
    )
    def test_zeros_stay_zeros(self, stage):
        q = {"w": jnp.zeros((4, 3)), "part": jnp.eye(4, 3).at[0].set(0)}
        with jax.debug_nans(True):
            updates, _ = jax.jit(stage.update)(q, stage.init(q))
        assert not updates["w"].any() and not updates["part"][0].any()
        assert jnp.isfinite(updates["part"]).all()

    @pytest.mark.extended
    def test_full_rank_norm_of_a_q_of_low_rank(self):
        grads = {"w": jnp.outer(jnp.arange(1.0, 9), jnp.arange(1.0, 5))}
        for norm, expected in [("full_rank", 2.0), ("kept", 1.0)]:
            stage = optax.chain(orthogonalize(ns_steps=10), neuron_rms(norm=norm))
            updates, _ = stage.update(grads, stage.init(grads))
            assert np.linalg.norm(updates["w"]) == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"b2": 1.0}, r"b2=1.0 is not valid: pass a number in \[0, 1\)"),
            ({"eps": -1}, "eps=-1 is not valid"),
            ({"norm": "q"}, "norm='q' is not valid: pass 'full_rank' or 'kept'"),
        ],
    )
    def test_bad_arguments_of_normuon(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            family.normuon(1e-3, **arguments)
        if "eps" in arguments:
            arguments, message = {"neuron_eps": -1}, "neuron_eps=-1 is not valid"
        with pytest.raises(ValueError, match=message):
            family.orscale_on_normuon(1e-3, **arguments)

    @pytest.mark.extended
    def test_ratios_of_1_make_it_normuon(self):
        params, grads = leaves.random_tree(0, 0.05), leaves.random_tree(1)
        optimizers = (
            build(family.orscale_on_normuon, r_min=1, r_max=1), build(family.normuon)
        )  # fmt: skip
        (found, _), (expected, _) = (
            jax.jit(optimizer.update)(grads, optimizer.init(params), params)
            for optimizer in optimizers
        )
        chex.assert_trees_all_equal(found, expected)

    @pytest.mark.parametrize("order", [(), ("rows",), "row", (1,), None, 1])
    def test_bad_orders(self, order):
        with pytest.raises(ValueError, match=r"order=.*'?neurons'?.*inputs"):
            family.muon_plus(1e-3, order=order)


class TestAurora:
    """A Q that is orthogonal and whose vectors on the longer side have one norm."""

    def q_of(self, grads, **arguments):
        """Q of leaves (*batch, m, n)."""
        numbers = jax.tree.map(lambda x: Dims(x.ndim - 2, x.ndim - 1), grads)
        optimizer = family.aurora(
            1.0,
            consistent_rms=None,
            weight_decay=0.0,
            ns_steps=10,
            ns_dtype=jnp.float32,
            weight_dimension_numbers=numbers,
            **arguments,
        )
        updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
        return jax.tree.map(lambda u: -np.asarray(u, np.float64), updates)

    def test_norms_and_singular_values(self):
        grads = {}
        for m, n, *batch in [(40, 10), (10, 40), (40, 10, 3), (1, 7), (7, 1)]:
            scales = np.geomspace(0.1, 10, max(m, n))
            scales = scales.reshape((-1, 1) if m > n else (1, -1))
            drawn = np.random.default_rng(0).normal(size=(*batch, m, n)) * scales
            grads[f"{m} {n} {batch}"] = np.asarray(drawn, np.float32)
        for name, q in self.q_of(grads, pp_iterations=4).items():
            m, n = q.shape[-2:]
            values = np.linalg.svd(q, compute_uv=False)
            np.testing.assert_allclose(values, np.ones_like(values), rtol=1e-3)
            norms = np.linalg.norm(q, axis=-1 if m > n else -2)
            expected = np.sqrt(min(m, n) / max(m, n))
            np.testing.assert_allclose(norms, expected, rtol=0.05, err_msg=name)

    @pytest.mark.extended
    def test_a_square_matrix_takes_muons_step(self):
        tree, given = some("square", "bias")
        found, expected = (
            run(f(0.1, **given), tree(0), 3, tree) for f in AURORA_AND_MUON
        )
        assert_same_run(found, expected)

    @pytest.mark.extended
    def test_a_run_goes_on_as_muon_and_back(self):
        """The states have one structure."""
        tree, given = some("tall", "experts", "bias")
        aurora, plain = (factory(0.1, **given) for factory in AURORA_AND_MUON)
        [*_, (params, state)] = run(aurora, tree(0), 2, tree)
        chex.assert_trees_all_equal_structs(state, plain.init(params))
        chex.assert_trees_all_equal_shapes_and_dtypes(state, plain.init(params))
        _, state = plain.update(tree(3), state, params)
        updates, _ = aurora.update(tree(4), state, params)
        assert all(jnp.isfinite(leaf).all() for leaf in updates.values())

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

    @pytest.mark.extended
    def test_a_nan_stays_in_its_matrix(self):
        grads = {
            "w": jax.random.normal(jax.random.key(0), (2, 6, 3)).at[0, 0, 0].set(jnp.nan)
        }
        q = self.q_of(grads)["w"]
        assert np.isnan(q[0]).all() and np.isfinite(q[1]).all()

    @pytest.mark.parametrize("iterations", [1, 3])
    @pytest.mark.extended
    def test_traced_iterations(self, iterations):
        grads = {"w": jax.random.normal(jax.random.key(0), (6, 3))}
        found = self.q_of(grads, pp_iterations=jnp.asarray(iterations))["w"]
        expected = self.q_of(grads, pp_iterations=iterations)["w"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"pp_iterations": 0}, "pp_iterations=0 is not valid: pass a whole number"),
            ({"pp_iterations": 1.5}, "pp_iterations=1.5 is not valid"),
            ({"pp_beta": -1}, "pp_beta=-1 is not valid"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            family.aurora(1e-3, **arguments)

    def test_empty_leaves(self):
        shapes = {"a": (0, 4), "b": (4, 0), "c": (2, 0, 4), "d": (0, 3, 4)}
        q = self.q_of({name: np.ones(s, np.float32) for name, s in shapes.items()})
        assert {name: leaf.shape for name, leaf in q.items()} == shapes


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
        assert np.abs(norms / before - 1).max() < 1e-6
        assert (np.linalg.norm(seen[-1] - params["w"], axis=(1, 2)) > before / 2).all()

    @pytest.mark.parametrize("rate", [0.0, 1e-3, 0.5])
    @pytest.mark.quick_first_case
    def test_the_angle_of_a_step(self, rate):
        """An update orthogonal to W turns it by arctan(η)."""
        stage = initial_norm(optax.scale_by_learning_rate(rate))
        params, updates = {"w": jnp.diag(jnp.arange(3.0))}, {"w": jnp.eye(3, k=1)}
        changes, _ = stage.update(updates, stage.init(params), params)
        moved = optax.apply_updates(params, changes)["w"]
        cosine = jnp.vdot(moved, params["w"]) / jnp.vdot(params["w"], params["w"])
        assert float(cosine) == pytest.approx(np.cos(np.arctan(rate)), rel=1e-6)

    def test_a_matrix_without_update_stays_to_the_bit(self):
        params = {"w": jax.random.normal(jax.random.key(0), (3, 5, 4))}
        optimizer = family.hyperball(0.1, weight_dimension_numbers=Dims(1, 2))
        grads = {"w": params["w"].at[1].set(0)}
        state, elsewhere = optimizer.init(params), {"w": 3 * params["w"]}
        for weights in (params, elsewhere):
            updates, _ = optimizer.update(grads, state, weights)
            assert not updates["w"][1].any() and updates["w"][0].any()

    @pytest.mark.extended
    def test_a_nan_among_zeros_is_no_step_of_zero(self):
        """The inner transformation's; on CPUs XLA's maximum would ignore the NaN."""
        params = {"w": jnp.ones((2, 64, 100))}
        step = {"w": jnp.zeros((2, 64, 100)).at[0, 3, 5].set(jnp.nan)}
        stage = initial_norm(optax.stateless(lambda *_: step), Dims(1, 2))
        changes, _ = stage.update(params, stage.init(params), params)
        assert jnp.isnan(changes["w"][0]).all() and not changes["w"][1].any()

    @pytest.mark.parametrize("w", [[[2.0]], [[2.0, 0.0], [0.0, 2.0]]])
    def test_a_step_to_zero_is_none(self, w):
        stage = initial_norm(optax.scale_by_learning_rate(1.0))
        params = {"w": jnp.array(w)}
        changes, _ = stage.update(params, stage.init(params), params)
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

    @pytest.mark.quick_first_case
    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4), (0, 3, 4)])
    def test_empty_leaves(self, shape):
        params = {"w": jnp.ones(shape)}
        numbers = Dims(len(shape) - 2, len(shape) - 1)
        optimizer = family.hyperball(0.1, weight_dimension_numbers=numbers)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert updates["w"].shape == shape

    @pytest.mark.extended
    def test_weights_put_elsewhere_return_to_their_norm(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        optimizer = family.hyperball(0.1)
        state, radius = optimizer.init(params), jnp.linalg.norm(params["w"])
        elsewhere = jax.tree.map(lambda w: 3 * w, params)
        updates, _ = optimizer.update(params, state, elsewhere)
        moved = optax.apply_updates(elsewhere, updates)["w"]
        assert float(jnp.linalg.norm(moved)) == pytest.approx(float(radius), rel=1e-6)

    @pytest.mark.extended
    def test_no_shape_scale_and_no_decay(self):
        assert "consistent_rms" not in inspect.signature(family.hyperball).parameters
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        runs = [
            run(family.hyperball(0.1, weight_decay=decay), params, 3, lambda step: params)
            for decay in (0.0, 0.5)
        ]
        assert_same_run(*runs)


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

    @pytest.mark.extended
    def test_the_papers_loses_two_thirds_for_good(self):
        ratios, _ = self.ratios()
        np.testing.assert_allclose(ratios[0], np.ones(3), rtol=1e-4)
        np.testing.assert_allclose(ratios[-1], 1 / 3 * np.ones(3), rtol=0.1)

    @pytest.mark.extended
    def test_full_rank_starts_high_and_stays_at_1(self):
        ratios, _ = self.ratios(anchor="full_rank")
        np.testing.assert_allclose(ratios[0], 3 * np.ones(3), rtol=0.1)
        np.testing.assert_allclose(ratios[-1], np.ones(3), rtol=0.1)

    def test_the_largest_starts_at_1_and_returns(self):
        ratios, state = self.ratios(anchor="largest", anchor_steps=4)
        np.testing.assert_allclose(ratios[0], np.ones(3), rtol=1e-4)
        np.testing.assert_allclose(ratios[-1], np.ones(3), rtol=0.1)
        np.testing.assert_array_equal(readout(state, "anchor_count")["w"], [4, 4, 4])

    def test_a_mask_and_a_schedule_count(self):
        """c of a matrix that does not decay, and of a schedule at its first value."""
        arguments = {
            "anchor": "full_rank",
            "weight_decay": lambda step: 50.0 * (step < 1).astype(jnp.float32),
        }
        for mask, decay in [(None, 50.0), ({"w": False}, 0.0), (lambda _: False, 0.0)]:
            _, state = self.ratios(1, weight_decay_mask=mask, **arguments)
            norm = np.linalg.norm(self.params["w"], axis=(1, 2))
            expected = norm / np.sqrt(0.04 * 16 * 9 + (decay * norm) ** 2)
            np.testing.assert_allclose(
                readout(state, "calibration")["w"], expected, rtol=1e-5
            )

    @pytest.mark.parametrize("make", [orscale, family.cautious])
    @pytest.mark.quick_first_case
    def test_a_matrix_that_is_anchored_late_has_the_decay_of_that_step(self, make):
        """The same c as with `inject_hyperparams`, which evaluates the schedule."""
        optimizers = (
            factory(
                1e-3,
                anchor="full_rank",
                weight_decay=lambda count: 1.0 * count,
                weight_dimension_numbers=self.numbers,
            )
            for factory in (
                make, optax.inject_hyperparams(
                    make, static_args=("anchor", "weight_dimension_numbers")
                ),
            )
        )  # fmt: skip

        def gradients(step):
            of_second = jnp.zeros(()) if step < 3 else jnp.ones(())
            grads = self.gradients(step)["w"]
            return {"w": grads.at[1].multiply(of_second)}

        (*_, (_, one)), (*_, (_, other)) = (
            run(optimizer, self.params, 4, gradients) for optimizer in optimizers
        )
        for field in ("calibration", "trust_ratio"):
            np.testing.assert_allclose(
                readout(one, field)["w"], readout(other, field)["w"], rtol=1e-5
            )

    @pytest.mark.extended
    @pytest.mark.parametrize("anchor", ["full_rank", "largest"])
    def test_degenerate_matrices(self, anchor):
        """One without scale, one without a first gradient, one with a NaN in it."""
        optimizer = orscale(
            1e-3, anchor=anchor, anchor_steps=2, weight_dimension_numbers=self.numbers
        )
        params = {"w": self.params["w"].at[0].set(0)}

        def gradients(step):
            grads = self.gradients(step + 1)["w"]
            bad = grads.at[1].set(0).at[2].set(jnp.nan)
            return {"w": bad if step == 1 else jnp.where(jnp.isnan(bad), 0, grads)}

        (_, first), (_, second) = run(optimizer, params, 2, gradients)
        c = readout(first, "calibration")["w"]
        assert c[0] == jnp.inf and c[1] == 0 and c[2] == 0
        raw = readout(first, "raw_trust_ratio")["w"]
        assert raw[0] == 1 and raw[1] == 1 and jnp.isnan(raw[2])
        c = readout(second, "calibration")["w"]
        assert c[0] == jnp.inf and c[1] > 0
        assert readout(second, "trust_ratio")["w"][0] == 1

    @pytest.mark.extended
    def test_a_calibrated_run_goes_on_with_another_anchor(self):
        """A c that is set stays; the state of the largest has two more fields."""
        optimizer = orscale(1e-3, weight_dimension_numbers=self.numbers)
        (params, state), *_ = run(optimizer, self.params, 1, self.gradients)
        other = orscale(1e-3, anchor="largest", weight_dimension_numbers=self.numbers)
        converted = convert_state(state, other, params)
        _, after = other.update(self.gradients(2), converted, params)
        np.testing.assert_array_equal(
            readout(after, "calibration")["w"], readout(state, "calibration")["w"]
        )
        same = orscale(1e-3, anchor="full_rank", weight_dimension_numbers=self.numbers)
        assert jax.tree.structure(same.init(params)) == jax.tree.structure(state)

    @pytest.mark.parametrize("calibrate", [True, False])
    def test_without_calibration_no_count_is_kept(self, calibrate):
        stage = scale_by_calibrated_trust_ratio(calibrate=calibrate, anchor="largest")
        state = stage.init({"w": jnp.eye(2)})
        assert (state.anchor_count is not None) == calibrate

    @pytest.mark.extended
    def test_blocks_of_several_sizes_have_anchors_of_their_own(self):
        numbers = BlockDimensionNumbers(0, 1, block_axis=1, blocks=(8, 2))
        optimizer = orscale(1e-3, anchor="full_rank", weight_dimension_numbers=numbers)
        params = {"w": jnp.ones((8, 10))}
        [(_, state)] = run(optimizer, params, 1, lambda _: params)
        norms = np.sqrt([64, 16])
        expected = norms / np.sqrt(0.04 * 8 * np.array([8, 2]) + 0.01 * norms**2)
        np.testing.assert_allclose(
            readout(state, "calibration")["w"], expected, rtol=1e-5
        )

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"anchor": "last"}, "anchor='last' is not valid: pass 'first' or"),
            ({"anchor_steps": 0}, "anchor_steps=0 is not valid"),
        ],
    )
    def test_bad_anchors(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            orscale(1e-3, **arguments)


def test_signs_of_cautious_decay():
    """An update of zero decays; products that underflow are not taken for zeros."""
    stage = cautious_stage(decay_stage(0.5, None))
    params = jnp.array([2.0, 2.0, 2.0, 0.0, 1e-30])
    updates = jnp.array([1.0, -1.0, 0.0, 1.0, -1e-30])
    found, _ = stage.update(updates, stage.init(params), params)
    np.testing.assert_array_equal(found, jnp.array([2.0, -1.0, 1.0, 1.0, -1e-30]))
    masked = cautious_stage(decay_stage(0.5, {"a": True, "b": False}))
    tree = {"a": params, "b": params}
    found, _ = masked.update(tree, masked.init(tree), tree)
    np.testing.assert_array_equal(found["b"], params)
    with pytest.raises(ValueError, match="not passing `params`"):
        stage.update(updates, stage.init(params))
    with pytest.raises(ValueError, match="weight_decay=-1 is not valid"):
        family.cautious(1e-3, weight_decay=-1)


@pytest.mark.extended
def test_cautious_decay_meets_the_ceiling():
    """Where half of the entries decay, the ratio's ceiling is √2 / (cλ), not 1 / (cλ)."""
    params = {"w": 1e4 * jnp.where(jnp.arange(64).reshape(8, 8) % 2, 1.0, -1.0)}
    grads = {"w": jnp.ones((8, 8))}
    expected = {orscale: 1.0, family.cautious: np.sqrt(2)}
    for factory, ceiling in expected.items():
        optimizer = factory(0.0, calibrate=False, weight_decay=0.25, r_max=10)
        [(_, state)] = run(optimizer, params, 1, lambda _: grads)
        ratio = readout(state, "trust_ratio")["w"]
        assert float(ratio) == pytest.approx(ceiling / 0.25, rel=1e-3)
