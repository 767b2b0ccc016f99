"""A repeated run is the trainer's, with the study's initial weights and batches."""

import csv
import dataclasses

import numpy as np
import pytest

from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import make_mesh
from examples.pretrain.setup import set_up
from examples.pretrain.tasks import make_task
from examples.study import repeat
from examples.study.contrasts import REFERENCE, confirmed
from examples.study.workloads import Workload, find_workload
from examples.track0 import prose
from tests.examples.pretrain import tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    data = tiny.write_texts(tmp_path_factory.mktemp("texts"))
    config = tiny.config(data=(str(data),))
    recipe = dataclasses.replace(config.recipe, steps=60)
    return dataclasses.replace(config, recipe=recipe)


def final_loss(config, arm, rates, **workload):
    [(_, loss)] = repeat.train(Workload(config, **workload), arm, rates, [0])
    return loss


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_run_is_the_trainers_and_its_rates_count(config, tmp_path):
    loss = final_loss(config, "orscale", (0.01, 0.01))
    assert loss < np.log(256) - 0.1
    options = {"optimizer": ("orscale",), "steps": 60, "learning_rate": 0.01}
    assert tiny.main(tiny.arguments(*config.data, tmp_path, **options)) == 0
    rows = tiny.rows(tmp_path / "orscale" / "metrics.csv")
    [*_, last] = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert loss == pytest.approx(last, rel=1e-5)
    for rates in ((0.02, 0.01), (0.01, 0.02)):
        assert abs(final_loss(config, "orscale", rates) - loss) > 1e-4
    assert abs(final_loss(config, "orscale", (0.01, 0.01), first_batch=2) - loss) > 1e-4
    # A run that diverges has the loss of a uniform guess.
    diverged = final_loss(config, "muon_moonlight", (1e4, 1e4))
    assert diverged == pytest.approx(np.log(256), abs=1e-5)


@pytest.mark.extended
def test_the_scale_is_that_of_the_initial_matrices(config):
    mesh = make_mesh(config.mesh, tiny.jax.devices()[:1])
    setup = set_up(make_task(config), config.recipe_of("orscale"), mesh)
    params, small = (
        repeat.initial_state(setup, 0, scale)["params"] for scale in (1.0, 0.25)
    )
    up = params["blocks"][0]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(small["blocks"][0]["mlp"]["up"]["kernel"], 0.25 * up)
    np.testing.assert_array_equal(
        small["embed"]["embedding"], params["embed"]["embedding"]
    )


def test_a_repeat_has_the_settings_of_the_table_and_does_nothing_twice(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tiny.ROOT)
    asked = []

    def train(workload, arm, rates, seeds):
        asked.append((arm, rates, list(seeds)))
        return [(seed, seed / 100) for seed in list(seeds)[:7]]

    monkeypatch.setattr(repeat, "train", train)
    with pytest.raises(KeyError):  # It was interrupted.
        repeat.repeat("dense-small", "orscale", tmp_path)
    losses = repeat.repeat("dense-small", "orscale", tmp_path)
    assert losses == {seed: seed / 100 for seed in range(100, 112)}
    assert asked == [
        ("orscale", (0.016, 0.064), [*range(100, 112)]),
        ("orscale", (0.016, 0.064), [*range(107, 112)]),
    ]
    with (tmp_path / "dense-small-orscale.csv").open() as file:
        assert [int(seed) for seed, _ in csv.reader(file)] == [*range(100, 112)]
    with pytest.raises(UsageError, match="--arms aurora was not run on dense-small"):
        repeat.run(repeat.Options(arms=("aurora",), out=tmp_path))
    with pytest.raises(UsageError, match="--workloads huge is unknown"):
        find_workload("huge")


@pytest.mark.extended
def test_old_and_new_differences_stand_side_by_side(monkeypatch, tmp_path):
    monkeypatch.chdir(tiny.ROOT)
    for arm in ("orscale", REFERENCE):
        losses = confirmed("two_rates/dense-small", arm)
        lines = [f"{seed},{loss}\n" for seed, loss in losses.items()]
        (tmp_path / f"dense-small-{arm}.csv").write_text("".join(lines))
    options = repeat.Options(workloads=("dense-small",), out=tmp_path, processes=1)
    row = repeat.run(options).splitlines()[-1].strip("| ").split(" | ")
    assert row[:2] == ["`dense-small`", "OrScale − Muon+Moonlight"]
    assert row[2] == row[3] and row[4] == "24 of 24"


def test_prose_has_every_paragraph_on_one_side(tmp_path, monkeypatch):
    paragraphs = [f"Paragraph {i}." for i in range(2345)]
    monkeypatch.setattr(prose, "_read", lambda: "\n" + "\n".join(paragraphs) + "\n")
    prose.write_prose(tmp_path)
    train, val = (
        (tmp_path / f"{side}.txt").read_text().split("\n") for side in ("train", "val")
    )
    assert sorted(train + val) == sorted(paragraphs)
    assert val == paragraphs[900:1000] + paragraphs[1900:2000]
