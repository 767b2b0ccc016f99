"""The memory and the traffic of an optimizer on a pod, before anything runs.

Neither the pod nor an array of the model is needed: an `AbstractMesh` has the shape of a
mesh and no devices, and a `ShapeDtypeStruct` the shape of an array and no numbers.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from orscale_jax import BlockDimensionNumbers, by_path, describe, orscale, state_shardings

PyTree = Any
WIDTH, LAYERS, VOCABULARY = 4096, 32, 50_304
AXES = ("data", "fsdp", "tensor")
MESHES = (1, 64, 1), (8, 8, 1), (1, 8, 8)

# Layers are stacked: axis 0 counts matrices. Query, key and value are one array.
NUMBERS = by_path(
    {
        r"out|up|down": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
        r"qkv": BlockDimensionNumbers(1, 2, block_axis=2, blocks=3),
        r"norm": "adamw",
    }
)


class Estimate(NamedTuple):
    """The memory and traffic of one device, in bytes."""

    weights: int
    state: int
    sent: int


def model(mesh: AbstractMesh) -> PyTree:
    """A decoder of 6.6 billion parameters, sharded over the mesh."""

    def array(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    inward, outward = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
    return {
        "embed": array(VOCABULARY, WIDTH, spec=P("tensor", "fsdp")),
        "blocks": {
            "qkv": array(LAYERS, WIDTH, 3 * WIDTH, spec=inward),
            "out": array(LAYERS, WIDTH, WIDTH, spec=outward),
            "up": array(LAYERS, WIDTH, 4 * WIDTH, spec=inward),
            "down": array(LAYERS, 4 * WIDTH, WIDTH, spec=outward),
            "norm": array(LAYERS, WIDTH, spec=P()),
        },
    }


def bytes_on_a_device(arrays: PyTree, shardings: PyTree) -> int:
    def of_one(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(of_one, arrays, shardings)))


def estimate(
    optimizer: optax.GradientTransformationExtraArgs,
    lengths: tuple[int, ...],
    platform: str = "tpu",
) -> Estimate:
    """What a device of a mesh with axes of these lengths holds, and sends in a step."""
    mesh = AbstractMesh(lengths, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    params = model(mesh)
    state = jax.eval_shape(optimizer.init, params)
    plan = describe(params, NUMBERS, optimizer=optimizer, platform=platform).placement()
    return Estimate(
        weights=bytes_on_a_device(params, jax.tree.map(lambda x: x.sharding, params)),
        state=bytes_on_a_device(state, state_shardings(optimizer, params)),
        sent=sum(bucket.bytes_sent for bucket in plan),
    )


def main() -> dict[tuple[int, ...], Estimate]:
    """The estimates by mesh."""
    optimizer = orscale(1e-3, weight_dimension_numbers=NUMBERS)
    return {lengths: estimate(optimizer, lengths) for lengths in MESHES}


if __name__ == "__main__":
    print(f"{'MB on a device':<27} weights  state  sent in a step")
    for lengths, of_device in main().items():
        mesh = " × ".join(f"{n} {axis}" for n, axis in zip(lengths, AXES, strict=True))
        weights, state, sent = (f"{n / 1e6:,.0f}" for n in of_device)
        print(f"{mesh:<27} {weights:>7} {state:>6} {sent:>15}")
