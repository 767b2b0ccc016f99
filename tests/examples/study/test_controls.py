"""Each control against the float64 oracle; the symptoms of the deleted designs."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers as Dims

from examples.study import controls
from orscale_jax import muon, orscale, scale_by_calibrated_trust_ratio
from orscale_jax.transforms.matrices import on_matrices
from tests import leaves, oracle
from tests.runs import ABLATIONS, Oracles, readout, run

RATE, STEPS = 0.01, 25
RECORDED = np.random.default_rng(0).uniform(0.3, 3, STEPS)
BAND = {"calibrate": False, "r_min": 0.5, "r_max": 1.5, "coupled": False}
# Ablations, and what orscale's own arguments delete.
OPTIMIZERS = ABLATIONS | {
    "uncalibrated": functools.partial(orscale, calibrate=False),
    "unclipped": functools.partial(orscale, r_min=-np.inf, r_max=np.inf),
}
BY_HAND = {
    "polar_factor_denominator": BAND | {"rms": None, "denominator": "sQ"},
    "momentum_denominator": BAND | {"rms": None, "denominator": "M"},
    "momentum_rms_denominator": BAND
    | {"denominator": "M", "norm": oracle.root_mean_square},
    "uncalibrated": {"calibrate": False},
    "decoupled_weight_decay": {"denominator": "sQ", "coupled": False},
    "unclipped": {"r_min": -np.inf, "r_max": np.inf},
}


def some(*names):
    """Parameters and gradients of a few leaves, with their dimension numbers."""
    numbers = {name: leaves.DIMENSIONS[name] for name in names}

    def tree(seed, scale=1.0):
        everything = leaves.random_tree(seed, scale)
        return {name: everything[name] for name in names}

    return tree, {"weight_dimension_numbers": numbers, "ns_dtype": jnp.float32}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("eps", [pytest.param(1e-6, marks=pytest.mark.slow), 0.1])
def test_15_steps_against_float64_numpy(name, eps):
    """A large ε shows where it stands; wide bounds show the ratio in the weights."""
    wide = {"r_min": 1e-3, "r_max": 1e3} if eps == 0.1 else {}
    tree, given = some("tall", "convolution", "experts", "embedding")
    params = tree(0, 0.05)
    optimizer = OPTIMIZERS[name](0.003, eps=eps, **given, **wide)
    expected = Oracles(params, **(BY_HAND[name] | {"eps": eps} | wide))
    seen = run(optimizer, params, steps=15, gradients=tree)
    for step, (_, state) in enumerate(seen):
        expected.step(tree(step + 1), 0.003)
        for leaf, matrices in expected.matrices.items():
            ratios = np.ravel(readout(state, "raw_trust_ratio")[leaf])
            np.testing.assert_allclose(ratios, [m.r for m in matrices], rtol=1e-5)
    expected.assert_close(seen[-1][0], 1e-5)


@pytest.mark.parametrize("name", ABLATIONS)
def test_arguments_are_orscales(name):
    assert {*ABLATIONS} < {*BY_HAND, "bfloat16_calibration"}  # Every one is tested.
    ablation, plain = ABLATIONS[name], inspect.signature(orscale).parameters
    parameters = inspect.signature(ablation).parameters
    assert list(parameters) == list(plain)
    changed = {key for key in parameters if plain[key].default != parameters[key].default}
    assert changed <= {"consistent_rms", "calibrate", "r_min", "r_max"}
    with pytest.raises(ValueError, match="r_min=3 is larger than r_max=2"):
        ablation(1e-3, r_min=3, r_max=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'r_mx'"):
        ablation(1e-3, r_mx=2)


def walk(name, steps=1, scale=0.02, rate=1e-2, **arguments):
    """Ratios and weights of a random walk of a (layers, 24, 16) stack."""
    params = {"w": scale * jax.random.normal(jax.random.key(0), (4, 24, 16))}

    optimizer = OPTIMIZERS[name](rate, weight_dimension_numbers=Dims(1, 2), **arguments)
    return params, run(optimizer, params, steps, noise)


def noise(step):
    return {"w": 1e-3 * jax.random.normal(jax.random.key(step), (4, 24, 16))}


@pytest.mark.extended
def test_polar_factor_denominator_is_a_constant_of_the_shape():
    params, seen = walk("polar_factor_denominator", steps=5, ns_steps=10)
    before = [params, *(found for found, _ in seen)]
    for (_, state), weights in zip(seen, before, strict=False):
        expected = np.linalg.norm(weights["w"], axis=(1, 2)) / np.sqrt(16)
        np.testing.assert_allclose(
            readout(state, "raw_trust_ratio")["w"], expected, rtol=1e-4
        )


@pytest.mark.extended
@pytest.mark.parametrize("name", ["momentum_denominator", "momentum_rms_denominator"])
def test_momentum_denominators_saturate_and_are_muon(name):
    """Theorem "collapse": at r_max always, they are Muon with another learning rate."""
    rms = {"consistent_rms": 0.2 if "rms" in name else None}
    params, seen = walk(name, steps=20)
    for _, state in seen:
        assert (readout(state, "trust_ratio")["w"] == 1.5).all()
        assert (readout(state, "raw_trust_ratio")["w"] > 3).all()
    relabeled = muon(
        1.5e-2, weight_decay=0.1 / 1.5, weight_dimension_numbers=Dims(1, 2), **rms
    )
    plain = run(relabeled, params, 20, noise)
    np.testing.assert_allclose(seen[-1][0]["w"], plain[-1][0]["w"], atol=1e-5)


@pytest.mark.extended
def test_the_ratio_of_the_momentum_has_the_gradients_units():
    """A loss a hundred times as large divides it by 100, and leaves OrScale's alone."""
    params = {"w": jnp.eye(8)}
    for build, factor in [(controls.momentum_denominator, 100), (orscale, 1)]:
        ratios = []
        for scale in (1.0, 100.0):
            optimizer = build(1e-2)
            grads = {"w": scale * jnp.eye(8)}
            _, state = optimizer.update(grads, optimizer.init(params), params)
            ratios.append(readout(state, "raw_trust_ratio")["w"])
        np.testing.assert_allclose(ratios[0], factor * ratios[1], rtol=1e-5)


