"""The orthogonalize stage on CPU, as on another platform."""

import dataclasses
import functools

import numpy as np

from orscale_jax.distributed.engine import PolarOptions
from orscale_jax.distributed.platforms import DEFAULTS, PLATFORMS, Limits
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.transforms.matrices import on_matrices
from orscale_jax.transforms.orthogonalize import orthogonalize_stage


def orthogonalize_as(platform, numbers=None, limits: Limits | None = None):
    """Build the stage in float32, which is fast on CPUs, perhaps with other limits."""
    row = dataclasses.replace(
        platform, dtype=np.dtype(np.float32), limits=limits or platform.limits
    )
    options = PolarOptions(DEFAULTS, platforms={**PLATFORMS, "cpu": row})
    stage = functools.partial(orthogonalize_stage, options, ParamSpecs(None))
    return on_matrices(numbers, stage)
