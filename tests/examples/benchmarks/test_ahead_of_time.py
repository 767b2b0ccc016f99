"""The table of compiled steps, for devices that are there: eight of a CPU."""

import jax
import numpy as np
import pytest

from examples.benchmarks import ahead_of_time
from examples.benchmarks.ahead_of_time import Options


def rows(printed):
    """Figures by optimizer and column."""
    head, _, *lines = (line.strip("| ").split(" | ") for line in printed.splitlines())
    return {cells[1]: dict(zip(head[2:], cells[2:], strict=True)) for cells in lines}


@pytest.mark.extended
def test_a_layer_of_gpt2_on_eight_devices(capsys, tmp_path):
    contenders = ("optax.adamw", "optax.contrib.muon", "orscale", "orscale on Auto axes")
    options = Options(cases=("c",), contenders=contenders, layers=1, dump=tmp_path)
    ahead_of_time.main(options, lambda _: np.array(jax.devices()[:8]))
    adamw, theirs, ours, on_auto_axes = rows(capsys.readouterr().out).values()
    # All four matrices on every device of theirs.
    m = 768
    of_all = sum(5 * (4 * m * m * n + 2 * m**3) for n in (m, 3 * m, 4 * m, 4 * m)) / 1e9
    assert float(theirs["GFLOP"]) == pytest.approx(of_all, rel=1e-3)
    assert float(ours["GFLOP"]) < of_all / 4
    assert on_auto_axes["GFLOP"] == ours["GFLOP"]
    assert float(adamw["GFLOP"]) == 0
    assert float(ours["collectives, MB"]) > 0 == float(theirs["collectives, MB"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"c.{name}.txt" for name in contenders
    )


def test_compiler_options_reach_the_compiler():
    options = Options(("c",), ("optax.adamw",), 1, compiler_options={"no_such": "ON"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such"):
        ahead_of_time.main(options, lambda _: np.array(jax.devices()[:8]))
