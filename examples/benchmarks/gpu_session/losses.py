"""Decoders of 31M and 125M parameters, trained on the standard library's sources.

AdamW, Muon+Moonlight (`muon`) and `orscale` at the same rates, two seeds each: 500 steps
of 64 windows of 512 bytes. The rate warms up for 50 steps and falls by a cosine to a
tenth. All decay by 0.1; everything else is at its default, but for AdamW's b2, which is
0.95 in all three. A loss is that of 8 batches of validation, the same for all runs;
quartiles are over these batches.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from matplotlib.axes import Axes

from examples import figure_style as style
from examples.benchmarks.contenders import step_of
from examples.benchmarks.gpu_session import figure
from examples.benchmarks.gpu_session.decoders import config_of, decoder
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.gpu_session.table import Row
from examples.benchmarks.gradients import loss_of
from examples.benchmarks.timing import Quartiles
from examples.pretrain.data import read_corpus
from examples.pretrain.models.dense import DenseConfig
from orscale_jax import muon, orscale

LOSS, VALIDATION_BATCHES = "validation loss", 8


class Protocol(NamedTuple):
    """How long and on what a model is trained."""

    steps: int
    between: int
    sequences: int
    length: int

    def schedule(self, rate: float) -> optax.Schedule:
        warmup = self.steps // 10
        return optax.warmup_cosine_decay_schedule(0, rate, warmup, self.steps, rate / 10)


class Run(NamedTuple):
    model: DenseConfig
    protocol: Protocol
    arm: str
    rate: float
    seed: int


FULL, TINY = Protocol(500, 50, 64, 512), Protocol(4, 2, 2, 8)
MODELS: Mapping[str, DenseConfig] = {
    "31M": config_of(512, 10, 8, vocab=256, remat=True),
    "125M": config_of(896, 13, 14, vocab=256, remat=True),
}
ARMS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "optax.adamw": lambda rate, numbers: optax.adamw(rate, b2=0.95, weight_decay=0.1),
    "muon": lambda rate, numbers: muon(rate, weight_dimension_numbers=numbers),
    "orscale": lambda rate, numbers: orscale(rate, weight_dimension_numbers=numbers),
}
RATES, SEEDS = (1e-3, 3e-3), (0, 1)


def windows(text: jax.Array, key: jax.Array, protocol: Protocol) -> jax.Array:
    """Random windows of length + 1 bytes, of shape (sequences, length + 1)."""
    last = text.size - protocol.length
    starts = jax.random.randint(key, (protocol.sequences,), 0, last)

    def window(start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(text, (start,), (protocol.length + 1,))

    return jax.vmap(window)(starts).astype("int32")


@functools.cache
def _texts() -> tuple[jax.Array, jax.Array]:
    """For training, and for validation."""
    corpus = read_corpus()
    return jax.device_put((corpus.train.pieces[0], corpus.val.pieces[0]))


@functools.cache  # One program for all runs of a model.
def _validation(
    model: DenseConfig, protocol: Protocol
) -> Callable[[Any, jax.Array], jax.Array]:
    """Losses by parameters and text."""
    loss = loss_of(decoder(model).graph)

    @jax.jit
    def losses(params: Any, text: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), VALIDATION_BATCHES)
        return jax.lax.map(lambda key: loss(params, windows(text, key, protocol)), keys)

    return losses


def trained(run: Run) -> Iterator[Measured]:
    """The losses of validation on the way."""
    model, protocol = decoder(run.model, run.seed), run.protocol
    optimizer = ARMS[run.arm](protocol.schedule(run.rate), model.numbers)
    loss, update = loss_of(model.graph), step_of(optimizer)
    train_text, val_text = _texts()
    key = jax.random.key(run.seed)

    @functools.partial(jax.jit, donate_argnums=0)
    def some_steps(held: Any, steps: jax.Array, text: jax.Array) -> Any:
        def step(held: Any, i: jax.Array) -> tuple[Any, None]:
            tokens = windows(text, jax.random.fold_in(key, i), protocol)
            return update(*held, jax.grad(loss)(held[0], tokens)), None

        return jax.lax.scan(step, held, steps)[0]

    validation = _validation(run.model, protocol)
    held = (model.params, jax.jit(optimizer.init)(model.params))
    for first in range(0, protocol.steps, protocol.between):
        steps = jax.numpy.arange(first, first + protocol.between)
        held = some_steps(held, steps, train_text)
        found = Quartiles.of(validation(held[0], val_text).tolist())
        yield Measured(LOSS, "nats per byte", found, first + protocol.between)


def cases(tiny: bool) -> Sequence[Case]:
    models = {"tiny": config_of(16, 1, 2, vocab=256)} if tiny else MODELS
    protocol, rates = (TINY, RATES[:1]) if tiny else (FULL, RATES)
    arms = ("optax.adamw", "orscale") if tiny else tuple(ARMS)
    return [
        Case(
            f"{name}, rate {rate:g}, seed {seed}",
            arm,
            functools.partial(trained, Run(model, protocol, arm, rate, seed)),
        )
        for (name, model), rate, seed, arm in itertools.product(
            models.items(), rates, SEEDS[: 1 if tiny else None], arms
        )
    ]


@style.styled
def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """A panel for each model and rate, in it a curve of the median loss for each run."""
    titles = list(dict.fromkeys(map(_title, rows)))
    columns = min(len(titles), 2)
    lines = -(-len(titles) // columns)
    drawing, panels = style.new_figure(0.9 + 2.6 * lines, lines, columns)
    for axes in panels.flat[len(titles) :]:
        axes.set_axis_off()
    for axes, title in zip(panels.flat, titles, strict=False):
        axes.set(title=title, xlabel="step")
        _draw_runs(axes, [row for row in rows if _title(row) == title])
    handles, labels = panels.flat[0].get_legend_handles_labels()
    arms = dict(zip(labels, handles, strict=True))
    drawing.legend(arms.values(), arms, loc="outside lower center", ncols=3)
    title = "Validation loss of runs (nats per byte): median and quartiles of batches"
    style.set_title(drawing, title, figure.measured_with(rows))
    style.save(drawing, path)


def _title(row: Row) -> str:
    """The name of a case without the seed."""
    return row.case.rpartition(", ")[0]


def _draw_runs(axes: Axes, rows: Sequence[Row]) -> None:
    for run in dict.fromkeys((row.case, row.variant) for row in rows):
        curve = [row for row in rows if (row.case, row.variant) == run]
        steps, low, losses, high = zip(
            *((row.step, row.low, row.median, row.high) for row in curve), strict=True
        )
        _, arm = run
        color = figure.color_of(arm, [arm])
        axes.plot(steps, losses, color=color, lw=1.2, label=arm)
        axes.fill_between(steps, low, high, color=color, alpha=0.1, lw=0)


STAGE = Stage(cases, draw)
