"""The times of a step: their quartiles, their table, their CSV file and their figure."""

import statistics

import jax
import numpy as np
import pytest
from PIL import Image

from examples.benchmarks import shapes, step
from examples.benchmarks.timing import Quartiles
from examples.pretrain.errors import UsageError


def test_quartiles():
    seconds = [0.3, 0.1, 0.2, 0.5, 0.4]
    quartiles = statistics.quantiles(seconds, method="inclusive")
    assert Quartiles.of(seconds) == Quartiles(*map(pytest.approx, quartiles), 5)
    found = Quartiles(2, 3, 4, 5)
    assert found.times(10) == (20, 30, 40, 5)
    assert found.map(lambda x: 12 / x) == (3, 4, 6, 5)


def made_results():
    names = step.Options().contenders
    times = {n: Quartiles(0.5 + i, 1.0 + i, 1.5 + i, 7) for i, n in enumerate(names)}
    return dict.fromkeys(("davidnet", "tiny"), (times, 1e9))


def test_the_table():
    head, _, *rows = step.table(made_results())
    assert head.startswith("|  | faster than optax.contrib.muon | orscale, ms | muon, ms")
    # 2 s against 4 s, and 1.9 GFLOP in 4 s.
    share = shapes.nominal_flops(shapes.CASES["davidnet"]) / 4 / 1e9
    assert rows[0].startswith("| DavidNet | 0.50 × | 4,000 | 3,000 | 2,000 | 1,000 | ")
    assert rows[0].endswith(f"| {100 * share:.0f} % of 1 GFLOP/s |")


@pytest.mark.extended
def test_the_figure_is_drawn_of_the_file_that_a_run_leaves(tmp_path):
    def drawn(name):
        return np.asarray(Image.open(tmp_path / name).convert("RGB"))

    step.write(made_results(), "bfloat16", tmp_path)
    written = (tmp_path / "benchmark.csv").read_text().splitlines()
    assert len(written) == 1 + 2 * 4
    assert "bfloat16" in written[1] and jax.__version__ in written[1]
    first = drawn("benchmark.png")
    assert first.shape[1] == 1500 and tuple(first[0, 0]) == (255, 255, 255)
    assert drawn("benchmark_narrow.png").shape[1] == 780
    step.main(step.Options(out=tmp_path, replot=True))
    assert np.array_equal(drawn("benchmark.png"), first)


def test_stacked_cases_hold_the_same_matrices():
    for name in ("gpt2", "split", "tiny"):
        stack = shapes.CASES["stacked" if name == "gpt2" else f"{name}-stacked"]
        apart = shapes.CASES[name]
        assert shapes.nominal_flops(stack) == shapes.nominal_flops(apart)
        assert len(stack) < len(apart)
    assert shapes.NAMES.keys() == shapes.CASES.keys()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"cases": ("gpt3",)}, "no case 'gpt3'.*gpt2, split"),
        ({"contenders": ("moun", "orscale")}, "no contender 'moun'.*optax.adamw"),
        ({"contenders": ("muon",)}, "--contenders muon: add orscale"),
    ],
)
def test_names_that_there_are_not(given, message):
    with pytest.raises(UsageError, match=message):
        step.main(step.Options(**given))
