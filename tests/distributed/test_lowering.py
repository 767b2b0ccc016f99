"""Steps that are exported, and steps of programs with several meshes."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import InconclusiveDimensionOperation
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import orscale, orthogonalize, polar_factor
from tests.everything import PUBLIC
from tests.runs import (
    AUTO,
    EXPLICIT,
    assert_close,
    mesh_of,
    placed,
    step_of,
    tree,
)

PLATFORMS = ("cpu", "tpu", "cuda", "rocm")
SHAPES = {"up": (8, 16), "down": (16, 8), "layers": (2, 8, 16), "bias": (8,)}
NUMBERS = {"up": Dims(0, 1), "down": Dims(0, 1), "layers": Dims(1, 2), "bias": None}
MESH = {"fsdp": 4, "tensor": 2}
SPECS = {"up": P("fsdp"), "down": P(None, "fsdp"), "layers": P(), "bias": P()}


random_tree = functools.partial(tree, shapes=SHAPES)


def step_and_leaves(optimizer, mesh=None):
    """A training step of leaves: most types of states cannot be serialized."""
    params, grads = (random_tree(seed) for seed in (0, 1))
    if mesh is not None:
        params, grads = (placed(values, mesh, SPECS) for values in (params, grads))
    leaves, structure = jax.tree.flatten((params, optimizer.init(params), grads))

    @jax.jit
    def step(*leaves):
        return jax.tree.leaves(step_of(optimizer)(*jax.tree.unflatten(structure, leaves)))

    return step, leaves


@functools.cache
def expected():
    step, leaves = step_and_leaves(orscale(0.02, weight_dimension_numbers=NUMBERS))
    return step(*leaves)


extended = pytest.mark.extended
EVERYWHERE = ["one device"] + [
    pytest.param(where, marks=extended)
    for where in ("Auto", "param_shardings", "Explicit")
]


@pytest.mark.parametrize(
    "platforms", [PLATFORMS, pytest.param(("cuda",), marks=extended)], ids="+".join
)
@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_step_is_exported_saved_loaded_and_run(where, platforms, tmp_path):
    kind = EXPLICIT if where == "Explicit" else AUTO
    mesh = None if where == "one device" else mesh_of(MESH, kind)
    shardings = SPECS if where == "param_shardings" else None
    optimizer = orscale(0.02, weight_dimension_numbers=NUMBERS, param_shardings=shardings)
    step, leaves = step_and_leaves(optimizer, mesh)
    exported = jax.export.export(step, platforms=platforms)(*leaves)
    path = tmp_path / "step"
    path.write_bytes(exported.serialize())
    loaded = jax.export.deserialize(bytearray(path.read_bytes()))
    assert loaded.platforms == platforms
    if "cpu" in platforms:
        assert_close(jax.jit(loaded.call)(*leaves), expected())


OTHERS = PUBLIC | {
    "traced steps": functools.partial(
        optax.inject_hyperparams(orscale), param_shardings=SPECS
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_exported(name):
    optimizer = OTHERS[name](0.02, weight_dimension_numbers=NUMBERS)
    step, leaves = step_and_leaves(optimizer, mesh_of(MESH))
    exported = jax.export.export(step, platforms=PLATFORMS)(*leaves)
    assert exported.platforms == PLATFORMS


@pytest.mark.compiled
def test_exported_programs_of_gpus_lack_the_constraints_of_layouts_alone():
    """A program that is compiled here keeps them; so do its values and derivatives."""
    x = random_tree(0)["down"]
    update = jax.jit(lambda x: orthogonalize().update(x, ())[0])
    compiled = update.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    exported = jax.export.export(update, platforms=["cuda"])(x).mlir_module()
    assert compiled.count("@LayoutConstraint") == 4
    assert "custom_call" not in exported


@pytest.mark.extended
@pytest.mark.compiled
def test_an_exported_step_on_auto_axes_iterates_without_communication():
    mesh = mesh_of(MESH)
    sharding = NamedSharding(mesh, P("fsdp", "tensor"))
    grads = {f"w{i}": random_tree(i)["up"] for i in range(8)}
    stage = orthogonalize(param_shardings=sharding)
    update = jax.jit(lambda grads: stage.update(grads, ())[0])
    exported = jax.export.export(update)(jax.device_put(grads, sharding))
    call = jax.jit(exported.call, in_shardings=sharding, out_shardings=sharding)
    program = call.lower(grads).compile()
    assert_close(program(jax.device_put(grads, sharding)), update(grads))
    cost = hlo_cost.of(program.as_text())
    assert cost.looped_bytes == 0
    alone = hlo_cost.of(update.lower(grads).compile().as_text())
    assert cost.flops <= 1.15 * alone.flops / 8


@pytest.mark.extended
def test_symbolic_shapes():
    """Batches may have them, but not parameters, whose shapes decide the program."""
    [size] = jax.export.symbolic_shape("size")
    optimizer = orthogonalize()
    params = {"w": random_tree(0)["up"]}

    @jax.jit
    def update(x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
        return optimizer.update(grads, ())[0]

    abstract = jax.ShapeDtypeStruct((size, 8), jnp.float32)
    exported = jax.export.export(update, platforms=PLATFORMS)(abstract)
    x = random_tree(0)["down"]
    assert_close(exported.call(x), update(x))
    with pytest.raises(InconclusiveDimensionOperation, match="inconclusive"):
        jax.export.export(jax.jit(polar_factor))(abstract)


@pytest.mark.compiled
def test_a_mesh_without_devices():
    """AbstractMesh: programs for more devices than there are, exported or lowered."""
    mesh = AbstractMesh((64,), ("fsdp",), (AUTO,))
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=sharding)
    stage = orthogonalize(param_shardings=P("fsdp"))
    update = jax.jit(lambda x: stage.update(x, ())[0])
    exported = jax.export.export(update, platforms=PLATFORMS)(x)
    assert exported.nr_devices == 64
    lowered = update.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "sdy.manual_computation" in lowered


DEVICES = np.array(jax.devices())
MESHES = {
    "data": Mesh(DEVICES, ("data",)),
    "others": Mesh(DEVICES, ("devices",)),
    "2 by 4": Mesh(DEVICES.reshape(2, 4), ("rows", "columns")),
    "4 by 2": Mesh(DEVICES.reshape(4, 2), ("columns", "rows")),
}


def train_step(optimizer, params, state, x):
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"]) @ p["down"]))(params)
    return step_of(optimizer)(params, state, grads)


@pytest.mark.extended
@pytest.mark.parametrize(
    "of_params, of_batch, context",
    [
        ("data", "others", "data"),
        ("2 by 4", "4 by 2", None),
        ("2 by 4", "data", None),
        ("data and others", "data", None),
    ],
)
def test_several_meshes_over_the_same_devices(of_params, of_batch, context):
    """big_vision has two."""
    first, last = (MESHES[key] for key in (of_params.split(" and ") * 2)[:2])
    params = {k: random_tree(0)[k] for k in ("up", "down")}
    x = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    optimizer = orscale(0.02, param_shardings=P())
    step = jax.jit(functools.partial(train_step, optimizer))
    wanted = step(params, optimizer.init(params), x)
    up = jax.device_put(params["up"], NamedSharding(first, P(None, first.axis_names)))
    down = jax.device_put(params["down"], NamedSharding(last, P(last.axis_names[-1])))
    params = {"up": up, "down": down}
    x = jax.device_put(x, NamedSharding(MESHES[of_batch], P(MESHES[of_batch].axis_names)))
    with jax.set_mesh(MESHES[context]) if context else jax.transfer_guard("allow"):
        state = jax.jit(optimizer.init)(params)
        found = step(params, state, x)
    assert_close(found, wanted)
