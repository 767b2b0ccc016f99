"""One step of the optimizers on real shapes, against their peers and the machine's limit.

    python -m examples.benchmarks.step                   # make bench: every case
    python -m examples.benchmarks.step --cases gpt2      # some
    python -m examples.benchmarks.step --cases 1.1B --contenders muon orscale
    python -m examples.benchmarks.step --out docs        # also the table and the plot
    python -m examples.benchmarks.step --out docs --replot  # the plot alone, of the CSV

Everything runs in one process, in turns, so that what else the machine does falls on all
alike. Times are medians; bars of the plot reach from the first to the third quartile.
benchmark.csv keeps them. "of the ceiling" is the nominal number of operations of
Newton–Schulz, steps · (4m²n + 2m³) a matrix, over the time and over the best rate of a
matrix product that was measured in the same turns.
"""

import csv
import dataclasses
import functools
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from examples import figure_style as style
from examples.benchmarks import figure
from examples.benchmarks.contenders import (
    MARIN,
    contenders,
    installed_peers,
    last_two_axes,
    step_of,
)
from examples.benchmarks.shapes import CASES, NAMES, nominal_flops
from examples.benchmarks.timing import Quartiles, repeated, seconds_each
from examples.pretrain.errors import UsageError

Times = Mapping[str, Quartiles]  # By contender.


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    cases: tuple[str, ...] = tuple(CASES)
    """Of those that shapes.py names."""
    contenders: tuple[str, ...] = ("optax.adamw", "optax.contrib.muon", "muon", "orscale")
    """Some of these, of the family, and marin.grug_muon (extra clients-marin, which needs
    Python 3.12), orscale among them; it is compared with the first Muon of them."""
    seconds: float = 20.0
    """For each case and contender, about; at least one turn."""
    ns_dtype: str = "float32"
    """Of our Newton–Schulz. Optax multiplies in float32, marin in bfloat16."""
    out: pathlib.Path | None = None
    """Where benchmark.md, benchmark.csv and benchmark.png go."""
    replot: bool = False
    """Draw benchmark.png of the benchmark.csv that is there."""


def optimizers_of(options: Options) -> dict[str, optax.GradientTransformation]:
    """The contenders by name.

    Raises:
      UsageError: If there is no such contender or case, or orscale is not among them.
    """
    if "orscale" not in options.contenders:
        told = ", ".join(options.contenders)
        raise UsageError(f"--contenders {told}: add orscale, to which they are compared")
    for case in options.cases:
        if case not in CASES:
            raise UsageError(f"no case {case!r}: there are {', '.join(CASES)}")
    known = contenders(last_two_axes, options.ns_dtype) | installed_peers()
    for name in options.contenders:
        if name not in known:
            hint = f"; {MARIN} needs the extra clients-marin" if name == MARIN else ""
            raise UsageError(f"no contender {name!r}: there are {', '.join(known)}{hint}")
    return {name: known[name] for name in options.contenders}


def measure(
    case: str, optimizers: dict[str, optax.GradientTransformation], options: Options
) -> tuple[Times, float]:
    """The times of each contender, and the operations per second of the ceiling."""
    runs: dict[str, Callable[[], Any]] = {}
    keys = jax.random.split(jax.random.key(0), len(CASES[case]))
    for name, optimizer in optimizers.items():
        params, grads = (
            {
                leaf: jax.random.normal(jax.random.fold_in(key, salt), shape) * 0.02
                for key, (leaf, shape) in zip(keys, CASES[case].items(), strict=True)
            }
            for salt in (0, 1)
        )
        step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
        runs[name] = repeated(step, (params, jax.jit(optimizer.init)(params)), grads)
    # Products that look for the machine's best rate.
    multiply = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    flops = {}
    for shape in ((1024, 1024), (2048, 2048), (4, 1024, 1024)):
        x = jnp.ones(shape, options.ns_dtype)
        runs[str(shape)] = functools.partial(multiply, x, x)
        flops[str(shape)] = 2.0 * x.size * shape[-1]
    for run in runs.values():  # Compiles.
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order, end = list(runs), time.perf_counter() + options.seconds * len(runs)
    while not seconds[order[0]] or time.perf_counter() < end:
        for name in order:
            seconds[name].append(seconds_each(runs[name]))
        order.reverse()
    found = {name: Quartiles.of(times) for name, times in seconds.items()}
    ceiling = max(count / found[name].median for name, count in flops.items())
    return {name: found[name] for name in optimizers}, ceiling


