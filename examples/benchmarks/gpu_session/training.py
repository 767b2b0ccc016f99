"""A training step of GPT-2 124M: the optimizer's share of it, and its FLOP utilization.

The demo's decoder in GPT-2's sizes, float32 parameters, activations in bfloat16, 32
sequences of 1,024 tokens in four micro-batches. Its attention is written out, without
fused kernels. The shares are of the model's FLOPs: that of the card's peak is known as
model FLOP utilization.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.benchmarks.contenders import step_of
from examples.benchmarks.gpu_session import figure
from examples.benchmarks.gpu_session.decoders import Decoder, config_of, decoder
from examples.benchmarks.gpu_session.rates import shares
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.gpu_session.stepping import OPTIMIZERS, optimizers
from examples.benchmarks.gradients import gradient_of
from examples.benchmarks.timing import Quartiles, repeated, seconds_of
from examples.pretrain.models.dense import DenseConfig

TIME, ALONE = "time of a training step", "the gradient alone"


class Sizes(NamedTuple):
    config: DenseConfig
    batches: tuple[int, int, int]  # How many, sequences of each, positions.
    largest_product: int


GPT2 = Sizes(config_of(768, 12, 12, vocab=50304), (4, 8, 1024), 8192)
TINY = Sizes(config_of(16, 1, 2, vocab=32), (2, 1, 8), 32)


def measured(name: str, sizes: Sizes) -> Iterator[Measured]:
    batches, sequences, length = sizes.batches
    model = decoder(sizes.config)
    seconds = _seconds_of_gradient(sizes)
    if name != ALONE:
        alone = seconds.median
        seconds = seconds_of(_training(model, _tokens(sizes), name))
        share = seconds.map(lambda x: 100 * (1 - alone / x))
        yield Measured("the optimizer's share", "%", share)
    yield Measured(TIME, "ms", seconds.times(1e3))
    flops = model.flops(batches * sequences, length)
    yield from shares(flops, seconds, sizes.largest_product)


@functools.cache
def _seconds_of_gradient(sizes: Sizes) -> Quartiles:
    model, tokens = decoder(sizes.config), _tokens(sizes)
    gradient = gradient_of(model.graph)
    jax.block_until_ready(gradient(model.params, tokens))
    return seconds_of(lambda: gradient(model.params, tokens))


def _tokens(sizes: Sizes) -> jax.Array:
    *batches, length = sizes.batches
    shape = (*batches, length + 1)
    return jax.random.randint(jax.random.key(0), shape, 0, sizes.config.vocab_size)


def _training(model: Decoder, tokens: jax.Array, name: str) -> Callable[[], Any]:
    optimizer, gradient = optimizers(model.numbers)[name], gradient_of(model.graph)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
        return step_of(optimizer)(params, state, gradient(params, tokens))

    params = jax.tree.map(jnp.copy, model.params)
    run = repeated(step, (params, jax.jit(optimizer.init)(params)), tokens)
    jax.block_until_ready(run())
    return run


def cases(tiny: bool) -> Sequence[Case]:
    sizes = TINY if tiny else GPT2
    return [
        Case(
            "one layer" if tiny else "GPT-2 124M",
            name,
            functools.partial(measured, name, sizes),
        )
        for name in (ALONE, *(["muon"] if tiny else OPTIMIZERS))
    ]


STAGE = Stage(cases, figure.of_quantity(TIME, "A training step: quartiles"))
