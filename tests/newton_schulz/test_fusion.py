"""What GPUs do together for many arrays: values, and the operations of the program."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import muon, orscale
from orscale_jax.newton_schulz import fusion
from orscale_jax.newton_schulz.fusion import fuse_small_on_gpu
from tests import leaves
from tests.compiled import WITH_FUSION_EMITTERS
from tests.runs import EXPLICIT, assert_close, mesh_of, run, tree


@pytest.fixture
def as_on_gpus(monkeypatch):
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    monkeypatch.setattr(fusion, "_IN_ONE_KERNEL", 12)


# Stacks of small arrays.


def program(fn, *args, platform="cuda"):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.compiled
def test_a_stack_holds_no_more_than_a_kernel_concatenates():
    text = program(fuse_small_on_gpu, [jnp.ones(())] * 300)
    sizes = re.findall(r"stablehlo\.optimization_barrier .* tensor<(\d+)xf32>", text)
    assert sizes == ["127", "127", "49"]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("arrays", "platform"),
    [
        ([jnp.ones((256, 256))] * 3, "cuda"),
        ([jnp.ones((2, 2)), jnp.ones((3, 2))], "cuda"),
        ([jnp.ones((2, 2))] * 3, "cpu"),
        ([jnp.ones((2, 2))] * 3, "tpu"),
    ],
    ids=["large", "of different shapes", "on a CPU", "on a TPU"],
)
def test_what_is_left_alone(arrays, platform):
    text = program(fuse_small_on_gpu, arrays, platform=platform)
    assert "concatenate" not in text and "optimization_barrier" not in text


@pytest.mark.compiled
def test_what_is_on_a_mesh_is_left_alone():
    with jax.set_mesh(mesh_of({"data": 1}, EXPLICIT)):
        text = program(fuse_small_on_gpu, [jnp.ones((2, 2))] * 3)
    assert "concatenate" not in text


def trees():
    shapes = {f"w{i}": (4, 6) for i in range(3)} | {f"b{i}": (5,) for i in range(3)}
    shapes["large"] = (130, 140)
    return [tree(seed, shapes=shapes) for seed in (0, 1)]


@pytest.mark.compiled
def test_a_large_matrix_has_no_stack_and_small_ones_do():
    params, grads = trees()
    optimizer = orscale(0.01)
    text = program(optimizer.update, grads, optimizer.init(params), params)
    stacked = re.findall(r"stablehlo\.concatenate .*-> tensor<(\w+)>", text)
    assert not any("130x140" in shape for shape in stacked)
    # Gradients of the matrices and of the biases, and M̃ for Newton–Schulz.
    assert stacked.count("4x4x6xf32") == 1
    assert stacked.count("3x4x6xbf16") == 1
    assert stacked.count("4x5xf32") == 1


@pytest.mark.extended
@pytest.mark.parametrize("calibrate", [True, False])
def test_updates_can_be_mapped_and_differentiated(calibrate, as_on_gpus):
    params, grads = trees()

    def step(rate):
        optimizer = orscale(rate, calibrate=calibrate)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.tree.norm(updates)

    rates = jnp.array([0.01, 0.02])
    mapped = jax.vmap(step)(rates)
    np.testing.assert_allclose(mapped, [step(rate) for rate in rates], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(step)(0.01), mapped[0] / 0.01, rtol=1e-5)


# Sums that are finished together.


SHAPES = {(8, 12): (0, 1), (4, 12): (0, 1), (3, 4, 12): (1, 2), (5,): (0,)}


def arrays_of(dtype):
    random = np.random.default_rng(0)
    # Integers: their sums are exact in any order.
    shapes = [shape for shape in SHAPES for _ in range(3)]
    return [jnp.asarray(random.integers(-9, 9, shape), dtype) for shape in shapes]


@pytest.mark.extended
def test_arrays_of_several_shapes_and_dtypes(as_on_gpus):
    arrays = [*arrays_of(jnp.float32), *arrays_of(jnp.int32)]
    axes = [SHAPES[x.shape] for x in arrays]
    found = fusion.sum_all([[x, 2 * x] for x in arrays], axes)
    for x, along, (value, twice) in zip(arrays, axes, found, strict=True):
        expected = np.sum(np.asarray(x), axis=along)
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(twice, 2 * expected)
        assert value.dtype == x.dtype


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("platform", "count", "pairs"), [("cuda", 9 + 4, 9 + 4), ("cpu", 12, 24)]
)
def test_a_gpu_finishes_arrays_of_one_shape_together(platform, count, pairs, monkeypatch):
    monkeypatch.setattr(fusion, "_IN_ONE_KERNEL", 12)
    arrays = arrays_of(jnp.float32)
    axes = [SHAPES[x.shape] for x in arrays]
    together = functools.partial(fusion.sum_all, axes=axes)
    text = program(together, [[x] for x in arrays], platform=platform)
    assert len(re.findall(r"stablehlo\.reduce\(", text)) == count


@pytest.mark.compiled
@pytest.mark.parametrize(("platform", "count"), [("cuda", 2), ("cpu", 4)])
def test_a_gpu_reads_pairs_of_small_matrices_once(platform, count, monkeypatch):
    monkeypatch.setattr(fusion, "_IN_ONE_KERNEL", 12)
    pair = [jnp.ones((8, 3, 4)), jnp.zeros((8, 3, 4))]
    together = functools.partial(fusion.sum_all, axes=[(1, 2)] * 2)
    text = program(together, [pair, pair], platform=platform)
    assert len(re.findall(r"stablehlo\.reduce\(", text)) == count


@pytest.mark.extended
def test_a_step_is_the_same(monkeypatch):
    """On two of every kind of leaf, one of which has no first update."""
    names = {f"{name}{i}": name for name in leaves.KINDS for i in range(2)}
    shapes, numbers = (
        {key: of[name] for key, name in names.items()}
        for of in (leaves.SHAPES, leaves.DIMENSIONS)
    )
    grads = tree(1, shapes=shapes)
    optimizer = orscale(0.01, weight_dimension_numbers=numbers)

    def gradients(step):
        scaled = jax.tree.map(lambda g: g * 0.5**step, grads)
        return scaled | {"tall0": (step > 1) * scaled["tall0"]}

    def end():
        return run(optimizer, tree(0, shapes=shapes), 3, gradients)[-1]

    expected = end()
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    monkeypatch.setattr(fusion, "_IN_ONE_KERNEL", 12)
    assert_close(end(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.compiled
def test_a_gpu_reduces_few_times_for_many_leaves(monkeypatch):
    """Two a leaf: the entries of M̃, and the norms of D and W at once; two a stack."""
    monkeypatch.setattr(fusion, "_IN_ONE_KERNEL", 12)
    params = {f"w{i}": jnp.ones((8, 12)) for i in range(20)}
    optimizer = orscale(0.01)
    text = program(optimizer.update, params, optimizer.init(params), params)
    assert not re.search(r"stablehlo\.reduce\(.*-> tensor<f32>", text)
    vectors = re.findall(r"stablehlo\.reduce\(.*-> tensor<(\d+)xf32>", text)
    assert sorted(vectors) == sorted(["8"] * 20 + ["20", "40"])
    assert text.count("-> (tensor<8xf32>, tensor<8xf32>)") == 20


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize(
    "platform, read", [("cuda", ["3x7", "5x7"]), ("tpu", ["42"]), ("cpu", [])]
)
def test_accelerators_read_the_numbers_of_all_matrices_together(platform, read, on_mesh):
    """Those of matrices with batch axes may be sharded."""
    params = {f"w{i}": jnp.ones((8, 12) if i < 4 else (12, 8)) for i in range(6)}
    params["x"] = jnp.ones((3, 2, 2))
    optimizer = orscale(
        0.01, weight_dimension_numbers=jax.tree.map(lambda x: Dims(-2, -1), params)
    )
    mesh = mesh_of({"data": 1}, EXPLICIT)
    with jax.set_mesh(mesh) if on_mesh else contextlib.nullcontext():
        state = optimizer.init(params)
        text = program(optimizer.update, params, state, params, platform=platform)
    found = re.findall(r"concatenate .*-> tensor<(\d+x7|42)xf32>", text)
    assert sorted(found) == read


@pytest.mark.compiled
@pytest.mark.quick_first_case
@pytest.mark.parametrize(("build", "most"), [(muon, 5), (orscale, 9)])
def test_kernels_of_a_matrix_on_a_cpu(build, most):
    """XLA compiles each by itself, which takes longer than anything else."""

    def kernels(count):
        params = {f"w{i}": jnp.ones((8, 8)) for i in range(count)}
        state = jax.eval_shape(build(1e-3).init, params)
        traced = jax.jit(build(1e-3).update).trace(params, state, params)
        program = traced.lower().compile(compiler_options=WITH_FUSION_EMITTERS)
        return program.as_text().partition("ENTRY")[2].count(" fusion(")

    assert (kernels(7) - kernels(3)) / 4 <= most


@pytest.mark.compiled
@pytest.mark.quick_first_case
@pytest.mark.parametrize("build", [orscale, muon])
def test_a_cpu_compiles_as_many_kinds_of_kernels_for_more_matrices(build):
    """XLA compiles equal kernels once, and others for several milliseconds each."""

    def kinds(count):
        shapes = {"wide": (8, 12), "tall": (12, 8), "square": (8, 8)}
        params = {f"{n}{i}": jnp.ones(shapes[n]) for n in shapes for i in range(count)}
        state = jax.eval_shape(build(1e-3).init, params)
        lowered = jax.jit(build(1e-3).update).lower(params, state, params)
        text = lowered.compile(compiler_options=WITH_FUSION_EMITTERS).as_text()
        kernels = re.findall(r"^%fused_computation.*?\{\n(.*?)^\}", text, re.M | re.S)
        return {unnamed(kernel) for kernel in kernels}

    def unnamed(kernel):
        names = {}
        kernel = re.sub(r", metadata=\{.*?\}", "", kernel)
        return re.sub(
            r"%[\w.-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), kernel
        )

    few, many = kinds(3), kinds(7)
    assert 10 < len(many) <= len(few) + 2
