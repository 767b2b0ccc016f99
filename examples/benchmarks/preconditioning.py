"""What AOL preconditioning costs and saves, as Markdown tables.

    python -m examples.benchmarks.preconditioning            # quality, then time
    python -m examples.benchmarks.preconditioning --seconds 0   # quality alone

Q is `polar_factor` in float32, UVᵀ comes from the SVD in float64. The tables are the
cosine <Q, UVᵀ> / (‖Q‖ ‖UVᵀ‖), the root mean square of σ(Q) - 1, and the smallest and
largest σ(Q). Rows are matrices: of given spectra with random singular vectors, with rows
that are correlated or of unequal length, and the momenta of the demo's language model
after some steps of Muon (means over its matrices; of the range, the extremes). "aol 16"
has converged: its cosine is that of the scaled matrix's polar factor.

Times are ratios of medians on this machine, measured in turns.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from examples.benchmarks.functional import experiment, make_step
from examples.benchmarks.timing import in_turns, turns_for
from examples.pretrain.configs import DEMOS
from orscale_jax import muon, polar_express_coefficients, polar_factor
from orscale_jax.newton_schulz import coefficients

LOWER = 5e-3
SIZE = 256
CORRELATION = 0.95
SHAPES = ((768, 768), (768, 3072))


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    momentum_steps: int = 50
    """Steps of the demo's training; 0 leaves its momenta out."""
    seconds: float = 60.0
    """For the times of each shape, about; 0 leaves them out."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """Arguments of `polar_factor`."""

    preconditioning: str
    steps: int
    coeffs: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return polar_factor(
            x,
            steps=self.steps,
            coeffs=self.coeffs,
            dtype=jnp.float32,
            preconditioning=self.preconditioning,
        )


POLAR_EXPRESS, DION = (
    np.asarray(coefficients.PRESETS[name]) for name in ("polar_express", "dion")
)
FOUR = polar_express_coefficients(LOWER, 4)
CONTENDERS = {
    "frobenius 5, `polar_express`": Contender("frobenius", 5, "polar_express"),
    "aol 5, `polar_express`": Contender("aol", 5, "polar_express"),
    "aol 4, rows 1–4": Contender("aol", 4, POLAR_EXPRESS[:4]),
    "aol 4, rows 2–5": Contender("aol", 4, POLAR_EXPRESS[1:5]),
    f"aol 4, bound {LOWER:g}": Contender("aol", 4, FOUR),
    f"frobenius 4, bound {LOWER:g}": Contender("frobenius", 4, FOUR),
    "aol 16": Contender("aol", 16, "polar_express"),
    "frobenius 5, `dion`": Contender("frobenius", 5, "dion"),
    "aol 4, rows 2–5 of `dion`": Contender("aol", 4, DION[1:]),
    "frobenius 5, `jordan`": Contender("frobenius", 5, "jordan"),
    "aol 4, `jordan`": Contender("aol", 4, "jordan"),
}


def orthonormal(rng: np.random.Generator, m: int, n: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(m, n)))[0]


def synthetic() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    m, n = SIZE, 2 * SIZE

    def gaussian(columns: int = n) -> np.ndarray:
        return rng.normal(size=(m, columns))

    def geometric(condition: float) -> np.ndarray:
        values = np.geomspace(1, 1 / condition, m)
        return (orthonormal(rng, m, m) * values) @ orthonormal(rng, n, m).T

    yield "Gaussian, square", gaussian(m)
    yield "Gaussian", gaussian()
    yield "condition 1e3", geometric(1e3)
    yield "condition 1e6", geometric(1e6)
    yield (
        "rank 16 and 1 % noise",
        gaussian(16) @ rng.normal(size=(16, n)) / 4 + (0.01 * gaussian()),
    )
    lags = np.abs(np.subtract.outer(np.arange(m), np.arange(m)))
    yield "autocorrelated rows", np.linalg.cholesky(CORRELATION**lags) @ gaussian()
    yield "a common row and 30 % noise", rng.normal(size=n) + 0.3 * gaussian()
    lengths = rng.permutation(np.geomspace(1, 1e-3, m))
    yield "unequal rows", lengths[:, None] * gaussian()
    lengths = rng.permutation(np.geomspace(1, 1e-3, n))
    yield "unequal columns", lengths * gaussian()


def momenta(steps: int) -> list[np.ndarray]:
    """The momentum of every matrix of the demo's model, after some steps of Muon."""
    demo = DEMOS["demo"]
    recipe = dataclasses.replace(demo.recipe, seq_len=128)  # A longer context than there.
    loss_fn, params, batches, _ = experiment(dataclasses.replace(demo, recipe=recipe))
    optimizer = muon(recipe.learning_rate, weight_decay=recipe.weight_decay)
    state = optimizer.init(params)
    train_step = make_step(loss_fn, optimizer)
    for index in range(steps):
        params, state, _ = train_step(params, state, batches[index])
    [(_, traces)] = optax.tree.get_all_with_path(state, "trace")
    return [np.asarray(trace, np.float64) for trace in jax.tree.leaves(traces)]


