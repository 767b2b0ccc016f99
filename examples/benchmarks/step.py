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

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from examples import figure_style as style
from examples.benchmarks import step_figure
from examples.benchmarks.contenders import (
    MARIN,
    contenders,
    installed_peers,
    last_two_axes,
    relatives,
    step_of,
)
from examples.benchmarks.shapes import CASES, NAMES, Shapes, nominal_flops
from examples.benchmarks.timing import Quartiles, in_turns, repeated, turns_for
from examples.pretrain.errors import UsageError


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


def stepping(
    optimizer: optax.GradientTransformation, shapes: Shapes
) -> Callable[[], Any]:
    """A step that updates its own parameters and state in place."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params, grads = (
        {
            name: jax.random.normal(jax.random.fold_in(key, salt), shape) * 0.02
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        for salt in (0, 1)
    )
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    return repeated(step, (params, jax.jit(optimizer.init)(params)), grads)


def products(dtype: str) -> dict[str, tuple[Callable[[], Any], float]]:
    """Matrix products that look for the machine's best rate, and their operations."""

    def product(shape: tuple[int, ...]) -> tuple[Callable[[], Any], float]:
        x = jnp.ones(shape, dtype)
        multiply = jax.jit(
            functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        )
        return lambda: multiply(x, x), 2.0 * x.size * shape[-1]

    shapes = [(1024, 1024), (2048, 2048), (4, 1024, 1024)]
    return {str(shape): product(shape) for shape in shapes}


@dataclasses.dataclass(frozen=True)
class Result:
    """Times of each contender, and operations per second of the ceiling."""

    case: str
    times: dict[str, Quartiles]
    ceiling: float

    @property
    def seconds(self) -> dict[str, float]:
        """Median of each contender."""
        return {name: found.median for name, found in self.times.items()}

    @property
    def of_the_ceiling(self) -> float:
        rate = nominal_flops(CASES[self.case]) / self.seconds["orscale"]
        return rate / self.ceiling

    @property
    def peer(self) -> str:
        """The first Muon, if there is one."""
        muons = (name for name in self.seconds if name.endswith("muon"))
        return next(muons, "orscale")

    @property
    def speedup(self) -> float:
        return self.seconds[self.peer] / self.seconds["orscale"]


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
    given = (last_two_axes, options.ns_dtype)
    known = contenders(*given) | relatives(*given) | installed_peers()
    for name in options.contenders:
        if name not in known:
            hint = f"; {MARIN} needs the extra clients-marin" if name == MARIN else ""
            raise UsageError(f"no contender {name!r}: there are {', '.join(known)}{hint}")
    return {name: known[name] for name in options.contenders}


def measure(
    case: str, optimizers: dict[str, optax.GradientTransformation], options: Options
) -> Result:
    steps = {name: stepping(found, CASES[case]) for name, found in optimizers.items()}
    multiplications = products(options.ns_dtype)
    runs = steps | {name: run for name, (run, _) in multiplications.items()}
    for run in runs.values():  # Compiles.
        jax.block_until_ready(run())
    seconds = in_turns(runs, turns_for(options.seconds * len(runs)))
    found = {name: Quartiles.of(times) for name, times in seconds.items()}
    rates = [flops / found[name].median for name, (_, flops) in multiplications.items()]
    return Result(case, {name: found[name] for name in steps}, max(rates))


def table(results: list[Result]) -> list[str]:
    """The lines of a table in Markdown; what a phone shows of it comes first."""
    names = list(reversed(results[0].seconds))
    faster = f"faster than {results[0].peer}"
    head = ["", faster, *(f"{name}, ms" for name in names), "of the ceiling"]
    rows = [
        [
            NAMES[result.case],
            f"{result.speedup:.2f} ×",
            *(step_figure.milliseconds(result.seconds[name]) for name in names),
            f"{100 * result.of_the_ceiling:.0f} % of {result.ceiling / 1e9:.0f} GFLOP/s",
        ]
        for result in results
    ]
    return [
        f"| {' | '.join(cells)} |"
        for cells in (head, ["---", *["--:"] * (len(head) - 1)], *rows)
    ]


def write(results: list[Result], ns_dtype: str, folder: pathlib.Path) -> None:
    """The table, the times and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.md").write_text("\n".join(table(results)) + "\n")
    times = {result.case: result.times for result in results}
    step_figure.write_times(times, ns_dtype, folder / "benchmark.csv")
    draw(folder)


def draw(folder: pathlib.Path) -> None:
    """The plot and its narrow version, of the times that are in the folder."""
    times, measured = step_figure.read_times(folder / "benchmark.csv")
    named = {NAMES[case]: found for case, found in times.items()}
    path = folder / "benchmark.png"
    step_figure.draw(named, measured, path)
    step_figure.draw(named, measured, style.narrow_path(path), narrow=True)


def main(options: Options) -> None:
    if options.replot:
        draw(options.out or pathlib.Path("docs"))
        return
    optimizers = optimizers_of(options)
    results = []
    for case in options.cases:
        results.append(measure(case, optimizers, options))
        print(f"{case}: {results[-1].speedup:.2f} times {results[-1].peer}", flush=True)
    print("\n".join(table(results)))
    if options.out is not None:
        write(results, options.ns_dtype, options.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
