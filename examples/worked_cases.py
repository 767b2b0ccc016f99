"""Three runs to learn the readouts on: healthy, saturated, anchored on low rank.

    python -m examples.worked_cases

trains the demo's decoder, smaller, three times, writes the reports, prints warnings, and
draws docs/worked_cases.png.
"""

import dataclasses
import pathlib
from typing import Any

import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from examples import figure_style as style
from examples.pretrain.config import Config
from examples.pretrain.configs import DEMOS
from examples.pretrain.kinds import make_task, read_data
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.operation.readouts import Readouts
from examples.pretrain.setup import set_up
from examples.pretrain.step import compiled_step
from examples.pretrain.task import Data
from orscale_jax import diagnostics
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.report import write_report

DEMO = DEMOS["demo"]
TRAINING = dataclasses.replace(
    DEMO,
    recipe=dataclasses.replace(DEMO.recipe, seq_len=64, steps=200, warmup_steps=10),
    model=DenseConfig(
        vocab_size=256, width=64, layers=2, heads=2, fused_qkv=False, scan=False
    ),
    measure_every=50,
    measure_batches=32,
)
COLORS = (
    style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.SKY,
)  # fmt: skip


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
      optimizer: By its name.
      first_tokens: Of the one sequence of the first batch; 0 for a batch as all others.
    """

    title: str
    optimizer: str
    first_tokens: int = 0


CASES = {
    "healthy": Case("healthy", "orscale"),
    "saturated": Case("saturated: r over ‖M̃‖", "momentum_denominator"),
    "low_rank": Case("low-rank anchor", "orscale", first_tokens=8),
}


def run(
    case: Case, folder: pathlib.Path, config: Config, data: Data
) -> tuple[diagnostics.Reading, Any]:
    """Trains; gives the last reading, and the history as a data frame."""
    recipe, mesh = config.recipe_of(case.optimizer), make_mesh(config.mesh)
    setup = set_up(make_task(config), recipe, mesh)
    batches = Batches(data.train, recipe.batch_size, mesh)
    folder.mkdir(parents=True, exist_ok=True)
    readouts = Readouts(folder, setup, start=0)
    first = batches[0]
    if case.first_tokens:
        first = first[:1, : case.first_tokens + 1]
    with in_effect(mesh):
        state = setup.initial_state()
        state, _ = compiled_step(setup, 1, first)(state, first)
        step = compiled_step(setup, 1, batches[1])
        for done in range(2, recipe.num_steps + 1):
            state, metrics = step(state, batches[done - 1])
            measuring = done % (config.measure_every or 1) == 0
            if done % config.log_every == 0 or measuring:
                unseen = [batches[done + i] for i in range(config.measure_batches)]
                to_measure = unseen if measuring else []
                readouts.record(done, state, to_measure, loss=float(metrics["loss"]))
        return readouts.read(state), readouts.history.frame()


@style.styled
def draw(path: pathlib.Path, tables: dict[str, Any]) -> None:
    """Draws r̂ by class over the steps, and growth against r at the end, of each case."""
    figure, panels = style.new_figure(5.6, 2, len(tables), sharey="row")
    for (over, against), (name, rows) in zip(panels.T, tables.items(), strict=True):
        over.set_title(CASES[name].title)
        last = rows[rows.step == rows.step.max()]
        for label, color in zip(last["class"].unique(), COLORS, strict=False):
            mean = rows[rows["class"] == label].groupby("step").trust_ratio.mean()
            over.plot(mean.index, mean, lw=1.8, color=color, label=label)
            of_class = last[last["class"] == label]
            against.scatter(of_class.growth, of_class.raw_trust_ratio, 25, color=color)
        against.plot([0.5, 2], [0.5, 2], color=style.GRAY, lw=0.8, ls="--", zorder=0)
        against.annotate(
            "r = growth", (2, 2), (0, 6), textcoords="offset points", ha="right",
            fontsize=style.SMALL,
        )  # fmt: skip
        over.axhline(1, color=style.INK, lw=0.8, ls=(0, (4, 3)), zorder=0)
        _finish(over, "step", [0.3, 0.5, 0.7, 1, 1.5])
        _finish(against, "growth ‖W‖/‖W₀‖", [0.3, 1, 3, 10])
        against.set_xscale("log")
        against.xaxis.set_major_locator(FixedLocator([0.5, 1, 2]))
        against.xaxis.set_minor_locator(NullLocator())
        against.xaxis.set_major_formatter(ScalarFormatter())
    panels[0, 0].set_ylabel("trust ratio r̂ (log scale)")
    panels[1, 0].set_ylabel("r before the clip (log scale)")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3)
    recipe, model = TRAINING.recipe, TRAINING.model
    assert isinstance(model, DenseConfig)
    style.set_title(
        figure,
        "Trust ratios by class over the steps, and against growth at the end",
        f"Decoder of {model.layers} blocks of width {model.width}; "
        f"learning rate {recipe.learning_rate:g}; seed {recipe.seed}",
    )
    style.save(figure, path)


def _finish(axes: Axes, label: str, ticks: list[float]) -> None:
    axes.set_xlabel(label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())


def main(options: Options) -> None:
    data = read_data(TRAINING)
    tables = {}
    for name, case in CASES.items():
        folder = options.out / name
        (folder / FILE_NAME).unlink(missing_ok=True)
        reading, tables[name] = run(case, folder, TRAINING, data)
        page = write_report(folder)
        print(f"\n{case.title}")
        for problem in diagnostics.find_problems(reading):
            print(f"- {problem}")
        print(page)
    draw(options.figure, tables)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
