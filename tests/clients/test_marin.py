"""marin's Muon, as the benchmark of a step calls it and as its configuration makes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.client
pytest.importorskip("levanter.optim.grugmuon", reason="make clients installs it")

from levanter.optim.grugmuon import GrugMuonConfig

from examples.benchmarks.contenders import MARIN, installed_peers
from orscale_jax import assert_same_on
from tests.runs import AUTO, EXPLICIT, mesh_of


def jordan(gradient):
    """Five steps in float64."""
    x = np.asarray(gradient, np.float64)
    x = x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (4, 32, 32)])
def test_first_step(shape):
    """The scale and the decay are those of the other contenders."""
    weights, gradient = jax.random.normal(jax.random.key(0), (2, *shape))
    optimizer = installed_peers()[MARIN]
    step, _ = optimizer.update(
        {"w": gradient}, optimizer.init({"w": weights}), {"w": weights}
    )
    direction = 0.2 * max(shape[-2:]) ** 0.5 * jordan(gradient) + 0.1 * np.asarray(
        weights
    )
    error = np.linalg.norm(step["w"] + 1e-3 * direction) / np.linalg.norm(
        1e-3 * direction
    )
    assert error < 0.1  # All of it is in bfloat16; with another table, 0.2.
    assert step["w"].dtype == jnp.float32


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_its_update_on_a_mesh_is_that_of_one_device(kind):
    """It multiplies in bfloat16, also of parameters in float32."""
    shapes = {"up": (16, 48), "down": (48, 16), "embed": (64, 16), "norm": (16,)}
    shapes |= {"w_up_gate": (8, 32, 32), "w_down": (4, 16, 32)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    optimizer = GrugMuonConfig(learning_rate=0.01, warmup=2).build(6)
    certificate = assert_same_on(
        mesh_of({"data": 4, "model": 2}, kind), optimizer, params
    )
    assert max(max(row.errors) for row in certificate.rows) > 1e-3
