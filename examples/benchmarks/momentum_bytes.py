"""Bytes of a step by the dtype of the momentum, compiled for TPUs or GPUs.

    python -m examples.benchmarks.momentum_bytes                  # v5p; needs libtpu
    python -m examples.benchmarks.momentum_bytes --platform gpu   # H100; jax[cuda12]

Twelve float32 matrices and `muon`, FSDP on Explicit axes. Nothing is run: the figures are
the compiler's own, in bytes per parameter, those of a device times the devices. On 64
devices, shards cut the blocks of 8-bit momentum in two.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from examples.benchmarks import topologies
from examples.benchmarks.ahead_of_time import line, placed
from examples.benchmarks.contenders import last_two_axes, step_of
from orscale_jax import muon, state_shardings

SHAPES = {
    f"{name}{i}": shape
    for i in range(4)
    for name, shape in {
        "up": (1024, 4096),
        "down": (4096, 1024),
        "out": (1024, 1024),
    }.items()
}
DTYPES = ("float32", "bfloat16", "int8")
COLUMNS = (
    "devices", "`mu_dtype`", "parameters", "momentum", "temporaries", "all of these",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled.

    Attributes:
      platform: tpu or gpu.
      devices: How many of them, as many as rows of 1024 can be divided among.
    """

    platform: Literal["tpu", "gpu"] = "tpu"
    devices: tuple[int, ...] = (1, 64)


def devices_of(options: Options) -> tuple[Sequence[jax.Device], Any]:
    """The devices that are described, and options of their compiler."""
    if options.platform == "tpu":
        return topologies.tpus("v5p:4x4x4"), None
    return topologies.h100s(max(options.devices)), topologies.GPU_COMPILER_OPTIONS


def memory(devices: Sequence[jax.Device], mu_dtype: str, compiler_options: Any) -> Any:
    """What the compiler says of a device's memory."""
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(mesh, P("fsdp"))
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        for name, shape in SHAPES.items()
    }
    optimizer = muon(1e-3, mu_dtype=mu_dtype, weight_dimension_numbers=last_two_axes)
    shardings = state_shardings(optimizer, params)
    state = placed(jax.eval_shape(optimizer.init, params), shardings)
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    with jax.set_mesh(mesh):
        lowered = step.lower(params, state, params)
        return lowered.compile(compiler_options).memory_analysis()


def row(devices: Sequence[jax.Device], mu_dtype: str, compiler_options: Any) -> str:
    """A row of the table; weights and gradients are the parameters' 8 bytes."""
    found = memory(devices, mu_dtype, compiler_options)
    each = len(devices) / sum(map(math.prod, SHAPES.values()))
    arguments, temporaries = (
        each * nbytes
        for nbytes in (found.argument_size_in_bytes, found.temp_size_in_bytes)
    )
    figures = 8, arguments - 8, temporaries, arguments + temporaries
    cells = [str(len(devices)), mu_dtype, *(f"{figure:.3f}" for figure in figures)]
    return line(cells)


def main(options: Options) -> None:
    """Prints the table."""
    print(f"| {' | '.join(COLUMNS)} |\n|--:|---|{'--:|' * 4}", flush=True)
    devices, compiler_options = devices_of(options)
    for count in options.devices:
        for mu_dtype in DTYPES:
            print(row(devices[:count], mu_dtype, compiler_options), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
