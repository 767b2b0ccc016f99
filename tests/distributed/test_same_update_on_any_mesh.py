"""The update does not depend on the mesh: layouts that `test_mesh.py` does not have."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from orscale_jax import describe, muon, orscale, orthogonalize, state_shardings
from tests import runs
from tests.runs import AUTO, EXPLICIT, assert_close, mesh_of, numbers_of, placed

# Single matrices, more and fewer than devices; layers; experts of layers; AdamW.
SHAPES = {
    **{f"up{i}": (8, 16) for i in range(5)},
    **{f"down{i}": (16, 8) for i in range(5)},
    "square": (16, 16),
    "layers": (4, 8, 16),
    "experts": (2, 4, 8, 16),
    "bias": (16,),
}
NUMBERS = numbers_of(SHAPES)
OPTIMIZERS = {
    "orscale": orscale(0.02, weight_dimension_numbers=NUMBERS),
    "muon": muon(0.02, weight_dimension_numbers=NUMBERS),
}


def specs(matrix, layer=None, expert=None):
    """The sharding of each leaf: of rows and columns, of layers, of experts."""
    by_rank = {1: P(), 2: P(*matrix), 3: P(layer, *matrix), 4: P(layer, expert, *matrix)}
    return {name: by_rank[len(shape)] for name, shape in SHAPES.items()}


LAYOUTS = {
    "slices of FSDP": ({"dcn": 2, "fsdp": 4}, specs(("fsdp", None))),
    "FSDP over slices": ({"dcn": 2, "fsdp": 4}, specs((("dcn", "fsdp"), None))),
    "pipeline of FSDP": ({"stage": 2, "fsdp": 4}, specs(("fsdp", None), layer="stage")),
    "pipeline, FSDP and tensor": (
        {"stage": 2, "fsdp": 2, "tensor": 2},
        specs(("fsdp", "tensor"), layer="stage"),
    ),
    "experts over slices": (
        {"dcn": 2, "fsdp": 2, "expert": 2},
        specs(("fsdp", None), expert=("dcn", "expert")),
    ),
    "replicas, FSDP and tensor": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        specs(("tensor", "fsdp")),
    ),
    "axes of one device": (
        {"stage": 1, "fsdp": 8, "tensor": 1, "expert": 1},
        specs(("fsdp", "tensor"), layer="stage", expert="expert"),
    ),
    "one device": ({"fsdp": 1, "tensor": 1}, specs(("fsdp", "tensor"))),
    "some leaves alone": (
        {"data": 2, "fsdp": 4},
        specs(("fsdp", None)) | {"up0": P(), "layers": P("fsdp"), "square": P("data")},
    ),
}


tree = functools.partial(runs.tree, shapes=SHAPES)


@functools.cache
def on_one_device(name):
    return jax.tree.map(np.asarray, stepped(OPTIMIZERS[name], tree(0), tree(1)))


def stepped(optimizer, params, grads, state=None):
    """The updates of a second step with the same gradients, and the state after it."""
    state = optimizer.init(params) if state is None else state
    update = jax.jit(optimizer.update)
    _, state = update(grads, state, params)
    return update(grads, state, params)


@pytest.mark.extended
@pytest.mark.parametrize(
    "kinds",
    [(AUTO,), (EXPLICIT, AUTO), pytest.param((EXPLICIT,), marks=pytest.mark.slow)],
    ids=["auto", "mixed", "explicit"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_one_device(layout, kinds):
    sizes, specs = LAYOUTS[layout]
    mesh = mesh_of(sizes, *(kinds[i % len(kinds)] for i in range(len(sizes))))
    params, grads = (placed(tree(seed), mesh, specs) for seed in (0, 1))
    for name, optimizer in OPTIMIZERS.items():
        of_state = state_shardings(optimizer, params)
        with jax.set_mesh(mesh):
            state = jax.jit(optimizer.init, out_shardings=of_state)(params)
            found = stepped(optimizer, params, grads, state)
        assert_close(found, on_one_device(name))


@pytest.mark.extended
def test_layers_in_one_array_are_spread_by_parts():
    """Each of eight devices takes three of the twenty-four matrices, in two stacks."""
    shapes, most = {"gate": (12, 8, 16), "up": (12, 8, 16)}, 2 * 4 * 8 * 16
    numbers = numbers_of(shapes)
    optimizer = orthogonalize(max_stack_bytes=most, weight_dimension_numbers=numbers)
    grads = runs.tree(0, shapes=shapes)
    wanted, _ = optimizer.update(grads, optimizer.init(grads))
    mesh = mesh_of({"data": 2, "fsdp": 4}, EXPLICIT)
    grads = placed(grads, mesh, P(None, "fsdp"))
    plan = describe(grads, optimizer).plan
    assert [group.matrices_per_device for group in plan.groups] == [2, 1]
    found, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    assert_close(found, wanted)
