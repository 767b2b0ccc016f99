"""Plans at scale: sizes of the models, and figures that are counted by hand."""

import csv
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from examples.benchmarks import at_scale
from examples.benchmarks.at_scale import MODELS, PARTS, STEP, TITLES, arrays_of
from orscale_jax.distributed.costs import ShardedArray
from orscale_jax.distributed.mesh import MeshShape, count_devices
from orscale_jax.newton_schulz import restarts

DOCS = pathlib.Path(__file__).parents[3] / "docs"
PAGE, DATA = DOCS / "study" / "measurements.md", DOCS / "data" / "at_scale.csv"

# Without embeddings, norms, routers, and the layers that predict further tokens.
PARAMETERS = {
    "Moonlight 16B": 15.3e9,
    "dense 70B": 68.5e9,
    "DeepSeek-V3 671B": 669e9,
    "Kimi K2 1T": 1024e9,
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_the_sizes_of_their_names(model):
    arrays = arrays_of(model, at_scale.mesh_of("tpu", 64))
    entries = sum(math.prod(array.shape) for array in arrays)
    assert entries == pytest.approx(PARAMETERS[model], rel=0.01)


@pytest.mark.parametrize("platform", TITLES)
@pytest.mark.parametrize("count", at_scale.COUNTS)
def test_every_model_divides_among_the_devices(platform, count):
    mesh = at_scale.mesh_of(platform, count)
    assert math.prod(mesh.sizes.values()) == count
    for model in MODELS:
        for array in arrays_of(model, mesh):
            for size, axes in zip(array.shape, array.axes, strict=True):
                assert size % count_devices(axes, mesh.sizes) == 0


def test_matrices_between_nodes():
    """64 matrices over two nodes: each device has four, of which half came from afar."""
    mesh = MeshShape({"node": 2, "fsdp": 8}, {"node": 2})
    axes = ((), ("node", "fsdp"), ())
    array = ShardedArray((64, 256, 512), np.dtype(jnp.bfloat16), axes)
    (bucket,) = at_scale.planned([array], "gpu", mesh)
    nbytes = 4 * 256 * 512 * 2
    assert bucket.traffic == (2 * nbytes * 7 // 8, 2 * nbytes // 2, 2 * 7, 2 * 1)
    assert bucket.flops == 4 * restarts.flops(256, 512, at_scale.NS_STEPS, restarts=2)


def test_the_table_on_the_page():
    rows = set(map(tuple, csv.reader(DATA.read_text().splitlines())))
    shown = [
        tuple(cell.strip() for cell in text.strip("|").split("|"))
        for text in PAGE.read_text().splitlines()
        if text.startswith("|") and "--" not in text
    ]
    table = [cells for cells in shown if len(cells) == 14]
    assert len(table) == 7 and set(table) <= rows
    assert all(float(seconds) < 5 for _, _, _, seconds, *_ in rows - {table[0]})


@pytest.mark.parametrize(("platform", "megabytes"), [("tpu", 13420), ("gpu", 48320)])
def test_collectives_in_each_step_are_those_of_compiled_programs(platform, megabytes):
    """The bytes are those of 64 matrices of 2048×8192, in docs/study/measurements.md."""
    found = 64 * at_scale.received_in_steps(2048, 8192, platform) / 1e6
    assert found == pytest.approx(megabytes, rel=1e-3)


@pytest.mark.extended
def test_the_table_and_its_figure(capsys, tmp_path):
    table, figure = tmp_path / "table.csv", tmp_path / "figure.png"
    models = ("Moonlight 16B", "Kimi K2 1T")
    options = at_scale.Options(models, counts=(64, 1024), table=table, figure=figure)
    at_scale.main(options)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 8 == len(capsys.readouterr().out.splitlines()) - 2
    assert figure.read_bytes().startswith(b"\x89PNG")
    for row in rows:
        assert float(row["planned in, s"]) > 0
        assert float(row["of an even share"]) >= 1
        assert float(row[STEP]) < float(row[PARTS])
        exposed, transfers = row["exposed at least, ms"], row["transfers, ms"]
        assert 0 < float(exposed) < float(transfers) < float(row[STEP])
