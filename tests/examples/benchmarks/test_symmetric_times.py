"""The comparison of symmetric products, with a kernel that is interpreted on the CPU."""

import dataclasses

import jax
import pytest

from examples.benchmarks import symmetric
from examples.benchmarks.symmetric import Options
from orscale_jax.newton_schulz.symmetric import TRITON

KERNEL = dataclasses.replace(
    TRITON, tile=16, large_tile=16, depth=32, smallest=32, interpret=True
)


def cells(line):
    return line.strip("| ").split(" | ")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(symmetric, "SHAPES", ((40, 70), (48, 48)))


def test_without_an_accelerator_it_says_so():
    with pytest.raises(SystemExit, match=r"no GPU and no TPU here.*--compile-only"):
        symmetric.main(Options())


@pytest.mark.extended
def test_times_and_a_verdict(small, capsys):
    symmetric.time_all(KERNEL, Options(turns=2, calls=1))
    head, _, *rows, verdict = capsys.readouterr().out.splitlines()
    assert [tuple(cells(row)[:3]) for row in rows] == [
        ("40×70", "XXᵀ", "67 %"),
        ("40×70", "factor", ""),
        ("48×48", "XXᵀ", "67 %"),
        ("48×48", "AA", "67 %"),
        ("48×48", "factor", ""),
    ]
    for row in rows:
        found = dict(zip(cells(head), cells(row), strict=True))
        ratio = float(found["XLA, ms"]) / float(found["kernel, ms"])
        assert float(found["XLA over kernel"]) == pytest.approx(ratio, abs=0.01)
    assert verdict.startswith("It ")


@pytest.mark.parametrize(
    "ratios, words",
    [
        ([1.1, 1.3], "It pays: "),
        ([0.8, 1.01], "It does not pay: "),
        ([0.9, 1.2], "It pays for some shapes: "),
    ],
)
def test_the_verdict_is_on_the_factors(ratios, words):
    found = symmetric.verdict(ratios, margin=0.02)
    assert found.startswith(words)
    assert f"{ratios[0]:.2f} to {ratios[1]:.2f}" in found


@pytest.mark.extended
@pytest.mark.compiled
def test_what_the_compiler_says(small, capsys):
    symmetric.compile_all(KERNEL, jax.devices()[0], {})
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    found = dict(zip(cells(head), cells(first), strict=True))
    assert float(found["XLA: GFLOP"]) == pytest.approx(2 * 40 * 40 * 70 / 1e9, rel=1e-3)
