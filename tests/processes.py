"""A run on a mesh of several processes, and on smaller ones; by tests/test_processes.py.

``python -m tests.processes <folder> <port> <index> <kind of axes>`` is one process.
"""

import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from orscale_jax import describe, orscale, state_shardings
from tests.runs import mesh_of, numbers_of, readout

PROCESSES, DEVICES = 2, 4  # Devices of each process.
TIMEOUT = 240  # Seconds, on a busy machine.
SAVED, COMPARED, END = 2, 3, 4  # Steps after which something happens.

SHAPES = {
    "query": (16, 24), "key": (16, 24), "late": (16, 24), "up": (32, 16),
    "down": (16, 32), "experts": (8, 8, 12), "bias": (24,),
}  # fmt: skip
NUMBERS = numbers_of(SHAPES)
OPTIMIZER = orscale(1e-2, weight_dimension_numbers=NUMBERS)
# Two processes of one machine do not say that the links between them are slow.
HYBRID_OPTIMIZER = orscale(1e-2, weight_dimension_numbers=NUMBERS, slow_axes=("dcn",))

# The axes of a mesh with their lengths, and the specs of the parameters.
FSDP = dict.fromkeys(SHAPES, P("data")) | {"down": P(None, "data")}
OTHER_AXES = FSDP | {"query": P(None, "data"), "experts": P(None, "data")}
TENSORS = dict.fromkeys(SHAPES, P("data", "model")) | {
    "up": P(None, ("model", "data")),
    "experts": P("model", None, "data"),
    "bias": P("model"),
}
# Of processes, and of the devices of each.
HYBRID = {"dcn": PROCESSES, "fsdp": DEVICES}
WITHIN = dict.fromkeys(SHAPES, P("fsdp")) | {"experts": P("dcn", "fsdp")}
ACROSS = dict.fromkeys(SHAPES, P(("dcn", "fsdp")))
LAYOUTS = {
    "within": (HYBRID, WITHIN),
    "across": (HYBRID, ACROSS),
    "8": ({"data": 8}, FSDP),
    "4": ({"data": 4}, OTHER_AXES),
    "2x2": ({"data": 2, "model": 2}, TENSORS),
    "1": ({"data": 1}, FSDP),
}


def random(seed, name):
    rng = np.random.default_rng([seed, *name.encode()])
    return rng.normal(size=SHAPES[name]).astype(np.float32)


def placed(layout, kind=AxisType.Auto):
    """The shardings of the parameters, on the first devices that there are."""
    axes, specs = LAYOUTS[layout]
    mesh = mesh_of(axes, kind)
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def made(seed, shardings):
    """Random parameters, of which every process makes the shards of its own devices."""
    return {
        name: jax.make_array_from_callback(
            SHAPES[name], sharding, random(seed, name).__getitem__
        )
        for name, sharding in shardings.items()
    }


def initializer(params):
    """Makes the state, sharded as parameters, which may be abstract."""
    return jax.jit(OPTIMIZER.init, out_shardings=state_shardings(OPTIMIZER, params))


def abstract_run(shardings):
    """The abstract parameters and state, with their shardings."""
    params = {
        name: jax.ShapeDtypeStruct(SHAPES[name], jnp.float32, sharding=sharding)
        for name, sharding in shardings.items()
    }
    return params, initializer(params).eval_shape(params)


def sharding_of(leaf):
    return leaf.sharding


def start(shardings):
    params = made(0, shardings)
    return params, initializer(params)(params)


def compiled(shardings):
    """The program of a step, which donates the run."""
    abstract = abstract_run(shardings)
    hybrid = "dcn" in shardings["bias"].mesh.axis_names
    optimizer = HYBRID_OPTIMIZER if hybrid else OPTIMIZER
    state_shardings(optimizer, abstract[0])  # It sees how these are sharded.

    def step(run, targets, index):
        params, state = run
        grads = jax.tree.map(jnp.subtract, params, targets)
        # No direction before the checkpoint, so that it holds no calibration of this one.
        grads["late"] *= index > SAVED
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    where = jax.tree.map(sharding_of, abstract)
    step = jax.jit(step, donate_argnums=0, out_shardings=where)
    return step.lower(abstract, abstract[0], np.int32(0)).compile()


def advance(program, run, steps):
    for index in steps:
        targets = made(index, jax.tree.map(sharding_of, run[0]))
        run = program(run, targets, np.int32(index))
    return run


def save(path, run):
    """Save by all processes, before the next step takes the run's buffers."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)
        checkpointer.wait_until_finished()


def restore(path, shardings):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, abstract_run(shardings))


def measured(run):
    """The compared arrays: the weights, and the state's entries for each matrix."""
    params, state = run
    names = ("calibration", "raw_trust_ratio", "trust_ratio")
    tree = {"weights": params} | {name: readout(state, name) for name in names}
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def write(folder, name, run):
    """Gather on all processes; the first one writes the file."""
    whole = multihost_utils.process_allgather(measured(run), tiled=True)
    if jax.process_index() == 0:
        np.savez(folder / f"{name}.npz", **whole)


def run_layout(folder, layout, kind):
    """A run on axes of which one leads from one process to the other."""
    shardings = placed(layout, kind)
    with jax.set_mesh(shardings["query"].mesh):
        program = compiled(shardings)
    run = advance(program, start(shardings), range(1, COMPARED + 1))
    write(folder, layout, run)
    (folder / f"{layout}.{jax.process_index()}").write_text(program.as_text())


def audited(folder, index):
    """A step of an optimizer that the first process alone has audited."""
    params = made(0, placed("8"))
    optimizer = orscale(1e-2, weight_dimension_numbers=NUMBERS)
    if index == 0:
        describe(params, optimizer)
    state = jax.jit(optimizer.init)(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That the shardings are not known.
        step = jax.jit(optimizer.update).lower(params, state, params)
    (folder / f"audited.{index}").write_text(step.as_text())


def main(folder, port, index, kind):
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A program from the cache has another text than a compiled one.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", PROCESSES, int(index), initialization_timeout=TIMEOUT
    )
    folder = pathlib.Path(folder)
    shardings = placed("8", AxisType[kind])
    program = compiled(shardings)
    (folder / f"program.{index}").write_text(program.as_text())
    run = advance(program, start(shardings), range(1, SAVED + 1))
    if jax.process_index() == 0:  # A collective would wait for the other processes.
        assert {row.norms for row in describe(run[0], OPTIMIZER).rows} == {None}
    save(folder / "checkpoint", run)
    write(folder, SAVED, run)
    write(folder, COMPARED, advance(program, run, range(SAVED + 1, COMPARED + 1)))
    audited(folder, int(index))
    run_layout(folder, "within", AxisType[kind])
    run_layout(folder, "across", AxisType[kind])
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
