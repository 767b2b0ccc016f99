"""Flat scalars and tables of a reading, against NumPy."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from orscale_jax import family, muon, orscale
from orscale_jax.diagnostics import (
    Reading,
    find_problems,
    layer_names,
    read,
    summarize,
    tabulate,
)
from tests.runs import AUTO, EXPLICIT, mesh_of, placed

MASKED = optax.MaskedNode()
CLASSES = {"up": "mlp up", "experts": "routed expert up", "odd": None, "bias": "bias"}


def trees():
    """A reading of 1 + 6 + 1 matrices with numbers of all kinds."""
    rng = np.random.default_rng(0)
    shapes = {"up": (), "experts": (2, 3), "odd": ()}

    def tree(fn):
        return {n: jnp.asarray(fn(s)) for n, s in shapes.items()} | {"bias": MASKED}

    def numbers(shape):
        return rng.lognormal(size=shape).astype(np.float32)

    def flags(shape):
        return rng.random(shape) < 0.4

    fields = {
        name: tree(numbers if name in NUMBERS else flags) for name in Reading._fields
    }
    c = fields["calibration"]["experts"].at[0, :2].set(jnp.array([0, jnp.inf]))
    fields["calibration"] |= {"experts": c}
    return Reading(**fields)


NUMBERS = Reading._fields[:7]


def flat(tree, names=("experts", "odd", "up")):
    return np.concatenate([np.ravel(tree[name]).astype(np.float64) for name in names])


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "key, names",
    [
        ("", ("experts", "odd", "up")),
        ("mlp_up/", ("up",)),
        ("routed_expert_up/", ("experts",)),
        ("other/", ("odd",)),
    ],
)
def test_statistics_are_numpys(key, names):
    reading = trees()
    scalars = jax.jit(lambda reading: summarize(reading, CLASSES))(reading)
    for field in ("trust_ratio", "raw_trust_ratio", "relative_step", "growth"):
        values = flat(getattr(reading, field), names)
        expected = {
            "mean": values.mean(), "min": values.min(), "max": values.max(),
            "p05": np.percentile(values, 5), "p50": np.percentile(values, 50),
            "p95": np.percentile(values, 95),
        }  # fmt: skip
        for statistic, value in expected.items():
            found = scalars[f"optimizer/{key}{field}/{statistic}"]
            assert found == pytest.approx(value, rel=1e-5), (field, statistic)
    c = flat(reading.calibration, names)
    on = (c > 0) & np.isfinite(c)
    log = np.log(flat(reading.trust_ratio, names)[on])
    weight = flat(reading.relative_step, names)[on]
    mean = np.average(log, weights=weight)
    spread = np.average((log - mean) ** 2, weights=weight) ** 0.5
    found = [scalars[f"optimizer/{key}trust_ratio/{x}"] for x in ("uniform", "spread")]
    np.testing.assert_allclose(found, [np.exp(mean), spread], rtol=1e-5, atol=1e-6)
    shares = {
        "at_r_min": flat(reading.at_r_min, names),
        "at_r_max": flat(reading.at_r_max, names),
        "not_started": 1 - flat(reading.started, names),
        "not_anchored": c == 0,
        "without_scale": np.isinf(c),
        "not_finite": np.zeros(1),
    }
    for share, values in shares.items():
        found = scalars[f"optimizer/{key}share_{share}"]
        assert found == pytest.approx(np.mean(values)), share
    chex.assert_rank(list(scalars.values()), 0)


@pytest.mark.extended
def test_without_classes_with_another_prefix_and_single_matrices():
    reading = trees()
    scalars = summarize(reading, prefix="opt.")
    assert len(scalars) == 4 * 6 + 2 + 6
    assert all(name.startswith("opt.") and "mlp" not in name for name in scalars)
    more = summarize(reading, prefix="opt.", matrices=r"^up$|\[1, 2\]")
    assert more["opt.up/growth"] == reading.growth["up"]
    ratio = reading.trust_ratio["experts"][1, 2]
    assert more["opt.experts[1, 2]/trust_ratio"] == ratio
    assert len(more) == len(scalars) + 2 * 4


def test_muon_has_shares_of_what_it_has():
    params = {"w": jnp.eye(3)}
    scalars = summarize(read(muon(1e-3).init(params), params))
    assert set(scalars) == {"optimizer/share_not_started", "optimizer/share_not_finite"}


def test_a_ratio_that_is_not_finite_is_seen():
    reading = trees()
    norm = reading.weight_norm | {"up": jnp.float32(jnp.nan)}
    ratio = reading.trust_ratio | {"up": jnp.float32(jnp.nan)}
    scalars = summarize(reading._replace(weight_norm=norm, trust_ratio=ratio))
    assert scalars["optimizer/share_not_finite"] == 1 / 8
    assert np.isnan(scalars["optimizer/trust_ratio/mean"])


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_on_8_devices(kind):
    mesh, reading = mesh_of({"expert": 2, "data": 4}, kind), trees()
    specs = {"up": P(), "experts": P("expert"), "odd": P(), "bias": P()}
    placed_reading = Reading(*(placed(tree, mesh, specs) for tree in reading))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda reading: summarize(reading, CLASSES))(placed_reading)
    chex.assert_trees_all_close(found, summarize(reading, CLASSES), rtol=1e-6)
    table, expected = (tabulate(x, CLASSES) for x in (placed_reading, reading))
    np.testing.assert_array_equal(table["growth"], expected["growth"])


@pytest.mark.extended
def test_the_uniform_part_without_relative_steps_and_before_the_first():
    reading = trees()._replace(relative_step=None)
    c, ratio = flat(reading.calibration), flat(reading.trust_ratio)
    log = np.log(ratio[(c > 0) & np.isfinite(c)])
    found = summarize(reading, prefix="")
    np.testing.assert_allclose(found["trust_ratio/uniform"], np.exp(log.mean()), 1e-5)
    np.testing.assert_allclose(found["trust_ratio/spread"], log.std(), 1e-5)
    params = {"w": jnp.eye(3)}
    found = summarize(read(orscale(1e-3).init(params), params), prefix="")
    assert found["trust_ratio/uniform"] == 1 and found["trust_ratio/spread"] == 0


def test_a_table_has_a_row_for_each_matrix():
    reading = trees()
    table = tabulate(reading, CLASSES, {"signal": reading.growth})
    names = [f"experts[{i}, {j}]" for i in range(2) for j in range(3)] + ["odd", "up"]
    assert table["matrix"].tolist() == names
    classes = ["routed expert up"] * 6 + ["other", "mlp up"]
    assert table["class"].tolist() == classes
    assert [*table] == ["matrix", "class", *Reading._fields, "signal"]
    for field in Reading._fields:
        np.testing.assert_array_equal(table[field], flat(getattr(reading, field)))


def test_measurements_may_be_numbers_of_python():
    reading = read(orscale(1e-3).init({"up": jnp.eye(3)}), {"up": jnp.eye(3)})
    for number in (0.1, 2, True):
        assert tabulate(reading, None, {"signal": {"up": number}})["signal"] == [number]


@pytest.mark.extended
def test_a_class_of_empty_stacks_has_no_statistics():
    params = {"e": jnp.zeros((0, 4, 3)), "w": jnp.eye(4)}
    numbers = {"e": MuonDimensionNumbers(1, 2), "w": MuonDimensionNumbers(0, 1)}
    state = orscale(1e-3, weight_dimension_numbers=numbers).init(params)
    reading = read(state, params, weight_dimension_numbers=numbers)
    scalars = summarize(reading, {"e": "expert", "w": "other"})
    assert not any("expert" in name for name in scalars)
    assert scalars["optimizer/growth/mean"] == scalars["optimizer/other/growth/mean"]


def test_layers_are_paths_with_stars():
    """In flat and boxed trees, also of masked leaves and of none."""
    masked, w = optax.MaskedNode(), jnp.ones((2, 2))
    paths = {
        "blocks.12.attn.query.kernel": "blocks.*.attn.query",
        "Block_0.Dense_1.bias": "Block_*.Dense_*.bias",
        "layers.0.mlp.w1": "layers.*.mlp.w1",
        "lm_head.weight": "lm_head",
    }
    assert layer_names(dict.fromkeys(paths, w)) == paths
    boxed = {"up": nn.Partitioned(w, names=("x", None)), "masked": masked, "b": None}
    assert layer_names(boxed) == {"up": "up", "masked": masked, "b": None}
    assert layer_names(w) == "other" and layer_names({}) == {}


class TestErrors:
    """Inputs that are refused, and what the messages say."""

    @pytest.mark.parametrize("fn", [summarize, tabulate])
    def test_classes(self, fn):
        with pytest.raises(ValueError, match=r"pass a tree, such as layer_names\(par"):
            fn(trees(), layer_names)
        with pytest.raises(ValueError, match="classes must be a tree of the parameters'"):
            fn(trees(), {"up": "a"})

    def test_patterns(self):
        with pytest.raises(ValueError, match="'down' is not valid: no name has it"):
            summarize(trees(), matrices="down")
        for wrong, message in (("[", "unterminated"), (["up"], "pass a string")):
            with pytest.raises(ValueError, match=rf"^matrices=.*{message}"):
                summarize(trees(), matrices=wrong)

    def test_measurements(self):
        reading = trees()
        wrong = reading.growth | {"experts": jnp.ones(6)}
        with pytest.raises(ValueError, match="not have one entry for each matrix"):
            tabulate(reading, None, {"signal": wrong})


@pytest.mark.extended
def test_optimizers_of_several_kinds_in_one_partition():
    """A quantity is summarized over the matrices that have it; tables have NaN."""
    params = {"a": jnp.eye(4), "b": 2 * jnp.eye(4), "c": 3 * jnp.eye(4)}
    kinds = {"a": orscale(1e-2), "b": muon(1e-2), "c": family.hyperball(1e-2)}
    optimizer = optax.partition(kinds, {name: name for name in params})
    _, state = optimizer.update(params, optimizer.init(params), params)
    reading = read(state, {name: 1.5 * w for name, w in params.items()})
    scalars = summarize(reading, {"a": "x", "b": "y", "c": "y"}, "", matrices="a|b|c")
    ratio = float(reading.trust_ratio["a"])
    assert scalars["trust_ratio/mean"] == scalars["x/trust_ratio/mean"] == ratio
    np.testing.assert_allclose(scalars["growth/min"], 1.5, rtol=1e-6)
    assert scalars["y/growth/max"] == scalars["c/growth"] == reading.growth["c"]
    assert "y/trust_ratio/mean" not in scalars and "b/growth" not in scalars
    assert scalars["share_not_anchored"] == 0 and "y/share_at_r_max" not in scalars
    table = tabulate(reading)
    np.testing.assert_array_equal(table["trust_ratio"], [ratio, np.nan, np.nan])
    np.testing.assert_array_equal(np.isnan(table["growth"]), [False, True, False])
    np.testing.assert_array_equal(table["anchored"], [True, False, False])
    assert table["started"].all()  # The report says "no update yet" of others.
    assert table["anchored"].dtype == bool and not find_problems(reading)
    assert scalars["trust_ratio/uniform"] == pytest.approx(ratio, rel=1e-6)
    with pytest.raises(ValueError, match="ratio does not have one entry"):
        tabulate(reading, measurements={"ratio": reading.trust_ratio})
    other = reading._replace(trust_ratio=reading.trust_ratio | {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="trust_ratio does not have one entry"):
        tabulate(other)
