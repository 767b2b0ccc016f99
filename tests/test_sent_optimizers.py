"""Optimizers in other processes, copied, and hashed with all that they close over."""

import copy
import re
import subprocess
import sys

import cloudpickle
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import by_path, orscale, orthogonalize, scale_by_path
from tests.everything import EXTRA, PUBLIC, STAGES, WRAPPERS
from tests.runs import NUMBERS, assert_same_bits, mesh_of, placed, tree

SCHEDULE = optax.linear_schedule(0.1, 0.0, 4)


def arrays():
    return {
        "momentum": jnp.array(0.9),
        "weight_decay": np.float32(0.2),
        "ns_steps": jnp.array(4),
        "ns_coeffs": jnp.array([[3.4, -4.7, 2.0]]),
    }


def trees():
    mesh = mesh_of({"x": 2})
    specs = {"w": NamedSharding(mesh, P("x")), "stack": P(), "b": P()}
    mask = {"w": True, "stack": False, "b": False}
    return {
        "mesh": mesh,
        "slow_axes": {"x": 2},
        "param_shardings": specs,
        "weight_decay_mask": mask,
        "ns_coeffs": [[3.4, -4.7, 2.0]],
    }


def functions():
    return {
        "weight_decay": SCHEDULE,
        "adam_learning_rate": SCHEDULE,
        "weight_decay_mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        "weight_dimension_numbers": lambda params: NUMBERS,
        "param_shardings": lambda params: jax.tree.map(lambda x: P(), params),
    }


def expressions():
    rules = {re.compile("stack"): NUMBERS["stack"], "b": "adamw"}
    return {"weight_dimension_numbers": by_path(rules), "mu_dtype": "int8"}


KINDS = (arrays, trees, functions, expressions)
MATRICES = {name: NUMBERS[name] for name in ("w", "stack")}


def assert_survives(optimizer, names=NUMBERS, mesh=None, **extra):
    """The same update, to the bit, of what is loaded, and of what is copied.

    A mesh is sent without devices: it serves programs that are compiled.
    """
    trees = [{name: tree(seed)[name] for name in names} for seed in (0, 1)]
    if mesh:
        trees = [placed(values, mesh, P()) for values in trees]

    def update(optimizer, params, grads):
        return optimizer.update(grads, optimizer.init(params), params, **extra)

    run = eqx.filter_jit(update) if mesh else update
    expected = run(optimizer, *trees)
    loaded = cloudpickle.loads(cloudpickle.dumps(optimizer))
    assert_same_bits(run(loaded, *trees), expected)
    # What Optimistix makes of an optimizer: closures are nodes, all else is hashed.
    nodes = eqxi.closure_to_pytree(optimizer)
    static = eqx.partition(nodes, eqx.is_array)[1]
    assert len({*jax.tree.leaves(static)}) > 1
    assert_same_bits(run(copy.deepcopy(nodes), *trees), expected)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PUBLIC)
def test_every_optimizer(name, kind):
    arguments = {"weight_dimension_numbers": NUMBERS} | kind()
    optimizer = PUBLIC[name](SCHEDULE, **arguments)
    assert_survives(optimizer, mesh=arguments.get("mesh"))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_with_arrays_for_numbers(name):
    stage = STAGES[name](jnp.array, weight_dimension_numbers=MATRICES)
    assert_survives(stage, MATRICES, **EXTRA.get(name, {}))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper(name):
    assert_survives(WRAPPERS[name](orscale(SCHEDULE, **functions()), jnp.array))


@pytest.mark.extended
def test_an_injected_optimizer_rules_of_paths_and_a_stage_on_a_mesh():
    injected = optax.inject_hyperparams(orscale)(SCHEDULE, r_min=0.3)
    assert_survives(injected, ("w", "b"))
    assert_survives(scale_by_path({re.compile("w"): 2.0, "stack": jnp.ones(3)}))
    mesh = mesh_of({"x": 2})
    stage = orthogonalize(
        mesh=mesh, param_shardings=P(), weight_dimension_numbers=MATRICES
    )
    assert_survives(stage, MATRICES, mesh)


@pytest.mark.extended
def test_in_another_process(tmp_path):
    optimizer = orscale(SCHEDULE, **arrays() | expressions())
    params = tree(0)
    expected, _ = optimizer.update(params, optimizer.init(params), params)
    given = optimizer, params, jax.device_get(expected)
    (tmp_path / "sent").write_bytes(cloudpickle.dumps(given))
    program = f"""
import cloudpickle, jax, numpy as np
optimizer, params, expected = cloudpickle.load(open({str(tmp_path / "sent")!r}, "rb"))
found, _ = optimizer.update(params, optimizer.init(params), params)
jax.tree.map(np.testing.assert_array_equal, found, expected)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_an_optimizer_among_the_arguments_of_a_compiled_function():
    @eqx.filter_jit
    def update(optimizer, params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    arguments = {"weight_dimension_numbers": NUMBERS} | arrays()
    optimizer = orscale(SCHEDULE, **arguments)
    expected = update(optimizer, tree(0))
    assert_same_bits(update(eqxi.closure_to_pytree(optimizer), tree(0)), expected)
