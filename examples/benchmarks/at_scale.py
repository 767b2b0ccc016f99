"""Plans of large models on clusters of 64 to 16,384 devices, and what a step would cost.

    python -m examples.benchmarks.at_scale
    python -m examples.benchmarks.at_scale --counts 64 1024 --platforms gpu
    python -m examples.benchmarks.at_scale --table docs/data/at_scale.csv --figure docs/at_scale.png

No device is needed and nothing is compiled: the planner of `orscale_jax` plans, and its
operations, bytes and messages are divided by its rates. Two other ways are estimated by the
same rates, without the time of their messages:

- *every device computes all*: what Optax's Muon does where parameters are replicated;
- *collectives in each step*: what XLA's partitioner makes of Optax's Muon under FSDP, by
  the bytes that compiled programs show (``PARTITIONED``).

Operations and exchanges are added: nothing is assumed to run beside anything else. Of the
"transfers, ms" a device waits for "exposed at least, ms": the rest can run beside products,
if the compiler schedules it so.
"""  # noqa: E501

import csv
import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import PartitionSpec as P

from examples import figure_style as style
from examples.benchmarks import models
from examples.benchmarks.ahead_of_time import line
from examples.benchmarks.contenders import NS_STEPS
from orscale_jax.audit.plan import Plan
from orscale_jax.distributed.costs import Bucket, CostModel, ShardedArray, Traffic
from orscale_jax.distributed.exchange import cost_model
from orscale_jax.distributed.mesh import MeshShape, count_devices
from orscale_jax.distributed.plan import plan_buckets
from orscale_jax.newton_schulz import restarts
from orscale_jax.newton_schulz.platforms import PLATFORMS
from orscale_jax.sharding.typed_sharding import axes_of

COUNTS = (64, 256, 1024, 4096, 16384)
# What the partitioner sends in each Newton–Schulz step beside a Gram matrix: how many
# whole matrices, and the bytes of an entry. As 64 matrices of 2048×8192 on 64 devices do,
# in docs/study/measurements.md.
PARTITIONED = {"tpu": (1, 2), "gpu": (2, 4)}
STEP = "a step, ms"
ALL = "every device computes all, ms"
PARTS = "collectives in each step, ms"
TITLES = {"tpu": "v5p, slices of up to 4,096", "gpu": "H100, nodes of 8"}

