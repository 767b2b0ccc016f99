"""What a training step is made of, before there is any array."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.pretrain.config import Recipe
from examples.pretrain.errors import UsageError
from examples.pretrain.layers import Layers, layers_of
from examples.pretrain.meshes import in_effect, rules_of
from examples.pretrain.models.sharding import create, shardings
from examples.pretrain.optimizers import make_optimizer, peak_rates
from examples.pretrain.task import Task
from orscale_jax import state_shardings

PyTree = Any
# "params", "variables" (of the model, that no optimizer trains) and "opt_state".
State = dict[str, PyTree]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, its optimizer and where they lie."""

    task: Task
    recipe: Recipe
    mesh: Mesh
    graphdef: Any  # The model without its arrays.
    weight_dimension_numbers: Callable[[PyTree], PyTree]  # Which parameters are matrices.
    schedule: optax.Schedule
    optimizer: optax.GradientTransformationExtraArgs
    abstract: State  # Shapes, dtypes and shardings.
    layers: Layers | None = None  # Of a run that steps one layer at a time.

    def initial_state(self) -> State:
        """The state before the first step, made where it belongs."""
        model = create(
            lambda: self.task.create(nnx.Rngs(self.recipe.seed)),
            rules_of(self.mesh),
            self.mesh,
        )
        params, variables = split(model)
        where = jax.tree.map(lambda x: x.sharding, self.abstract["opt_state"])
        with in_effect(self.mesh):
            init = self.layers.init if self.layers else self.optimizer.init
            opt_state = jax.jit(init, out_shardings=where)(params)
        return {"params": params, "variables": variables, "opt_state": opt_state}

    def merge(self, params: PyTree, variables: PyTree) -> Any:
        """The model with these arrays."""
        return nnx.merge(self.graphdef, params, variables)


def set_up(task: Task, recipe: Recipe, mesh: Mesh, zero1: bool = False) -> Setup:
    """Decides on everything and makes no array."""
    model = nnx.eval_shape(lambda: task.create(nnx.Rngs(recipe.seed)))
    params, variables = _placed(model, mesh)
    of_state = _placed(model, mesh, zero1)[0]
    schedule = learning_rates(recipe)
    numbers = task.weight_dimension_numbers(model)
    optimizer = make_optimizer(
        recipe, schedule, weight_dimension_numbers=numbers, param_shardings=params
    )
    layers = layers_of(task, recipe, model, mesh, schedule)
    if recipe.clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(recipe.clip), optimizer)
    with in_effect(mesh):
        opt_state = jax.tree.map(
            lambda x, where: x.update(sharding=where),
            jax.eval_shape(optimizer.init, params),
            state_shardings(optimizer, of_state),
        )
        if layers is not None:
            whole = NamedSharding(mesh, PartitionSpec())
            opt_state = jax.tree.map(
                lambda x: x.update(sharding=whole), jax.eval_shape(layers.init, params)
            )
    state = {"params": params, "variables": variables, "opt_state": opt_state}
    graphdef = nnx.graphdef(model)
    return Setup(
        task, recipe, mesh, graphdef, numbers, schedule, optimizer, state, layers
    )


def learning_rates(recipe: Recipe) -> optax.Schedule:
    """Those of the matrices, or of all: linear warmup, then a cosine to zero."""
    peak, _ = peak_rates(recipe)
    return optax.warmup_cosine_decay_schedule(
        # The warmup begins one step above zero: no step is without effect.
        init_value=peak / max(recipe.warmup_steps, 1),
        peak_value=peak,
        warmup_steps=recipe.warmup_steps,
        decay_steps=recipe.steps,
        end_value=0.0,
    )


def split(model: nnx.Module) -> tuple[PyTree, PyTree]:
    """Parameters, and other variables."""
    return _split(nnx.state(model))


def _split(state: nnx.State) -> tuple[PyTree, PyTree]:
    params, variables = nnx.split_state(state, nnx.Param, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(variables)


def _placed(model: Any, mesh: Mesh, zero1: bool = False) -> tuple[PyTree, PyTree]:
    """The same of an abstract model, with the shardings of the mesh."""

    def placed(path: Any, x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        try:
            sharding.shard_shape(x.shape)
        except ValueError as error:
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            raise UsageError(
                f"--mesh: {name} of shape {x.shape} does not divide over the axes "
                f"{sharding.spec} of {dict(sharding.mesh.shape)}: choose other axes."
            ) from error
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    where = _split(shardings(nnx.state(model), rules_of(mesh, zero1), mesh))
    return jax.tree.map_with_path(placed, split(model), where)
