"""What one device sends and multiplies in a compiled program, from the program's text."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from examples.benchmarks.hlo import Groups, Instruction, Run

# By the names that programs of several TPU slices have for them.
TRANSFERS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
COLLECTIVES = {*TRANSFERS.values(), "ragged-all-to-all"}
# The batch, heads and positions of what cuDNN's attention computes, but never stores.
ATTENTION = (
    r'"intermediate_tensor_shape": \{"element_type": "\w+", "dimensions": (\[[^]]*\])'
)


class Collective(NamedTuple):
    """A collective operation of the text, which may run many times."""

    kind: str
    nbytes: int
    operand: int  # The bytes that each device hands to it.
    times: int
    looped: bool
    flops: int  # Of products beside it, all times that it runs.
    scope: str
    groups: Groups  # Devices that take part together, two of a permutation; () for all.

    @property
    def total(self) -> int:
        """The bytes of all times that it runs."""
        return self.nbytes * self.times

    def sent(self, devices: int) -> int:
        """The bytes that each of a program's devices sends; none to itself.

        An all-reduce is a reduce-scatter and an all-gather.
        """
        if self.kind == "collective-permute":
            return self.total
        together = len(self.groups[0]) if self.groups else devices
        ways = 2 if self.kind == "all-reduce" else 1
        return ways * self.total * (together - 1) // together


def collectives(issued: Sequence[Run], by_hosts: bool = False) -> Iterator[Collective]:
    """In the order in which they end; those that hosts send, too, if told so."""
    flops = [0, *itertools.accumulate(map(flops_of, issued))]
    started: dict[tuple[int, str], int] = {}
    chains = set()
    for index, (instruction, computation, place) in enumerate(issued):
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start").removesuffix("-done")
        if by_hosts and opcode == "send":
            transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
            kind = TRANSFERS.get(transfer or "", "")
        if kind not in COLLECTIVES:
            continue
        if opcode.endswith("-start"):
            started[id(computation), instruction.name] = index
            continue
        # One that runs beside a chain of kernels is printed in each of them.
        if chain := instruction.attribute(r'chain_id="(\d+)"'):
            if (kind, chain) in chains:
                continue
            chains.add((kind, chain))
        start, first, last = instruction, index, index
        if opcode.endswith("-done"):
            first = started[id(computation), instruction.operands[0]]
            start = issued[first].instruction
        elif place.fused:  # Beside all of its kernel.
            while issued[first].place.fused:
                first -= 1
            while last < len(issued) and issued[last].place.fused:
                last += 1
        else:  # In a call that runs beside what comes before its end.
            while first and issued[first].computation is computation:
                first -= 1
            call, caller, _ = issued[first]
            if not call.opcode.endswith("-start"):
                first = index
            while call.opcode.endswith("-start") and not (
                issued[last].computation is caller
                and call.name in issued[last].instruction.operands
            ):
                last += 1
        operand = sum(computation[name].nbytes for name in start.operands)
        nbytes = operand if kind == "reduce-scatter" else instruction.nbytes
        beside = flops[last] - flops[first]
        yield Collective(
            kind, nbytes, operand, place.times, place.looped, beside, place.scope,
            start.groups,
        )  # fmt: skip


def flops_of(run: Run) -> int:
    """The FLOPs of a product; of a fusion, those of what it runs are counted apart."""
    instruction, computation, place = run
    if instruction.attribute("(ragged_dot_tiling)="):  # A kernel: rows by groups.
        *_, rows, _ = instruction.operands
        each = 2 * math.prod(instruction.shape) * computation[rows].shape[-1]
    elif scores := instruction.attribute(ATTENTION):
        products = 5 if "fmhaSoftmaxBackward" in instruction.attributes else 2
        pairs = math.prod(int(size) for size in re.findall(r"\d+", scores))
        each = 2 * products * pairs * computation[instruction.operands[0]].shape[-1]
    elif '"__cublas$' in instruction.attributes:
        axis = int(instruction.attribute(r'"lhs_contracting_dimensions":\["(\d+)') or 0)
        contracted = computation[instruction.operands[0]].shape[axis]
        each = 2 * math.prod(instruction.arrays[0][1]) * contracted
    elif instruction.opcode in {"dot", "convolution"}:
        left, right = (computation[name].shape for name in instruction.operands)
        if instruction.opcode == "convolution":
            each = _convolution_flops(instruction, left, right)
        else:
            axes = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
            contracted = math.prod(left[int(axis)] for axis in axes.split(",") if axis)
            each = 2 * math.prod(instruction.shape) * contracted
    else:
        return 0
    return place.times * each // place.matrices


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
    shape = instruction.shape
    outputs = shape[of_out.index("b")] * shape[of_out.index("f")]
    flops = 2 * outputs * right[of_right.index("i")]
    for axis in range(len(of_left) - 2):
        stride, dilation, base, padding = (
            int(window[key].split("x")[axis].split("_")[0]) if key in window else default
            for key, default in (
                ("stride", 1), ("rhs_dilate", 1), ("lhs_dilate", 1), ("pad", 0)
            )
        )  # fmt: skip
        end = (left[of_left.index(str(axis))] - 1) * base + 1
        places = (
            out * stride + inside * dilation - padding
            for out in range(shape[of_out.index(str(axis))])
            for inside in range(right[of_right.index(str(axis))])
        )
        # Pairs of a place of the output and one of the window that meet an input.
        flops *= sum(0 <= place < end and place % base == 0 for place in places)
    return flops
