"""The programs of the gallery run at tiny sizes, and do what they say."""

import jax
import numpy as np
import optax
from flax import nnx

from examples.gallery import linen_train_state, sharded_gpt


def assert_same(found, wanted):
    """Compare two trees of arrays to the bit."""
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_sharded_gpt():
    (losses, state), (resumed_losses, resumed) = sharded_gpt.main(8, width=16, layers=1)
    assert losses[-1] < losses[0]
    assert resumed_losses == losses[4:]
    assert_same(resumed, state)
    model, optimizer = nnx.to_pure_dict(state).values()
    matrix = model["blocks"]["layers"][0]["up"]["kernel"]
    [momentum] = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(optimizer)
        if "trace" in (keys := jax.tree_util.keystr(path)) and "['up']" in keys
    ]
    for array in (matrix, momentum):
        assert array.sharding.spec == jax.P("fsdp")
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 64)}


def test_linen_train_state():
    losses, state = linen_train_state.main(steps=10, width=16, layers=1)
    assert losses[-1] < losses[0]
    [(_, ratios)] = optax.tree.get_all_with_path(state.opt_state, "trust_ratio")
    shapes = {name: ratios["Block_0"][name]["kernel"].shape for name in ("qkv", "up")}
    assert shapes == {"qkv": (3,), "up": ()}  # Of each matrix, a ratio.
    assert not jax.tree.leaves(ratios["token_embed"])  # The tied head takes AdamW.
