"""The stages of OrScale's relatives: NorMuon, Muon+, Aurora, Hyperball, cautious decay.

``orscale_jax/family.py`` says what each computes and where it stands in the chain.
"""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, Stage, broadcast, compute_dtype
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_params
from orscale_jax.trees.names import quoted

FULL_RANK, KEPT = NORMS = ("full_rank", "kept")
NEURONS, INPUTS = VECTORS = ("neurons", "inputs")


class NeuronRMSState(NamedTuple):
    """State of NorMuon's stage."""

    #: Tree like the parameters. A leaf of matrices has an entry per output neuron of each
    #: matrix: the parameter's shape without its reduction axes (with an entry per block,
    #: if blocks divide one of them), dtype float32 (float64 for float64 parameters).
    neuron_mean_square: PyTree


class InitialNormState(NamedTuple):
    """State of Hyperball's stage."""

    #: Tree like the parameters. A leaf of matrices has their norms R, in an array of
    #: the batch shape (``()`` for a plain matrix), dtype float32 (float64 for float64
    #: parameters).
    initial_norm: PyTree
    #: The state of the learning rate.
    inner_state: optax.OptState


def neuron_rms_stage(
    b2: ArrayLike, eps: ArrayLike, norm: str, matrices: Matrices
) -> optax.GradientTransformation:
    """Q to NorMuon's Q̂, of the norm of a Q of full rank or of Q itself."""
    _checks.number("b2", b2, at_least=0, below=1)
    _checks.number("eps", eps, at_least=0)
    _checks.choice("norm", norm, NORMS)

    def mean(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
        return jnp.sum(x, axis=axis) / max(1, math.prod(x.shape[i] for i in axis))

    def step(axes: MatrixAxes, q: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        now, entries = axes.neurons.reduce(mean, jnp.square(q)), axes.of_neurons
        v = typed_sharding.shard_like(v, now)
        decay = jnp.asarray(b2, v.dtype)
        v = decay * v + (1 - decay) * now
        # No division by zero where both a neuron and eps are zero.
        root = jnp.sqrt(jnp.where(v == 0, 1, v))
        inverse = 1 / (root + jnp.asarray(eps, v.dtype))
        # ‖Q̂‖² / m and ρ² / m, without reading the matrix again for its norm.
        found = entries.reduce(jnp.sum, now * inverse * inverse)
        if norm == KEPT:
            wanted = entries.reduce(jnp.sum, now)
        else:
            full_rank = axes.batch_by_shape(lambda m, n: min(m, n) / max(m, 1), q)
            wanted = jnp.asarray(full_rank, v.dtype)
        factor = jnp.sqrt(wanted / jnp.where(found == 0, 1, found))
        per_neuron = broadcast(entries, factor, inverse) * inverse
        return broadcast(axes.neurons, per_neuron, q) * q, v

    def init(params: PyTree) -> NeuronRMSState:
        neurons = tuple(axes and axes.neurons for axes in matrices.axes)
        each = dataclasses.replace(matrices, axes=neurons)
        return NeuronRMSState(each.full(params, 0.0, compute_dtype))

    def update(
        updates: PyTree, state: NeuronRMSState, params: PyTree | None = None
    ) -> tuple[PyTree, NeuronRMSState]:
        rows = matrices.rows(updates, state.neuron_mean_square)
        stepped = [step(*row) for row in rows]
        q_hat, v = (matrices.tree_of([leaf[i] for leaf in stepped]) for i in (0, 1))
        return q_hat, NeuronRMSState(v)

    return optax.GradientTransformation(init, update)


def normalize_stage(
    order: Sequence[str], eps: ArrayLike, matrices: Matrices
) -> optax.GradientTransformation:
    """Q to that of Muon+: vectors of each kind in turn, over their norms."""
    order = (order,) if isinstance(order, str) else order
    if not isinstance(order, tuple | list) or not order:
        _checks.refuse("order", order, "pass 'neurons' or 'inputs' or a list of them")
    for vectors in order:
        _checks.choice("order", vectors, VECTORS)
    _checks.number("eps", eps, at_least=0)

    def normalize(axes: MatrixAxes, x: jax.Array) -> jax.Array:
        for vectors in order:
            each = axes.neurons if vectors == NEURONS else axes.inputs
            square = each.reduce(jnp.sum, jnp.square(x)) + jnp.asarray(eps, x.dtype)
            inverse = jax.lax.rsqrt(jnp.where(square == 0, 1, square))
            x = broadcast(each, inverse, x) * x
        return x

    return optax.stateless(lambda updates, _: matrices.map(normalize, updates))


def balanced_polar_stage(
    polar: Stage, pp_iterations: int | jax.Array, pp_beta: ArrayLike, matrices: Matrices
) -> optax.GradientTransformation:
    """M̃ to the Q of Aurora, by ``polar``, through which a square matrix goes once."""
    _checks.count("pp_iterations", pp_iterations)
    _checks.number("pp_beta", pp_beta, at_least=0)
    last = polar(matrices)

    def divide(
        axes: MatrixAxes, x: jax.Array, by: jax.Array, exponent: ArrayLike = pp_beta
    ) -> jax.Array:
        """Vectors of x's longer side, over powers of the squared norms of others."""
        # Of (m, n), n is the longer side where m < n.
        for vectors, longer in ((axes.neurons, operator.lt), (axes.inputs, operator.gt)):
            chosen = axes.by_shape(longer, x)
            if np.any(chosen):
                square = vectors.reduce(jnp.sum, jnp.square(by))
                power = jnp.where(square == 0, 1, square) ** jnp.asarray(
                    exponent, x.dtype
                )
                x = x / jnp.where(chosen, broadcast(vectors, power, x), 1)
        return x

    def normalize(axes: MatrixAxes, x: jax.Array) -> jax.Array:
        """Vectors of the longer side, over their norms, whose squares may overflow."""
        largest = axes.reduce(largest_magnitude, x)
        x = x / broadcast(axes, jnp.where(largest == 0, 1, largest), x)
        return divide(axes, x, x, exponent=0.5)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        # Leaves that hold any matrix that is not square.
        found = matrices.map(lambda a, x: np.any(a.by_shape(operator.ne, x)), updates)
        chosen = iter(matrices.leaves(found))
        axes = tuple(axes if axes and next(chosen) else None for axes in matrices.axes)
        rectangular = dataclasses.replace(matrices, axes=axes)
        again = polar(rectangular)

        def balance(_: ArrayLike, x: PyTree) -> PyTree:
            q, _ = again.update(x, state, params)
            return rectangular.map(divide, x, q)

        x = rectangular.map(normalize, updates)
        if _checks.is_whole(pp_iterations):
            for i in range(1, int(pp_iterations)):
                x = balance(i, x)
        else:
            x = jax.lax.fori_loop(1, pp_iterations, balance, x)
        return last.update(x, state, params)

    return optax.GradientTransformation(last.init, update)


def initial_norm_stage(
    learning_rate: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """Q to Hyperball's step, from W to R normalize(W − ηR normalize(Q))."""
    learning_rate = optax.with_extra_args_support(learning_rate)

    def init(params: PyTree) -> InitialNormState:
        bare = unbox(params)
        for path, leaf in jax.tree.leaves_with_path(bare):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"parameter {quoted(path)} is abstract, and has no norm to keep: "
                    "call jax.eval_shape(optimizer.init, params)."
                )
        initial = matrices.entries(
            params, lambda axes, leaf: axes.norms(leaf.astype(compute_dtype(leaf)))
        )
        # Not strict: optax.tree.map_params passes a placeholder without leaves.
        found = jax.tree.leaves_with_path(unbox(initial))
        for (path, norm), leaf in zip(found, jax.tree.leaves(bare), strict=False):
            known = not isinstance(norm, jax.core.Tracer)
            if jnp.size(leaf) and known and bool((norm == 0).any()):
                raise ValueError(
                    f"parameter {quoted(path)} has a matrix that is zero, which cannot "
                    "keep its norm and move: initialize it with other values, or put "
                    "None in its place in weight_dimension_numbers for AdamW."
                )
        return InitialNormState(initial, learning_rate.init(params))

    def to_norm(axes: MatrixAxes, leaf: jax.Array, norm: jax.Array) -> jax.Array:
        found = axes.norms(leaf)
        norm = typed_sharding.shard_like(norm, found)
        # A zero norm was not refused where ``init`` was compiled: here it shows as NaN.
        factor = jnp.where(norm == 0, jnp.nan, norm) / jnp.where(found == 0, 1, found)
        return broadcast(axes, factor, leaf) * leaf

    def change(
        axes: MatrixAxes, by: jax.Array, w: jax.Array, norm: jax.Array
    ) -> jax.Array:
        still = axes.reduce(largest_magnitude, by) == 0
        found = axes.norms(w + by)
        norm = typed_sharding.shard_like(norm, found)
        # A step to zero leaves no direction: the matrix stays where it is.
        moved = jnp.where(still | (found == 0), norm, found)
        # Not R (W + step) / ‖W + step‖ − W, which would round off the step's digits.
        factor = jnp.where(found == 0, 0, norm / moved)
        shrinkage = (norm - moved) / moved
        return broadcast(axes, factor, by) * by + broadcast(axes, shrinkage, w) * w

    def update(
        updates: PyTree,
        state: InitialNormState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, InitialNormState]:
        require_params(params)
        on_sphere = matrices.map(to_norm, updates, state.initial_norm)
        steps, inner_state = learning_rate.update(
            on_sphere, state.inner_state, params, **extra_args
        )
        changes = matrices.map(change, steps, params, state.initial_norm)
        return changes, InitialNormState(state.initial_norm, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def cautious_stage(decay: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply ``decay``, but not where its sign is opposite to the update's."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        zeros = jax.tree.map(jnp.zeros_like, updates)
        decayed, state = decay.update(zeros, state, params)
        # Signs, since the product of two numbers may underflow or overflow.
        signs = jax.tree.map(lambda u, d: jnp.sign(u) * jnp.sign(d), updates, decayed)
        added = jax.tree.map(
            lambda u, d, sign: jnp.where(sign >= 0, u + d, u), updates, decayed, signs
        )
        return added, state

    return optax.GradientTransformation(decay.init, update)
