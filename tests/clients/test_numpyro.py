"""NumPyro's SVI, whose loss is an estimate from one sample."""

import importlib.util

import numpy as np
import optax
import pytest

pytestmark = pytest.mark.client
if not importlib.util.find_spec("numpyro"):
    pytest.skip("make clients installs it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoIAFNormal

from orscale_jax import assert_same_on, muon, orscale
from tests.runs import mesh_of


def data():
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (200, 20))
    noise = 0.3 * jax.random.normal(keys[1], (200,))
    return x, x @ jnp.linspace(-2, 2, 20) + noise


def regression(x, y):
    prior = dist.Normal(0, 3).expand([x.shape[1]]).to_event(1)
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ numpyro.sample("weights", prior), scale), obs=y)


def fits(optimizer, steps, count):
    """The losses of each step of each fit, (count, steps)."""
    svi = SVI(regression, AutoIAFNormal(regression), optimizer, Trace_ELBO())
    x, y = data()

    def fit(key):
        state = svi.init(key, x, y)
        step = lambda state, _: svi.update(state, x, y)  # noqa: E731
        return jax.lax.scan(step, state, length=steps)[1]

    return jax.jit(jax.vmap(fit))(jax.random.split(jax.random.key(1), count))


def test_the_steps_are_those_of_optax_at_equal_settings():
    theirs = optax.contrib.muon(0.01, nesterov=False, consistent_rms=0.2)
    ours = muon(0.01, nesterov=False, weight_decay=0.0, ns_coeffs="jordan", adam_b2=0.999)
    found, expected = (fits(optimizer, 15, 4) for optimizer in (ours, theirs))
    jumps = np.max(expected, axis=1) / expected[:, -1]
    assert max(jumps) > 10  # From one step to the next, and in ours alike.
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_most_fits_get_as_far_as_those_of_adam():
    optimizers = [optax.adam, optax.contrib.muon, muon, orscale]
    adam, *medians = (np.median(fits(make(0.01), 100, 16)[:, -1]) for make in optimizers)
    assert max(medians) < 1.3 * adam


@pytest.mark.parametrize("make", [muon, orscale])
def test_its_update_on_a_mesh_is_that_of_one_device(make):
    svi = SVI(regression, AutoIAFNormal(regression), make(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *data()))
    mesh = mesh_of({"fsdp": 3, "tensor": 2})  # Matrices of 21 × 21 and 21 × 42.
    assert assert_same_on(mesh, make(0.01), params).bytes_sent
