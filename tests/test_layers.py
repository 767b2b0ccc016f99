"""Layers that are stepped in the backward pass: equal to two loops and ``jax.grad``."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
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
from orscale_jax.audit.program import flops_of, parse, runs, sent_by
from tests.runs import (
    AUTO,
    EXPLICIT,
    assert_close,
    assert_same_bits,
    equations,
    mesh_of,
    squares,
)

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
        *one, (*found, square) = step(*one, inputs(seed, dtype))
        *two, (*wanted, squared) = two_loops(*two, inputs(seed, dtype))
        assert_same_bits((one, found), (two, wanted))
        assert_close(square, squared)


def test_layers_are_computed_again_as_jax_checkpoint_does():
    """FLOPs of matrix products, loops included: those of a step that checkpoints."""
    optimizer, params = optax.sgd(0.1), stacked()
    state = init_layers(optimizer, params)

    def flops(step):
        text = step.lower(params, state, inputs(0)).compile().as_text()
        return sum(map(flops_of, runs(*parse(text))))

    @jax.jit
    def ordinary(params, state, x):
        _, (grads, _) = gradients(params, x, jax.checkpoint(layer))
        return optimizer.update(grads, state, params)

    assert flops(step_of(optimizer)) == flops(ordinary) > 0


@pytest.mark.parametrize("name", ["int8", "adamw"])
def test_no_stack_is_copied_in_a_loop(name):
    optimizer, params = OPTIMIZERS[name](), stacked()
    state = init_layers(optimizer, params)
    step = step_of(optimizer, donate_argnums=(0, 1))
    text = step.lower(params, state, inputs(0)).compile().as_text()
    stacks = {a.shape for a in jax.tree.leaves((params, state)) if a.ndim > 1}
    copied = [
        run.instruction
        for run in runs(*parse(text))
        if run.looped and run.instruction.opcode.startswith("copy")
        for _, shape in run.instruction.arrays
        if tuple(shape) in stacks
    ]
    assert not copied


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", ["adamw", "muon", "orscale", "contrib"])
def test_a_step_is_that_of_jax_grad(name):
    optimizer, params, x = OPTIMIZERS[name](), stacked(), inputs(1)
    state = init_layers(optimizer, params)
    found, _, (loss, dx, square) = step_of(optimizer)(params, state, x)
    wanted, (grads, d_wanted) = jax.jit(gradients)(params, x)
    updates, _ = jax.jit(jax.vmap(optimizer.update))(grads, state, params)
    assert_close((loss, dx), (wanted, d_wanted), 1e-6, 1e-6)
    assert_close(square, squared_norm(grads), 1e-5)
    assert_close(found, optax.apply_updates(params, updates), 1e-6, 1e-6)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(HIDDEN, use_bias=False, name="up")(nn.RMSNorm(name="norm")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(nn.silu(h)), None


@pytest.mark.extended
@pytest.mark.parametrize("axis", [0, 1])  # 1 is MaxText's.
def test_linen(axis):
    model = nn.scan(
        Block, length=LAYERS, variable_axes={"params": axis}, split_rngs={"params": True}
    )()
    x, optimizer = inputs(1), muon(2e-2)
    params = model.init(jax.random.key(0), x, None)["params"]
    state = init_layers(optimizer, params, axis=axis)
    assert optax.tree.get(state, "trace")["up"]["kernel"].shape == (LAYERS, WIDTH, HIDDEN)

    def one(params, x):
        return Block().apply({"params": params}, x, None)[0]

    def loss(params):
        return loss_of(model.apply({"params": params}, x, None)[0])

    found, _, (value, *_) = step_of(optimizer, one, axis)(params, state, x)
    wanted, grads = jax.jit(jax.value_and_grad(loss))(params)
    # Of the stacks: two of three axes are those of matrices.
    rows = MuonDimensionNumbers(*((1, 2) if axis == 0 else (0, 2)))
    whole = muon(
        2e-2,
        weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda a: rows if a.ndim == 3 else None, tree
        ),
    )
    updates, _ = jax.jit(whole.update)(grads, whole.init(params), params)
    assert_close(value, wanted, 1e-6)
    assert_close(found, optax.apply_updates(params, updates), 1e-6, 1e-6)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


@pytest.mark.extended
def test_nnx():
    x, optimizer = inputs(1), muon(2e-2)
    blocks = nnx.vmap(NNXBlock)(nnx.Rngs(0).split(LAYERS))
    graph, params = nnx.split(blocks, nnx.Param)
    state = init_layers(optimizer, params)

    def loss(params):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return block(x)

        return loss_of(forward(nnx.merge(graph, params), x))

    step = step_of(optimizer, lambda params, x: nnx.merge(graph, params)(x))
    found, _, (value, *_) = step(params, state, x)
    wanted, grads = jax.jit(jax.value_and_grad(loss))(params)
    updates, _ = jax.jit(jax.vmap(optimizer.update))(grads, state, params)
    assert_close(value, wanted, 1e-6)
    assert_close(found, optax.apply_updates(params, updates), 1e-6, 1e-6)


# What is refused, and what to do instead.


def test_clipping_by_the_global_norm_takes_two_passes():
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    params, x = stacked(), inputs(1)
    with pytest.raises(ValueError, match=r"clip_by_global_norm .*pull\(scale"):
        init_layers(clipped, params)
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params, state, x):
        y, pull = vjp_layers(layer, optimizer, params, state, x)
        dy = jax.grad(loss_of)(y)
        _, same, _, square = pull(dy, step=False)
        scale = jnp.minimum(1, 0.1 * jax.lax.rsqrt(square))
        return pull(scale * dy)[1], same

    found, same = step(params, init_layers(optimizer, params), x)
    grads, _ = gradients(params, x)[1]
    assert squared_norm(grads) > 0.1**2
    updates, _ = clipped.update(grads, clipped.init(params), params)
    assert_same_bits(same, params)
    assert_close(found, optax.apply_updates(params, updates), 1e-6, 1e-6)


def test_a_step_of_gradients_that_are_not_finite_is_left_out_by_the_norm():
    rate = optax.linear_schedule(0, 0.1, 10)  # The first step is zero in any case.
    with pytest.raises(ValueError, match=r"apply_if_finite.*pull"):
        init_layers(optax.apply_if_finite(optax.sgd(rate), 3), stacked())
    optimizer, params = optax.sgd(0.1), stacked()
    _, pull = vjp_layers(
        layer, optimizer, params, init_layers(optimizer, params), inputs(0)
    )
    bad = jnp.full((8, WIDTH), jnp.inf)
    assert not jnp.isfinite(pull(bad, step=False)[-1])
    assert jnp.isfinite(pull(inputs(1), step=False)[-1])


def test_microbatches_are_accumulated_in_the_layer():
    optimizer, params, x = optax.adamw(1e-2), stacked(), inputs(1)
    with pytest.raises(ValueError, match=r"MultiSteps, .*jax\.lax\.map"):
        init_layers(optax.MultiSteps(optimizer, 2), params)

    def in_microbatches(params, x):
        return jax.lax.map(lambda x: layer(params, x), x.reshape(4, 2, -1)).reshape(
            x.shape
        )

    state = init_layers(optimizer, params)
    found = step_of(optimizer, in_microbatches)(params, state, x)
    assert_close(found, step_of(optimizer)(params, state, x), 1e-5, 1e-6)


def test_a_shared_parameter_goes_through_the_layers():
    optimizer, params, x = optax.sgd(0.1), stacked(), inputs(1)
    shared = jnp.linspace(0.5, 1.5, WIDTH)
    state = init_layers(optimizer, params)

    def with_shared(params, carry):
        x, scale = carry
        return layer(params, x * scale.reshape(1, -1)), scale

    def closing_over(shared):
        def one(params, x):
            return with_shared(params, (x, shared))[0]

        return vjp_layers(one, optimizer, params, state, x)[0]

    for transformed in (jax.jit, lambda f: jax.grad(lambda a: f(a).sum())):
        with pytest.raises(ValueError, match=r"closes over .*float32\[16\].*leaves of x"):
            transformed(closing_over)(shared)

    @jax.jit
    def found(shared):
        y, pull = vjp_layers(with_shared, optimizer, params, state, (x, shared))
        return pull(jax.grad(lambda y: loss_of(y[0]))(y))[0]

    def loss(x, shared):
        def one(carry, p):
            return with_shared(p, carry), None

        return loss_of(jax.lax.scan(one, (x, shared), params)[0][0])

    assert_close(found(shared), jax.grad(loss, (0, 1))(x, shared), 1e-5, 1e-6)
    # It is kept once, and not for each layer.
    scan, *_ = equations(jax.make_jaxpr(found)(shared).jaxpr, "scan")
    saved = scan.outvars[scan.params["num_carry"] :]
    assert [each.aval.shape for each in saved] == [(LAYERS, 8, WIDTH)]


def test_integers_may_be_closed_over():
    optimizer, params = optax.sgd(0.1), stacked()
    state, words = init_layers(optimizer, params), jnp.arange(8)

    @jax.jit
    def step(words):
        def one(params, x):
            return layer(params, x) + (words[:, None] > 3)

        y, pull = vjp_layers(one, optimizer, params, state, inputs(0))
        return pull(y)[0]

    assert step(words).shape == (8, WIDTH)
    with pytest.raises(TypeError, match=r"x '1' of shape \(8,\) has dtype int32.* close"):
        vjp_layers(lambda p, x: x, optimizer, params, state, (inputs(0), words))


def test_stacks_of_other_lengths_are_refused():
    params, optimizer = stacked(), optax.sgd(0.1)
    longer = {**params, "up": jnp.ones((LAYERS + 1, WIDTH, HIDDEN))}
    with pytest.raises(
        ValueError, match=r"'up' of shape \(5, 16, 24\) does not have along"
    ):
        init_layers(optimizer, longer)
    with pytest.raises(ValueError, match=r"'eps' of shape \(\) does not"):
        vjp_layers(layer, optimizer, {**params, "eps": jnp.ones(())}, (), inputs(0))
    with pytest.raises(ValueError, match="has no arrays"):
        init_layers(optimizer, {})
    with pytest.raises(ValueError, match=r"layers of 'up'.*, at least one"):
        init_layers(optimizer, {"up": jnp.ones((0, 4, 4))})
    with pytest.raises(ValueError, match="axis=-1"):
        init_layers(optimizer, params, axis=-1)
    with pytest.raises(
        TypeError, match=r"'count' of shape \(4,\) has dtype int32.*split"
    ):
        init_layers(optimizer, {**params, "count": jnp.arange(LAYERS)})


def test_clipping_is_refused_also_for_layers_of_one_parameter():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    pieces = {"embedding": jnp.ones((LAYERS, 8, WIDTH))}
    with pytest.raises(ValueError, match="looks at several gradients"):
        init_layers(clipped, pieces)
    numbers = {"embedding": MuonDimensionNumbers(0, 1)}  # They know the structure.
    assert init_layers(muon(0.1, weight_dimension_numbers=numbers), pieces)


def test_a_state_that_is_not_stacked_is_refused():
    params, optimizer = stacked(), muon(0.1)
    numbers = jax.tree.map(lambda a: MuonDimensionNumbers(1, 2), params)
    numbers["norm"] = None
    whole = muon(0.1, weight_dimension_numbers=numbers)
    with pytest.raises(ValueError, match=r"state of init_layers.*count has shape \(\)"):
        vjp_layers(layer, optimizer, params, whole.init(params), inputs(0))


def test_a_layer_returns_an_array_like_its_input():
    params, optimizer = stacked(), optax.sgd(0.1)
    state = init_layers(optimizer, params)
    with pytest.raises(TypeError, match="equal types"):
        vjp_layers(lambda p, x: x @ p["up"], optimizer, params, state, inputs(0))
    with pytest.raises(TypeError, match="pytree structure"):
        vjp_layers(lambda p, x: (x, x), optimizer, params, state, inputs(0))
    with pytest.raises(TypeError, match="pytree structure"):
        vjp_layers(lambda p, x: x[0], optimizer, params, state, (inputs(0), inputs(1)))


# Meshes.


@pytest.mark.extended
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
@pytest.mark.parametrize("mu_dtype", [None, "int8"])
@pytest.mark.parametrize(
    ("sizes", "up", "down"),
    [
        ({"data": 8}, P(), P()),
        ({"data": 8}, P("data"), P(None, "data")),
        ({"data": 4, "model": 2}, P(), P()),
        ({"data": 4, "model": 2}, P("data", "model"), P("model", "data")),
    ],
    ids=["replicated", "FSDP", "replicated on two axes", "FSDP on two axes"],
)
def test_what_is_sent_is_of_one_layer(sizes, up, down, mu_dtype, kind):
    """In the loop, which has all collectives but those of the loss."""
    params, x, mesh = stacked(), inputs(0, rows=32), mesh_of(sizes, kind)
    alone = muon(2e-2, mu_dtype=mu_dtype)
    wanted, _, (loss, *_) = step_of(alone)(params, init_layers(alone, params), x)
    of_layer = {"norm": P(), "up": up, "down": down}
    of_layer = {name: NamedSharding(mesh, spec) for name, spec in of_layer.items()}
    where, (batch, whole) = stacked_shardings(of_layer), (P("data"), P())
    batch, whole = NamedSharding(mesh, batch), NamedSharding(mesh, whole)
    one = {
        name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=of_layer[name])
        for name, a in params.items()
    }
    optimizer, of_state = alone, None
    if kind is AUTO:
        optimizer = muon(2e-2, mu_dtype=mu_dtype, param_shardings=of_layer)
        of_state = stacked_shardings(state_shardings(optimizer, one))

    def gathered(params, x):
        if kind is AUTO:
            return jax.lax.with_sharding_constraint(layer(params, x), batch)
        return layer(jax.tree.map(lambda a: jax.sharding.reshard(a, whole), params), x)

    with jax.set_mesh(mesh):
        params, x = jax.device_put(params, where), jax.device_put(x, batch)
        init = functools.partial(init_layers, optimizer)
        state = jax.jit(init, out_shardings=of_state)(params)
        results = None if kind is EXPLICIT else (where, of_state, None)
        step = step_of(optimizer, gathered, out_shardings=results)
        compiled = step.lower(params, state, x).compile()
        found, after, (found_loss, *_) = compiled(params, state, x)
    assert_close((found, found_loss), (wanted, loss), 1e-5)
    both = (params, state), (found, after)
    for before, later in zip(*map(jax.tree.leaves, both), strict=True):
        assert before.sharding.is_equivalent_to(later.sharding, later.ndim)
    sent = [run for run in runs(*parse(compiled.as_text())) if sent_by(run, 8)[0]]
    assert {run.times for run in sent if run.looped} >= {LAYERS}
    for run in sent:
        entries = sum(math.prod(shape) for _, shape in run.instruction.arrays)
        assert entries <= (2 * WIDTH * HIDDEN + WIDTH if run.looped else 1)


def stacked_shardings(tree):
    return jax.tree.map(lambda s: NamedSharding(s.mesh, P(None, *s.spec)), tree)


@pytest.mark.extended
@pytest.mark.parametrize("factory", [muon, orscale])
@pytest.mark.parametrize("mu_dtype", [None, "int8"])
def test_the_state_of_a_stack_becomes_that_of_layers_and_back(factory, mu_dtype):
    """The lines of the page, for a run that goes on."""

    def like(path, array, wanted):
        if ".numbers" in jax.tree_util.keystr(path):
            return array.swapaxes(0, 1)
        if array.ndim > wanted.ndim:
            return array[0]
        return jnp.broadcast_to(array, wanted.shape)

    params, optimizer = stacked(), factory(2e-2, mu_dtype=mu_dtype)
    numbers = jax.tree.map(lambda a: MuonDimensionNumbers(1, 2), params)
    numbers["norm"] = None
    whole = factory(2e-2, mu_dtype=mu_dtype, weight_dimension_numbers=numbers)

    def step(params, state, x):
        grads, _ = gradients(params, x)[1]
        updates, state = whole.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.jit(step)(params, whole.init(params), inputs(0))
    wanted = jax.eval_shape(functools.partial(init_layers, optimizer), params)
    of_layers = jax.tree.map_with_path(like, state, wanted)
    found, after, _ = step_of(optimizer)(params, of_layers, inputs(1))
    wanted, of_stack = jax.jit(step)(params, state, inputs(1))
    assert_close(found, wanted, 1e-5, 1e-5)
    back = jax.tree.map_with_path(like, after, whole.init(params))
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, of_stack)
    found, _ = jax.jit(step)(found, back, inputs(2))
    wanted, _ = jax.jit(step)(wanted, of_stack, inputs(2))
    assert_close(found, wanted, 1e-5, 1e-4)
