"""Factories, and the losses of a run."""

import math

import jax
import numpy as np
import optax
import pytest

from examples.pretrain.errors import UsageError
from examples.track0 import entries, prose
from examples.track0.entries import ENTRIES
from examples.track0.factories import build, check, find_factory, of_matrices
from examples.track0.losses import Losses, facts_of
from examples.track0.runs import POINTS, Program, Rates, Run, uniform_guess
from examples.track0.workers import workers
from examples.track0.workloads import WORKLOADS, shortened

CODE = shortened(WORKLOADS["code"], 24, 2)
MUON = ENTRIES["muon"]


@pytest.mark.parametrize("name", ENTRIES.values())
def test_entries_pass_the_check(name):
    check(find_factory(name), name)


@pytest.mark.extended
def test_the_losses_of_the_second_study():
    """docs/data/two_rates/dense-small.csv of commit 2f6bf514, arm muon_moonlight."""
    program = Program(shortened(WORKLOADS["code"], 300, 2), find_factory(MUON))
    for seed, loss in ((100, 1.99353), (101, 2.01202)):
        # Equal to the last digit on a like processor. With one of the ten batches of
        # validation, the losses would be 0.02 away.
        assert abs(program.run(Rates(0.016, 0.064), seed).loss - loss) < 0.005


@pytest.mark.extended
@pytest.mark.parametrize(
    ("workload", "steps"),
    [
        ("code", 24),
        ("mixture", 24),
        ("mixture, small weights", 24),
        pytest.param("images", 96, marks=pytest.mark.slow),
    ],
)
def test_two_runs_are_the_same_and_a_seed_changes_them(workload, steps):
    program = Program(shortened(WORKLOADS[workload], steps, 2), find_factory(MUON))
    runs = [program.run(Rates(0.01, 0.02), seed) for seed in (0, 0, 1)]
    assert runs[0].losses == runs[1].losses != runs[2].losses
    assert len(runs[0].losses) == POINTS
    assert runs[0].loss < uniform_guess(program.workload)


def test_a_run_that_diverges_has_the_loss_of_a_guess():
    run = Program(CODE, find_factory(MUON)).run(Rates(1e6, 1e6), 0)
    assert run.losses[-1] == uniform_guess(CODE) == round(math.log(256), 5)


@pytest.mark.slow
def test_a_process_trains_what_the_table_lacks(tmp_path, capsys):
    table, rates = tmp_path / "muon.csv", Rates(0.01, 0.02)
    for seeds in ([0], [0, 1]):
        with workers(MUON, {"code": CODE}, table, len(seeds), processes=1) as runs:
            [found] = runs("code", [rates], seeds)
        assert capsys.readouterr().out.count("nats") == 1
    here = Program(CODE, find_factory(MUON))
    for seed, run in zip(seeds, found, strict=True):
        np.testing.assert_allclose(run.losses, here.run(rates, seed).losses, atol=1e-3)


