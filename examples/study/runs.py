"""One run: a workload, an arm, a learning rate and a seed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.pretrain.evaluation import evaluation
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.optimizers import find_optimizer, optimizer_arguments
from examples.pretrain.setup import Setup, State, learning_rates, set_up, split
from examples.pretrain.step import make_train_step
from examples.pretrain.tasks import make_task, read_data
from examples.study.arms import Arm
from examples.study.workloads import Workload
from orscale_jax import diagnostics

PyTree = Any


class Run(NamedTuple):
    """What a run comes to.

    Attributes:
      steps: Those after which it was validated.
      val_loss: After each of them.
      uniform: The geometric mean of all r̂ at every step; empty without ratios.
      at_bound: Share of matrices at a bound, mean over the steps.
      class_ratio: Geometric mean of r̂ of each class of layers, at the end.
    """

    steps: list[int]
    val_loss: list[float]
    uniform: list[float]
    at_bound: float
    class_ratio: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains runs of one workload and arm; their step is compiled once.

    Attributes:
      workload: What is trained.
      arm: With what.
      adam_rate: Of AdamW's parameters, where they do not share the rate.
    """

    workload: Workload
    arm: Arm
    adam_rate: float

    @functools.cached_property
    def _setup(self) -> Setup:
        config = self.workload.config
        recipe = config.recipe_of(self.arm.optimizer)
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        return set_up(make_task(config), recipe, mesh)

    def train(self, rate: float, seed: int, factors: np.ndarray | None = None) -> Run:
        """Trains to the end.

        Args:
          rate: The peak learning rate.
          seed: Of the initial weights and the order of the data.
          factors: Of the matrices' learning rates at every step, for a replay.
        """
        config = self.workload.config
        recipe = dataclasses.replace(config.recipe_of(self.arm.optimizer), seed=seed)
        data = read_data(dataclasses.replace(config, recipe=recipe))
        if factors is None:
            factors = np.ones(recipe.num_steps)
        with in_effect(self._setup.mesh):
            evaluate = evaluation(self._setup, data, recipe.batch_size)
            batches = Batches(data.train, recipe.batch_size, self._setup.mesh)
            state = self.initial_state(seed)
            readings, losses, steps = [], [], []
            every = recipe.validation_every
            arguments = jnp.float32(rate), jnp.asarray(factors, jnp.float32)
            for step, batch in enumerate(batches.read_ahead(0, recipe.num_steps), 1):
                state, reading = self._step(state, batch, *arguments)
                readings.append(reading)
                if step % every == 0 or step == recipe.num_steps:
                    steps.append(step)
                    losses.append(evaluate(state)["loss"])
        found = jax.device_get(readings)
        classes = {k: float(v) for k, v in found[-1].get("class_ratio", {}).items()}
        uniform = [float(f["uniform"]) for f in found if "uniform" in f]
        at_bound = float(np.mean([f.get("at_bound", 0.0) for f in found]))
        return Run(steps, losses, uniform, at_bound, classes)

    def initial_state(self, seed: int) -> State:
        """The state before the first step, its matrices at the workload's scale."""
        setup = self._setup
        model = setup.task.create(nnx.Rngs(seed))
        params, variables = split(model)
        numbers = setup.weight_dimension_numbers(params)
        params = jax.tree.map(
            lambda p, n: p if n is None else p * self.workload.initial_scale,
            params,
            numbers,
            is_leaf=lambda x: x is None,
        )
        opt_state = jax.jit(setup.optimizer.init)(params)
        return {"params": params, "variables": variables, "opt_state": opt_state}

    @functools.cached_property
    def _step(self) -> Callable[..., tuple[State, dict[str, Any]]]:
        setup = self._setup
        shape = learning_rates(dataclasses.replace(setup.recipe, learning_rate=1.0))

        def step(
            state: State, batch: PyTree, rate: jax.Array, factors: jax.Array
        ) -> tuple[State, dict[str, Any]]:
            def schedule(count: jax.Array) -> jax.Array:
                return rate * factors[count] * shape(count)

            def adam_schedule(count: jax.Array) -> jax.Array:
                peak = rate if self.arm.shared else self.adam_rate
                return peak * shape(count)

            optimizer = find_optimizer(self.arm.optimizer)
            arguments = optimizer_arguments(setup.recipe)
            if optimizer.has_matrices:
                arguments["weight_dimension_numbers"] = setup.weight_dimension_numbers
                arguments["adam_learning_rate"] = adam_schedule
            transformation = optimizer.constructor(schedule, **arguments)
            setup_now = dataclasses.replace(setup, optimizer=transformation)
            state, _ = make_train_step(setup_now, 1)(state, batch)
            return state, _reading(state, setup)

        return jax.jit(step, donate_argnums=0)


def _reading(state: State, setup: Setup) -> dict[str, Any]:
    """What the optimizer did, where it has ratios."""
    if not optax.tree.get_all_with_path(state["opt_state"], "trust_ratio"):
        return {}
    reading = diagnostics.read(
        state["opt_state"],
        state["params"],
        weight_dimension_numbers=setup.weight_dimension_numbers,
    )
    classes = diagnostics.layer_classes(state["params"])
    parts = diagnostics.decompose(reading, classes)
    bounds = [jax.tree.leaves(x) for x in (reading.at_r_min, reading.at_r_max)]
    flat = [jnp.concatenate([jnp.ravel(x) for x in leaves]) for leaves in bounds]
    return {
        "uniform": parts.uniform,
        "at_bound": jnp.mean(flat[0] | flat[1]),
        "class_ratio": {k: v * parts.uniform for k, v in parts.class_remainder.items()},
    }
