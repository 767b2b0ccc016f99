"""Everything to measure on one GPU, in miniature on a CPU."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.benchmarks.gpu_session import correctness, session
from examples.benchmarks.gpu_session.__main__ import STAGES, main
from examples.benchmarks.gpu_session.session import Case, Measured
from examples.benchmarks.timing import Quartiles
from tests import oracle

ROOT = Path(__file__).parents[3]
OTHERS = STAGES.keys() - {"correctness"}


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    monkeypatch.setattr(session, "nvidia_smi", lambda query: "")


def rows_of(name, folder):
    """What a stage leaves, which a second run does not measure again."""
    arguments = ["--tiny", "--stage", name, "--out", str(folder)]
    assert main(arguments) == 0
    table = folder / f"{name}.csv"
    rows = session.read(table)
    found = {(row.case, row.variant, row.quantity) for row in rows}
    cases = [case for group in STAGES[name](True) for case in group]
    assert {(c.name, c.variant, c.quantity) for c in cases} <= found
    for row in rows:
        assert row.low <= row.median <= row.high
        assert row.number >= 1
        assert (row.card, row.jax) == (jax.devices()[0].device_kind, jax.__version__)
    before = table.stat()
    assert main(arguments) == 0
    assert table.stat().st_mtime_ns == before.st_mtime_ns
    return rows


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_stage_leaves_a_table_and_is_not_repeated(name, tmp_path):
    rows_of(name, tmp_path)


@pytest.mark.extended
def test_correctness_tells_right_from_wrong(tmp_path):
    """On a CPU all is right: errors are a few times those of rounding, or zero."""
    rows = rows_of("correctness", tmp_path)
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
        wanted = oracle.newton_schulz(x)
        np.testing.assert_allclose(correctness.newton_schulz(x), wanted, rtol=1e-6)
    matrix = oracle.Matrix(weight)
    for gradient in gradients:
        matrix.step(gradient, 0.3)
    found = correctness.stepped(weight, gradients, 0.3)
    np.testing.assert_allclose(found, matrix.weight, rtol=1e-6)


def made_stage(*measures):
    cases = [
        Case(name, "v", "time", measure)
        for name, measure in zip("abcdef", measures, strict=False)
    ]
    return lambda tiny: [[case] for case in cases]


def one_second():
    yield Measured("time", "s", Quartiles.of([1.0]))


def too_large():
    yield from one_second()
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")


def run(stages, folder, seconds=60):
    return session.run(stages, folder, seconds, True)


def cases_in(table):
    return [row.case for row in session.read(table)]


def test_a_case_that_fails_is_told_and_tried_again(tmp_path, capsys):
    failed = run({"made": made_stage(too_large, one_second)}, tmp_path)
    assert failed == ([], ["made: a, v, time"])
    told = capsys.readouterr().err
    assert "made: a, v, time failed: RESOURCE_EXHAUSTED: Out of memory\n" in told
    assert cases_in(tmp_path / "made.csv") == ["b"]
    assert run({"made": made_stage(one_second, too_large)}, tmp_path) == ([], [])
    assert cases_in(tmp_path / "made.csv") == ["b", "a"]


def test_another_card_and_another_quantity_are_measured_too(tmp_path):
    path = tmp_path / "made.csv"
    run({"made": made_stage(one_second)}, tmp_path)
    [row] = session.read(path)
    text = path.read_text().replace(f",{row.card},", ",H100,")
    path.write_text(text)
    run({"made": made_stage(one_second)}, tmp_path)
    assert [x.card for x in session.read(path)] == ["H100", row.card]
    path.write_text(path.read_text().replace(",time,", ",another time,"))
    run({"made": made_stage(one_second)}, tmp_path)
    quantities = [x.quantity for x in session.read(path)]
    assert quantities == ["another time", "another time", "time"]


def test_no_case_is_started_when_the_time_is_over(tmp_path, capsys):
    arguments = ["--tiny", "--seconds", "0", "--stage", "recipe", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "No time was left for 6 cases" in (told := capsys.readouterr().out)
    [cases] = STAGES["recipe"](True)
    assert all(f"{case.variant}, {case.quantity}" in told for case in cases)
    assert not (tmp_path / "recipe.csv").exists()


def test_it_asks_for_a_gpu(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 2
    assert "pass --tiny" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


BLOCKED = """
import flax.nnx, sys  # Flax itself needs rich.
for name in [*sys.modules]:
    if name.partition(".")[0] == "rich":
        del sys.modules[name]

class Refuse:
    def find_spec(name, path=None, target=None):
        known = {"grain", "tyro", "rich", "pandas", "scipy", "matplotlib", "tests"}
        if name.partition(".")[0] in known:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse)
import examples.benchmarks.gpu_session.__main__
"""


@pytest.mark.extended
def test_it_needs_no_more_than_jax_flax_and_optax():
    subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, check=True)
