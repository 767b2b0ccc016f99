"""Fused weights: every block takes the steps of a parameter of its own."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    by_path,
    describe,
    family,
    orscale,
)
from orscale_jax.parameters.dimension_numbers import matrix_axes
from tests import leaves
from tests.compiled import WITH_FUSION_EMITTERS
from tests.runs import AUTO, EXPLICIT, assert_close, mesh_of, placed, readout, run, tree

# A fused shape, its numbers, and the parameters of which it is made, with theirs.
FUSED = {
    "qkv": ((16, 36), Blocks(0, 1, block_axis=1, blocks=3), 1, (12, 12, 12)),
    "grouped": ((16, 28), Blocks(0, 1, block_axis=1, blocks=(16, 6, 6)), 1, (16, 6, 6)),
    "gate_up": ((24, 10), Blocks(0, 1, block_axis=0, blocks=2), 0, (12, 12)),
    "layers": ((2, 8, 15), Blocks(1, 2, block_axis=2, blocks=(9, 6)), 2, (9, 6)),
    "heads": ((8, 20), Blocks(0, 1, block_axis=-1, blocks=4), 1, (5, 5, 5, 5)),
    "w13": ((24, 10), Blocks(1, 0, block_axis=0, blocks=2, stride=1), 0, (12, 12)),
    "by_head": ((16, 36), Blocks(0, 1, block_axis=1, blocks=3, stride=6), 1, (12,) * 3),
}


def fused(step, scale=1.0, dtype=jnp.float32):
    drawn = tree(step, dtype, {name: shape for name, (shape, *_) in FUSED.items()})
    return {name: dtype(scale) * leaf for name, leaf in drawn.items()}


def apart(values):
    found = {}
    for name, leaf in values.items():
        _, numbers, axis, sizes = FUSED[name]
        if numbers.stride:  # By hand: the entries of each block, one after the other.
            turn = np.arange(leaf.shape[axis]) // numbers.stride % numbers.blocks
            blocks = [np.flatnonzero(turn == i) for i in range(numbers.blocks)]
            found[name] = [jnp.take(leaf, of_block, axis) for of_block in blocks]
        else:
            found[name] = jnp.split(leaf, np.cumsum(sizes)[:-1], axis=axis)
    return found


NUMBERS = {name: numbers for name, (_, numbers, *_) in FUSED.items()}
APART = {name: Dims(-2, -1) for name in FUSED} | {"w13": Dims(1, 0)}


# What a model takes out of a kernel of (4, 24), two heads or groups, and the same kernel
# stored and given numbers as the page Parameters says.
KERNEL = np.arange(96.0).reshape(4, 24)
BY_HEAD = KERNEL.reshape(4, 2, 3, 4)
GROUPS = [KERNEL.reshape(4, 2, 12)[..., a:b] for a, b in ((0, 6), (6, 9), (9, 12))]
LAYOUTS = {
    "contiguous": (np.split(KERNEL, 2, 1), (4, 24), Blocks(0, 1, block_axis=1, blocks=2)),
    "alternating": ([KERNEL[:, ::2], KERNEL[:, 1::2]], (4, 12, 2), Dims(0, 1)),
    "alternating, by a stride": (
        [KERNEL[:, ::2], KERNEL[:, 1::2]],
        (4, 24), Blocks(0, 1, block_axis=1, blocks=2, stride=1),
    ),
    "head by head, by a stride": (
        [BY_HEAD[:, :, i].reshape(4, 8) for i in range(3)],
        (4, 24), Blocks(0, 1, block_axis=1, blocks=3, stride=4),
    ),
    "head by head": (
        [BY_HEAD[:, :, i].reshape(4, 8) for i in range(3)],
        (4, 2, 12), Blocks(0, (1, 2), block_axis=2, blocks=3),
    ),
    "each part of each head": (
        [BY_HEAD[:, i, j] for i in range(2) for j in range(3)],
        (4, 24), Blocks(0, 1, block_axis=1, blocks=3 * 2),
    ),
    "group by group": (
        [part.reshape(4, -1) for part in GROUPS],
        (4, 2, 12), Blocks(0, (1, 2), block_axis=2, blocks=(6, 3, 3)),
    ),
    "each part of each group": (
        [part[:, i] for i in range(2) for part in GROUPS],
        (4, 24), Blocks(0, 1, block_axis=1, blocks=(6, 3, 3) * 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_fused_kernels(name):
    expected, shape, numbers = LAYOUTS[name]
    leaf = jnp.asarray(KERNEL.reshape(shape))
    axes = matrix_axes(numbers, leaf)
    found = [m for part in axes.batches(leaf) for m in part.reshape(-1, *part.shape[-2:])]
    assert sorted(m.tolist() for m in found) == sorted(m.tolist() for m in expected)


@pytest.mark.parametrize("blocks", [2, (12, 12), (10, 14)])
def test_the_table_says_that_blocks_are_contiguous(blocks):
    """Also where the mark "fused?" is gone, since they are wrong for alternating rows."""
    numbers = {"gate_up": Blocks(0, 1, block_axis=1, blocks=blocks)}
    description = describe(
        {"gate_up": jnp.ones((8, 24))}, orscale(0.1, weight_dimension_numbers=numbers)
    )
    assert not any(row.check for row in description.rows)
    said = ["gate_up[:, 0:10]", "gate_up[:, 10:24]"] if 10 in np.ravel(blocks) else []
    assert ("2 contiguous" in str(description)) == (not said)
    assert all(name in str(description) for name in said)
    assert ("2 contiguous" in description.to_csv()) == (not said)


def test_a_rule_for_blocks_in_turns():
    """The table says it, and what does not fit is refused."""
    numbers = Blocks(0, 1, block_axis=1, blocks=3, stride=4)
    params = {"qkv": jnp.ones((4, 24))}

    def described(numbers, **given):
        rules = by_path({"qkv": numbers}, **given)
        return describe(params, orscale(0.1, weight_dimension_numbers=rules))

    assert (
        "3 in turns of 4" in str(described(numbers)) and described(numbers).rows[0].n == 8
    )
    misfit = dataclasses.replace(numbers, stride=3)
    with pytest.raises(ValueError, match=r"'qkv' .*stride does not divide blocks of 8"):
        described(misfit)
    with pytest.raises(ValueError, match=r"head_size(.|\n)*take turns"):
        described(numbers, head_size=4)
    for stride, blocks in ((0, 3), (1.5, 3), (4, (8, 8, 8))):
        with pytest.raises(ValueError, match=f"stride={stride} is not valid"):
            Blocks(0, 1, block_axis=1, blocks=blocks, stride=stride)


@pytest.mark.extended
def test_fused_and_split_take_the_same_steps(enable_x64):
    """In float64, as ratios amplify the rounding differences of float32."""
    build = functools.partial(orscale, 0.02, ns_dtype=jnp.float64)
    wide = functools.partial(fused, dtype=jnp.float64)
    params = wide(0, 0.1)
    whole = run(build(weight_dimension_numbers=NUMBERS), params, 4, wide)
    parts = run(
        build(weight_dimension_numbers=APART),
        apart(params),
        4,
        lambda step: apart(wide(step)),
    )
    for (found, state), (expected, by_part) in zip(whole, parts, strict=True):
        for name, blocks in apart(found).items():
            for block, other in zip(blocks, expected[name], strict=True):
                assert leaves.relative_error(block, other) < 1e-12, name
            for part in ("calibration", "trust_ratio"):
                ratios = np.moveaxis(readout(state, part)[name], -1, 0)
                if name in ("gate_up", "w13"):
                    ratios = readout(state, part)[name]
                np.testing.assert_allclose(
                    ratios, np.stack(readout(by_part, part)[name]), rtol=1e-11
                )


@pytest.mark.extended
def test_neurons_of_blocks():
    """Of columns and of rows, contiguous and in turns."""
    names = ("qkv", "gate_up", "w13", "by_head")

    def some(step):
        return {name: fused(step)[name] for name in names}

    build = functools.partial(family.normuon, 0.02, ns_dtype=jnp.float32)
    whole = build(weight_dimension_numbers={name: NUMBERS[name] for name in names})
    parts = build(weight_dimension_numbers={name: APART[name] for name in names})
    found = run(whole, some(0), 3, some)[-1][0]
    expected = run(parts, apart(some(0)), 3, lambda step: apart(some(step)))[-1][0]
    assert_close(apart(found), expected, rtol=1e-4)


@pytest.mark.extended
def test_an_idle_block_waits_for_its_first_direction():
    """Like a separate parameter: its c is set later than the others'."""
    params = {"qkv": fused(0)["qkv"]}

    def gradients(step):
        grads = fused(step)["qkv"]
        return {"qkv": grads if step == 3 else grads.at[:, 12:24].set(0)}

    optimizer = orscale(0.02, weight_dimension_numbers=NUMBERS["qkv"])
    seen = run(optimizer, params, 3, gradients)
    for found, state in seen[:2]:
        np.testing.assert_array_equal(found["qkv"][:, 12:24], params["qkv"][:, 12:24])
        assert (readout(state, "calibration")["qkv"] != 0).tolist() == [True, False, True]
    assert (readout(seen[2][1], "calibration")["qkv"] != 0).all()


