"""The table of compiled steps, for devices that are there: eight of a CPU."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from examples.benchmarks import ahead_of_time, hlo_cost
from examples.benchmarks.ahead_of_time import Options
from examples.benchmarks.layers_apart import layers_apart, newton_schulz
from examples.benchmarks.models import experts


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


@pytest.mark.extended
def test_layers_apart_and_loops():
    """Each layer is exchanged twice; Optax's Muon exchanges in every step of a loop."""
    devices = np.array(jax.devices()[:8])
    leaves = {"w": experts(6, 16, 32, P(None, "fsdp", None))}

    def cost(contender):
        module = ahead_of_time.lowered(leaves, ("fsdp",), devices, contender)
        return hlo_cost.of(module.compile().as_text())

    apart, looped = cost(ahead_of_time.LAYERS_APART), cost(ahead_of_time.LOOPED)
    # Two more layers of zeros, so that eight devices have one each.
    assert apart.collective_bytes == 2 * 4 * 16 * 32
    assert {c.kind for c in apart.collectives} == {"all-to-all"}
    assert looped.looped_bytes > 0 == apart.looped_bytes


def test_layers_apart_are_those_of_one_device():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(3, 8, 16)).astype(np.float32)
    expected = newton_schulz(x, 5)
    for spec in (P(None, "fsdp", "tensor"), P(None, None, "fsdp"), P()):
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            found = jax.jit(lambda x, spec=spec: layers_apart(x, spec, 5))(placed)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    singular = np.linalg.svd(expected, compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.3
