"""8-bit momentum on meshes: the same numbers as on one device, and nothing gathered."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import muon, orscale, state_shardings
from orscale_jax.transforms import momentum as int8_blocks
from tests import runs
from tests.runs import (
    AUTO,
    EXPLICIT,
    assert_close,
    assert_same_bits,
    mesh_of,
    numbers_of,
    placed,
    readout,
)

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
        mesh = mesh_of(dict(zip("ab", sizes, strict=False)), kind)
        with jax.set_mesh(mesh):
            on_it = jax.device_put(x, NamedSharding(mesh, spec))
            codes, scales = encode(on_it, axis)
            found = decode(codes, scales)
        assert_same_bits((codes, scales, found), (*wanted, back))
        if kind == EXPLICIT:
            for array, place in ((found, spec), (codes, spec), (scales, of_scales)):
                wanted_place = NamedSharding(mesh, place)
                assert array.sharding.is_equivalent_to(wanted_place, x.ndim)
            with jax.set_mesh(mesh):
                largest = max(sent(encode, on_it, axis), sent(decode, codes, scales))
            assert largest * piece <= x.size and (largest == 0) == (piece == 0)


SHAPES = {"cut": (64, 24), "down": (24, 64), "stack": (2, 64, 16), "bias": (8,)}
SPECS = {"cut": P("a"), "down": P(None, "a"), "stack": P(None, "a"), "bias": P()}
NUMBERS = numbers_of(SHAPES)


tree = functools.partial(runs.tree, shapes=SHAPES)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize("build", [orscale, muon])
def test_steps_are_those_of_one_device(build, kind):
    """Also with the state sharded and the parameters whole (ZeRO-1)."""
    optimizer = build(0.02, mu_dtype="int8", weight_dimension_numbers=NUMBERS)
    mesh = mesh_of({"a": 8}, kind)

    def stepped(params, grads, state, out=None):
        update = jax.jit(optimizer.update, out_shardings=out)
        for grad in grads:
            updates, state = update(grad, state, params)
        return updates, state

    alone = stepped(tree(0), (tree(1), tree(2)), optimizer.init(tree(0)))
    sharded = placed(tree(0), mesh, SPECS)
    of_state = state_shardings(optimizer, sharded)
    assert tuple(readout(of_state, "trace_scale")["cut"].spec) == (None, "a")
    for specs in [SPECS] + [dict.fromkeys(SPECS, P())] * (kind == AUTO):
        params, *grads = (placed(tree(seed), mesh, specs) for seed in range(3))
        where = jax.tree.map(lambda x: x.sharding, params)
        with jax.set_mesh(mesh):
            state = jax.jit(optimizer.init, out_shardings=of_state)(sharded)
            out = None if kind == EXPLICIT else (where, of_state)
            updates, after = stepped(params, grads, state, out)
        assert_close(updates, alone[0])
        codes, scales = (
            [readout(s, field) for s in (after, alone[1])]
            for field in ("trace", "trace_scale")
        )
        assert_close(*(optax.tree.cast(x, jnp.int32) for x in codes), rtol=0, atol=1)
        assert_close(*(optax.tree.cast(x, jnp.float32) for x in scales), 2.0**-7, 0)
        kept, wanted = (tree["cut"].sharding for tree in (codes[0], sharded))
        assert kept.is_equivalent_to(wanted, 2)
