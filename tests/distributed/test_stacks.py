"""Which leaves share a stack, and that sharing one changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import orthogonalize
from orscale_jax.distributed import platforms
from orscale_jax.distributed.platforms import (
    TPU,
    Limits,
    StackKey,
    plan_stacks,
    polar_in_chunks,
)
from tests import leaves, oracle
from tests.platforms import orthogonalize_as
from tests.runs import AUTO, EXPLICIT, mesh_of, placed, tree

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


def assert_polar(found, tree):
    """Each matrix, against float64."""
    for name, leaf in tree.items():
        matrices = (np.reshape(x, (-1, *leaf.shape[-2:])) for x in (found[name], leaf))
        for q, matrix in zip(*matrices, strict=True):
            assert leaves.relative_error(q, oracle.newton_schulz(matrix)) < 2e-5


def products(values, numbers, **arguments):
    """Matrix products in the program: three for each Newton–Schulz iteration."""
    optimizer = stage(numbers, **arguments)
    lowered = jax.jit(lambda g: optimizer.update(g, ())[0]).lower(values)
    return lowered.compile().as_text().count(" dot(")


@pytest.mark.quick_first_case
@pytest.mark.parametrize("max_bytes", [2000, 1, 2**28])
def test_stacks_change_nothing(max_bytes):
    shapes = {"wide": (3, 8, 20), "tall": (3, 20, 8)}
    values = tree(0, shapes=shapes | {f"layer{i}": (12, 12) for i in range(5)})
    found, _ = stage(Dims(-2, -1), max_stack_bytes=max_bytes).update(values, ())
    assert_polar(found, values)


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
    mesh = mesh_of({"a": 2, "b": 4}, EXPLICIT)
    specs = {"a": P("a"), "none": P(), "also": P("a", "b")}
    values = placed(tree(0, shapes=dict.fromkeys(specs, (2, 8, 16))), mesh, specs)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda g: stage(Dims(1, 2)).update(g, ())[0])(values)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, values)
    assert_polar(found, values)


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
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    "spec",
    [P("a"), P("b", "a")]
    + [pytest.param(spec, marks=pytest.mark.slow) for spec in (P(), P(None, "a"))],
)
def test_as_on_tpus(kind, spec):
    """Normalized before stacking, interleaved in chunks: here on CPU, in float32."""
    mesh = mesh_of({"a": 2, "b": 4}, kind)
    shapes = {"wide": (20, 8, 16), "tall": (4, 16, 8), "square": (4, 8, 8)}
    values = jax.tree.map(lambda x: 1e15 * x, tree(0, shapes=shapes))
    limits = Limits(stack_bytes=2**12, chunk_bytes=2**10, interleave=2)
    optimizer = orthogonalize_as(TPU, Dims(1, 2), limits)
    with jax.set_mesh(mesh):
        on_it = placed(values, mesh, spec)
        assert_polar(jax.jit(lambda g: optimizer.update(g, ())[0])(on_it), values)


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (2, 1, 3)])
def test_join_in_place_concatenates(lengths):
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(size=(length, 3, 5)), HALF) for length in lengths]
    np.testing.assert_array_equal(TPU.join(parts), jnp.concatenate(parts))
