"""What describe(probe=True) says of the first update, against chains that are known."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    describe,
    family,
    keep_master_weights,
    muon,
    orscale,
    orthogonalize,
    polar_factor,
    scale_by_path,
)
from orscale_jax.audit.probe import _possible_axes
from tests.runs import AUTO, EXPLICIT, mesh_of, placed, tree

SHAPES = {"w": (24, 16), "x": (8, 32), "b": (6,)}
FROZEN = {"w": True, "x": False, "b": True}
WARMUP = optax.linear_schedule(0.0, 1e-2, 9)


def kinds(optimizer, params=None):
    params = tree(0, shapes=SHAPES) if params is None else params
    found = describe(params, optimizer, probe=True).rows
    return " ".join(f"{row.path}:{row.first_update}" for row in found)


def by_hand(update):
    """A chain's member that has no state and takes no parameters."""
    return optax.GradientTransformation(
        lambda params: (), lambda grads, state: (jax.tree.map(update, grads), state)
    )


def normalized(steps):
    """Newton–Schulz of so few steps, written by hand."""
    return by_hand(lambda g: g if g.ndim < 2 else polar_factor(g, steps=steps))


ALL = "b:{0} w:{0} x:{0}".format
OURS = "b:element-wise w:orthogonal x:orthogonal"
PARTS = {"a": muon(1e-2), "b": optax.sgd(1e-2), "c": optax.set_to_zero()}
CASES = {
    "partition": (
        optax.partition(PARTS, {"w": "a", "x": "b", "b": "c"}),
        "b:none w:orthogonal x:other",
    ),
    "adamw": (optax.adamw(1e-3, weight_decay=10.0), ALL("element-wise")),
    "sgd": (optax.sgd(1e-2, 0.9), ALL("other")),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1)), ALL("other")),
    "rounded": (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), ALL("element-wise")),
    # Entries that are almost of one size, as thin rows of which are almost orthogonal.
    "damped": (by_hand(lambda g: g / jnp.sqrt(0.2 + g**2)), ALL("other")),
    "nothing": (optax.set_to_zero(), ALL("none")),
    # Of decay alone, which does not wait for a gradient.
    "decay": (
        optax.chain(optax.set_to_zero(), optax.add_decayed_weights(1.0)), ALL("other"),
    ),
    "the loss": (
        optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
        ALL("element-wise"),
    ),
    "orscale": (orscale(WARMUP, weight_decay=10.0), OURS),
    "optax's muon": (optax.contrib.muon(1e-2, weight_decay=1.0), OURS),
    "accumulated": (optax.MultiSteps(muon(1e-2), 5), OURS),
    "on a sphere": (family.hyperball(1e-2, adam_learning_rate=1e-2), OURS),
    "by hand": (normalized(5), "b:other w:orthogonal x:orthogonal"),
    "no Newton–Schulz": (normalized(1), ALL("other")),
    "frozen": (
        optax.chain(muon(1e-2), optax.transforms.freeze(FROZEN)),
        "b:none w:none x:orthogonal",
    ),
    "injected": (optax.inject_hyperparams(muon)(1e-2), OURS),
}  # fmt: skip


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", CASES)
def test_a_chain_is_told_by_what_it_does(name):
    optimizer, expected = CASES[name]
    assert kinds(optimizer) == expected


@pytest.mark.extended
def test_single_numbers_and_rows():
    """Any is even: a sign and a polar factor are told by ignoring the gradient's size."""
    params = {"s": jnp.ones(()), "row": jnp.ones((1, 5)), "rows": jnp.ones((2, 3, 1))}
    params |= {"w": jnp.ones((24, 16))}  # Else a clip makes each a polar factor.
    numbers = {"s": None, "row": Dims(0, 1), "rows": Dims(1, 2), "w": None}
    ours = orscale(WARMUP, weight_decay=10.0, weight_dimension_numbers=numbers)
    for optimizer, expected in [
        (
            CASES["adamw"][0],
            "row:element-wise rows:element-wise s:element-wise w:element-wise",
        ),
        (CASES["clipped"][0], "row:other rows:other s:other w:other"),
        (ours, "row:orthogonal rows:orthogonal s:element-wise w:element-wise"),
    ]:
        assert kinds(optimizer, params) == expected
    assert kinds(optax.sgd(1.0), params) == "row:other rows:other s:other w:other"


STACKED = {"layers": (3, 8, 12), "qkv": (8, 24), "cut": (8, 20), "heads": (8, 2, 4)}
NUMBERS = {
    "layers": Dims(1, 2),
    "qkv": Blocks(0, 1, block_axis=1, blocks=6),
    "cut": Blocks(0, 1, block_axis=1, blocks=(12, 8)),
    "heads": Dims(0, 2),
}


@pytest.mark.extended
def test_along_the_axes_of_layers_heads_and_blocks():
    params = tree(0, shapes=STACKED)
    ours = orscale(1e-2, weight_dimension_numbers=NUMBERS)
    own = optax.chain(orthogonalize(weight_dimension_numbers=NUMBERS), optax.scale(1e-2))
    for optimizer in (ours, own):
        found = describe(params, optimizer, probe=True).rows
        assert [row.first_update for row in found] == ["orthogonal"] * 5
    # Of another optimizer, any reading of the axes will do.
    only = orthogonalize(weight_dimension_numbers={"layers": Dims(1, 2)})
    assert kinds(only, {"layers": params["layers"]}) == "layers:orthogonal"


