"""Plans of large models on clusters of 64 to 16,384 devices, and what a step would cost.

    python -m examples.benchmarks.at_scale
    python -m examples.benchmarks.at_scale --counts 64 1024 --platforms gpu
    python -m examples.benchmarks.at_scale --table docs/data/at_scale.csv --figure docs/at_scale.png

No device is needed and nothing is compiled: the planner of `orscale_jax` plans, and its
operations, bytes and messages are divided by rates. Two other ways are estimated by the
same rates, without the time of their messages:

- *every device computes all*: what Optax's Muon does where parameters are replicated;
- *collectives in each step*: what XLA's partitioner makes of Optax's Muon under FSDP, by
  the bytes that compiled programs show (``PARTITIONED``).

Operations and exchanges are added: nothing is assumed to run beside anything else.
"""  # noqa: E501

import csv
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.axes import Axes

from examples import figure_style as style
from examples.benchmarks.ahead_of_time import line
from examples.benchmarks.contenders import NS_STEPS
from examples.benchmarks.large_models import MODELS
from examples.benchmarks.models import Leaves
from orscale_jax.distributed.buckets import Bucket, ShardedArray, count_devices
from orscale_jax.distributed.planner import plan_buckets
from orscale_jax.sharding.typed_sharding import axes_of

BFLOAT16 = np.dtype(jnp.bfloat16)
STACK_BYTES = {"tpu": 2**24, "gpu": 2**28}
COUNTS = (64, 256, 1024, 4096, 16384)


class Rates(NamedTuple):
    """What one device does in a second: FLOPs, and bytes and messages over its links."""

    flops: float
    fast: float
    slow: float
    fast_messages: float
    slow_messages: float


# Two thirds of a v5p's and an H100's peaks; DCN and InfiniBand for each chip.
RATES = {
    "tpu": Rates(3e14, 1.5e11, 6.25e9, 1 / 1e-6, 1 / 2e-5),
    "gpu": Rates(6e14, 3e11, 4e10, 1 / 2e-6, 1 / 5e-6),
}


class Partitioned(NamedTuple):
    """What the partitioner sends in each Newton–Schulz step, beside a Gram matrix."""

    matrices: int
    entry_bytes: int


# As 64 matrices of 2048×8192 on 64 devices do, in docs/measurements.md.
PARTITIONED = {"tpu": Partitioned(1, 2), "gpu": Partitioned(2, 4)}


