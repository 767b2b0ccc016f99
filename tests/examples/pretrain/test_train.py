"""The loop by itself, without files, checkpoints and signals."""

import ast
import pathlib

import jax
import numpy as np
import pytest

from examples.pretrain.meshes import make_mesh
from examples.pretrain.tasks import make_task, read_data
from examples.pretrain.train import make_trainer, train
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


def imported_by(path):
    """The modules of the program that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("examples"):
            yield node.module


COMMANDS = {"__main__.py", "compare.py", "sample.py"}
FILES = [path for path in CORE.rglob("*.py") if path.parent.name != "operation"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_what_trains_does_without_what_operates_it(path: pathlib.Path):
    if path.relative_to(CORE).as_posix() not in COMMANDS:
        assert not [name for name in imported_by(path) if "operation" in name]