@pytest.mark.extended
def test_five_axes_are_read_as_neighbours():
    """A stack of convolutions; each way to read the axes is one program to compile."""
    params = tree(0, shapes={"stack": (2, 2, 2, 6, 24)})
    only = orthogonalize(weight_dimension_numbers={"stack": Dims((1, 2, 3), 4)})
    assert kinds(only, params) == "stack:orthogonal"
    assert kinds(optax.sgd(0.1), params) == "stack:other"
    assert len([*_possible_axes(params["stack"])]) == 10


@pytest.mark.compiled
@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_sharded_parameters(kind):
    """Their spectrum is read without gathering them."""
    from orscale_jax.audit import probe
    from orscale_jax.parameters.axes import MatrixAxes

    mesh = mesh_of({"a": 4, "b": 2}, kind)
    specs = {"w": P("a", "b"), "x": P("b", "a"), "b": P("b")}
    params = placed(tree(0, shapes=SHAPES), mesh, specs)
    assert kinds(muon(1e-2), params) == OURS
    on_one_device = {"b": jnp.zeros(SHAPES["b"])}  # Made without a mesh.
    with jax.set_mesh(mesh):
        assert kinds(muon(1e-2), params | on_one_device) == OURS
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    assert kinds(optax.adamw(1e-2), abstract) == ALL("element-wise")
    axes = MatrixAxes((), (0,), (1,))
    program = probe.even_spectrum.lower(params["w"], axes, 0).compile().as_text()
    assert "all-reduce" in program and "all-gather" not in program


@pytest.mark.extended
def test_boxes_modules_other_dtypes_and_masks():
    boxed = {"w": nn.Partitioned(jnp.ones((24, 16), jnp.bfloat16), (None, None))}
    assert kinds(muon(1e-2), boxed) == "w:orthogonal"
    module = eqx.filter(eqx.nn.Linear(9, 5, key=jax.random.key(0)), eqx.is_inexact_array)
    assert kinds(muon(1e-2), module) == "weight:orthogonal bias:element-wise"
    assert kinds(optax.sgd(1.0), {}) == ""
    others = {
        "e": jnp.ones((0, 3)),
        "c": jnp.ones((4, 4), jnp.complex64),
        "n": jnp.ones(3, int),
        "m": None,
    }
    assert kinds(optax.sgd(1.0), others) == "c:other e:none n:none"


def test_the_sizes():
    """Those of the parameters' own update, decay included; merged by mean squares."""
    params = {f"l{i}": {"w": jnp.full((4, 4), 10.0 * i)} for i in range(2)}
    optimizer = optax.chain(optax.scale_by_sign(), optax.add_decayed_weights(0.1))
    description = describe(params, optimizer, probe=True)
    sizes = [row.first_update_rms for row in description.rows]
    np.testing.assert_allclose(sizes, [1, 2], rtol=1e-6)
    line = str(description).splitlines()[2]
    assert line.split()[:3] == ["l*.w", "×", "2"] and "element-wise" in line
    assert f"{2.5**0.5:.4g}" in line
    assert "first_update,first_update_rms" in description.to_csv()
    without = describe(params, optimizer)
    assert "first" not in str(without)


@pytest.mark.extended
def test_weights_that_are_frozen_behind_keep_master_weights_drift():
    params = {"w": jnp.ones((24, 16), jnp.bfloat16), "x": jnp.ones((8, 32), jnp.bfloat16)}
    frozen = optax.transforms.freeze({"w": True, "x": False})
    outside = optax.chain(keep_master_weights(muon(1e-3)), frozen)
    inside = keep_master_weights(optax.chain(muon(1e-3), frozen))
    for optimizer, check in ((outside, ("master weights drift",)), (inside, ())):
        found = describe(params, optimizer, probe=True).rows
        assert [row.first_update for row in found] == ["none", "orthogonal"]
        assert [row.check for row in found] == [check, ()]


@pytest.mark.extended
@pytest.mark.parametrize(
    "after",
    [
        scale_by_path({"w": 0.5}),
        optax.masked(optax.add_decayed_weights(-1e-3), {"w": True, "x": False}),
        optax.masked(optax.clip(1e-4), {"w": True, "x": False}),
    ],
)
def test_weights_whose_updates_change_behind_keep_master_weights_drift(after):
    """Their parameters lose a part of each update to rounding, or all of it."""
    draw = functools.partial(jax.random.normal, jax.random.key(0), dtype=jnp.bfloat16)
    params = {"w": draw((24, 16)), "x": draw((8, 32))}
    for size in (1.0, 1e-4, 1e-12):
        scaled = jax.tree.map(lambda x, size=size: x * jnp.bfloat16(size), params)
        inside = keep_master_weights(optax.chain(muon(1e-3), after))
        for row in describe(scaled, inside, probe=True).rows:
            assert row.check == ()
    outside = optax.chain(keep_master_weights(muon(1e-3)), after)
    found = describe(params, outside, probe=True).rows
    assert [row.check for row in found] == [("master weights drift",), ()]


def test_what_cannot_be_probed():
    params = tree(0, shapes=SHAPES)
    with pytest.raises(ValueError, match="probe=True is not valid: pass the optimizer"):
        describe(params, probe=True)
    ambiguous = {"w": jnp.ones((2, 3, 4))}
    with pytest.raises(ValueError, match=r"'w' of shape \(2, 3, 4\) is ambiguous"):
        describe(ambiguous, muon(1e-2), probe=True)

    def update(grads, state, params=None, *, key):
        return grads, state

    keyed = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(ValueError, match=r"raised TypeError: .*'key'\nPass probe=False"):
        describe(params, keyed, probe=True)
