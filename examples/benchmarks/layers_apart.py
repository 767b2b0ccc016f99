"""Muon on stacked layers that an all-to-all takes apart.

MaxText's fork of Optax's Muon does so by default: an array of layers whose matrices are
sharded is resharded over its layers, in the momentum's dtype, padded to a multiple of the
devices. Each device then iterates on whole matrices, and a second all-to-all returns the
factors. An array of one matrix stays as it is, and the partitioner divides its products.
This is the pattern, for comparison; none of it is theirs.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def muon_of_layers(
    learning_rate: float, steps: int, specs: Mapping[str, P]
) -> optax.GradientTransformation:
    """Muon for arrays ``(*layers, m, n)`` on Auto axes of the context's mesh.

    Args:
      learning_rate: η.
      steps: The number of Newton–Schulz steps.
      specs: How each array is sharded.
    """

    def orthogonalize(updates: dict[str, jax.Array], _: object) -> dict[str, jax.Array]:
        return {name: layers_apart(x, specs[name], steps) for name, x in updates.items()}

    return optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(orthogonalize),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )


def layers_apart(x: jax.Array, spec: P, steps: int) -> jax.Array:
    """The polar factors of an array, sharded as it is."""
    *batch, rows, columns = [*spec] + [None] * (x.ndim - len(spec))
    axes = tuple(jax.tree.leaves((rows, columns)))
    if not axes or batch != [None]:
        return with_sharding_constraint(newton_schulz(x, steps), spec)
    devices = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)
    padded = jnp.pad(x, [(0, -len(x) % devices), (0, 0), (0, 0)])
    whole = with_sharding_constraint(padded, P(axes))
    factors = with_sharding_constraint(newton_schulz(whole, steps), P(axes))
    return with_sharding_constraint(factors, spec)[: len(x)]


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Polar factors of matrices along the last two axes, zeros for zeros."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, steps).mT
    a, b, c = COEFFICIENTS
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.DEFAULT)

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = multiply(x, x.mT)
        return a * x + multiply(b * gram + c * multiply(gram, gram), x)

    return jax.lax.fori_loop(0, steps, step, x, unroll=True)
