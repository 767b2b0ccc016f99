"""The plan of a mesh, from shapes and shardings alone."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from orscale_jax.distributed.plan import (
    Bucket,
    LayoutGroup,
    MatrixSlice,
    MeshShape,
    ShardedArray,
    count_devices,
    local_matrices,
    plan_buckets,
)

FLOAT = np.dtype("float32")
MESH = MeshShape({"data": 2, "fsdp": 4})
LARGE = 2**30


def array(*shape, axes=(), dtype=FLOAT):
    spread = tuple(
        (name,) if isinstance(name, str) else tuple(name) for name in axes
    ) or ((),) * len(shape)
    return ShardedArray(shape, dtype, spread)


def rows(*shape, over="fsdp"):
    return array(*shape, axes=(*[()] * (len(shape) - 2), over, ()))


def columns(*shape, over="fsdp"):
    return array(*shape, axes=(*[()] * (len(shape) - 1), over))


def members(bucket):
    return tuple(part.array for part in bucket.slices)


@pytest.mark.parametrize(
    "given, expected",
    [
        # Replicas along both axes: all eight devices take a share.
        (
            [array(4, 8)],
            [
                {
                    "replica_axes": ("data", "fsdp"),
                    "group_size": 8,
                    "shards": 1,
                    "matrices_per_device": 1,
                }
            ],
        ),
        # Shards along one axis, replicas along the other.
        (
            [rows(4, 8)],
            [
                {
                    "rows": ("fsdp",),
                    "replica_axes": ("data",),
                    "group_size": 8,
                    "shards": 4,
                }
            ],
        ),
        ([array(8, 4, axes=("fsdp", ()))], [{"columns": ("fsdp",), "shape": (4, 8)}]),
        (
            [array(4, 8, axes=("data", "fsdp"))],
            [{"rows": ("data",), "columns": ("fsdp",), "replica_axes": (), "shards": 8}],
        ),
        # Whole on their devices: nothing travels, and nothing is transposed.
        (
            [array(8, 6, 4, axes=(("data", "fsdp"), (), ()))],
            [
                {
                    "group_size": 1,
                    "shards": 1,
                    "matrices": 1,
                    "matrices_per_device": 1,
                    "shape": (6, 4),
                }
            ],
        ),
        # Experts over one axis, their rows over the other: groups of two.
        (
            [array(8, 6, 4, axes=("fsdp", "data", ()))],
            [
                {
                    "group_size": 2,
                    "shards": 2,
                    "matrices": 2,
                    "matrices_per_device": 1,
                    "shape": (4, 6),
                }
            ],
        ),
    ],
)
def test_the_group_of_each_matrix(given, expected):
    found = plan_buckets(given, MESH, LARGE)
    assert len(found) == len(expected)
    for bucket, facts in zip(found, expected, strict=True):
        [layout] = bucket.layouts
        known = {
            "rows": layout.row_axes,
            "columns": layout.column_axes,
            "column_shards": 1,
        }
        for name, value in ({"column_shards": 1} | facts).items():
            assert (known[name] if name in known else getattr(bucket, name)) == value


def test_arrays_that_are_sharded_alike_share_a_bucket():
    arrays = [
        rows(4, 8),
        array(8, 4, axes=((), "fsdp")),  # Its transpose is sharded like the first.
        rows(8, 4),
        rows(3, 4, 8),  # Layers, of which every device has a part.
        rows(4, 8, over="data"),
        array(4, 8, axes=("fsdp", ()), dtype=np.dtype("float16")),
        rows(6, 8),
    ]
    found = [members(bucket) for bucket in plan_buckets(arrays, MESH, LARGE)]
    # By another all-to-all (2,), but to devices that would be idle.
    assert found == [(0, 1, 3, 2), (4,), (5,), (6,)]


def test_stacks_are_limited_and_all_but_the_last_full():
    arrays = [rows(4, 8)] * 40
    nbytes = 4 * 8 * FLOAT.itemsize
    for most in (1, nbytes, 2 * nbytes, 3 * nbytes, LARGE):
        buckets = plan_buckets(arrays, MESH, most)
        assert sorted(i for j in buckets for i in members(j)) == list(range(40))
        assert all(j.nbytes <= max(most, nbytes) for j in buckets)
        assert sum(j.matrices_per_device for j in buckets) == 40 // 8
    # What is larger than a stack is alone.
    assert [members(j) for j in plan_buckets([rows(16, 4, 8)] * 2, MESH, 1)] == [
        (0,),
        (1,),
    ]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 27, 64])
def test_no_device_does_more_than_its_share_rounded_up(count):
    [bucket] = plan_buckets([rows(4, 8)] * count, MESH, LARGE)
    assert bucket.matrices_per_device == math.ceil(count / 8)


def test_bytes():
    """Each of 8 devices takes 2 of 16 matrices, and holds an eighth of the others."""
    [sharded] = plan_buckets([array(4, 8, axes=("data", "fsdp"))] * 16, MESH, LARGE)
    own = 2 * 4 * 8 * FLOAT.itemsize
    assert sharded.nbytes == own and sharded.traffic.nbytes == 2 * own * 7 // 8
    [copied] = plan_buckets([array(4, 8)] * 16, MESH, LARGE)
    assert copied.traffic.nbytes == 7 * own
    [whole] = plan_buckets([array(8, 4, 8, axes=(("data", "fsdp"), (), ()))], MESH, LARGE)
    assert whole.traffic.nbytes == 0


def test_without_a_mesh_one_device_has_all():
    layout = LayoutGroup(
        (MatrixSlice(0, 0, 3, transposed=False),), row_axes=(), column_axes=()
    )
    assert plan_buckets([array(3, 4, 8)], MeshShape({}), LARGE) == (
        Bucket(
            (layout,),
            (4, 8),
            FLOAT,
            shard_axes=(),
            replica_axes=(),
            group_size=1,
            shards=1,
        ),
    )
    assert local_matrices(array(3, 5, 4, 8), MeshShape({})) == 15


def test_axes_of_one_device_change_nothing():
    """They do not count as shardings: neither buckets nor shapes depend on them."""
    one = MeshShape({"one": 1} | MESH.sizes | {"last": 1})
    given = [array(8, 16, axes=("fsdp", "one")), array(4, 8, axes=(("last", "fsdp"), ()))]
    given += [array(24, 6, 4, axes=(("data", "one", "fsdp"), (), "last"))]
    without = [rows(8, 16), rows(4, 8), array(24, 6, 4, axes=(("data", "fsdp"), (), ()))]
    assert plan_buckets(given, one, LARGE) == plan_buckets(without, MESH, LARGE)
    copied = [array(8, 16, axes=((), "one")), array(4, 4, axes=("one", ()))]
    assert plan_buckets(copied, one, LARGE) == plan_buckets(
        [array(8, 16), array(4, 4)], MESH, LARGE
    )


def test_squares_that_are_sharded_like_transposes_share_a_bucket():
    square = array(8, 8, axes=("data", "fsdp")), array(8, 8, axes=("fsdp", "data"))
    [bucket] = plan_buckets(square, MESH, LARGE)
    assert len(bucket.layouts) == 1
    assert sorted(part.transposed for part in bucket.slices) == [False, True]
    apart = plan_buckets([x._replace(may_transpose=False) for x in square], MESH, LARGE)
    assert [part.transposed for bucket in apart for part in bucket.slices] == [False] * 2


def test_remainders_have_column_shards():
    """Ten matrices on eight devices: one each, then four devices for each of the two."""
    for given in [rows(16, 256)] * 10, [rows(10, 16, 256)]:
        whole, shared = sorted(
            plan_buckets(given, MESH, LARGE), key=lambda j: j.column_shards
        )
        assert (whole.matrices, whole.matrices_per_device, whole.column_shards) == (
            8,
            1,
            1,
        )
        assert (shared.matrices, shared.matrices_per_device, shared.column_shards) == (
            2,
            1,
            4,
        )
        assert shared.nbytes == whole.nbytes / 4
        # Its Gram matrices are added in pieces and gathered whole, five times.
        assert shared.traffic.nbytes == (
            2 * shared.nbytes * 3 // 4 + shared.nbytes + 5 * 2 * 16 * 16 * 4 * 3 // 4
        )
        assert shared.flops == 5 * (4 * 16**2 * 64 + 2 * 16**3)
    # The one array is in two slices.
    assert sorted(part[:3] for j in (whole, shared) for part in j.slices) == [
        (0, 0, 8),
        (0, 8, 10),
    ]


def test_column_shards_divide_every_shard_evenly():
    """Eight devices with 33 or 34 columns each; four with 66."""
    over = ("data", "fsdp")
    counts = [
        plan_buckets([columns(16, n, over=axes)], MESH, LARGE)[0].column_shards
        for n, axes in ((264, over), (272, over), (264, "fsdp"))
    ]
    assert counts == [1, 2, 2]


def test_small_matrices_have_no_column_shards():
    """Their Gram matrices, which would be sent, are as large as themselves."""
    [bucket] = plan_buckets([rows(64, 64)] * 2, MESH, LARGE)
    assert bucket.column_shards == 1


def test_remainders_of_several_shapes_share_a_bucket():
    """A wide MLP: sharded by rows and by columns, 16 devices to a matrix."""
    mesh = MeshShape({"fsdp": 64})
    bfloat16 = np.dtype("float16")
    gate, up = (array(2048, 11264, axes=("fsdp", ()), dtype=bfloat16),) * 2
    down = array(11264, 2048, axes=("fsdp", ()), dtype=bfloat16)
    [bucket] = plan_buckets([gate, up, down], mesh, LARGE)
    assert (bucket.matrices, bucket.column_shards, len(bucket.layouts)) == (3, 16, 2)

    query = [array(2048, 3072, axes=("fsdp", ()), dtype=bfloat16)] * 27
    out = [array(2048, 2048, axes=("fsdp", ()), dtype=bfloat16)] * 27
    [bucket] = plan_buckets(query + out, mesh, LARGE)
    assert (bucket.matrices, bucket.matrices_per_device, bucket.column_shards) == (
        54,
        1,
        1,
    )
    assert bucket.shape == (2048, 3072) and len(bucket.layouts) == 1


def test_idle_devices_take_column_shards_of_wider_matrices():
    """Moonlight's 52 shared experts leave twelve of 64 devices for its layer 0."""
    half = np.dtype("float16")
    rows = ("fsdp", ())
    wide = [array(2048, 10944, axes=rows, dtype=half)] * 3
    narrow = [array(2048, 2816, axes=rows, dtype=half)] * 52
    [bucket] = plan_buckets(wide + narrow, MeshShape({"fsdp": 64}), LARGE)
    assert [(layout.matrices, layout.column_shards) for layout in bucket.layouts] == [
        (3, 4),
        (52, 1),
    ]
    assert (bucket.shape, bucket.matrices_per_device) == ((2048, 2816), 1)
    assert (bucket.column_shards, bucket.active_devices) == (4, 12)
    # As for the narrow ones alone, plus the sums of Gram matrices.
    [alone] = plan_buckets(narrow, MeshShape({"fsdp": 64}), LARGE)
    assert bucket.flops == alone.flops
    assert bucket.traffic.nbytes == alone.traffic.nbytes + 5 * 2048**2 * 6 * 3 // 4


