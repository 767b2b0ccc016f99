"""The boxes of Flax and Haliax, off any mesh."""

import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import meta
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import describe, muon, orscale
from orscale_jax.parameters.dimension_numbers import is_resolvable
from orscale_jax.trees import boxes
from tests.runs import readout

LAYERS = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
Layers, Rows, Columns = hax.make_axes(layers=3, rows=4, columns=5)
NAMES = ("layers", "rows", "columns")
BOXES = {
    "Partitioned": nn.Partitioned(LAYERS, NAMES),
    "LogicallyPartitioned": nn.LogicallyPartitioned(LAYERS, NAMES),
    "Variable": nnx.Param(LAYERS, out_sharding=NAMES, eager_sharding=False),
    "spec": nnx.Param(LAYERS, out_sharding=P(*NAMES), eager_sharding=False),
    "plain": nnx.Param(LAYERS),
    "NamedArray": hax.named(LAYERS, (Layers, Rows, Columns)),
    "nested": nn.Partitioned(nn.Partitioned(LAYERS, NAMES), NAMES),
}
NUMBERS = Dims(1, 2)


def names_of(box):
    if isinstance(box, hax.NamedArray):
        return tuple(axis.name for axis in box.axes)
    if isinstance(box, nnx.Variable):
        names = box.get_metadata("out_sharding", None)
        return names and tuple(names)
    return box.names


def test_nodes_that_are_no_box_of_one_array():
    assert not boxes.is_box(nnx.Param({"a": 1, "b": 2}))
    assert not boxes.is_box({"value": 1}) and not boxes.is_box(jnp.ones(2))
    numbers = nn.Partitioned(NUMBERS, NAMES)
    assert not boxes.is_box(numbers)
    assert boxes.unbox({"w": numbers}, is_resolvable) == {"w": NUMBERS}


class Unnamed(meta.AxisMetadata):
    """A user's own box, which has no names."""

    def __init__(self, value):
        self.value = value

    def unbox(self):
        return self.value

    replace_boxed = add_axis = remove_axis = None


jax.tree_util.register_pytree_node(
    Unnamed, lambda box: ((box.value,), None), lambda _, values: Unnamed(*values)
)
Unnamed.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("name", [*BOXES, "unnamed"])
def test_arrays_per_matrix_are_in_boxes_of_their_own_axes(name):
    box = Unnamed(LAYERS) if name == "unnamed" else BOXES[name]
    optimizer = orscale(1e-3, weight_dimension_numbers={"w": NUMBERS})
    state = optimizer.init({"w": box})
    [(_, momentum)] = optax.tree.get_all_with_path(state, "trace")
    assert jax.tree.structure(momentum["w"]) == jax.tree.structure(box)
    found = optax.tree.get(state, "numbers")["w"]
    assert jax.tree.leaves(found)[0].shape == (7, 3)
    if name in ("unnamed", "NamedArray"):  # Haliax has no axes without a name.
        assert isinstance(found, jax.Array)
    else:
        assert type(found) is type(box)
        assert names_of(found) == (None if name == "plain" else (None, "layers"))
    assert readout(state, "trust_ratio")["w"].shape == (3,)  # Without a box.


@pytest.mark.extended
@pytest.mark.parametrize("build", [orscale, pytest.param(muon, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BOXES)
def test_updates_with_and_without_boxes(build, name):
    optimizer = build(1e-3, weight_dimension_numbers=NUMBERS)
    boxed = {"w": BOXES[name]}
    bare = {"w": jnp.asarray(LAYERS)}
    wanted, wanted_state = optimizer.update(bare, optimizer.init(bare), bare)
    state = optimizer.init(boxed)
    for grads in (boxed, bare):
        for before in (state, boxes.unbox(state)):
            for params in (boxed, bare):
                updates, after = optimizer.update(grads, before, params)
                assert jax.tree.structure(updates) == jax.tree.structure(grads)
                assert jax.tree.structure(after) == jax.tree.structure(before)
                pairs = zip(
                    jax.tree.leaves((updates, after)),
                    jax.tree.leaves((wanted, wanted_state)),
                    strict=True,
                )
                for x, y in pairs:
                    np.testing.assert_array_equal(x, y)


def test_no_box_holds_a_masked_node_and_no_array_is_boolean():
    params = {"w": BOXES["Variable"], "bias": nnx.Param(jnp.ones(3))}
    state = orscale(1e-3, weight_dimension_numbers={"w": NUMBERS, "bias": None}).init(
        params
    )
    boxes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    assert all(jax.tree.leaves(box) for box in boxes)
    assert all(leaf.dtype != bool for leaf in jax.tree.leaves(state))


def test_callables_masks_and_tables_see_bare_arrays():
    params = {"w": nn.Partitioned(LAYERS[0], ("rows", "columns")), "b": jnp.ones(3)}
    seen = []

    def numbers(tree):
        seen.append(tree)
        return {"w": nn.Partitioned(Dims(0, 1), ("rows", "columns")), "b": None}

    optimizer = orscale(
        1e-3,
        weight_dimension_numbers=numbers,
        weight_decay_mask={"w": nn.Partitioned(False, ()), "b": True},
    )
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert not updates["w"].value.any() and updates["b"].any()
    assert not any(map(boxes.is_box, (tree["w"] for tree in seen)))
    rows = describe(params, optimizer).rows
    assert [row.path for row in rows] == ["b", "w"]
