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

Operations and exchanges are added: nothing is assumed to run beside anything else.
"""  # noqa: E501

import csv
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
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
from orscale_jax.distributed.plan import (
    Bucket,
    MeshShape,
    ShardedArray,
    Traffic,
    count_devices,
    median_flops,
    plan_buckets,
)
from orscale_jax.distributed.platforms import PLATFORMS, Platform
from orscale_jax.newton_schulz import restarts
from orscale_jax.sharding.typed_sharding import axes_of

BFLOAT16 = np.dtype(jnp.bfloat16)
COUNTS = (64, 256, 1024, 4096, 16384)


class Partitioned(NamedTuple):
    """What the partitioner sends in each Newton–Schulz step, beside a Gram matrix."""

    matrices: int
    entry_bytes: int


# As 64 matrices of 2048×8192 on 64 devices do, in docs/study/measurements.md.
PARTITIONED = {"tpu": Partitioned(1, 2), "gpu": Partitioned(2, 4)}


class Work(NamedTuple):
    """What a device does in a step: FLOPs, and what it sends."""

    flops: int
    traffic: Traffic = Traffic()

    def milliseconds(self, platform: str) -> float:
        model = PLATFORMS[platform].cost_model
        return 1e3 * model.seconds(model.cost(self.flops, self.traffic))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of a platform.

    Attributes:
      platform: tpu or gpu.
      mesh: The lengths of the axes, and which of them lead to other slices or nodes.
    """

    platform: str
    mesh: MeshShape

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.sizes.values())


def v5p(count: int) -> Cluster:
    """Slices of at most 4,096 chips, each with a copy of the model."""
    slices = max(1, count // 4096)
    expert = min(64, count // slices // 4)
    fsdp = count // slices // expert
    axes = {"dcn": slices, "expert": expert, "fsdp": fsdp}
    return Cluster("tpu", MeshShape(axes, {"dcn": slices}))


def h100(count: int) -> Cluster:
    """Nodes of 8; the model is sharded over at most 64 of them, and then replicated."""
    nodes = count // 8
    expert = min(64, nodes)
    axes = {"replica": nodes // expert, "expert": expert, "fsdp": 8}
    slow = {name: axes[name] for name in ("replica", "expert")}
    return Cluster("gpu", MeshShape(axes, slow))


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


def flops(m: int, n: int) -> int:
    """The FLOPs of one matrix by the plain iteration."""
    m, n = min(m, n), max(m, n)
    return NS_STEPS * (4 * m * m * n + 2 * m**3)


def flops_alone(platform: Platform, m: int, n: int) -> int:
    """The FLOPs of one matrix by the form that a platform takes on one device."""
    segments = platform.cost_model.segments(m, n)
    return restarts.flops(m, n, NS_STEPS, restarts=segments - 1)


def everything(
    arrays: Sequence[ShardedArray], flops: Callable[[int, int], int] = flops
) -> Work:
    """Every device computes all; parameters are replicated, so nothing is sent."""
    return Work(sum(math.prod(a.shape[:-2]) * flops(*a.shape[-2:]) for a in arrays))


def in_each_step(arrays: Sequence[ShardedArray], cluster: Cluster) -> Work:
    """Products divided by the partitioner, with collectives in each of them."""
    sizes, slices = cluster.mesh.sizes, cluster.mesh.slices
    operations, traffic = 0, Traffic()
    for array in arrays:
        *batch, m, n = array.shape
        *of_batch, rows, columns = array.axes
        held = math.prod(batch) // math.prod(
            count_devices(axes, sizes) for axes in of_batch
        )
        shards = count_devices((*rows, *columns), sizes)
        apart = math.prod(slices.get(name, 1) for name in (*rows, *columns))
        nbytes = held * received_in_steps(m, n, cluster.platform)
        operations += held * flops(m, n) // shards
        fast, slow = nbytes * (shards - apart) // shards, nbytes * (apart - 1) // shards
        traffic = traffic.plus(Traffic(fast_bytes=fast, slow_bytes=slow))
    return Work(operations, traffic)


def received_in_steps(m: int, n: int, platform: str) -> int:
    """The bytes of collectives of one matrix, in all steps."""
    matrices, entry_bytes = PARTITIONED[platform]
    return NS_STEPS * entry_bytes * (matrices * m * n + min(m, n) ** 2)


def planned(
    arrays: Sequence[ShardedArray], cluster: Cluster
) -> tuple[tuple[Bucket, ...], float]:
    """The plan, and the seconds that it took."""
    platform = PLATFORMS[cluster.platform]
    began = time.perf_counter()
    plan = plan_buckets(
        arrays, cluster.mesh, platform.limits.stack_bytes, platform.cost_model
    )
    return plan, time.perf_counter() - began


def row(model: str, cluster: Cluster) -> dict[str, Any]:
    """The figures of a model on a cluster."""
    arrays = arrays_of(MODELS[model](cluster.mesh.sizes))
    plan, seconds = planned(arrays, cluster)
    traffic = functools.reduce(Traffic.plus, (bucket.traffic for bucket in plan))
    work = Work(sum(bucket.flops for bucket in plan), traffic)
    whole = everything(arrays)
    platform = PLATFORMS[cluster.platform]
    even = everything(arrays, functools.partial(flops_alone, platform)).flops
    return {
        "model": model,
        "platform": cluster.platform,
        "devices": cluster.devices,
        "planned in, s": seconds,
        "stacks": len(plan),
        "operations, TFLOP": work.flops / 1e12,
        "of the median device": median_flops(plan, cluster.mesh) / 1e12,
        "of an even share": work.flops * cluster.devices / even,
        "over fast links, MB": traffic.fast_bytes / 1e6,
        "over slow links, MB": traffic.slow_bytes / 1e6,
        STEP: work.milliseconds(cluster.platform),
        ALL: whole.milliseconds(cluster.platform),
        PARTS: in_each_step(arrays, cluster).milliseconds(cluster.platform),
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
