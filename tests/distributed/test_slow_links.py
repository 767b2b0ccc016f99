"""Meshes of several slices or nodes: what crosses the slow links between them."""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import describe, muon, orscale, orthogonalize, polar_factor
from orscale_jax.distributed.costs import (
    Bucket,
    CostModel,
    LayoutGroup,
    MatrixRange,
    ShardedArray,
)
from orscale_jax.distributed.mesh import MeshShape, slices_of_axes
from orscale_jax.distributed.placement import slice_of_each
from orscale_jax.distributed.plan import plan_buckets
from orscale_jax.newton_schulz.hardware import H100, TPU_V5P, VIRTUAL, Link
from orscale_jax.newton_schulz.platforms import CPU, PLATFORMS
from tests import runs
from tests.runs import AUTO, EXPLICIT, mesh_of, tree

LARGE = 2**40
BFLOAT16 = np.dtype(jnp.bfloat16)
TWO_SLICES = MeshShape({"dcn": 2, "fsdp": 8}, {"dcn": 2})
V5P = CostModel(TPU_V5P)


def array(m, n, *axes, batch=()):
    return ShardedArray((*batch, m, n), BFLOAT16, (*[()] * len(batch), *axes))


def slow_bytes(buckets):
    return sum(bucket.traffic.slow_bytes for bucket in buckets)


@pytest.mark.parametrize(
    "slice_of, expected",
    [
        (np.zeros((4, 2)), {}),
        ([[0, 0], [0, 0], [1, 1], [1, 1]], {"a": 2}),
        ([[0, 0], [1, 1], [2, 2], [3, 3]], {"a": 4}),
        ([[0, 1], [0, 1], [0, 1], [0, 1]], {"b": 2}),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], {"a": 2, "b": 2}),
        ([[0, 0], [1, 1], [0, 0], [1, 1]], {"a": 4}),  # Not in consecutive parts.
        ([[0, 0], [0, 0], [0, 0], [0, 1]], {"a": 4, "b": 2}),
    ],
)
def test_the_axes_that_lead_to_other_slices(slice_of, expected):
    assert slices_of_axes(("a", "b"), np.array(slice_of)) == expected