@dataclasses.dataclass(frozen=True)
class Quality:
    """The quality of Q."""

    cosine: float
    rms: float
    lowest: float
    highest: float


def quality(contender: Contender, x: np.ndarray) -> Quality:
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    q = np.asarray(jax.jit(contender.__call__)(jnp.asarray(x, jnp.float32)), np.float64)
    values = np.linalg.svd(q, compute_uv=False)
    return Quality(
        cosine=float(np.sum(q * (u @ vt)) / np.linalg.norm(q) / min(x.shape) ** 0.5),
        rms=float(np.sqrt(np.mean((values - 1) ** 2))),
        lowest=float(values.min()),
        highest=float(values.max()),
    )


def over_all(found: list[Quality]) -> Quality:
    return Quality(
        cosine=statistics.mean(q.cosine for q in found),
        rms=statistics.mean(q.rms for q in found),
        lowest=min(q.lowest for q in found),
        highest=max(q.highest for q in found),
    )


def table(
    title: str, rows: Mapping[str, Sequence[str]], columns: Sequence[str]
) -> Iterator[str]:
    yield f"| {title} | " + " | ".join(columns) + " |"
    yield "|---|" + "--:|" * len(columns)
    for name, cells in rows.items():
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""


def qualities(options: Options) -> Iterator[str]:
    cases = {name: [x] for name, x in synthetic()}
    if options.momentum_steps:
        cases["momenta of the demo"] = momenta(options.momentum_steps)
    found = {
        case: [over_all([quality(c, x) for x in matrices]) for c in CONTENDERS.values()]
        for case, matrices in cases.items()
    }
    cells: dict[str, Callable[[Quality], str]] = {
        "cosine": lambda q: f"{q.cosine:.3f}",
        "RMS of σ − 1": lambda q: f"{q.rms:.3f}",
        "range of σ": lambda q: f"{q.lowest:.2g}–{q.highest:.2f}",
    }
    for title, cell in cells.items():
        rows = {case: list(map(cell, row)) for case, row in found.items()}
        yield from table(title, rows, list(CONTENDERS))


def times(options: Options) -> Iterator[str]:
    contenders = {
        "frobenius": Contender("frobenius", 5, "polar_express"),
        "frobenius 4": Contender("frobenius", 4, FOUR),
        "aol": Contender("aol", 4, FOUR),
    }
    rows: dict[str, list[str]] = {}
    for shape in SHAPES:
        x = jax.random.normal(jax.random.key(0), shape)
        runs = {
            name: functools.partial(jax.jit(contender.__call__), x)
            for name, contender in contenders.items()
        }
        for run in runs.values():  # Compiles.
            jax.block_until_ready(run())
        seconds = in_turns(runs, turns_for(options.seconds))
        found = {name: statistics.median(seconds[name]) for name in runs}
        rows["×".join(map(str, shape))] = [
            f"{1000 * found['frobenius']:.1f}",
            f"{found['aol'] / found['frobenius']:.2f}",
            f"{found['aol'] / found['frobenius 4']:.2f}",
        ]
    columns = ["frobenius 5, ms", "aol 4 / frobenius 5", "aol 4 / frobenius 4"]
    yield from table("time", rows, columns)


def main(options: Options) -> None:
    for line in qualities(options):
        print(line, flush=True)
    if options.seconds:
        for line in times(options):
            print(line, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
