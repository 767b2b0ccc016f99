"""The plan of a mesh, from shapes and shardings alone."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from orscale_jax.audit.plan import Plan
from orscale_jax.distributed.costs import (
    Bucket,
    CostModel,
    LayoutGroup,
    MatrixRange,
    ShardedArray,
)
from orscale_jax.distributed.mesh import MeshShape, count_devices
from orscale_jax.distributed.plan import plan_buckets
from orscale_jax.newton_schulz.hardware import Hardware, Link

FLOAT = np.dtype("float32")
MESH = MeshShape({"data": 2, "fsdp": 4})
LARGE = 2**30
plan_of = functools.partial(plan_buckets, cost_model=CostModel())


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


OVER = (("data", "fsdp"), (), ())


# Axes of rows, columns and replicas; the group and its shards; matrices, their shape.
GROUPS = [
    # Replicas along both axes: all eight devices take a share of the columns.
    (array(4, 8), (), (), ("data", "fsdp"), 8, 1, 1, (4, 2)),
    # Shards along one axis, replicas along the other.
    (rows(4, 8), ("fsdp",), (), ("data",), 8, 4, 1, (4, 8)),
    (array(8, 4, axes=("fsdp", ())), (), ("fsdp",), ("data",), 8, 4, 1, (4, 8)),
    (array(4, 8, axes=("data", "fsdp")), ("data",), ("fsdp",), (), 8, 8, 1, (4, 8)),
    # Whole on their devices: nothing travels, and nothing is transposed.
    (array(8, 6, 4, axes=OVER), (), (), (), 1, 1, 1, (6, 4)),
    # Experts over one axis, their rows over the other: groups of two.
    (array(8, 6, 4, axes=("fsdp", "data", ())), (), ("data",), (), 2, 2, 2, (4, 6)),
]


@pytest.mark.parametrize("case", GROUPS)
def test_the_group_of_each_matrix(case):
    given, of_rows, of_columns, *expected = case
    [bucket] = plan_of([given], MESH, LARGE)
    [layout] = bucket.layouts
    assert layout.axes == (of_rows, of_columns)
    names = ("replica_axes", "group_size", "shards", "matrices", "shape")
    assert [getattr(bucket, name) for name in names] == expected
    assert bucket.matrices_per_device == 1


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
    found = [members(bucket) for bucket in plan_of(arrays, MESH, LARGE)]
    # By another all-to-all (2,), but to devices that would be idle.
    assert found == [(0, 1, 3, 2), (4,), (5,), (6,)]


def test_of_matrices_that_replicas_repeat_none_is_transposed():
    """Where they fill more than one stack; one stack is for both forms."""
    gate, down = (array(8, *shape, axes=("fsdp", (), ())) for shape in ((6, 4), (4, 6)))
    mesh = MeshShape({"data": 2, "fsdp": 4}, {"data": 2})
    dear = Hardware(1.0, fast=Link(1.0, 1.0), slow=Link(1e-9, 1.0))  # To send anything.
    for most, wanted in ((LARGE, [((4, 6), 4)]), (100, [((4, 6), 2), ((6, 4), 2)])):
        buckets = plan_buckets([down, gate], mesh, most, CostModel(dear))
        assert sorted((each.shape, each.matrices) for each in buckets) == wanted
        assert {each.group_size for each in buckets} == {1}
        parts = [(j.shape, part) for j in buckets for part in j.slices]
        for shape, part in parts:
            assert part.transposed == (part.array == 1 and shape == (4, 6))


def test_stacks_are_limited_and_all_but_the_last_full():
    arrays = [rows(4, 8)] * 40
    nbytes = 4 * 8 * FLOAT.itemsize
    for most in (1, nbytes, 2 * nbytes, 3 * nbytes, LARGE):
        buckets = plan_of(arrays, MESH, most)
        assert sorted(i for j in buckets for i in members(j)) == list(range(40))
        assert all(j.nbytes <= max(most, nbytes) for j in buckets)
        assert sum(j.matrices_per_device for j in buckets) == 40 // 8


@pytest.mark.parametrize("most", [1, 2, 3, LARGE])
def test_layers_in_one_array_take_no_more_than_layers_apart(most):
    """Arrays are cut only where devices would have zeros otherwise."""
    nbytes = most * 4 * 8 * FLOAT.itemsize
    stacked = plan_of([rows(12, 4, 8)] * 6, MESH, nbytes)
    apart = plan_of([rows(4, 8)] * 72, MESH, nbytes)
    assert sum(j.matrices_per_device for j in stacked) == 72 // 8
    assert sum(j.matrices_per_device for j in apart) == 72 // 8
    assert len(stacked) <= max(6, len(apart))
    parts = sorted(part[:3] for j in stacked for part in j.slices)
    held = [(i, k) for i, start, stop in parts for k in range(start, stop)]
    assert held == [(i, k) for i in range(6) for k in range(12)]
    # Whole ones, each larger than a stack: sixteen matrices for eight devices.
    alone = plan_of([rows(16, 4, 8)] * 2, MESH, 1)
    assert [members(j) for j in alone] == [(0,), (1,)]


def test_axes_of_one_device_change_nothing():
    """They do not count as shardings: neither buckets nor shapes depend on them."""
    one = MeshShape({"one": 1} | MESH.sizes | {"last": 1})
    given = [array(8, 16, axes=("fsdp", "one")), array(4, 8, axes=(("last", "fsdp"), ()))]
    given += [array(24, 6, 4, axes=(("data", "one", "fsdp"), (), "last"))]
    without = [rows(8, 16), rows(4, 8), array(24, 6, 4, axes=(("data", "fsdp"), (), ()))]
    assert plan_of(given, one, LARGE) == plan_of(without, MESH, LARGE)
    copied = [array(8, 16, axes=((), "one")), array(4, 4, axes=("one", ()))]
    assert plan_of(copied, one, LARGE) == plan_of(
        [array(8, 16), array(4, 4)], MESH, LARGE
    )


def counts(bucket):
    return bucket.matrices, bucket.matrices_per_device, bucket.column_shards


def test_remainders_have_column_shards():
    """Ten matrices on eight devices: one each, then four devices for each of the two."""
    for given in [rows(16, 256)] * 10, [rows(10, 16, 256)]:
        buckets = plan_of(given, MESH, LARGE)
        whole, shared = sorted(buckets, key=lambda j: j.column_shards)
        assert (counts(whole), counts(shared)) == ((8, 1, 1), (2, 1, 4))
        assert shared.nbytes == whole.nbytes / 4
        # Its Gram matrices are added in pieces and gathered whole, five times.
        gram = 5 * 2 * 16 * 16 * 4 * 3 // 4
        assert shared.traffic.nbytes == 2 * shared.nbytes * 3 // 4 + shared.nbytes + gram
        assert shared.flops == 5 * (4 * 16**2 * 64 + 2 * 16**3)
    # The one array is in two slices.
    parts = sorted(part[:3] for j in (whole, shared) for part in j.slices)
    assert parts == [(0, 0, 8), (0, 8, 10)]


def of_half(m, n):
    return array(m, n, axes=("fsdp", ()), dtype=np.dtype("float16"))


FSDP = MeshShape({"fsdp": 64})
ONE_BUCKET = {  # Arrays, mesh, matrices, of them a device, column shards, layouts.
    # Eight devices: none does more than its share, rounded up.
    **{
        f"{n}_alike": ([rows(4, 8)] * n, MESH, n, -(-n // 8), 1, 1)
        for n in (1, 9, 27, 64)
    },
    # Their Gram matrices, which would be sent, are as large as themselves.
    "small": ([rows(64, 64)] * 2, MESH, 2, 1, 1, 1),
    "a_remainder_that_nothing_improves": ([rows(64, 64)] * 9, MESH, 9, 2, 1, 1),
    # A wide MLP: sharded by rows and by columns, 16 devices to a matrix.
    "mlp": ([of_half(2048, 11264)] * 2 + [of_half(11264, 2048)], FSDP, 3, 1, 16, 2),
    "attention": (
        *([of_half(2048, 3072)] * 27 + [of_half(2048, 2048)] * 27, FSDP),
        *(54, 1, 1, 1),
    ),
}


@pytest.mark.parametrize("case", ONE_BUCKET)
def test_what_one_bucket_holds(case):
    given, mesh, *expected = ONE_BUCKET[case]
    [bucket] = plan_of(given, mesh, LARGE)
    assert [*counts(bucket), len(bucket.layouts)] == expected
    assert case != "attention" or bucket.shape == (2048, 3072)


def test_idle_devices_take_column_shards_of_wider_matrices():
    """Moonlight's 52 shared experts leave twelve of 64 devices for its layer 0."""
    wide, narrow = [of_half(2048, 10944)] * 3, [of_half(2048, 2816)] * 52
    [bucket] = plan_of(wide + narrow, FSDP, LARGE)
    found = [(layout.matrices, layout.column_shards) for layout in bucket.layouts]
    assert found == [(3, 4), (52, 1)]
    assert (bucket.shape, bucket.matrices_per_device) == ((2048, 2816), 1)
    assert bucket.column_shards == 4
    # As for the narrow ones alone, plus the sums of Gram matrices.
    [alone] = plan_of(narrow, FSDP, LARGE)
    assert bucket.flops == alone.flops
    assert bucket.traffic.nbytes == alone.traffic.nbytes + 5 * 2048**2 * 6 * 3 // 4


