"""One step of the optimizers, compiled for TPUs or GPUs that this machine does not have.

    python -m examples.benchmarks.ahead_of_time                    # make bench-tpu
    python -m examples.benchmarks.ahead_of_time --platform gpu     # make bench-gpu
    python -m examples.benchmarks.ahead_of_time --cases a c        # some; a minute each
    python -m examples.benchmarks.ahead_of_time --cases k l        # between slices, nodes
    python -m examples.benchmarks.ahead_of_time --layers 2         # of each model
    python -m examples.benchmarks.ahead_of_time --dump hlo         # compiled text, too

It prints a row for each case and optimizer. Nothing is run: the figures are the
compiler's own, for one device and one step. Parameters, gradients and state are float32;
products are bfloat16 on TPUs and float16 on GPUs. Cycles are what the compiler estimates
for its kernels, without collectives, whose bytes are listed instead
(:mod:`examples.benchmarks.hlo_cost`). Of GPUs XLA estimates none, and without one it
takes its default kernels. What is received from other slices or nodes is counted by
:mod:`examples.benchmarks.crossings`.

On TPUs, kernels that are alike are in a program once, to be called. The compiler's own
default is to repeat them: ``--compiler-options xla_tpu_enable_deduplicated_calls AUTO``.
``--compiler-options xla_tpu_enable_async_all_to_all true`` lets exchanges run beside
products.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from examples.benchmarks import crossings, hlo_cost, overlap, topologies
from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.models import (
    Leaves,
    experts,
    first,
    gpt2,
    layers,
    matrix,
    moonlight,
    tinyllama,
)
from orscale_jax import state_shardings

ON_AUTO_AXES = "orscale on Auto axes"
WITHOUT_SHARDINGS = "orscale on Auto axes, without param_shardings"
CONTENDERS = (
    "orscale",
    ON_AUTO_AXES,
    WITHOUT_SHARDINGS,
    "muon",
    "optax.contrib.muon",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Attributes:
      mesh: The lengths of its axes; "dcn" leads to other slices, or nodes of GPUs.
      leaves: The model.
      name: In words.
      topology: The TPUs, of each slice. None: the case is for GPUs alone.
    """

    mesh: Mapping[str, int]
    leaves: Leaves
    name: str
    topology: str | None = None


def _many(spec: P, count: int = 16) -> Leaves:
    """Matrices of 2048×8192."""
    return layers(count, {"w": matrix(2048, 8192, spec)})


