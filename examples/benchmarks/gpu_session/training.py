"""Decoders in training.

*training*: a step of GPT-2 124M, the optimizer's share of it, and its FLOP utilization.
The decoder of `examples.pretrain` in GPT-2's sizes, 32 sequences of 1,024 tokens at once,
attention by cuDNN. The shares are of the model's FLOPs: that of the card's peak is known
as model FLOP utilization.

*pretraining*: decoders of 31M and 125M parameters, trained on the sources of Python's
standard library and of the installed packages, as bytes. AdamW, `muon`
and `orscale`: four rates each with 31M parameters, then the best one of each with 125M,
two seeds. A step has 16 windows of 512 bytes. The rate warms up for a tenth of the steps
and falls by a cosine to a tenth. All decay by 0.1; everything else is at its default, but
for AdamW's b2, which is 0.95 in all three. A loss is that of 16 batches of validation,
the same for all runs; quartiles are over these batches. What will be concluded is in
docs/study/pretraining_protocol.md of commit 2f6bf514. At the end each optimizer goes on,
at three rates and without decay, from the weights that AdamW trained with 125M parameters
and another seed: on the topics of ``help()``, with losses of both texts.
"""

import functools
import hashlib
import itertools
import math
import pathlib
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.gpu_session.session import Case, Measured, Row
from examples.benchmarks.gpu_session.speed import shares
from examples.benchmarks.timing import Quartiles, repeated, seconds_of
from examples.pretrain.data import NOT_LIBRARY, SEPARATOR, VALIDATION_SHARE
from examples.pretrain.loss import cross_entropy
from examples.pretrain.models.dense import Dense, DenseConfig
from orscale_jax import muon, orscale
from orscale_jax.flax import nnx_dimension_numbers

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
    between: int = 250  # Two losses of validation.


GPT2 = Sizes(768, 12, 12, 50304, batches=1, sequences=32, length=1024)
TINY = Sizes(16, 1, 2, 256, batches=2, sequences=2, length=8, steps=4, between=2)
SMALL = Sizes(512, 10, 8, 256, batches=1, sequences=16, length=512, steps=1500)
LARGE = SMALL._replace(width=896, layers=13, heads=14, steps=2500)
# Powers of two times this rate; those in the middle are tried first.
RATE = 1e-3
EXPONENTS = {"optax.adamw": (0, -1, 1, -2), "muon": (2, 1, 3, 0), "orscale": (2, 1, 3, 0)}
TUNED = {"optax.adamw": (-2, -3, -1), "muon": (-1, -2, 0), "orscale": (-1, -2, 0)}
MOST_BYTES = 2**27  # To train on.


