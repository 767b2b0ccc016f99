"""Runs that go on with other matrices in the same parameters: convert_state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers,
    convert_state,
    keep_master_weights,
    muon,
    orscale,
    polar_factor,
)
from orscale_jax.family import normuon
from tests import runs

# Of a leaf (4, 6): one matrix, three heads of two columns, a fused projection to 4 and 2.
WHOLE, HEADS = Dims(0, 1), BlockDimensionNumbers(block_axis=1, blocks=3)
CUT = BlockDimensionNumbers(block_axis=1, blocks=(4, 2))
EXPERTS, FLAT = Dims(1, 2), Dims((0, 1), 2)  # Of a leaf (3, 4, 6).
KINDS = [
    ((WHOLE, FLAT), (HEADS, EXPERTS)),
    ((HEADS, EXPERTS), (WHOLE, FLAT)),
    ((WHOLE, EXPERTS), (CUT, FLAT)),
    ((CUT, FLAT), (HEADS, EXPERTS)),
]


SHAPES = {"w": (4, 6), "stack": (3, 4, 6), "bias": (5,)}
tree = functools.partial(runs.tree, shapes=SHAPES)


def build(make, w, stack, **options):
    numbers = {"w": w, "stack": stack, "bias": None}
    return make(0.01, weight_dimension_numbers=numbers, **options)


def trained(optimizer):
    return runs.run(optimizer, tree(0), 2, tree)[-1]


def matrices(numbers, w):
    """The matrices of a leaf, each as NumPy's slice of it and its shape (m, n)."""
    columns = {HEADS: (2, 2, 2), CUT: (4, 2), WHOLE: (6,)}
    if numbers in columns:
        ends = np.cumsum(columns[numbers])
        return [np.s_[:, b - a : b] for a, b in zip(columns[numbers], ends, strict=True)]
    return [np.s_[:]] if numbers == FLAT else [np.s_[i] for i in range(3)]


@pytest.mark.parametrize(("before", "after"), KINDS)
def test_the_momentum_goes_on_in_the_new_matrices(before, after):
    params, state = trained(build(muon, *before))
    optimizer = build(muon, *after)
    converted = convert_state(state, optimizer, params)
    grads = tree(9)
    updates, _ = optimizer.update(grads, converted, params)
    trace = optax.tree.get(state, "trace")
    for name, numbers in zip(("w", "stack"), after, strict=True):
        lookahead = 0.95 * (0.95 * trace[name] + grads[name]) + grads[name]
        for part in matrices(numbers, params[name]):
            m = lookahead[part].reshape(-1, lookahead[part].shape[-1])
            direction = 0.2 * max(m.shape) ** 0.5 * polar_factor(m)
            expected = 0.1 * params[name][part] + direction.reshape(lookahead[part].shape)
            np.testing.assert_allclose(
                updates[name][part], -0.01 * expected, rtol=1e-4, atol=1e-7
            )


@pytest.mark.parametrize(("before", "after"), KINDS)
@pytest.mark.parametrize("make", [orscale, normuon])
@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["", "int8"])
@pytest.mark.extended
def test_what_is_known_of_each_matrix_begins_anew(make, options, before, after):
    params, state = trained(build(make, *before, **options))
    optimizer = build(make, *after, **options)
    converted = convert_state(state, optimizer, params)
    heads = {WHOLE: (), HEADS: (3,), CUT: (2,)}[after[0]]
    assert optax.tree.get(converted, "started")["w"].shape == heads
    for of_adamw in ("mu", "nu"):
        found, kept = (
            optax.tree.get_all_with_path(x, of_adamw)[-1][1]["bias"]
            for x in (converted, state)
        )
        np.testing.assert_array_equal(found, kept)
    updates, state = optimizer.update(tree(9), converted, params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    if make is orscale:
        for ratio in jax.tree.leaves(optax.tree.get(state, "trust_ratio")):
            np.testing.assert_allclose(ratio, 1, rtol=1e-5)


@pytest.mark.parametrize("wrap", [keep_master_weights, lambda x: optax.MultiSteps(x, 2)])
@pytest.mark.extended
def test_inside_of_wrappers(wrap):
    old, new = (wrap(build(orscale, *numbers)) for numbers in KINDS[0])
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(0))
    state = old.init(params)
    _, state = old.update(tree(1), state, params)
    converted = convert_state(state, new, params)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(optax.tree.get_all_with_path(x, "trace")[0][1] for x in (converted, state)),
    )
    new.update(tree(2), converted, params)


def test_other_shapes_of_parameters_are_still_refused():
    params, state = trained(build(orscale, WHOLE, EXPERTS))
    narrow = params | {"w": params["w"][:, :3]}
    with pytest.raises(ValueError, match=r"of 'w' has shape \(4, 6\) in the old state"):
        convert_state(state, build(orscale, HEADS, EXPERTS), narrow)
