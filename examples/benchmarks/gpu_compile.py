"""One step of the optimizers, compiled for H100s in nodes of eight; it needs no GPU.

    python -m examples.benchmarks.gpu_compile               # make bench-gpu: every case
    python -m examples.benchmarks.gpu_compile --cases a c   # some
    python -m examples.benchmarks.gpu_compile --layers 2    # of each model, the first two
    python -m examples.benchmarks.gpu_compile --dump hlo    # also the compiled text

XLA estimates no times for GPUs, and chooses the kernels of products by trying them on
one: without it, the text has its defaults. What is computed, sent and stored stays.
"""

import os

# Read when jax is imported. Its own backend is the CPU's: no GPU is looked for.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import math

import numpy as np
import tyro
from jax.experimental import topologies

from examples.benchmarks import ahead_of_time

# What XLA asks of a device, as CUDA reports it of an H100 SXM.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""
PER_NODE = 8


def devices_of(case: str) -> np.ndarray:
    """GPUs in the shape of a case's mesh."""
    shape = tuple(ahead_of_time.CASES[case].mesh.values())
    nodes = math.prod(shape) // PER_NODE
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=f"1x{nodes}x{PER_NODE}"
    )
    return np.array(topology.devices).reshape(shape)


# XLA does not say these of GPUs.
UNKNOWN = ("Mcycles", "program, MiB")
COLUMNS = {
    name: figure for name, figure in ahead_of_time.COLUMNS.items() if name not in UNKNOWN
}

if __name__ == "__main__":
    options = tyro.cli(ahead_of_time.Options, description=__doc__)
    ahead_of_time.main(options, devices_of, COLUMNS)
