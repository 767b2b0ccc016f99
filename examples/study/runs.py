"""One run: a workload, an arm, a learning rate and a seed."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
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
from examples.pretrain.task import Data
from examples.pretrain.tasks import make_task, read_data
from examples.study.arms import Arm
from examples.study.search import Rates, Settings
from examples.study.theory import decompose
from examples.study.workloads import Workload
from orscale_jax import diagnostics

PyTree = Any
Readings = list[dict[str, Any]]


class Run(NamedTuple):
    """What a run comes to.

    Attributes:
      losses: Validation losses, in nats: after every interval, and at the end.
      growth: Geometric mean over the leaves of matrices of ‖W‖/‖W₀‖ at the end.
      uniform: Geometric mean of all r̂ at every step; empty without ratios.
      spread: Standard deviation of log r̂ over the matrices, mean over the steps.
      at_bound: Share of matrices at a bound, mean over the steps.
      class_ratio: Geometric mean of r̂ of each class of layers, at the end.
    """

    losses: list[float]
    growth: float
    uniform: list[float]
    spread: float
    at_bound: float
    class_ratio: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains runs of one workload and arm; their step is compiled once.

    Attributes:
      workload: What is trained.
      arm: With what.
    """

    workload: Workload
    arm: Arm

    def train(
        self, rates: Rates | Settings, seed: int, factors: np.ndarray | None = None
    ) -> Run:
        """Trains to the end.

        Args:
          rates: The peak learning rates, and the weight decay if not the workload's.
          seed: Of the initial weights and the order of the data.
          factors: Of the matrices' learning rates at every step, for a replay.
        """
        losses: list[float] = []
        every = self.setup.recipe.validation_every
        steps = self.setup.recipe.num_steps
        readings: Readings = []
        norms = []
        for step, state, reading in self.states(rates, seed, factors):
            readings.append(reading)
            if step == 0 or step == steps:
                norms.append(self._matrix_norms(state["params"]))
            if step and (step % every == 0 or step == steps):
                losses.append(self._evaluate(state)["loss"])
        growth = float(np.exp(np.mean(np.log(norms[1] / norms[0]))))
        return Run(losses, growth, **_over_steps(jax.device_get(readings[1:])))

    def states(
        self, rates: Rates | Settings, seed: int, factors: np.ndarray | None = None
    ) -> Iterator[tuple[int, State, dict[str, Any]]]:
        """The state before the first step and after each one; the next one takes it."""
        recipe = self.setup.recipe
        factors = np.ones(recipe.num_steps) if factors is None else factors
        arguments = [*map(jnp.float32, rates[:2]), jnp.asarray(factors, jnp.float32)]
        arguments += map(jnp.float32, rates[2:])
        with in_effect(self.setup.mesh):
            state = self.initial_state(seed)
            yield 0, state, {}
            for step, batch in enumerate(self.batches(seed), 1):
                state, reading = self.step(state, batch, *arguments)
                yield step, state, reading

    def batches(self, seed: int) -> Iterator[PyTree]:
        """The batches of a run."""
        data, recipe = self.data(seed), self.setup.recipe
        batches = Batches(data.train, recipe.batch_size, self.setup.mesh)
        first = 0
        if self.workload.first_batch is not None:
            first = 1
            yield Batches(data.train, self.workload.first_batch, self.setup.mesh)[0]
        yield from batches.read_ahead(first, recipe.num_steps)

    def data(self, seed: int) -> Data:
        """What a run trains on, and what it is validated on."""
        return _data(self.workload.config, seed)

    def initial_state(self, seed: int) -> State:
        """The state before the first step, its matrices at the workload's scale."""
        return self._initial_state(jax.random.key(seed))

    @functools.cached_property
    def setup(self) -> Setup:
        """The model, on one device."""
        config = self.workload.config
        recipe = config.recipe_of(self.arm.optimizer)
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        return set_up(make_task(config), recipe, mesh)

    @functools.cached_property
    def _initial_state(self) -> Callable[[jax.Array], State]:
        setup = self.setup

        def scaled(p: jax.Array, numbers: Any) -> jax.Array:
            return p if numbers is None else p * self.workload.initial_scale

        def initial_state(key: jax.Array) -> State:
            params, variables = split(setup.task.create(nnx.Rngs(key)))
            numbers = setup.weight_dimension_numbers(params)
            params = jax.tree.map(scaled, params, numbers, is_leaf=lambda x: x is None)
            opt_state = setup.optimizer.init(params)
            return {"params": params, "variables": variables, "opt_state": opt_state}

        return jax.jit(initial_state)

    @functools.cached_property
    def _evaluate(self) -> Callable[[State], dict[str, float]]:
        # All seeds are validated on the same examples.
        return evaluation(self.setup, self.data(0), self.setup.recipe.batch_size)

    def _matrix_norms(self, params: PyTree) -> np.ndarray:
        numbers = self.setup.weight_dimension_numbers(params)
        matrices = jax.tree.map(
            lambda p, n: None if n is None else p, params, numbers, is_leaf=_is_none
        )
        return np.array([np.linalg.norm(x) for x in jax.tree.leaves(matrices)])

    @functools.cached_property
    def step(self) -> Callable[..., tuple[State, dict[str, Any]]]:
        """A step, compiled: of state, batch, both rates, the factors of all steps, and
        the weight decay if it is not the recipe's.
        """
        setup = self.setup
        shape = learning_rates(dataclasses.replace(setup.recipe, learning_rate=1.0))

        def step(
            state: State,
            batch: PyTree,
            rate: jax.Array,
            adam_rate: jax.Array,
            factors: jax.Array,
            decay: jax.Array | None = None,
        ) -> tuple[State, dict[str, Any]]:
            def schedule(count: jax.Array) -> jax.Array:
                return rate * factors[count] * shape(count)

            def adam_schedule(count: jax.Array) -> jax.Array:
                return adam_rate * shape(count)

            optimizer = find_optimizer(self.arm.optimizer)
            arguments = optimizer_arguments(setup.recipe)
            if decay is not None:
                arguments["weight_decay"] = decay
            if optimizer.has_matrices:
                arguments["weight_dimension_numbers"] = setup.weight_dimension_numbers
                arguments["adam_learning_rate"] = adam_schedule
            transformation = optimizer.constructor(schedule, **arguments)
            if setup.recipe.clip is not None:
                clip = optax.clip_by_global_norm(setup.recipe.clip)
                transformation = optax.chain(clip, transformation)
            setup_now = dataclasses.replace(setup, optimizer=transformation)
            state, _ = make_train_step(setup_now, 1)(state, batch)
            return state, _reading(state, setup)

        return jax.jit(step, donate_argnums=0)


@functools.lru_cache(maxsize=8)
def _data(config: Any, seed: int) -> Data:
    recipe = dataclasses.replace(config.recipe, seed=seed)
    return read_data(dataclasses.replace(config, recipe=recipe))


def _is_none(node: Any) -> bool:
    return node is None


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
    parts = decompose(reading, classes)
    bounds = [jax.tree.leaves(x) for x in (reading.at_r_min, reading.at_r_max)]
    flat = [jnp.concatenate([jnp.ravel(x) for x in leaves]) for leaves in bounds]
    return {
        "uniform": parts.uniform,
        "spread": parts.spread,
        "at_bound": jnp.mean(flat[0] | flat[1]),
        "class_ratio": {k: v * parts.uniform for k, v in parts.class_remainder.items()},
    }


def _over_steps(readings: Readings) -> dict[str, Any]:
    def mean(name: str) -> float:
        return float(np.mean([reading.get(name, math.nan) for reading in readings]))

    classes = readings[-1].get("class_ratio", {})
    return {
        "uniform": [float(r["uniform"]) for r in readings if "uniform" in r],
        "spread": mean("spread"),
        "at_bound": mean("at_bound"),
        "class_ratio": {name: float(ratio) for name, ratio in classes.items()},
    }
