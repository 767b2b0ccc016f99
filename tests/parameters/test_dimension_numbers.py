"""Which leaves are matrices, along which axes, and the conversion there and back."""

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks, orscale
from orscale_jax.parameters import dimension_numbers
from orscale_jax.parameters.axes import MatrixAxes
from tests import leaves


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", leaves.KINDS)
def test_conversion_to_matrices_and_back(name):
    leaf = leaves.random_tree(0)[name]
    axes = dimension_numbers.matrix_axes(leaves.KINDS[name][1], leaf)
    batch = leaves.BATCHES.get(name, ())
    expected = leaves.matrices(name, leaf)
    seen = []
    for index in range(len(axes.labels)):
        part = axes.part(leaf, index)
        stacked = axes.within.to_matrices(part)
        m, n = axes.within.matrix_shape(part)
        assert stacked.shape == (*axes.within.batch_shape(part), m, n)
        np.testing.assert_array_equal(axes.within.from_matrices(stacked, like=part), part)
        seen.extend(np.asarray(stacked).reshape(-1, m, n))
    # Blocks of several sizes come one after the other, each with all its layers.
    assert len(seen) == len(expected)
    for matrix in expected:
        assert any(np.array_equal(found, matrix) for found in seen)
    parts = [axes.part(leaf, index) for index in range(len(axes.labels))]
    np.testing.assert_array_equal(axes.join(parts), leaf)
    norms = axes.norms(leaf)
    assert norms.shape == axes.batch_shape(leaf) == batch
    # Caches compare axes: equal ones have one form, without blocks that of plain ones.
    for own in (axes, axes.within, axes.neurons, axes.inputs, axes.of_neurons):
        assert own.sizes or own == MatrixAxes(own.batch, own.rows, own.columns)
    by_size = [np.linalg.norm(matrix) for matrix in expected]
    np.testing.assert_allclose(norms.ravel(), by_size, rtol=1e-6)
    scalars = jnp.arange(len(expected), dtype=leaf.dtype).reshape(batch)
    scaled = leaf * axes.expand(scalars)
    for i, matrix in enumerate(leaves.matrices(name, scaled)):
        np.testing.assert_allclose(matrix, i * expected[i], rtol=1e-6)
    sized = jnp.broadcast_to(axes.by_shape(lambda m, n: 100 * m + n, leaf), leaf.shape)
    for found, matrix in zip(leaves.matrices(name, sized), expected, strict=True):
        assert np.all(found == 100 * matrix.shape[0] + matrix.shape[1])


def is_matrix(tree, numbers=None):
    axes = dimension_numbers.matrix_axes(numbers, tree)
    return jax.tree.map(
        lambda a: not isinstance(a, optax.MaskedNode),
        axes,
        is_leaf=dimension_numbers.is_axes_leaf,
    )


def test_the_default_rule_by_rank():
    tree = {"a": [jnp.ones((2, 3)), jnp.ones(3), jnp.ones(())], "b": None}
    assert is_matrix(tree) == {"a": [True, False, False], "b": None}


@pytest.mark.parametrize("container", [dict, flax.core.freeze])
def test_prefixes_and_callables(container):
    tree = container(
        {"a": {"x": jnp.ones((5, 2, 3)), "y": jnp.ones((5, 2, 3))}, "b": 1.0}
    )
    prefix = container({"a": Dims(1, 2), "b": None})
    expected = container({"a": {"x": True, "y": True}, "b": False})
    assert is_matrix(tree, prefix) == expected
    assert is_matrix(tree, lambda params: prefix) == expected
    resolved = dimension_numbers.matrix_axes(prefix, tree)
    assert dimension_numbers.matrix_axes(resolved, tree) == resolved


def test_abstract_leaves_and_masked_nodes():
    tree = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": optax.MaskedNode()}
    axes = dimension_numbers.matrix_axes(None, tree)
    assert axes == {"a": MatrixAxes((), (0,), (1,)), "b": optax.MaskedNode()}