SLICES = {"dcn": 2, "fsdp": 8}
CASES = {
    "a": Case(
        {"fsdp": 64},
        _many(P("fsdp", None), 64),
        "64 matrices of 2048×8192, FSDP",
        "v5p:4x4x4",
    ),
    "b": Case(
        {"fsdp": 64},
        moonlight({"fsdp": 64}),
        "Moonlight 16B, FSDP and experts, 64 devices",
        "v5p:4x4x4",
    ),
    "c": Case({"data": 8}, gpt2(), "GPT-2 124M, replicated", "v5e:2x4"),
    "d": Case(
        {"fsdp": 8, "tensor": 8},
        tinyllama(),
        "TinyLlama 1.1B, FSDP × tensor",
        "v5p:4x4x4",
    ),
    "e": Case(
        {"fsdp2": 8, "fsdp": 64},
        moonlight({"fsdp2": 8, "fsdp": 64}),
        "Moonlight 16B, FSDP × experts, 512 devices",
        "v5p:8x8x8",
    ),
    "f": Case({}, gpt2(), "GPT-2 124M, one device"),
    "g": Case(
        {}, layers(500, {"w": matrix(32, 64, P())}), "500 matrices of 32×64, one device"
    ),
    "h": Case(
        {"fsdp": 64},
        {"w": experts(64, 2048, 8192, P(None, "fsdp", None))},
        "64 matrices of 2048×8192 in one array, FSDP",
        "v5p:4x4x4",
    ),
    "i": Case(
        {"fsdp": 8},
        layers(
            8,
            {
                "wide": matrix(2048, 8192, P("fsdp", None)),
                "square": matrix(4096, 4096, P("fsdp", None)),
                "narrow": matrix(2048, 2816, P("fsdp", None)),
            },
        ),
        "8 each of 2048×8192, 4096×4096 and 2048×2816, FSDP",
        "v5p:2x2x2",
    ),
    **{
        letter: Case(SLICES, leaves, f"16 matrices of 2048×8192, {name}", "v5p:2x2x2")
        for letter, name, leaves in (
            ("k", "sharded within, replicated across", _many(P("fsdp", None))),
            ("l", "sharded within and across", _many(P(("dcn", "fsdp"), None))),
            ("m", "replicated", _many(P())),
            (
                "n",
                "layers across, sharded within",
                {"w": experts(16, 2048, 8192, P("dcn", "fsdp", None))},
            ),
            (
                "o",
                "as 32 experts over all devices",
                {"w": experts(32, 2048, 8192, P(("dcn", "fsdp"), None, None))},
            ),
        )
    },
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    platform: Literal["tpu", "gpu"] = "tpu"
    """v5p and v5e chips, or H100s in nodes of eight."""
    cases: tuple[str, ...] = ()
    """Of a to o; all that the platform has without it."""
    contenders: tuple[str, ...] = CONTENDERS
    """Of these, and optax.adamw."""
    layers: int | None = None
    """How many of a model's first layers; all without it."""
    dump: pathlib.Path | None = None
    """Where the compiled text goes, a file for each case and contender."""
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """As of jax.jit: names and values, beside the platform's own."""


# To be changed: the second and the third are the defaults of the compilers.
COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "tpu": {
        "xla_tpu_enable_deduplicated_calls": "ENABLED",
        "xla_tpu_enable_async_all_to_all": "false",
    },
    "gpu": {
        "xla_gpu_all_reduce_combine_threshold_bytes": "31457287",
        **topologies.GPU_COMPILER_OPTIONS,
    },
}


class Target(NamedTuple):
    """Devices in the shape of a mesh, and the slice or node of each by its number."""

    devices: np.ndarray
    regions: crossings.Regions


def target_of(case: Case, platform: str) -> Target:
    """The devices of a case. Of GPUs, "dcn" leads to four nodes."""
    shape = tuple(case.mesh.values())
    if platform == "gpu":
        nodes = {"dcn": 4} if "dcn" in case.mesh else {}
        shape = tuple({**case.mesh, **nodes}.values())
        gpus = topologies.h100s(math.prod(shape))
        regions = crossings.regions_of(gpus, lambda device: device.process_index)
        return Target(np.array(gpus).reshape(shape), regions)
    if case.topology is None:
        raise ValueError(f"{case.name} is a case for GPUs: pass --platform gpu")
    if "dcn" in case.mesh:
        tpus = topologies.tpus(case.topology, slices=case.mesh["dcn"])
        return Target(np.array(tpus).reshape(shape), crossings.slices_of(tpus))
    chips = topologies.tpus(case.topology)
    mesh = mesh_utils.create_device_mesh(shape, chips, allow_split_physical_axes=True)
    return Target(mesh, dict.fromkeys(range(mesh.size), 0))


class Found(NamedTuple):
    """What is known of a program."""

    cost: hlo_cost.Cost
    exposed: int
    crossing: crossings.Crossings
    memory: Any
    tracing: float
    compilation: float


