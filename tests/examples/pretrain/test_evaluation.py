import jax
import numpy as np
import pytest

from examples.pretrain.errors import UsageError
from examples.pretrain.evaluation import evaluation, evaluation_batch_size
from examples.pretrain.meshes import MeshConfig, in_effect, make_mesh
from examples.pretrain.setup import set_up
from examples.pretrain.tasks import make_task, read_data
from tests.examples.pretrain import tiny


@pytest.mark.parametrize(
    ("examples", "largest", "shards", "size"),
    [
        (1000, 128, 1, 125),
        (1000, 128, 8, 40),
        (10_000, 512, 8, 400),
        (96, 16, 4, 16),
        (96, 15, 4, 12),
        (7, 7, 7, 7),
    ],
)
def test_batches_are_as_large_as_they_can_be(examples, largest, shards, size):
    assert evaluation_batch_size(examples, largest, shards) == size


@pytest.mark.parametrize(("examples", "largest", "shards"), [(10, 8, 4), (8, 3, 4)])
def test_examples_that_make_no_whole_batches_are_refused(examples, largest, shards):
    with pytest.raises(UsageError, match=f"{examples} validation .* {shards} devices: "):
        evaluation_batch_size(examples, largest, shards)


@pytest.mark.extended
def test_validation_is_the_mean_over_all_examples(tmp_path):
    """The same on two devices, in batches of 6, as at once."""
    data = str(tiny.write_texts(tmp_path / "texts"))
    config = tiny.config(data=(data,), batch_size=6, val_batches=3)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    data, task = read_data(config), make_task(config)
    assert len(data.validation) == 18
    setup = set_up(task, config.recipe, mesh)
    with in_effect(mesh):
        state = setup.initial_state()
        found = evaluation(setup, data, largest_batch=8)(state)
        model = setup.merge(state["params"], state["variables"])
        wanted = jax.jit(task.evaluate)(model, np.stack(list(data.validation)))
    assert found == {"loss": pytest.approx(float(wanted["loss"]), rel=1e-6)}
