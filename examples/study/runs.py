"""One run: a workload, an optimizer, learning rates and a seed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.pretrain.loading import Batches
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.optimizers import find_optimizer, optimizer_arguments
from examples.pretrain.setup import Setup, State, learning_rates, set_up, split
from examples.pretrain.step import make_train_step
from examples.pretrain.task import Data
from examples.pretrain.tasks import make_task, read_data
from examples.pretrain.train import evaluation
from examples.study.search import Settings
from examples.study.workloads import Workload
from orscale_jax import diagnostics

PyTree = Any
UNIFORM_EVERY = 5


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to: a row of a table.

    Attributes:
      arm: The optimizer.
      settings: Peak learning rates, and the weight decay if not the workload's.
      seed: Of the initial weights and the order of the data.
      loss: The last validation loss, in nats, at most that of a uniform guess.
      diverged: Whether it was above that, or not finite.
      growth: Geometric mean over the leaves of matrices of ‖W‖/‖W₀‖ at the end.
      spread: Standard deviation of log r̂ over the matrices, mean over the steps; NaN
        without ratios.
      at_bound: Share of matrices at a bound, mean over the steps; NaN without ratios.
      losses: All validation losses: after every interval, and at the end.
      uniform: Geometric mean of all r̂ after the first step and every fifth one since.
      class_ratio: Geometric mean of r̂ of each class of layers, at the end.
    """

    arm: str
    settings: Settings
    seed: int
    loss: float
    diverged: bool
    growth: float
    spread: float
    at_bound: float
    losses: tuple[float, ...]
    uniform: tuple[float, ...]
    class_ratio: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains runs of one workload and optimizer; their step is compiled once.

    Attributes:
      workload: What is trained.
      arm: The optimizer's name.
    """

    workload: Workload
    arm: str

    def train(self, settings: Settings, seed: int) -> Result:
        """Trains to the end."""
        recipe = self.setup.recipe
        losses, norms, readings = [], [], []
        for step, state, reading in self.states(settings, seed):
            if step in (0, recipe.num_steps):
                norms.append(list(map(np.linalg.norm, self._matrices(state["params"]))))
            if step:
                readings.append(reading)
                if step % recipe.validation_every == 0 or step == recipe.num_steps:
                    losses.append(self._evaluate(state)["loss"])
        seen = jax.device_get(readings)
        ratios = [reading["uniform"] for reading in seen if reading]
        by_class = seen[-1].get("class_ratio", {})
        sizes: Any = self.workload.config.model
        guess = np.log(sizes.classes if hasattr(sizes, "classes") else sizes.vocab_size)
        diverged = not losses[-1] <= guess
        return Result(
            self.arm,
            settings,
            seed,
            loss=round(float(guess if diverged else losses[-1]), 5),
            diverged=diverged,
            growth=_digits(np.exp(np.mean(np.log(np.divide(norms[1], norms[0]))))),
            spread=_digits(np.mean([x.get("spread", np.nan) for x in seen])),
            at_bound=_digits(np.mean([x.get("at_bound", np.nan) for x in seen])),
            losses=tuple(map(_digits, losses)),
            uniform=tuple(map(_digits, ratios[::UNIFORM_EVERY])),
            class_ratio={name: _digits(ratio) for name, ratio in by_class.items()},
        )

    def states(
        self, settings: Settings, seed: int
    ) -> Iterator[tuple[int, State, dict[str, Any]]]:
        """The state before the first step and after each one; the next one takes it."""
        arguments = [jnp.float32(x) for x in settings if x is not None]
        with in_effect(self.setup.mesh):
            state = self.initial_state(seed)
            yield 0, state, {}
            for step, batch in enumerate(self._batches(seed), 1):
                state, reading = self._step(state, batch, *arguments)
                yield step, state, reading

    def initial_state(self, seed: int) -> State:
        """The state before the first step, its matrices at the workload's scale."""
        return self._initial_state(jax.random.key(seed))

    @functools.cached_property
    def setup(self) -> Setup:
        """The model, on one device."""
        config = self.workload.config
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        return set_up(make_task(config), config.recipe_of(self.arm), mesh)

    def _batches(self, seed: int) -> Iterator[PyTree]:
        data, recipe = _data(self.workload.config, seed).train, self.setup.recipe
        first = 0
        if self.workload.first_batch is not None:
            first = 1
            yield Batches(data, self.workload.first_batch, self.setup.mesh)[0]
        batches = Batches(data, recipe.batch_size, self.setup.mesh)
        yield from batches.read_ahead(first, recipe.num_steps)

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
        data = _data(self.workload.config, 0)
        return evaluation(self.setup, data, self.setup.recipe.batch_size)

    def _matrices(self, params: PyTree) -> list[jax.Array]:
        numbers = self.setup.weight_dimension_numbers(params)
        found = jax.tree.map(
            lambda p, n: None if n is None else p,
            *(params, numbers),
            is_leaf=lambda x: x is None,
        )
        return jax.tree.leaves(found)

    @functools.cached_property
    def _step(self) -> Callable[..., tuple[State, dict[str, Any]]]:
        """A step, compiled: of state, batch, both rates, and the decay if it is given."""
        setup, optimizer = self.setup, find_optimizer(self.arm)
        shape = learning_rates(dataclasses.replace(setup.recipe, learning_rate=1.0))

        def step(
            state: State,
            batch: PyTree,
            rate: jax.Array,
            adam_rate: jax.Array,
            decay: jax.Array | None = None,
        ) -> tuple[State, dict[str, Any]]:
            arguments = optimizer_arguments(setup.recipe)
            if decay is not None:
                arguments["weight_decay"] = decay
            if optimizer.has_matrices:
                arguments["weight_dimension_numbers"] = setup.weight_dimension_numbers
                arguments["adam_learning_rate"] = lambda count: adam_rate * shape(count)
            transformation = optimizer.constructor(
                lambda count: rate * shape(count), **arguments
            )
            if setup.recipe.clip is not None:
                clip = optax.clip_by_global_norm(setup.recipe.clip)
                transformation = optax.chain(clip, transformation)
            setup_now = dataclasses.replace(setup, optimizer=transformation)
            state, _ = make_train_step(setup_now, 1)(state, batch)
            return state, _reading(state, setup)

        return jax.jit(step, donate_argnums=0)


def _reading(state: State, setup: Setup) -> dict[str, Any]:
    """What the optimizer did, where it has ratios."""
    opt_state, params = state["opt_state"], state["params"]
    if not optax.tree.get_all_with_path(opt_state, "CalibratedTrustRatioState"):
        return {}
    numbers = setup.weight_dimension_numbers
    reading = diagnostics.read(opt_state, params, weight_dimension_numbers=numbers)
    classes = diagnostics.layer_classes(params)
    found = diagnostics.summarize(reading, classes, prefix="")
    end = "/trust_ratio/uniform"
    return {
        "uniform": found["trust_ratio/uniform"],
        "spread": found["trust_ratio/spread"],
        "at_bound": found["share_at_r_min"] + found["share_at_r_max"],
        "class_ratio": {
            name.removesuffix(end).replace("_", " "): ratio
            for name, ratio in found.items()
            if name.endswith(end)
        },
    }


@functools.lru_cache(maxsize=8)
def _data(config: Any, seed: int) -> Data:
    recipe = dataclasses.replace(config.recipe, seed=seed)
    return read_data(dataclasses.replace(config, recipe=recipe))


def _digits(value: Any) -> float:
    return float(f"{value:.5g}")
