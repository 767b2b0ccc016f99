"""The kernels of a step, compiled for an H100; `make test-gpu` has the compiler."""

import pytest

from examples.benchmarks import ahead_of_time, hlo_cost, returned_shards, topologies

pytest.importorskip("jax_cuda12_plugin", reason="no CUDA plugin: make test-gpu")
pytestmark = pytest.mark.compiled


def measured(case, contender, layers):
    options = ahead_of_time.Options(
        layers=layers, compiler_options=topologies.GPU_COMPILER_OPTIONS
    )
    target = ahead_of_time.target_of(ahead_of_time.CASES[case], "gpu")
    _, found = ahead_of_time.measure(case, contender, target, options)
    return found


@pytest.mark.parametrize(
    ("case", "contender", "layers", "kernels", "temporaries"),
    [
        ("f", "muon", None, 303, 298),
        ("f", "orscale", None, 368, 298),
        # Fewer than one for each matrix.
        ("g", "muon", 120, 55, 3.1),
        ("g", "orscale", 120, 78, 3.1),
    ],
)
def test_kernels_and_mib_of_a_step(case, contender, layers, kernels, temporaries):
    found = measured(case, contender, layers)
    assert found.cost.kernels <= kernels
    assert found.memory.temp_size_in_bytes <= temporaries * 2**20


@pytest.mark.parametrize("contender", ["muon", "orscale"])
def test_exchanges_run_beside_products(contender):
    """All but the first one out and the last one back, of three each way."""
    cost = measured("i", contender, None).cost
    assert cost.exposed_bytes <= 0.3 * cost.collective_bytes


@pytest.mark.parametrize("optimizer", ["muon", "orscale"])
def test_a_step_that_returns_shards_hides_the_gather(optimizer):
    """But for the first matrix, whose gather nothing precedes."""
    cost = hlo_cost.of(returned_shards.compiled(optimizer, True).as_text())
    gathers = [x for x in cost.collectives if x.kind == "all-gather"]
    assert sum(not x.flops for x in gathers) == 1 < len(gathers) == 16
    assert cost.exposed_bytes <= 0.3 * cost.collective_bytes