def moves(optimizer, params):
    """The operations of the compiled step that only move a whole array of matrices."""
    compiled = jax.jit(optimizer.update).lower(params, optimizer.init(params), params)
    text = compiled.compile(WITH_FUSION_EMITTERS).as_text()
    entry = text[text.index("\nENTRY") :]
    kinds = "copy|transpose|slice|dynamic-slice|concatenate|pad|reverse"
    return re.findall(rf"= [a-z0-9]+\[\d+,[^\]]*\]\S* ({kinds})\(", entry)


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize(
    "blocks, expected", [(3, []), (12, []), ((512, 128, 128), ["concatenate"])]
)
def test_splitting_costs_no_copy_that_can_be_avoided(blocks, expected):
    """It is fused into other loops, except for joining Qs of several sizes."""
    params = {"qkv": jnp.ones((256, 768))}
    numbers = Blocks(0, 1, block_axis=1, blocks=blocks)
    assert moves(orscale(0.02, weight_dimension_numbers=numbers), params) == expected


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("stride", [None, 1])
@pytest.mark.parametrize("kinds", [(AUTO,), (EXPLICIT, AUTO), (EXPLICIT,)])
def test_fewer_blocks_than_devices(kinds, stride):
    """The partitioner shards the blocks over some devices, their columns over others."""
    mesh = mesh_of({"a": 2, "b": 4}, *kinds)
    numbers = {"gate_up": Blocks(0, 1, block_axis=1, blocks=2, stride=stride)}
    alone = [tree(seed, shapes={"gate_up": (8, 48)}) for seed in (0, 1)]
    optimizer = orscale(0.02, weight_dimension_numbers=numbers)
    expected, _ = optimizer.update(alone[1], optimizer.init(alone[0]), alone[0])
    params, grads = (placed(values, mesh, P("a", "b")) for values in alone)
    with jax.set_mesh(mesh):
        state = optimizer.init(params)
        compiled = jax.jit(optimizer.update).lower(grads, state, params).compile()
        updates, _ = compiled(grads, state, params)
    assert_close(updates, expected, rtol=0)
    assert updates["gate_up"].sharding == params["gate_up"].sharding
    assert hlo_cost.of(compiled.as_text()).looped_bytes == 0


