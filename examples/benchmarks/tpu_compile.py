"""One step of the optimizers, compiled for real TPU topologies; it needs no TPU.

    python -m examples.benchmarks.tpu_compile               # make bench-tpu: every case
    python -m examples.benchmarks.tpu_compile --cases a c   # some
    python -m examples.benchmarks.tpu_compile --layers 2    # of each model, the first two
    python -m examples.benchmarks.tpu_compile --dump hlo    # also the compiled text

Nothing is run: the figures are the compiler's own, for one device and one step. Cycles
are what it estimates for its kernels and leave out the time in collectives, whose bytes
are listed instead: see :mod:`examples.benchmarks.hlo_cost`. Parameters, gradients and
state are float32.
"""

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# Read when jax is imported and libtpu loaded, which would otherwise ask Google's servers
# what this machine is, and refuse to be loaded twice. Of the types any will do.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import muon, orscale, state_shardings

NS_STEPS = 5
CONTENDERS = ("orscale", "orscale on Auto axes", "muon", "optax.contrib.muon")
# Where optax's Newton–Schulz meets sharded axes, types would not let it.
ON_AUTO_AXES = {"orscale on Auto axes", "optax.contrib.muon"}


class Leaf(NamedTuple):
    """A parameter; without numbers it takes AdamW."""

    shape: tuple[int, ...]
    spec: P = P()
    numbers: Dims | None = None


Leaves = Mapping[str, Leaf]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh of a topology."""

    topology: str
    mesh: Mapping[str, int]
    leaves: Leaves
    name: str


def matrix(rows: int, columns: int, spec: P) -> Leaf:
    return Leaf((rows, columns), spec, Dims(0, 1))


def experts(count: int, rows: int, columns: int, spec: P) -> Leaf:
    return Leaf((count, rows, columns), spec, Dims(1, 2))


def layers(count: int, block: Leaves) -> Leaves:
    return {f"{i}.{name}": leaf for i in range(count) for name, leaf in block.items()}


def moonlight(mesh: Mapping[str, int]) -> Leaves:
    """Moonlight-16B-A3B, experts over the last axis of the mesh.

    Matrices are sharded by rows over all devices, or by columns where rows do not divide;
    experts also by rows over the other axes.
    """
    *others, expert_axis = mesh
    everywhere = tuple(mesh)
    devices = math.prod(mesh.values())
    hidden, ffn, latent, heads = 2048, 1408, 512, 16

    def sharded(rows: int, columns: int) -> Leaf:
        by_rows = rows % devices == 0
        return matrix(
            rows, columns, P(everywhere, None) if by_rows else P(None, everywhere)
        )

    def mlp(name: str, width: int) -> Leaves:
        return {
            f"{name}.gate": sharded(hidden, width),
            f"{name}.up": sharded(hidden, width),
            f"{name}.down": sharded(width, hidden),
        }

    attention: Leaves = {
        "q_proj": sharded(hidden, heads * 192),
        "kv_a_proj": sharded(hidden, latent + 64),
        "kv_a_norm": Leaf((latent,)),
        "kv_b_proj": sharded(latent, heads * 256),
        "o_proj": sharded(heads * 128, hidden),
        "input_norm": Leaf((hidden,)),
        "post_norm": Leaf((hidden,)),
    }
    spec = P(expert_axis, tuple(others) or None, None)
    mixture: Leaves = {
        "router": sharded(hidden, 64)._replace(numbers=None),
        "experts.gate": experts(64, hidden, ffn, spec),
        "experts.up": experts(64, hidden, ffn, spec),
        "experts.down": experts(64, ffn, hidden, spec),
    }
    return {
        "embedding": sharded(163840, hidden)._replace(numbers=None),
        "head": sharded(hidden, 163840)._replace(numbers=None),
        "norm": Leaf((hidden,)),
        **layers(27, attention),
        **mlp("0.mlp", 11264),
        **{
            f"{i}.{name}": leaf
            for i in range(1, 27)
            for name, leaf in ({**mixture, **mlp("shared", 2 * ffn)}).items()
        },
    }


def gpt2() -> Leaves:
    """GPT-2 124M, query, key and value in one matrix, on every device."""
    norms = ("norm1", "norm2")
    biases = {
        "qkv": 2304,
        "out": 768,
        "up": 3072,
        "down": 768,
        "norm1": 768,
        "norm2": 768,
    }
    return {
        "wte": Leaf((50257, 768)),
        "wpe": Leaf((1024, 768)),
        "norm.scale": Leaf((768,)),
        "norm.bias": Leaf((768,)),
        **layers(
            12,
            {
                "qkv": matrix(768, 2304, P()),
                "out": matrix(768, 768, P()),
                "up": matrix(768, 3072, P()),
                "down": matrix(3072, 768, P()),
                **{f"{name}.scale": Leaf((768,)) for name in norms},
                **{f"{name}.bias": Leaf((size,)) for name, size in biases.items()},
            },
        ),
    }


def tinyllama() -> Leaves:
    """TinyLlama 1.1B as Megatron shards it, its other axis over "fsdp"."""
    columns, rows = P("fsdp", "tensor"), P("tensor", "fsdp")
    return {
        "embedding": Leaf((32000, 2048), rows),
        "head": Leaf((2048, 32000), columns),
        "norm": Leaf((2048,)),
        **layers(
            22,
            {
                "query": matrix(2048, 2048, columns),
                "key": matrix(2048, 256, columns),
                "value": matrix(2048, 256, columns),
                "out": matrix(2048, 2048, rows),
                "gate": matrix(2048, 5632, columns),
                "up": matrix(2048, 5632, columns),
                "down": matrix(5632, 2048, rows),
                "norm1": Leaf((2048,)),
                "norm2": Leaf((2048,)),
            },
        ),
    }


def first(count: int, leaves: Leaves) -> Leaves:
    """What belongs to the first layers, or to none."""
    numbers = {name: name.split(".")[0] for name in leaves}
    return {
        name: leaf
        for name, leaf in leaves.items()
        if not numbers[name].isdigit() or int(numbers[name]) < count
    }


CASES = {
    "a": Case(
        "v5p:4x4x4",
        {"fsdp": 64},
        layers(64, {"w": matrix(2048, 8192, P("fsdp", None))}),
        "64 matrices of 2048×8192, FSDP",
    ),
    "b": Case(
        "v5p:4x4x4",
        {"fsdp": 64},
        moonlight({"fsdp": 64}),
        "Moonlight 16B, FSDP and experts",
    ),
    "c": Case("v5e:2x4", {"data": 8}, gpt2(), "GPT-2 124M, replicated"),
    "d": Case(
        "v5p:4x4x4",
        {"fsdp": 8, "tensor": 8},
        tinyllama(),
        "TinyLlama 1.1B, FSDP × tensor",
    ),
    "e": Case(
        "v5p:8x8x8",
        {"fsdp2": 8, "fsdp": 64},
        moonlight({"fsdp2": 8, "fsdp": 64}),
        "Moonlight 16B, FSDP × experts",
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    cases: tuple[str, ...] = tuple(CASES)
    """Of a, b, c, d and e."""
    contenders: tuple[str, ...] = CONTENDERS
    """Of orscale, orscale on Auto axes, muon and optax.contrib.muon."""
    layers: int | None = None
    """How many of a model's first layers; all without it."""
    dump: pathlib.Path | None = None
    """Where the compiled text goes, a file for each case and contender."""


