"""The demo's model, its OrScale with Newton–Schulz in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import line_search
from examples.pretrain.recipes import DEMOS
from examples.pretrain.setup import learning_rates
from orscale_jax import orscale


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_300_steps_in_bfloat16_stay_finite(seed):
    """A public run of this kind multiplied its weights by 150,000 at step 126."""
    recipe = dataclasses.replace(DEMOS["demo"].recipe, steps=300, seq_len=128, seed=seed)
    demo = line_search.experiment(dataclasses.replace(DEMOS["demo"], recipe=recipe))
    optimizer = orscale(
        learning_rates(recipe),
        weight_dimension_numbers=demo.weight_dimension_numbers,
        ns_dtype=jnp.bfloat16,
    )
    step = line_search.make_step(demo.loss_fn, optimizer)
    params, opt_state = demo.params, optimizer.init(demo.params)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(params))
    losses = []
    for index in range(recipe.num_steps):
        params, opt_state, loss = step(params, opt_state, demo.batches[index])
        losses.append(loss)
    losses = np.asarray(jax.device_get(losses))
    assert np.isfinite(losses).all()
    # From ln 256 = 5.5. In float32 seeds 0 and 1 end at 1.798 and 1.822.
    assert losses[-20:].mean() < 1.9
    leaves = [np.abs(leaf) for leaf in jax.tree.leaves((params, opt_state))]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(params)) < 10 * largest
    for _, ratios in optax.tree.get_all_with_path(opt_state, "trust_ratio"):
        assert all(0.1 <= ratio <= 5.0 for ratio in jax.tree.leaves(ratios))
    print(f"seed {seed}: {losses[-20:].mean():.4f} nats/byte")
