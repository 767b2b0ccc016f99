"""Devices that this machine does not have, to compile for."""

import os

import jax
from jax.experimental import topologies

# Read when libtpu is loaded, which would otherwise ask Google's servers what this machine
# is, and refuse to be loaded twice. Of the types any will do.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Bytes of a chip.
TPU_MEMORY = {"v4": 32 << 30, "v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30}

# What XLA asks of a device, as CUDA reports it of an H100 SXM.
H100_MEMORY = 84_929_347_584
H100 = f"""
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {H100_MEMORY}
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
}}
"""
PER_NODE = 8

# Without a GPU, XLA cannot choose kernels by trying them.
GPU_COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}


def tpus(topology: str, slices: int = 1) -> list[jax.Device]:
    """The chips of a topology, such as v5p:4x4x4, or of several slices of it.

    Raises:
      RuntimeError: If libtpu is not installed, or has no such topology.
    """
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    several = {"num_slices": slices} if slices > 1 else {}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **several
    )
    return described.devices


def h100s(count: int) -> list[jax.Device]:
    """GPUs in nodes of eight, or fewer in one.

    Raises:
      ValueError: If they make no whole nodes.
      NotImplementedError: If JAX's plugin for CUDA is not installed.
    """
    # Newer plugins of JAX would otherwise ask the driver, which is not there.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    per_node = min(count, PER_NODE)
    if not count or count % per_node:
        raise ValueError(
            f"{count} GPUs are no nodes of {PER_NODE}: choose 1 to {PER_NODE}, or a "
            f"multiple of {PER_NODE}"
        )
    described = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=f"1x{count // per_node}x{per_node}"
    )
    return described.devices
