"""The training step compiled for devices that this machine does not have.

    python -m examples.benchmarks.compile_only --topology v5p:4x4x4 --recipe 125m-orscale

The other options are those of `examples.pretrain`. Nothing is run, no data is read and no
array is made: the figures are the compiler's own, for one device and one step. See
:mod:`examples.benchmarks.hlo_cost` for what they count.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from examples.benchmarks import hlo_cost, topologies
from examples.benchmarks.ahead_of_time import line
from examples.pretrain.config import Config
from examples.pretrain.configs import parse
from examples.pretrain.errors import UsageError, exit_code_of
from examples.pretrain.kinds import make_task
from examples.pretrain.loading import part_of_process
from examples.pretrain.meshes import batch_sharding, batch_shards, in_effect, make_mesh
from examples.pretrain.optimizers import find_optimizer
from examples.pretrain.recipe import accumulation
from examples.pretrain.setup import set_up
from examples.pretrain.step import compiled_step

PROG = "python -m examples.benchmarks.compile_only --topology NAME [--recipe NAME]"
GIB = 2**30
# Of a chip, in GiB.
TPU_MEMORY = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
# Parts of a step, as `examples.pretrain.step` names what it traces.
OPTIMIZER = "optimizer"
SCOPES = ("gradient", OPTIMIZER)


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
      devices: All of them.
      memory: Bytes that a device has.
      compiler_options: As of `jax.jit`.
    """

    devices: Sequence[jax.Device]
    memory: int
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of a compiled step, for one device.

    Attributes:
      whole: The cost of the step.
      optimizer: That of its optimizer.
      memory: As of `compiled.memory_analysis()`.
      available: Bytes that the device has.
      seconds: To trace and compile it.
    """

    whole: hlo_cost.Cost
    optimizer: hlo_cost.Cost
    memory: Any
    available: int
    seconds: float

    @property
    def resident(self) -> int:
        """Bytes of the training state and of the batch."""
        return self.memory.argument_size_in_bytes

    @property
    def peak(self) -> int:
        """Bytes of everything; what is donated is not counted twice."""
        memory = self.memory
        made = memory.output_size_in_bytes - memory.alias_size_in_bytes
        program = memory.generated_code_size_in_bytes
        return self.resident + memory.temp_size_in_bytes + made + program


COLUMNS: Mapping[str, Callable[[Found], float]] = {
    "arguments, GiB": lambda found: found.resident / GIB,
    "temporaries, GiB": lambda found: found.memory.temp_size_in_bytes / GIB,
    "all, % of the memory": lambda found: _percent(found.peak, found.available),
    "Mcycles": lambda found: found.whole.cycles / 1e6 or math.nan,
    "optimizer's cycles, %": lambda found: _percent(
        found.optimizer.cycles, found.whole.cycles
    ),
    "TFLOP": lambda found: found.whole.flops / 1e12,
    "optimizer's FLOP, %": lambda found: _percent(
        found.optimizer.flops, found.whole.flops
    ),
    "collectives, GB": lambda found: found.whole.collective_bytes / 1e9,
    "optimizer's, GB": lambda found: found.optimizer.collective_bytes / 1e9,
    "compiled in, s": lambda found: found.seconds,
}


def run(config: Config, topology: str) -> None:
    """Prints a table with a row for each optimizer.

    Raises:
      UsageError: If there is no such topology, or the step does not fit.
    """
    # Its own backend is the CPU's: devices that are there are left to others.
    jax.config.update("jax_platforms", "cpu")
    target = find_target(topology)
    head = [line(["optimizer", *COLUMNS]), line(["---", *["--:"] * len(COLUMNS)])]
    for name in config.optimizer:
        found = compiled(config, name, target)
        cells = [_cell(figure(found)) for figure in COLUMNS.values()]
        row = line([find_optimizer(name).label, *cells])
        print(*head, row, sep="\n", flush=True)
        head = []


def find_target(topology: str) -> Target:
    """The devices of a topology: v5p:4x4x4 and the like, or h100:8.

    Raises:
      UsageError: If there is none, or what compiles for it is not installed.
    """
    kind, _, size = topology.partition(":")
    try:
        if kind in TPU_MEMORY:
            return Target(topologies.tpus(topology), TPU_MEMORY[kind] * GIB)
        if kind == "h100" and size.isdecimal():
            return Target(
                topologies.h100s(int(size)),
                topologies.H100_MEMORY,
                topologies.GPU_COMPILER_OPTIONS,
            )
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--topology {topology}: {error} (docs/sharding.md says what to install.)"
        ) from error
    raise UsageError(
        f"--topology {topology} is unknown. Choose h100 and a number, as h100:8, or TPUs "
        f"of {', '.join(TPU_MEMORY)} and their shape, as v5p:4x4x4 or v5e:2x4."
    )


def compiled(config: Config, optimizer: str, target: Target) -> Found:
    """Compiles the step with an optimizer.

    Raises:
      UsageError: If the devices have not enough memory.
    """
    mesh = make_mesh(config.mesh, target.devices)
    recipe = config.recipe_of(optimizer)
    parts = accumulation(recipe, batch_shards(mesh), config.per_device_batch)
    where = batch_sharding(mesh)
    part_of_process(where, recipe.batch_size)  # Refuses what does not divide.
    task = make_task(config)
    setup = set_up(task, recipe, mesh, config.mesh.zero1)
    batch = jax.tree.map(
        lambda x: x.update(sharding=where), task.batch(recipe.batch_size)
    )
    began = time.perf_counter()
    try:
        with in_effect(mesh):
            program = compiled_step(setup, parts, batch, target.compiler_options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UsageError(
            f"--optimizer {optimizer}: the step does not fit: {error}\nRaise --mesh.fsdp "
            "or --loss-chunks, lower --per-device-batch, or set --model.remat."
        ) from error
    seconds = time.perf_counter() - began
    text = program.as_text()
    return Found(
        whole=hlo_cost.of(text),
        optimizer=hlo_cost.by_scope(text, SCOPES)[OPTIMIZER],
        memory=program.memory_analysis(),
        available=target.memory,
        seconds=seconds,
    )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else math.nan


def _cell(figure: float) -> str:
    """Not a number is what the compiler does not say: cycles of GPUs."""
    return "unknown" if math.isnan(figure) else f"{figure:.4g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--topology")
    chosen, options = first.parse_known_args(arguments)

    def compile_only() -> None:
        config = parse(options, PROG)
        if chosen.topology is None:
            raise UsageError("--topology NAME: say for which devices to compile.")
        run(config, chosen.topology)

    return exit_code_of(compile_only)


if __name__ == "__main__":
    sys.exit(main())