def table(results: Mapping[str, tuple[Times, float]]) -> list[str]:
    """The lines of a table in Markdown; what a phone shows of it comes first.

    Args:
      results: As of :func:`measure`, by case.
    """
    known = list(next(iter(results.values()))[0])
    muons = (name for name in known if name.endswith("muon"))
    peer = next(muons, "orscale")  # The first Muon, if there is one.
    names = known[::-1]
    head = ["", f"faster than {peer}", *(f"{name}, ms" for name in names)]
    rows = [[*head, "of the ceiling"], ["---", *["--:"] * len(head)]]
    for case, (times, ceiling) in results.items():
        own = times["orscale"].median
        share = nominal_flops(CASES[case]) / own / ceiling
        rows.append([
            NAMES[case],
            f"{times[peer].median / own:.2f} ×",
            *(figure.four_digits(1000 * times[name].median) for name in names),
            f"{100 * share:.0f} % of {ceiling / 1e9:.0f} GFLOP/s",
        ])  # fmt: skip
    return [f"| {' | '.join(cells)} |" for cells in rows]


def where(ns_dtype: str) -> str:
    """What the times were measured with."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        has_mask = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count()
        info = pathlib.Path("/proc/cpuinfo")  # Of Linux.
        lines = info.read_text().splitlines() if info.exists() else []
        named = (
            line.partition(":")[2] for line in lines if line.startswith("model name")
        )
        kind = f"{cores} cores of {next(named, platform.machine()).strip()}"
    return f"{kind}; {ns_dtype} products; JAX {jax.__version__}"


def write(
    results: Mapping[str, tuple[Times, float]], ns_dtype: str, folder: pathlib.Path
) -> None:
    """The table, the times and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.md").write_text("\n".join(table(results)) + "\n")
    with (folder / "benchmark.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow("case contender low median high turns where".split())
        for case, (times, _) in results.items():
            for name, (*seconds, turns) in times.items():
                cells = [f"{x:.4g}" for x in seconds]
                writer.writerow([case, name, *cells, turns, where(ns_dtype)])
    draw(folder)


def draw(folder: pathlib.Path) -> None:
    """The plot and its narrow version, of the times that are in the folder."""
    with (folder / "benchmark.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cases: dict[str, dict[str, Quartiles]] = {}
    for row in rows:
        low, median, high = (float(row[name]) for name in ("low", "median", "high"))
        found = Quartiles(low, median, high, int(row["turns"])).times(1000)
        cases.setdefault(NAMES[row["case"]], {})[row["contender"]] = found
    turns = {int(row["turns"]) for row in rows}
    told = "to".join(f" {n} " for n in sorted({min(turns), max(turns)}))
    title = f"A step of the optimizer alone: median and quartiles of{told}turns"
    label = "time of a step (ms, log scale; left is better)"
    path = folder / "benchmark.png"
    figure.draw(cases, path, label, title, rows[0]["where"])
    narrow = style.narrow_path(path)
    figure.draw(cases, narrow, label, title, rows[0]["where"], narrow=True)


def main(options: Options) -> None:
    if options.replot:
        draw(options.out or pathlib.Path("docs"))
        return
    optimizers = optimizers_of(options)
    results = {}
    for case in options.cases:
        results[case] = measure(case, optimizers, options)
        print(table({case: results[case]})[-1], flush=True)
    print("\n".join(table(results)))
    if options.out is not None:
        write(results, options.ns_dtype, options.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
