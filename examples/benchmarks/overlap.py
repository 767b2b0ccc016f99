"""Collectives of a compiled program that run beside products, and those that do not.

    python -m examples.benchmarks.overlap hlo/*.txt

A scheduled program prints its instructions in the order in which they are issued. Between
an asynchronous start and its done, a device computes what stands there. A collective is
*exposed* if it is synchronous, or if no product stands between: then the device waits.
One that a kernel runs beside products of its own is not.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from examples.benchmarks.hlo_cost import COLLECTIVES, bytes_moved, flops_of
from examples.benchmarks.hlo_program import Run, parse, runs


class Beside(NamedTuple):
    """A collective, and the products between its start and its done.

    Attributes:
      kind: Its opcode.
      nbytes: As of :mod:`examples.benchmarks.hlo_cost`, for all times that it runs.
      flops: Of the products, likewise, or of those of the kernel that runs it.
    """

    kind: str
    nbytes: int
    flops: int

    @property
    def is_exposed(self) -> bool:
        return not self.flops


def collectives(text: str) -> Iterator[Beside]:
    """The collectives of a compiled program, in the order in which they end."""
    program, entry = parse(text)
    issued = list(runs(program, entry))
    started: dict[tuple[int, str], int] = {}
    for index, run in enumerate(issued):
        opcode = run.instruction.opcode
        kind = opcode.removesuffix("-start").removesuffix("-done")
        if kind not in COLLECTIVES:
            continue
        if opcode.endswith("-start"):
            started[id(run.computation), run.instruction.name] = index
            continue
        beside: Sequence[Run] = ()
        if opcode.endswith("-done"):
            [start] = run.instruction.operands
            beside = issued[started[id(run.computation), start] : index]
        elif run.place.fused:
            beside = _kernel(issued, index)
        nbytes = run.place.times * bytes_moved(run.instruction, run.computation)
        yield Beside(kind, nbytes, _flops(beside))


def exposed_bytes(text: str) -> int:
    """The bytes of exposed collectives."""
    return sum(one.nbytes for one in collectives(text) if one.is_exposed)


def _kernel(issued: Sequence[Run], index: int) -> Sequence[Run]:
    """Everything inside of the kernel in which one instruction is."""
    first = next(i for i in range(index, -1, -1) if not issued[i].place.fused)
    after = (i for i in range(index, len(issued)) if not issued[i].place.fused)
    return issued[first : next(after, len(issued))]


def _flops(between: Sequence[Run]) -> int:
    return sum(
        run.place.times * flops_of(run.instruction, run.computation) for run in between
    )


def main(paths: list[str]) -> None:
    for path in paths:
        print(path)
        for kind, nbytes, flops in collectives(pathlib.Path(path).read_text()):
            print(f"  {kind}: {nbytes / 1e6:.4g} MB beside {flops / 1e9:.4g} GFLOP")


if __name__ == "__main__":
    main(sys.argv[1:])