EXPERTS = P("expert", "fsdp", None)
MODELS: Mapping[str, Callable[[models.Rule], models.Leaves]] = {
    "Moonlight 16B": lambda rule: models.mixture(rule, EXPERTS, models.MOONLIGHT),
    "dense 70B": lambda rule: models.dense(rule, models.LLAMA3_70B),
    "DeepSeek-V3 671B": lambda rule: models.mixture(rule, EXPERTS, models.DEEPSEEK_V3),
    "Kimi K2 1T": lambda rule: models.mixture(rule, EXPERTS, models.KIMI_K2),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan."""

    models: tuple[str, ...] = tuple(MODELS)
    """Of these."""
    platforms: tuple[str, ...] = tuple(TITLES)
    """Slices of v5p, nodes of H100s."""
    counts: tuple[int, ...] = COUNTS
    """Numbers of devices."""
    table: pathlib.Path | None = None
    """Where the table goes, too."""
    figure: pathlib.Path | None = None
    """Where a figure of it goes."""


def mesh_of(platform: str, count: int) -> MeshShape:
    """A mesh of TPUs or GPUs, with the axes that lead to other slices or nodes.

    Slices have at most 4,096 chips, each with a copy of the model. Nodes have 8 GPUs; the
    model is sharded over at most 64 of them, and then replicated.
    """
    if platform == "tpu":
        slices = max(1, count // 4096)
        expert = min(64, count // slices // 4)
        axes = {"dcn": slices, "expert": expert, "fsdp": count // slices // expert}
        return MeshShape(axes, {"dcn": slices})
    expert = min(64, count // 8)
    axes = {"replica": count // 8 // expert, "expert": expert, "fsdp": 8}
    return MeshShape(axes, {name: axes[name] for name in ("replica", "expert")})


def arrays_of(model: str, mesh: MeshShape) -> list[ShardedArray]:
    """The matrices as the planner sees them, sharded over "expert" and "fsdp"."""
    rule = models.over_all({name: mesh.sizes[name] for name in ("expert", "fsdp")})
    return [
        ShardedArray(
            leaf.shape, np.dtype(jnp.bfloat16), axes_of(leaf.spec, len(leaf.shape))
        )
        for leaf in MODELS[model](rule).values()
        if leaf.numbers is not None
    ]


def planned(
    arrays: Sequence[ShardedArray], platform: str, mesh: MeshShape
) -> tuple[Bucket, ...]:
    known = PLATFORMS[platform]
    return plan_buckets(arrays, mesh, known.limits.stack_bytes, cost_model(known))


def received_in_steps(m: int, n: int, platform: str) -> int:
    """The bytes of collectives of one matrix, in all steps."""
    matrices, entry_bytes = PARTITIONED[platform]
    return NS_STEPS * entry_bytes * (matrices * m * n + min(m, n) ** 2)


def exposed_cost(buckets: Sequence[Bucket], cost_model: CostModel) -> int:
    """The cost of transfers that no order of the buckets hides behind products."""
    work = sum(bucket.flops for bucket in buckets)
    sent = [[cost_model.cost(0, way) for way in bucket.ways] for bucket in buckets]
    exceeding = [sum(map(sum, sent)) - work]
    for bucket, ways in zip(buckets, sent, strict=True):  # Only others' hide its own.
        exceeding.append(sum(ways) - (work - bucket.flops))
    # All wait for the first bucket to arrive, and for the last one to return.
    first, last = (
        sorted((ways[at], index) for index, ways in enumerate(sent))[:2] for at in (0, 2)
    )
    ends = [
        before + after
        for (before, i), (after, j) in itertools.product(first, last)
        if i != j or before + after == 0  # What stays can be computed first and last.
    ]
    return max(0, *exceeding, min(ends, default=0))


def row(model: str, platform: str, count: int) -> dict[str, Any]:
    """The figures of a model on so many devices."""
    mesh = mesh_of(platform, count)
    arrays, model_of_cost = arrays_of(model, mesh), cost_model(PLATFORMS[platform])
    began = time.perf_counter()
    plan = planned(arrays, platform, mesh)
    seconds = time.perf_counter() - began
    found = Plan.of(plan, [[""] * len(arrays)] * len(plan), model_of_cost)
    # Of all matrices by the plain iteration, and by the form that one device takes alone;
    # by products that the partitioner divides, with collectives in each of them.
    plain = alone = divided = 0
    received = Traffic()
    for array in arrays:
        *batch, m, n = array.shape
        *of_batch, rows, columns = array.axes
        each = restarts.flops(m, n, NS_STEPS, restarts=NS_STEPS - 1)
        segments = model_of_cost.segments(m, n)
        plain += math.prod(batch) * each
        alone += math.prod(batch) * restarts.flops(m, n, NS_STEPS, restarts=segments - 1)
        held = math.prod(batch) // math.prod(
            count_devices(axes, mesh.sizes) for axes in of_batch
        )
        shards = count_devices((*rows, *columns), mesh.sizes)
        apart = math.prod(mesh.slices.get(name, 1) for name in (*rows, *columns))
        nbytes = held * received_in_steps(m, n, platform)
        divided += held * each // shards
        fast, slow = nbytes * (shards - apart) // shards, nbytes * (apart - 1) // shards
        received = received.plus(Traffic(fast_bytes=fast, slow_bytes=slow))

    def milliseconds(flops: int, traffic: Traffic) -> float:
        return 1e3 * model_of_cost.seconds(model_of_cost.cost(flops, traffic))

    return {
        "model": model,
        "platform": platform,
        "devices": count,
        "planned in, s": seconds,
        "stacks": len(plan),
        "operations, TFLOP": found.flops / 1e12,
        "of an even share": found.flops * count / alone,
        "over fast links, MB": found.fast_bytes / 1e6,
        "over slow links, MB": found.slow_bytes / 1e6,
        STEP: 1e3 * found.seconds,
        "transfers, ms": 1e3 * found.transfer_seconds,
        "exposed at least, ms": 1e3
        * model_of_cost.seconds(exposed_cost(plan, model_of_cost)),
        ALL: milliseconds(plain, Traffic()),
        PARTS: milliseconds(divided, received),
    }


def main(options: Options) -> None:
    rows = []
    for platform in options.platforms:
        for model in options.models:
            for count in options.counts:
                rows.append(row(model, platform, count))
                if len(rows) == 1:
                    print(line(rows[0]))
                    print(line(["---"] * 2 + ["--:"] * (len(rows[0]) - 2)))
                print(line(map(cell, rows[-1].values())), flush=True)
    if options.table is not None:
        with options.table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([rows[0], *(map(cell, row.values()) for row in rows)])
    if options.figure is not None:
        draw(rows, options.figure)


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@style.styled
def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """A panel for each platform; a colour for each model, and a line for each way."""
    platforms = list(dict.fromkeys(row["platform"] for row in rows))
    ways = {STEP: "o-", ALL: ":", PARTS: "--"}
    colors = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION)
    figure, panels = style.new_figure(5, 1, len(platforms), sharey=True)
    for panel, platform in zip(panels[0], platforms, strict=True):
        named = dict.fromkeys(row["model"] for row in rows)
        for model, color in zip(named, colors, strict=False):
            chosen = [x for x in rows if (x["platform"], x["model"]) == (platform, model)]
            counts = [row["devices"] for row in chosen]
            for way, look in ways.items():
                label = model if way == STEP else None
                times = [row[way] for row in chosen]
                panel.loglog(counts, times, look, color=color, label=label, ms=4)
        for way, look in ways.items():
            name = way.removesuffix(", ms")
            panel.plot([], [], look, color=style.GRAY, label=name, ms=4)
        counts = sorted({row["devices"] for row in rows})
        panel.set_xticks(counts, [f"{count:,}" for count in counts])
        panel.minorticks_off()
        panel.grid(axis="y")
        panel.set_xlabel("devices")
        panel.set_title(TITLES[platform])
    panels[0, 0].set_ylabel("ms for all matrices (log scale)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    style.save(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
