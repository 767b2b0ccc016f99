"""A step compiled for TPUs or GPUs that this machine does not have.

    python -m examples.benchmarks.ahead_of_time                    # make bench-tpu
    python -m examples.benchmarks.ahead_of_time --platform gpu     # make bench-gpu
    python -m examples.benchmarks.ahead_of_time --cases a c        # some; a minute each
    python -m examples.benchmarks.ahead_of_time --cases k l        # between slices, nodes
    python -m examples.benchmarks.ahead_of_time --layers 2         # of each model
    python -m examples.benchmarks.ahead_of_time --dump hlo         # compiled text, too
    python -m examples.benchmarks.ahead_of_time --topology v5p:4x4x4 --recipe 125m-orscale

It prints a row for each case and optimizer. Nothing is run, no data is read and no array
is made: the figures are the compiler's own, for one device and one step. See
:mod:`examples.benchmarks.hlo_cost` for what they count. Of GPUs XLA estimates no cycles,
and without one it takes its default kernels.

A case is a step of the optimizer alone: parameters, gradients and state are float32,
products are bfloat16 on TPUs and float16 on GPUs. With ``--topology`` it is the whole
training step of `examples.pretrain`, whose options are then the others.

On TPUs, kernels that are alike are in a program once, to be called. The compiler's own
default is to repeat them: ``--compiler-options xla_tpu_enable_deduplicated_calls AUTO``.
``--compiler-options xla_tpu_enable_async_all_to_all true`` lets exchanges run beside
products.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from examples.benchmarks import hlo_cost, topologies
from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.models import (
    Leaves,
    experts,
    first,
    gpt2,
    layers,
    matrix,
    moonlight,
    of_shapes,
    placed,
    scanned_gpt2,
    tinyllama,
)
from examples.benchmarks.shapes import CASES as SHAPES_OF, copies
from examples.pretrain.config import Config, accumulation
from examples.pretrain.errors import UsageError, exit_code_of
from examples.pretrain.loading import part_of_process
from examples.pretrain.meshes import batch_sharding, batch_shards, in_effect, make_mesh
from examples.pretrain.optimizers import find_optimizer
from examples.pretrain.recipes import parse
from examples.pretrain.setup import set_up
from examples.pretrain.step import compiled_step
from examples.pretrain.tasks import make_task
from orscale_jax import state_shardings
from orscale_jax.distributed.mesh import slices_of_axes
from orscale_jax.newton_schulz.hardware import H100, TPU_V5P, Hardware

MIB, GIB = 2**20, 2**30
ON_AUTO_AXES = "orscale on Auto axes"
WITHOUT_SHARDINGS = "orscale on Auto axes, without param_shardings"
CONTENDERS = ("orscale", ON_AUTO_AXES, WITHOUT_SHARDINGS, "muon", "optax.contrib.muon")
# Parts of a training step, as `examples.pretrain.step` names what it traces.
OPTIMIZER = "optimizer"
SCOPES = ("gradient", OPTIMIZER)
# AdamW's step, by the model: the products of a training step alone, 6 FLOP for each token
# and entry of a matrix that it meets, 6 of Moonlight's 64 experts. Each device has a
# sequence of 8192 tokens, and 60 % of the rate of large products: 39 % of the peak of a
# v5p, 36 % of that of an H100.
TOKENS, UTILIZATION, ACTIVE = 8192, 0.6, 6 / 64


class Case(NamedTuple):
    """A model on a mesh."""

    mesh: Mapping[str, int]  # "dcn" leads to other slices, or nodes of GPUs.
    leaves: Leaves
    name: str
    topology: str | None = None  # The TPUs, of each slice. None: for GPUs alone.


def _many(spec: P, count: int = 16) -> Leaves:
    """Matrices of 2048×8192."""
    return layers(count, {"w": matrix(2048, 8192, spec)})


FSDP, TWO = P("fsdp", None), {"fsdp2": 8, "fsdp": 64}
SHAPES = {"wide": (2048, 8192), "square": (4096, 4096), "narrow": (2048, 2816)}
CASES = {
    "a": Case({"fsdp": 64}, _many(FSDP, 64), "64 matrices of 2048×8192, FSDP",
              "v5p:4x4x4"),
    "b": Case({"fsdp": 64}, moonlight({"fsdp": 64}),
              "Moonlight 16B, FSDP and experts, 64 devices", "v5p:4x4x4"),
    "c": Case({"data": 8}, gpt2(), "GPT-2 124M, replicated", "v5e:2x4"),
    "d": Case({"fsdp": 8, "tensor": 8}, tinyllama(), "TinyLlama 1.1B, FSDP × tensor",
              "v5p:4x4x4"),
    "e": Case(TWO, moonlight(TWO), "Moonlight 16B, FSDP × experts, 512 devices",
              "v5p:8x8x8"),
    "f": Case({}, gpt2(), "GPT-2 124M, one device"),
    "g": Case({}, layers(500, {"w": matrix(32, 64, P())}),
              "500 matrices of 32×64, one device"),
    "h": Case({"fsdp": 64}, {"w": experts(64, 2048, 8192, P(None, "fsdp", None))},
              "64 matrices of 2048×8192 in one array, FSDP", "v5p:4x4x4"),
    "i": Case({"fsdp": 8},
              layers(8, {name: matrix(*shape, FSDP) for name, shape in SHAPES.items()}),
              "8 each of 2048×8192, 4096×4096 and 2048×2816, FSDP", "v5p:2x2x2"),
    **{
        letter: Case({"dcn": 2, "fsdp": 8}, leaves,
                     f"16 matrices of 2048×8192, {name}", "v5p:2x2x2")
        for letter, name, leaves in (
            ("k", "sharded within, replicated across", _many(FSDP)),
            ("l", "sharded within and across", _many(P(("dcn", "fsdp"), None))),
            ("m", "replicated", _many(P())),
            ("n", "layers across, sharded within",
             {"w": experts(16, 2048, 8192, P("dcn", "fsdp", None))}),
            ("o", "as 32 experts over all devices",
             {"w": experts(32, 2048, 8192, P(("dcn", "fsdp"), None, None))}),
        )
    },
    "p": Case({"dcn": 2, "fsdp": 64}, moonlight({"fsdp": 64}),
              "Moonlight 16B, sharded within, replicated across", "v5p:4x4x4"),
    "q": Case({}, scanned_gpt2(), "GPT-2 124M, layers scanned, one device"),
    "r": Case({"fsdp": 64},
              {name: experts(48, 2048, 8192, P(None, "fsdp", None)) for name in "abc"},
              "144 matrices of 2048×8192 in three arrays, FSDP", "v5p:4x4x4"),
    **{
        letter: Case({}, of_shapes(shapes), f"{name}, one device")
        for letter, name, shapes in (
            ("s", "4 blocks of a 1.1B model", copies(4, SHAPES_OF["1.1B"])),
            ("t", "64 experts of 2048×1408", SHAPES_OF["experts"]),
            ("u", "DavidNet", SHAPES_OF["davidnet"]),
        )
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    platform: Literal["tpu", "gpu"] = "tpu"
    """v5p and v5e chips, or H100s in nodes of eight."""
    cases: tuple[str, ...] = ()
    """Of a to u; all that the platform has without it."""
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


class Found(NamedTuple):
    """What is known of a program, for one device."""

    text: str  # Of the compiled program.
    cost: hlo_cost.Cost
    optimizer: hlo_cost.Cost  # Of a training step.
    crossing: hlo_cost.Crossings
    exposed: float  # Seconds, by the rates of links and products.
    memory: Any  # As of `compiled.memory_analysis()`.
    available: int  # Bytes that the device has, where they are compared.
    tracing: float  # Seconds; for a training step those of compiling are among them.
    compilation: float
    kernels: Sequence[hlo_cost.Kernel] = ()  # Of a GPU.
    adamw: float = math.nan  # Seconds of its training step, by the model.

    @property
    def peak(self) -> int:
        """Bytes of everything; what is donated is not counted twice."""
        memory = self.memory
        made = memory.output_size_in_bytes - memory.alias_size_in_bytes
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        return held + made + memory.generated_code_size_in_bytes


Columns = Mapping[str, Callable[[Found], float]]  # NaN is what the compiler does not say.
OF_A_STEP: Columns = {
    "Mcycles": lambda found: found.cost.cycles / 1e6 or math.nan,
    "collectives, MB": lambda found: found.cost.collective_bytes / 1e6,
    "of these exposed, MB": lambda found: found.cost.exposed_bytes / 1e6,
    "exposed, ms": lambda found: 1e3 * found.exposed,
    "of AdamW's step, %": lambda found: percent(found.exposed, found.adamw),
    "of these in loops, MB": lambda found: found.cost.looped_bytes / 1e6,
    "from other slices, MB": lambda found: max(found.crossing.received.values()) / 1e6,
    "messages": lambda found: max(found.crossing.messages.values()),
    "GFLOP": lambda found: found.cost.flops / 1e9,
    "temporaries, MiB": lambda found: found.memory.temp_size_in_bytes / MIB,
    "kernels": lambda found: found.cost.kernels,
    "read, MB": lambda found: found.cost.traffic.read / 1e6,
    "written, MB": lambda found: found.cost.traffic.written / 1e6,
    "modelled, ms": lambda found: (
        1e3 * sum(each.times * each.seconds for each in found.kernels) or math.nan
    ),
    "products": lambda found: sum(each.times for each in found.kernels if each.flops),
    "of these that add": lambda found: sum(
        each.times for each in found.kernels if each.adds
    ),
    "arguments, MiB": lambda found: found.memory.argument_size_in_bytes / MIB,
    "program, MiB": lambda found: (
        found.memory.generated_code_size_in_bytes / MIB or math.nan
    ),
    "traced and lowered in, s": lambda found: found.tracing,
    "compiled in, s": lambda found: found.compilation,
}
OF_TRAINING: Columns = {
    "arguments, GiB": lambda found: found.memory.argument_size_in_bytes / GIB,
    "temporaries, GiB": lambda found: found.memory.temp_size_in_bytes / GIB,
    "all, % of the memory": lambda found: percent(found.peak, found.available),
    "Mcycles": lambda found: found.cost.cycles / 1e6 or math.nan,
    "optimizer's cycles, %": lambda found: percent(
        found.optimizer.cycles, found.cost.cycles
    ),
    "TFLOP": lambda found: found.cost.flops / 1e12,
    "optimizer's FLOP, %": lambda found: percent(found.optimizer.flops, found.cost.flops),
    "collectives, GB": lambda found: found.cost.collective_bytes / 1e9,
    "optimizer's, GB": lambda found: found.optimizer.collective_bytes / 1e9,
    "compiled in, s": lambda found: found.tracing + found.compilation,
}


class Target(NamedTuple):
    """Devices to compile for."""

    devices: np.ndarray  # In the shape of a mesh, or all of them.
    regions: Mapping[int, int]  # The slice or node of each by its number.
    memory: int = 0  # Bytes of each.
    compiler_options: Mapping[str, str] = {}


def target_of(case: Case, platform: str) -> Target:
    """The devices of a case. Of GPUs, "dcn" leads to four nodes of eight."""
    shape = tuple(case.mesh.values())
    if platform == "gpu":
        nodes = {"dcn": 4, "fsdp": 8} if "dcn" in case.mesh else {}
        shape = tuple({**case.mesh, **nodes}.values())
        gpus = topologies.h100s(math.prod(shape))
        regions = {i: device.process_index for i, device in enumerate(gpus)}
        return Target(np.array(gpus).reshape(shape), regions)
    if case.topology is None:
        raise ValueError(f"{case.name} is a case for GPUs: pass --platform gpu")
    if "dcn" in case.mesh:
        tpus = topologies.tpus(case.topology, slices=case.mesh["dcn"])
        slices = {device.id: device.slice_index for device in tpus}
        return Target(np.array(tpus).reshape(shape), slices)
    chips = topologies.tpus(case.topology)
    mesh = mesh_utils.create_device_mesh(shape, chips, allow_split_physical_axes=True)
    return Target(mesh, dict.fromkeys(range(mesh.size), 0))


def lowered(
    leaves: Leaves, axes: Sequence[str], target: Target, contender: str
) -> jax.stages.Lowered:
    """The program of a donated step."""
    # Where optax's Newton–Schulz meets sharded axes, types would not let it.
    auto = " on Auto axes" in contender or contender.startswith("optax.")
    kinds = (AxisType.Auto if auto else AxisType.Explicit,) * len(axes)
    mesh = Mesh(target.devices, tuple(axes), axis_types=kinds)
    numbers = {name: leaf.numbers for name, leaf in leaves.items()}
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    told = specs if contender == ON_AUTO_AXES else None
    # Described GPUs do not say in which node they are.
    regions = np.vectorize(lambda device: target.regions[device.id])(target.devices)
    slow = slices_of_axes(axes, regions)
    optimizer = contenders(numbers, None, told, slow)[contender.split(" on ")[0]]
    params = placed(leaves, mesh, "float32")
    shardings = state_shardings(optimizer, params)
    state = jax.tree.map(
        lambda x, to: x.update(sharding=to),
        jax.eval_shape(optimizer.init, params),
        shardings,
    )
    if contender == WITHOUT_SHARDINGS:  # One that has seen no parameters.
        optimizer = contenders(numbers, None, None, slow)["orscale"]
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
    module = lowered(leaves, tuple(case.mesh), target, contender)
    halfway = time.perf_counter()
    program = module.compile(compiler_options=dict(options.compiler_options))
    ended = time.perf_counter()
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{name}.{contender}.txt").write_text(program.as_text() or "")
    met = sum(
        math.prod(leaf.shape) * (ACTIVE if ".experts." in label else 1)
        for label, leaf in leaves.items()
        if leaf.numbers is not None
    )
    rate = UTILIZATION * hardware_of(target).flops_per_second
    found = found_of(program, target, halfway - began, ended - halfway)
    return title, found._replace(adamw=6 * met * TOKENS / rate)


def hardware_of(target: Target) -> Hardware:
    """The rates by which its devices are modelled: of any TPU, those of a v5p."""
    return TPU_V5P if target.devices.flat[0].platform == "tpu" else H100


def trained(config: Config, optimizer: str, target: Target) -> Found:
    """The training step with an optimizer.

    Raises:
      UsageError: If the devices have not enough memory.
    """
    mesh = make_mesh(config.mesh, list(target.devices))
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
    return found_of(program, target, time.perf_counter() - began, 0.0)


def found_of(
    program: jax.stages.Compiled, target: Target, tracing: float, compilation: float
) -> Found:
    text = program.as_text() or ""
    cost = hlo_cost.of(text)
    return Found(
        text=text,
        cost=cost,
        kernels=[] if hardware_of(target) is TPU_V5P else [*hlo_cost.kernels(text)],
        optimizer=hlo_cost.by_scope(text, SCOPES)[OPTIMIZER],
        crossing=hlo_cost.crossings(text, target.regions),
        exposed=hlo_cost.exposed_seconds(cost, target.regions, hardware_of(target)),
        memory=program.memory_analysis(),
        available=target.memory,
        tracing=tracing,
        compilation=compilation,
    )


def find_target(topology: str) -> Target:
    """The devices of a topology: v5p:4x4x4 and the like, or h100:8.

    Raises:
      UsageError: If there is none, or what compiles for it is not installed.
    """
    kind, _, size = topology.partition(":")
    is_gpu = kind == "h100" and size.isdecimal()
    if not is_gpu and kind not in topologies.TPU_MEMORY:
        raise UsageError(
            f"--topology {topology} is unknown. Choose h100 and a number, as h100:8, or "
            f"TPUs of {', '.join(topologies.TPU_MEMORY)} and their shape, as v5p:4x4x4 "
            "or v5e:2x4."
        )
    try:
        devices = topologies.h100s(int(size)) if is_gpu else topologies.tpus(topology)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--topology {topology}: {error} (docs/sharding.md says what to install.)"
        ) from error
    memory = topologies.H100_MEMORY if is_gpu else topologies.TPU_MEMORY[kind]
    options = topologies.GPU_COMPILER_OPTIONS if is_gpu else {}
    regions = dict.fromkeys(range(len(devices)), 0)
    return Target(np.array(devices), regions, memory, options)


def percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else math.nan


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def show(
    names: Sequence[str], columns: Columns, found: Iterable[tuple[Any, ...]]
) -> None:
    """Prints a table: names, and figures of what is found."""
    for index, (*cells, one) in enumerate(found):
        if not index:
            print(line([*names, *columns]))
            print(line(["---"] * len(names) + ["--:"] * len(columns)))
        figures = [figure(one) for figure in columns.values()]
        cells += ["–" if math.isnan(x) else f"{x:.4g}" for x in figures]
        print(line(cells), flush=True)


def step_table(
    options: Options, target_of: Callable[[Case, str], Target] = target_of
) -> None:
    """Prints a row for each case and optimizer."""
    if options.platform == "gpu":  # Its own backend is the CPU's: no GPU is looked for.
        jax.config.update("jax_platforms", "cpu")
    has = [name for name in CASES if options.platform == "gpu" or CASES[name].topology]

    def rows() -> Iterator[tuple[str, str, Found]]:
        for name in options.cases or has:
            target = target_of(CASES[name], options.platform)  # Loads the compiler.
            for contender in options.contenders:
                title, found = measure(name, contender, target, options)
                yield title, contender, found

    show(["case", "optimizer"], OF_A_STEP, rows())


def training_table(config: Config, topology: str) -> None:
    """Prints a row for each optimizer of a configuration.

    Raises:
      UsageError: If there is no such topology, or the step does not fit.
    """
    # Its own backend is the CPU's: devices that are there are left to others.
    jax.config.update("jax_platforms", "cpu")
    target = find_target(topology)
    found = (
        (find_optimizer(name).label, trained(config, name, target))
        for name in config.optimizer
    )
    show(["optimizer"], OF_TRAINING, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--topology")
    chosen, others = parser.parse_known_args(arguments)
    if chosen.topology is not None:
        prog = (
            "python -m examples.benchmarks.ahead_of_time --topology NAME [--recipe NAME]"
        )
        return exit_code_of(lambda: training_table(parse(others, prog), chosen.topology))
    options = tyro.cli(Options, args=others, description=__doc__)
    own = {**COMPILER_OPTIONS[options.platform], **options.compiler_options}
    step_table(dataclasses.replace(options, compiler_options=own))
    return 0


if __name__ == "__main__":
    sys.exit(main())
