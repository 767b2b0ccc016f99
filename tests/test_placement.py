"""Where matrices are orthogonalized, from shapes and shardings alone."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from orscale_jax import _placement
from orscale_jax._placement import Journey, Leg, Part, Sharded, local_matrices, plan

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


def columns(*shape, over="fsdp"):
    return array(*shape, axes=(*[()] * (len(shape) - 1), over))


def members(journey):
    return tuple(part.array for part in journey.parts)


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
        [leg] = journey.legs
        known = {"rows": leg.rows, "columns": leg.columns, "sharers": 1}
        for name, value in ({"sharers": 1} | facts).items():
            assert (known[name] if name in known else getattr(journey, name)) == value


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
    found = [members(journey) for journey in plan(arrays, MESH, LARGE)]
    # By another all-to-all (2,), but to devices that would be idle.
    assert found == [(0, 1, 3, 2), (4,), (5,), (6,)]


def test_stacks_are_capped_and_full_but_for_the_last():
    arrays = [rows(4, 8)] * 40
    nbytes = 4 * 8 * FLOAT.itemsize
    for most in (1, nbytes, 2 * nbytes, 3 * nbytes, LARGE):
        journeys = plan(arrays, MESH, most)
        assert sorted(i for j in journeys for i in members(j)) == list(range(40))
        assert all(j.nbytes <= max(most, nbytes) for j in journeys)
        assert sum(j.rounds for j in journeys) == 40 // 8
    # What is larger than a stack is alone.
    assert [members(j) for j in plan([rows(16, 4, 8)] * 2, MESH, 1)] == [(0,), (1,)]


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
    leg = Leg((Part(0, 0, 3, transposed=False),), rows=(), columns=())
    assert plan([array(3, 4, 8)], {}, LARGE) == (
        Journey((leg,), (4, 8), FLOAT, axes=(), copies=(), owners=1, pieces=1),
    )
    assert local_matrices(array(3, 5, 4, 8), {}) == 15


def test_axes_of_one_device_change_nothing():
    """What they keep apart would be in pieces that do not travel."""
    one = {"one": 1} | MESH | {"last": 1}
    given = [array(8, 16, axes=("fsdp", "one")), array(4, 8, axes=(("last", "fsdp"), ()))]
    given += [array(24, 6, 4, axes=(("data", "one", "fsdp"), (), "last"))]
    without = [rows(8, 16), rows(4, 8), array(24, 6, 4, axes=(("data", "fsdp"), (), ()))]
    assert plan(given, one, LARGE) == plan(without, MESH, LARGE)
    copied = [array(8, 16, axes=((), "one")), array(4, 4, axes=("one", ()))]
    assert plan(copied, one, LARGE) == plan([array(8, 16), array(4, 4)], MESH, LARGE)


def test_squares_that_are_sharded_like_transposes_travel_together():
    square = array(8, 8, axes=("data", "fsdp")), array(8, 8, axes=("fsdp", "data"))
    [journey] = plan(square, MESH, LARGE)
    assert len(journey.legs) == 1
    assert sorted(part.transposed for part in journey.parts) == [False, True]
    apart = plan([x._replace(turns=False) for x in square], MESH, LARGE)
    assert [part.transposed for journey in apart for part in journey.parts] == [False] * 2


def test_what_is_left_over_is_shared():
    """Ten matrices for eight devices: one each, and four devices for each other one."""
    for given in [rows(16, 256)] * 10, [rows(10, 16, 256)]:
        whole, shared = sorted(plan(given, MESH, LARGE), key=lambda j: j.sharers)
        assert (whole.matrices, whole.rounds, whole.sharers) == (8, 1, 1)
        assert (shared.matrices, shared.rounds, shared.sharers) == (2, 1, 4)
        assert shared.nbytes == whole.nbytes / 4
        # Its Gram matrices are added in pieces and gathered whole, five times.
        assert shared.bytes_sent == (
            2 * shared.nbytes * 3 // 4 + shared.nbytes + 5 * 2 * 16 * 16 * 4 * 3 // 4
        )
        assert shared.flops == 5 * (4 * 16**2 * 64 + 2 * 16**3)
    # One array in two parts.
    assert sorted(part[:3] for j in (whole, shared) for part in j.parts) == [
        (0, 0, 8),
        (0, 8, 10),
    ]


def test_every_sharer_has_as_many_columns_of_each_piece():
    """Eight devices with 33 or 34 columns each; four with 66."""
    over = ("data", "fsdp")
    counts = [
        plan([columns(16, n, over=axes)], MESH, LARGE)[0].sharers
        for n, axes in ((264, over), (272, over), (264, "fsdp"))
    ]
    assert counts == [1, 2, 2]


def test_short_matrices_are_not_shared():
    """Their Gram matrices are as large as they are."""
    [journey] = plan([rows(64, 64)] * 2, MESH, LARGE)
    assert journey.sharers == 1


def test_what_is_left_over_of_several_shapes_travels_together():
    """As Moonlight's dense layer does: by rows and by columns, sixteen devices each."""
    mesh = {"fsdp": 64}
    bfloat16 = np.dtype("float16")
    gate, up = (array(2048, 11264, axes=("fsdp", ()), dtype=bfloat16),) * 2
    down = array(11264, 2048, axes=("fsdp", ()), dtype=bfloat16)
    [journey] = plan([gate, up, down], mesh, LARGE)
    assert (journey.matrices, journey.sharers, len(journey.legs)) == (3, 16, 2)

    query = [array(2048, 3072, axes=("fsdp", ()), dtype=bfloat16)] * 27
    out = [array(2048, 2048, axes=("fsdp", ()), dtype=bfloat16)] * 27
    [journey] = plan(query + out, mesh, LARGE)
    assert (journey.matrices, journey.rounds, journey.sharers) == (54, 1, 1)
    assert journey.shape == (2048, 3072) and len(journey.legs) == 1


