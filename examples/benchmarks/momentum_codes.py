"""What rounding the momentum does to the polar factor: codes and blocks compared.

    python -m examples.benchmarks.momentum_codes     # a minute

The gradients are those of the study's small decoder with Muon+Moonlight, 28 steps from
four places of a run. The momentum is summed from them anew, rounded at each step as an
8-bit state would be. The error is the distance of the polar factor of the last Nesterov
momentum from the one without rounding, relative to its norm: mean over all matrices.

"linear" are 255 equidistant numbers, "dynamic" the 256 of Dettmers et al. 2021
(arXiv:2110.02861), which are closer together near zero.
"""

import itertools
from collections.abc import Callable, Iterator

import jax
import ml_dtypes
import numpy as np
import optax

from examples.study.arms import ARMS
from examples.study.runs import Trainer
from examples.study.search import Rates
from examples.study.workloads import WORKLOADS

MU, STEPS = 0.95, 28
STARTS = (100, 130, 240, 270)
RATES = Rates(0.016, 0.064)
Rounding = Callable[[np.ndarray], np.ndarray]


def linear(x: np.ndarray) -> np.ndarray:
    """Numbers of [−1, 1], rounded to the nearest of 255."""
    return np.round(127 * x) / 127


def dynamic_table() -> np.ndarray:
    """Seven decades, each with twice as many numbers as the one below it."""
    positive = [1.0]
    for digit in range(7):
        bounds = np.linspace(0.1, 1, 2**digit + 1)
        positive += list(10.0 ** (digit - 6) * (bounds[:-1] + bounds[1:]) / 2)
    return np.sort([0.0, *positive, *(-x for x in positive if x != 1)])


def dynamic(x: np.ndarray) -> np.ndarray:
    """Numbers of [−1, 1], rounded to the nearest of the dynamic table."""
    table = dynamic_table()
    return table[np.searchsorted((table[1:] + table[:-1]) / 2, x)]


def in_blocks(code: Rounding, size: int) -> Rounding:
    """Rounds blocks of a matrix's rows, each by the largest of its entries."""

    def rounded(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(-1, min(size, len(x)), x.shape[1])
        scales = np.abs(blocks).max(axis=1, keepdims=True).astype(ml_dtypes.bfloat16)
        scales = scales.astype(np.float64)
        return (code(blocks / np.where(scales == 0, 1, scales)) * scales).reshape(x.shape)

    return rounded


ROUNDINGS: dict[str, Rounding] = {
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64),
    **{
        f"{code.__name__}, blocks of {size}": in_blocks(code, size)
        for code in (linear, dynamic)
        for size in (16, 32, 64, 128)
    },
}


def momenta() -> Iterator[list[np.ndarray]]:
    """Each matrix of the decoder at the steps from each start on."""
    trainer = Trainer(WORKLOADS["dense-small"], ARMS["muon_moonlight"])
    runs: dict[tuple[int, str], list[np.ndarray]] = {}
    for step, state, _ in trainer.states(RATES, 0):
        [(_, trace)] = optax.tree.get_all_with_path(state["opt_state"], "trace")
        for path, leaf in jax.tree.leaves_with_path(trace):
            for start in STARTS:
                if start <= step < start + STEPS:
                    matrix = np.asarray(leaf, np.float64).reshape(len(leaf), -1)
                    name = jax.tree_util.keystr(path)
                    runs.setdefault((start, name), []).append(matrix)
    yield from runs.values()


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def error(exact: list[np.ndarray], rounding: Rounding) -> float:
    """The relative error of the polar factor of the last Nesterov momentum."""
    grads = [new - MU * old for old, new in itertools.pairwise(exact)]
    kept = exact[0]
    for grad in grads:
        new = MU * kept + grad
        kept = rounding(new)
    wanted, found = (polar(MU * m + grads[-1]) for m in (exact[-1], new))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main() -> None:
    """Prints the table."""
    runs = list(momenta())
    print("| momentum | error of the polar factor |\n|---|--:|", flush=True)
    for name, rounding in ROUNDINGS.items():
        mean = np.mean([error(exact, rounding) for exact in runs])
        print(f"| {name} | {mean:.3f} |", flush=True)


if __name__ == "__main__":
    main()
