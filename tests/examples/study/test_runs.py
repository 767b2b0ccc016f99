"""A run of the study is the trainer's, with the learning rate as an argument."""

import dataclasses

import numpy as np
import pytest

from examples.study.arms import KNOWN
from examples.study.runs import Trainer
from examples.study.search import Rates, Settings
from examples.study.workloads import WORKLOADS, Workload
from tests.examples.pretrain import tiny

RATES = Rates(0.003, 0.003)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_texts(tmp_path_factory.mktemp("texts"))


def run(data, arm, rates=RATES, clip=None, **options):
    config = tiny.config(data=(str(data),))
    recipe = dataclasses.replace(config.recipe, clip=clip)
    config = dataclasses.replace(config, recipe=recipe)
    trainer = Trainer(Workload("tiny", config), KNOWN[arm])
    return trainer.train(rates, seed=0, **options)


@pytest.mark.extended
@pytest.mark.parametrize("arm", ["adamw", "orscale"])
def test_a_run_is_the_trainers(data, arm, tmp_path):
    found = run(data, arm)
    assert tiny.main(tiny.arguments(data, tmp_path, optimizer=(arm,))) == 0
    rows = tiny.rows(tmp_path / arm / "metrics.csv")
    expected = [float(r["val_loss"]) for r in rows if r["val_loss"]]
    np.testing.assert_allclose(found.losses, expected, atol=2e-6)


@pytest.mark.extended
def test_adamw_with_two_rates_is_adamw_where_they_are_the_same(data):
    found = run(data, "adamw_apart").losses
    np.testing.assert_allclose(found, run(data, "adamw").losses, atol=2e-6)


@pytest.mark.extended
def test_both_rates_and_the_clip_of_gradients_count(data):
    plain = run(data, "muon_moonlight").losses
    changed = [Rates(0.006, 0.003), Rates(0.003, 0.006)]
    others = [run(data, "muon_moonlight", rates).losses for rates in changed]
    others.append(run(data, "muon_moonlight", clip=1e-3).losses)
    for other in others:
        assert not np.allclose(other, plain, atol=1e-4)


@pytest.mark.extended
def test_ratios_are_written_down(data):
    found = run(data, "orscale")
    assert len(found.uniform) == 6 and found.uniform[0] == pytest.approx(1, abs=1e-5)
    assert set(found.class_ratio) > {"attention query", "mlp up"}
    assert found.at_bound == 0
    assert run(data, "muon_moonlight").uniform == []


@pytest.mark.extended
def test_a_replay_of_ones_is_muon_moonlight_and_of_halves_half_the_rate(data):
    plain = run(data, "muon_moonlight").losses
    assert run(data, "replayed", factors=np.ones(6)).losses == plain
    halves = run(data, "replayed", factors=np.full(6, 0.5)).losses
    assert not np.allclose(halves, plain, atol=1e-4)


@pytest.mark.extended
def test_the_scale_is_that_of_the_initial_matrices(data):
    config = tiny.config(data=(str(data),))
    params, small = (
        Trainer(Workload("tiny", config, scale), KNOWN["orscale"]).initial_state(0)[
            "params"
        ]
        for scale in (1.0, 0.25)
    )
    up = params["blocks"][0]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(small["blocks"][0]["mlp"]["up"]["kernel"], 0.25 * up)
    np.testing.assert_array_equal(
        small["embed"]["embedding"], params["embed"]["embedding"]
    )


def test_every_workload_comes_at_two_scales():
    scales = [workload.initial_scale for workload in WORKLOADS.values()]
    assert scales.count(1.0) == 7 and len(scales) == 14
    for name, workload in WORKLOADS.items():
        base = WORKLOADS[name.removesuffix("-small-init")]
        same = dataclasses.replace(workload, name=base.name, initial_scale=1.0)
        assert same == base


@pytest.mark.extended
def test_a_decay_of_the_run_is_that_of_the_recipe(data):
    plain = run(data, "orscale").losses
    same = run(data, "orscale", Settings(*RATES, 0.1)).losses
    np.testing.assert_allclose(same, plain, atol=2e-6)
    for arm in ("orscale", "muon_moonlight"):
        more, less = (run(data, arm, Settings(*RATES, x)).losses for x in (3.0, 0.0))
        assert not np.allclose(more, less, atol=1e-4)