@pytest.mark.extended
def test_uncalibrated_ratio_starts_at_the_scale_of_the_weights():
    """RMS(W)/0.2, which falls with the root of the fan-in; calibrated, at 1."""
    for width in (64, 256, 1024):
        params = {"w": jax.random.normal(jax.random.key(0), (width, 32)) / width**0.5}
        optimizer = orscale(1e-3, calibrate=False, weight_decay=0.0, ns_steps=8)
        _, state = optimizer.update(params, optimizer.init(params), params)
        ratio = readout(state, "raw_trust_ratio")["w"]
        np.testing.assert_allclose(ratio, width**-0.5 / 0.2, rtol=0.02)


@pytest.mark.extended
def test_decoupled_weight_decay_runs_away_and_coupled_does_not():
    """A constant gradient and no clip: coupled weights settle where λW = −sQ."""
    params = {"w": 0.02 * jax.random.normal(jax.random.key(0), (16, 16))}
    grads = {"w": jax.random.normal(jax.random.key(1), (16, 16))}

    def final_norm(build):
        seen = run(build(0.05, r_min=0.0, r_max=np.inf), params, 60, lambda _: grads)
        return np.linalg.norm(seen[-1][0]["w"])

    settled = 0.2 * 16**0.5 * 16**0.5 / 0.1  # s‖Q‖/λ
    assert 0.5 * settled < final_norm(orscale) < 2 * settled
    assert final_norm(controls.decoupled_weight_decay) > 50 * settled


