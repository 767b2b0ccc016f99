"""Tuning runs are those of a plain loop, and the page has what the command prints."""

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain.models.dense import DenseConfig
from examples.study import tuned, tuning

SIZES = tuning.Sizes(
    DenseConfig(vocab_size=256, width=8, layers=1, heads=2, fused_qkv=False, scan=False),
    batch=2, length=8, pretraining=20, tuning=20, measured=2, windows=4, rank=2,
    together=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    study = tuning.Study(SIZES, folder / "rows.csv", folder / "bases")
    study.runs("adamw", "pretraining", "adamw", 1e-2, 1e-2, [3, 4, 5], keep=True)
    return study


def plain_run(study, seed, rate):
    """One seed, all parameters, AdamW: the parameters before and after each step."""
    loss = tuning.decoder(SIZES.model).loss
    schedule = optax.warmup_cosine_decay_schedule(rate, rate, 1, SIZES.tuning)
    optimizer = optax.adamw(schedule, b2=0.95, weight_decay=0.0)
    params, text = study.start("adamw", "full", seed), study.prose.train
    state, seen = optimizer.init(params), [params]
    for i in range(SIZES.tuning):
        key = jax.random.fold_in(jax.random.key(seed), i)
        starts = jax.random.randint(key, (2, 1), 0, text.size - 8)
        tokens = text[starts + jnp.arange(9)].astype(jnp.int32)
        updates, state = optimizer.update(jax.grad(loss)(params, tokens), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


@pytest.mark.extended
def test_a_run_is_that_of_a_plain_loop(study):
    [row] = study.runs("adamw", "full", "adamw", 1e-2, 1e-2, [4])
    seen = plain_run(study, 4, 1e-2)
    loss, is_matrix = tuning.decoder(SIZES.model)
    assert row.new == pytest.approx(float(loss(seen[-1], study.prose.val)), rel=1e-4)
    assert row.old == pytest.approx(float(loss(seen[-1], study.code.val)), rel=1e-4)

    def matrices(params):
        return [np.asarray(w) for w, m in zip(params, is_matrix, strict=True) if m]

    found = []
    for step in (10, 20):
        before, after = matrices(seen[step - 1]), matrices(seen[step])
        moves = [b - a for a, b in zip(before, after, strict=True)]
        squares = np.concatenate([x.ravel() for x in moves]) ** 2
        norms = [np.linalg.norm(x) / np.linalg.norm(a)
                 for x, a in zip(moves, before, strict=True)]  # fmt: skip
        spectral = [np.linalg.norm(x, 2) for x in moves]
        found.append([squares.mean() ** 0.5, np.mean(norms), np.mean(spectral)])
    measured = [row.rms, row.relative, row.spectral]
    np.testing.assert_allclose(measured, np.mean(found, axis=0), rtol=1e-3)
    pairs = zip(matrices(seen[0]), matrices(seen[-1]), strict=True)
    moved = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in pairs]
    assert row.moved == pytest.approx(np.mean(moved), rel=1e-3)


@pytest.mark.extended
@pytest.mark.parametrize("how", ["full", "lora"])
@pytest.mark.parametrize("arm", ["muon", "orscale"])
def test_tuning_begins_at_the_weights_and_lowers_the_loss(study, how, arm):
    loss = tuning.decoder(SIZES.model).loss
    start = study.start("adamw", how, 3)
    [still] = study.runs("adamw", how, arm, 0.0, 0.0, [3])
    assert still.new == pytest.approx(float(loss(start, study.prose.val)), rel=1e-5)
    assert still.moved == 0
    [row] = study.runs("adamw", how, arm, 0.02, 0.0, [3])
    assert row.new < still.new and row.moved > 0


@pytest.mark.extended
def test_rows_are_not_done_again(study, monkeypatch):
    study.runs("adamw", "full", "adamw", 1e-2, 1e-2, [4])
    lines = study.table.read_text()
    monkeypatch.setattr(tuning, "trainer", None)
    again = tuning.Study(SIZES, study.table, study.bases)
    [row] = again.runs("adamw", "full", "adamw", 1e-2, 1e-2, [4])
    assert row == study.rows[row[:6]] and study.table.read_text() == lines


@pytest.mark.parametrize("best", [-3, 0, 2])
def test_a_search_tries_both_neighbours_of_the_best(best):
    asked = []

    def runs(base, how, arm, rate, beside, seeds):
        asked.append(round(np.log2(rate / 1e-3)))
        loss = 1.0 + abs(asked[-1] - best) if asked[-1] < 3 else np.nan
        return [types.SimpleNamespace(new=loss)] * 2

    rate = tuning.Study.search(types.SimpleNamespace(runs=runs), "adamw", "full", "adamw")
    assert rate == 1e-3 * 2.0**best
    assert {best - 1, best, best + 1} <= {*asked} and len(asked) == len({*asked})


def test_the_lowest_loss_within_a_limit():
    old, new = [1.0, 1.2, 1.6, 1.5], [3.0, 2.0, 1.0, 1.4]
    for limit, lowest in ((1.0, 3.0), (1.1, 2.5), (1.4, 1.5), (1.5, 1.25), (2.0, 1.0)):
        assert tuned.lowest(old, new, limit) == pytest.approx(lowest)


ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("table", tuned.TABLES)
def test_the_page_has_what_the_command_prints(table):
    assert table() in (ROOT / "docs" / "fine_tuning.md").read_text()
