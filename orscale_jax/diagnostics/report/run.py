"""A run folder, read into data frames."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

REQUIRED = ("step", "matrix", "class")
MAX_CLASSES = 20  # More would not be told apart in a figure.
OTHERS = "all other classes"
MAX_SHOWN_STEPS = 240  # A figure has no more pixels to show them with.

# Words of class names in the order in which a block uses what they name.
PLACES = (
    ("attention", "mlp", "router", "shared", "routed", "convolution", "other"),
    ("query", "key", "value", "output", "up", "gate", "down"),
)

# blocks.0, layers_3 and h12 name a layer, as does the first index of layers.up[2, 17].
_LAYER = re.compile(r"(?:^|.*?\.)[^.\[]*?\d+(?=\.|\[|$)")
_INDICES = re.compile(r"(.*)\[(\d+), [\d, ]+\]$")


class RunError(ValueError):
    """A run folder from which no report can be made."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The history of a run and, where there is one, its audit.

    Attributes:
      name: The name of the run folder.
      rows: One row for each matrix and recorded step, ordered by step. Numbers are
        floats, with NaN where the history is empty; a column ``group`` holds the class
        under which figures show the matrix, and ``layer`` its layer.
      audit: The rows of ``orscale_jax.describe``, as strings; None without audit.csv.
    """

    name: str
    rows: pd.DataFrame
    audit: pd.DataFrame | None

    @functools.cached_property
    def steps(self) -> list[int]:
        """The recorded steps."""
        return [int(step) for step in self.rows["step"].unique()]

    @functools.cached_property
    def final(self) -> pd.DataFrame:
        """The rows of the last step."""
        return self.rows[self.rows["step"] == self.steps[-1]]

    @functools.cached_property
    def last(self) -> pd.DataFrame:
        """The rows of the last step; infinite numbers are NaN."""
        return _finite(self.final)

    @functools.cached_property
    def shown(self) -> pd.DataFrame:
        """The rows of the steps that figures show; infinite numbers are NaN."""
        return _finite(self.rows[self.rows["step"].isin(self.shown_steps)])

    @functools.cached_property
    def shown_steps(self) -> list[int]:
        """The steps that figures show: all, or as many as can be told apart."""
        return thinned(self.steps)

    @functools.cached_property
    def groups(self) -> list[str]:
        """The classes that figures show, in the order in which a block uses them."""
        return sorted((str(group) for group in self.final["group"].unique()), key=_place)

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return len(self.last)

    def has(self, *columns: str) -> bool:
        """Whether each of these columns holds a finite number."""
        return all(
            column in self.rows and bool(np.isfinite(self.rows[column]).any())
            for column in columns
        )


def read_run(folder: pathlib.Path) -> Run:
    """Read a run folder.

    Args:
      folder: A folder with ``history.csv`` and, perhaps, ``audit.csv``.

    Returns:
      The run. A last step that was not written to its end is left out.

    Raises:
      RunError: The folder or its history is missing, empty or no history.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: pass the folder of a run.")
    path = folder / "history.csv"
    if not path.is_file():
        raise RunError(
            f"{folder} has no history.csv: write one with "
            "orscale_jax.diagnostics.History while the run trains."
        )
    rows = _read_history(path)
    if rows.empty:
        raise RunError(f"{path} holds no complete step: let the run record one.")
    rows = _whole_steps(rows)
    rows["group"] = _groups(rows)
    layers = {name: layer_of(name) for name in rows["matrix"].unique()}
    rows["layer"] = rows["matrix"].map(layers)
    return Run(folder.resolve().name, rows, _read_audit(folder / "audit.csv"))


def thinned(steps: Sequence[int], at_most: int = MAX_SHOWN_STEPS) -> list[int]:
    """Some of many steps, at equal distances, with both ends."""
    count = min(len(steps), at_most)
    return [steps[int(i)] for i in np.linspace(0, len(steps) - 1, count).round()]


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which ``blocks.10`` comes after ``blocks.9``."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def layer_of(matrix: str) -> str:
    """The layer that the name of a matrix tells, or an empty string.

    >>> layer_of("blocks.0.attention.query.kernel"), layer_of("layers.up[2, 17]")
    ('blocks.0', 'layers.2')
    """
    if found := _LAYER.match(matrix.partition("[")[0]):
        return found[0]
    if found := _INDICES.match(matrix):
        return f"{found[1].split('.')[0]}.{found[2]}"
    return ""


def _read_history(path: pathlib.Path) -> pd.DataFrame:
    words = {"matrix": str, "class": str}
    try:
        numbers = [name for name in pd.read_csv(path, nrows=0) if name not in words]
        rows = pd.read_csv(
            path,
            dtype=words,
            keep_default_na=False,  # A matrix may be called nan.
            na_values={name: ["", "nan"] for name in numbers},
            low_memory=False,
        )
    except pd.errors.EmptyDataError as error:
        raise RunError(f"{path} is empty: let the run record a step.") from error
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not the history of a run: {error}") from error
    if missing := [name for name in REQUIRED if name not in rows]:
        raise RunError(
            f"{path} has no column {' or '.join(missing)}: pass a folder that "
            "orscale_jax.diagnostics.History wrote."
        )
    if not _ends_in_a_newline(path):
        rows = rows.iloc[:-1]  # Killed in the middle of a row.
    rows = rows.assign(
        **{name: pd.to_numeric(rows[name], errors="coerce") for name in numbers}
    )
    if rows["step"].isna().any():
        raise RunError(f"{path} has rows without a step: the file is damaged.")
    return rows


def _whole_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of a last step that has fewer than the first."""
    sizes = rows.groupby("step", sort=False).size()
    if len(sizes) > 1 and sizes.iloc[-1] < sizes.iloc[0]:
        rows, sizes = rows[rows["step"] != sizes.index[-1]], sizes[:-1]
    if len(odd := sizes[sizes != sizes.iloc[0]]):
        raise RunError(
            f"The history is damaged: step {odd.index[0]} has {odd.iloc[0]} rows, and "
            f"step {sizes.index[0]} has {sizes.iloc[0]}, one for each matrix."
        )
    return rows.reset_index(drop=True)


def _ends_in_a_newline(path: pathlib.Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def _groups(rows: pd.DataFrame) -> pd.Series:
    """The class of each row, or ``OTHERS`` where there are too many to tell apart."""
    sizes = rows["class"].value_counts()
    if len(sizes) <= MAX_CLASSES:
        return rows["class"]
    return rows["class"].where(rows["class"].isin(sizes.index[: MAX_CLASSES - 1]), OTHERS)


def _place(group: str) -> tuple[object, ...]:
    """A key by which classes are sorted."""
    places = (
        next((i for i, word in enumerate(words) if word in group), len(words))
        for words in PLACES
    )
    return (group == OTHERS, *places, group)


def _finite(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.replace([np.inf, -np.inf], np.nan)


def _read_audit(path: pathlib.Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    try:
        return pd.read_csv(path, dtype=str, keep_default_na=False)
    except (pd.errors.EmptyDataError, pd.errors.ParserError):
        return None  # The report says that there is none.
