"""The cells of the notebooks run, as they do when the site is built."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
CELL = re.compile(  # Its options stand between two lines of dashes.
    r"^```\{code-cell\} python\n(?:---\n.*?^---\n)?(.*?)^```$", re.MULTILINE | re.DOTALL
)


def run(notebook):
    """The names that the cells leave."""
    text = notebook.read_text()
    namespace = {"__name__": "__main__"}
    for cell in CELL.finditer(text):
        above = text.count("\n", 0, cell.start(1))
        exec(compile("\n" * above + cell[1], notebook, "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def without_windows():
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.extended
def test_learning_rates():
    names = run(FOLDER / "learning_rates.md")
    for losses in names["losses"].values():
        final = losses[:, -20:].mean(axis=1)
        assert 0 < final.argmin() < len(names["rates"]) - 1  # The best is in between.


@pytest.mark.extended
def test_trust_ratios():
    names = run(FOLDER / "trust_ratios.md")
    assert names["losses"][-1] < names["losses"][0] / 5
    ratios = names["readings"].trust_ratio["mlp"]
    assert ratios["up"].shape == ratios["down"].shape == (names["STEPS"], 3)
    assert (ratios["down"][-1] > 1).all() and (ratios["up"][-1] < 1).all()


def test_no_notebook_is_left_out():
    assert {page.stem for page in FOLDER.iterdir()} == {"learning_rates", "trust_ratios"}