@pytest.mark.extended
def test_calibration_in_bfloat16():
    _, seen = walk("bfloat16_calibration", steps=3)
    _, plain = walk("unclipped", steps=3, r_min=0.1, r_max=5.0)
    c = np.asarray(readout(seen[0][1], "calibration")["w"])
    np.testing.assert_array_equal(c, c.astype(jnp.bfloat16).astype(np.float32))
    exact = np.asarray(readout(plain[0][1], "calibration")["w"])
    assert (np.abs(c / exact - 1) < 2**-8 + 2**-9).all() and (c != exact).any()
    # r is off by that factor, from the start and for good.
    np.testing.assert_allclose(
        readout(seen[0][1], "raw_trust_ratio")["w"], exact / c, rtol=1e-5
    )
    for _, state in seen:
        np.testing.assert_array_equal(readout(state, "calibration")["w"], c)


@pytest.mark.extended
def test_calibration_in_bfloat16_is_set_once_where_it_rounds_to_one():
    params = {"w": 0.999 * jnp.eye(4)}
    optimizer = controls.bfloat16_calibration(0.0, consistent_rms=0.5, weight_decay=0.0)
    _, state = optimizer.update(params, optimizer.init(params), params)
    _, state = optimizer.update(params, state, {"w": 2 * params["w"]})
    np.testing.assert_allclose(readout(state, "trust_ratio")["w"], 2, rtol=0.02)


@pytest.mark.extended
@pytest.mark.parametrize("name", ABLATIONS)
def test_degenerate_matrices(name):
    """No gradient: untouched. NaN: NaN, there alone. Zero weights: finite."""
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4, 6)).at[2].set(0)}
    grads = {"w": jax.random.normal(jax.random.key(1), (3, 4, 6))}
    optimizer = ABLATIONS[name](0.1, weight_dimension_numbers=Dims(1, 2))
    state = optimizer.init(params)
    idle = {"w": grads["w"].at[0].set(0)}
    updates, after = jax.jit(optimizer.update)(idle, state, params)
    assert not updates["w"][0].any() and jnp.isfinite(updates["w"]).all()
    assert readout(after, "trust_ratio")["w"][0] == 1
    broken = {"w": grads["w"].at[0, 1, 1].set(jnp.nan)}
    updates, after = jax.jit(optimizer.update)(broken, state, params)
    assert jnp.isnan(updates["w"][0]).all() and jnp.isfinite(updates["w"][1:]).all()
    assert jnp.isnan(readout(after, "trust_ratio")["w"][0])


# Shared and recorded ratios.


def build(factory, **arguments):
    given = {"ns_dtype": jnp.float32, "weight_dimension_numbers": leaves.DIMENSIONS}
    return factory(RATE, **(given | arguments))


@pytest.mark.extended
@pytest.mark.parametrize(
    "classes", [pytest.param(None, marks=pytest.mark.slow), "by_name"]
)
def test_25_pooled_steps_against_float64_numpy(classes):
    params = {
        name: leaf * (1 + i % 5)
        for i, (name, leaf) in enumerate(leaves.random_tree(0, 0.05).items())
    }

    def by_name(tree):
        return jax.tree.map_with_path(lambda path, _: path[0].key[0], tree)

    optimizer = build(controls.pooled, classes=classes and by_name, calibrate=False)
    expected = Oracles(params, calibrate=False)
    seen = run(optimizer, params, STEPS)
    for step, (_, state) in enumerate(seen):
        grads = leaves.random_tree(step + 1)
        for name, matrices in expected.matrices.items():
            pairs = zip(matrices, leaves.matrices(name, grads[name]), strict=True)
            for matrix, gradient in pairs:
                matrix.look(gradient)
        for name, matrices in expected.matrices.items():
            pool = [
                matrix.r
                for other, members in expected.matrices.items()
                for matrix in members
                if classes is None or other[0] == name[0]
            ]
            pooled = np.clip(np.prod(pool) ** (1 / len(pool)), 0.1, 5)
            np.testing.assert_allclose(
                readout(state, "trust_ratio")[name], pooled, rtol=1e-5
            )
            for matrix in matrices:
                matrix.clipped = pooled
                matrix.move(RATE)
        for name, other in expected.others.items():
            other.step(grads[name], RATE)
    expected.assert_close(seen[-1][0], 1e-5)


