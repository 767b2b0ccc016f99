"""Three runs to learn the readouts on: healthy, saturated, anchored on low rank.

    python -m examples.worked_cases

trains the demo's decoder, smaller, three times, writes the reports, prints verdicts and
warnings, and draws docs/worked_cases.png.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from examples.pretrain.batches import train_batches
from examples.pretrain.config import Config
from examples.pretrain.data import read_corpus
from examples.pretrain.readouts import Readouts, due, examples_to_measure
from examples.pretrain.train import compiled_step, initial_model, learning_rates
from orscale_jax import ablations, diagnostics, orscale
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.report import write_report

TRAINING = Config(
    width=64,
    layers=2,
    heads=2,
    seq_len=64,
    steps=200,
    warmup_steps=10,
    measure_every=50,
    measure_batches=32,
)
# Told apart by the colour-blind, too (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclasses.dataclass(frozen=True)
class Options:
    """Where things go."""

    out: pathlib.Path = pathlib.Path("runs/cases")
    figure: pathlib.Path = pathlib.Path("docs/worked_cases.png")


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
      title: What it is.
      optimizer: Made of the learning rates.
      first_tokens: Of the one sequence of the first batch; 0 for a batch as all others.
    """

    title: str
    optimizer: Any
    first_tokens: int = 0


CASES = {
    "healthy": Case("healthy", orscale),
    "saturated": Case("saturated: r over ‖M‖", ablations.momentum_denominator),
    "low_rank": Case("low-rank anchor: 8 tokens first", orscale, first_tokens=8),
}


def run(
    case: Case, folder: pathlib.Path, batches: Sequence[np.ndarray]
) -> tuple[diagnostics.Reading, Any]:
    """Trains; gives the last reading, and the history as a data frame."""
    schedule = learning_rates(TRAINING)
    optimizer = case.optimizer(schedule)
    loss_fn, params = initial_model(TRAINING, 256)
    state = {"params": params, "opt_state": optimizer.init(params)}
    folder.mkdir(parents=True, exist_ok=True)
    readouts = Readouts(folder, 0, schedule, loss_fn, params)
    first = batches[0]
    if case.first_tokens:
        first = first[:1, : case.first_tokens + 1]
    state, _ = compiled_step(loss_fn, optimizer, state, first)(state, first)
    step = compiled_step(loss_fn, optimizer, state, batches[1])
    for done in range(2, TRAINING.steps + 1):
        state, loss = step(state, batches[done - 1])
        if due(done, TRAINING):
            examples = examples_to_measure(done, batches, TRAINING)
            readouts.record(done, state, examples, loss=float(loss))
    return readouts.read(state), readouts.history.frame()


def draw(path: pathlib.Path, tables: dict[str, Any]) -> None:
    """Draws r̂ by class over the steps, and growth against r at the end, of each case."""
    figure = Figure((11, 6.2), layout="constrained", dpi=150)
    panels = figure.subplots(2, len(tables), sharey="row")
    for (over, against), (name, rows) in zip(panels.T, tables.items(), strict=True):
        over.set_title(CASES[name].title, loc="left", fontsize=10)
        last = rows[rows.step == rows.step.max()]
        for label, color in zip(last["class"].unique(), COLORS, strict=False):
            mean = rows[rows["class"] == label].groupby("step").trust_ratio.mean()
            over.plot(mean.index, mean, lw=1.8, color=color, label=label)
            of_class = last[last["class"] == label]
            against.scatter(of_class.growth, of_class.raw_trust_ratio, color=color)
        against.plot([0.5, 2], [0.5, 2], color="#999999", lw=0.8, ls="--", zorder=0)
        against.annotate("r = growth", (1.5, 1.5), (4, -12), textcoords="offset points")
        _finish(over, "step", [0.3, 0.5, 0.7, 1, 1.5])
        _finish(against, "growth ‖W‖/‖W₀‖", [0.3, 1, 3, 10])
        against.set_xscale("log")
        against.xaxis.set_major_locator(FixedLocator([0.5, 1, 2]))
        against.xaxis.set_minor_locator(NullLocator())
        against.xaxis.set_major_formatter(ScalarFormatter())
    panels[0, 0].set_ylabel("trust ratio r̂")
    panels[1, 0].set_ylabel("ratio r before the clip")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path)


def _finish(axes: Axes, label: str, ticks: list[float]) -> None:
    axes.set_xlabel(label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.spines[["top", "right"]].set_visible(False)


def main(options: Options) -> None:
    batches = train_batches(TRAINING, read_corpus(TRAINING))
    tables = {}
    for name, case in CASES.items():
        folder = options.out / name
        (folder / FILE_NAME).unlink(missing_ok=True)
        reading, tables[name] = run(case, folder, batches)
        page = write_report(folder)
        print(f"\n{case.title}\n{diagnostics.verdict(reading)}")
        for problem in diagnostics.find_problems(reading):
            print(f"- {problem}")
        print(page)
    draw(options.figure, tables)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
