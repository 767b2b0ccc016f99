"""What each platform does with matrices, one class for each.

========  ==========================================================================
base      what all have in common: limits, costs, normalized matrices
cpu       one matrix after another
gpu       few and large kernels, few temporaries
tpu       interleaved products; another class for arrays whose shardings are unknown
========  ==========================================================================

A new accelerator is one class, its line in ``PLATFORMS``, and a branch in ``engine``.
"""

from collections.abc import Callable, Mapping

from orscale_jax.distributed.platforms.base import Limits as Limits, Platform as Platform
from orscale_jax.distributed.platforms.cpu import CPU as CPU
from orscale_jax.distributed.platforms.gpu import GPU as GPU
from orscale_jax.distributed.platforms.tpu import TPU as TPU, AutoTPU as AutoTPU
from orscale_jax.newton_schulz.polar import NewtonSchulz

PLATFORMS: Mapping[str, Callable[[NewtonSchulz], Platform]] = {
    "cpu": CPU,
    "gpu": GPU,
    "tpu": TPU,
    "tpu_auto": AutoTPU,
}
