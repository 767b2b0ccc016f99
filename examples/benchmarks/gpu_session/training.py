"""Decoders in training.

*training*: a step of GPT-2 124M, the optimizer's share of it, and its FLOP utilization.
The demo's decoder in GPT-2's sizes, 32 sequences of 1,024 tokens in four micro-batches.
Its attention is written out, without fused kernels. The shares are of the model's FLOPs:
that of the card's peak is known as model FLOP utilization.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.gpu_session.session import Case, Measured
from examples.benchmarks.gpu_session.speed import shares
from examples.benchmarks.timing import Quartiles, repeated, seconds_of
from examples.pretrain.loss import cross_entropy
from examples.pretrain.models.dense import Dense, DenseConfig, weight_dimension_numbers

STEP, ALONE = "time of a training step", "the gradient alone"
OPTIMIZERS = ("orscale", "muon", "optax.adamw", "optax.contrib.muon", "normuon")
Function = Callable[[Any, jax.Array], Any]  # Of parameters and tokens.


class Sizes(NamedTuple):
    """Of a decoder and its batch."""

    width: int
    layers: int
    heads: int
    vocab: int
    batches: int  # Micro-batches of a step.
    sequences: int  # Of each.
    length: int


GPT2 = Sizes(768, 12, 12, 50304, batches=4, sequences=8, length=1024)
TINY = Sizes(16, 1, 2, 256, batches=2, sequences=2, length=8)


def decoder(sizes: Sizes) -> tuple[Any, Any, Function]:
    """Float32 parameters, their dimension numbers, and the gradient of the loss.

    Activations are in bfloat16, layers are scanned, the head is tied. The gradient is
    that of micro-batches, (batches, sequences, positions), one by one.
    """
    config = DenseConfig(
        vocab_size=sizes.vocab, width=sizes.width, layers=sizes.layers, heads=sizes.heads,
        fused_qkv=False, dtype="bfloat16",
    )  # fmt: skip
    model = Dense(config, nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return cross_entropy(model.hidden(tokens[:, :-1]), model.logits, tokens[:, 1:])

    def gradient(params: Any, tokens: jax.Array) -> Any:
        def add(grads: Any, batch: jax.Array) -> tuple[Any, None]:
            found = jax.grad(lambda params: loss(params, batch) / len(tokens))(params)
            return jax.tree.map(jnp.add, grads, found), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), tokens)[0]

    return params, weight_dimension_numbers(model)(params), gradient


@functools.cache
def _seconds(name: str, sizes: Sizes) -> tuple[Quartiles, float]:
    """Of a training step, or of its gradient alone; the model's FLOPs.

    As Chowdhery et al. count them (arXiv:2204.02311, appendix B): the upper half of the
    scores counts, although it is masked, and no recomputation does.
    """
    params, numbers, gradient = decoder(sizes)
    attention = 12 * sizes.layers * sizes.width * sizes.length
    each = 6 * sum(leaf.size for leaf in jax.tree.leaves(params)) + attention
    shape = (sizes.batches, sizes.sequences, sizes.length + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab)
    if name == ALONE:
        run: Callable[[], Any] = functools.partial(jax.jit(gradient), params, tokens)
    else:
        optimizer = contenders(numbers, None)[name]
        update = step_of(optimizer)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
            return update(params, state, gradient(params, tokens))

        run = repeated(step, (params, jax.jit(optimizer.init)(params)), tokens)
    jax.block_until_ready(run())
    return seconds_of(run), float(each * sizes.batches * sizes.sequences * sizes.length)


def _of_step(name: str, sizes: Sizes, tiny: bool) -> Iterator[Measured]:
    alone = _seconds(ALONE, sizes)[0].median
    seconds, flops = _seconds(name, sizes)
    if name != ALONE:
        share = seconds.map(lambda x: 100 * (1 - alone / x))
        yield Measured("the optimizer's share", "%", share)
    yield Measured(STEP, "ms", seconds.times(1e3))
    yield from shares(flops, seconds, tiny)


def training(tiny: bool) -> Sequence[Sequence[Case]]:
    case, sizes = ("one layer", TINY) if tiny else ("GPT-2 124M", GPT2)
    cases = [
        Case(case, name, STEP, functools.partial(_of_step, name, sizes, tiny))
        for name in (ALONE, *(["muon"] if tiny else OPTIMIZERS))
    ]
    return cases[:4], cases[4:]
