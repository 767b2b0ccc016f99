"""What a step sends between TPU slices, or nodes of GPUs; it needs none of either.

    python -m examples.benchmarks.slow_links                      # two slices of 8 v5p
    python -m examples.benchmarks.slow_links --platform gpu       # four nodes of 8 H100s
    python -m examples.benchmarks.slow_links --layouts a b --matrices 4
    python -m examples.benchmarks.slow_links --dump hlo           # also the compiled text

The axes of the mesh are "dcn", across slices or nodes, and "fsdp", within. See
:mod:`examples.benchmarks.crossings` for what is counted.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import numpy as np
import tyro
from jax.sharding import PartitionSpec as P

from examples.benchmarks import crossings, topologies
from examples.benchmarks.ahead_of_time import ON_AUTO_AXES, line, lowered
from examples.benchmarks.models import Leaf, Leaves, experts, layers, matrix

AXES = ("dcn", "fsdp")
ROWS, COLUMNS = 2048, 8192
FIGURES = (
    "received from others by a device, MB",
    "by all devices, MB",
    "messages to a device",
    "buffers, MB",
    "compiled in, s",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How matrices are sharded.

    Attributes:
      name: In words.
      leaves: Of a number of matrices.
    """

    name: str
    leaves: Callable[[int], Leaves]


def _apart(spec: P) -> Callable[[int], Leaves]:
    return lambda count: layers(count, {"w": matrix(ROWS, COLUMNS, spec)})


def _stacked(spec: P) -> Callable[[int], Mapping[str, Leaf]]:
    return lambda count: {"w": experts(count, ROWS, COLUMNS, spec)}


LAYOUTS = {
    "a": Layout("sharded within, replicated across", _apart(P("fsdp", None))),
    "b": Layout("sharded within and across", _apart(P(AXES, None))),
    "c": Layout("replicated", _apart(P())),
    "d": Layout("layers across, sharded within", _stacked(P("dcn", "fsdp", None))),
    "e": Layout(
        "32 experts over all devices", lambda _: _stacked(P(AXES, None, None))(32)
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    platform: Literal["tpu", "gpu"] = "tpu"
    layouts: tuple[str, ...] = ("a", "b")
    """Of a to e."""
    contenders: tuple[str, ...] = ("orscale", ON_AUTO_AXES)
    """As of `examples.benchmarks.tpu_compile`."""
    matrices: int = 16
    """Of 2048×8192."""
    dump: pathlib.Path | None = None
    """Where the compiled text goes, a file for each row."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
      devices: In the shape of the mesh.
      regions: Which slice or node each is in, by its number in the text.
      compiler_options: As of `jax.jit`.
    """

    devices: np.ndarray
    regions: crossings.Regions
    compiler_options: Mapping[str, str]


def two_slices() -> Target:
    """Two slices of 8 v5p chips."""
    devices = topologies.tpus("v5p:2x2x2", slices=2)
    once = {"xla_tpu_enable_deduplicated_calls": "ENABLED"}
    return Target(np.array(devices).reshape(2, 8), crossings.slices_of(devices), once)


def four_nodes() -> Target:
    """Four nodes of 8 H100s."""
    jax.config.update("jax_platforms", "cpu")  # No GPU is looked for.
    devices = topologies.h100s(32)
    nodes = crossings.regions_of(devices, lambda device: device.process_index)
    options = topologies.GPU_COMPILER_OPTIONS
    return Target(np.array(devices).reshape(4, 8), nodes, options)


TARGETS = {"tpu": two_slices, "gpu": four_nodes}


def row(layout: Layout, contender: str, target: Target, options: Options) -> list[str]:
    """The cells of a row: of the layout, the optimizer and the figures."""
    began = time.perf_counter()
    module = lowered(
        layout.leaves(options.matrices), AXES, target.devices, contender, AXES[:1]
    )
    program = module.compile(compiler_options=dict(target.compiler_options))
    seconds = time.perf_counter() - began
    text = program.as_text() or ""
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{layout.name}.{contender}.txt").write_text(text)
    found = crossings.of(text, target.regions)
    received = found.received.values()
    figures = (
        max(received) / 1e6,
        sum(received) / 1e6,
        max(found.messages.values()),
        found.buffers / 1e6,
        seconds,
    )
    return [layout.name, contender, *(f"{figure:.4g}" for figure in figures)]


def main(options: Options, target: Target) -> None:
    print(line(["layout", "optimizer", *FIGURES]))
    print(line(["---"] * 2 + ["--:"] * len(FIGURES)))
    for letter in options.layouts:
        for contender in options.contenders:
            print(line(row(LAYOUTS[letter], contender, target, options)), flush=True)


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    main(chosen, TARGETS[chosen.platform]())
