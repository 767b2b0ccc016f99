"""The loop and its validation, without files, checkpoints and signals."""

import ast

import jax
import numpy as np
import pytest

from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.setup import set_up
from examples.pretrain.tasks import make_task, read_data
from examples.pretrain.train import evaluation, evaluation_batch_size, make_trainer, train
from tests.examples.pretrain import tiny

CORE = tiny.ROOT / "examples" / "pretrain"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    texts = tiny.write_texts(tmp_path_factory.mktemp("loop") / "texts")
    config = tiny.config(data=(str(texts),), steps=8)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return make_trainer(make_task(config), read_data(config), config.recipe, mesh)


@pytest.mark.extended
def test_it_pauses_where_the_caller_asks_and_at_the_end(trainer):
    state = trainer.setup.initial_state()
    intervals = list(train(trainer, state, 0, lambda step: step in (3, 5)))
    assert [(i.first_step, i.step) for i in intervals] == [(1, 3), (4, 5), (6, 8)]
    assert [len(interval.metrics) for interval in intervals] == [3, 2, 3]
    assert intervals[-1].loss == float(intervals[-1].metrics[-1]["loss"])
    assert intervals[-1].loss < intervals[0].metrics[0]["loss"]
    assert trainer.evaluate(intervals[-1].state)["loss"] > 0


def test_it_goes_on_from_any_step(trainer):
    def losses(state, start):
        (interval,) = train(trainer, state, start, lambda step: False)
        return [metrics["loss"] for metrics in interval.metrics]

    whole = losses(trainer.setup.initial_state(), 0)
    halves = train(trainer, trainer.setup.initial_state(), 0, lambda step: step == 4)
    state = next(halves).state
    np.testing.assert_array_equal(losses(state, 4), whole[4:])


# Validation


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
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    data, task = read_data(config), make_task(config)
    assert len(data.validation) == 18
    setup = set_up(task, config.recipe, mesh)
    with in_effect(mesh):
        state = setup.initial_state()
        found = evaluation(setup, data, largest_batch=8)(state)
        model = setup.merge(state["params"], state["variables"])
        wanted = jax.jit(task.evaluate)(model, np.stack(list(data.validation)))
    assert found == {"loss": pytest.approx(float(wanted["loss"]), rel=1e-6)}


def imported_by(path):
    """The modules of the program that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("examples"):
            yield node.module


def test_what_trains_does_without_what_operates_it():
    commands = {CORE / name for name in ("__main__.py", "sample.py")}
    for path in {*CORE.glob("*.py"), *CORE.glob("models/*.py")} - commands:
        assert not [name for name in imported_by(path) if "operation" in name], path
