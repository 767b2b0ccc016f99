"""marin's Muon as the benchmark of a step calls it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.client
pytest.importorskip("levanter.optim.grugmuon", reason="make clients installs it")

from examples.benchmarks.contenders import MARIN, installed_peers


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