@pytest.mark.extended
@pytest.mark.parametrize(
    "recorded",
    [
        RECORDED,
        pytest.param(
            lambda step: jnp.asarray(RECORDED, jnp.float32)[step], marks=pytest.mark.slow
        ),
    ],
)
def test_25_replayed_steps_against_float64_numpy(recorded):
    params = leaves.random_tree(0, 0.05)
    expected = Oracles(params, adaptive=False)
    seen = run(build(controls.replayed, trust_ratio=recorded), params, STEPS)
    for step, ratio in enumerate(RECORDED):
        for matrix in expected.all_matrices:
            matrix.clipped = ratio
        expected.step(leaves.random_tree(step + 1), RATE)
    expected.assert_close(seen[-1][0], 1e-5)


def full(value, *shape):
    return jnp.full(shape or (2, 2), value)


class TestPooled:
    def ratios(self, params, updates, classes=None, numbers=None, **arguments):
        """What is applied, r, and the scaled updates."""
        ratio = scale_by_calibrated_trust_ratio(
            calibrate=False, weight_dimension_numbers=numbers, **arguments
        )
        stage = on_matrices(
            numbers, lambda own: controls.pooled_ratio_stage(ratio, own, classes)
        )
        scaled, state = stage.update(updates, stage.init(params), params)
        return state.trust_ratio, state.raw_trust_ratio, scaled

    @pytest.mark.parametrize(
        "params, zero, arguments, applied, raw",
        [
            # By log, a stack of three with ratio 4 and one of ratio 0.25: 4^(1/2).
            pytest.param(
                {"stack": full(4.0, 3, 2, 2), "w": full(0.25, 1, 2, 2)}, (),
                {"numbers": Dims(1, 2)}, {"stack": [2, 2, 2], "w": [2]},
                {"stack": [4, 4, 4]}, id="mean_is_over_matrices",
            ),
            pytest.param(
                {"w": full(4.0), "zero": full(1.0)}, ("zero",), {}, {"w": 4},
                {"zero": 1}, id="only_measured_ratios_count",
            ),
            pytest.param(
                {"large": full(100.0), "small": full(0.01)}, (),
                {"r_min": 0.5, "r_max": 2.0}, {"large": 1}, {}, id="clip_after_the_mean",
            ),
            pytest.param(
                {"a": [full(4.0), full(1.0)], "b": full(3.0)}, (),
                {"classes": {"a": "attention", "b": "mlp"}}, {"a": [2, 2], "b": 3}, {},
                id="a_prefix_of_classes",
            ),
        ],
    )  # fmt: skip
    def test_means(self, params, zero, arguments, applied, raw):
        updates = jax.tree.map(jnp.ones_like, params)
        updates |= {name: jnp.zeros((2, 2)) for name in zero}
        found = self.ratios(params, updates, **arguments)
        for tree, expected in zip(found, (applied, raw), strict=False):
            for name, value in expected.items():
                np.testing.assert_allclose(tree[name], value, rtol=1e-4)

    def test_a_nan_stays_where_it_is(self):
        params = {"w": full(4.0), "bad": full(1.0)}
        updates = {"w": full(1.0), "bad": full(jnp.nan)}
        applied, _, scaled = self.ratios(params, updates)
        assert float(applied["w"]) == pytest.approx(4) and jnp.isnan(applied["bad"])
        assert jnp.isfinite(scaled["w"]).all() and jnp.isnan(scaled["bad"]).all()

    @pytest.mark.parametrize(
        "classes, message",
        [({"a": 1}, "classes=1 .* tree of strings"), ({"b": "x"}, "classes must be")],
    )
    def test_bad_classes(self, classes, message):
        params = {"a": jnp.eye(2)}
        with pytest.raises(ValueError, match=message):
            self.ratios(params, params, classes)

    @pytest.mark.extended
    def test_classes_of_boxed_parameters_and_of_all_of_them(self):
        """A function sees every parameter, boxes come off, and AdamW's have no class."""
        params = {"a": jnp.eye(3), "b": 2 * jnp.eye(3), "bias": jnp.ones(3)}
        boxed = {key: nn.Partitioned(leaf, (None,)) for key, leaf in params.items()}

        def by_rank(tree):
            return {key: key if leaf.ndim == 2 else None for key, leaf in tree.items()}

        for tree, classes in [
            (params, by_rank),
            (boxed, by_rank),
            (boxed, {key: nn.Partitioned(key, (None,)) for key in params}),
        ]:
            optimizer = controls.pooled(0.1, calibrate=False, classes=classes)
            _, state = optimizer.update(tree, optimizer.init(tree), tree)
            applied = readout(state, "trust_ratio")
            ratios = [float(jax.tree.leaves(applied[key])[0]) for key in "ab"]
            assert ratios[1] == pytest.approx(2 * ratios[0], rel=0.2)
        optimizer = controls.pooled(0.1, classes={"a": None, "b": "x", "bias": None})
        state = optimizer.init(params)
        with pytest.raises(ValueError, match="parameter 'a' is a matrix without a label"):
            optimizer.update(params, state, params)
        with pytest.raises(ValueError, match="classes must be a tree"):
            controls.pooled(0.1, classes={"c": "x"}).init(params)

    @pytest.mark.extended
    def test_classes_in_a_tree_that_is_callable(self):
        model = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
        labels = jax.tree.map(lambda _: "x", model)
        assert callable(labels)
        optimizer = controls.pooled(0.1, classes=labels)
        _, state = optimizer.update(model, optimizer.init(model), model)
        assert readout(state, "trust_ratio").weight.shape == ()


