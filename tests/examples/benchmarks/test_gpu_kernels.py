"""The kernels of a step, compiled for an H100; `make test-gpu` has the compiler."""

import numpy as np
import pytest

from examples.benchmarks import ahead_of_time, topologies

pytest.importorskip("jax_cuda12_plugin", reason="no CUDA plugin: make test-gpu")
pytestmark = pytest.mark.compiled


def kernels(case, contender, layers):
    options = ahead_of_time.Options(
        layers=layers, compiler_options=topologies.GPU_COMPILER_OPTIONS
    )
    device = np.array(topologies.h100s(1)).reshape(())
    _, found = ahead_of_time.measure(case, contender, lambda _: device, options)
    return found.cost.kernels


@pytest.mark.parametrize(
    ("case", "contender", "layers", "most"),
    [
        ("f", "muon", None, 249),
        ("f", "orscale", None, 314),
        # Fewer than one for each matrix.
        ("g", "muon", 120, 48),
        ("g", "orscale", 120, 111),
    ],
)
def test_kernels_of_gpt2_and_of_small_matrices(case, contender, layers, most):
    assert kernels(case, contender, layers) <= most
