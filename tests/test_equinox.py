"""Dimension numbers from Equinox's module types: layers, stacks, unresolved types."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.tree_util import keystr
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks, by_path, describe, muon, orscale
from orscale_jax.diagnostics import layer_names, read, summarize, tabulate
from orscale_jax.equinox import Weight, dimension_numbers
from orscale_jax.parameters.dimension_numbers import matrix_axes
from tests.derivatives import axes_by_derivatives
from tests.runs import assert_close, first_update, mesh_of

KEY = jax.random.key(0)
MATRIX = Dims(1, 0)  # (out, in)


def trained(model):
    return eqx.filter(model, eqx.is_inexact_array)


def table(model, params=None, **kwargs):
    """Path, as jax.tree_util.keystr writes it, to dimension numbers."""
    params = trained(model) if params is None else params
    found = dimension_numbers(model, **kwargs)(params)
    leaves = jax.tree.leaves_with_path(
        found, is_leaf=lambda node: node is None or isinstance(node, Dims)
    )
    paths = {path for path, _ in jax.tree.leaves_with_path(params)}
    return {jax.tree_util.keystr(path): of for path, of in leaves if path in paths}


LAYERS = {
    "linear": (lambda k: eqx.nn.Linear(3, 4, key=k), (3,)),
    "conv_1d": (lambda k: eqx.nn.Conv1d(2, 3, 3, key=k), (2, 4)),
    "conv": (lambda k: eqx.nn.Conv2d(2, 3, 2, key=k), (2, 3, 3)),
    "conv_transpose": (lambda k: eqx.nn.ConvTranspose2d(2, 3, 2, key=k), (2, 3, 3)),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_by_its_derivatives(name):
    build, shape = LAYERS[name]
    layer = build(KEY)
    x = jax.random.normal(jax.random.key(1), shape)

    def apply(weight, x):
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(x)

    found = dimension_numbers(layer)(trained(layer))
    axes = matrix_axes({"w": found.weight}, {"w": layer.weight})["w"]
    expected = axes_by_derivatives(apply, layer.weight, x)
    assert (axes.rows, axes.columns, axes.batch) == expected
    assert found.bias is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: eqx.nn.Embedding(5, 4, key=KEY),
        lambda: eqx.nn.LayerNorm((3, 4)),
        lambda: eqx.nn.RMSNorm((3, 4)),
        lambda: eqx.nn.GroupNorm(2, 4),
        lambda: eqx.nn.BatchNorm(4, axis_name="batch", mode="batch"),
        lambda: eqx.nn.PReLU(),
        lambda: eqx.nn.Conv2d(4, 8, 3, groups=4, key=KEY),
        lambda: eqx.nn.Dropout(0.1),
    ],
)
def test_layers_without_matrices(build):
    assert set(table(build()).values()) <= {None}
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), trained(build()))
    assert set(table(stacked).values()) <= {None}


@pytest.mark.extended
def test_wrappers_and_models():
    mlp = eqx.nn.MLP("scalar", "scalar", 5, 2, key=KEY)
    assert table(mlp) == {
        f".layers[{i}].{name}": numbers
        for i in range(3)
        for name, numbers in (("weight", MATRIX), ("bias", None))
    }
    attention = eqx.nn.MultiheadAttention(2, 8, use_output_bias=True, key=KEY)
    names = ("query", "key", "value", "output")
    expected = {f".{name}_proj.weight": MATRIX for name in names}
    assert table(attention) == expected | {".output_proj.bias": None}
    found = table(eqx.nn.WeightNorm(eqx.nn.Conv2d(2, 3, 2, key=KEY)))
    assert found == {".layer.weight": Dims((1, 2, 3), 0), ".layer.bias": None, ".g": None}
    linear, _ = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        eqx.nn.Linear(3, 4, key=KEY), "weight", key=KEY
    )
    assert table(linear)[".layer.weight"] == MATRIX
    models = {"a": [eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=KEY)])]}
    path = "['a'][0].layers[0]"
    assert table(models) == {f"{path}.weight": MATRIX, f"{path}.bias": None}


def build_stacked(*layers):
    build = lambda key: eqx.nn.MLP(4, 4, 6, 1, key=key)  # noqa: E731
    for _ in layers:
        build = eqx.filter_vmap(build)
    return build(jax.random.split(KEY, layers))


class TiedTable(eqx.Module):
    """The array of the table is kept in the embedding, or in the output layer."""

    shared: eqx.nn.Shared

    def __init__(self, kept):
        embed, up, head = jax.random.split(KEY, 3)
        layers = (
            eqx.nn.Embedding(9, 4, key=embed),
            eqx.nn.Linear(4, 4, key=up),
            eqx.nn.Linear(4, 9, use_bias=False, key=head),
        )
        removed = 2 - kept
        self.shared = eqx.nn.Shared(
            layers, lambda xs: xs[removed].weight, lambda xs: xs[kept].weight
        )

    def __call__(self, token):
        embed, up, head = self.shared()
        return head(up(embed(token)))


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("args", [(), (jnp.array(3),)])
def test_a_shared_table_takes_adamw(kept, args):
    model = TiedTable(kept)
    numbers = dimension_numbers(model, *args)(trained(model)).shared.pytree
    assert (numbers[kept].weight, numbers[1].weight) == (None, MATRIX)


class Discriminator(eqx.Module):
    layers: list

    def __init__(self):
        up, out = eqx.nn.Linear(4, 8, key=KEY), eqx.nn.Linear(8, 1, key=KEY)
        self.layers = [up, eqx.nn.BatchNorm(8, "batch", mode="batch"), out]

    def __call__(self, x, state):
        x, state = self.layers[1](self.layers[0](x), state)
        return self.layers[2](x), state


def test_a_norm_over_a_named_axis_does_not_stop_the_trace():
    model, state = eqx.nn.make_with_state(Discriminator)()
    numbers = dimension_numbers(model, jnp.ones(4), state)(trained(model)).layers
    assert (numbers[0].weight, numbers[2].weight) == (MATRIX, None)


@pytest.mark.extended
@pytest.mark.parametrize("layers", [(3,), (2, 3)])
def test_stacks_and_their_biases(layers):
    depth = len(layers)
    stacked = build_stacked(*layers)
    assert stacked.layers[0].bias.ndim == 1 + depth  # The shape of a matrix.
    found = dimension_numbers(stacked)(trained(stacked))
    for layer in found.layers:
        assert layer.weight == Dims(depth + 1, depth) and layer.bias is None
    abstract = eqx.filter_eval_shape(lambda: build_stacked(*layers))
    assert table(abstract, params=trained(stacked)) == table(stacked)


def test_stacks_along_another_axis_than_the_first_are_refused():
    build = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 5, key=key), out_axes=1)
    stacked = build(jax.random.split(KEY, 3))
    with pytest.raises(ValueError, match=r"'weight' of shape \(5, 3, 4\).*\(5, 4\)"):
        dimension_numbers(stacked)
    found = table(stacked, overrides={"weight": Dims(2, 0)})
    assert found == {".weight": Dims(2, 0), ".bias": None}


class Experts(eqx.Module):
    up: jax.Array
    down: list
    gain: jax.Array
    cell: eqx.nn.LSTMCell
    gru: eqx.nn.GRUCell
    mix: eqx.nn.Conv2d

    def __init__(self):
        self.up, self.down = jnp.ones((4, 8, 16)), [jnp.ones((16, 8))]
        self.gain = jnp.ones(8)
        self.cell = eqx.nn.LSTMCell(3, 4, key=KEY)
        self.gru = eqx.nn.GRUCell(5, 4, key=KEY)
        self.mix = eqx.nn.Conv2d(4, 8, 3, groups=2, key=KEY)


REST = {
    ".gain": None, ".cell.bias": None, ".gru.bias": None, ".gru.bias_n": None,
    ".mix.bias": None, ".cell.weight_hh": MATRIX,
    ".cell.weight_ih": Blocks(1, 0, block_axis=0, blocks=4),
    ".gru.weight_ih": Blocks(1, 0, block_axis=0, blocks=3),
    ".gru.weight_hh": Blocks(1, 0, block_axis=0, blocks=3),
    ".mix.weight": Blocks((1, 2, 3), 0, block_axis=0, blocks=2),
}  # fmt: skip


class Flow(eqx.Module):
    cvf: dict
    norm: eqx.nn.LayerNorm


def test_names_of_vectors_decide_where_types_say_nothing():
    """A gain of (layers, features) is no matrix; other names stay open."""
    names = ("scale", "log_std", "bias")
    model = Flow({name: jnp.ones((16, 3)) for name in names}, eqx.nn.LayerNorm((4, 4)))
    assert set(table(model).values()) == {None}
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), model)
    assert set(table(stacked).values()) == {None}
    with pytest.raises(ValueError, match=r"'cvf\.mix' of shape \(16, 3\): there is no"):
        dimension_numbers(Flow({"mix": jnp.ones((16, 3))}, model.norm))


@pytest.mark.extended
def test_open_parameters_are_one_error():
    with pytest.raises(ValueError, match="do not say which") as error:
        dimension_numbers(Experts())
    text = str(error.value)
    assert f"(4, 8, 16): there is no rule for it in {__name__}.Experts" in text
    assert "'down.0' of shape (16, 8): there is no rule" in text
    assert all(name not in text for name in ("gain", "bias", "cell", "gru", "mix"))


def test_overrides_rules_and_heads():
    overrides = {"cell.weight_hh": MATRIX, "up|down": Dims(-2, -1)}
    expected = {".up": Dims(-2, -1), ".down[0]": Dims(-2, -1)}
    assert table(Experts(), overrides=overrides) == expected | REST
    del overrides["up|down"]
    rules = {
        Experts: lambda module: {
            "up": Weight((4, 8, 16), 1, 2),
            "down": Weight((16, 8), 0, 1),
            "gain": None,
        }
    }
    found = table(Experts(), overrides=overrides, rules=rules)
    assert found == {".up": Dims(1, 2), ".down[0]": Dims(0, 1)} | REST
    model = {
        "readout": eqx.nn.Linear(3, 4, key=KEY),
        "lm_head": eqx.nn.Linear(3, 4, key=KEY),
    }
    assert table(model)["['readout'].weight"] == MATRIX
    assert set(table(model, overrides={"readout|lm_head": "adamw"}).values()) == {None}
    with pytest.raises(ValueError, match=r"'kernel' of overrides matches no parameter"):
        dimension_numbers(model, overrides={"kernel": "adamw"})
    by_text = {eqx.nn.Linear: lambda module: {"weight": "adamw", "bias": None}}
    with pytest.raises(ValueError, match=r"rules: found 'adamw' at .*readout.*None"):
        table(model, rules=by_text)


def test_parameters_of_another_model():
    numbers = dimension_numbers(eqx.nn.Linear(3, 4, use_bias=False, key=KEY))
    with pytest.raises(
        ValueError, match="'bias' is no floating-point array of the model"
    ):
        numbers(trained(eqx.nn.Linear(3, 4, key=KEY)))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("build", [orscale, muon])
def test_trees_that_are_callable(build):
    """A tree of the model's type has its __call__, and still counts as a tree."""
    model = trained(eqx.nn.MLP(3, 4, 5, 1, key=KEY))
    numbers = dimension_numbers(model)
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, model)
    assert callable(numbers(model)) and callable(mask)

    def steps(params, numbers, mask):
        given = {"weight_dimension_numbers": numbers, "weight_decay_mask": mask}
        optimizer = build(0.1, weight_decay=0.5, **given)
        return by_path_of(first_update(optimizer, params, params)[0])

    def by_path_of(tree):
        leaves = jax.tree.leaves_with_path(tree)
        return {
            path[-1].key if isinstance(tree, dict) else keystr(path): x
            for path, x in leaves
        }

    bare = by_path_of(model)
    expected = steps(
        bare,
        {path: MATRIX if leaf.ndim > 1 else None for path, leaf in bare.items()},
        {path: leaf.ndim > 1 for path, leaf in bare.items()},
    )
    for given in (
        (numbers(model), mask),
        (by_path({"bias": "adamw"}, otherwise=numbers(model)), lambda _: mask),
    ):
        assert_close(steps(model, *given), expected, atol=0)


