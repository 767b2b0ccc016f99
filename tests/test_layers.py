"""Layers that are stepped in the backward pass: equal to two loops, and to ``jax.grad``."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from orscale_jax import (
    init_layers,
    keep_master_weights,
    muon,
    orscale,
    state_shardings,
    vjp_layers,
)
from orscale_jax.audit.program import parse, runs, sent_by
from tests.runs import AUTO, EXPLICIT, assert_close, assert_same_bits, mesh_of, squares

LAYERS, WIDTH, HIDDEN = 4, 16, 24
BARRIER = jax.lax.optimization_barrier
OPTIMIZED = {"xla_backend_optimization_level": 3}


def stacked(dtype=jnp.float32, axis=0):
    """The parameters of residual layers of two matrices and a scale."""
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "norm": jnp.ones((LAYERS, WIDTH)),
        "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return jax.tree.map(lambda a: jnp.moveaxis(a.astype(dtype), 0, axis), params)


def layer(params, x):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    h = h * params["norm"].reshape(*[1] * (x.ndim - 1), -1)
    return x + jax.nn.silu(h @ params["up"]) @ params["down"]


def inputs(seed, dtype=jnp.float32, rows=8):
    return jax.random.normal(jax.random.key(seed), (rows, WIDTH)).astype(dtype)


def squared_norm(tree):
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    return optax.tree.norm(wide, squared=True)


def loss_of(y):
    return squares(y.astype(jnp.float32))


def step_of(optimizer, layer=layer, axis=0, **jit):
    def step(params, state, x):
        y, pull = vjp_layers(layer, optimizer, params, state, x, axis=axis)
        loss, dy = jax.value_and_grad(loss_of)(y)
        dx, params, state, square = pull(dy)
        return params, state, (loss, dx, square)

    return jax.jit(step, compiler_options=OPTIMIZED, **jit)


def gradients(params, x, layer=layer):
    """By ``jax.grad`` of the whole: the loss, and the gradients of layers and input."""

    def loss(params, x):
        return loss_of(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0])

    return jax.value_and_grad(loss, (0, 1))(params, x)


def in_two_loops(optimizer):
    """One loop makes all gradients and another one all steps, of the same programs."""

    def take(*trees, i):
        return BARRIER(jax.tree.map(lambda a: a[i], trees))

    def put(tree, part, i):
        return jax.tree.map(lambda a, b: a.at[i].set(b), tree, part)

    def step(params, state, x):
        def gradient(j, carry):
            dy, square, grads = carry
            i = LAYERS - 1 - j
            g, dx = jax.vjp(layer, *take(params, saved, i=i))[1](dy)
            square += squared_norm(g)
            g, dx = BARRIER((g, dx))
            return dx, square, put(grads, g, i)

        def one_step(i, carry):
            p, s, g = take(*carry, grads, i=i)
            updates, s = optimizer.update(g, s, p)
            p, s = BARRIER((optax.apply_updates(p, updates), s))
            return put(carry[0], p, i), put(carry[1], s, i)

        y, saved = jax.lax.scan(lambda x, p: (layer(p, x), x), x, params)
        loss, dy = jax.value_and_grad(loss_of)(y)
        start = dy, jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        dx, square, grads = jax.lax.fori_loop(0, LAYERS, gradient, start)
        params, state = jax.lax.fori_loop(0, LAYERS, one_step, (params, state))
        return params, state, (loss, dx, square)

    return jax.jit(step, compiler_options=OPTIMIZED)


OPTIMIZERS = {
    "muon": lambda: muon(2e-2),
    "int8": lambda: muon(2e-2, mu_dtype="int8"),
    "orscale": lambda: orscale(optax.linear_schedule(2e-2, 0, 10)),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "contrib": lambda: optax.contrib.muon(2e-2),
    "master weights": lambda: keep_master_weights(muon(2e-2)),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_two_loops(name):
    optimizer = OPTIMIZERS[name]()
    dtype = jnp.bfloat16 if name == "master weights" else jnp.float32
    one = two = stacked(dtype), init_layers(optimizer, stacked(dtype))
    step, two_loops = step_of(optimizer), in_two_loops(optimizer)
    for seed in range(3):
        *one, found = step(*one, inputs(seed, dtype))
        *two, wanted = two_loops(*two, inputs(seed, dtype))
        assert_same_bits((one, found), (two, wanted))