class TestReplay:
    def test_after_its_end_the_last_goes_on(self):
        params = {"w": jnp.eye(3)}
        optimizer = controls.replayed(1.0, trust_ratio=[2.0, 3.0], weight_decay=0.0)
        plain = muon(1.0, weight_decay=0.0)
        (of_all, of_plain) = (o.init(params) for o in (optimizer, plain))
        seen = []
        for _ in range(4):
            updates, of_all = optimizer.update(params, of_all, params)
            expected, of_plain = plain.update(params, of_plain, params)
            seen.append(float(updates["w"][0, 0] / expected["w"][0, 0]))
        np.testing.assert_allclose(seen, [2, 3, 3, 3], rtol=1e-6)

    @pytest.mark.extended
    def test_injected(self):
        params = {"w": jnp.eye(3)}
        injected = optax.inject_hyperparams(controls.replayed)
        for ratio in (jnp.array([2.0, 3.0]), 2.0, lambda step: 2.0 + step):
            found = run(injected(0.1, trust_ratio=ratio), params, 1, lambda _: params)
            plain = run(
                controls.replayed(0.1, trust_ratio=2.0), params, 1, lambda _: params
            )
            np.testing.assert_allclose(found[0][0]["w"], plain[0][0]["w"], rtol=1e-6)

    @pytest.mark.parametrize(
        "ratio",
        [
            [],
            [[1.0]],
            [np.nan],
            "0.5",
            None,
            [1.0, np.inf],
            {"w": 1.0},
            True,
            [-1.0],
            [1j],
        ],
    )
    def test_bad_recordings(self, ratio):
        with pytest.raises(ValueError, match=r"trust_ratio=.*finite ratios of shape \(T"):
            controls.replayed(1e-3, trust_ratio=ratio)