@pytest.mark.parametrize(
    "numbers, words",
    [
        (None, r"'block\.0\.w' of shape \(2, 3, 4\) is ambiguous.*MuonDimensionNumbers"),
        (Dims(0, 3), r"'block\.0\.w' of shape \(2, 3, 4\).*3 axes"),
        (Dims(0, -3), r"'block\.0\.w'.*named twice"),
        (Dims((), 1), r"'block\.0\.w'.*at least one axis"),
        (Dims(0.0, 1), r"'block\.0\.w'.*axes must be integers"),
        (Dims(True, 2), r"'block\.0\.w'.*axes must be integers"),
        (Blocks(0, 1, block_axis=2, blocks=2), r"'block\.0\.w'.*block_axis must be one"),
        (Blocks(0, 1, block_axis=5, blocks=2), r"'block\.0\.w'.*block_axis must be one"),
        (Blocks(0, 2, block_axis=2, blocks=3), r"'block\.0\.w'.*add up to 4, the length"),
        (Blocks(0, 2, block_axis=-1, blocks=(3, 2)), r"'block\.0\.w'.*add up to 4"),
        ({"block": 3}, "3 at 'block'.*neither None"),
        ({"blok": None}, "structure of the parameters|structure, or a prefix"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(numbers, words):
    tree = {"block": [{"w": jnp.ones((2, 3, 4))}]}
    with pytest.raises(ValueError, match=words):
        dimension_numbers.matrix_axes(numbers, tree)


def test_a_misfit_is_reported_where_the_trees_differ():
    tree = {"a": {"b": jnp.ones(3), "w": jnp.ones((3, 3))}, "z": {"w": jnp.ones((3, 3))}}
    numbers = {"a": {"b": None, "w": Dims(0, 1)}, "z": {"v": Dims(0, 1)}}
    with pytest.raises(ValueError, match=r"tree\['z'\]") as error:
        dimension_numbers.matrix_axes(numbers, tree)
    assert "['a']" not in str(error.value)


@pytest.mark.parametrize(
    "numbers, plain",
    [
        (Dims(np.int64(-1), (np.int32(0),)), Dims(1, 0)),
        *(
            (
                Blocks(0, 1, block_axis=np.int64(1), blocks=blocks),
                Blocks(0, 1, block_axis=1, blocks=2),
            )
            for blocks in (np.int64(2), (np.int32(2), np.int64(2)))
        ),
    ],
)
def test_axes_and_blocks_are_any_integers(numbers, plain):
    axes, expected = (
        dimension_numbers.matrix_axes(n, jnp.ones((3, 4))) for n in (numbers, plain)
    )
    assert axes == expected


@pytest.mark.parametrize("blocks", [0, -1, 2.0, True, (), (2, 0), [2, 2], None])
def test_blocks_must_be_positive_integers(blocks):
    with pytest.raises(ValueError, match=r"blocks=.* is not valid: pass a number, or a"):
        Blocks(0, 1, block_axis=1, blocks=blocks)
    with pytest.raises(ValueError, match=r"block_axis=\(1,\) is not valid"):
        Blocks(0, 1, block_axis=(1,), blocks=2)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_only_real_floating_point_matrices(dtype):
    with pytest.raises(ValueError, match=f"'w'.*{np.dtype(dtype).name}"):
        dimension_numbers.matrix_axes(None, {"w": jnp.ones((2, 3), dtype)})


LINEN = "linen_dimension_numbers(module, *inputs)"
NNX = "nnx_dimension_numbers(model)"


@pytest.mark.parametrize(
    "tree, functions",
    [
        ({"Dense_0": {"kernel": 3}}, {LINEN}),
        ({"params": {"query": {"kernel": 3, "bias": 1}}}, {LINEN}),
        (flax.core.freeze({"Block_3": {"kernel": 3}, "norm": {"scale": 1}}), {LINEN}),
        ({"layers": {0: {"kernel": 3}}}, {NNX}),
        ({"layers": {"0": {"kernel": 3}}}, {NNX}),
        (nnx.State({"blocks": {0: {"kernel": nnx.Param(3)}}}), {NNX}),
        ({"query": {"kernel": 3}}, {LINEN, NNX}),
        ({"decoder": {"layers_0": {"kernel": 3}}}, {LINEN, NNX}),
        ({"w": 3}, set()),
        ([3], set()),
        ({"blocks": [{"weight": 3}]}, set()),  # Such as Equinox's.
        ({"layer_0": {"w": 3, "kernel": 1}}, set()),
    ],
)
def test_an_ambiguous_leaf_of_flax_names_the_function_of_its_library(tree, functions):
    """A number stands for an array with as many axes."""
    tree = jax.tree.map(lambda ndim: jnp.ones((2,) * ndim), tree)
    with pytest.raises(ValueError, match="ambiguous") as caught:
        orscale(1e-3).init(tree)
    assert {f for f in (LINEN, NNX) if f in str(caught.value)} == functions


@pytest.mark.parametrize("name", ["bias", "scale", "embedding", "lm_head", "LayerNorm_0"])
@pytest.mark.parametrize("shape", [(32, 1, 1), (2, 3, 4), (1, 5, 8, 8)])
def test_names_of_vectors_and_tables_decide_whatever_the_rank(name, shape):
    """Such as an Equinox convolution's bias, (32, 1, 1): an error lists only the rest."""
    leaf, query = jnp.ones(shape), {"query": {"kernel": jnp.ones((2, 3, 4))}}
    [numbers] = dimension_numbers.default_numbers({name: leaf}).values()
    assert numbers is None
    with pytest.raises(ValueError, match=r"^parameter 'query\.kernel' .* ambiguous"):
        dimension_numbers.default_numbers(query | {name: leaf})
