"""The times of a step: their quartiles, their CSV file and their figure."""

import statistics

import jax
import numpy as np
import pytest
from PIL import Image

from examples.benchmarks import shapes, step, step_figure
from examples.benchmarks.timing import Quartiles
from examples.pretrain.errors import UsageError

SECONDS = [0.3, 0.1, 0.2, 0.5, 0.4]


def test_quartiles():
    low, median, high = statistics.quantiles(SECONDS, method="inclusive")
    assert Quartiles.of(SECONDS) == Quartiles(*map(pytest.approx, (low, median, high)), 5)


@pytest.mark.extended
def test_the_figure_is_drawn_of_the_file_that_a_run_leaves(tmp_path):
    names = step.Options().contenders
    times = {
        name: Quartiles(0.5 + i, 1.0 + i, 1.5 + i, 7) for i, name in enumerate(names)
    }
    results = [step.Result(case, times, 1e9) for case in ("davidnet", "tiny")]
    step.write(results, "bfloat16", tmp_path)
    read, measured = step_figure.read_times(tmp_path / "benchmark.csv")
    assert read == {"davidnet": times, "tiny": times}
    assert "bfloat16" in measured and jax.__version__ in measured
    drawn = np.asarray(Image.open(tmp_path / "benchmark.png").convert("RGB"))
    assert drawn.shape[1] == 1500
    assert tuple(drawn[0, 0]) == (255, 255, 255)
    narrow = np.asarray(Image.open(tmp_path / "benchmark_narrow.png"))
    assert narrow.shape[1] == 780
    step.main(step.Options(out=tmp_path, replot=True))
    again = np.asarray(Image.open(tmp_path / "benchmark.png").convert("RGB"))
    assert np.array_equal(again, drawn)


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
