"""Steps of five optimizers on the shapes of five models.

The step of `optax.contrib.muon` on 500 small matrices is left out: its program has
thousands of kernels, and compiling it takes longer than a stage may.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks.gpu_session import figure
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.gpu_session.stepping import OPTIMIZERS, TIME, step_measured
from examples.benchmarks.models import Leaf, Leaves, gpt2
from examples.benchmarks.shapes import CASES, Shapes, copies

SMALL = "500 matrices of 32×64"


def of_shapes(shapes: Shapes) -> Leaves:
    """Matrices, or batches of them."""
    return {
        name: Leaf(shape, P(), Dims(len(shape) - 2, len(shape) - 1))
        for name, shape in shapes.items()
    }


MODELS: dict[str, Callable[[], Leaves]] = {
    "GPT-2 124M": gpt2,
    SMALL: lambda: of_shapes(CASES["tiny"]),
    "4 blocks of a 1.1B model": lambda: of_shapes(copies(4, CASES["1.1B"])),
    "64 experts of 2048×1408": lambda: of_shapes(CASES["experts"]),
    "DavidNet": lambda: of_shapes(CASES["davidnet"]),
}
TINY: dict[str, Callable[[], Leaves]] = {
    "experts": lambda: {**of_shapes({"up": (2, 8, 16)}), "bias": Leaf((8,))}
}


def cases(tiny: bool) -> Sequence[Case]:
    largest = 32 if tiny else 8192
    return [
        Case(model, name, functools.partial(_measure, name, leaves, largest))
        for model, leaves in (TINY if tiny else MODELS).items()
        for name in OPTIMIZERS
        if (model, name) != (SMALL, "optax.contrib.muon")
    ]


def _measure(name: str, leaves: Callable[[], Leaves], largest: int) -> Iterator[Measured]:
    return step_measured(name, leaves(), largest)


STAGE = Stage(cases, figure.of_quantity(TIME, "A step of the optimizer alone: quartiles"))