def decoder(sizes: Sizes, seed: int = 0) -> tuple[Any, Any, Function, Function]:
    """Float32 parameters, their dimension numbers, the loss, and its gradient.

    Activations are in bfloat16, layers are scanned, the head is tied. The loss is that of
    tokens (sequences, positions), in nats each. The gradient is that of micro-batches,
    (batches, sequences, positions), one by one.
    """
    config = DenseConfig(
        vocab_size=sizes.vocab, width=sizes.width, layers=sizes.layers, heads=sizes.heads,
        fused_qkv=False, dtype="bfloat16",
    )  # fmt: skip
    model = Dense(config, nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return cross_entropy(model.hidden(tokens[:, :-1]), model.logits, tokens[:, 1:])

    def gradient(params: Any, tokens: jax.Array) -> Any:
        if len(tokens) == 1:
            return jax.grad(loss)(params, tokens[0])

        def add(grads: Any, batch: jax.Array) -> tuple[Any, None]:
            found = jax.grad(lambda params: loss(params, batch) / len(tokens))(params)
            return jax.tree.map(jnp.add, grads, found), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), tokens)[0]

    return params, nnx_dimension_numbers(model)(params), loss, gradient


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
def texts(*roots: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """For training, and for validation: bytes of Python sources, each text once.

    A text's hash decides on its side and its place, so that copies of one file in several
    packages are not on both sides. Roots are those of the standard library and of the
    installed packages without others.
    """
    library, packages = (
        pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")
    )
    found: dict[bytes, bytes] = {}
    for root in roots or (library, packages):
        left_out = NOT_LIBRARY if root == library else frozenset[str]()
        for path in root.rglob("*.py"):
            if path.is_file() and left_out.isdisjoint(path.relative_to(root).parts):
                text = path.read_bytes()
                if text and SEPARATOR not in text:
                    found[hashlib.sha256(text).digest()] = text
    sides: tuple[list[bytes], list[bytes]] = [], []
    for digest in sorted(found, key=lambda digest: digest[::-1]):
        sides[digest[0] < 256 * VALIDATION_SHARE].append(found[digest])
    train, val = (np.frombuffer(SEPARATOR.join(side), np.uint8) for side in sides)
    return train[:MOST_BYTES], val


def help_topics() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the topics that ``help()`` explains, to train and to validate on."""
    # Topics share paragraphs. Each is kept once; every tenth block of 20 is to validate.
    topics = sorted(pydoc_data.topics.topics.items())
    paragraphs = dict.fromkeys(x for _, topic in topics for x in topic.split("\n\n"))
    sides: tuple[list[str], list[str]] = [], []
    for i, paragraph in enumerate(paragraphs):
        sides[i // 20 % 10 == 9].append(paragraph)
    train, val = (np.frombuffer("\n\n".join(x).encode(), np.uint8) for x in sides)
    return train, val


class Runner(NamedTuple):
    """Training with an optimizer, compiled once for all rates and seeds."""

    start: Callable[[int], Any]  # Of a seed: parameters and state.
    # Of these, a rate, a seed, the number of the first step, and both texts: what some
    # steps make of them, and the losses of validation.
    some_steps: Callable[..., Any]
    losses: Callable[[Any, jax.Array], jax.Array]  # Of parameters and a text.


@functools.cache
def runner(sizes: Sizes, arm: str) -> Runner:
    _, numbers, loss, gradient = decoder(sizes)
    shape = optax.warmup_cosine_decay_schedule(
        0, 1, sizes.steps // 10, sizes.steps, 1 / 10
    )

    def optimizer(rate: jax.Array | float) -> optax.GradientTransformation:
        return ARMS[arm](lambda step: rate * shape(step), numbers)

    def windows(text: jax.Array, key: jax.Array) -> jax.Array:
        """Of length + 1 bytes: micro-batches of sequences."""
        starts = jax.random.randint(
            key, (sizes.batches, sizes.sequences, 1), 0, text.size - sizes.length
        )
        return text[starts + jnp.arange(sizes.length + 1)].astype("int32")

    @functools.partial(jax.jit, donate_argnums=0)
    def some_steps(
        held: Any, rate: float, seed: int, first: int, train: jax.Array, val: jax.Array
    ) -> Any:
        update = step_of(optimizer(rate))

        def step(held: Any, i: jax.Array) -> tuple[Any, None]:
            tokens = windows(train, jax.random.fold_in(jax.random.key(seed), i))
            return update(*held, gradient(held[0], tokens)), None

        held, _ = jax.lax.scan(step, held, first + jnp.arange(sizes.between))
        return held, losses(held[0], val)

    @jax.jit
    def losses(params: Any, text: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), 16)
        return jax.lax.map(lambda key: loss(params, windows(text, key)[0]), keys)

    def start(seed: int) -> tuple[Any, Any]:
        params = decoder(sizes, seed)[0]
        return params, jax.jit(optimizer(RATE).init)(params)

    return Runner(start, some_steps, losses)


def _of_run(sizes: Sizes, arm: str, rate: float, seed: int) -> Iterator[Measured]:
    """The losses of validation on the way, after the rate and the size of the text."""
    train, val = jax.device_put(texts())
    yield Measured("learning rate", "", Quartiles.of([rate]))
    yield Measured("text to train on", "MB", Quartiles.of([train.size / 1e6]))
    start, some_steps, _ = runner(sizes, arm)
    held = start(seed)
    for first in range(0, sizes.steps, sizes.between):
        began = time.perf_counter()
        held, found = some_steps(held, rate, seed, first, train, val)
        quartiles = Quartiles.of(found.tolist())
        if first == sizes.between:  # After what compiles.
            each = 1e3 * (time.perf_counter() - began) / sizes.between
            yield Measured(STEP, "ms", Quartiles.of([each]))
        yield Measured(LOSS, "nats per byte", quartiles, first + sizes.between)


def case_of(name: str, sizes: Sizes, rate: str, seed: int) -> str:
    return f"{name}, {sizes.steps} steps, {rate}, seed {seed}"


def best_rate(rows: Sequence[Row], small: Sizes, arm: str) -> float:
    """The one whose run of the search ended lowest; the first one if none did."""

    def end(rate: float) -> float:
        case = case_of("31M", small, f"rate {rate:g}", 0)
        ends = (
            row.median
            for row in rows
            if (row.case, row.variant, row.quantity) == (case, arm, LOSS)
            and row.step == small.steps
            and math.isfinite(row.median)
        )
        return next(ends, math.inf)

    return min((RATE * 2.0**exponent for exponent in EXPONENTS[arm]), key=end)


def _of_best(
    small: Sizes, large: Sizes, arm: str, seed: int, rows: Sequence[Row]
) -> Iterator[Measured]:
    return _of_run(large, arm, best_rate(rows, small, arm), seed)


@functools.cache
def trained_by_adamw(sizes: Sizes, rate: float, seed: int) -> Any:
    start, some_steps, _ = runner(sizes, "optax.adamw")
    held, code = start(seed), jax.device_put(texts())
    for first in range(0, sizes.steps, sizes.between):
        held, _ = some_steps(held, rate, seed, first, *code)
    return held[0]


def _of_tuning(
    small: Sizes, large: Sizes, arm: str, rate: float, rows: Sequence[Row]
) -> Iterator[Measured]:
    """The losses of both texts, before tuning and after it."""
    start, some_steps, losses = runner(large._replace(steps=large.between), arm)
    params = trained_by_adamw(large, best_rate(rows, small, "optax.adamw"), 2)
    prose, (_, code) = jax.device_put(help_topics()), jax.device_put(texts())
    held = jax.tree.map(jnp.copy, params), start(0)[1]
    (after, _), _ = some_steps(held, rate, 0, 0, *prose)
    for when, found in (("before", params), ("after", after)):
        for name, text in (("prose", prose[1]), ("code", code)):
            quartiles = Quartiles.of(losses(found, text).tolist())
            yield Measured(f"loss on {name} {when}", "nats per byte", quartiles)


def pretraining(tiny: bool) -> Sequence[Sequence[Case]]:
    """Two rates of each optimizer, the other two, then each seed with the best ones.

    At the end, three rates of each go on from what AdamW has trained.
    """
    small, large = (TINY, TINY._replace(layers=2)) if tiny else (SMALL, LARGE)
    tried = [
        Case(case_of("31M", small, f"rate {rate:g}", 0), arm, LOSS,
             functools.partial(_of_run, small, arm, rate, 0), last=small.steps)
        for place, arm in itertools.product(range(1 if tiny else 4), ARMS)
        for rate in (RATE * 2.0 ** EXPONENTS[arm][place],)
    ]  # fmt: skip
    trained = [
        [
            Case(case_of("125M", large, "best rate", seed), arm, LOSS,
                 functools.partial(_of_best, small, large, arm, seed), last=large.steps,
                 told=True)
            for arm in ARMS
        ]
        for seed in range(1 if tiny else 2)
    ]  # fmt: skip
    tuned = [
        Case(f"125M, tuned on prose, rate {rate:g}", arm, "loss on prose after",
             functools.partial(_of_tuning, small, large, arm, rate), told=True)
        for place, arm in itertools.product(range(1 if tiny else 3), ARMS)
        for rate in (RATE * 2.0 ** TUNED[arm][place],)
    ]  # fmt: skip
    return [tried, *trained, tuned]
