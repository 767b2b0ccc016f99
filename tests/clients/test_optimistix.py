"""Optimistix's `OptaxMinimiser`: the optimizer is an argument of compiled programs."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.client
if not importlib.util.find_spec("optimistix"):
    pytest.skip("make clients installs it", allow_module_level=True)

import optimistix

from orscale_jax import assert_same_on, family, muon, orscale
from tests.runs import mesh_of

TARGET = jnp.arange(6.0).reshape(2, 3) / 6


@pytest.mark.parametrize("make", [orscale, muon, family.normuon, family.hyperball])
def test_it_minimizes(make):
    optimizer = make(jnp.array(0.02), weight_decay=0.0, adam_learning_rate=0.02)
    solver = optimistix.OptaxMinimiser(optimizer, rtol=1e-4, atol=1e-4)
    start = {"kernel": jnp.eye(2, 3), "bias": jnp.ones(3)}

    def loss(params, _):
        at_bias = jnp.sum(params["bias"] ** 2)
        return jnp.sum((params["kernel"] - TARGET) ** 2) + at_bias

    found = optimistix.minimise(loss, solver, start, max_steps=300, throw=False).value
    assert loss(found, None) < 0.3 * loss(start, None)
    assert np.linalg.norm(found["bias"]) < 0.3
    mesh = mesh_of({"fsdp": 2, "tensor": 3})
    assert assert_same_on(mesh, solver.optim, start).bytes_sent