class Work(NamedTuple):
    """What the busiest device does in a step."""

    flops: float = 0
    fast: float = 0
    slow: float = 0
    fast_messages: float = 0
    slow_messages: float = 0

    def plus(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def seconds(self, rates: Rates) -> float:
        return sum(work / rate for work, rate in zip(self, rates, strict=True))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices with axes of which some are slow.

    Attributes:
      platform: tpu or gpu.
      axes: The lengths of the axes, slow ones first.
      slow: The axes that lead from one slice or node to another.
    """

    platform: str
    axes: Mapping[str, int]
    slow: frozenset[str]

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def slices(self, axes: Iterable[str]) -> int:
        return math.prod(self.axes[name] for name in axes if name in self.slow)


def v5p(count: int) -> Cluster:
    """Slices of at most 4,096 chips, each with a copy of the model."""
    slices = max(1, count // 4096)
    expert = min(64, count // slices // 4)
    fsdp = count // slices // expert
    axes = {"dcn": slices, "expert": expert, "fsdp": fsdp}
    return Cluster("tpu", axes, frozenset({"dcn"}))


def h100(count: int) -> Cluster:
    """Nodes of 8; the model is sharded over at most 64 of them, and then replicated."""
    nodes = count // 8
    expert = min(64, nodes)
    axes = {"replica": nodes // expert, "expert": expert, "fsdp": 8}
    return Cluster("gpu", axes, frozenset({"replica", "expert"}))


STEP = "a step, ms"
ALL = "every device computes all, ms"
PARTS = "collectives in each step, ms"
STYLES = {STEP: "o-", ALL: ":", PARTS: "--"}
COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION)
TITLES = {"tpu": "v5p, slices of up to 4,096", "gpu": "H100, nodes of 8"}
CLUSTERS = {"tpu": v5p, "gpu": h100}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan."""

    models: tuple[str, ...] = tuple(MODELS)
    """Of these."""
    platforms: tuple[str, ...] = tuple(CLUSTERS)
    """Slices of v5p, nodes of H100s."""
    counts: tuple[int, ...] = COUNTS
    """Numbers of devices."""
    table: pathlib.Path | None = None
    """Where the table goes, too."""
    figure: pathlib.Path | None = None
    """Where a figure of it goes."""


def arrays_of(leaves: Leaves) -> list[ShardedArray]:
    """The matrices as the planner sees them."""
    return [
        ShardedArray(leaf.shape, BFLOAT16, axes_of(leaf.spec, len(leaf.shape)))
        for leaf in leaves.values()
    ]


def work_of(bucket: Bucket, cluster: Cluster) -> Work:
    """What a device does for a bucket: its products, and its exchanges by link."""
    shards, copies = bucket.shards, bucket.group_size // bucket.shards
    slow_shards = cluster.slices(bucket.shard_axes)
    slow_copies = cluster.slices(bucket.replica_axes)
    exchange = Work(
        fast=2 * bucket.nbytes * (shards // slow_shards - 1) / shards,
        slow=2 * bucket.nbytes * (slow_shards - 1) / slow_shards,
        fast_messages=2 * (shards // slow_shards - 1),
        slow_messages=2 * (shards - shards // slow_shards),
    )
    gather = Work(
        fast=bucket.nbytes * slow_copies * (copies // slow_copies - 1),
        slow=bucket.nbytes * (slow_copies - 1),
        fast_messages=copies // slow_copies - 1,
        slow_messages=slow_copies - 1,
    )
    return Work(bucket.flops).plus(exchange).plus(gather).plus(_sums(bucket, cluster))


def _sums(bucket: Bucket, cluster: Cluster) -> Work:
    """The sums of Gram matrices; they are slow if they reach into another slice."""
    if bucket.column_shards == 1:
        return Work()
    unshared = bucket._replace(
        layouts=tuple(part._replace(column_shards=1) for part in bucket.layouts)
    )
    nbytes = bucket.bytes_sent - unshared.bytes_sent
    messages = 2 * (bucket.column_shards - 1) * NS_STEPS
    axes = (*bucket.replica_axes, *bucket.shard_axes)
    within = bucket.group_size // cluster.slices(axes)
    if bucket.column_shards > within:
        return Work(slow=nbytes, slow_messages=messages)
    return Work(fast=nbytes, fast_messages=messages)


def flops(m: int, n: int) -> int:
    """The FLOPs of one matrix."""
    m, n = min(m, n), max(m, n)
    return NS_STEPS * (4 * m * m * n + 2 * m**3)


def everything(arrays: Sequence[ShardedArray], cluster: Cluster) -> Work:
    """Every device computes all; parameters are replicated, so nothing is sent."""
    del cluster
    return Work(sum(math.prod(a.shape[:-2]) * flops(*a.shape[-2:]) for a in arrays))


def in_each_step(arrays: Sequence[ShardedArray], cluster: Cluster) -> Work:
    """Products divided by the partitioner, with collectives in each of them."""
    total = Work()
    for array in arrays:
        *batch, m, n = array.shape
        *of_batch, rows, columns = array.axes
        held = math.prod(batch) // math.prod(
            count_devices(axes, cluster.axes) for axes in of_batch
        )
        shards = count_devices((*rows, *columns), cluster.axes)
        slices = cluster.slices((*rows, *columns))
        nbytes = held * received_in_steps(m, n, cluster.platform)
        work = Work(
            flops=held * flops(m, n) / shards,
            fast=nbytes * (shards - slices) / shards,
            slow=nbytes * (slices - 1) / shards,
        )
        total = total.plus(work)
    return total


def received_in_steps(m: int, n: int, platform: str) -> int:
    """The bytes of collectives of one matrix, in all steps."""
    matrices, entry_bytes = PARTITIONED[platform]
    return NS_STEPS * entry_bytes * (matrices * m * n + min(m, n) ** 2)


def planned(
    arrays: Sequence[ShardedArray], cluster: Cluster
) -> tuple[tuple[Bucket, ...], float]:
    """The plan, and the seconds that it took."""
    began = time.perf_counter()
    plan = plan_buckets(arrays, cluster.axes, STACK_BYTES[cluster.platform])
    return plan, time.perf_counter() - began


def row(model: str, cluster: Cluster) -> dict[str, Any]:
    """The figures of a model on a cluster."""
    arrays = arrays_of(MODELS[model](cluster.axes))
    plan, seconds = planned(arrays, cluster)
    work = functools.reduce(Work.plus, (work_of(b, cluster) for b in plan), Work())
    rates = RATES[cluster.platform]
    whole = everything(arrays, cluster)
    return {
        "model": model,
        "platform": cluster.platform,
        "devices": cluster.devices,
        "planned in, s": seconds,
        "stacks": len(plan),
        "operations, TFLOP": work.flops / 1e12,
        "of an even share": work.flops * cluster.devices / whole.flops,
        "over fast links, MB": work.fast / 1e6,
        "over slow links, MB": work.slow / 1e6,
        STEP: 1e3 * work.seconds(rates),
        ALL: 1e3 * whole.seconds(rates),
        PARTS: 1e3 * in_each_step(arrays, cluster).seconds(rates),
    }


def main(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for platform in options.platforms:
        for model in options.models:
            for count in options.counts:
                rows.append(row(model, CLUSTERS[platform](count)))
                show(rows[-1], head=len(rows) == 1)
    if options.table is not None:
        with options.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: cell(v) for k, v in row.items()} for row in rows)
    if options.figure is not None:
        draw(rows, options.figure)


def show(figures: Mapping[str, Any], *, head: bool) -> None:
    if head:
        print(line(figures))
        print(line(["---"] * 2 + ["--:"] * (len(figures) - 2)))
    print(line(map(cell, figures.values())), flush=True)


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@style.styled
def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """A panel for each platform; a colour for each model, and a line for each way."""
    platforms = list(dict.fromkeys(row["platform"] for row in rows))
    figure, panels = style.new_figure(5, 1, len(platforms), sharey=True)
    for panel, platform in zip(panels[0], platforms, strict=True):
        _draw_panel(panel, [row for row in rows if row["platform"] == platform])
        panel.set_title(TITLES[platform])
    panels[0, 0].set_ylabel("ms for all matrices (log scale)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    style.save(figure, path)


def _draw_panel(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model, color in zip(models, COLORS, strict=False):
        chosen = [row for row in rows if row["model"] == model]
        counts = [row["devices"] for row in chosen]
        for way, line_style in STYLES.items():
            label = model if way == STEP else None
            times = [row[way] for row in chosen]
            panel.loglog(counts, times, line_style, color=color, label=label, ms=4)
    for way, line_style in STYLES.items():
        name = way.removesuffix(", ms")
        panel.plot([], [], line_style, color=style.GRAY, label=name, ms=4)
    counts = sorted({row["devices"] for row in rows})
    panel.set_xticks(counts, [f"{count:,}" for count in counts])
    panel.minorticks_off()
    panel.grid(axis="y")
    panel.set_xlabel("devices")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