def test_one_rate_is_applied_to_both_groups():
    """As AdamW itself by optax.partition, with two rates."""
    params = {"w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
    grads = jax.tree.map(lambda x: np.sign(x) * 0.3, params)
    numbers = {"w": optax.contrib.MuonDimensionNumbers(0, 1), "b": None}
    optimizer = build(entries.adamw, lambda _: 0.1, lambda _: 0.2, lambda _: numbers)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # AdamW's first step is the gradient's sign; the weights are 1.
    np.testing.assert_allclose(updates["w"], -0.1 * (1 + 0.1), rtol=1e-5)
    np.testing.assert_allclose(updates["b"], -0.2 * (1 + 0.1), rtol=1e-5)


def test_the_numbers_of_matrices_mask_all_others():
    params = {"w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
    numbers = {"w": optax.contrib.MuonDimensionNumbers(0, 1), "b": None}
    seen = []

    def matrices(masked):
        seen.append(masked)
        return optax.sgd(1.0)

    optimizer = of_matrices(matrices, optax.set_to_zero(), lambda _: numbers)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert (updates["w"] == -1).all() and not updates["b"].any()
    assert seen[0] == {"w": numbers["w"], "b": optax.MaskedNode()}


def takes_numbers(learning_rate):
    return optax.sgd(learning_rate * 0.5)


def no_params(learning_rate):
    return optax.GradientTransformation(
        lambda params: (), lambda updates, state: (updates, state)
    )


def nan(learning_rate):
    return optax.scale(math.nan)


def one_for_both(learning_rate, other_learning_rate):
    return optax.sgd(learning_rate)


def frozen(learning_rate):
    return optax.adam(learning_rate(0))


def upwards(learning_rate):
    return optax.scale_by_schedule(learning_rate)


def misspelled(learning_rate, other_learnin_rate=1e-3):
    return optax.sgd(learning_rate)


def no_function(learning_rate, weight_dimension_numbers):
    sgd = optax.sgd(learning_rate)
    return of_matrices(sgd, sgd, weight_dimension_numbers)


def nothing(learning_rate):
    return optax.set_to_zero()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (takes_numbers, "Rates are schedules"),
        (no_params, "update is called with updates, state and params"),
        (nan, "the matrix is not finite"),
        (one_for_both, "does not use other_learning_rate for the bias"),
        (nothing, "does not move the matrix"),
        (frozen, "keeps learning_rate of the first step for the matrix"),
        (upwards, "moves the matrix along its gradient"),
        (misspelled, "takes other_learnin_rate: write other_learning_rate"),
        (no_function, "pass lambda numbers: optimizer"),
        (dict, "A factory takes keyword arguments"),
    ],
)
def test_a_wrong_factory_gets_a_sentence(factory, words):
    with pytest.raises(UsageError, match=words):
        check(factory, "mine:optimizer")


@pytest.mark.parametrize(
    "name", ["muon", "no_module:x", "orscale_jax:nothing", "math:pi"]
)
def test_a_factory_that_is_not_there(name):
    with pytest.raises(UsageError, match=name):
        find_factory(name)


def test_prose_has_every_paragraph_on_one_side(tmp_path, monkeypatch):
    paragraphs = [f"Paragraph {i}." for i in range(2345)]
    monkeypatch.setattr(prose, "_read", lambda: "\n" + "\n".join(paragraphs) + "\n")
    prose.write_prose(tmp_path)
    train, val = (
        (tmp_path / f"{side}.txt").read_text().split("\n") for side in ("train", "val")
    )
    assert sorted(train + val) == sorted(paragraphs)
    assert val == paragraphs[900:1000] + paragraphs[1900:2000]


KEYS = [("code", Rates(0.1, 0.2), seed) for seed in range(3)]
RUNS = [Run(tuple(np.arange(POINTS) + i / 10), 0.25) for i in range(3)]


def test_a_table_of_losses_survives_a_kill(tmp_path):
    path, facts = tmp_path / "muon.csv", facts_of(MUON, find_factory(MUON))
    losses = Losses(path, facts)
    for key, run in zip(KEYS, RUNS, strict=True):
        losses.add(key, run)
    whole = path.read_bytes()
    path.write_bytes(torn := whole[:-9])  # In the middle of the last row.
    assert KEYS[1] in Losses(path) and path.read_bytes() == torn
    again = Losses(path, facts)
    assert again.entry == MUON
    assert [again[key] for key in KEYS[:2]] == RUNS[:2] and KEYS[2] not in again
    assert again.last_rates("code", 1) == KEYS[1][1]
    with pytest.raises(UsageError, match="has no run of seed 2 on code"):
        again.last_rates("code", 2)
    again.add(KEYS[2], RUNS[2])
    assert path.read_bytes() == whole
    assert len(path.read_text().splitlines()) == 2 + len(KEYS)
    with pytest.raises(UsageError, match="Pass another --name"):
        Losses(path, facts + "x")
