"""Each problem planted in a run or a table, and found alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

from orscale_jax import orscale
from orscale_jax.diagnostics import (
    History,
    Reading,
    find_problems,
    read,
    summarize,
    tabulate,
)

NAMES = [f"layers.{i}.kernel" for i in range(4)] + [f"experts.up[{i}]" for i in range(4)]


def healthy(**changes):
    """Columns of eight matrices without a problem, and what is planted in them."""
    numbers = dict.fromkeys(Reading._fields[:7], 1.0) | {"relative_step": 0.01}
    flags = {"at_r_min": 0, "at_r_max": 0, "started": 1, "anchored": 1}
    columns = {name: np.full(8, value) for name, value in (numbers | flags).items()}
    columns["calibration"] = np.full(8, 0.7)
    for name, (places, value) in changes.items():
        columns.setdefault(name, np.zeros(8))[places] = value
    return {"matrix": np.array(NAMES)} | columns


HALF = slice(0, 4)
PLANTED = {
    "Not finite": {"weight_norm": ([2], np.nan)},
    "Directions not finite": {"direction_norm": ([2], np.inf)},
    "Saturated at the upper bound": {"at_r_max": (HALF, 1)},
    "Saturated at the lower bound": {"at_r_min": (HALF, 1)},
    "Anchored on a direction of low rank": {"raw_trust_ratio": ([1], 0.4)},
    "Weight norm runs away": {"growth": ([3], 11), "raw_trust_ratio": ([3], 9)},
    "Large steps": {"relative_step": ([0], 0.2)},
    "Never moves": {"trust_ratio": ([1], 0)},
    "Without an update": {"started": ([5], 0), "anchored": ([5], 0)},
    "Never anchored": {"calibration": ([1], 0), "anchored": ([1], 0)},
    "No initial scale": {"calibration": ([1], np.inf), "anchored": ([1], 0)},
    "Newton–Schulz has not converged": {"polar_error": ([7], 0.6)},
}


@pytest.mark.parametrize("title", PLANTED)
def test_what_is_planted_is_found_alone(title):
    planted = PLANTED[title]
    [problem] = find_problems(healthy(**planted))
    assert problem.title == title
    [places] = {str(places): places for places, _ in planted.values()}.values()
    assert problem.matrices == tuple(np.array(NAMES)[places])
    assert problem.matrices[0] in str(problem) and problem.remedy in str(problem)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"at_r_max": (slice(0, 3), 1)},
        {"raw_trust_ratio": ([0], 0.6)},
        {"growth": (slice(None), 9.0), "raw_trust_ratio": (slice(None), 8.0)},
        {"relative_step": (slice(None), 0.09)},
        {"relative_step": ([0], np.inf)},  # It was zero.
        # Muon on purpose: r_min = r_max = 1.
        {"at_r_min": (slice(None), 1), "at_r_max": (slice(None), 1)},
        {"polar_error": (slice(None), 0.4)},
        # All rates are 0 at the end of a schedule; an idle expert does not decay.
        {"relative_step": (slice(None), 0.0)},
        {"relative_step": ([5], 0.0), "direction_norm": ([5], 0.0)},
        # A stack that has not begun, and a plain matrix, are no experts without tokens.
        {"started": (slice(4, 8), 0), "anchored": (slice(4, 8), 0)},
    ],
)
def test_below_the_threshold_is_none(changes):
    assert find_problems(healthy(**changes)) == []


@pytest.mark.extended
def test_a_first_gradient_of_low_rank():
    """A gradient of rank 4 of 256, and then of full rank: small ratios for good."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(256, 256)) / 16, jnp.float32)}
    thin = rng.normal(size=(256, 4)) @ rng.normal(size=(4, 256))
    gradients = [thin] + [rng.normal(size=(256, 256)) for _ in range(3)]

    def last_reading(**arguments):
        optimizer = orscale(1e-4, momentum=0.0, **arguments)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for gradient in gradients:
            grads = {"w": jnp.asarray(gradient, jnp.float32)}
            _, state = update(grads, state, params)
        return read(state, params, learning_rate=1e-4)

    reading = last_reading()
    [problem] = find_problems(reading)
    assert problem.title == "Anchored on a direction of low rank"
    # As many singular values as rank: √(4 / 256) but for what λW adds to both.
    assert reading.raw_trust_ratio["w"] == pytest.approx(0.17, abs=0.05)
    assert find_problems(last_reading(anchor="largest")) == []


@pytest.mark.parametrize(
    "planted",
    [
        {"weight_norm": ([2], 0)},
        {"weight_norm": ([2], 0), "trust_ratio": ([2], 0), "direction_norm": ([2], 0)},
        {"relative_step": ([2], 0)},
    ],
    ids=["zero", "stuck", "rate"],
)
def test_matrices_that_never_move(planted):
    [problem] = find_problems(healthy(**planted))
    assert (problem.title, problem.matrices) == ("Never moves", (NAMES[2],))
    muon_has = ("matrix", "weight_norm", "started")
    of_muon = {name: healthy(**planted)[name] for name in muon_has}
    assert len(find_problems(of_muon)) == ("weight_norm" in planted)


def test_rows_of_a_file(tmp_path):
    params = {"up": jnp.eye(3), "down": jnp.eye(3)}
    optimizer = orscale(0.5)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    params = optax.apply_updates(params, updates)
    reading = read(state, params, learning_rate=0.5)
    history = History(tmp_path / "history.csv", measurements=["polar_error"])
    history.append(1, reading)
    frame = pandas.read_csv(history.path)
    problems = find_problems(frame[frame.step == 1])
    assert problems == find_problems(reading) == find_problems(tabulate(reading))
    assert [problem.title for problem in problems] == ["Large steps"]


def test_what_is_no_reading(tmp_path):
    params = {"up": jnp.eye(3)}
    for other in (params, None):
        with pytest.raises(ValueError, match=r"no column 'matrix': pass .*read"):
            find_problems(other)
    history = History(tmp_path / "history.csv")
    for use in (tabulate, summarize, lambda other: history.append(1, other)):
        with pytest.raises(ValueError, match=r"is of type dict: pass .*read"):
            use(params)
