"""A decoder of Llama's shape whose training step never holds the gradients.

    python -m examples.gallery.one_layer_at_a_time     # a minute; loss 0.3

vjp_layers steps each layer in the backward pass, as soon as its gradients are known. The
embedding and the head are cut into pieces of the vocabulary, and vjp_layers steps these
one after the other, too: neither the logits of all words nor the gradient of a whole
table exist. A weight has 24 bits, of which the state holds 8. Momentum and the moments of
the embedding and the head have 8 bits, too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax import init_layers, keep_master_weights, muon, vjp_layers


class Sizes(NamedTuple):
    """The sizes of a decoder. The pieces divide the vocabulary."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int
    vocabulary: int
    pieces: int


LLAMA_3_8B = Sizes(32, 4096, 32, 8, 14_336, 128_256, 24)
SMALL = Sizes(4, 64, 4, 2, 192, 128, 4)


def make_optimizer(rate: Any, **options: Any) -> optax.GradientTransformation:
    inner = muon(rate, mu_dtype="int8", adam_moments_dtype="int8", **options)
    return keep_master_weights(inner, bits=8)


def shapes(sizes: Sizes) -> dict[str, Any]:
    """Of the parameters: layers and pieces are along the first axis."""
    d, pieces = sizes.width, (sizes.pieces, sizes.vocabulary // sizes.pieces, sizes.width)
    kv = sizes.key_value_heads * d // sizes.heads
    layer = {
        "attention_norm": (d,), "query": (d, d), "key": (d, kv), "value": (d, kv),
        "out": (d, d), "mlp_norm": (d,), "gate": (d, sizes.hidden),
        "up": (d, sizes.hidden), "down": (sizes.hidden, d),
    }  # fmt: skip
    return {
        "embedding": {"embedding": pieces},
        "layers": {name: (sizes.layers, *shape) for name, shape in layer.items()},
        "norm": {"scale": (d,)},
        "head": {"lm_head": pieces},
    }


def init_params(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 16))

    def draw(path: Any, shape: tuple[int, ...]) -> jax.Array:
        name = path[-1].key
        if len(shape) < 3:  # The scales of norms.
            return jnp.ones(shape, jnp.bfloat16)
        inputs = shape[-1] if name == "lm_head" else shape[-2]
        deviation = 0.02 if name == "embedding" else inputs**-0.5
        return deviation * jax.random.normal(next(keys), shape, jnp.bfloat16)

    return jax.tree.map_with_path(
        draw, shapes(sizes), is_leaf=lambda node: isinstance(node, tuple)
    )


def init_state(optimizer: optax.GradientTransformation, params: Any) -> dict[str, Any]:
    state = {
        name: init_layers(optimizer, params[name])
        for name in ("embedding", "layers", "head")
    }
    return {**state, "norm": optimizer.init(params["norm"])}


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Queries or keys (tokens, heads, size) turned by their positions (RoPE)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(len(x))[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


@jax.checkpoint
def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """One head of one sequence: (tokens, size) each."""
    scores = jnp.einsum("td,sd->ts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tri(len(query), dtype=bool), scores, -1e9)
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5)
    return weights.astype(value.dtype) @ value


def attention(sizes: Sizes, params: Any, x: jax.Array) -> jax.Array:
    """The attention of a layer, of one sequence (tokens, width)."""
    groups, size = sizes.key_value_heads, sizes.width // sizes.heads
    h = norm(params["attention_norm"], x)
    q, k, v = (
        (h @ params[name]).reshape(len(x), -1, size) for name in ("query", "key", "value")
    )
    q = rotated(q).reshape(len(x), groups, -1, size).transpose(1, 2, 0, 3)
    k, v = (a.swapaxes(0, 1) for a in (rotated(k), v))
    mixed = jax.lax.map(  # A head at a time.
        lambda group: jax.lax.map(lambda q: attend(q, *group[1:]), group[0]), (q, k, v)
    )
    return mixed.transpose(2, 0, 1, 3).reshape(x.shape) @ params["out"]


def layer(sizes: Sizes, params: Any, x: jax.Array) -> jax.Array:
    """A layer of (batch, tokens, width): its intermediates are those of one sequence."""

    def of_sequence(x: jax.Array) -> jax.Array:
        x += attention(sizes, params, x)
        h = norm(params["mlp_norm"], x)
        return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]

    return jax.lax.map(of_sequence, x)


