"""8-bit blocks on meshes: the same numbers as on one device, and nothing gathered.

``test_layouts.py`` has the steps.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax.transforms import momentum as int8_blocks
from tests.runs import AUTO, EXPLICIT, assert_same_bits, mesh_of

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
    "an axis of one": ((64, 6), (2, 1), P(("a", "b")), 0, P(("a", "b"), None), 0),
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


@pytest.mark.compiled
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