COLUMNS: Mapping[str, Callable[[Found], float]] = {
    "Mcycles": lambda found: found.cost.cycles / 1e6 or math.nan,
    "collectives, MB": lambda found: found.cost.collective_bytes / 1e6,
    "of these exposed, MB": lambda found: found.exposed / 1e6,
    "of these in loops, MB": lambda found: found.cost.looped_bytes / 1e6,
    "from other slices, MB": lambda found: max(found.crossing.received.values()) / 1e6,
    "messages": lambda found: max(found.crossing.messages.values()),
    "GFLOP": lambda found: found.cost.flops / 1e9,
    "temporaries, MiB": lambda found: found.memory.temp_size_in_bytes / 2**20,
    "kernels": lambda found: found.cost.kernels,
    "read, MB": lambda found: found.cost.traffic.read / 1e6,
    "written, MB": lambda found: found.cost.traffic.written / 1e6,
    "arguments, MiB": lambda found: found.memory.argument_size_in_bytes / 2**20,
    "program, MiB": lambda found: (
        found.memory.generated_code_size_in_bytes / 2**20 or math.nan
    ),
    "traced and lowered in, s": lambda found: found.tracing,
    "compiled in, s": lambda found: found.compilation,
}


def lowered(
    leaves: Leaves, axes: Iterable[str], devices: np.ndarray, contender: str
) -> jax.stages.Lowered:
    """The program of a donated step."""
    # Where optax's Newton–Schulz meets sharded axes, types would not let it.
    auto = " on Auto axes" in contender or contender.startswith("optax.")
    kinds = (AxisType.Auto if auto else AxisType.Explicit,) * devices.ndim
    mesh = Mesh(devices, tuple(axes), axis_types=kinds)
    numbers = {name: leaf.numbers for name, leaf in leaves.items()}
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    told = specs if contender == ON_AUTO_AXES else None
    # Described GPUs do not say in which node they are.
    slow = ("dcn",) if "dcn" in mesh.axis_names else None
    optimizer = contenders(numbers, None, told, slow)[contender.split(" on ")[0]]
    params = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, jnp.float32, sharding=NamedSharding(mesh, leaf.spec)
        )
        for name, leaf in leaves.items()
    }
    shardings = state_shardings(optimizer, params)
    state = jax.tree.map(
        lambda x, to: x.update(sharding=to),
        jax.eval_shape(optimizer.init, params),
        shardings,
    )
    jitted = jax.jit(
        step_of(optimizer),
        donate_argnums=(0, 1),
        out_shardings=(jax.tree.map(lambda p: p.sharding, params), shardings),
    )
    with jax.set_mesh(mesh):
        return jitted.lower(params, state, params)


def measure(
    name: str, contender: str, target: Target, options: Options
) -> tuple[str, Found]:
    """A row of the table: what its case is called, and its figures."""
    case = CASES[name]
    title, leaves = case.name, case.leaves
    if options.layers is not None:
        leaves = first(options.layers, leaves)
        title = f"{title}, {options.layers} layers"
    began = time.perf_counter()
    module = lowered(leaves, case.mesh, target.devices, contender)
    halfway = time.perf_counter()
    program = module.compile(compiler_options=dict(options.compiler_options))
    ended = time.perf_counter()
    text = program.as_text() or ""
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{name}.{contender}.txt").write_text(text)
    return title, Found(
        cost=hlo_cost.of(text),
        exposed=overlap.exposed_bytes(text),
        crossing=crossings.of(text, target.regions),
        memory=program.memory_analysis(),
        tracing=halfway - began,
        compilation=ended - halfway,
    )


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(
    options: Options, find_target: Callable[[Case, str], Target] = target_of
) -> None:
    """Prints the table."""
    if options.platform == "gpu":  # Its own backend is the CPU's: no GPU is looked for.
        jax.config.update("jax_platforms", "cpu")
    print(line(["case", "optimizer", *COLUMNS]))
    print(line(["---"] * 2 + ["--:"] * len(COLUMNS)))
    has = [name for name in CASES if options.platform == "gpu" or CASES[name].topology]
    for name in options.cases or has:
        target = find_target(CASES[name], options.platform)  # Loads the compiler.
        for contender in options.contenders:
            title, found = measure(name, contender, target, options)
            figures = [figure(found) for figure in COLUMNS.values()]
            cells = ["–" if math.isnan(x) else f"{x:.4g}" for x in figures]
            print(line([title, contender, *cells]), flush=True)


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    own = {**COMPILER_OPTIONS[chosen.platform], **chosen.compiler_options}
    main(dataclasses.replace(chosen, compiler_options=own))