@pytest.mark.extended
@pytest.mark.parametrize("model", ["mlp", "in a dictionary"])
def test_readings_of_trees_that_are_callable(model):
    """Their biases are None where layers have none."""
    params = trained(eqx.nn.MLP(3, 4, 5, 1, use_bias=False, key=KEY))
    if model != "mlp":
        params = {"first": params.layers[0], "second": params.layers[1]}
    _, _, state = first_update(orscale(0.1), params, params)
    reading = read(state, params, learning_rate=0.1)
    assert len(jax.tree.leaves(reading.relative_step)) == 2
    table = tabulate(reading, layer_names(params))
    assert len(table["class"]) == len(table["matrix"]) == 2
    labels = jax.tree.map(lambda _: "all", params)
    assert tabulate(reading, labels)["class"].tolist() == ["all", "all"]
    assert "optimizer/all/growth/mean" in summarize(reading, labels)


@pytest.mark.extended
def test_shardings_in_a_tree_that_is_callable():
    params = trained(eqx.nn.MLP(4, 4, 4, 1, key=KEY))
    where = NamedSharding(mesh := mesh_of({"x": 2}), P("x"))
    params = jax.device_put(params, where)
    everywhere = jax.tree.map(lambda _: where, params)
    expected = muon(0.1).update(params, muon(0.1).init(params), params)[0]
    for given in (everywhere, params, lambda _: everywhere):
        optimizer = muon(0.1, mesh=mesh, param_shardings=given)
        found, _, _ = first_update(optimizer, params, params)
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_a_mask_of_arrays_that_is_callable():
    model = trained(eqx.nn.Linear(3, 4, key=KEY))
    zeros = jax.tree.map(jnp.zeros_like, model)
    for boolean in (bool, np.bool_, jnp.bool_):
        mask = jax.tree.map(lambda leaf, b=boolean: b(leaf.ndim > 1), model)
        optimizer = muon(0.1, weight_decay=0.5, weight_decay_mask=mask)
        updates, _ = optimizer.update(model, optimizer.init(model), model)
        undecayed, _ = muon(0.1, weight_decay=0.0).update(
            model, muon(0.1).init(model), zeros
        )
        np.testing.assert_array_equal(updates.bias, undecayed.bias)
        assert (updates.weight != undecayed.weight).any()


@pytest.mark.parametrize("build", [lambda make: make(), eqx.filter_eval_shape])
def test_of_a_model_its_arrays_of_floats_are_described(build):
    """Not the functions and the integers that are leaves, too."""

    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        steps: jax.Array
        scale: float

    model = build(
        lambda: Model(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)), jnp.arange(3), 0.5)
    )
    numbers = dimension_numbers(model)
    rows = describe(model, muon(1e-2, weight_dimension_numbers=numbers)).rows
    wanted = [f"mlp.layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")]
    assert [row.path for row in rows] == wanted