@pytest.mark.extended
def test_the_table_has_a_row_per_size():
    params = {"grouped": fused(0)["grouped"], "qkv": fused(0)["qkv"]}
    numbers = by_path({name: NUMBERS[name] for name in params})
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    description = describe(params, optimizer)
    found = [
        (r.path + r.block, r.shape, r.matrices, r.m, r.n, r.state_bytes)
        for r in description.rows
    ]
    assert found == [
        ("grouped[:, 0:16]", (16, 16), 1, 16, 16, 4 * 256 + 28),
        ("grouped[:, 16:22]", (16, 6), 1, 16, 6, 4 * 96 + 28),
        ("grouped[:, 22:28]", (16, 6), 1, 16, 6, 4 * 96 + 28),
        ("qkv", (16, 36), 3, 16, 12, 4 * 576 + 3 * 28),
    ]
    total = description.totals["matrix"]
    assert (total.leaves, total.matrices) == (2, 6)
    state = optimizer.init(params)
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert description.totals["all"].state_bytes == everything
    norms = [np.linalg.norm(block) for block in apart(params)["grouped"]]
    for row, norm in zip(description.rows, norms, strict=False):
        np.testing.assert_allclose(row.norms, [norm, norm], rtol=1e-6)
    assert "grouped[:, 16:22]" in str(description)
