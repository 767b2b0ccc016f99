"""Tune decoders of code on prose, and record what they learn and what they forget.

    python -m examples.study.tuning

does the runs that docs/data/tuning.csv lacks, one process on one core, and adds their
rows as they end. A decoder is trained on the source of Python's standard library by
AdamW or by `muon`, and then tuned on the texts of ``help()`` by each of five optimizers,
all of its parameters or adapters (LoRA). The questions, and what was to be concluded from
which difference, are in docs/study/tuning_protocol.md. `examples.study.tuned` prints the
results.
"""

import csv
import functools
import pathlib
import pydoc_data.topics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from examples.pretrain.data import read_corpus
from examples.pretrain.loss import cross_entropy
from examples.pretrain.models.dense import Dense, DenseConfig
from orscale_jax import muon, orscale
from orscale_jax.flax import nnx_dimension_numbers

TABLE, BASES = pathlib.Path("docs/data/tuning.csv"), pathlib.Path("runs/tuning")
SEARCH, FRESH = range(20, 23), range(100, 112)  # Seeds, also of the weights tuned.
RUNGS = (0, -1, -2, 1)  # Powers of two times the searched rates.
# Added afterwards, when half of AdamW's increase had turned out to be below the others.
LOWER = (-3, -4)
Arm = Callable[..., optax.GradientTransformation]
# Of a schedule of the matrices, another of what AdamW trains beside them, and arguments.
ARMS: Mapping[str, Arm] = {
    "adamw": lambda rate, beside, weight_decay, weight_dimension_numbers: optax.adamw(
        rate, b2=0.95, weight_decay=weight_decay
    ),
    # The updates of all matrices have equal RMS; so have OrScale's while its ratio is 1.
    "muon": lambda rate, beside, **arguments: muon(
        rate, adam_learning_rate=beside, **arguments
    ),
    "orscale": lambda rate, beside, **arguments: orscale(
        rate, adam_learning_rate=beside, **arguments
    ),
    # Equal norms relative to those of the matrices.
    "relative": lambda rate, beside, **arguments: orscale(
        rate, adam_learning_rate=beside, calibrate=False, r_min=0.0, r_max=jnp.inf,
        **arguments,
    ),
    # Equal spectral norms.
    "spectral": lambda rate, beside, **arguments: muon(
        rate, adam_learning_rate=beside, consistent_rms=None, **arguments
    ),
}  # fmt: skip
# Rates: of the two optimizers that train on code, and where searches begin.
PRETRAINING = {"adamw": 4e-3, "muon": 8e-3}
GUESSES = {
    "full": {
        "adamw": 2e-3, "muon": 4e-3, "orscale": 4e-3, "relative": 4e-3, "spectral": 16e-3,
    },
    "lora": {"adamw": 8e-3, "muon": 16e-3, "orscale": 16e-3},
}  # fmt: skip


class Sizes(NamedTuple):
    """Of the model, its batches and its runs."""

    model: DenseConfig
    batch: int = 8
    length: int = 64  # In bytes.
    pretraining: int = 1000  # Steps.
    tuning: int = 120
    measured: int = 8  # Steps of a run whose update is measured.
    windows: int = 128  # Of each validation.
    rank: int = 8  # Of an adapter.
    together: int = 3  # Seeds that are trained at once.


SIZES = Sizes(
    DenseConfig(vocab_size=256, width=48, layers=2, heads=2, fused_qkv=False, scan=False)
)


class Row(NamedTuple):
    """A run: what it was, and what came of it."""

    base: str  # The optimizer that trained the decoder on code.
    how: str  # "pretraining", "full" or "lora".
    arm: str
    rate: str
    beside: str  # The rate of the parameters that AdamW trains beside the matrices.
    seed: int
    new: float  # Losses of validation at the end: on prose, in nats per byte,
    old: float  # and on code.
    # Means over measured steps and matrices: the root mean square of the update's
    # entries, its norm over that of the matrix, its largest singular value.
    rms: float = 0.0
    relative: float = 0.0
    spectral: float = 0.0
    moved: float = 0.0  # The mean of ‖W - W at the start‖ / ‖W at the start‖.


class Text(NamedTuple):
    """Bytes to train on, and windows (windows, length + 1) to validate on."""

    train: jax.Array
    val: jax.Array


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


def read_texts(sizes: Sizes) -> tuple[Text, Text]:
    """Code, the standard library's, and prose."""
    code = read_corpus()

    def text(train: np.ndarray, val: np.ndarray) -> Text:
        starts = np.linspace(0, len(val) - sizes.length - 1, sizes.windows, dtype=int)
        at = starts[:, None] + np.arange(sizes.length + 1)
        return Text(jnp.asarray(train), jnp.asarray(val[at].astype(np.int32)))

    return text(code.train.pieces[0], code.val.pieces[0]), text(*help_topics())


class Decoder(NamedTuple):
    """A model as a function of a list of its parameters."""

    loss: Callable[[Sequence[jax.Array], jax.Array], jax.Array]
    is_matrix: tuple[bool, ...]  # By parameter.


