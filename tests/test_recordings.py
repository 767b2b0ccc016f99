"""The recorded trajectories of the paper's own PyTorch code, repeated by our stages."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import muon, orscale
from tests.leaves import relative_error
from tests.runs import readout, run

DATA = Path(__file__).parent / "data"
# (out, in, kh, kw) convolutions, as in PyTorch.
NUMBERS = [Dims(), Dims(), Dims(), Dims(0, (1, 2, 3))]
INPUTS = np.load(DATA / "inputs.npz")
PARAMS = [jnp.asarray(INPUTS[f"w{i}/init"]) for i in range(4)]
RATIOS = {
    "calibration": "c_denom",
    "raw_trust_ratio": "trust_ratio_raw",
    "trust_ratio": "trust_ratio_clipped",
}
# By file: our optimizer for the paper's of that name, and arguments that differ.
VARIANTS = {
    "muon": (muon, {"consistent_rms": None}),
    "muon_moonlight": (muon, {}),
    "orscale": (orscale, {"consistent_rms": None, "calibrate": False}),
    "orscale_lm": (orscale, {}),
    "orscale_muon_moonlight": (orscale, {"calibrate": False}),
}


def gradients(step):
    return [jnp.asarray(INPUTS[f"w{i}/grad/{step - 1}"]) for i in range(4)]


def play_again(build, recorded, **arguments):
    """The run of our optimizer on the recorded hyperparameters and gradients."""
    hyper = json.loads(str(recorded["meta"]))["hp"]
    if build is not muon:
        arguments |= {"r_min": hyper["r_min"], "r_max": hyper["r_max"]}
    optimizer = build(
        hyper["lr"],
        momentum=hyper["momentum"],
        weight_decay=hyper["weight_decay"],
        ns_steps=hyper["ns_steps"],
        weight_dimension_numbers=NUMBERS,
        **arguments,
    )
    return run(optimizer, PARAMS, 10, gradients)


def recorded_weights(recorded):
    """Yield step, index of the matrix, and its weights after that step."""
    for name in recorded:
        if "/param/" in name:
            matrix, _, step = name.split("/")
            yield int(step), int(matrix[1:]), recorded[name]


@pytest.mark.extended
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32(variant):
    build, arguments = VARIANTS[variant]
    recorded = np.load(DATA / f"{variant}.npz")
    seen = play_again(build, recorded, **arguments)
    compared = 0
    for step, i, weights in recorded_weights(recorded):
        assert relative_error(seen[step][0][i], weights) < 2e-5
        compared += 1
    for ours, theirs in RATIOS.items():
        for i in range(4):
            if f"w{i}/{theirs}" in recorded:
                found = [readout(state, ours)[i] for _, state in seen]
                np.testing.assert_allclose(found, recorded[f"w{i}/{theirs}"], rtol=1e-4)
                compared += len(found)
    assert compared == 16 + 40 * sum(f"w0/{name}" in recorded for name in RATIOS.values())


@pytest.mark.extended
def test_bfloat16():
    """In units of what bfloat16 does to the paper's own code, which rounds every sum."""
    exact, rounded = (
        np.load(DATA / f"{name}.npz") for name in ("orscale_lm", "orscale_lm_bf16")
    )
    seen = play_again(orscale, rounded, ns_dtype=jnp.bfloat16)
    distances = []
    for step, i, weights in recorded_weights(rounded):
        full, ours = exact[f"w{i}/param/{step}"], seen[step][0][i]
        away = [np.linalg.norm(ours - full), np.linalg.norm(ours - weights)]
        distances.append(away / np.linalg.norm(weights - full))
    # Independent roundings of our size and of the paper's would be 1.12 apart.
    from_exact, from_rounded = np.sqrt(np.square(distances).mean(axis=0))
    assert 0.2 < from_exact < 0.8
    assert 0.6 < from_rounded < 1.6
    for ours, theirs in RATIOS.items():
        for i in range(4):
            found = [readout(state, ours)[i] for _, state in seen]
            np.testing.assert_allclose(found, rounded[f"w{i}/{theirs}"], rtol=0.08)
