"""A run of the study is the trainer's, with the learning rates as arguments."""

import dataclasses
import math

import numpy as np
import pytest

from examples.study.runs import Trainer
from examples.study.search import Settings
from examples.study.workloads import WORKLOADS, Workload
from tests.examples.pretrain import tiny

RATES = Settings(0.003, 0.003)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_texts(tmp_path_factory.mktemp("texts"))


def trainer(data, arm, clip=None, scale=1.0):
    config = tiny.config(data=(str(data),))
    recipe = dataclasses.replace(config.recipe, clip=clip)
    config = dataclasses.replace(config, recipe=recipe)
    return Trainer(Workload("tiny", config, scale), arm)


def run(data, arm, settings=RATES, **options):
    return trainer(data, arm, **options).train(settings, seed=0)


@pytest.mark.extended
@pytest.mark.parametrize("arm", ["adamw", "orscale"])
def test_a_run_is_the_trainers(data, arm, tmp_path):
    found = run(data, arm)
    assert tiny.main(tiny.arguments(data, tmp_path, optimizer=(arm,))) == 0
    rows = tiny.rows(tmp_path / arm / "metrics.csv")
    expected = [float(r["val_loss"]) for r in rows if r["val_loss"]]
    np.testing.assert_allclose(found.losses, expected, rtol=2e-5)  # Five digits.
    assert found.loss == pytest.approx(min(expected[-1], math.log(256)), abs=1e-5)


@pytest.mark.extended
def test_both_rates_the_decay_and_the_clip_of_gradients_count(data):
    plain = run(data, "muon_moonlight").losses
    changed = [Settings(0.006, 0.003), Settings(0.003, 0.006), Settings(*RATES[:2], 3.0)]
    others = [run(data, "muon_moonlight", settings).losses for settings in changed]
    others.append(run(data, "muon_moonlight", clip=1e-3).losses)
    for other in others:
        assert not np.allclose(other, plain, atol=1e-4)
    same = run(data, "muon_moonlight", Settings(*RATES[:2], 0.1)).losses
    np.testing.assert_allclose(same, plain, rtol=2e-5)
    apart = run(data, "adamw_apart").losses
    np.testing.assert_allclose(apart, run(data, "adamw").losses, rtol=2e-5)


@pytest.mark.extended
def test_ratios_are_written_down(data):
    found = run(data, "orscale")
    assert len(found.uniform) == 2 and found.uniform[0] == pytest.approx(1, abs=1e-5)
    assert set(found.class_ratio) > {"attention query", "mlp up"}
    assert found.at_bound == 0 and found.spread > 0 and found.growth > 0.9
    muon = run(data, "muon_moonlight")
    assert muon.uniform == () and muon.class_ratio == {} and math.isnan(muon.spread)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_run_that_diverges_has_the_loss_of_a_guess(data):
    found = run(data, "muon_moonlight", Settings(1e4, 1e4))
    assert found.diverged and found.loss == pytest.approx(math.log(256), abs=1e-5)


@pytest.mark.extended
def test_the_scale_is_that_of_the_initial_matrices(data):
    params, small = (
        trainer(data, "orscale", scale=scale).initial_state(0)["params"]
        for scale in (1.0, 0.25)
    )
    up = params["blocks"][0]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(small["blocks"][0]["mlp"]["up"]["kernel"], 0.25 * up)
    np.testing.assert_array_equal(
        small["embed"]["embedding"], params["embed"]["embedding"]
    )


def test_workloads_differ_in_what_their_names_say():
    def of(name, **same):
        workload = WORKLOADS[name]
        recipe = dataclasses.replace(workload.config.recipe, **same)
        config = dataclasses.replace(workload.config, recipe=recipe)
        return dataclasses.replace(workload, name="", config=config)

    small = [name for name in WORKLOADS if name.endswith("-small-init")]
    assert len(small) == 7 + 4
    for name in small:
        base = dataclasses.replace(
            of(name.removesuffix("-small-init")), initial_scale=0.27
        )
        assert of(name) == base
    for steps in (1200, 4800):
        recipe = WORKLOADS[f"dense-small-{steps}-steps"].config.recipe
        of_length = {"steps": 300, "warmup_steps": 15, "val_every": 30}
        times = [getattr(recipe, field) / x for field, x in of_length.items()]
        assert times == [steps / 300] * 3
        assert of(f"dense-small-{steps}-steps", **of_length) == of("dense-small")
