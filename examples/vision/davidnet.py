"""DavidNet, the 9-layer residual network of the CIFAR-10 speedrun (DAWNBench).

Suffixes of array names: B images, H height, W width, C channels, K classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from orscale_jax.flax import nnx_dimension_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DavidNetConfig:
    """The sizes of a DavidNet; by default the paper's, with 6,573,120 parameters."""

    # Channels of the first convolution and of the three stages, which each halve the
    # height and the width.
    widths: tuple[int, int, int, int] = (64, 128, 256, 512)
    # Stages, counted from 1, with a residual block.
    residual: tuple[int, ...] = (1, 3)
    # Classes of images.
    classes: int = 10
    # Factor of the logits.
    logit_scale: float = 0.125
    # Share of the running statistics that a batch leaves as it is.
    momentum: float = 0.9
    dtype: DTypeLike = "float32"
    param_dtype: DTypeLike = "float32"


PRESETS = {"tiny": DavidNetConfig(widths=(8, 16, 16, 32)), "davidnet": DavidNetConfig()}


class DavidNet(nnx.Module):
    """Images (B, H, W, 3) to logits.

    `model.train()` normalizes by the statistics of the batch and keeps running ones,
    which `model.eval()` uses.
    """

    def __init__(self, config: DavidNetConfig, rngs: nnx.Rngs):
        self.config = config
        first, *widths = config.widths
        self.prep = ConvNorm(3, first, config, rngs)
        self.stages = nnx.List(
            [
                Stage(inputs, outputs, stage in config.residual, config, rngs)
                for stage, (inputs, outputs) in enumerate(
                    zip(config.widths, widths, strict=False), start=1
                )
            ]
        )
        self.head = nnx.Linear(
            config.widths[-1],
            config.classes,
            use_bias=False,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x_BxHxWxC = self.prep(x_BxHxWxC)
        for stage in self.stages:
            x_BxHxWxC = stage(x_BxHxWxC)
        x_Bx1x1xC = max_pool(x_BxHxWxC, x_BxHxWxC.shape[1:3])
        return self.head(x_Bx1x1xC[:, 0, 0]) * self.config.logit_scale


class Stage(nnx.Module):
    """A convolution, pooling by two, and maybe two more convolutions around a skip."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        residual: bool,
        config: DavidNetConfig,
        rngs: nnx.Rngs,
    ):
        self.first = ConvNorm(inputs, outputs, config, rngs)
        self.residual = nnx.List(
            [ConvNorm(outputs, outputs, config, rngs) for _ in range(2 * residual)]
        )

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x_BxHxWxC = max_pool(self.first(x_BxHxWxC), (2, 2))
        y_BxHxWxC = x_BxHxWxC
        for layer in self.residual:
            y_BxHxWxC = layer(y_BxHxWxC)
        return x_BxHxWxC + y_BxHxWxC if self.residual else x_BxHxWxC


class ConvNorm(nnx.Module):
    """A 3×3 convolution, batch normalization and ReLU."""

    def __init__(self, inputs: int, outputs: int, config: DavidNetConfig, rngs: nnx.Rngs):
        self.conv = nnx.Conv(
            inputs,
            outputs,
            kernel_size=(3, 3),
            use_bias=False,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.norm = BatchNorm(outputs, config)

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        return jax.nn.relu(self.norm(self.conv(x_BxHxWxC)))


class BatchNorm(nnx.Module):
    """Batch normalization whose running variance is unbiased, as PyTorch's is.

    `nnx.BatchNorm` keeps the biased one.
    """

    def __init__(self, width: int, config: DavidNetConfig):
        self.momentum, self.dtype = config.momentum, config.dtype
        self.use_running_average = False
        self.epsilon = 1e-5
        self.scale = nnx.Param(jnp.ones(width, config.param_dtype))
        self.bias = nnx.Param(jnp.zeros(width, config.param_dtype))
        precise = jnp.promote_types(jnp.float32, config.param_dtype)
        self.mean = nnx.BatchStat(jnp.zeros(width, precise))
        self.var = nnx.BatchStat(jnp.ones(width, precise))

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        mean_C, var_C = self.mean[...], self.var[...]
        if not self.use_running_average:
            mean_C, var_C = self._statistics(x_BxHxWxC.astype(mean_C.dtype))
        factor_C = self.scale[...] * jax.lax.rsqrt(var_C + self.epsilon)
        y_BxHxWxC = (x_BxHxWxC - mean_C) * factor_C + self.bias[...]
        return y_BxHxWxC.astype(self.dtype)

    def _statistics(self, x_BxHxWxC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mean and the variance of a batch, which the running ones move towards."""
        mean_C, var_C = x_BxHxWxC.mean((0, 1, 2)), x_BxHxWxC.var((0, 1, 2))
        count = x_BxHxWxC.size // mean_C.size
        for running, new in (
            (self.mean, mean_C),
            (self.var, var_C * count / (count - 1)),
        ):
            kept = self.momentum * running[...]
            running[...] = kept + (1 - self.momentum) * jax.lax.stop_gradient(new)
        return mean_C, var_C


def max_pool(x_BxHxWxC: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """The largest of each window.

    The gradient of `jnp.max` goes to the entries that equal the maximum: to none where
    XLA computes an entry twice and rounds differently. This one does not compare.
    """
    window = (1, *size, 1)
    return jax.lax.reduce_window(
        x_BxHxWxC, -jnp.inf, jax.lax.max, window, window, "VALID"
    )


def weight_dimension_numbers(model: DavidNet) -> Callable[[Any], Any]:
    """Convolutions are matrices; the first and the head take AdamW, as in the paper."""
    return nnx_dimension_numbers(model, overrides={r"^prep\.conv\.": "adamw"})
