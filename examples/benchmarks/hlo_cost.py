"""What one device does in a compiled program, read from the program's text.

    python -m examples.benchmarks.hlo_cost hlo/*.txt

XLA's own ``cost_analysis()`` counts a loop's body once, and says nothing of collectives.
Here a body counts as often as it runs; every branch of a conditional counts.

- *Cycles* are the TPU compiler's estimates, where the text has them: of kernels, a fusion
  being one. Collectives, grouped products (``ragged_dot``) and kernels by Pallas have no
  estimate and count as none.
- *Bytes* of a collective are those of its results on one device, and of its operands for
  reduce-scatter: in either case of the whole that is gathered or reduced.
- *Traffic* is what kernels read and write: :mod:`examples.benchmarks.hlo_traffic`.
- *FLOPs* are those of matrix products and convolutions, without kernels by Pallas.

The gradient of a grouped product is one product for each group, with a mask of the rows
of the others, which the kernel skips. The compiler's estimate knows nothing of the mask:
it is divided by the number of groups, as if every block of rows were one group's.
"""

import dataclasses
import math
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from examples.benchmarks import hlo_traffic
from examples.benchmarks.hlo_groups import groups
from examples.benchmarks.hlo_program import (
    CALLS,
    Computation,
    Instruction,
    Program,
    Run,
    parse,
    runs,
)

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
# What only names an array, or calls something else.
NO_KERNELS = CALLS - {"fusion"} | {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}


