"""The recipes of docs/recipes.md: the table is what `describe` says, and all train."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import production, track_3
from orscale_jax import describe, muon, orthogonalize, scale_by_shape
from tests import oracle
from tests.test_docs import BLOCK, ROOT

TEXT = (ROOT / "docs" / "recipes.md").read_text()
PROGRAMS = "".join(Path(module.__file__).read_text() for module in (production, track_3))
# Where matrices are as small as here, steps of 0.2 √max(m, n) may be longer.
RATES = {"marin": 0.05, "modded_nanogpt": 0.05}


# A layer of attention, and a mixture in which all experts take part.


def init(key):
    shapes = {
        "embed": (16, 16),
        "attention": {
            **dict.fromkeys(("query", "key", "value"), (16, 4, 4)),
            "out": (4, 4, 16),
        },
        "router": (16, 2),
        "experts": {"up": (2, 16, 32), "down": (2, 32, 16)},
        "norm": (16,),
        "lm_head": (16, 16),
    }
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    params = [jax.random.normal(k, s) / 4 for k, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, params) | {"norm": jnp.ones(16)}


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    a = params["attention"]
    q, k, v = (jnp.einsum("bti,ihf->bthf", x, a[n]) for n in ("query", "key", "value"))
    logits = jnp.einsum("bthf,bshf->bhts", q, k) / 2
    mask = jnp.tril(jnp.ones_like(logits, bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
    x += jnp.einsum("bhts,bshf,hfo->bto", weights, v, a["out"])
    gates = jax.nn.softmax(x @ params["router"])
    hidden = jax.nn.relu(jnp.einsum("bti,eih->bteh", x, params["experts"]["up"]))
    x += jnp.einsum("bte,bteh,eho->bto", gates, hidden, params["experts"]["down"])
    x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True))
    outputs = x @ (params["norm"][:, None] * params["lm_head"])
    log_probs = jax.nn.log_softmax(outputs)
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    largest = jnp.max(logits, axis=(0, 2, 3), where=mask, initial=-jnp.inf)
    return -picked.mean(), {"attention": largest}  # one logit for each head


def table():
    """The rows of the page's first table: a cell by recipe and column."""
    lines = [line for line in TEXT.split("\n## ")[1].split("\n") if line[:1] == "|"]
    head, _, *rows = ([c.strip(" `") for c in x.strip("|").split("|")] for x in lines)
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines, and those of its programs."""
    found = vars(production) | vars(track_3) | {"__name__": "__main__"}
    for block in BLOCK.finditer(TEXT):
        exec(block[1], found)
    return found


def built(page, name):
    rate = optax.constant_schedule(RATES.get(name, 0.02))
    return page[name](rate), page[table()[name]["dimension numbers"]]


def test_every_recipe_is_in_the_table():
    """And nothing else: a recipe is a function of the rate."""
    defined = re.findall(r"^def (\w+)\(rate\):", TEXT, re.M)
    defined += re.findall(r"^def (\w+)\(rate: Schedule\)", PROGRAMS, re.M)
    assert sorted(defined) == sorted(table()) and len(set(defined)) == 10


@pytest.mark.parametrize("name", table())
def test_the_table_is_what_describe_says(page, name):
    params = jax.eval_shape(init, jax.random.key(0))
    optimizer, _ = built(page, name)
    found = {
        row.path.split(".")[-1]: str(row.matrices or "AdamW")
        for row in describe(params, optimizer).rows
    }
    everywhere = {"out": "1", "up": "2", "down": "2"}
    everywhere |= dict.fromkeys(("embed", "norm", "lm_head"), "AdamW")
    numbers = {"dimension numbers": table()[name]["dimension numbers"]}
    assert found | numbers == table()[name] | everywhere


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
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, max_logits), grads = grad(params, tokens)
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
        return (optax.apply_updates(params, updates), state), loss

    params = init(jax.random.key(0))
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 40))
    (params, _), losses = run((params, optimizer.init(params)))
    assert losses[0] > 2.5 and losses[-1] < losses[0] / 2
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


# Track 3, against NumPy that follows the script of result 46, with outputs first.


def lerp(start, end, weight):
    return start + weight * (end - start)


def gram_norm(x):
    return np.linalg.norm(x.T @ x) ** 0.5


def gate(raw, white, grad, step):
    """`bounded_trust_gate(trust_gate(...))`."""

    def cosine(a, b):
        return (a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b))

    agree = np.clip((cosine(white, raw) - 0.2) / (1 - 0.2), 0, 1)
    descend = np.clip(cosine(white, grad) / max(cosine(raw, grad), 1e-8), 0, 1)
    floor = 0.45 if step < 1375 else 0.45 * max(0, 1625 - step) / (1625 - 1375)
    return np.clip(agree * descend, floor, 0.85 if step < 1625 else 1.0)


class Soap:
    """`soap_precondition_momentum` and `soap_update_preconditioner`."""

    def __init__(self, gated):
        self.gated, self.bases, self.v, self.step = gated, None, 0.0, 0
        self.covariances = 0.0, 0.0

    def __call__(self, raw, grad):
        found = raw
        if self.bases:
            p, q = self.bases
            projected = p.T @ raw @ q
            self.v = lerp(self.v, projected**2, 1 - 0.9)
            found = p @ (projected / np.sqrt(np.maximum(self.v, 1e-16))) @ q.T
            found *= gram_norm(raw) / gram_norm(found)
            if self.gated:
                found = raw + (found - raw) * gate(raw, found, grad, self.step)
                found *= gram_norm(raw) / gram_norm(found)
        new = grad @ grad.T, grad.T @ grad
        self.covariances = [
            lerp(*x, 1 - 0.9) for x in zip(self.covariances, new, strict=True)
        ]
        self.step += 1
        if not self.bases:
            self.bases = [np.linalg.eigh(x)[1][:, ::-1] for x in self.covariances]
            return found
        orders = [
            np.argsort(-np.diag(q.T @ x @ q))
            for x, q in zip(self.covariances, self.bases, strict=True)
        ]
        pairs = zip(self.covariances, self.bases, orders, strict=True)
        self.bases = [np.linalg.qr(x @ q[:, order])[0] for x, q, order in pairs]
        self.v = self.v[orders[0]][:, orders[1]]
        return found


def newton_schulz(x, norm=np.linalg.norm):
    q = oracle.iterated(x / norm(x), [(2, -1.5, 0.5)] * 12)
    return q * max(1, x.shape[0] / x.shape[1]) ** 0.5


def brake(u, p):
    coefficient = (u * p).sum() / (p * p).sum()
    radial = coefficient * p
    return u - radial + (0.5 if coefficient < 0 else 1.0) * radial


def row_floor(u, p):
    rows, steps = (np.linalg.norm(x, axis=1, keepdims=True) for x in (p, u))
    return u * np.maximum(0.3825 * rows / steps, 1.0)


def pin(p, u, lr):
    norm = np.linalg.norm(p)
    target = norm - lr * (u * p).sum() / norm
    moved = p - lr * u
    return moved * target / np.linalg.norm(moved) * (1 - lr * 0.025 * (u * p > 0))


def matrices_of(params):
    """Each matrix, by its name, with its outputs first."""
    attention = params["attention"]
    for name in ("query", "key", "value"):
        yield name, np.asarray(attention[name]).reshape(16, 16).T
    yield "out", np.asarray(attention["out"]).reshape(16, 16).T
    yield "router", np.asarray(params["router"]).T
    for name in ("up", "down"):
        yield from (
            (f"{name}{i}", np.asarray(x).T) for i, x in enumerate(params["experts"][name])
        )


@pytest.mark.extended
@pytest.mark.parametrize("name, soap", [("track_3", Soap), ("track_3_open", None)])
def test_50_steps_of_track_3(page, enable_x64, monkeypatch, name, soap):
    """In float64, and with another step for the switch to two timescales.

    With SOAP of square matrices only: the first covariances of others have eigenvectors
    that are not unique.
    """
    if soap is None:
        monkeypatch.setattr(track_3, "soap", lambda momentum: momentum)
    wide = functools.partial(orthogonalize, ns_dtype=jnp.float64)
    monkeypatch.setattr(track_3, "orthogonalize", wide)
    monkeypatch.setattr(track_3, "SWITCH", 10)
    monkeypatch.setattr(track_3, "cool", lambda step, coefficient: 1.0)
    monkeypatch.setattr(track_3, "mu", lambda step: 0.85 + 0.1 * jnp.float64(step) / 300)
    optimizer = getattr(track_3, name)(optax.constant_schedule(0.02))
    params = jax.tree.map(lambda x: np.float64(x), init(jax.random.key(0)))

    def noise(step):
        rng = np.random.default_rng(step)
        return jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    noises = [noise(step) for step in range(1, 51)]

    def step(carry, noise):
        params, state = carry
        grads = jax.tree.map(lambda p, n: n + 0.1 * p, params, noise)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *noises)
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, stacked))
    (found, _), _ = run((params, optimizer.init(params)))
    found = dict(matrices_of(found))
    each = [dict(matrices_of(noise)) for noise in noises]
    for key, p in matrices_of(params):
        if soap and p.shape[0] != p.shape[1]:
            continue
        white = soap(gated=key == "out") if soap else lambda update, grad: update
        momentum = 0.0
        for i, noise in enumerate(each):
            grad, mu = noise[key] + 0.1 * p, 0.85 + i / 300 * (0.95 - 0.85)
            if name == "track_3" or i <= 10:
                momentum = lerp(momentum, grad, 1 - mu)
                fast = slow = effective = momentum
            else:
                fast, slow = lerp(fast, grad, 1 - 0.85), lerp(slow, grad, 1 - 0.98)
                effective = 0.4385 * fast + (1 - 0.4385) * slow
            u = newton_schulz(white(lerp(grad, effective, mu), grad))
            p = pin(p, row_floor(brake(u, p), p), 0.02)
        assert np.linalg.norm(found[key] - p) < 1e-11 * np.linalg.norm(p), key


def test_schedules_of_track_3():
    steps = np.arange(2900)
    down = np.maximum(0.0, 2900 - steps) ** 1.2
    for coefficient, power_c, rate in (
        (8.84521e-5, 3.3169534699576625e-06, 0.0375),
        (1.658935e-4, 4.976805410800738e-05, 0.3),
    ):
        expected = np.minimum(rate, power_c * down)
        np.testing.assert_allclose(
            rate * track_3.cool(steps, coefficient), expected, rtol=1e-5
        )
    momentum = np.where(steps < 300, 0.85 + steps / 300 * 0.1, 0.95)
    momentum = np.where(steps > 2700, 0.95 - (steps - 2700) / 200 * 0.1, momentum)
    np.testing.assert_allclose(track_3.mu(steps), momentum, rtol=1e-6)
    fraction = np.minimum(0.3, 4.976805410800738e-05 * (2901.0 - steps) ** 1.2) / 0.3
    ahead = np.where((steps + 1 > 300) & (steps < 2900 - 950), 0.3 * fraction, 0.0)
    np.testing.assert_allclose(track_3.ahead(steps), ahead, rtol=1e-5)


def test_the_gate_of_track_3():
    rng = np.random.default_rng(0)
    raw, other, grad = rng.normal(size=(3, 6, 4))
    for step in (0, 1374, 1375, 1500, 1625, 2000):
        for white in (raw + 0.1 * other, raw + other, 3 * other - raw):
            found = track_3.trust(raw, white, grad, step)
            np.testing.assert_allclose(
                found.item(), gate(raw, white, grad, step), rtol=1e-5
            )


def test_the_polar_factor_of_track_3():
    """The code divides by another norm, which matters to small singular values."""
    x = np.random.default_rng(0).normal(size=(12, 8))
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    expected = u @ vt * (12 / 8) ** 0.5
    np.testing.assert_allclose(newton_schulz(x, gram_norm), expected, atol=1e-6)
    stage = orthogonalize(ns_steps=12, ns_coeffs=[(2.0, -1.5, 0.5)])
    shape = scale_by_shape(scale_mode="shape_scaling")
    found, _ = optax.chain(stage, shape).update({"w": x.T}, (optax.EmptyState(),) * 2)
    np.testing.assert_allclose(found["w"].T, expected, atol=1e-5)
