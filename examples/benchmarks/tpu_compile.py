"""One step of the optimizers, compiled for real TPU topologies; it needs no TPU.

    python -m examples.benchmarks.tpu_compile               # make bench-tpu: every case
    python -m examples.benchmarks.tpu_compile --cases a c   # some
    python -m examples.benchmarks.tpu_compile --layers 2    # of each model, the first two
    python -m examples.benchmarks.tpu_compile --dump hlo    # also the compiled text

Kernels that are alike are in a program once, to be called. The compiler's own default is
to repeat them: ``--compiler-options.xla-tpu-enable-deduplicated-calls AUTO``.
``--compiler-options.xla-tpu-enable-async-all-to-all true`` lets exchanges run beside
products.

Cycles are what the compiler estimates for its kernels and leave out the time in
collectives, whose bytes are listed instead: see :mod:`examples.benchmarks.hlo_cost`.
"""

import numpy as np
import tyro
from jax.experimental import mesh_utils

from examples.benchmarks import ahead_of_time, topologies

TOPOLOGIES = {
    "a": "v5p:4x4x4",
    "b": "v5p:4x4x4",
    "c": "v5e:2x4",
    "d": "v5p:4x4x4",
    "e": "v5p:8x8x8",
    "h": "v5p:4x4x4",
    "i": "v5p:2x2x2",
}


def devices_of(case: str) -> np.ndarray:
    """The chips of a case's topology, in the shape of its mesh."""
    shape = tuple(ahead_of_time.CASES[case].mesh.values())
    return mesh_utils.create_device_mesh(
        shape, topologies.tpus(TOPOLOGIES[case]), allow_split_physical_axes=True
    )


if __name__ == "__main__":
    once = {
        "xla_tpu_enable_deduplicated_calls": "ENABLED",
        "xla_tpu_enable_async_all_to_all": "false",  # The default, to be changed.
    }
    options = tyro.cli(
        ahead_of_time.Options,
        default=ahead_of_time.Options(compiler_options=once),
        description=__doc__,
    )
    ahead_of_time.main(options, devices_of)
