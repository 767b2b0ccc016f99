"""Validation losses of several optimizers: as text, as a picture, and against AdamW's."""

import pathlib
from collections.abc import Iterable, Mapping
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np

from examples import figure_style as style
from examples.pretrain.optimizers import OPTIMIZERS

BASELINE = "adamw"


class Curve(NamedTuple):
    """The losses after some of the steps."""

    steps: np.ndarray
    losses: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]]) -> "Curve":
        """The curve of a table of metrics, in which some rows have a validation loss."""
        validated = [row for row in rows if row["val_loss"]]
        losses = np.array([float(row["val_loss"]) for row in validated])
        return cls(np.array([int(row["step"]) for row in validated]), losses)

    def reaching(self, baseline: "Curve") -> str:
        """In words, when it first comes down to the baseline's final loss, if it does."""
        reached = np.flatnonzero(self.losses <= baseline.losses[-1])
        if not reached.size:
            return "not reached"
        around = slice(max(reached[0] - 1, 0), reached[0] + 1)
        falling = -self.losses[around]
        step = np.interp(-baseline.losses[-1], falling, self.steps[around])
        return f"{step:.0f} steps ({step / self.steps[-1]:.0%})"


def as_text(curves: Mapping[str, Curve], width: int = 60, height: int = 12) -> str:
    """The curves in lines of text, each of a letter; later ones cover earlier ones."""
    steps = np.concatenate([curve.steps for curve in curves.values()])
    losses = np.concatenate([curve.losses for curve in curves.values()])
    low, high = np.nanmin(losses), np.nanmax(losses)
    columns = np.linspace(steps.min(), steps.max(), width)
    cells, names = np.full((height, width), " "), list[str]()
    for letter, (name, curve) in zip(ascii_uppercase, curves.items(), strict=False):
        height_of = (high - np.interp(columns, *curve)) / max(high - low, 1e-9)
        for column, place in enumerate(height_of):
            if np.isfinite(place):
                cells[round(place * (height - 1)), column] = letter
        names.append(f"{letter} {OPTIMIZERS[name].label}")
    edges = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{edges.get(n, ''):>6} |{''.join(row)}" for n, row in enumerate(cells)]
    lines.append(f"{'':7}+{'-' * width}")
    first, last = f"step {steps.min()}", str(steps.max())
    lines.append(f"{'':8}{first} {last.rjust(width - len(first) - 1)}")
    return "\n".join([f"Validation loss: {', '.join(names)}", *lines])


@style.styled
def draw(path: pathlib.Path, curves: Mapping[str, Curve], unit: str) -> None:
    """The curves as a picture, and a line at AdamW's final loss."""
    figure, [[axes]] = style.new_figure(3.7)
    look: dict[str, Any] = {"lw": 1.8, "marker": "o", "ms": 4}
    for name, curve in curves.items():
        label = f"{OPTIMIZERS[name].label} {curve.losses[-1]:.4f}"
        axes.plot(*curve, label=label, color=style.color_of(name, OPTIMIZERS), **look)
    if BASELINE in curves:
        axes.axhline(curves[BASELINE].losses[-1], color=style.INK, lw=1, ls=":")
    axes.set(xlabel="step", ylabel=f"validation loss, nats per {unit}")
    axes.grid(axis="y")
    axes.legend()
    style.set_title(figure, "Validation loss; the dotted line is AdamW's final loss", "")
    style.save(figure, path)
