"""Where matrices are orthogonalized, from shapes and shardings alone."""

import math

import numpy as np
import pytest

from orscale_jax._placement import Journey, Sharded, local_matrices, plan

FLOAT = np.dtype("float32")
MESH = {"data": 2, "fsdp": 4}
LARGE = 2**30


def array(*shape, axes=(), dtype=FLOAT):
    spread = tuple(
        (name,) if isinstance(name, str) else tuple(name) for name in axes
    ) or ((),) * len(shape)
    return Sharded(shape, dtype, spread)


def rows(*shape, over="fsdp"):
    return array(*shape, axes=(*[()] * (len(shape) - 2), over, ()))


@pytest.mark.parametrize(
    "given, expected",
    [
        # Copies on both axes: all eight devices take a share.
        (
            [array(4, 8)],
            [{"copies": ("data", "fsdp"), "owners": 8, "pieces": 1, "rounds": 1}],
        ),
        # Pieces on one, copies along the other.
        (
            [rows(4, 8)],
            [{"rows": ("fsdp",), "copies": ("data",), "owners": 8, "pieces": 4}],
        ),
        ([array(8, 4, axes=("fsdp", ()))], [{"columns": ("fsdp",), "shape": (4, 8)}]),
        (
            [array(4, 8, axes=("data", "fsdp"))],
            [{"rows": ("data",), "columns": ("fsdp",), "copies": (), "pieces": 8}],
        ),
        # Whole on their devices: nothing travels, and nothing is transposed.
        (
            [array(8, 6, 4, axes=(("data", "fsdp"), (), ()))],
            [{"owners": 1, "pieces": 1, "matrices": 1, "rounds": 1, "shape": (6, 4)}],
        ),
        # Experts over one axis, their rows over the other: groups of two.
        (
            [array(8, 6, 4, axes=("fsdp", "data", ()))],
            [{"owners": 2, "pieces": 2, "matrices": 2, "rounds": 1, "shape": (4, 6)}],
        ),
    ],
)
def test_who_owns_what(given, expected):
    found = plan(given, MESH, LARGE)
    assert len(found) == len(expected)
    for journey, facts in zip(found, expected, strict=True):
        assert {name: getattr(journey, name) for name in facts} == facts


def test_who_travels_together():
    arrays = [
        rows(4, 8),
        array(8, 4, axes=((), "fsdp")),  # Its transpose is sharded alike.
        rows(8, 4),
        rows(3, 4, 8),  # Layers, of which every device has a part.
        rows(4, 8, over="data"),
        array(4, 8, axes=("fsdp", ()), dtype=np.dtype("float16")),
        rows(6, 8),
    ]
    members = [journey.members for journey in plan(arrays, MESH, LARGE)]
    assert members == [(0, 1, 3), (2,), (4,), (5,), (6,)]


def test_stacks_are_capped_and_full_but_for_the_last():
    arrays = [rows(4, 8)] * 40
    nbytes = 4 * 8 * FLOAT.itemsize
    for most in (1, nbytes, 2 * nbytes, 3 * nbytes, LARGE):
        journeys = plan(arrays, MESH, most)
        assert sorted(i for j in journeys for i in j.members) == list(range(40))
        assert all(j.nbytes <= max(most, nbytes) for j in journeys)
        assert sum(j.rounds for j in journeys) == 40 // 8
    # What is larger than a stack is alone.
    assert [j.members for j in plan([rows(9, 4, 8)] * 2, MESH, 1)] == [(0,), (1,)]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 27, 64])
def test_no_device_does_more_than_its_share_rounded_up(count):
    [journey] = plan([rows(4, 8)] * count, MESH, LARGE)
    assert journey.rounds == math.ceil(count / 8)


def test_bytes():
    """Of 16 matrices each of 8 devices owns 2, and has an eighth of the others."""
    [sharded] = plan([array(4, 8, axes=("data", "fsdp"))] * 16, MESH, LARGE)
    own = 2 * 4 * 8 * FLOAT.itemsize
    assert sharded.nbytes == own and sharded.bytes_sent == 2 * own * 7 // 8
    [copied] = plan([array(4, 8)] * 16, MESH, LARGE)
    assert copied.bytes_sent == 7 * own
    [whole] = plan([array(8, 4, 8, axes=(("data", "fsdp"), (), ()))], MESH, LARGE)
    assert whole.bytes_sent == 0


def test_without_a_mesh_there_is_one_owner():
    assert plan([array(3, 4, 8)], {}, LARGE) == (
        Journey((0,), (4, 8), FLOAT, (), (), (), matrices=3, owners=1, pieces=1),
    )
    assert local_matrices(array(3, 5, 4, 8), {}) == 15
