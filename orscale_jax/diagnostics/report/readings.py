"""Rows of a history as the readings that they were recorded from."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from orscale_jax.diagnostics.readouts.reading import Reading
from orscale_jax.diagnostics.report.run import Run

Members = Mapping[str, np.ndarray]
"""Which matrices, in the order of the history, are in each leaf of a reading."""


def reading_of(run: Run, rows: pd.DataFrame, members: Members) -> Reading:
    """The readings of some steps, each field with leaves of shape (steps, matrices).

    A quantity that the history has for no matrix is None. Where it does not say whether a
    ratio has been measured, the ratio counts as measured.
    """
    fields = {
        name: leaves(run, rows, name, members) if run.has(name) else None
        for name in Reading._fields
    }
    if fields["trust_ratio"] is None and fields["calibration"] is not None:
        fields["trust_ratio"] = leaves(run, rows, "trust_ratio", members)  # All NaN.
    if fields["trust_ratio"] is not None:
        ones = jax.tree.map(jnp.ones_like, fields["trust_ratio"])
        zeros = jax.tree.map(jnp.zeros_like, ones)
        for name in ("calibration", "started"):
            fields[name] = fields[name] or ones
        for name in ("at_r_min", "at_r_max"):
            fields[name] = jax.tree.map(jnp.nan_to_num, fields[name] or zeros)
    return Reading(**fields)


def leaves(
    run: Run, rows: pd.DataFrame, column: str, members: Members
) -> dict[str, jax.Array]:
    """A column of some steps as leaves of shape (steps, matrices); NaN where empty."""
    if column in rows:
        table = rows[column].to_numpy(np.float32).reshape(-1, run.matrices)
    else:
        table = np.full((len(rows) // run.matrices, run.matrices), np.nan, np.float32)
    return {name: jnp.asarray(table[:, inside]) for name, inside in members.items()}
