"""A step that holds the gradients of one block of a dense decoder at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from examples.pretrain.config import Recipe
from examples.pretrain.errors import UsageError
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.task import Metrics, Task
from orscale_jax import init_layers, vjp_layers
from orscale_jax.flax import nnx_dimension_numbers

PyTree = Any
BLOCKS = "blocks"  # The name of the stacked blocks among the parameters.


@dataclasses.dataclass(frozen=True)
class Layers:
    """The optimizers of one block and of all other parameters."""

    graphdef: Any  # Of a block.
    of_block: optax.GradientTransformation
    of_rest: optax.GradientTransformation

    def init(self, params: PyTree) -> PyTree:
        """The state of the optimizers."""
        blocks = init_layers(self.of_block, params[BLOCKS])
        return {BLOCKS: blocks, "rest": self.of_rest.init(_without_blocks(params))}

    def step(
        self, setup: Any, params: PyTree, variables: PyTree, state: PyTree, batch: Any
    ) -> tuple[PyTree, PyTree, Metrics]:
        """The parameters and the state after a step on a batch, and metrics."""
        rest = _without_blocks(params)

        def model_of(rest: PyTree) -> Any:
            return setup.merge({**rest, BLOCKS: params[BLOCKS]}, variables)

        def embedded(rest: PyTree) -> jax.Array:
            return model_of(rest).embedded(batch[:, :-1])

        def block(params: PyTree, x: jax.Array) -> jax.Array:
            return nnx.merge(self.graphdef, params)(x)[0]

        def loss_of(rest: PyTree, x: jax.Array) -> jax.Array:
            model = model_of(rest)
            return setup.task.cross_entropy(model, model.final_norm(x), batch)

        x, to_embedding = jax.vjp(embedded, rest)
        x, pull = vjp_layers(block, self.of_block, params[BLOCKS], state[BLOCKS], x)
        loss, (grads, dx) = jax.value_and_grad(loss_of, (0, 1))(rest, x)
        dx, blocks, of_blocks, square = pull(dx)
        grads = jax.tree.map(jnp.add, grads, *to_embedding(dx))
        square += optax.tree.norm(optax.tree.cast(grads, jnp.float32), squared=True)
        updates, of_rest = self.of_rest.update(grads, state["rest"], rest)
        after = {**optax.apply_updates(rest, updates), BLOCKS: blocks}
        metrics = {"loss": loss, "grad_norm": jnp.sqrt(square)}
        return after, {BLOCKS: of_blocks, "rest": of_rest}, metrics


def layers_of(
    task: Task, recipe: Recipe, model: Any, mesh: Mesh, schedule: optax.Schedule
) -> Layers | None:
    """What `one_layer_at_a_time` needs; None without it.

    Raises:
      UsageError: If the model has no stacked blocks, or another option contradicts.
    """
    if not getattr(recipe, "one_layer_at_a_time", False):
        return None
    option = "--one-layer-at-a-time"
    if not hasattr(model, "embedded") or isinstance(model.blocks, nnx.List):
        raise UsageError(
            f"{option} needs a dense decoder whose blocks are stacked: pass "
            "--model.scan, or leave it out."
        )
    if recipe.clip is not None:
        raise UsageError(
            f"{option} steps a block before the norm of all gradients is known: pass "
            f"--clip None instead of {recipe.clip}."
        )
    if mesh.size > 1:
        raise UsageError(
            f"{option} is for one device, but the mesh has {mesh.size}: leave it out."
        )
    graphdef, stacked = nnx.split(model.blocks)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
    numbers = task.weight_dimension_numbers(model)
    blocks = nnx.to_pure_dict(stacked)

    def of_rest(rest: PyTree) -> PyTree:
        return _without_blocks(numbers({**rest, BLOCKS: blocks}))

    def optimizer(numbers: Any) -> optax.GradientTransformation:
        return make_optimizer(recipe, schedule, weight_dimension_numbers=numbers)

    of_block = nnx_dimension_numbers(nnx.merge(graphdef, one))
    return Layers(graphdef, optimizer(of_block), optimizer(of_rest))


def _without_blocks(params: PyTree) -> PyTree:
    return {name: part for name, part in params.items() if name != BLOCKS}
