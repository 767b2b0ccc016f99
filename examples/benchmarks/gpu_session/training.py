"""Decoders in training.

*training*: a step of GPT-2 124M, the optimizer's share of it, and its FLOP utilization.
The demo's decoder in GPT-2's sizes, 32 sequences of 1,024 tokens in four micro-batches.
Its attention is written out, without fused kernels. The shares are of the model's FLOPs:
that of the card's peak is known as model FLOP utilization.

*losses*: decoders of 31M and 125M parameters, trained on the standard library's sources.
AdamW, Muon+Moonlight (`muon`) and `orscale` at the same rates, two seeds each: 200 or 500
steps of 64 windows of 512 bytes. The rate warms up for a tenth of the steps and falls by
a cosine to a tenth. All decay by 0.1; everything else is at its default, but for AdamW's
b2, which is 0.95 in all three. A loss is that of 8 batches of validation, the same for
all runs; quartiles are over these batches.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.gpu_session.session import Case, Measured, Stage, figure_of
from examples.benchmarks.gpu_session.speed import shares
from examples.benchmarks.timing import Quartiles, repeated, seconds_of
from examples.pretrain.data import read_corpus
from examples.pretrain.loss import cross_entropy
from examples.pretrain.models.dense import Dense, DenseConfig, weight_dimension_numbers
from orscale_jax import muon, orscale

STEP, ALONE, LOSS = "time of a training step", "the gradient alone", "validation loss"
OPTIMIZERS = ("orscale", "muon", "optax.adamw", "optax.contrib.muon", "normuon")
ARMS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "optax.adamw": lambda rate, numbers: optax.adamw(rate, b2=0.95, weight_decay=0.1),
    "muon": lambda rate, numbers: muon(rate, weight_dimension_numbers=numbers),
    "orscale": lambda rate, numbers: orscale(rate, weight_dimension_numbers=numbers),
}


Function = Callable[[Any, jax.Array], Any]  # Of parameters and tokens.


class Sizes(NamedTuple):
    """Of a decoder and its batch, and how long it is trained."""

    width: int
    layers: int
    heads: int
    vocab: int
    batches: int  # Micro-batches of a step.
    sequences: int  # Of each.
    length: int
    steps: int = 0
    between: int = 50  # Two losses of validation.


GPT2 = Sizes(768, 12, 12, 50304, batches=4, sequences=8, length=1024)
TINY = Sizes(16, 1, 2, 256, batches=2, sequences=2, length=8, steps=4, between=2)
MODELS = {
    "31M": Sizes(512, 10, 8, 256, batches=1, sequences=64, length=512, steps=200),
    "125M": Sizes(896, 13, 14, 256, batches=1, sequences=64, length=512, steps=500),
}


def decoder(sizes: Sizes, seed: int = 0) -> tuple[Any, Any, Function, Function]:
    """Float32 parameters, their dimension numbers, the loss, and its gradient.

    Activations are in bfloat16, layers are scanned, the head is tied. The loss is that of
    tokens (sequences, positions), in nats each. The gradient is that of micro-batches,
    (batches, sequences, positions), one by one; a batch that is whole is rematerialized.
    """
    config = DenseConfig(
        vocab_size=sizes.vocab, width=sizes.width, layers=sizes.layers, heads=sizes.heads,
        fused_qkv=False, dtype="bfloat16", remat=sizes.batches == 1,
    )  # fmt: skip
    model = Dense(config, nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return cross_entropy(model.hidden(tokens[:, :-1]), model.logits, tokens[:, 1:])

    def gradient(params: Any, tokens: jax.Array) -> Any:
        def add(grads: Any, batch: jax.Array) -> tuple[Any, None]:
            found = jax.grad(lambda params: loss(params, batch) / len(tokens))(params)
            return jax.tree.map(jnp.add, grads, found), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), tokens)[0]

    return params, weight_dimension_numbers(model)(params), loss, gradient


@functools.cache
def _seconds(name: str, sizes: Sizes) -> tuple[Quartiles, float]:
    """Of a training step, or of its gradient alone; the model's FLOPs.

    As Chowdhery et al. count them (arXiv:2204.02311, appendix B): the upper half of the
    scores counts, although it is masked, and no recomputation does.
    """
    params, numbers, _, gradient = decoder(sizes)
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


@functools.cache
def _texts() -> tuple[jax.Array, jax.Array]:
    """For training, and for validation."""
    corpus = read_corpus()
    return jax.device_put((corpus.train.pieces[0], corpus.val.pieces[0]))


def _of_run(sizes: Sizes, arm: str, rate: float, seed: int) -> Iterator[Measured]:
    """The losses of validation on the way."""
    schedule = optax.warmup_cosine_decay_schedule(
        0, rate, sizes.steps // 10, sizes.steps, rate / 10
    )
    params, numbers, loss, gradient = decoder(sizes, seed)
    optimizer = ARMS[arm](schedule, numbers)
    update = step_of(optimizer)

    def windows(text: jax.Array, key: jax.Array) -> jax.Array:
        """Of length + 1 bytes: micro-batches of sequences."""
        shape = (sizes.batches, sizes.sequences, 1)
        starts = jax.random.randint(key, shape, 0, text.size - sizes.length)
        return text[starts + jnp.arange(sizes.length + 1)].astype("int32")

    @functools.partial(jax.jit, donate_argnums=0)
    def some_steps(
        held: Any, key: jax.Array, first: int, train: jax.Array, val: jax.Array
    ) -> Any:
        def step(held: Any, i: jax.Array) -> tuple[Any, None]:
            tokens = windows(train, jax.random.fold_in(key, i))
            return update(*held, gradient(held[0], tokens)), None

        held, _ = jax.lax.scan(step, held, first + jnp.arange(sizes.between))
        keys = jax.random.split(jax.random.key(0), 8)
        return held, jax.lax.map(lambda key: loss(held[0], windows(val, key)[0]), keys)

    held = (params, jax.jit(optimizer.init)(params))
    for first in range(0, sizes.steps, sizes.between):
        held, found = some_steps(held, jax.random.key(seed), first, *_texts())
        quartiles = Quartiles.of(found.tolist())
        yield Measured(LOSS, "nats per byte", quartiles, first + sizes.between)


def losses(tiny: bool) -> Sequence[Sequence[Case]]:
    models, arms, seeds, rates = MODELS, [*ARMS], [0, 1], [3e-3, 1e-3]
    if tiny:
        models, arms, seeds, rates = {"tiny": TINY}, arms[::2], seeds[:1], rates[:1]
    return [
        [
            Case(f"{name}, {sizes.steps} steps, rate {rate:g}, seed {seed}", arm, LOSS,
                 functools.partial(_of_run, sizes, arm, rate, seed), last=sizes.steps)
            for arm in arms
        ]
        for (name, sizes), seed, rate in itertools.product(models.items(), seeds, rates)
    ]  # fmt: skip


TRAINING = Stage(training, figure_of(STEP, "A training step"))
LOSSES = Stage(losses, figure_of(LOSS, "Validation loss of runs, over batches"))
