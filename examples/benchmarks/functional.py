"""The model and the data of a run as plain functions, for experiments on one device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import jax
import optax
from flax import nnx

from examples.pretrain.config import Config
from examples.pretrain.kinds import make_task, read_data
from examples.pretrain.setup import split

PyTree = Any
Batch = Any
LossFn = Callable[[PyTree, Batch], jax.Array]
# Of parameters, the optimizer's state and a batch; gives the first two and the loss.
Step = Callable[[PyTree, PyTree, Batch], tuple[PyTree, PyTree, jax.Array]]


class Experiment(NamedTuple):
    """What can be trained.

    Attributes:
      loss_fn: Of parameters and a batch.
      params: The initial parameters.
      batches: Item i belongs to step i.
      weight_dimension_numbers: Which parameters are matrices.
    """

    loss_fn: LossFn
    params: PyTree
    batches: Sequence[Batch]
    weight_dimension_numbers: Callable[[PyTree], PyTree]


def experiment(config: Config) -> Experiment:
    """The experiment of a run whose model has parameters alone."""
    task = make_task(config)
    model = task.create(nnx.Rngs(config.recipe.seed))
    graphdef, _ = nnx.split(model)
    numbers = task.weight_dimension_numbers(model)
    data: grain.MapDataset = read_data(config).train

    def loss_fn(params: PyTree, batch: Batch) -> jax.Array:
        return task.loss(nnx.merge(graphdef, params), batch)[0]

    batches: Any = data[: 2**48].batch(config.recipe.batch_size)
    return Experiment(loss_fn, split(model)[0], batches, numbers)


def make_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Step:
    """A jitted step that reuses the memory of parameters and state."""

    def step(
        params: PyTree, opt_state: PyTree, batch: Batch
    ) -> tuple[PyTree, PyTree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))
