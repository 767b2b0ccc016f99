"""The findings of the diagnostics on a run: verdict, warnings and key numbers."""

import math
from typing import NamedTuple

import numpy as np

from orscale_jax.diagnostics.readouts.problems import Problem, find_problems
from orscale_jax.diagnostics.report import gains, trajectories
from orscale_jax.diagnostics.report.run import Run
from orscale_jax.diagnostics.theory.verdict import Verdict

ALONG_STEP = (
    "κ is the largest decrease of the loss along the step, relative to Muon's, each at "
    "its best learning rate."
)
KAPPA = (
    "κ_eff is the same in the paper's model, which has no curvature between matrices; "
    "κ_layer is what the best ratios would reach there."
)


class Occurrence(NamedTuple):
    """A problem as it was last seen, and the steps of the history that have it.

    Attributes:
      problem: The problem.
      first: The first step with it.
      last: The last one.
    """

    problem: Problem
    first: int
    last: int


def occurrences(run: Run) -> list[Occurrence]:
    """The problems of the steps shown: those of the last step first."""
    seen: dict[str, Occurrence] = {}
    for step, rows in run.rows[run.rows["step"].isin(run.shown_steps)].groupby("step"):
        for problem in find_problems(rows):
            before = seen.get(problem.title)
            first = before.first if before else int(step)
            seen[problem.title] = Occurrence(problem, first, int(step))
    return sorted(seen.values(), key=lambda occurrence: -occurrence.last)


def key_numbers(run: Run) -> list[tuple[str, str]]:
    """The key numbers of the last step: labels and values."""
    numbers = gains.verdict_of(run)[0].numbers
    found = []
    losses = (("val_loss", "validation loss"), ("loss", "training loss"))
    for column, label in [pair for pair in losses if run.has(pair[0])][:1]:
        value = trajectories.per_step(run, column).iloc[-1]
        found.append((label, f"{value:.4g}"))
    if "kappa_step" in numbers:
        found.append(("κ, gain over Muon", f"{numbers['kappa_step']:.2f}"))
    elif "kappa_eff" in numbers:
        found.append(("κ_eff, gain over Muon", f"{numbers['kappa_eff']:.2f}"))
    if run.has("trust_ratio") and len(ratio := run.last["trust_ratio"].dropna()):
        p05, p95 = np.quantile(ratio, [0.05, 0.95])
        found.append(("r̂, 5th to 95th percentile", f"{p05:.2f} – {p95:.2f}"))
        found.append(("uniform part of r̂", f"× {numbers['uniform']:.2f}"))
    if run.has("at_r_min", "at_r_max"):
        share = (run.last[["at_r_min", "at_r_max"]].sum(axis="columns") == 1).mean()
        found.append(("of the matrices at a bound", f"{share:.0%}"))
    if run.has("relative_step"):
        rows = run.rows[np.isfinite(run.rows["relative_step"])]
        medians = 100 * rows.groupby("step")["relative_step"].median()
        largest = f"at most {medians.max():.2g}%, at step {medians.idxmax():,}"
        found.append((f"median relative step ({largest})", f"{medians.iloc[-1]:.2g}%"))
    return found


def explanations(run: Run, found: Verdict) -> list[str]:
    """The sentences that explain the verdict on a run."""
    numbers, sentences = found.numbers, []
    if not run.has("trust_ratio"):
        return ["The history has no trust ratios, like any run of Muon."]
    if "kappa_step" in numbers:
        sentences.append(ALONG_STEP)
    if "kappa_eff" in numbers:
        shown = "κ_eff" in found.text or math.isnan(numbers["kappa_eff"])
        here = f"Here κ_eff is {numbers['kappa_eff']:.2f}. "
        sentences.append(KAPPA if shown else here + KAPPA)
    if numbers["measured"] and found.outcome not in ("uniform", "no statistics"):
        sentences.append(
            f"All matrices share a factor of {numbers['uniform']:.2f}, which a learning "
            "rate could provide as well; from matrix to matrix, ratios differ by a "
            f"factor of {math.exp(numbers['spread']):.2f}."
        )
    if run.has("signal", "smoothness") and "kappa_eff" not in numbers:
        sentences.append(
            "The history has signal and smoothness, but the gain also takes the shapes "
            "of the matrices: write the audit of orscale_jax.describe to audit.csv."
        )
    return sentences