def test_work_is_even_despite_remainders():
    """A 1.1B model on 64 devices: within 1.15 of what an even division would be."""
    mesh = MeshShape({"fsdp": 8, "tensor": 8})
    arrays = [
        array(2048, n, axes=("fsdp", "tensor"), dtype=np.dtype("float16"))
        for n, matrices in ((2048, 44), (5632, 66))
        for _ in range(matrices)
    ]
    buckets = plan_buckets(arrays, mesh, LARGE)
    even = sum(
        5 * (4 * m**2 * n + 2 * m**3) / 64 for array in arrays for m, n in [array.shape]
    )
    assert sum(bucket.flops for bucket in buckets) < 1.15 * even


def test_a_remainder_that_nothing_improves_stays():
    [bucket] = plan_buckets([rows(64, 64)] * 9, MESH, LARGE)
    assert (bucket.matrices, bucket.matrices_per_device) == (9, 2)


@st.composite
def sharded_arrays(draw):
    free = [name for name in MESH.sizes if draw(st.booleans())]
    axes = [
        tuple(n for n in free if draw(st.integers(0, 2)) == axis) for axis in range(3)
    ]
    # No axis of the mesh twice.
    axes = [tuple(n for n in a if n not in sum(axes[:i], ())) for i, a in enumerate(axes)]
    shape = [draw(st.sampled_from(sizes)) for sizes in ((8, 24), (8, 16, 64), (16, 256))]
    order = draw(st.permutations([1, 2]))
    return ShardedArray(
        (shape[0], *(shape[i] for i in order)),
        FLOAT,
        (axes[0], *(axes[i] for i in order)),
    )