class Collective(NamedTuple):
    """A collective operation of the text, which may run many times."""

    kind: str
    nbytes: int
    times: int
    looped: bool
    devices: int = 0  # In a group; 0 if the text does not list the groups.

    @property
    def total(self) -> int:
        return self.nbytes * self.times

    @property
    def sent(self) -> int:
        """The bytes that each device sends; what it keeps for itself is not counted."""
        if self.kind == "collective-permute":
            return self.total
        return self.total * (self.devices - 1) // self.devices


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one device for one run of the program.

    Attributes:
      cycles: As the compiler estimates them.
      flops: Of products.
      kernels: How often one is launched, copies among them.
      traffic: The bytes that kernels read and write.
      collectives: Those of the text.
    """

    cycles: int
    flops: int
    kernels: int
    traffic: hlo_traffic.Traffic
    collectives: tuple[Collective, ...]

    @property
    def collective_bytes(self) -> int:
        return sum(c.total for c in self.collectives)

    @property
    def looped_bytes(self) -> int:
        """The bytes of collectives inside loops, which cannot be merged with others."""
        return sum(c.total for c in self.collectives if c.looped)


def of(text: str) -> Cost:
    """The cost of the text of a compiled program, ``compiled.as_text()``."""
    return by_scope(text, ())[""]


def by_scope(text: str, scopes: Collection[str]) -> dict[str, Cost]:
    """The same of its parts, by the `jax.named_scope` that they were traced in.

    A kernel that was fused from two scopes has that of its last operation. What is in
    none of the scopes is "".
    """
    program, entry = parse(text)
    parts: dict[str, list[Run]] = {scope: [] for scope in (*scopes, "")}
    for run in runs(program, entry, scopes):
        parts[run.place.scope].append(run)
    return {scope: _cost(part, program) for scope, part in parts.items()}


def _cost(part: Iterable[Run], program: Program) -> Cost:
    cycles = flops = kernels = read = written = 0
    collectives = []
    chains: set[tuple[str, str | None]] = set()
    for instruction, computation, place in part:
        if not place.fused:
            cycles += place.times * _cycles(instruction) // place.groups
        if not place.fused and _is_kernel(instruction):
            kernels += place.times
            traffic = hlo_traffic.of(instruction, computation, program)
            read += place.times * traffic.read
            written += place.times * traffic.written
        flops += place.times * flops_of(instruction, computation) // place.groups
        kind = instruction.opcode.removesuffix("-done")
        # One that runs beside a chain of kernels is printed in each of them.
        chain = instruction.attribute(r'chain_id="(\d+)"')
        if kind in COLLECTIVES and (chain is None or (kind, chain) not in chains):
            chains.add((kind, chain))
            nbytes = bytes_moved(instruction, computation)
            devices = len(next(iter(groups(instruction)), ()))
            collectives.append(
                Collective(kind, nbytes, place.times, place.looped, devices)
            )
    traffic = hlo_traffic.Traffic(read, written)
    return Cost(cycles, flops, kernels, traffic, tuple(collectives))


def _is_kernel(instruction: Instruction) -> bool:
    """Whether something is launched; the second half of an asynchronous pair is not."""
    opcode = instruction.opcode
    return opcode not in NO_KERNELS and not opcode.endswith("-done")


def _cycles(instruction: Instruction) -> int:
    if instruction.opcode in CALLS - {"fusion"} | {"while"}:
        return 0  # What they run is counted.
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)


def bytes_moved(collective: Instruction, computation: Computation) -> int:
    """Bytes; an asynchronous pair is counted where it is done, and its start is not."""
    if not collective.opcode.startswith("reduce-scatter"):
        return collective.nbytes
    start = collective
    if collective.opcode.endswith("-done"):
        start = computation[collective.operands[0]]
    return sum(computation[name].nbytes for name in start.operands)


def flops_of(instruction: Instruction, computation: Computation) -> int:
    """The FLOPs of a product; of a fusion, those of what it runs are counted apart."""
    if instruction.attribute("(ragged_dot_tiling)="):  # A kernel: rows by groups.
        *_, rows, _ = instruction.operands
        return 2 * math.prod(instruction.shape) * computation[rows].shape[-1]
    if instruction.opcode not in {"dot", "convolution"}:
        return 0
    left, right = (computation[name].shape for name in instruction.operands)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, left, right)
    axes = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    contracted = math.prod(left[int(axis)] for axis in axes.split(",") if axis)
    return 2 * math.prod(instruction.shape) * contracted


def _convolution_flops(
    instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]
) -> int:
    """Without the products with padding; on a TPU batched products are convolutions."""
    labels = instruction.attribute(r"dim_labels=(\w+_\w+->\w+)") or ""
    of_left, of_right, of_out = re.split(r"_|->", labels)
    window = dict(
        part.split("=")
        for part in (instruction.attribute(r"window=\{([^}]*)\}") or "").split()
    )

    def along(key: str, axis: int, default: str) -> str:
        return window[key].split("x")[axis] if key in window else default

    def products(axis: int) -> int:
        """Pairs of a place of the output and one of the window that meet an input."""
        label = str(axis)
        stride, dilation, base = (
            int(along(key, axis, "1")) for key in ("stride", "rhs_dilate", "lhs_dilate")
        )
        padding = int(along("pad", axis, "0_0").split("_")[0])
        end = (left[of_left.index(label)] - 1) * base + 1
        places = (
            out * stride + inside * dilation - padding
            for out in range(instruction.shape[of_out.index(label)])
            for inside in range(right[of_right.index(label)])
        )
        return sum(0 <= place < end and place % base == 0 for place in places)

    spatial = math.prod(products(axis) for axis in range(len(of_left) - 2))
    outputs = instruction.shape[of_out.index("b")] * instruction.shape[of_out.index("f")]
    return 2 * outputs * right[of_right.index("i")] * spatial


def main(paths: list[str]) -> None:
    for path in paths:
        cost = of(pathlib.Path(path).read_text())
        print(f"{path}: {cost.cycles / 1e6:.4g} Mcycles, {cost.flops / 1e9:.4g} GFLOP")
        counts: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for collective in cost.collectives:
            kind = f"{collective.kind}{' in a loop' if collective.looped else ''}"
            counts[kind] += collective.times
            nbytes[kind] += collective.total
        for kind, count in counts.items():
            print(f"  {kind}: {count}, {nbytes[kind] / 1e6:.4g} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
