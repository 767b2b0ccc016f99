"""Is the gain that diagnostics measure what a line search finds? On the demo's model.

    python -m examples.line_search

Trains the demo's OrScale arm, stops at some steps, and compares κ of ``step_gain`` and
κ_eff of the paper's model with the decreases of the loss that a search over learning
rates finds along r̂sQ and along Muon's sQ, on batches that nothing else has seen.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from examples.pretrain.config import Config
from examples.pretrain.configs import DEMOS
from examples.pretrain.kinds import make_task, read_data
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.setup import learning_rates, split
from examples.study.theory import curvature, estimate, gain
from orscale_jax import diagnostics, orthogonalize, scale_by_shape

PyTree = Any
Batch = Any
LossFn = Callable[[PyTree, Batch], jax.Array]
# Of parameters, the optimizer's state and a batch; gives the first two and the loss.
Step = Callable[[PyTree, PyTree, Batch], tuple[PyTree, PyTree, jax.Array]]
DEMO = DEMOS["demo"]
# With a longer context than there.
CONFIG = dataclasses.replace(DEMO, recipe=dataclasses.replace(DEMO.recipe, seq_len=128))


@dataclasses.dataclass(frozen=True)
class Options:
    """When to look, and on how much."""

    steps: tuple[int, ...] = (100, 300)
    micro_batches: int = 16
    """Batches for the measurements."""
    held_out: int = 32
    """Other batches, on which the losses are compared."""


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


def largest_decrease(
    losses_at: Any, params: PyTree, step: PyTree, rates: np.ndarray
) -> float:
    """The decrease of the loss at the vertex of a parabola through the lowest losses."""
    losses = np.array([float(losses_at(params, step, rate)) for rate in rates])
    lowest = int(np.clip(losses.argmin(), 2, len(rates) - 3))
    near = slice(lowest - 2, lowest + 3)
    parabola = np.polynomial.Polynomial.fit(rates[near], losses[near], 2)
    return float(losses[0] - parabola(parabola.deriv().roots()[0]))


def muon_step(gradient: PyTree, trust_ratio: PyTree) -> PyTree:
    """The matrices' sQ, and zeros for all other parameters."""

    def only_matrices(ratio: Any, g: jax.Array) -> Any:
        return ratio if isinstance(ratio, optax.MaskedNode) else g

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    masked = jax.tree.map(only_matrices, trust_ratio, gradient, is_leaf=is_masked)
    stages = optax.chain(orthogonalize(ns_steps=8), scale_by_shape())
    moved, _ = stages.update(masked, stages.init(masked), masked)
    return jax.tree.map(
        lambda step, g: jnp.zeros_like(g) if is_masked(step) else step,
        moved,
        gradient,
        is_leaf=is_masked,
    )


def look(
    loss_fn: Any,
    params: PyTree,
    opt_state: PyTree,
    batches: Sequence[np.ndarray],
    options: Options,
) -> str:
    """One line of the table."""
    reading = diagnostics.read(opt_state, params)
    measured = [batches[i] for i in range(options.micro_batches)]
    unseen = [batches[options.micro_batches + i] for i in range(options.held_out)]
    gained = diagnostics.step_gain(loss_fn, params, measured, reading)
    model = _kappa_of_model(estimate(loss_fn, params, measured), params, reading)
    muon = muon_step(_mean_gradient(loss_fn, params, measured), reading.trust_ratio)
    ours = _scaled(muon, reading.trust_ratio)
    losses_at = _losses_along(loss_fn, unseen)
    rates = np.linspace(0, 2 * float(gained.muon_learning_rate.value), 9)
    pairs = _share_of_pairs(loss_fn, params, measured, muon)
    decreases = [largest_decrease(losses_at, params, s, rates) for s in (ours, muon)]
    return (
        f"κ by line search {decreases[0] / decreases[1]:.3f}; "
        f"step_gain {gained.kappa.value:.3f} ± {gained.kappa.stderr:.3f}; "
        f"κ_eff of the model {model:.3f}; "
        f"curvature of Muon's step {pairs:.1f} × that of its matrices alone"
    )


def _kappa_of_model(found: Any, params: PyTree, reading: diagnostics.Reading) -> float:
    """Φ(r̂s)/Φ(s): steps have Moonlight's scale s."""
    masked = jax.tree.map(
        lambda ratio, p: ratio if _is_masked(ratio) else 0.2 * max(p.shape) ** 0.5,
        *(reading.trust_ratio, params),
        is_leaf=_is_masked,
    )
    scaled = jax.tree.map(jnp.multiply, masked, reading.trust_ratio)
    a, b = found.signal.value, curvature(found.smoothness.value, params)
    return float(gain(scaled, a, b).phi / gain(masked, a, b).phi)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _mean_gradient(loss_fn: Any, params: PyTree, batches: Sequence[Any]) -> PyTree:
    """The mean up to a factor, which Newton–Schulz does not see."""
    gradient_of = jax.jit(jax.grad(loss_fn))
    return jax.tree.map(lambda *gs: sum(gs), *[gradient_of(params, b) for b in batches])


def _scaled(step: PyTree, trust_ratio: PyTree) -> PyTree:
    """The step with every matrix times its ratio."""
    return jax.tree.map(
        lambda r, d: d if isinstance(r, optax.MaskedNode) else r * d,
        trust_ratio,
        step,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def _losses_along(loss_fn: Any, batches: Sequence[Any]) -> Any:
    """The mean loss on the batches, of parameters, a step and a learning rate."""
    loss_of = jax.jit(
        lambda params, step, rate, batch: loss_fn(
            jax.tree.map(lambda p, d: p - rate * d, params, step), batch
        )
    )

    def losses_at(params: PyTree, step: PyTree, rate: float) -> np.floating[Any]:
        return np.mean([loss_of(params, step, rate, batch) for batch in batches])

    return losses_at


def _share_of_pairs(
    loss_fn: Any, params: PyTree, batches: list[np.ndarray], step: PyTree
) -> float:
    """⟨Δ, HΔ⟩ over the sum of what each matrix has while the others stand still."""
    curvatures = []
    for cross_terms in (True, False):
        found = estimate(
            loss_fn,
            params,
            batches,
            directions=step,
            exact=False,
            cross_terms=cross_terms,
        )
        of_matrices = jax.tree.map(
            lambda smoothness, d: (
                smoothness * jnp.sum(d**2)
                if not isinstance(smoothness, optax.MaskedNode)
                else 0.0
            ),
            found.smoothness.value,
            step,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
        curvatures.append(float(sum(jax.tree.leaves(of_matrices))))
    return curvatures[0] / curvatures[1]


def main(options: Options) -> None:
    loss_fn, params, batches, numbers = experiment(CONFIG)
    recipe = CONFIG.recipe_of("orscale")
    optimizer = make_optimizer(
        recipe, learning_rates(recipe), weight_dimension_numbers=numbers
    )
    opt_state = optimizer.init(params)
    step = make_step(loss_fn, optimizer)
    held_out = options.micro_batches + options.held_out
    unseen = [batches[recipe.num_steps + i] for i in range(held_out)]
    for index in range(max(options.steps)):
        params, opt_state, _ = step(params, opt_state, batches[index])
        if index + 1 in options.steps:
            found = look(loss_fn, params, opt_state, unseen, options)
            print(f"step {index + 1}: {found}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
