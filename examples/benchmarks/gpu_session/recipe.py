"""Steps on the matrices of a mixture of experts, as many layers as fit one card.

A public recipe for JAX trains 26 layers, 2560 wide, with 64 experts of 512 in each. Here
are 8 of them: 2.2 billion parameters, whose weights, gradients and momentum in float32
take 27 GB.
"""

import functools
from collections.abc import Iterator, Sequence

from examples.benchmarks.gpu_session import figure
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.gpu_session.stepping import TIME, step_measured
from examples.benchmarks.gpu_session.steps import of_shapes
from examples.benchmarks.models import Leaves
from examples.benchmarks.shapes import Shapes, copies

LAYERS, STEPS = 8, 3


def block(width: int, experts: int, hidden: int) -> Shapes:
    return {
        **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
        **dict.fromkeys(("gate", "up"), (experts, width, hidden)),
        "down": (experts, hidden, width),
    }


def matrices(tiny: bool) -> Leaves:
    shapes = block(16, 2, 8) if tiny else block(2560, 64, 512)
    return of_shapes(copies(1 if tiny else LAYERS, shapes))


def cases(tiny: bool) -> Sequence[Case]:
    name = "2 experts" if tiny else f"{LAYERS} layers of 64 experts of 2560×512"
    return [
        Case(name, optimizer, functools.partial(_measure, optimizer, tiny))
        for optimizer in ("muon", "orscale", "optax.contrib.muon")
    ]


def _measure(optimizer: str, tiny: bool) -> Iterator[Measured]:
    return step_measured(optimizer, matrices(tiny), 32 if tiny else 8192, STEPS)


STAGE = Stage(cases, figure.of_quantity(TIME, "A step on many experts: quartiles"))
