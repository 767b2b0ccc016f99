"""The recipes of docs/recipes.md: the table is what `describe` says, and all train."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from orscale_jax import describe, muon
from tests.test_docs import BLOCK, ROOT

TEXT = (ROOT / "docs" / "recipes.md").read_text()
# Where matrices are as small as here, steps of 0.2 √max(m, n) may be longer.
RATES = {"marin": 0.05, "modded_nanogpt": 0.05}


def table():
    """The rows of the page's first table: a cell by recipe and column."""
    lines = [line for line in TEXT.split("\n## ")[1].split("\n") if line[:1] == "|"]
    head, _, *rows = ([c.strip(" `") for c in x.strip("|").split("|")] for x in lines)
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines."""
    found = {"__name__": "__main__"}
    for block in BLOCK.finditer(TEXT):
        exec(block[1], found)
    return found


def built(page, name):
    rate = optax.constant_schedule(RATES.get(name, 0.02))
    return page[name](rate), page[table()[name]["dimension numbers"]]


def test_every_recipe_is_in_the_table():
    """And nothing else: a recipe is a function of the rate, with a heading of its own."""
    defined = re.findall(r"^def (\w+)\(rate\):", TEXT, re.M)
    assert defined == list(table()) and len(set(defined)) == 8


@pytest.mark.parametrize("name", table())
def test_the_table_is_what_describe_says(page, name):
    params = jax.eval_shape(page["init"], jax.random.key(0))
    optimizer, _ = built(page, name)
    found = {
        row.path.split(".")[-1]: str(row.matrices or "AdamW")
        for row in describe(params, optimizer).rows
    }
    assert (
        found | {"dimension numbers": table()[name]["dimension numbers"]} == table()[name]
    )


@pytest.mark.parametrize("heads, inputs", [(4, 16), (8, 16), (4, 64)])
def test_what_heads_do_to_the_size_of_entries(heads, inputs):
    """A Q of full rank, whose entries have the mean square 1 / max(m, n)."""

    def size(mode, outputs):
        params = {"w": jnp.ones((inputs, outputs))}
        [row] = describe(params, muon(1e-3, scale_mode=mode)).rows
        return row.scale / max(row.m, row.n) ** 0.5

    for mode, times in [("spectral", 1), ("shape_scaling", 1), ("unit_rms_norm", heads)]:
        whole, each = size(mode, 16), size(mode, 16 // heads)
        assert whole == pytest.approx(each * times**0.5)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", sorted(table(), key=lambda name: name != "modded_nanogpt")
)
def test_the_loss_falls(page, name):
    optimizer, _ = built(page, name)
    optimizer = optax.with_extra_args_support(optimizer)
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 16)

    def step(carry, _):
        params, state = carry
        grad = jax.value_and_grad(page["loss"], has_aux=True)
        (loss, max_logits), grads = grad(params, tokens)
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
        return (optax.apply_updates(params, updates), state), loss

    params = page["init"](jax.random.key(0))
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 40))
    (params, _), losses = run((params, optimizer.init(params)))
    assert losses[0] > 2.5 and losses[-1] < losses[0] / 2
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
