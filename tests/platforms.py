"""On CPU, as on another platform."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from orscale_jax.distributed.engine import PolarOptions, polar_factors
from orscale_jax.newton_schulz.iteration import NewtonSchulz
from orscale_jax.newton_schulz.platforms import DEFAULTS, PLATFORMS, Limits
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.transforms.matrices import on_matrices
from orscale_jax.transforms.orthogonalize import orthogonalize_stage


def on_a_gpu(x, dtype, preset="polar_express", steps=5, preconditioning="frobenius"):
    """The polar factors that a program for GPUs computes, in float64."""
    settings = NewtonSchulz.of(steps, preset, dtype, preconditioning)
    options = PolarOptions(settings, platforms={**PLATFORMS, "cpu": PLATFORMS["gpu"]})
    [q] = polar_factors([jnp.asarray(x, jnp.float32)], [P(None, None)], None, options)
    return np.asarray(q, np.float64)


def orthogonalize_as(platform, numbers=None, limits: Limits | None = None):
    """The orthogonalize stage in float32, which is fast on CPUs."""
    row = dataclasses.replace(
        platform, dtype=np.dtype(np.float32), limits=limits or platform.limits
    )
    options = PolarOptions(DEFAULTS, platforms={**PLATFORMS, "cpu": row})
    stage = functools.partial(orthogonalize_stage, options, ParamSpecs(None))
    return on_matrices(numbers, stage)
