"""Stacks of small arrays, so that XLA computes many of them in one GPU kernel.

XLA merges kernels that read a common array. Otherwise each leaf would have its own kernel
for a small result such as its ratio, and a kernel takes longer to launch than to run.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from orscale_jax.distributed.lowering import GPUS
from orscale_jax.sharding import meshes

# The most entries of an array that is copied rather than given a kernel.
_SMALL = 2**14
# XLA concatenates up to 128 arrays in one kernel. It merges kernels that read different
# slices of an array only if the array has less than 1 KiB, 128 numbers of 8 bytes.
_ARRAYS = 126


def slices_of_stacks(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays; on GPUs small ones of one shape are slices of a common array.

    Large arrays, and arrays on a mesh, are left alone.
    """
    if len(xs) < 2 or meshes.mesh_of(xs, None) is not None:
        return list(xs)
    on_gpus: dict[str, Any] = dict.fromkeys(GPUS, _slices_of_stacks)
    return jax.lax.platform_dependent(list(xs), **on_gpus, default=list)


def _slices_of_stacks(xs: Sequence[jax.Array]) -> list[jax.Array]:
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        if x.size <= _SMALL:
            alike.setdefault((x.shape, x.dtype), []).append(i)
    results = dict(enumerate(xs))
    for members in alike.values():
        for start in range(0, len(members), _ARRAYS):
            some = members[start : start + _ARRAYS]
            if len(some) == 1:
                continue
            # The first one twice, so that the stack is not read whole: XLA would compute
            # everything at once, and cut the result into slices with a kernel for each.
            stack = jnp.stack([xs[i] for i in (*some, some[0])])
            stack = jax.lax.optimization_barrier(stack)
            results.update(zip(some, stack, strict=False))
    return [results[i] for i in range(len(xs))]
