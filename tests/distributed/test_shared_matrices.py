"""Matrices that several devices share, and shapes that travel together, on 8 devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import describe, orthogonalize
from orscale_jax.distributed.costs import ShardedArray
from orscale_jax.distributed.exchange import plan_exchange
from orscale_jax.distributed.mesh import MeshShape
from orscale_jax.newton_schulz.platforms import CPU, TPU, NewtonSchulz
from orscale_jax.sharding.typed_sharding import axes_of
from tests import runs
from tests.oracle import svd_polar
from tests.platforms import orthogonalize_as
from tests.runs import AUTO, EXPLICIT, assert_close, mesh_of, tree

FLOAT = np.dtype("float32")
SHAPES = {"a": (16, 256), "b": (16, 256), "c": (512, 16), "d": (8, 128), "e": (128, 16)}
STEPS = 5

BOTH = {"fsdp": 4, "tensor": 2}
WIDE, TALL = P("fsdp", "tensor"), P("tensor", "fsdp")
LAYOUTS = {
    "rows × columns": (BOTH, dict.fromkeys("abd", WIDE) | dict.fromkeys("ce", TALL)),
    "replicated": ({"data": 8}, {}),
    "rows": ({"fsdp": 8}, dict.fromkeys(SHAPES, P("fsdp"))),
    "rows, columns or copies": (
        BOTH,
        {"a": P("fsdp"), "b": P("tensor"), "c": P("fsdp"), "d": P(None, "fsdp")},
    ),
}


grads = functools.partial(tree, 0, shapes=SHAPES)


def placed(layout, kind):
    sizes, specs = LAYOUTS[layout]
    mesh = mesh_of(sizes, kind)
    return mesh, runs.placed(grads(), mesh, dict.fromkeys(SHAPES, P()) | specs)


def plan_of(layout):
    """The plan of CPUs, which the tests compile for."""
    sizes, specs = LAYOUTS[layout]
    arrays = [
        ShardedArray(shape, FLOAT, axes_of(specs.get(name, P()), 2))
        for name, shape in SHAPES.items()
    ]
    settings = NewtonSchulz.of(STEPS, "polar_express", None, "frobenius")
    platform = dataclasses.replace(CPU, settings=settings)
    return plan_exchange(platform, arrays, MeshShape(sizes))


def unshared(bucket):
    """The FLOPs, if every device had whole matrices."""
    m, n = bucket.shape
    layouts = tuple(
        dataclasses.replace(layout, column_shards=1) for layout in bucket.layouts
    )
    whole = bucket._replace(layouts=layouts, shape=(m, n * bucket.column_shards))
    return whole.flops


def compiled(mesh, placed, stage=None, **arguments):
    stage = stage or orthogonalize(**arguments)
    stage.init(placed)
    with jax.set_mesh(mesh):
        return jax.jit(lambda g: stage.update(g, ())[0]).lower(placed).compile()


def assert_alone(found, names=SHAPES, **arguments):
    wanted, _ = orthogonalize(**arguments).update(grads(), ())
    for name in names:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-5)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "layout, kind, arguments",
    [
        *((layout, EXPLICIT, {}) for layout in LAYOUTS),
        ("rows, columns or copies", AUTO, {}),
        ("rows", EXPLICIT, {"ns_preconditioning": "aol"}),
    ],
)
def test_values_are_those_of_one_device(layout, kind, arguments):
    mesh, sharded = placed(layout, kind)
    found = compiled(mesh, sharded, **arguments)(sharded)
    assert_alone(found, **arguments)
    for name in SHAPES:
        assert found[name].sharding.is_equivalent_to(sharded[name].sharding, 2)


@pytest.mark.extended
def test_the_polar_factor_itself():
    """After eight steps, with restarts of the Gram form on shared matrices."""
    mesh, sharded = placed("rows", EXPLICIT)
    found = compiled(mesh, sharded, ns_steps=8)(sharded)
    for name, x in grads().items():
        np.testing.assert_allclose(found[name], svd_polar(x), atol=1e-4)


@pytest.mark.extended
def test_scales_and_nan():
    """The largest entry and the norm are those of all columns, and of no other matrix."""
    mesh, sharded = placed("rows", EXPLICIT)
    program = compiled(mesh, sharded)
    for scale in (1e-20, 1e19):
        assert_alone(program(jax.tree.map(lambda x: scale * x, sharded)))
    bad = sharded | {"a": np.nan * sharded["a"], "c": 0 * sharded["c"]}
    found = program(bad)
    assert np.isnan(found["a"]).all() and not np.any(found["c"])
    assert_alone(found, "bde")


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_traced_steps_and_as_on_tpus(kind):
    """Sums in a loop; matrices that are normalized before they are sent."""
    mesh, sharded = placed("rows", kind)
    with jax.set_mesh(mesh):
        traced = functools.partial(orthogonalize, param_shardings=sharded)
        update = jax.jit(lambda g, k: traced(ns_steps=k).update(g, ())[0])
        assert_alone(update(sharded, 3), ns_steps=3)
    mesh, sharded = placed("rows × columns", kind)
    assert_alone(compiled(mesh, sharded, orthogonalize_as(TPU))(sharded))


@pytest.mark.quick_first_case
@pytest.mark.compiled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_does_what_the_plan_says(layout):
    buckets = plan_of(layout)
    assert any(bucket.column_shards > 1 for bucket in buckets)
    cost = hlo_cost.of(compiled(*placed(layout, EXPLICIT)).as_text())
    assert cost.looped_bytes == 0
    kinds = [collective.kind for collective in cost.collectives]
    sent = [bucket for bucket in buckets if bucket.shards > 1]
    assert kinds.count("all-to-all") == 2 * len(sent)
    # The Gram form needs the Gram matrix twice in five steps.
    assert kinds.count("reduce-scatter") == 2 * sum(b.column_shards > 1 for b in buckets)
    assert cost.flops == sum(b.flops for b in buckets) < sum(map(unshared, buckets))


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_printed_bytes_are_those_of_the_program(layout):
    mesh, sharded = placed(layout, EXPLICIT)
    groups = describe(sharded).plan.groups
    printed = sum(group.bytes_sent for group in groups)
    cost = hlo_cost.of(compiled(mesh, sharded).as_text())
    # The norms of shared matrices are all-reduces, of one number for each.
    scalars = [c.nbytes for c in cost.collectives if c.kind == "all-reduce"]
    assert max(scalars) <= FLOAT.itemsize * len(groups)
    assert (
        printed == sum(c.sent(8) for c in cost.collectives if c.kind != "all-reduce") > 0
    )


@pytest.mark.extended
def test_an_array_of_which_some_matrices_are_shared():
    """Ten layers on eight devices: eight whole, then four devices for each of the two."""
    mesh, x = mesh_of({"fsdp": 8}, EXPLICIT), tree(0, shapes={"w": (10, 16, 256)})
    sharded = runs.placed(x, mesh, P(None, "fsdp"))
    stage = orthogonalize(weight_dimension_numbers=Dims(1, 2))
    found = compiled(mesh, sharded, stage)(sharded)
    assert_close(found, stage.update(x, ())[0], rtol=1e-7)


@pytest.mark.extended
@pytest.mark.compiled
def test_bfloat16_is_added_in_float32_and_gathered_in_bfloat16():
    mesh, sharded = placed("rows", EXPLICIT)
    with jax.set_mesh(mesh):
        stage = orthogonalize(ns_dtype=jnp.bfloat16)
        text = jax.jit(lambda g: stage.update(g, ())[0]).lower(sharded).as_text()
    lines = text.splitlines()
    # The types of a reduction stand after its body.
    types = {
        name: next(line for line in lines[i : i + 5] if "->" in line)
        for name in ("stablehlo.reduce_scatter", "stablehlo.all_gather")
        for i, line in enumerate(lines)
        if name in line
    }
    assert "xf32>" in types["stablehlo.reduce_scatter"]
    assert "xbf16>" in types["stablehlo.all_gather"]


def shared(kind, sizes, spec, shape):
    """A matrix, or several, of which two devices or more share the columns."""
    mesh, x = mesh_of(sizes, kind), jax.random.normal(jax.random.key(0), shape)
    return mesh, x, jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_step_has_the_derivative_of_one_device(kind):
    mesh, x, sharded = shared(kind, {"data": 8}, P("data"), (8, 40))
    stage = orthogonalize(param_shardings=P("data"))

    def loss(x):
        return jnp.sin(stage.update({"x": x}, ())[0]["x"]).sum()

    wanted = jax.grad(loss)(x)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(sharded)
    np.testing.assert_allclose(found, wanted, atol=3e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_an_ensemble_along_an_axis_of_the_mesh(kind):
    """Its members share their columns along another one."""
    mesh, x, sharded = shared(
        kind, {"member": 4, "x": 2}, P("member", None, "x"), (4, 8, 40)
    )
    stage = orthogonalize(param_shardings=P(None, "x"))

    def q(x):
        return stage.update({"x": x}, ())[0]["x"]

    with jax.set_mesh(mesh):
        found = jax.jit(jax.vmap(q, spmd_axis_name="member"))(sharded)
    np.testing.assert_allclose(found, jax.vmap(q)(x), atol=1e-4)
