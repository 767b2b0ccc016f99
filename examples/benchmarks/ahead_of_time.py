"""One step of the optimizers, compiled for devices that this machine does not have.

Nothing is run: the figures are the compiler's own, for one device and one step.
Parameters, gradients and state are float32. :mod:`examples.benchmarks.tpu_compile` and
:mod:`examples.benchmarks.gpu_compile` say for which devices.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from examples.benchmarks import hlo_cost, overlap
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
    """A model on a mesh."""

    mesh: Mapping[str, int]
    leaves: Leaves
    name: str


CASES = {
    "a": Case(
        {"fsdp": 64},
        layers(64, {"w": matrix(2048, 8192, P("fsdp", None))}),
        "64 matrices of 2048×8192, FSDP",
    ),
    "b": Case(
        {"fsdp": 64},
        moonlight({"fsdp": 64}),
        "Moonlight 16B, FSDP and experts, 64 devices",
    ),
    "c": Case({"data": 8}, gpt2(), "GPT-2 124M, replicated"),
    "d": Case({"fsdp": 8, "tensor": 8}, tinyllama(), "TinyLlama 1.1B, FSDP × tensor"),
    "e": Case(
        {"fsdp2": 8, "fsdp": 64},
        moonlight({"fsdp2": 8, "fsdp": 64}),
        "Moonlight 16B, FSDP × experts, 512 devices",
    ),
    "f": Case({}, gpt2(), "GPT-2 124M, one device"),
    "g": Case(
        {}, layers(500, {"w": matrix(32, 64, P())}), "500 matrices of 32×64, one device"
    ),
    "h": Case(
        {"fsdp": 64},
        {"w": experts(64, 2048, 8192, P(None, "fsdp", None))},
        "64 matrices of 2048×8192 in one array, FSDP",
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
    ),
}
# Of a case, by its letter: an array of devices in the shape of its mesh.
DevicesOf: TypeAlias = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    cases: tuple[str, ...] = tuple(CASES)
    """Of a to i."""
    contenders: tuple[str, ...] = CONTENDERS
    """Of these, and optax.adamw."""
    layers: int | None = None
    """How many of a model's first layers; all without it."""
    dump: pathlib.Path | None = None
    """Where the compiled text goes, a file for each case and contender."""
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """As of jax.jit: names and values."""


class Found(NamedTuple):
    """What is known of a program."""

    cost: hlo_cost.Cost
    exposed: int
    memory: Any
    tracing: float
    compilation: float


COLUMNS: Mapping[str, Callable[[Found], float]] = {
    "Mcycles": lambda found: found.cost.cycles / 1e6,
    "collectives, MB": lambda found: found.cost.collective_bytes / 1e6,
    "of these exposed, MB": lambda found: found.exposed / 1e6,
    "of these in loops, MB": lambda found: found.cost.looped_bytes / 1e6,
    "GFLOP": lambda found: found.cost.flops / 1e9,
    "temporaries, MiB": lambda found: found.memory.temp_size_in_bytes / 2**20,
    "kernels": lambda found: found.cost.kernels,
    "arguments, MiB": lambda found: found.memory.argument_size_in_bytes / 2**20,
    "program, MiB": lambda found: found.memory.generated_code_size_in_bytes / 2**20,
    "traced and lowered in, s": lambda found: found.tracing,
    "compiled in, s": lambda found: found.compilation,
}


def lowered(
    leaves: Leaves,
    axes: Iterable[str],
    devices: np.ndarray,
    contender: str,
    slow_axes: tuple[str, ...] | None = None,
) -> jax.stages.Lowered:
    """The program of a donated step. All multiply in bfloat16.

    A TPU rounds what is float32 for its products anyway. ``slow_axes`` are those of
    orscale: described GPUs do not say in which node they are.
    """
    # Where optax's Newton–Schulz meets sharded axes, types would not let it.
    auto = " on Auto axes" in contender or contender.startswith("optax.")
    kinds = (AxisType.Auto if auto else AxisType.Explicit,) * devices.ndim
    mesh = Mesh(devices, tuple(axes), axis_types=kinds)
    numbers = {name: leaf.numbers for name, leaf in leaves.items()}
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    told = specs if contender == ON_AUTO_AXES else None
    known = contenders(numbers, None, told, slow_axes)
    optimizer = known[contender.split(" on ")[0]]
    params = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, jnp.float32, sharding=NamedSharding(mesh, leaf.spec)
        )
        for name, leaf in leaves.items()
    }
    shardings = state_shardings(optimizer, params)
    state = placed(jax.eval_shape(optimizer.init, params), shardings)

    jitted = jax.jit(
        step_of(optimizer),
        donate_argnums=(0, 1),
        out_shardings=(jax.tree.map(lambda p: p.sharding, params), shardings),
    )
    with jax.set_mesh(mesh):
        return jitted.lower(params, state, params)


def placed(tree: Any, shardings: Any) -> Any:
    """A tree of abstract arrays with shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def measure(
    name: str, contender: str, devices_of: DevicesOf, options: Options
) -> tuple[str, Found]:
    """A row of the table: what its case is called, and its figures."""
    case = CASES[name]
    title, leaves = case.name, case.leaves
    if options.layers is not None:
        leaves = first(options.layers, leaves)
        title = f"{title}, {options.layers} layers"
    devices = devices_of(name)  # The first time, this loads the compiler.
    began = time.perf_counter()
    module = lowered(leaves, case.mesh, devices, contender)
    halfway = time.perf_counter()
    program = module.compile(compiler_options=dict(options.compiler_options))
    ended = time.perf_counter()
    text = program.as_text() or ""
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{name}.{contender}.txt").write_text(text)
    seconds = halfway - began, ended - halfway
    exposed = overlap.exposed_bytes(text)
    return title, Found(hlo_cost.of(text), exposed, program.memory_analysis(), *seconds)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(
    options: Options,
    devices_of: DevicesOf,
    columns: Mapping[str, Callable[[Found], float]] = COLUMNS,
) -> None:
    print(line(["case", "optimizer", *columns]))
    print(line(["---"] * 2 + ["--:"] * len(columns)))
    for name in options.cases:
        for contender in options.contenders:
            title, found = measure(name, contender, devices_of, options)
            cells = [f"{figure(found):.4g}" for figure in columns.values()]
            print(line([title, contender, *cells]), flush=True)
