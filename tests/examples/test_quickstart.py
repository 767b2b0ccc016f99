"""The quickstart is short, runs, and learns."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.mark.extended
def test_runs_and_learns():
    assert len(SCRIPT.read_text().splitlines()) <= 40
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    steps, losses = zip(*(line.split() for line in output.splitlines()), strict=True)
    assert steps == ("100", "200", "300")
    assert float(losses[-1]) < 0.02 < float(losses[0])
