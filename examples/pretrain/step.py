"""A training step: gradient, optimizer, and the model's other variables."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from examples.pretrain.errors import UsageError
from examples.pretrain.layers import Layers
from examples.pretrain.setup import Setup, State, split
from examples.pretrain.task import Metrics

PyTree = Any
Batch = Any
# Of parameters, other variables and a batch.
Gradient = Callable[[PyTree, PyTree, Batch], tuple[PyTree, PyTree, Metrics]]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]


def make_train_step(setup: Setup, accumulation: int) -> TrainStep:
    """The step as a function of the state and a batch, which gives the next state."""
    if setup.layers is not None:
        return one_layer_at_a_time(setup, setup.layers, accumulation)
    gradient = gradient_of(setup, accumulation)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        params = state["params"]
        with jax.named_scope("gradient"):
            grads, variables, metrics = gradient(params, state["variables"], batch)
        with jax.named_scope("optimizer"):
            metrics["grad_norm"] = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
            updates, opt_state = setup.optimizer.update(grads, state["opt_state"], params)
            params = optax.apply_updates(params, updates)
        variables = setup.task.after_step(variables, metrics)
        return {"params": params, "variables": variables, "opt_state": opt_state}, metrics

    return train_step


def one_layer_at_a_time(setup: Setup, layers: Layers, accumulation: int) -> TrainStep:
    """The same, except that the gradients of one block exist at a time."""
    if accumulation > 1:
        raise UsageError(
            "--one-layer-at-a-time takes the whole batch at once: leave out "
            "--per-device-batch, or pass a smaller --batch-size."
        )

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        params, opt_state, metrics = layers.step(
            setup, state["params"], state["variables"], state["opt_state"], batch
        )
        variables = setup.task.after_step(state["variables"], metrics)
        return {"params": params, "variables": variables, "opt_state": opt_state}, metrics

    return train_step


def gradient_of(setup: Setup, accumulation: int = 1) -> Gradient:
    """The gradient on a batch, the model's other variables after it, and metrics."""

    def loss_of(params: PyTree, variables: PyTree, batch: Batch) -> Any:
        model = setup.merge(params, variables)
        loss, metrics = setup.task.loss(model, batch)
        return loss, (split(model)[1], metrics)

    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)

    def at_once(params: PyTree, variables: PyTree, batch: Batch) -> Any:
        (_, (variables, metrics)), grads = value_and_grad(params, variables, batch)
        return grads, variables, metrics

    where = jax.tree.map(lambda x: x.sharding.spec, setup.abstract["params"])
    gradient = at_once if accumulation == 1 else in_turn(at_once, accumulation, where)
    return on_auto_axes(setup, gradient, (where, PartitionSpec(), PartitionSpec()))


def in_turn(gradient: Gradient, count: int, where: PyTree) -> Gradient:
    """The mean of the gradients on `count` parts of a batch, one after another.

    Row b is in part b % count, so that no device sends any. Sums are float32, also of
    gradients in bfloat16, and sharded like the parameters.
    """

    def in_parts(x_Bx: jax.Array) -> jax.Array:
        x = x_Bx.reshape(x_Bx.shape[0] // count, count, *x_Bx.shape[1:])
        return jnp.moveaxis(x, 1, 0)

    def zeros(like: Any) -> jax.Array:
        return jnp.zeros(like.shape, jnp.promote_types(jnp.float32, like.dtype))

    def mean_gradient(params: PyTree, variables: PyTree, batch: Batch) -> Any:
        def add(carry: Any, part: Batch) -> tuple[Any, None]:
            sums, variables = carry
            grads, variables, metrics = gradient(params, variables, part)
            return (jax.tree.map(jnp.add, sums, (grads, metrics)), variables), None

        parts = jax.tree.map(in_parts, batch)
        first = jax.tree.map(lambda x: x[0], parts)
        grads, _, metrics = jax.eval_shape(gradient, params, variables, first)
        sums = jax.tree.map(zeros, (grads, metrics))
        sums = jax.lax.with_sharding_constraint(sums[0], where), sums[1]
        (sums, variables), _ = jax.lax.scan(add, (sums, variables), parts)
        means = jax.tree.map(
            lambda s, x: (s / count).astype(x.dtype), sums, (grads, metrics)
        )
        return means[0], variables, means[1]

    return mean_gradient


def on_auto_axes(
    setup: Setup, function: Callable[..., Any], out_sharding: Any
) -> Callable[..., Any]:
    """A function of the model, whose code leaves shardings to the compiler."""
    if AxisType.Explicit not in setup.mesh.axis_types:
        return function
    return jax.sharding.auto_axes(function, out_sharding=out_sharding)


def compiled_step(
    setup: Setup,
    accumulation: int,
    batch: Batch,
    compiler_options: Mapping[str, str] | None = None,
) -> Any:
    """The step, compiled for batches like this one; it reuses the memory of its state."""
    where = jax.tree.map(lambda x: x.sharding, setup.abstract)
    step = jax.jit(
        make_train_step(setup, accumulation),
        donate_argnums=0,
        out_shardings=(where, None),
    )
    return step.lower(setup.abstract, batch).compile(dict(compiler_options or {}))