def contenders(leaves: Leaves) -> dict[str, optax.GradientTransformation]:
    """All multiply in bfloat16: what is float32 a TPU rounds for its products anyway."""
    numbers = {name: leaf.numbers for name, leaf in leaves.items()}
    ours: dict[str, Any] = {
        "weight_dimension_numbers": numbers,
        "ns_steps": NS_STEPS,
        "ns_dtype": jnp.bfloat16,
    }
    return {
        "orscale": orscale(1e-3, **ours),
        "orscale on Auto axes": orscale(1e-3, **ours),
        "muon": muon(1e-3, **ours),
        "optax.contrib.muon": optax.contrib.muon(
            1e-3,
            ns_steps=NS_STEPS,
            weight_decay=0.1,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=numbers,
        ),
    }


def mesh_of(case: Case, kind: AxisType) -> Mesh:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
    devices = mesh_utils.create_device_mesh(
        tuple(case.mesh.values()), topology.devices, allow_split_physical_axes=True
    )
    return Mesh(devices, tuple(case.mesh), axis_types=(kind,) * len(case.mesh))


def placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def compiled(case: Case, contender: str) -> jax.stages.Compiled:
    auto = contender in ON_AUTO_AXES
    mesh = mesh_of(case, AxisType.Auto if auto else AxisType.Explicit)
    optimizer = contenders(case.leaves)[contender]
    params = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, jnp.float32, sharding=NamedSharding(mesh, leaf.spec)
        )
        for name, leaf in case.leaves.items()
    }
    shardings = state_shardings(optimizer, params)
    state = placed(jax.eval_shape(optimizer.init, params), shardings)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(jax.tree.map(lambda p: p.sharding, params), shardings),
    )
    with jax.set_mesh(mesh):
        return jitted.lower(params, state, params).compile()


HEAD = [
    "case",
    "optimizer",
    "Mcycles",
    "collectives, MB",
    "of these in loops, MB",
    "GFLOP",
    "temporaries, MiB",
    "arguments, MiB",
    "compiled in, s",
]


def measure(name: str, contender: str, options: Options) -> list[str]:
    """A row of the table."""
    case = CASES[name]
    if options.layers is not None:
        leaves = first(options.layers, case.leaves)
        title = f"{case.name}, {options.layers} layers"
        case = dataclasses.replace(case, leaves=leaves, name=title)
    start = time.perf_counter()
    program = compiled(case, contender)
    seconds = time.perf_counter() - start
    text = program.as_text() or ""
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
        (options.dump / f"{name}.{contender}.txt").write_text(text)
    cost = hlo_cost.of(text)
    memory: Any = program.memory_analysis()
    return [
        case.name,
        contender,
        f"{cost.cycles / 1e6:.4g}",
        f"{cost.collective_bytes / 1e6:.4g}",
        f"{cost.looped_bytes / 1e6:.4g}",
        f"{cost.flops / 1e9:.4g}",
        f"{memory.temp_size_in_bytes / 2**20:.4g}",
        f"{memory.argument_size_in_bytes / 2**20:.4g}",
        f"{seconds:.3g}",
    ]


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(options: Options) -> None:
    print(line(HEAD))
    print(line(["---"] * 2 + ["--:"] * (len(HEAD) - 2)))
    for case in options.cases:
        for contender in options.contenders:
            print(line(measure(case, contender, options)), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
