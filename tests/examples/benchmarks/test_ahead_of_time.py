"""The table of compiled steps, for devices that are there: eight of a CPU."""

import jax
import numpy as np
import pytest

from examples.benchmarks import ahead_of_time
from examples.benchmarks.ahead_of_time import Options, Target

HEAD = ["case", "optimizer", *ahead_of_time.COLUMNS]


def on_cpu(case, platform):
    """Two halves of the devices for slices."""
    devices = np.array(jax.devices()[:8])
    shape = (2, 4) if "dcn" in case.mesh else 8
    return Target(devices.reshape(shape), {i: i // 4 for i in range(8)})


def rows(printed):
    """Figures by optimizer and column."""
    head, _, *lines = (line.strip("| ").split(" | ") for line in printed.splitlines())
    return {cells[1]: dict(zip(head[2:], cells[2:], strict=True)) for cells in lines}


@pytest.mark.extended
def test_a_layer_of_gpt2_on_eight_devices(capsys, tmp_path):
    contenders = ("optax.adamw", "optax.contrib.muon", "orscale", "orscale on Auto axes")
    options = Options(cases=("c",), contenders=contenders, layers=1, dump=tmp_path)
    ahead_of_time.main(options, on_cpu)
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
    changed = {"no_such": "ON"}
    options = Options("tpu", ("c",), ("optax.adamw",), 1, compiler_options=changed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such"):
        ahead_of_time.main(options, on_cpu)


@pytest.mark.extended
def test_what_comes_from_other_slices(capsys):
    options = Options(cases=("l", "o"), contenders=("orscale",), layers=8)
    ahead_of_time.main(options, on_cpu)
    across, experts = (
        dict(zip(HEAD, text.strip("| ").split(" | "), strict=True))
        for text in capsys.readouterr().out.splitlines()[2:]
    )
    received = "from other slices, MB"
    # Eight matrices in bfloat16, half of them from the other slice, both ways.
    wanted = 2 * 4 * 2048 * 8192 / 2 / 1e6
    assert float(across[received]) == pytest.approx(wanted, rel=1e-3)
    assert float(experts[received]) < 1e-3


def test_the_programs_that_a_platform_has():
    for case in ahead_of_time.CASES.values():
        if case.topology is None:
            with pytest.raises(ValueError, match="--platform gpu"):
                ahead_of_time.target_of(case, "tpu")