@functools.cache
def decoder(model: DenseConfig) -> Decoder:
    abstract = nnx.eval_shape(lambda: Dense(model, nnx.Rngs(0)))
    graph, params = nnx.split(abstract, nnx.Param)
    numbers = jax.tree.leaves(
        nnx_dimension_numbers(abstract)(params),
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )
    assert set(numbers) == {None, MuonDimensionNumbers()}
    structure = jax.tree.structure(params)

    def loss(params: Sequence[jax.Array], tokens: jax.Array) -> jax.Array:
        merged: Any = nnx.merge(graph, jax.tree.unflatten(structure, params))
        return cross_entropy(merged.hidden(tokens[:, :-1]), merged.logits, tokens[:, 1:])

    return Decoder(loss, tuple(x is not None for x in numbers))


def initial(sizes: Sizes, seed: int) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(Dense(sizes.model, nnx.Rngs(seed)), nnx.Param))


@functools.cache
def trainer(sizes: Sizes, how: str, arm: str) -> Callable[..., Any]:
    """The runs of some seeds, compiled once for all rates.

    It takes the rates of the matrices and beside them, the parameters to start from, the
    seeds, the bytes to train on, and the windows of both validations. It returns the
    parameters, the losses, and what is measured of the updates, by seed.
    """
    loss, is_matrix = decoder(sizes.model)
    lora = how == "lora"
    steps = sizes.pretraining if how == "pretraining" else sizes.tuning
    warmup = steps // 20
    shape = optax.warmup_cosine_decay_schedule(1 / warmup, 1, warmup, steps)
    trained = [True] * 2 * sum(is_matrix) if lora else is_matrix
    numbers = [MuonDimensionNumbers() if matrix else None for matrix in trained]

    def weights(start: Any, trained: Any) -> list[jax.Array]:
        """The model's parameters."""
        if not lora:
            return list(trained)
        pairs = iter(zip(trained[::2], trained[1::2], strict=True))
        return [
            w + jnp.matmul(*next(pairs)) if matrix else w
            for w, matrix in zip(start, is_matrix, strict=True)
        ]

    def adapters(start: Any, key: jax.Array) -> Iterator[jax.Array]:
        for i, (w, matrix) in enumerate(zip(start, is_matrix, strict=True)):
            if matrix:
                at_random = jax.random.normal(
                    jax.random.fold_in(key, i), (w.shape[0], sizes.rank)
                )
                yield at_random / w.shape[0] ** 0.5
                yield jnp.zeros((sizes.rank, w.shape[1]))

    def matrices(params: Any) -> list[jax.Array]:
        return [w for w, matrix in zip(params, is_matrix, strict=True) if matrix]

    def relative(before: Any, after: Any) -> jax.Array:
        norm = jnp.linalg.norm
        pairs = zip(matrices(before), matrices(after), strict=True)
        return jnp.mean(jnp.array([norm(b - a) / norm(a) for a, b in pairs]))

    def measure(before: Any, after: Any) -> jax.Array:
        updates = jax.tree.map(jnp.subtract, matrices(after), matrices(before))
        squares = sum(jnp.sum(x**2) for x in updates)
        largest = [
            jnp.linalg.eigvalsh(x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x)[-1]
            for x in updates
        ]
        rms = jnp.sqrt(squares / sum(x.size for x in updates))
        spectral = jnp.mean(jnp.sqrt(jnp.maximum(jnp.array(largest), 0)))
        return jnp.array([rms, relative(before, after), spectral])

    def run(
        rate: jax.Array, beside: jax.Array, start: Any, seed: jax.Array,
        train: jax.Array, old: jax.Array, new: jax.Array,
    ) -> Any:  # fmt: skip
        optimizer = ARMS[arm](
            lambda step: rate * shape(step),
            lambda step: beside * shape(step),
            weight_decay=0.1 if how == "pretraining" else 0.0,
            weight_dimension_numbers=numbers,
        )
        key = jax.random.key(seed)

        def step(held: Any, i: jax.Array) -> tuple[Any, None]:
            params, _, state = held
            starts = jax.random.randint(
                jax.random.fold_in(key, i), (sizes.batch, 1), 0, train.size - sizes.length
            )
            tokens = train[starts + jnp.arange(sizes.length + 1)].astype(jnp.int32)
            grads = jax.grad(lambda x: loss(weights(start, x), tokens))(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), params, state), None

        def some_steps(held: Any, first: jax.Array) -> Any:
            held, _ = jax.lax.scan(
                step, held, first + jnp.arange(steps // sizes.measured)
            )
            after, before, _ = held
            return held, measure(weights(start, before), weights(start, after))

        params = list(adapters(start, jax.random.fold_in(key, steps))) if lora else start
        held = params, params, optimizer.init(params)
        firsts = jnp.arange(sizes.measured) * (steps // sizes.measured)
        held, found = jax.lax.scan(some_steps, held, firsts)
        end = weights(start, held[0])
        losses = [loss(end, x) for x in (new, old)]
        numbers_of = jnp.array([*losses, *found.mean(0), relative(start, end)])
        return end, numbers_of

    return jax.jit(jax.vmap(run, in_axes=(None, None, 0, 0, None, None, None)))


class Study:
    """The table of the runs, and what does those that it lacks."""

    def __init__(self, sizes: Sizes, table: pathlib.Path, bases: pathlib.Path):
        self.sizes, self.table, self.bases = sizes, table, bases
        self.code, self.prose = read_texts(sizes)
        self.rows = {row[:6]: row for row in read(table)}
        bases.mkdir(parents=True, exist_ok=True)

    def start(self, base: str, how: str, seed: int) -> list[jax.Array]:
        """The parameters that a run begins with."""
        if how == "pretraining":
            return initial(self.sizes, seed)
        with np.load(self.bases / f"{base}-{seed}.npz") as file:
            return [jnp.asarray(file[name]) for name in file]

    def runs(
        self, base: str, how: str, arm: str, rate: float, beside: float,
        seeds: Sequence[int], keep: bool = False,
    ) -> list[Row]:  # fmt: skip
        """The rows of some seeds, in which those that lack are done first.

        With `keep`, what is trained is written where `start` finds it.
        """
        settings = base, how, arm, f"{rate:.6g}", f"{beside:.6g}"
        lacking = [
            seed
            for seed in seeds
            if (*settings, seed) not in self.rows
            or (keep and not (self.bases / f"{base}-{seed}.npz").exists())
        ]
        text = self.code if how == "pretraining" else self.prose
        for at in range(0, len(lacking), self.sizes.together):
            some = lacking[at : at + self.sizes.together]
            starts = [self.start(base, how, seed) for seed in some]
            ends, found = trainer(self.sizes, how, arm)(
                jnp.float32(rate), jnp.float32(beside),
                jax.tree.map(lambda *x: jnp.stack(x), *starts), jnp.array(some),
                text.train, self.code.val, self.prose.val,
            )  # fmt: skip
            for i, seed in enumerate(some):
                if keep:
                    arrays = [np.asarray(x[i]) for x in ends]
                    np.savez(self.bases / f"{base}-{seed}.npz", *arrays)
                numbers = (float(f"{x:.6g}") for x in np.asarray(found[i]))
                self._add(Row(*settings, seed, *numbers))
        return [self.rows[*settings, seed] for seed in seeds]

    def search(self, base: str, how: str, arm: str, beside: float | None = None) -> float:
        """The rate of the lowest mean loss on prose, to a factor of 2.

        Both its neighbours are tried. Without `beside`, all parameters have one rate.
        """
        guess, tried, wanted = GUESSES[how][arm], dict[int, float](), [0, -1, 1]
        while wanted:
            for power in wanted:
                rate = guess * 2.0**power
                rates = rate, rate if beside is None else beside
                rows = self.runs(base, how, arm, *rates, SEARCH)
                mean = float(np.mean([row.new for row in rows]))
                tried[power] = mean if np.isfinite(mean) else np.inf
            best = min(tried, key=tried.__getitem__)
            wanted = [x for x in (best - 1, best + 1) if x not in tried]
        return guess * 2.0**best

    def _add(self, row: Row) -> None:
        if row[:6] in self.rows:  # Done again for its parameters.
            return
        self.rows[row[:6]] = row
        new = not self.table.exists()
        with self.table.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([Row._fields, row] if new else [row])
        print(*row, flush=True)


def read(table: pathlib.Path = TABLE) -> list[Row]:
    """The rows of a table; none where there is no file."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        kinds = Row.__annotations__.values()
        return [
            Row(*(of(x) for of, x in zip(kinds, line, strict=True)))
            for line in list(csv.reader(file))[1:]
        ]


def train(study: Study) -> None:
    """The whole protocol, in its order."""
    for base, rate in PRETRAINING.items():
        seeds = [*SEARCH, *FRESH]
        study.runs(base, "pretraining", base, rate, rate, seeds, keep=True)
    cells: list[tuple[str, str, str]] = [
        (base, how, arm)
        for arms in (("adamw", "muon", "orscale"), ("relative", "spectral"))
        for base in PRETRAINING
        for how in GUESSES
        for arm in arms
        if arm in GUESSES[how]
    ]
    best = dict[tuple[str, str, str], tuple[float, float]]()
    for base, how, arm in cells:
        adamw = study.search(base, how, "adamw")
        rate = adamw if arm == "adamw" else study.search(base, how, arm, adamw)
        best[base, how, arm] = rate, adamw
        for rung in RUNGS:
            study.runs(base, how, arm, rate * 2.0**rung, adamw * 2.0**rung, FRESH)
    for (base, how, arm), (rate, adamw) in best.items():
        if arm in ("adamw", "muon", "orscale"):
            for rung in LOWER:
                study.runs(base, how, arm, rate * 2.0**rung, adamw * 2.0**rung, FRESH)


if __name__ == "__main__":
    train(Study(SIZES, TABLE, BASES))