FLOAT16 = np.dtype("float16")


def buckets_of(model, *groups):
    """Of groups (m, n, shards), and devices that share the columns of each matrix."""
    buckets = []
    for index, (m, n, shards, *shared) in enumerate(groups):
        [column_shards] = shared or [1]
        part = MatrixRange(index, 0, 8 // column_shards, transposed=False)
        axes = ("fsdp",) if shards == 8 else ()
        layout = LayoutGroup((part,), (axes, ()), column_shards)
        sharing = () if shards in (0, 8) else ("fsdp",)
        size = 8 if shards else 1
        shape = m, n // column_shards
        sizes = shape, FLOAT16, axes, sharing, size, max(1, shards)
        buckets.append(Bucket((layout,), *sizes, cost_model=model))
    return buckets


def planned(model, *groups):
    buckets = buckets_of(model, *groups)
    return Plan.of(buckets, [[""] * len(groups)] * len(buckets), model)


# A device has one matrix of each group. Of m×n it sends 2mn·7/8 bytes each way, replicas
# 2mn·7 back, and it computes 5(4m²n + 2m³) FLOP: per byte and FLOP of these shapes
# 896, 448, 224; 7168, 3584; 87040, 46080, 25600. No shards: eight whole experts.
A, B, C = (8, 64, 8), (8, 32, 8), (8, 16, 8)
SHARED = (8, 64, 8, 4)  # 224 each way, five sums of 8·8·(4 + 2)·3/4; 25600 FLOP.
SENT = {  # The time of a byte, groups, all transfers.
    "alone": (1, [A], 2 * 896),
    "three": (1, [A, B, C], 2 * (896 + 448 + 224)),
    "replicas": (1, [(8, 64, 1), (8, 32, 1)], 7168 + 3584),
    "beside_what_stays": (1, [A, (8, 64, 0)], 2 * 896),
    "shared_alone": (1, [SHARED], 2 * 224 + 1440),
    "sums_beside_others": (1, [SHARED, A], 2 * 224 + 1440 + 2 * 896),
    "slow_links": (200, [A, B, C], 627200),
    "nothing": (1, [], 0),
}


@pytest.mark.parametrize("case", SENT)
def test_the_seconds_of_all_transfers(case):
    of_byte, groups, transfers = SENT[case]
    link = Link(1 / of_byte, 0.0)
    model = CostModel(Hardware(1.0, link, link))
    assert planned(model, *groups).transfer_seconds == transfers


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
    buckets = plan_of(arrays, MESH, LARGE)
    parts = sorted(part for bucket in buckets for part in bucket.slices)
    for index, found in itertools.groupby(parts, key=lambda part: part.array):
        starts, stops = zip(*((part.start, part.stop) for part in found), strict=True)
        *batch, _, _ = zip(arrays[index].shape, arrays[index].axes, strict=True)
        held = math.prod(size // count_devices(axes, MESH.sizes) for size, axes in batch)
        assert (0, *stops) == (*starts, held)
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
            for side, axes in zip((m, n), layout.axes, strict=True):
                assert side % count_devices(axes, MESH.sizes) == 0
            for part in layout.slices:
                *_, rows, columns = arrays[part.array].shape
                if part.transposed:
                    rows, columns = columns, rows
                assert rows <= m and columns <= n * layout.column_shards
    alone = [plan_of([array], MESH, LARGE) for array in arrays]
    assert sum(j.cost for j in buckets) <= sum(j.cost for plans in alone for j in plans)
