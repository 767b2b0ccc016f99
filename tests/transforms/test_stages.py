"""Each stage alone, and the degenerate cases of the calibrated ratio."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    keep_master_weights,
    orscale,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
    where_nonzero,
)
from tests import leaves, oracle
from tests.runs import EXPLICIT, mesh_of, readout

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
D = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), jnp.float32)


def matrices_only(tree):
    return {name: tree[name] for name in leaves.KINDS}


def test_orthogonalize_treats_each_matrix_separately(jit):
    tree, numbers = leaves.some("wide", "convolution", "experts", "middle", "fused_rows")
    grads, stage = tree(0), orthogonalize(weight_dimension_numbers=numbers)
    updates, _ = jit(stage.update)(grads, stage.init(grads))
    for name in updates:
        pairs = (leaves.matrices(name, tree[name]) for tree in (updates, grads))
        for found, gradient in zip(*pairs, strict=True):
            np.testing.assert_allclose(found, oracle.newton_schulz(gradient), atol=2e-5)


@pytest.mark.parametrize(
    "stage", [orthogonalize(), scale_by_shape(), scale_by_calibrated_trust_ratio()]
)
def test_arrays_of_numpy_and_dtypes(stage):
    tree = {"w": np.random.default_rng(0).normal(size=(3, 4))}
    as_jax = jax.tree.map(jnp.asarray, tree)
    found, _ = stage.update(tree, stage.init(tree), tree)
    expected, _ = stage.update(as_jax, stage.init(as_jax), as_jax)
    assert found["w"].dtype == jnp.float32
    np.testing.assert_array_equal(found["w"], expected["w"])
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        narrow = {"w": jnp.ones((3, 4), dtype)}
        updates, state = stage.update(narrow, stage.init(narrow), narrow)
        assert updates["w"].dtype == dtype
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))


@pytest.mark.extended
def test_orthogonalize_keeps_sharding_types():
    """On a mesh of Explicit axes, also where rows span axes that are both sharded."""
    mesh = mesh_of({"a": 2, "b": 4}, EXPLICIT)
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    specs = [P(None, "a", "b"), P("a", "b", None), P("a"), P()]
    for numbers in (Dims(1, 2), Dims((0, 1), 2)):
        stage = orthogonalize(weight_dimension_numbers=numbers)
        expected, _ = stage.update(jnp.asarray(x), optax.EmptyState())
        for spec in specs:
            sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
            with jax.set_mesh(mesh):
                q, _ = jax.jit(stage.update)(sharded, optax.EmptyState())
            assert jax.typeof(q) == jax.typeof(sharded)
            np.testing.assert_allclose(q, expected, atol=2e-5)


def test_orthogonalize_leaves_masked_leaves_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    stage = orthogonalize()
    grads = {"b": optax.MaskedNode(), "w": x}
    params = {"b": jnp.ones(3), "w": jnp.ones((4, 6), jnp.bfloat16)}
    found, _ = stage.update(grads, stage.init(grads), params)
    assert found["b"] == optax.MaskedNode() and found["w"].dtype == x.dtype
    np.testing.assert_array_equal(found["w"], stage.update({"w": x}, ())[0]["w"])


def test_masks_are_booleans(subtests):
    params = {"w": jnp.eye(2), "v": jnp.eye(2)}
    values = [{"w": "no", "v": True}, {"w": 1, "v": 1}, lambda _: {"w": 1, "v": 0}, 0.5]
    values += [{"w": np.array([True, False]), "v": True}]  # One for each row.
    values += ["yes", {"v": True}, lambda _: {"w": None, "v": None}]
    for mask in values:
        with (
            subtests.test(mask=mask),
            pytest.raises(ValueError, match=r"weight_decay_mask.*tree of booleans"),
        ):
            orscale(1e-3, weight_decay_mask=mask).init(params)


@pytest.mark.parametrize("stage", [orthogonalize, scale_by_shape])
def test_init_refuses_what_update_refuses(stage):
    params = {"b": jnp.ones(3), "w": jnp.ones((4, 6))}
    for call in (stage().init, lambda tree: stage().update(tree, optax.EmptyState())):
        with pytest.raises(ValueError, match=r"'b' of shape .* is not a matrix"):
            call(params)


@pytest.mark.parametrize(
    "stage",
    [
        where_nonzero(optax.add_decayed_weights(0.1)),
        scale_by_calibrated_trust_ratio(),
        scale_by_shape(0.2),
        orthogonalize(),
        keep_master_weights(optax.sgd(1e-2)),
    ],
)
def test_a_gradient_of_another_shape_is_not_broadcast(stage):
    params = {"w": W, "masked": optax.MaskedNode()}
    gradient = params | {"w": W[:1]}
    words = r"parameter 'w' has shape \(1, 6\), but the parameter has shape \(4, 6\)"
    with pytest.raises(ValueError, match=words):
        stage.update(gradient, stage.init(params), params)


SCALES = {
    "spectral": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "shape_scaling": lambda m, n: max(1, n / m) ** 0.5,
    "unit_rms_norm": lambda m, n: (n / m) ** 0.5,
}


@pytest.mark.parametrize("mode", SCALES)
def test_scale_by_shape(mode, jit):
    """By the inputs and outputs that the dimension numbers tell, of blocks, too."""
    grads = matrices_only(leaves.random_tree(0))
    numbers = matrices_only(leaves.DIMENSIONS)
    stage = scale_by_shape(scale_mode=mode, weight_dimension_numbers=numbers)
    updates, _ = jit(stage.update)(grads, stage.init(grads))
    for name in updates:
        pairs = (leaves.matrices(name, tree[name]) for tree in (updates, grads))
        for found, gradient in zip(*pairs, strict=True):
            factor = SCALES[mode](*gradient.shape)
            np.testing.assert_allclose(found, factor * gradient, rtol=1e-6)
    alone = scale_by_shape(None)
    assert alone.update(grads, alone.init(grads))[0] is grads
    stage = scale_by_shape(scale_mode=mode)
    for shape in ((0, 3), (3, 0)):
        updates, _ = stage.update({"w": jnp.ones(shape)}, optax.EmptyState())
        assert updates["w"].shape == shape


def test_a_state_with_a_key_of_random_numbers():
    stage = where_nonzero(optax.add_noise(0.1, 0.5, 0))
    grads = {"w": jnp.ones((2, 2))}
    state = stage.init(grads)
    _, after = stage.update(grads, state, grads)
    key, new = state.rng_key, after.rng_key
    assert new.dtype == key.dtype and (new != key).all()


def test_where_nonzero_counts_every_step():
    stage = where_nonzero(optax.scale_by_schedule(lambda count: count))
    params, zero = {"w": jnp.ones((2, 2))}, {"w": jnp.zeros((2, 2))}
    state = stage.init(params)
    for _ in range(3):
        _, state = stage.update(zero, state, params)
    updates, _ = stage.update({"w": jnp.eye(2)}, state, params)
    np.testing.assert_array_equal(updates["w"], 3.0 * jnp.eye(2))


class TestCalibratedTrustRatio:
    @pytest.fixture(autouse=True)
    def with_and_without_jit(self, jit):
        self.jit = jit

    def run(self, directions, weights, **arguments):
        stage = scale_by_calibrated_trust_ratio(**arguments)
        update, state, seen = self.jit(stage.update), stage.init(weights[0]), []
        for direction, weight in zip(directions, weights, strict=True):
            updates, state = update(direction, state, weight)
            seen.append((updates, state))
        return seen

    def test_definitions_1_and_2(self):
        eps = 1e-2
        seen = self.run([D, 3 * D, D], [W, 2 * W, 0.5 * W], eps=eps)
        w, d = np.linalg.norm(W), np.linalg.norm(D)
        c = w / (d + eps)
        expected = [w / (c * d + eps), 2 * w / (3 * c * d + eps), 0.5 * w / (c * d + eps)]
        for (updates, state), r, direction in zip(
            seen, expected, [D, 3 * D, D], strict=True
        ):
            np.testing.assert_allclose(state.calibration, c, rtol=1e-6)
            np.testing.assert_allclose(state.raw_trust_ratio, r, rtol=1e-6)
            np.testing.assert_allclose(updates, r * direction, rtol=1e-5)

    def test_clip(self):
        seen = self.run([D] * 3, [W, 7 * W, 0.01 * W], r_min=0.25, r_max=2.0)
        raw = [float(state.raw_trust_ratio) for _, state in seen]
        applied = [float(state.trust_ratio) for _, state in seen]
        np.testing.assert_allclose(raw, [1, 7, 0.01], rtol=1e-5)
        np.testing.assert_allclose(applied, [1, 2, 0.25], rtol=1e-5)
        free = self.run([D] * 2, [W, 70 * W], r_min=-np.inf, r_max=np.inf)
        np.testing.assert_allclose(free[1][1].trust_ratio, 70, rtol=1e-5)

    def test_without_calibration_c_is_one(self):
        [(_, state)] = self.run([D], [W], calibrate=False, r_min=0.0, r_max=99.0)
        assert state.calibration == 1
        expected = np.linalg.norm(W) / np.linalg.norm(D)
        np.testing.assert_allclose(state.trust_ratio, expected, rtol=1e-5)

    @pytest.mark.parametrize("calibrate", [True, False])
    def test_no_direction_no_ratio(self, calibrate):
        for eps in (0.0, 1e-6):
            [(updates, state)] = self.run([0 * D], [W], calibrate=calibrate, eps=eps)
            assert not updates.any()
            assert state.raw_trust_ratio == state.trust_ratio == 1
            assert state.calibration == (not calibrate)
        seen = self.run([0 * D, 0 * D, D, D], [W, 2 * W, 3 * W, 6 * W])
        assert [bool(state.calibration) for _, state in seen] == [False] * 2 + [True] * 2
        ratios = [float(state.trust_ratio) for _, state in seen]
        np.testing.assert_allclose(ratios, [1, 1, 1, 2], rtol=1e-5)

    @pytest.mark.parametrize("calibrate", [True, False])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_non_finite_values_give_nan_and_never_enter_c(self, bad, calibrate):
        """At the first step and after c is set: an infinity is no small ratio."""
        directions = D.at[1, 1].set(bad), D, D.at[1, 1].set(bad), D
        seen = self.run(directions, [W, W, W, 2 * W], calibrate=calibrate)
        for direction, (updates, state) in zip(directions, seen, strict=True):
            finite = bool(jnp.isfinite(direction).all())
            assert bool(jnp.isfinite(state.trust_ratio)) == finite
            assert bool(jnp.isnan(updates).all()) == (not finite)
        first, *others = [float(state.calibration) for _, state in seen]
        assert first == (not calibrate) and len(set(others)) == 1 and others[0] > 0
        one, _, two = (state.raw_trust_ratio for _, state in seen[1:])
        np.testing.assert_allclose(two, 2 * one, rtol=1e-5)

    def test_float64_is_float64(self, enable_x64):
        w, d = np.asarray(W, np.float64), np.asarray(D, np.float64)
        [_, (updates, state)] = self.run([jnp.asarray(d)] * 2, [jnp.asarray(w), 2 * w])
        assert state.trust_ratio.dtype == updates.dtype == jnp.float64
        w, d = np.linalg.norm(w), np.linalg.norm(d)
        ratio = 2 * w / (w / (d + 1e-6) * d + 1e-6)
        np.testing.assert_allclose(state.trust_ratio, ratio, rtol=1e-14)

    @pytest.mark.extended
    def test_c_is_set_once_where_other_leaves_are_float64(self, enable_x64):
        """Also a c of 1: the count says whether it is set."""
        params = {"w": jnp.eye(4, dtype="float32"), "b": jnp.zeros((), "float64")}
        grads = jax.tree.map(jnp.negative, params)
        arguments = {"weight_decay": 0.0, "consistent_rms": None, "eps": 0.0}
        optimizer = orscale(0.3, ns_steps=12, **arguments)
        state, c = optimizer.init(params), []
        for _ in range(3):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            c.append(readout(state, "calibration")["w"])
            assert readout(state, "anchor_count")["w"] == 1
        assert c[0].dtype == jnp.float32
        assert c[0] == c[1] == c[2]
        np.testing.assert_allclose(c[0], 1, rtol=1e-6)

    def test_norms_of_float16_matrices_are_computed_in_float32(self):
        w = jnp.full((64, 64), 300.0, jnp.float16)  # Its square overflows float16.
        [(updates, state)] = self.run([w], [w])
        np.testing.assert_allclose(state.trust_ratio, 1, rtol=1e-5)
        assert jnp.isfinite(updates).all()


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: orthogonalize(ns_steps=0), "ns_steps=0"),
        (lambda: scale_by_shape(-1.0), "consistent_rms=-1"),
        (
            lambda: scale_by_shape(0.3, scale_mode="unit_rms_norm"),
            "consistent_rms=0.3.*no effect with scale_mode='unit_rms_norm'.*leave it out",
        ),
        (lambda: scale_by_calibrated_trust_ratio(r_min=2, r_max=1), "r_min=2.*r_max=1"),
        (lambda: scale_by_calibrated_trust_ratio(anchor_steps=1.5), "anchor_steps=1.5"),
        (
            lambda: where_nonzero(optax.sgd),
            "inner is of type function: pass a gradient transformation",
        ),
        (lambda: keep_master_weights(3), "inner is of type int: pass a gradient tran"),
    ],
)
def test_bad_arguments_are_refused_at_once(build, words):
    with pytest.raises(ValueError, match=words):
        build()