def test_idle_devices_share_what_is_wider():
    """The 52 of Moonlight's shared experts leave twelve of 64 devices to its layer 0."""
    half = np.dtype("float16")
    rows = ("fsdp", ())
    wide = [array(2048, 11264, axes=rows, dtype=half)] * 3
    narrow = [array(2048, 2816, axes=rows, dtype=half)] * 52
    [journey] = plan(wide + narrow, {"fsdp": 64}, LARGE)
    assert [(leg.matrices, leg.sharers) for leg in journey.legs] == [(3, 4), (52, 1)]
    assert (journey.shape, journey.rounds) == ((2048, 2816), 1)
    assert (journey.sharers, journey.shared_places) == (4, 12)
    # As a round of the narrow ones alone, and sums of Gram matrices.
    [alone] = plan(narrow, {"fsdp": 64}, LARGE)
    assert journey.flops == alone.flops
    assert journey.bytes_sent == alone.bytes_sent + 5 * 2048**2 * 6 * 3 // 4


def test_work_is_even_where_matrices_are_left_over():
    """A 1.1B model on 64 devices: within 1.15 of what an even division would be."""
    mesh = {"fsdp": 8, "tensor": 8}
    arrays = [
        array(2048, n, axes=("fsdp", "tensor"), dtype=np.dtype("float16"))
        for n, matrices in ((2048, 44), (5632, 66))
        for _ in range(matrices)
    ]
    journeys = plan(arrays, mesh, LARGE)
    even = sum(
        5 * (4 * m**2 * n + 2 * m**3) / 64 for array in arrays for m, n in [array.shape]
    )
    assert sum(journey.flops for journey in journeys) < 1.15 * even


def test_a_rest_for_which_there_is_nothing_better_stays_with_its_kind():
    [journey] = plan([rows(64, 64)] * 9, MESH, LARGE)
    assert (journey.matrices, journey.rounds) == (9, 2)


@st.composite
def sharded_arrays(draw):
    free = [name for name in MESH if draw(st.booleans())]
    axes = [
        tuple(n for n in free if draw(st.integers(0, 2)) == axis) for axis in range(3)
    ]
    # No axis of the mesh twice.
    axes = [tuple(n for n in a if n not in sum(axes[:i], ())) for i, a in enumerate(axes)]
    shape = [draw(st.sampled_from(sizes)) for sizes in ((8, 24), (8, 16, 64), (16, 256))]
    order = draw(st.permutations([1, 2]))
    return Sharded(
        (shape[0], *(shape[i] for i in order)),
        FLOAT,
        (axes[0], *(axes[i] for i in order)),
    )


@hypothesis.given(st.lists(sharded_arrays(), min_size=1, max_size=6))
def test_plans(arrays):
    """Every matrix travels once, nothing is cut unevenly, and nothing costs more."""
    journeys = plan(arrays, MESH, LARGE)
    parts = sorted(part for journey in journeys for part in journey.parts)
    for index, found in itertools.groupby(parts, key=lambda part: part.array):
        starts, stops = zip(*((part.start, part.stop) for part in found), strict=True)
        assert (0, *stops) == (*starts, local_matrices(arrays[index], MESH))
    for journey in journeys:
        m, n = journey.shape
        assert journey.owners % journey.sharers == 0 == m % journey.sharers
        sharers = [leg.sharers for leg in journey.legs]
        assert sharers == sorted(sharers, reverse=True)
        assert set(sharers) <= {1, journey.sharers}
        assert sum(leg.places for leg in journey.legs) <= journey.rounds * journey.owners
        for leg in journey.legs:
            assert m % _placement.devices(leg.rows, MESH) == 0
            assert n % _placement.devices(leg.columns, MESH) == 0
            for part in leg.parts:
                *_, rows, columns = arrays[part.array].shape
                if part.transposed:
                    rows, columns = columns, rows
                assert rows <= m and columns <= n * leg.sharers
    alone = [plan([array], MESH, LARGE) for array in arrays]
    assert sum(j.cost for j in journeys) <= sum(j.cost for plans in alone for j in plans)
