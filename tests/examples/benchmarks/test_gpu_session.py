"""Everything to measure on one GPU, in miniature on a CPU."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from examples.benchmarks.gpu_session import card, figure, oracle, stage, table
from examples.benchmarks.gpu_session.__main__ import STAGES, main
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.timing import Quartiles
from tests import oracle as independent

ROOT = Path(__file__).parents[3]
OTHERS = STAGES.keys() - {"correctness", "symmetric"}


def extended(name):
    return pytest.param(name, marks=pytest.mark.extended)


@pytest.fixture(autouse=True)
def no_programs_of_a_card(monkeypatch):
    monkeypatch.setattr(card, "_nvidia_smi", lambda query: "")


def rows_of(name, folder, monkeypatch):
    """What a stage leaves, which a second run does not measure again."""
    arguments = ["--tiny", "--stage", name, "--out", str(folder)]
    assert main(arguments) == 0
    rows = table.read(folder / f"{name}.csv")
    done = {(row.case, row.variant) for row in rows}
    assert done == {(case.name, case.variant) for case in STAGES[name].cases(True)}
    for row in rows:
        assert row.low <= row.median <= row.high
        assert row.number >= 1
        assert (row.card, row.jax) == (jax.devices()[0].device_kind, jax.__version__)
    with Image.open(folder / f"{name}.png") as drawn:
        assert drawn.width == 1500
    monkeypatch.setattr(Case, "rows", None)
    assert main(arguments) == 0
    assert table.read(folder / f"{name}.csv") == rows
    return rows


@pytest.mark.parametrize("name", ["symmetric", *map(extended, sorted(OTHERS))])
def test_a_stage_leaves_a_table_and_a_figure_and_is_not_repeated(
    name, tmp_path, monkeypatch
):
    assert rows_of(name, tmp_path, monkeypatch)


@pytest.mark.extended
def test_correctness_tells_right_from_wrong(tmp_path, monkeypatch):
    """On a CPU all is right: errors are a few times those of rounding, or zero."""
    rows = rows_of("correctness", tmp_path, monkeypatch)
    found = {(row.case, row.variant, row.quantity): row.median for row in rows}
    for case in ("zero", "one NaN", "one infinity", "three steps without gradients"):
        assert found[f"{case}, 8×24", "bfloat16", "error"] == 0
    for case in ("random", "random × 1e30", "condition 1e3"):
        of_case = f"{case}, 8×24", "bfloat16"
        rounding = found[*of_case, "error of rounding"]
        assert 0 < found[*of_case, "error"] < 3 * rounding < 1
    for factor in ("", ", gradients × 1e-30", ", gradients × 1e30"):
        assert 0 < found[f"three steps{factor}, 8×24", "float32", "error"] < 1e-5


def test_the_oracle_is_that_of_the_tests():
    rng = np.random.default_rng(0)
    weight, *gradients = rng.normal(size=(4, 6, 10))
    gradients[0][:] = 0  # The first direction comes later.
    for x in (weight, weight.T):
        wanted = independent.newton_schulz(x)
        np.testing.assert_allclose(oracle.newton_schulz(x), wanted, rtol=1e-6)
    np.testing.assert_allclose(oracle.exact_polar(weight), independent.svd_polar(weight))
    matrix = independent.Matrix(weight)
    for gradient in gradients:
        matrix.step(gradient, 0.3)
    found = oracle.orscale(weight, gradients, 0.3)
    np.testing.assert_allclose(found, matrix.weight, rtol=1e-6)


def made_stage(*measures):
    names = "abcdef"
    cases = [Case(name, "v", f) for name, f in zip(names, measures, strict=False)]
    return Stage(lambda tiny: cases, lambda rows, path: path.touch())


def one_second():
    yield Measured("time", "s", Quartiles.of([1.0]))


def too_large():
    yield from one_second()
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")


def test_a_case_that_fails_is_told_and_tried_again(tmp_path, capsys):
    outcome = stage.run("made", made_stage(too_large, one_second), tmp_path, 60, True)
    assert outcome == stage.Outcome(left=(), failed=("made: a, v",))
    assert (
        "made: a, v failed: RESOURCE_EXHAUSTED: Out of memory\n"
        in capsys.readouterr().err
    )
    assert [row.case for row in table.read(tmp_path / "made.csv")] == ["b"]
    again = stage.run("made", made_stage(one_second, too_large), tmp_path, 60, True)
    assert again == stage.Outcome((), ())
    assert [row.case for row in table.read(tmp_path / "made.csv")] == ["b", "a"]


def test_another_card_is_measured_too(tmp_path, monkeypatch):
    made = made_stage(one_second)
    stage.run("made", made, tmp_path, 60, True)
    monkeypatch.setattr(stage, "this_card", lambda: card.Card("H100", "580", "0.11"))
    stage.run("made", made, tmp_path, 60, True)
    rows = table.read(tmp_path / "made.csv")
    assert [row.card for row in rows] == [jax.devices()[0].device_kind, "H100"]


def test_no_case_is_started_when_the_time_is_over(tmp_path, capsys):
    arguments = ["--tiny", "--seconds", "0", "--stage", "recipe", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "recipe: no time was left" in (told := capsys.readouterr().out)
    assert all(case.variant in told for case in STAGES["recipe"].cases(True))
    assert not (tmp_path / "recipe.csv").exists()


def test_it_asks_for_a_gpu(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 2
    assert "pass --tiny" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_nvidia_smi_tells(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.clock() == ""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1755\necho 345\n")
    program.chmod(0o755)
    assert card.clock() == "1755"
    program.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert card.clock() == ""


def test_figures_name_what_they_were_measured_with():
    def row(clock):
        return table.Row(
            "a", "b", 0, "time", "s", 1, 1, 1, 1, "H100", "580", "0.11", clock
        )

    one = figure.measured_with([row("1980")])
    assert one == "H100; driver 580; JAX 0.11; 1980 MHz"
    several = figure.measured_with([row("1980"), row("1755"), row("")])
    assert several == "H100; driver 580; JAX 0.11; 1755 to 1980 MHz"


def test_quartiles():
    found = Quartiles.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == (2, 3, 4, 5)
    assert found.times(10) == (20, 30, 40, 5)
    assert found.dividing(12) == (3, 4, 6, 5)


BLOCKED = """
import flax.nnx, sys  # Flax itself needs rich.
for name in [*sys.modules]:
    if name.partition(".")[0] == "rich":
        del sys.modules[name]

class Refuse:
    def find_spec(name, path=None, target=None):
        known = {"grain", "tyro", "rich", "pandas", "scipy", "tensorboardX", "tests"}
        if name.partition(".")[0] in known:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse)
import examples.benchmarks.gpu_session.__main__
"""


@pytest.mark.extended
def test_it_needs_no_more_than_jax_flax_optax_and_matplotlib():
    subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, check=True)
