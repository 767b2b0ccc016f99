"""Every platform's way on CPU: stacks, chunks, and the layouts that TPUs store."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import describe, orthogonalize, polar_factor
from orscale_jax.newton_schulz import stacks
from orscale_jax.newton_schulz.platforms import (
    CPU,
    GPU,
    PLATFORMS,
    TPU,
    Limits,
    parameter_layout,
)
from orscale_jax.newton_schulz.stacks import StackKey, plan_stacks, polar_in_chunks
from tests import leaves, oracle
from tests.platforms import orthogonalize_as
from tests.runs import AUTO, EXPLICIT, mesh_of, placed, tree, types_of

FLOAT, HALF = np.dtype("float32"), np.dtype(jnp.bfloat16)


def key(*shape, dtype=FLOAT, sharding=()):
    return StackKey(shape, dtype, sharding)


@pytest.mark.parametrize(
    "keys, limits, stacks",
    [
        ([], [100], ()),
        ([key(2, 4), key(3, 4), key(2, 4)], [1000], ((0, 2), (1,))),
        # Arrays of other dtypes, shardings or batch axes stay apart, though sizes agree.
        ([key(2, 4), key(2, 4, dtype=HALF)], [1000], ((0,), (1,))),
        ([key(3, 2, 4), key(3, 2, 4, sharding=("a",))], [1000], ((0,), (1,))),
        ([key(3, 2, 4), key(2, 4), key(1, 2, 4)], [1000], ((0,), (1,), (2,))),
        # 32 bytes each: at most three in a stack, divided as evenly as possible.
        ([key(2, 4)] * 4, [96], ((0, 1), (2, 3))),
        ([key(2, 4)] * 4, [95], ((0, 1), (2, 3))),
        ([key(2, 4)] * 7, [100], ((0, 1, 2), (3, 4), (5, 6))),
        ([key(2, 4)] * 2, [31], ((0,), (1,))),
        ([key(0, 4)] * 2, [2], ((0, 1),)),
        # And a limit on the length.
        ([key(2, 4)] * 7, [1000, 3], ((0, 1, 2), (3, 4), (5, 6))),
        ([key(2, 4)] * 7, [64, 3], ((0, 1), (2, 3), (4, 5), (6,))),
        # Padded to one length up to 16 entries of Gram matrices, but squares stay apart.
        ([key(2, 4), key(2, 9), key(2, 2)], [1000, None, 1, 16], ((0, 1), (2,))),
        ([key(2, 4), key(2, 9), key(2, 5)], [40, None, 1, 16], ((0,), (1,), (2,))),
        ([key(2, 4), key(3, 9), key(2, 9)], [1000, None, 1, 8], ((0, 2), (1,))),
        ([key(2, 4), key(2, 9)], [1000, None, 1, 7], ((0,), (1,))),
    ],
)
def test_the_plan_of_stacks(keys, limits, stacks):
    stack_bytes, *others = limits
    assert plan_stacks(keys, Limits(stack_bytes, 0, *others)) == stacks
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
    monkeypatch.setattr(stacks, "newton_schulz", add_one)
    limits = Limits(stack_bytes=0, chunk_bytes=max_bytes, interleave=interleave)
    platform = dataclasses.replace(TPU, limits=limits)
    results = polar_in_chunks(platform, xs, [None] * len(xs))
    for x, result in zip(xs, results, strict=True):
        np.testing.assert_array_equal(result, x + 1)


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (2, 1, 3)])
def test_join_in_place_concatenates(lengths):
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(size=(length, 3, 5)), HALF) for length in lengths]
    np.testing.assert_array_equal(TPU.concatenate(parts), jnp.concatenate(parts))


# Of another scale than 1: TPUs normalize before they stack.
SHAPES = {
    "wide": (20, 8, 16),
    "tall": (4, 16, 8),
    "also": (8, 8, 16),
    "square": (4, 8, 8),
}
SMALL = {TPU: Limits(stack_bytes=2**12, chunk_bytes=2**10, interleave=2)}


def matrices():
    return jax.tree.map(lambda x: 1e15 * x, tree(0, shapes=SHAPES))


@pytest.mark.compiled
@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [None, AUTO, EXPLICIT])
def test_one_row_of_the_table_decides_the_dtype_of_a_platform(kind, monkeypatch):
    """Of the factor of an array, of the stage, and of the plan that describe shows."""
    x = {f"w{i}": jnp.ones((8, 16)) for i in range(8)}
    if kind is not None:
        x = placed(x, mesh_of({"a": 8}, kind), P("a"))

    def program(fn):
        return jax.jit(fn).trace(x).lower(lowering_platforms=("tpu",)).as_text()

    def programs(steps):  # JAX keeps what it has traced for equal settings.
        stage, polar = orthogonalize(), functools.partial(polar_factor, steps=steps)
        stage.init(x)
        return [
            program(lambda x: stage.update(x, ())[0]),
            program(lambda x: jax.tree.map(polar, x)),
        ]

    def planned():
        if kind is None:
            return 0  # Nothing is sent.
        tpu = AbstractDevice("tpu", None, "tpu")
        mesh = AbstractMesh((8,), ("a",), (kind,), abstract_device=tpu)
        where = NamedSharding(mesh, P("a"))
        abstract = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=where)
        return describe(dict.fromkeys(x, abstract)).plan.fast_bytes

    sent = []
    for steps, dtype in [(2, jnp.bfloat16), (3, np.float32)]:
        row = dataclasses.replace(TPU, dtype=np.dtype(dtype))
        monkeypatch.setitem(PLATFORMS, "tpu", row)
        assert all(("xbf16>" in text) == (steps == 2) for text in programs(steps))
        sent.append(planned())
    assert sent[1] == 2 * sent[0]
    assert (sent[0] > 0) == (kind is not None)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("platform", [CPU, GPU, TPU])
def test_one_device(platform):
    optimizer = orthogonalize_as(platform, Dims(-2, -1), SMALL.get(platform))
    assert_polar(optimizer.update(matrices(), ())[0], matrices())


@pytest.mark.parametrize("platform", [CPU, GPU])
def test_matrices_of_one_shorter_side_and_several_lengths(platform):
    """A GPU pads the first three, and the last two, to the longest of them."""
    sizes = {"a": (8, 16), "b": (24, 8), "c": (8, 40), "d": (9, 8), "e": (8, 8)}
    grads = tree(0, shapes=sizes)
    optimizer = orthogonalize_as(platform, Dims(-2, -1))
    assert_polar(optimizer.update(grads, ())[0], grads)


slow = pytest.mark.slow


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    "platform, spec",
    [(GPU, P("b")), (TPU, P("a")), (TPU, P("b", "a"))]
    + [pytest.param(TPU, spec, marks=slow) for spec in (P(), P(None, "a"))],
)
def test_a_mesh(kind, platform, spec):
    """Leaves whose sharding types differ stay apart."""
    optimizer = orthogonalize_as(platform, Dims(1, 2), SMALL.get(platform))
    specs = dict.fromkeys(SHAPES, spec) | {"also": P("a", "b")}
    with jax.set_mesh(mesh := mesh_of({"a": 2, "b": 4}, kind)):
        sharded = placed(matrices(), mesh, specs)
        optimizer.init(sharded)
        found = jax.jit(lambda g: optimizer.update(g, ())[0])(sharded)
    assert_polar(found, matrices())
    assert types_of(found) == types_of(sharded)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "shape, minor_to_major",
    [
        ((256, 704), [0, 1]),  # 704 columns would be padded to 768.
        ((704, 256), [1, 0]),
        ((256, 256), [1, 0]),
        ((3, 256, 704), [1, 2, 0]),
        ((8, 100), [1, 0]),  # Twice 128 columns, but sixteen times 8 rows.
        ((100, 8), [0, 1]),
    ],
)
def test_the_order_that_takes_less_padding(shape, minor_to_major):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    text = jax.jit(parameter_layout).lower(x).as_text()
    [found] = re.findall(r"result_layouts = \[dense<(\[.*?\])>", text)
    assert found == str(minor_to_major)


@pytest.mark.extended
def test_values_and_derivatives_of_a_layout():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 24)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(parameter_layout)(x), x)
    np.testing.assert_array_equal(jax.vmap(parameter_layout)(x), x)
    np.testing.assert_array_equal(parameter_layout(x[0, 0]), x[0, 0])
    gradient = jax.grad(lambda x: jnp.sum(parameter_layout(x) ** 2))(x)
    np.testing.assert_array_equal(gradient, 2 * x)
