"""The verdict on a run, and the gain over Muon at each step with an estimate.

The paper's b = L·p and the scale s of the steps need the shape of each matrix, which
audit.csv has.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from optax.contrib import MuonDimensionNumbers

from orscale_jax.diagnostics.per_matrix import leaf_of
from orscale_jax.diagnostics.report.readings import leaves, reading_of
from orscale_jax.diagnostics.report.run import Run, thinned
from orscale_jax.diagnostics.theory.estimate import Statistics
from orscale_jax.diagnostics.theory.jackknife import Estimate
from orscale_jax.diagnostics.theory.step_gain import StepGain
from orscale_jax.diagnostics.theory.verdict import Verdict, verdict
from orscale_jax.transforms.stages import SHAPE_SCALING, UNIT_RMS_NORM, Scale

MAX_STEPS = 60  # Steps in the figure: each needs a verdict.
ONLY_LEAF = "(the only leaf)"  # The name in an audit of a parameter without one.


class Shapes(NamedTuple):
    """The matrices whose shapes are known, in stacks of one shape.

    Attributes:
      sizes: m and n of each stack.
      members: Which matrices, in the order of the history, are in each stack.
      scale: ``consistent_rms`` and ``scale_mode``, with which they have their s.
    """

    sizes: dict[str, tuple[int, int]]
    members: dict[str, np.ndarray]
    scale: dict[str, Any]


def verdict_of(run: Run) -> tuple[Verdict, int]:
    """The verdict at the last estimate, or else at the last step; and that step."""
    if with_estimates := verdicts(run):
        step = max(with_estimates)
        return with_estimates[step], step
    return _verdict(run, run.final, None), run.steps[-1]


def estimate_steps(run: Run) -> list[int]:
    """The steps at which the gain was measured, or some of them."""
    if not run.has("trust_ratio"):
        return []
    known = np.full(len(run.rows), False)
    for columns in (["signal", "smoothness"], ["kappa_step"]):
        if run.has(*columns):
            known |= np.isfinite(run.rows[columns]).all(axis="columns").to_numpy()
    return thinned(
        [int(step) for step in run.rows.loc[known, "step"].unique()], MAX_STEPS
    )


@functools.lru_cache(maxsize=1)
def verdicts(run: Run) -> dict[int, Verdict]:
    """The verdict at each step at which the gain is known, of the model or the step."""
    shapes = shapes_of(run) if run.has("signal", "smoothness") else None
    steps = estimate_steps(run)
    rows = run.rows[run.rows["step"].isin(steps)].groupby("step", sort=False)
    found = {}
    for step in steps:
        of_step = rows.get_group(step)
        if shapes is not None or _gained(of_step) is not None:
            found[step] = _verdict(run, of_step, shapes)
    return found


def _gained(rows: pd.DataFrame) -> StepGain | None:
    """The gain along the step, if the rows of the step have it."""
    columns = ["kappa_step", "kappa_step_stderr"]
    if not {*columns} <= {*rows.columns} or rows[columns[0]].isna().all():
        return None
    unknown = Estimate(jnp.nan, jnp.nan)
    return StepGain(Estimate(*rows[columns].iloc[0]), unknown, unknown)


def shapes_of(run: Run) -> Shapes | None:
    """The shapes that the audit knows; None where it knows none."""
    columns = ["m", "n", "s"]
    if run.audit is None or not {"parameter", *columns} <= {*run.audit.columns}:
        return None
    sizes = run.audit[columns].apply(pd.to_numeric, errors="coerce")
    sizes["leaf"] = run.audit["parameter"].replace(ONLY_LEAF, "").map(leaf_of)
    sizes = sizes[(sizes[columns] > 0).all(axis="columns")].drop_duplicates()
    sizes = sizes.drop_duplicates("leaf", keep=False)  # Not of blocks of several sizes.
    found = pd.DataFrame({"leaf": run.final["matrix"].map(leaf_of)}).merge(sizes, "left")
    known = found.dropna()
    if known.empty:
        return None
    pairs = known[["m", "n"]].drop_duplicates().astype(int).itertuples(index=False)
    stacks = {f"{m} × {n}": (m, n) for m, n in pairs}
    return Shapes(
        stacks,
        {
            name: ((found["m"] == m) & (found["n"] == n)).to_numpy()
            for name, (m, n) in stacks.items()
        },
        _scale_of(known),
    )


def _scale_of(sizes: pd.DataFrame) -> dict[str, Any]:
    """The arguments of an optimizer whose matrices have these m, n and s."""
    if (sizes["s"] == 1).all():
        return {"consistent_rms": None}
    pairs = sizes[["m", "n"]].astype(int).to_numpy()
    for mode in (SHAPE_SCALING, UNIT_RMS_NORM):
        scale = Scale.of(None, mode)
        if np.allclose([scale.value(m, n) for m, n in pairs], sizes["s"], rtol=1e-3):
            return {"consistent_rms": None, "scale_mode": mode}
    rms = sizes["s"] / np.sqrt(sizes[["m", "n"]].max(axis="columns"))
    return {"consistent_rms": float(rms.median())}


def _verdict(run: Run, rows: pd.DataFrame, shapes: Shapes | None) -> Verdict:
    """The verdict at a step; without shapes, it is not that of the paper's model."""
    members = {"": np.full(run.matrices, True)} if shapes is None else shapes.members
    reading = jax.tree.map(lambda field: field[0], reading_of(run, rows, members))
    if shapes is None:
        return verdict(reading, gained=_gained(rows))

    def of_matrices(column: str) -> dict[str, jax.Array]:
        table = leaves(run, rows, column, members)
        return {name: values[0] for name, values in table.items()}

    params = {
        name: jax.ShapeDtypeStruct((int(inside.sum()), *shapes.sizes[name]), jnp.float32)
        for name, inside in members.items()
    }
    statistics = Statistics(
        *(
            Estimate(of_matrices(name), of_matrices(f"{name}_stderr"))
            for name in Statistics._fields
        )
    )
    return verdict(
        reading,
        statistics,
        params,
        dict.fromkeys(params, MuonDimensionNumbers(-2, -1)),
        gained=_gained(rows),
        **shapes.scale,
    )
