"""On CPU, as on another platform."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax.newton_schulz.platforms import DEFAULTS, PLATFORMS, Limits, NewtonSchulz
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.transforms.matrices import on_matrices
from orscale_jax.transforms.orthogonalize import PolarOptions, orthogonalize_stage


def on_a_gpu(x, dtype, preset="polar_express", steps=5, preconditioning="frobenius"):
    """The polar factors that a program for GPUs computes, in float64."""
    settings = NewtonSchulz.of(steps, preset, dtype, preconditioning)
    stage = _stage(PLATFORMS["gpu"], settings, MuonDimensionNumbers(-2, -1))
    q, _ = stage.update(jnp.asarray(x, jnp.float32), optax.EmptyState())
    return np.asarray(q, np.float64)


def orthogonalize_as(platform, numbers=None, limits: Limits | None = None):
    """The orthogonalize stage in float32, which is fast on CPUs."""
    row = dataclasses.replace(
        platform, dtype=np.dtype(np.float32), limits=limits or platform.limits
    )
    return _stage(row, DEFAULTS, numbers)


def _stage(row, settings, numbers):
    options = PolarOptions(settings)
    stage = functools.partial(orthogonalize_stage, options, ParamSpecs(None))
    init, update = on_matrices(numbers, stage)

    def update_there(*args):
        with mock.patch.dict(PLATFORMS, cpu=row):
            # Jitted anew: a program that is kept would be that of the CPU.
            return jax.jit(lambda *args: update(*args))(*args)

    return optax.GradientTransformation(init, update_there)