@hypothesis.given(st.lists(sharded_arrays(), min_size=1, max_size=6))
def test_plans(arrays):
    """Every matrix travels once, nothing is cut unevenly, and nothing costs more."""
    buckets = plan_buckets(arrays, MESH, LARGE)
    parts = sorted(part for bucket in buckets for part in bucket.slices)
    for index, found in itertools.groupby(parts, key=lambda part: part.array):
        starts, stops = zip(*((part.start, part.stop) for part in found), strict=True)
        assert (0, *stops) == (*starts, local_matrices(arrays[index], MESH))
    for bucket in buckets:
        m, n = bucket.shape
        assert bucket.group_size % bucket.column_shards == 0 == m % bucket.column_shards
        column_shards = [layout.column_shards for layout in bucket.layouts]
        assert column_shards == sorted(column_shards, reverse=True)
        assert set(column_shards) <= {1, bucket.column_shards}
        assert (
            sum(layout.slots for layout in bucket.layouts)
            <= bucket.matrices_per_device * bucket.group_size
        )
        for layout in bucket.layouts:
            assert m % count_devices(layout.row_axes, MESH.sizes) == 0
            assert n % count_devices(layout.column_axes, MESH.sizes) == 0
            for part in layout.slices:
                *_, rows, columns = arrays[part.array].shape
                if part.transposed:
                    rows, columns = columns, rows
                assert rows <= m and columns <= n * layout.column_shards
    alone = [plan_buckets([array], MESH, LARGE) for array in arrays]
    assert sum(j.cost for j in buckets) <= sum(j.cost for plans in alone for j in plans)
