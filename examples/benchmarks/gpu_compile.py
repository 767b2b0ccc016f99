"""One step of the optimizers, compiled for H100s in nodes of eight; it needs no GPU.

    python -m examples.benchmarks.gpu_compile               # make bench-gpu: every case
    python -m examples.benchmarks.gpu_compile --cases a c   # some
    python -m examples.benchmarks.gpu_compile --layers 2    # of each model, the first two
    python -m examples.benchmarks.gpu_compile --dump hlo    # also the compiled text

XLA estimates no times for GPUs, and chooses the kernels of products by trying them on
one: without it, the text has its defaults. What is computed, sent and stored stays.
"""

import math

import jax
import numpy as np
import tyro

from examples.benchmarks import ahead_of_time, topologies


def devices_of(case: str) -> np.ndarray:
    """GPUs in the shape of a case's mesh."""
    shape = tuple(ahead_of_time.CASES[case].mesh.values())
    return np.array(topologies.h100s(math.prod(shape))).reshape(shape)


# XLA does not say these of GPUs.
UNKNOWN = ("Mcycles", "program, MiB")
COLUMNS = {
    name: figure for name, figure in ahead_of_time.COLUMNS.items() if name not in UNKNOWN
} | {
    "read, MB": lambda found: found.cost.traffic.read / 1e6,
    "written, MB": lambda found: found.cost.traffic.written / 1e6,
}

if __name__ == "__main__":
    # Its own backend is the CPU's: no GPU is looked for.
    jax.config.update("jax_platforms", "cpu")
    chosen = {
        **topologies.GPU_COMPILER_OPTIONS,
        "xla_gpu_all_reduce_combine_threshold_bytes": "31457287",  # The default.
    }
    options = tyro.cli(
        ahead_of_time.Options,
        default=ahead_of_time.Options(compiler_options=chosen),
        description=__doc__,
    )
    ahead_of_time.main(options, devices_of, COLUMNS)
