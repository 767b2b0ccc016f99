"""NumPyro's SVI, whose loss is an estimate from one sample."""

import importlib.util

import numpy as np
import optax
import pytest

pytestmark = pytest.mark.client
if not importlib.util.find_spec("numpyro"):
    pytest.skip("make clients installs it", allow_module_level=True)

from examples.gallery import numpyro_flow
from orscale_jax import muon


def test_the_steps_are_those_of_optax_at_equal_settings():
    theirs = optax.contrib.muon(0.01, nesterov=False, consistent_rms=0.2)
    ours = muon(0.01, nesterov=False, weight_decay=0.0, ns_coeffs="jordan", adam_b2=0.999)
    found, expected = (
        numpyro_flow.fits(optimizer, 15, 4) for optimizer in (ours, theirs)
    )
    jumps = np.max(expected, axis=1) / expected[:, -1]
    assert max(jumps) > 10  # From one step to the next, and in ours alike.
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_most_fits_get_as_far_as_those_of_adam():
    medians = {
        name: np.median(losses)
        for (_, name), losses in numpyro_flow.main((0.01,), count=16).items()
    }
    assert max(medians.values()) < 1.3 * medians["optax.adam"], medians
