"""The relatives of OrScale on 8 virtual devices: Muon's exchanges, and small sums.

Aurora takes the polar factor of rectangular matrices twice, and so exchanges them twice.
"""

import jax
import pytest

from examples.benchmarks import hlo_cost
from orscale_jax import muon, orscale, state_shardings
from tests.distributed import test_mesh as mesh_tests
from tests.runs import AUTO, EXPLICIT, FAMILY, assert_close, mesh_of

pytestmark = pytest.mark.extended

NUMBERS = mesh_tests.NUMBERS
RECTANGULAR = {
    name: None if name[0] == "o" else numbers for name, numbers in NUMBERS.items()
}
# On a mesh, the others do what one of these does.
FAST = {"hyperball", "normuon", "pooled"}
NAMES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILY
]
LAYOUTS = {"rows × columns": [], "experts": [pytest.mark.slow], "rows": []}


def placed(optimizer, layout, kind):
    """A compiled step of a sharded tree, and what it is called with."""
    sizes, spec = mesh_tests.LAYOUTS[layout]
    mesh = mesh_of(sizes, kind)
    where = mesh_tests.on(mesh, spec)
    params, grads = (jax.device_put(mesh_tests.rng_tree(s), where) for s in (0, 1))
    of_state = state_shardings(optimizer, params)
    with jax.set_mesh(mesh):
        state = jax.jit(optimizer.init, out_shardings=of_state)(params)
        step = mesh_tests.step_of(optimizer, out_shardings=(where, of_state))
        return step.lower(params, state, grads).compile(), (params, state, grads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [EXPLICIT, pytest.param(AUTO, marks=pytest.mark.slow)])
def test_a_step_is_that_of_one_device(name, kind):
    optimizer = FAMILY[name](0.02, weight_dimension_numbers=NUMBERS)
    program, arguments = placed(optimizer, "rows × columns", kind)
    found = program(*arguments)
    params, grads = (mesh_tests.rng_tree(seed) for seed in (0, 1))
    expected = mesh_tests.step_of(optimizer)(params, optimizer.init(params), grads)
    assert_close(found, expected)


def cost_of(make, layout, numbers=NUMBERS):
    optimizer = make(0.02, weight_dimension_numbers=numbers)
    program, _ = placed(optimizer, layout, EXPLICIT)
    cost = hlo_cost.of(program.as_text())
    by_kind = dict.fromkeys(("all-to-all", "all-reduce"), 0)
    for collective in cost.collectives:
        by_kind[collective.kind] += collective.nbytes
    return cost, by_kind


@pytest.mark.compiled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=marks) for name, marks in LAYOUTS.items()]
)
def test_collectives(name, layout):
    """OrScale's exchanges of matrices; beyond them vectors and scalars, not in loops."""
    of_muon = {"normuon", "muon_plus", "aurora", "replayed"}
    plain, plain_bytes = cost_of(muon if name in of_muon else orscale, layout)
    flops, exchanged = plain.flops, plain_bytes["all-to-all"]
    if name == "aurora":
        again, again_bytes = cost_of(muon, layout, RECTANGULAR)
        flops, exchanged = flops + again.flops, exchanged + again_bytes["all-to-all"]
    cost, found = cost_of(FAMILY[name], layout)
    assert cost.looped_bytes == 0 and cost.flops == flops
    assert set(found) == set(plain_bytes)
    assert found["all-to-all"] == exchanged
    matrices = {"experts": 8} | {name: 1 for name in NUMBERS if name[0] in "udo"}
    scalars = sum(matrices.values())
    m, n, longer = (
        sum(of(mesh_tests.SHAPES[leaf][-2:]) * count for leaf, count in matrices.items())
        for of in (lambda side: side[0], lambda side: side[1], max)
    )
    entries = {
        "normuon": n, "orscale_on_normuon": n, "muon_plus": m + n,
        "aurora": 2 * longer,  # Vectors of M̃, and of U.
    }.get(name, 0)  # fmt: skip
    # In float32, on each axis of the mesh; and two sums per leaf for the pooled mean.
    axes = len(mesh_tests.LAYOUTS[layout][0])
    most = plain_bytes["all-reduce"] + 4 * axes * (entries + 2 * scalars)
    assert found["all-reduce"] <= most