def in_piece(table: jax.Array, words: jax.Array, first: jax.Array) -> Any:
    """The rows of words in a piece that begins with the first; which words it has."""
    rows = words - first.astype(int)
    inside = (rows >= 0) & (rows < len(table))
    return jnp.clip(rows, 0, len(table) - 1), inside


def lookup(words: jax.Array, params: Any, carry: Any) -> Any:
    """Add the rows of the words that a piece of the embedding has."""
    x, first = carry
    table = params["embedding"]
    rows, inside = in_piece(table, words, first)
    return x + jnp.where(inside[..., None], table[rows], 0), first + len(table)


def classify(words: jax.Array, params: Any, carry: Any) -> Any:
    """Add a piece of the head to logsumexp, and pick the logits of its labels."""
    x, total, picked, first = carry
    table = params["lm_head"]
    logits = jnp.einsum(
        "btd,vd->btv", x.astype(table.dtype), table, preferred_element_type=jnp.float32
    )
    rows, inside = in_piece(table, words, first)
    own = jnp.take_along_axis(logits, rows[..., None], -1)[..., 0]
    total = jnp.logaddexp(total, jax.nn.logsumexp(logits, -1))
    return x, total, picked + jnp.where(inside, own, 0), first + len(table)


def train_step(
    optimizer: optax.GradientTransformation,
    layer: Any,
    params: Any,
    state: Any,
    batch: jax.Array,
) -> tuple[Any, Any, jax.Array, jax.Array]:
    """The parameters and the state after a step; the loss and the gradients' norm."""

    def stepped(name: str, function: Any, x: Any) -> Any:
        return vjp_layers(function, optimizer, params[name], state[name], x)

    words, labels = batch[:, :-1], batch[:, 1:]
    zero, zeros = jnp.float32(0), jnp.zeros(words.shape)
    scale = params["norm"]["scale"]
    x = jnp.zeros((*words.shape, len(scale)), scale.dtype)
    (x, _), of_table = stepped("embedding", functools.partial(lookup, words), (x, zero))
    x, of_layers = stepped("layers", layer, x)
    x, of_norm = jax.vjp(norm, scale, x)
    # The gradient of x is a sum over the pieces: in float32.
    start = x.astype(jnp.float32), zeros - jnp.inf, zeros, zero
    end, of_head = stepped("head", functools.partial(classify, labels), start)
    loss, pulled = jax.value_and_grad(lambda end: jnp.mean(end[1] - end[2]))(end)

    after, states, squares = {}, {}, {}
    (dx, *_), after["head"], states["head"], squares["head"] = of_head(pulled)
    d_scale, dx = of_norm(dx.astype(x.dtype))
    dx, after["layers"], states["layers"], squares["layers"] = of_layers(dx)
    _, after["embedding"], states["embedding"], squares["table"] = of_table((dx, zero))
    grads = {"scale": d_scale}
    updates, states["norm"] = optimizer.update(grads, state["norm"], params["norm"])
    after["norm"] = optax.apply_updates(params["norm"], updates)
    return after, states, loss, sum(squares.values()) ** 0.5


def main(steps: int = 200, sizes: Sizes = SMALL) -> tuple[list[float], Any, Any]:
    """The losses, and the parameters and the state after the last step."""
    optimizer = make_optimizer(optax.warmup_cosine_decay_schedule(0, 0.02, 20, steps))
    params = init_params(sizes, jax.random.key(0))
    state = init_state(optimizer, params)
    of_sizes = functools.partial(layer, sizes)
    one_step = functools.partial(train_step, optimizer, of_sizes)
    step = jax.jit(one_step, donate_argnums=(0, 1))
    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        start, stride = jax.random.randint(key, (2, 16, 1), 0, sizes.vocabulary)
        batch = (start + stride % 4 * jnp.arange(33)) % sizes.vocabulary
        params, state, loss, _ = step(params, state, batch)
        losses.append(float(loss))
    return losses, params, state


if __name__ == "__main__":
    losses, params, _ = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print(f"query: {params['layers']['query'].shape}, {params['layers']['query'].dtype}")
