"""The record of modded-nanogpt's track 3, for the model of docs/recipes.md.

The script of result 46, ``train_gpt_cwd_SOTA.py`` at f411b3d, and that of the open pull
request 339 at cb14c69, whose momentum has two timescales. The track counts the steps of a
GPT-2 of 124M parameters to a loss of 3.28. Each number of steps is a result of 8 seeds.
Every stage and every number was read there.

The optimizer is ``track_3(optax.constant_schedule(0.0375))``. It differs in these points:
the code divides by the Schatten-4 norm before its twelve Newton–Schulz steps, and the
call by the Frobenius norm. The code gives biases another β₂. The floor, the brake and the
pin apply to each expert. Not part of the optimizer are the initial weights of
projections, MLPs and gains, and the average of late weights, whose loss the record
reports: ``0.4 * weights + 0.6 * average``, without the lookahead (`without_lookahead` in
``examples/track0/ema_nesterov.py``).

``tests/test_recipes.py`` compares each stage with NumPy that follows the scripts.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax.contrib import MuonDimensionNumbers

from examples.track0.ema_nesterov import ema_nesterov
from examples.track0.mixed_emas import mixed_emas
from examples.track0.neuron_floor import raised
from orscale_jax import by_path, orthogonalize, scale_by_shape

Tx: TypeAlias = optax.GradientTransformation
Schedule: TypeAlias = Callable[[Array], Array]

NUMBERS = by_path(
    {
        "query|key|value": MuonDimensionNumbers(0, (1, 2)),  # (inputs, heads, features)
        r"attention\.out": MuonDimensionNumbers((0, 1), 2),  # (heads, features, outputs)
        "experts": MuonDimensionNumbers(-2, -1),  # (experts, inputs, outputs)
    }
)
SWITCH = 1000  # The last step with one timescale.


def track_3(rate: Schedule) -> Tx:
    """The record, 2,690 steps; `rate` is 0.0375 at every step."""
    momentum = mixed_emas(
        lambda step: [mu(step)],
        [1.0],
        gradient_share=lambda step: 1 - mu(step),
    )
    return track_3_with(momentum, rate)


def track_3_open(rate: Schedule) -> Tx:
    """The record with momentum of two timescales, 2,635 steps."""
    momentum = mixed_emas(
        lambda step: jnp.where(step <= SWITCH, mu(step), jnp.array([0.85, 0.98])),
        [0.4385, 0.5615],
        gradient_share=lambda step: 1 - mu(step),
    )
    return track_3_with(momentum, rate)


def track_3_with(momentum: Tx, rate: Schedule) -> Tx:
    def matrix_rate(step: Array) -> Array:
        return rate(step) * cool(step, 8.84521e-5)

    def adam_rate(times: float) -> Schedule:  # in multiples of the first rate of matrices
        return lambda step: times * rate(step) * cool(step, 1.658935e-4)

    matrices = optax.chain(
        soap(momentum),
        orthogonalize(
            ns_steps=12, ns_coeffs=[(2.0, -1.5, 0.5)], weight_dimension_numbers=NUMBERS
        ),
        scale_by_shape(scale_mode="shape_scaling", weight_dimension_numbers=NUMBERS),
        optax.stateless(brake_outward),
        optax.stateless(floor_of_neurons),
        pin_radius(matrix_rate, decay=0.025),
    )
    adam = functools.partial(optax.adam, b1=0.8, b2=0.99, eps=1e-10)
    others = uncorrected_adam(0.8, 0.99, 1e-10)
    groups = {
        "matrix": matrices,
        "embed": adam(adam_rate(8)),
        "lm_head": adam(adam_rate(1 / 12)),
        "others": optax.chain(others, optax.scale_by_learning_rate(adam_rate(4 / 15))),
    }
    return ema_nesterov(optax.partition(groups, track_3_labels), ahead)


def ahead(step: Array) -> Array:
    return jnp.where(
        (step >= 300) & (step < 1950), 0.3 * cool(step - 1, 1.658935e-4), 0.0
    )


def mu(step: Array) -> Array:  # from 0.85 to 0.95, and back at the end
    return jnp.minimum(0.95, 0.85 + 0.1 * jnp.minimum(step / 300, (2900 - step) / 200))


def cool(step: Array, coefficient: float) -> Array:  # PowerCool, from 1
    return jnp.minimum(1.0, coefficient * jnp.maximum(2900.0 - step, 0.0) ** 1.2)


def track_3_labels(params: Any) -> Any:
    def label(path: Any, leaf: Any) -> str:
        name = path[0].key
        others = "matrix" if leaf.ndim > 1 else "others"
        return name if name in ("embed", "lm_head") else others

    return jax.tree.map_with_path(label, params)


def soap(momentum: Tx, b2: float = 0.9, eps: float = 1e-8) -> Tx:  # whitens M̃
    def init(params: Any) -> Any:
        def start(path: Any, x: Array) -> Any:
            x = as_matrix(path, x)
            left, right = x @ x.mT, x.mT @ x
            zeros = jax.tree.map(jnp.zeros_like, (left, right, x))
            return *zeros, *(jnp.linalg.eigh(0 * y)[1] for y in (left, right))

        bases = [start(*leaf) for leaf in jax.tree.leaves_with_path(params)]
        return jnp.zeros((), jnp.int32), momentum.init(params), bases

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, momentum_state, bases = state
        m, momentum_state = momentum.update(updates, momentum_state, params)
        found, after = [], []
        grads = jax.tree.leaves_with_path(updates)
        for (path, g), x, basis in zip(grads, jax.tree.leaves(m), bases, strict=True):
            white, basis = whitened(path, g, x, basis, count)
            found.append(white.reshape(x.shape))
            after.append(basis)
        found = jax.tree.unflatten(jax.tree.structure(m), found)
        return found, (count + 1, momentum_state, after)

    def whitened(path: Any, g: Array, m: Array, basis: Any, count: Array) -> Any:
        g, m = as_matrix(path, g), as_matrix(path, m)
        left, right, v, p, q = basis
        rotated = p.mT @ m @ q
        v = jnp.where(count == 0, v, b2 * v + (1 - b2) * rotated**2)
        white = p @ (rotated / jnp.sqrt(jnp.maximum(v, eps**2))) @ q.mT
        white *= schatten_4(m) / schatten_4(white)
        if "out" in jax.tree_util.keystr(path):
            white = m + trust(m, white, g, count) * (white - m)
            white *= schatten_4(m) / schatten_4(white)
        left = b2 * left + (1 - b2) * g @ g.mT
        right = b2 * right + (1 - b2) * g.mT @ g

        def first() -> Any:
            return v, *(jnp.linalg.eigh(x)[1][..., ::-1] for x in (left, right))

        def later() -> Any:
            rows, new_p = turned(left, p)
            columns, new_q = turned(right, q)
            sorted_v = jnp.take_along_axis(v, rows[..., None], -2)
            return jnp.take_along_axis(sorted_v, columns[..., None, :], -1), new_p, new_q

        v, p, q = jax.lax.cond(count == 0, first, later)
        return jnp.where(count == 0, m, white), (left, right, v, p, q)

    def turned(square: Array, p: Array) -> Any:  # an orthogonal iteration, sorted
        order = jnp.argsort(-jnp.sum(p * (square @ p), axis=-2), axis=-1)
        sorted_p = jnp.take_along_axis(p, order[..., None, :], -1)
        return order, jnp.linalg.qr(square @ sorted_p)[0]

    return optax.GradientTransformation(init, update)


def trust(m: Array, white: Array, g: Array, count: Array) -> Array:  # in SOAP
    def cosine(x: Array, y: Array) -> Array:
        return dot(x, y) / jnp.maximum(frobenius(x) * frobenius(y), 1e-8)

    agrees = jnp.clip((cosine(white, m) - 0.2) / 0.8, 0, 1)
    descends = jnp.clip(cosine(white, g) / jnp.maximum(cosine(m, g), 1e-8), 0, 1)
    least = 0.45 * jnp.clip((1625 - count) / 250, 0, 1)
    return jnp.clip(agrees * descends, least, jnp.where(count < 1625, 0.85, 1.0))


def brake_outward(updates: Any, params: Any) -> Any:  # halves what lengthens weights
    def braked(u: Array, w: Array) -> Array:
        along = dot(u, w) / jnp.maximum(dot(w, w), 1e-12)
        return u - 0.5 * jnp.minimum(along, 0) * w

    return of_matrices(braked, updates, params)


def floor_of_neurons(updates: Any, params: Any) -> Any:
    return of_matrices(lambda u, w: raised(u, w, 0.3825), updates, params)


def pin_radius(rate: Schedule, decay: float) -> Tx:  # to the norm of the radial part
    def update(updates: Any, count: Any, params: Any = None) -> Any:
        lr = rate(count)

        def change(u: Array, w: Array) -> Array:
            radius, moved = jnp.maximum(frobenius(w), 1e-8), w - lr * u
            wanted = jnp.maximum(radius - lr * dot(u, w) / radius, 1e-8)
            pinned = moved * wanted / jnp.maximum(frobenius(moved), 1e-8)
            return jnp.where(u * w > 0, 1 - lr * decay, 1) * pinned - w

        return of_matrices(change, updates, params), count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def uncorrected_adam(b1: float, b2: float, eps: float) -> Tx:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        m, v = state
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, updates)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, v, updates)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v), (m, v)

    def init(params: Any) -> Any:
        return (jax.tree.map(jnp.zeros_like, params),) * 2

    return optax.GradientTransformation(init, update)


def as_matrix(path: Any, x: Array) -> Array:  # (..., inputs, outputs)
    name = jax.tree_util.keystr(path)
    if "attention" not in name:
        return x
    return x.reshape(-1, x.shape[-1]) if "out" in name else x.reshape(x.shape[0], -1)


def of_matrices(fn: Callable[..., Array], *trees: Any) -> Any:
    def of_leaf(path: Any, *leaves: Array) -> Array:
        return fn(*(as_matrix(path, x) for x in leaves)).reshape(leaves[0].shape)

    return jax.tree.map_with_path(of_leaf, *trees)


def dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def frobenius(x: Array) -> Array:
    return jnp.sqrt(dot(x, x))


def schatten_4(x: Array) -> Array:
    return jnp.sqrt(jnp.maximum(frobenius(x @ x.mT), 1e-16))
