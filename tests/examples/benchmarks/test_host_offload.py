"""Where the state lies changes no number."""

import jax
import numpy as np
import pytest

from examples.benchmarks import host_offload


@pytest.mark.extended
def test_losses_and_states_are_those_without_offloading():
    choices = ((), host_offload.LARGE, None)
    (losses, state), *others = (host_offload.train(x, steps=3, width=16) for x in choices)
    assert host_offload.bytes_by_memory(state).keys() == {"device"}
    for other, on_host in others:
        assert other == losses
        jax.tree.map(np.testing.assert_array_equal, on_host, state)
    momentum, everything = (host_offload.bytes_by_memory(s) for _, s in others)
    assert momentum["pinned_host"] > 10 * momentum["device"]
    assert everything.keys() == {"pinned_host"}
