"""One run: the validation losses of a workload with a factory, two rates and a seed."""

import dataclasses
import functools
import itertools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.pretrain.loading import process_batches
from examples.pretrain.setup import split
from examples.pretrain.task import Data
from examples.pretrain.tasks import make_task, read_data
from examples.track0.factories import Factory, build
from examples.track0.workloads import Workload

PyTree = Any
POINTS = 12  # At which a run is validated; the last one is its end.


class Rates(NamedTuple):
    """Peak learning rates of the matrices and of all other parameters."""

    matrices: float
    others: float


class Run(NamedTuple):
    """Validation losses, in nats, after each twelfth of the steps; CPU seconds a step.

    A loss is at most that of a uniform guess, also where training diverged.
    """

    losses: tuple[float, ...]
    seconds: float

    @property
    def loss(self) -> float:
        """The loss at the end of the run."""
        return self.losses[-1]


def uniform_guess(workload: Workload) -> float:
    """The loss of equal probabilities, in nats: that of a run that diverged."""
    sizes: Any = workload.config.model
    return round(math.log(getattr(sizes, "classes", None) or sizes.vocab_size), 5)


class Program:
    """A workload with a factory, compiled once for all rates and seeds."""

    def __init__(self, workload: Workload, factory: Factory):
        self.workload, self.factory = workload, factory
        self.recipe = workload.config.recipe
        self.task = make_task(workload.config)
        model = nnx.eval_shape(lambda: self.task.create(nnx.Rngs(0)))
        self.graphdef = nnx.graphdef(model)
        self.numbers = self.task.weight_dimension_numbers(model)
        self.bytes_of_state = self._bytes_of_state()
        # All seeds are validated on the same examples.
        held = process_batches(self._data(0).validation, self.recipe.batch_size)
        self.validation = [held[i] for i in range(len(held))]
        self._start = jax.jit(self._initial_state)
        self._advance = jax.jit(self._scan, donate_argnums=1)
        self._step = jax.jit(self._train_step, donate_argnums=1)
        self._evaluate = jax.jit(self._validation_loss)

    def run(self, rates: Rates, seed: int) -> Run:
        """Trains from the initial weights of a seed, on the batches of this seed."""
        peaks = jnp.asarray(rates)
        state = self._start(peaks, jax.random.key(seed))
        examples = process_batches(self._data(seed).train, self.recipe.batch_size)
        length = self.recipe.steps // POINTS
        ends = [*range(length, POINTS * length, length), self.recipe.steps]
        losses, seconds = [], []
        for first, end in itertools.pairwise([0, *ends]):
            batches = [examples[i] for i in range(first, end)]
            began = time.process_time()
            if self.workload.scanned:
                stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
                state = self._advance(peaks, state, stacked)
            else:
                for batch in batches:
                    state, _ = self._step(peaks, state, batch)
            jax.block_until_ready(state)
            seconds.append((time.process_time() - began) / len(batches))
            found = [float(self._evaluate(state, batch)) for batch in self.validation]
            losses.append(float(np.mean(found)))
        guess = uniform_guess(self.workload)
        # A comparison with NaN is false.
        capped = (round(x, 5) if x <= guess else guess for x in losses)
        return Run(tuple(capped), min(seconds))

    def _data(self, seed: int) -> Data:
        recipe = dataclasses.replace(self.recipe, seed=seed)
        return read_data(dataclasses.replace(self.workload.config, recipe=recipe))

    def _optimizer(self, peaks: jax.Array) -> optax.GradientTransformation:
        warmup = self.recipe.warmup_steps
        shape = optax.warmup_cosine_decay_schedule(
            1 / warmup, 1.0, warmup, self.recipe.steps, 0.0
        )

        def times(peak: jax.Array) -> optax.Schedule:
            return lambda step: peak * shape(step)

        return build(self.factory, times(peaks[0]), times(peaks[1]), self.numbers)

    def _initial_state(self, peaks: jax.Array, key: jax.Array) -> PyTree:
        params, variables = split(self.task.create(nnx.Rngs(key)))
        params = jax.tree.map(
            lambda p, n: p if n is None else p * self.workload.initial_scale,
            *(params, self.numbers(params)),
            is_leaf=lambda x: x is None,
        )
        return params, variables, self._optimizer(peaks).init(params)

    def _train_step(self, peaks: jax.Array, state: PyTree, batch: PyTree) -> PyTree:
        params, variables, opt_state = state

        def loss_of(params: PyTree) -> Any:
            model = nnx.merge(self.graphdef, params, variables)
            loss, metrics = self.task.loss(model, batch)
            return loss, (split(model)[1], metrics)

        grads, (variables, metrics) = jax.grad(loss_of, has_aux=True)(params)
        optimizer = self._optimizer(peaks)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        variables = self.task.after_step(variables, metrics)
        return (params, variables, opt_state), None

    def _scan(self, peaks: jax.Array, state: PyTree, batches: PyTree) -> PyTree:
        return jax.lax.scan(functools.partial(self._train_step, peaks), state, batches)[0]

    def _validation_loss(self, state: PyTree, batch: PyTree) -> jax.Array:
        params, variables, _ = state
        model = nnx.merge(self.graphdef, params, variables)
        return self.task.evaluate(model, batch)["loss"]

    def _bytes_of_state(self) -> int:
        key = jax.eval_shape(lambda: jax.random.key(0))
        _, _, opt_state = jax.eval_shape(self._initial_state, jnp.zeros(2), key)
        leaves = jax.tree.leaves(opt_state)
        return sum(x.size * x.dtype.itemsize for x in leaves)
