"""Which leaves share a stack, and that sharing one changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import orthogonalize
from orscale_jax.distributed import platforms
from orscale_jax.distributed.platforms import (
    TPU,
    Limits,
    StackKey,
    join_in_place,
    plan_stacks,
    polar_in_chunks,
)
from tests import leaves, oracle
from tests.platforms import orthogonalize_as

FLOAT, HALF = np.dtype("float32"), np.dtype(jnp.bfloat16)


def key(*shape, dtype=FLOAT, sharding=()):
    return StackKey(shape, dtype, sharding)


@pytest.mark.parametrize(
    "keys, max_bytes, stacks",
    [
        ([], 100, ()),
        ([key(2, 4), key(3, 4), key(2, 4)], 1000, ((0, 2), (1,))),
        # Arrays of other dtypes, shardings or batch axes stay apart, though sizes agree.
        ([key(2, 4), key(2, 4, dtype=HALF)], 1000, ((0,), (1,))),
        ([key(3, 2, 4), key(3, 2, 4, sharding=("a",))], 1000, ((0,), (1,))),
        ([key(3, 2, 4), key(2, 4), key(1, 2, 4)], 1000, ((0,), (1,), (2,))),
        # 32 bytes each: at most three in a stack, divided as evenly as possible.
        ([key(2, 4)] * 4, 96, ((0, 1), (2, 3))),
        ([key(2, 4)] * 4, 95, ((0, 1), (2, 3))),
        ([key(2, 4)] * 7, 100, ((0, 1, 2), (3, 4), (5, 6))),
        ([key(2, 4)] * 2, 31, ((0,), (1,))),
        ([key(0, 4)] * 2, 2, ((0, 1),)),
    ],
)
def test_the_plan(keys, max_bytes, stacks):
    assert plan_stacks(keys, max_bytes) == stacks


def test_the_plan_with_a_limit_on_length():
    alike = [key(2, 4)] * 7
    assert plan_stacks(alike, 1000, 3) == ((0, 1, 2), (3, 4), (5, 6))
    assert plan_stacks(alike, 64, 3) == ((0, 1), (2, 3), (4, 5), (6,))


def test_keys():
    assert StackKey.of(jnp.ones((3, 5, 2))) == key(3, 2, 5, sharding=(None,))
    assert StackKey.of(jnp.ones((2, 5), jnp.bfloat16)) == key(2, 5, dtype=HALF)


def stage(numbers, **arguments):
    return orthogonalize(weight_dimension_numbers=numbers, **arguments)


def products(tree, numbers, **arguments):
    """Matrix products in the program: three for each Newton–Schulz iteration."""
    optimizer = stage(numbers, **arguments)
    lowered = jax.jit(lambda g: optimizer.update(g, ())[0]).lower(tree)
    return lowered.compile().as_text().count(" dot(")


@pytest.mark.quick_first_case
@pytest.mark.parametrize("max_bytes", [2000, 1, 2**28])
def test_stacks_change_nothing(max_bytes):
    rng = np.random.default_rng(0)
    tree = {
        "wide": jnp.asarray(rng.normal(size=(3, 8, 20)), jnp.float32),
        "tall": jnp.asarray(rng.normal(size=(3, 20, 8)), jnp.float32),
        **{
            f"layer{i}": jnp.asarray(rng.normal(size=(12, 12)), jnp.float32)
            for i in range(5)
        },
    }
    found, _ = stage(Dims(-2, -1), max_stack_bytes=max_bytes).update(tree, ())
    for name, leaf in tree.items():
        for q, matrix in zip(
            found[name].reshape(-1, *leaf.shape[-2:]),
            leaf.reshape(-1, *leaf.shape[-2:]),
            strict=True,
        ):
            assert leaves.relative_error(q, oracle.newton_schulz(matrix)) < 2e-5


@pytest.mark.extended
@pytest.mark.compiled
def test_the_program_grows_with_shapes_and_not_with_layers():
    def layers(count):
        return {
            f"{i}.{name}": jnp.ones(shape)
            for i in range(count)
            for name, shape in {"up": (8, 12), "down": (12, 8), "out": (8, 8)}.items()
        }

    few, many = (
        products(layers(count), Dims(0, 1), max_stack_bytes=2**28) for count in (2, 8)
    )
    assert few == many
    apart = products(layers(8), Dims(0, 1), max_stack_bytes=1)
    assert apart == 12 * few


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize(
    "shape", [(8, 12), pytest.param((512, 640), marks=pytest.mark.slow)]
)
def test_32_layers_have_the_program_of_one(shape):
    """On CPU; a stack of the larger ones takes several chunks."""

    def count(layers):
        return products({str(i): jnp.ones(shape) for i in range(layers)}, Dims(0, 1))

    assert [count(32), count(64), count(65)] == [count(1) * n for n in (1, 2, 3)]


@pytest.mark.extended
def test_other_sharding_types_stay_apart():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    tree = {
        name: jax.device_put(x, NamedSharding(mesh, spec))
        for name, spec in {"a": P("a"), "none": P(), "also": P("a", "b")}.items()
    }
    optimizer = stage(Dims(1, 2))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda g: optimizer.update(g, ())[0])(tree)
    for name, q in found.items():
        assert jax.typeof(q) == jax.typeof(tree[name])
        for one, matrix in zip(q, x, strict=True):
            assert leaves.relative_error(one, oracle.newton_schulz(matrix)) < 2e-5


@pytest.mark.extended
@pytest.mark.parametrize("interleave", [1, 2, 3])
@pytest.mark.parametrize("max_bytes", [100, 1, 64, 10_000])
def test_chunks(max_bytes, interleave, monkeypatch):
    """Each matrix of 32 bytes once, within the limits on chunks and turns."""

    def add_one(chunks, _, columns=None):
        assert len(chunks) <= interleave
        for x in chunks:
            assert x.ndim == 2 or x.size == 8 or x.size * 4 <= max_bytes
        return [x + 1 for x in chunks]

    shapes = (2, 4), (1, 2, 4), (2, 2, 4), (7, 2, 4), (12, 4, 2), (3, 5, 2, 4)
    xs = [jnp.arange(np.prod(shape), dtype=FLOAT).reshape(shape) for shape in shapes]
    monkeypatch.setattr(platforms, "newton_schulz", add_one)
    limits = Limits(stack_bytes=0, chunk_bytes=max_bytes, interleave=interleave)
    platform = dataclasses.replace(TPU, limits=limits)
    results = polar_in_chunks(platform, xs, [None] * len(xs))
    for x, result in zip(xs, results, strict=True):
        np.testing.assert_array_equal(result, x + 1)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec",
    [
        *(pytest.param(spec, marks=pytest.mark.slow) for spec in (P(), P(None, "a"))),
        *(P("a"), P("b", "a")),
    ],
)
def test_as_on_tpus(kind, spec):
    """Normalized before stacking, interleaved in chunks: here on CPU, in float32."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    rng = np.random.default_rng(0)
    shapes = {"wide": (20, 8, 16), "tall": (4, 16, 8), "square": (4, 8, 8)}
    tree = {
        name: jax.device_put(
            1e15 * rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec)
        )
        for name, shape in shapes.items()
    }
    limits = Limits(stack_bytes=2**12, chunk_bytes=2**10, interleave=2)
    optimizer = orthogonalize_as(TPU, Dims(1, 2), limits)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda g: optimizer.update(g, ())[0])(tree)
    for name, q in found.items():
        for one, matrix in zip(q, tree[name], strict=True):
            assert leaves.relative_error(one, oracle.newton_schulz(matrix)) < 2e-5


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (2, 1, 3)])
def test_join_in_place_concatenates(lengths):
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(size=(length, 3, 5)), HALF) for length in lengths]
    np.testing.assert_array_equal(join_in_place(parts), jnp.concatenate(parts))
