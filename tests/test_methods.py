"""The programs of docs/methods.md against NumPy, and its table."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.test_docs import BLOCK, ROOT

TEXTS = {
    path.stem: path.read_text()
    for path in map(
        ROOT.joinpath, ("docs/methods.md", "docs/recipes.md", "examples/track_3.py")
    )
}
SHAPE, RATE, STEPS = (6, 4), 0.1, 5


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines."""
    found = {"__name__": "__main__"}
    for block in BLOCK.finditer(TEXTS["methods"]):
        exec(block[1], found)
    return found


def test_the_numbers_of_lines():
    in_place = re.findall(r"(\d+) lines: \[`(\w+)`\]\(#programs\)", TEXTS["methods"])
    elsewhere = re.findall(r"(\d+) lines: `(\w+)` in \[Recipes\]", TEXTS["methods"])
    assert len(in_place) == 5 and len(elsewhere) == 3
    rows = [("methods", *row) for row in in_place] + [
        ("track_3" if row[1] != "cautious" else "recipes", *row) for row in elsewhere
    ]
    for text, said, name in rows:
        source = re.search(rf"^def {name}\(.*?(?=^\S|\Z)", TEXTS[text], re.M | re.S)
        lines = list(filter(str.strip, source[0].splitlines()))
        assert len(lines) == int(said), f"{name} has {len(lines)} lines"


def trace(grads, nesterov):
    """Momentum after each gradient."""
    m = 0.0
    for grad in grads:
        m = 0.95 * m + grad
        yield 0.95 * m + grad if nesterov else m


def muon_eq(grads):
    for m in trace(grads, nesterov=True):
        q = oracle.newton_schulz(m / np.linalg.norm(m, axis=0))
        yield 0.2 * 6**0.5 * q


def muon_plus(grads):
    for m in trace(grads, nesterov=False):
        q = oracle.newton_schulz(m)
        q /= np.linalg.norm(q, axis=1, keepdims=True)
        yield q / np.linalg.norm(q, axis=0)


def ada_muon(grads):
    v = 0.0
    for m in trace(grads, nesterov=False):
        q = oracle.newton_schulz(np.sign(m))
        v = 0.95 * v + 0.05 * q**2
        q /= np.sqrt(v + 1e-8)
        yield 0.2 * q * (6 * 4) ** 0.5 / np.linalg.norm(q)


def muon_vs(grads):
    m, v = np.zeros(SHAPE), np.zeros(SHAPE)
    for t, grad in enumerate(grads, 1):
        v = 0.95 * v + 0.95 * 0.05 * (m - grad) ** 2
        m = 0.95 * m + 0.05 * grad
        ahead = grad + 0.95 / 0.05 * m / (1 - 0.95**t)
        yield (
            0.2 * 6**0.5 * oracle.newton_schulz(ahead / np.sqrt(v / (1 - 0.95**t) + 1e-8))
        )


@pytest.mark.parametrize("by_hand", [muon_eq, muon_plus, ada_muon, muon_vs])
def test_programs(page, by_hand):
    optimizer = page[by_hand.__name__](RATE)
    grads = np.random.default_rng(0).normal(size=(STEPS, *SHAPE))
    state = optimizer.init({"w": jnp.zeros(SHAPE)})
    for grad, expected in zip(grads, by_hand(grads), strict=True):
        updates, state = optimizer.update({"w": jnp.asarray(grad, jnp.float32)}, state)
        np.testing.assert_allclose(updates["w"], -RATE * expected, rtol=2e-3, atol=2e-5)


def test_the_floor_of_a_matrix(page):
    stage, params = page["matrix_floor"](0.5), {"w": 2 * jnp.eye(4)}
    for size, expected in ((0.1, 1.0), (3.0, 3.0)):
        updates, _ = stage.update({"w": size * jnp.eye(4)}, stage.init(params), params)
        np.testing.assert_allclose(updates["w"], expected * np.eye(4), rtol=1e-6)


def test_every_source_is_a_link():
    rows = [x for x in TEXTS["methods"].splitlines() if x.startswith("| ") and " | " in x]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    rows = [row for row in rows if row[0] != "Method"]
    assert len(rows) == 34 and {len(row) for row in rows} == {5}
    assert all("](https://" in source for _, source, *_ in rows)
    assert len({row[0] for row in rows}) == len(rows)
