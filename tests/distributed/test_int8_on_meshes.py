"""8-bit momentum on meshes: the same numbers as on one device, and nothing gathered."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import muon, orscale, state_shardings
from orscale_jax.transforms import momentum as int8_blocks
from tests.runs import readout

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# Shape, sizes of the mesh, sharding, axis of the blocks, sharding of the scales, and the
# entries in a piece of a block, of which the largest is sent; 0: nothing is.
CUTS = {
    "whole blocks": ((512, 48), (8,), P("a"), 0, P("a", None), 0),
    "another axis": ((50, 48), (8,), P(None, "a"), 0, P(None, "a"), 0),
    "a quarter of a block": ((64, 48), (8,), P("a"), 0, P(None, "a"), 8),
    "a lone block": ((32, 48), (8,), P("a"), 0, P(None, "a"), 4),
    "blocks and a half": ((384, 48), (8,), P("a"), 0, P(None, "a"), 16),
    "pieces of one": ((40, 48), (8,), P("a"), 0, P(None, "a"), 1),
    "the last axis": ((16, 64), (8,), P(None, "a"), 1, P("a", None), 8),
    "both axes": ((64, 48), (4, 2), P("a", "b"), 0, P(None, ("b", "a")), 16),
    "one axis by two": ((64, 48), (4, 2), P(("a", "b")), 0, P(None, ("a", "b")), 8),
    "layers": ((3, 64, 48), (4, 2), P(None, "a", "b"), 1, P(None, None, ("b", "a")), 16),
    "nowhere to go": ((64, 6), (8,), P("a"), 0, P(None, None), 8),
}


@functools.partial(jax.jit, static_argnums=1)
def encode(x, axis):
    return int8_blocks.encode(x, axis)


@jax.jit
def decode(codes, scales):
    return int8_blocks.decode(codes, scales, jnp.float32)


def mesh_of(sizes, kind):
    return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(kind,) * len(sizes))


def sent(fn, *args):
    """Entries in the largest result of a collective in the compiled program."""
    text = fn.lower(*args).compile().as_text()
    found = re.findall(
        r"= (.*?) (?:all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(",
        text,
    )
    shapes = [s for types in found for s in re.findall(r"\w+\[([\d,]*)\]", types)]
    return max(
        (math.prod(map(int, filter(None, s.split(",")))) for s in shapes), default=0
    )


@pytest.mark.quick_first_case
@pytest.mark.parametrize("case", CUTS)
def test_codes_and_scales_are_those_of_one_device(case):
    shape, sizes, spec, axis, of_scales, piece = CUTS[case]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    wanted = encode(jnp.asarray(x), axis)
    back = decode(*wanted)
    for kind in (EXPLICIT, AUTO):
        mesh = mesh_of(sizes, kind)
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            codes, scales = encode(placed, axis)
            found = decode(codes, scales)
        np.testing.assert_array_equal(codes, wanted[0])
        np.testing.assert_array_equal(np.asarray(scales), np.asarray(wanted[1]))
        np.testing.assert_array_equal(found, back)
        if kind == EXPLICIT:
            for array, place in ((found, spec), (codes, spec), (scales, of_scales)):
                wanted_place = NamedSharding(mesh, place)
                assert array.sharding.is_equivalent_to(wanted_place, x.ndim)
            with jax.set_mesh(mesh):
                largest = max(sent(encode, placed, axis), sent(decode, codes, scales))
            assert largest * piece <= x.size and (largest == 0) == (piece == 0)


SHAPES = {"cut": (64, 24), "down": (24, 64), "stack": (2, 64, 16), "bias": (8,)}
SPECS = {"cut": P("a"), "down": P(None, "a"), "stack": P(None, "a"), "bias": P()}
NUMBERS = {
    name: Dims(len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None
    for name, shape in SHAPES.items()
}


def tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize("build", [orscale, muon])
def test_steps_are_those_of_one_device(build, kind):
    """Also with the state sharded and the parameters whole (ZeRO-1)."""
    optimizer = build(0.02, mu_dtype="int8", weight_dimension_numbers=NUMBERS)
    mesh = mesh_of((8,), kind)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    whole = NamedSharding(mesh, P())

    def stepped(params, grads, state, out=None):
        update = jax.jit(optimizer.update, out_shardings=out)
        for grad in grads:
            updates, state = update(grad, state, params)
        return updates, state

    alone = stepped(tree(0), (tree(1), tree(2)), optimizer.init(tree(0)))
    sharded = jax.device_put(tree(0), shardings)
    of_state = state_shardings(optimizer, sharded)
    scales = optax.tree.get_all_with_path(of_state, "trace_scale")[0][1]
    assert tuple(scales["cut"].spec) == (None, "a")
    places = [(shardings, "sharded")] + [(whole, "ZeRO-1")] * (kind == AUTO)
    for where, name in places:
        params, *grads = (jax.device_put(tree(seed), where) for seed in range(3))
        with jax.set_mesh(mesh):
            state = jax.jit(optimizer.init, out_shardings=of_state)(sharded)
            out = None if kind == EXPLICIT else (where, of_state)
            updates, after = stepped(params, grads, state, out)
        for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(alone[0]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)
        for field, leaf in after_and(after, alone[1], "trace"):
            assert np.abs(np.asarray(field, int) - np.asarray(leaf, int)).max() <= 1
        for field, leaf in after_and(after, alone[1], "trace_scale"):
            np.testing.assert_allclose(
                np.asarray(field, "f4"), np.asarray(leaf, "f4"), rtol=2.0**-7
            )
        assert readout(after, "trace")["cut"].sharding.is_equivalent_to(
            shardings["cut"], 2
        )


def after_and(state, alone, field):
    pair = (readout(tree, field) for tree in (state, alone))
    return zip(*map(jax.tree.leaves, pair), strict=True)
