"""The shardings of matrices, given those of the leaves that hold them."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.sharding import typed_sharding


@functools.lru_cache(maxsize=4096)
def matrix_specs(
    axes: LeafAxes, shape: tuple[int, ...], spec: PartitionSpec, mesh: AbstractMesh
) -> tuple[PartitionSpec, ...]:
    """The specs of the matrices ``(*batch, m, n)`` of a leaf, one for each part."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return tuple(typed_sharding.inferred(axes.matrices, leaf, mesh))
