"""Each ablation against the float64 oracle, and its symptom."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import ablations, muon, orscale
from tests import leaves, oracle
from tests.runs import ABLATIONS, DEPRECATED, Oracles, readout, run

BAND = {"calibrate": False, "r_min": 0.5, "r_max": 1.5, "coupled": False}
# Ablations, and what orscale's own arguments delete.
OPTIMIZERS = ABLATIONS | {
    name: functools.partial(orscale, **arguments)
    for name, arguments in DEPRECATED.items()
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


def some_leaves(seed, scale=1.0):
    names = ("tall", "convolution", "experts", "embedding")
    tree = leaves.random_tree(seed, scale)
    return {name: tree[name] for name in names}


def test_every_ablation_is_tested():
    assert set(OPTIMIZERS) == {*BY_HAND, "bfloat16_calibration"}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("eps", [pytest.param(1e-6, marks=pytest.mark.slow), 0.1])
def test_15_steps_against_float64_numpy(name, eps):
    """A large ε shows where it stands; wide bounds show the ratio in the weights."""
    wide = {"r_min": 1e-3, "r_max": 1e3} if eps == 0.1 else {}
    params = some_leaves(0, 0.05)
    optimizer = OPTIMIZERS[name](
        0.003,
        eps=eps,
        ns_dtype=jnp.float32,
        weight_dimension_numbers={leaf: leaves.DIMENSIONS[leaf] for leaf in params},
        **wide,
    )
    expected = Oracles(params, **(BY_HAND[name] | {"eps": eps} | wide))
    seen = run(optimizer, params, steps=15, gradients=some_leaves)
    for step, (_, state) in enumerate(seen):
        expected.step(some_leaves(step + 1), 0.003)
        for leaf, matrices in expected.matrices.items():
            ratios = np.ravel(readout(state, "raw_trust_ratio")[leaf])
            np.testing.assert_allclose(ratios, [m.r for m in matrices], rtol=1e-5)
    expected.assert_close(seen[-1][0], 1e-5)


@pytest.mark.parametrize("name", ABLATIONS)
def test_arguments_are_orscales(name):
    ablation, plain = getattr(ablations, name), inspect.signature(orscale).parameters
    parameters = inspect.signature(ablation).parameters
    assert list(parameters) == [key for key in plain if not key.startswith("anchor")]
    changed = {key for key in parameters if plain[key].default != parameters[key].default}
    assert changed <= {"consistent_rms", "calibrate", "r_min", "r_max"}
    with pytest.raises(ValueError, match="r_min=3 is larger than r_max=2"):
        ablation(1e-3, r_min=3, r_max=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'r_mx'"):
        ablation(1e-3, r_mx=2)


@pytest.mark.extended
@pytest.mark.parametrize("name", DEPRECATED)
def test_deprecated_ablations_name_the_call_of_orscale(name):
    said = {
        "uncalibrated": "calibrate=False",
        "unclipped": "r_min=-jnp.inf, r_max=jnp.inf",
    }
    message = re.escape(f"{name} is deprecated: call orscale(..., {said[name]}) instead")
    with pytest.warns(DeprecationWarning, match=message) as warned:
        optimizer = getattr(ablations, name)(0.02)
    assert [warning.filename for warning in warned] == [__file__]
    params = {"tall": leaves.random_tree(0, 0.05)["tall"]}

    def gradients(step):
        return {"tall": leaves.random_tree(step)["tall"]}

    ours = run(optimizer, params, 5, gradients)
    plain = run(orscale(0.02, **DEPRECATED[name]), params, 5, gradients)
    jax.tree.map(np.testing.assert_array_equal, ours[-1], plain[-1])


def walk(name, steps=1, scale=0.02, rate=1e-2, **arguments):
    """Ratios and weights of a random walk of a (layers, 24, 16) stack."""
    params = {"w": scale * jax.random.normal(jax.random.key(0), (4, 24, 16))}

    def gradients(step):
        return {"w": 1e-3 * jax.random.normal(jax.random.key(step), (4, 24, 16))}

    optimizer = OPTIMIZERS[name](rate, weight_dimension_numbers=Dims(1, 2), **arguments)
    return params, run(optimizer, params, steps, gradients)


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

    def gradients(step):
        return {"w": 1e-3 * jax.random.normal(jax.random.key(step), (4, 24, 16))}

    plain = run(relabeled, params, 20, gradients)
    np.testing.assert_allclose(seen[-1][0]["w"], plain[-1][0]["w"], atol=1e-5)


@pytest.mark.extended
def test_the_ratio_of_the_momentum_has_the_gradients_units():
    """A loss a hundred times as large divides it by 100, and leaves OrScale's alone."""
    params = {"w": jnp.eye(8)}
    for build, factor in [(ablations.momentum_denominator, 100), (orscale, 1)]:
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
    assert final_norm(ablations.decoupled_weight_decay) > 50 * settled


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
    optimizer = ablations.bfloat16_calibration(0.0, consistent_rms=0.5, weight_decay=0.0)
    state = optimizer.init(params)
    grown = {"w": 2 * params["w"]}
    _, state = optimizer.update(params, state, params)
    _, state = optimizer.update(params, state, grown)
    np.testing.assert_allclose(readout(state, "trust_ratio")["w"], 2, rtol=0.02)


@pytest.mark.extended
@pytest.mark.parametrize("name", ABLATIONS)
def test_degenerate_matrices(name):
    """No gradient: untouched. NaN: NaN, there alone. Zero weights: finite."""
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4, 6)).at[2].set(0)}
    grads = {"w": jax.random.normal(jax.random.key(1), (3, 4, 6))}
    optimizer = getattr(ablations, name)(0.1, weight_dimension_numbers=Dims(1, 2))
    state = optimizer.init(params)
    idle = {"w": grads["w"].at[0].set(0)}
    updates, after = jax.jit(optimizer.update)(idle, state, params)
    assert not updates["w"][0].any() and jnp.isfinite(updates["w"]).all()
    assert readout(after, "trust_ratio")["w"][0] == 1
    broken = {"w": grads["w"].at[0, 1, 1].set(jnp.nan)}
    updates, after = jax.jit(optimizer.update)(broken, state, params)
    assert jnp.isnan(updates["w"][0]).all() and jnp.isfinite(updates["w"][1:]).all()
    assert jnp.isnan(readout(after, "trust_ratio")["w"][0])