def slices_of_devices(sizes, slices):
    """A slice for each device of a mesh, from the number of slices along its axes."""
    index = np.zeros(tuple(sizes.values()), int)
    for axis, (name, size) in enumerate(sizes.items()):
        count = slices.get(name, 1)
        shape = [-1 if i == axis else 1 for i in range(len(sizes))]
        index = index * count + (np.arange(size) // (size // count)).reshape(shape)
    return index


def test_slices_of_axes_inverts_slices_of_devices():
    sizes = {"a": 4, "b": 6, "c": 1}
    for a, b in itertools.product((1, 2, 4), (1, 2, 3, 6)):
        slices = {name: n for name, n in (("a", a), ("b", b)) if n > 1}
        slice_of = slices_of_devices(sizes, slices)
        assert len(np.unique(slice_of)) == a * b
        assert slices_of_axes(tuple(sizes), slice_of) == slices


def test_hosts_of_one_slice_are_not_slices():
    """Devices name their slice if there are several; hosts and processes do not count."""

    def mesh_of(**slices):
        devices = [
            types.SimpleNamespace(process_index=i, **{k: v[i] for k, v in slices.items()})
            for i in range(4)
        ]
        return types.SimpleNamespace(devices=np.array(devices).reshape(2, 2))

    assert slice_of_each(mesh_of()).tolist() == [[0, 0], [0, 0]]
    found = slice_of_each(mesh_of(slice_index=[0, 0, 1, 1]))
    assert found.tolist() == [[0, 0], [1, 1]]


def test_matrices_stay_in_their_slice_unless_sharing_pays():
    small = [array(2048, 8192, ("fsdp",), ())] * 16
    [*buckets] = plan_buckets(small, TWO_SLICES, LARGE, V5P)
    assert slow_bytes(buckets) == 0
    assert sum(bucket.matrices_per_device for bucket in buckets) == 2
    large = [array(7168, 28672, ("fsdp",), ())] * 16
    [bucket] = plan_buckets(large, TWO_SLICES, LARGE, V5P)
    assert bucket.matrices_per_device == 1
    # Each chip receives its shards of the eight that the other slice has computed.
    assert slow_bytes([bucket]) == 7168 * 28672 * 2


def test_replicas_and_experts_and_layers_stay():
    """Nothing crosses for experts or layers over slices, or for what all hold."""
    mesh = MeshShape({"dcn": 2, "expert": 8}, {"dcn": 2})
    replicas = [array(2048, 8192, (), ())] * 21
    experts = array(2048, 1408, (), (), batch=(5, 64))._replace(
        axes=((), ("dcn", "expert"), (), ())
    )
    pipeline = array(2048, 8192, ("expert",), (), batch=(32,))._replace(
        axes=(("dcn",), ("expert",), ())
    )
    for arrays in (replicas, [experts], [pipeline], [*replicas, experts, pipeline]):
        assert slow_bytes(plan_buckets(arrays, mesh, LARGE, V5P)) == 0


def planted(**rates):
    slow = Link(rates.get("slow", 6.25e9), rates.get("latency", 0.0))
    return CostModel(TPU_V5P._replace(slow=slow))


def test_the_table_decides():
    replicas = [array(2048, 8192, ("fsdp",), ())] * 16

    def crossed(model):
        return slow_bytes(plan_buckets(replicas, TWO_SLICES, LARGE, model))

    assert not crossed(planted())
    assert crossed(planted(slow=6.25e10))
    assert not crossed(planted(slow=6.25e10, latency=1.0))
    fast_everywhere = MeshShape(TWO_SLICES.sizes)
    [bucket] = plan_buckets(replicas, fast_everywhere, LARGE, planted(slow=1.0))
    assert bucket.group_size == 16


def test_a_lone_small_matrix_is_not_gathered_from_every_device():
    """Where messages cost time, all devices compute it: they would wait longer for it."""
    mesh = MeshShape({"data": 8192})
    [bucket] = plan_buckets([array(64, 4096, (), ())], mesh, LARGE, V5P)
    assert (bucket.group_size, bucket.traffic.nbytes) == (1, 0)


@pytest.mark.parametrize("hardware", [TPU_V5P, H100])
@pytest.mark.parametrize("slow", [(), ("replica",)])
def test_more_replicas_cost_no_more(slow, hardware):
    """As many as are best share the work of 24 matrices, and the others repeat it."""
    costs = []
    for replicas in (1, 4, 8, 16, 64, 4096):
        sizes = {"replica": replicas, "fsdp": 8}
        mesh = MeshShape(sizes, dict.fromkeys(slow, replicas))
        given = [array(2048, 8192, ("fsdp",), ())] * 24
        buckets = plan_buckets(given, mesh, LARGE, CostModel(hardware))
        costs.append(sum(bucket.cost for bucket in buckets))
    assert costs == sorted(costs, reverse=True)


def every_bucket(count, shape, rows, mesh):
    """All ways to compute ``count`` matrices, alike, by one bucket."""

    def size(names):
        return math.prod(mesh.factors[name] for name in names)

    free = [name for name in mesh.factors if name not in rows]
    for kept in itertools.product((True, False), repeat=len(free)):
        replicas = tuple(itertools.compress(free, kept))
        # The first axis, if slow, may be in parts, each of which repeats the work.
        for parts, shards in itertools.product(range(1, 9), range(1, 33)):
            m, n = shape
            devices = size(rows + replicas) // parts
            length = size({*replicas[:1]} & mesh.slow)
            if length % parts or any(x % shards for x in (devices, m, n)):
                continue
            of_replicas = size(set(replicas) & {*mesh.slow})
            slices = size(set(rows) & {*mesh.slow}), math.ceil(of_replicas / parts)
            part = MatrixRange(0, 0, count, transposed=False)
            layout = LayoutGroup((part,), (rows, ()), shards)
            sizes = ((m, n // shards), BFLOAT16, rows, replicas, devices, size(rows))
            bucket = Bucket((layout,), *sizes, V5P, slices)
            if shards == 1 or bucket.matrices_per_device == 1:
                yield bucket


@pytest.mark.parametrize(
    "mesh",
    [
        TWO_SLICES,
        MeshShape({"data": 8, "fsdp": 4}, {"data": 2}),
        MeshShape({"dcn": 8, "fsdp": 2}, {"dcn": 8}),
    ],
)
@pytest.mark.parametrize("rows", [(), ("fsdp",)])
@pytest.mark.parametrize("shape", [(1024, 4096), (7168, 28672), (8192, 8192)])
def test_no_other_plan_costs_less(mesh, rows, shape):
    """By exhaustive search: equally many for all devices, and one bucket for the rest."""

    @functools.cache
    def buckets(count):
        return list(every_bucket(count, shape, rows, mesh)) if count else []

    def least(count):
        return min((bucket.cost for bucket in buckets(count)), default=0)

    for count in (1, 2, 3, 5, 8, 9, 16, 24, 33):
        found = plan_buckets([array(*shape, rows, ())] * count, mesh, LARGE, V5P)
        evenly = (
            bucket.cost + least(count - first)
            for first in range(1, count + 1)
            for bucket in buckets(first)
            if bucket.column_shards == 1
            and first == count // bucket.group_size * bucket.group_size
        )
        best = min([least(count), *evenly])
        assert sum(bucket.cost for bucket in found) <= best, count


LAYOUTS = {
    "sharded within": ({"dcn": 2, "fsdp": 4}, P("fsdp")),
    "sharded by columns": ({"dcn": 2, "fsdp": 4}, P(None, "fsdp")),
    "sharded across": ({"dcn": 2, "fsdp": 4}, P("dcn")),
    "sharded over both": ({"dcn": 2, "fsdp": 4}, P(("dcn", "fsdp"))),
    "the other way": ({"dcn": 2, "fsdp": 4}, P(("fsdp", "dcn"))),
    "rows × columns": ({"dcn": 2, "fsdp": 4}, P("dcn", "fsdp")),
    "replicated": ({"dcn": 2, "fsdp": 4}, P()),
    "slow axis last": ({"fsdp": 4, "dcn": 2}, P("fsdp", "dcn")),
    "one axis": ({"fsdp": 8}, P("fsdp")),
    "one axis of replicas": ({"fsdp": 8}, P()),
    "part of one of two": ({"fsdp": 4, "tensor": 2}, P("fsdp", "tensor")),
    "part of one of two, replicas": ({"fsdp": 4, "tensor": 2}, P("tensor")),
}
SLOW = {"fsdp": {"fsdp": 2}, "dcn": ("dcn",)}
SHAPES = {"a": (16, 64), "b": (64, 16), "c": (16, 256), "d": (3, 16, 64), "e": (16, 16)}
NUMBERS = {name: Dims(-2, -1) for name in SHAPES}


weights = functools.partial(tree, 0, shapes=SHAPES)


def slow_axes_of(sizes):
    return SLOW["dcn" if "dcn" in sizes else "fsdp"]


def placed(tree, mesh, spec):
    if not isinstance(spec, dict):
        spec = {k: P(*[None] * (x.ndim - 2), *spec) for k, x in tree.items()}
    return runs.placed(tree, mesh, spec)


def stage_of(slow_axes, shardings=None):
    return orthogonalize(
        weight_dimension_numbers=NUMBERS, slow_axes=slow_axes, param_shardings=shardings
    )


def compiled(x, mesh, slow_axes):
    """The program from matrices to their polar factors, sharded alike."""
    stage = stage_of(slow_axes, x)
    update = jax.jit(
        lambda x: stage.update(x, optax.EmptyState())[0],
        out_shardings={k: v.sharding for k, v in x.items()},
    )
    with jax.set_mesh(mesh):
        return update.lower(x).compile()


def assert_polar_factors(found):
    """On every device: of replicas, too."""
    for name, whole in weights().items():
        q = polar_factor(whole)
        for shard in found[name].addressable_shards:
            np.testing.assert_allclose(shard.data, q[shard.index], atol=2e-5)


@pytest.mark.compiled
@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_links_change_no_number_and_carry_what_the_plan_says(layout, kind):
    """Virtual devices have a TPU's rates: small matrices are not shared across slices."""
    sizes, spec = LAYOUTS[layout]
    mesh, slow = mesh_of(sizes, kind), slow_axes_of(sizes)
    x = placed(weights(), mesh, spec)
    program = compiled(x, mesh, slow)
    assert_polar_factors(program(x))
    counts = slow if isinstance(slow, dict) else dict.fromkeys(slow, 2)
    slice_of = slices_of_devices(sizes, counts).ravel()
    received = hlo_cost.crossings(program.as_text(), dict(enumerate(slice_of))).received
    plan = describe(x, stage_of(slow, x)).plan
    # A sum of Gram matrices around a ring is planned as if all of it crossed.
    assert max(received.values()) <= plan.slow_bytes
    assert layout == "sharded across" or max(received.values()) == plan.slow_bytes
    across = "dcn" in str(spec) or layout in ("one axis", "part of one of two")
    assert bool(plan.slow_bytes) == across


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "layout", ["replicated", "one axis of replicas", "sharded within"]
)
def test_matrices_shared_across_slices_by_planted_rates(layout, monkeypatch):
    """Where the slow links are fast, replicas share work over them, in two gathers."""
    hardware = VIRTUAL._replace(slow=Link(1e15, 0.0))
    planted = dataclasses.replace(CPU, hardware=hardware)
    monkeypatch.setitem(PLATFORMS, "cpu", planted)
    sizes, spec = LAYOUTS[layout]
    mesh, slow = mesh_of(sizes), slow_axes_of(sizes)
    x = placed(weights(), mesh, spec)
    assert describe(x, stage_of(slow, x)).plan.slow_bytes
    assert_polar_factors(compiled(x, mesh, slow)(x))


ROWS, COLUMNS = P("fsdp"), P(None, "fsdp")
MIXED = {"a": ROWS, "b": ROWS, "c": COLUMNS, "d": P(None, *COLUMNS), "e": ROWS}
DCN = {"dcn": 4}
# Meshes, slices, shardings, seconds of a message, and the devices of each collective.
PARTS = {
    "four of eight nodes": (
        *({"node": 8}, {"node": 8}, P(), 1e-10, "0123 4567 01 23 45 67"),
    ),
    "two slices of four": (
        *({"data": 8}, {"data": 4}, P(), 2e-10, "02 13 46 57 01 23 45 67"),
    ),
    "shards": ({**DCN, "fsdp": 2}, DCN, MIXED, 5e-10, "02 13 46 57 01 23 45 67"),
    "slow axis last": ({"fsdp": 2, **DCN}, DCN, ROWS, 5e-10, "01 23 45 67 04 15 26 37"),
}


@pytest.mark.compiled
@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize("case", PARTS)
def test_neighbours_share_what_other_replicas_repeat(case, kind, monkeypatch):
    """Where messages cost time, not all replicas of an axis gather from one another.

    Two devices share the columns of the widest matrix.
    """
    sizes, slices, spec, latency, groups = PARTS[case]
    dear, free = Link(3e13, latency), Link(1e15, 0.0)
    hardware = VIRTUAL._replace(fast=free if slices else dear, slow=dear)
    monkeypatch.setitem(PLATFORMS, "cpu", dataclasses.replace(CPU, hardware=hardware))
    monkeypatch.setattr("orscale_jax.distributed.plan.SMALLEST_PART", 2)
    mesh = mesh_of(sizes, kind)
    x = placed(weights(), mesh, spec)
    program = compiled(x, mesh, slices)
    assert_polar_factors(program(x))
    text, plan = program.as_text(), describe(x, stage_of(slices, x)).plan
    found = [each.groups for each in hlo_cost.of(text).collectives]
    assert {"".join(map(str, some)) for each in found for some in each} == {
        *groups.split()
    }
    slice_of = slices_of_devices(sizes, slices).ravel()
    received = hlo_cost.crossings(text, dict(enumerate(slice_of))).received
    # A ring around two nodes passes less than a sum of two is planned to.
    assert max(received.values()) == plan.slow_bytes or case == "four of eight nodes"


@pytest.mark.parametrize("make", [orscale, muon])
def test_slow_axes_that_are_no_axes(make):
    for wrong in ("dcn", 3, ("dcn", 2), {"dcn": 0}, {"dcn": True}, {"dcn": 1.5}, {1: 2}):
        with pytest.raises(ValueError, match=r"slow_axes=.* pass names of axes"):
            make(1e-3, slow_axes=wrong)


@pytest.mark.extended
@pytest.mark.parametrize(
    "slow_axes, message",
    [(("pod",), "the mesh has the axes"), ({"fsdp": 3}, "3 slices along 'fsdp'")],
)
def test_slow_axes_of_another_mesh(slow_axes, message):
    x = placed(weights(), mesh_of({"dcn": 2, "fsdp": 4}, EXPLICIT), P("fsdp"))
    stage = orthogonalize(weight_dimension_numbers=NUMBERS, slow_axes=slow_axes)
    with pytest.raises(ValueError, match=f"slow_axes has .*{message}"):
        stage.update(x, optax.EmptyState())
    with pytest.raises(ValueError, match=f"slow_axes has .*{message}"):
        describe(x, stage)


@pytest.mark.extended
def test_under_inject_hyperparams():
    mesh = mesh_of({"dcn": 2, "fsdp": 4})
    params = placed(weights(), mesh, P("fsdp"))
    updates = []
    for slow in (("dcn",), {"dcn": 2}):
        optimizer = optax.inject_hyperparams(orscale)(
            1e-2,
            weight_dimension_numbers=lambda _: NUMBERS,
            slow_axes=slow,
            param_shardings=jax.tree.map(lambda x: x.sharding, params),
        )
        with jax.set_mesh(mesh):
            state = optimizer.init(params)
            updates.append(jax.jit(optimizer.update)(params, state, params)[0])
    jax.tree.map(np.testing.assert_array_equal, *updates)
