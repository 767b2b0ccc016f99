"""What one device sends and multiplies in a compiled program, from the program's text."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
}  # fmt: skip
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\((.*)")
# Such as bf16[8,16], f8e4m3fn[2] and pred[], of which an entry has 16, 8 and 8 bits.
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_RUNS = re.compile(  # What the other opcodes apply is no more than an addition.
    r"(fusion|call|while|conditional|async-start)(-start)?$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|\w*computations?)=(\{[^}]*\}|%?[\w.-]+)")


class Instruction(NamedTuple):
    """One line: ``%name = type opcode(arguments), attributes``."""

    name: str
    type: str
    opcode: str
    rest: str

    def attribute(self, pattern: str) -> str:
        """What the group of a pattern matches in its arguments and attributes."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.partition(")")[0])

    @property
    def arrays(self) -> list[tuple[int, list[int]]]:
        """The bits of an entry and the shape of each of its arrays."""
        found = _ARRAY.findall(self.type)
        return [
            (int(bits or 8), [int(x) for x in sizes.split(",") if x])
            for bits, sizes in found
        ]

    def devices(self, all_of_them: int) -> int:
        """How many devices take part in a collective together."""
        if listed := self.attribute(r"(?:replica_groups|pairs)=\{\{([\d,]+)\}"):
            return len(listed.split(","))
        if counted := self.attribute(r"replica_groups=\[[\d,]*?(\d+)\]<="):
            return int(counted)
        axes = self.attribute(r"replica_groups=mesh.*? \{('.*?)\}")
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", self.rest))
        # 'fsdp':(2)2 is a part of an axis, of length 2.
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes)
        named = (int(part or sizes[name]) for name, part in parts)
        return math.prod(named) if axes else all_of_them


Program = dict[str, dict[str, Instruction]]  # The instructions of each computation.


def parse(text: str) -> tuple[Program, str]:
    """The program, and the name of the computation that it begins with."""
    program: Program = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header[2]
            entry = current if header[1] else entry
            program[current] = {}
        elif found := _INSTRUCTION.match(line):
            program[current][found[1]] = Instruction(*found.groups())
    return program, entry


class Run(NamedTuple):
    """An instruction, how often it runs, and what stands beside it."""

    instruction: Instruction
    times: int
    looped: bool
    beside: dict[str, Instruction]


def runs(
    program: Program, name: str, times: int = 1, looped: bool = False
) -> Iterator[Run]:
    """All that a computation runs; a loop whose length is not noted counts once."""
    for x in program[name].values():
        yield Run(x, times, looped, program[name])
        if _RUNS.match(x.opcode):
            loop = x.opcode == "while"
            trips = int(x.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)
            for called in _CALLED.findall(x.rest):
                for inner in re.findall(r"[\w.-]+", called):
                    yield from runs(program, inner, times * trips, looped or loop)


def sent_by(run: Run, devices: int) -> tuple[str, int]:
    """The kind of a collective, and the bytes that each device sends; "" if it is none.

    An all-reduce is a reduce-scatter and an all-gather; nothing is sent to oneself.
    """
    x, times, _, beside = run
    kind = x.opcode.removesuffix("-done")
    if kind not in _COLLECTIVES:
        return "", 0
    nbytes = times * sum(bits * math.prod(shape) // 8 for bits, shape in x.arrays)
    start = beside[x.operands[0]] if x.opcode.endswith("-done") else x
    together = start.devices(devices)
    if kind == "collective-permute":
        return kind, nbytes
    if kind == "reduce-scatter":
        return kind, nbytes * (together - 1)
    return kind, (1 + (kind == "all-reduce")) * nbytes * (together - 1) // together


def flops_of(run: Run) -> int:
    """The FLOPs of a product of matrices; of other instructions 0."""
    x, times, _, beside = run
    if x.opcode not in ("dot", "convolution") and '"__cublas$' not in x.rest:
        return 0
    left, right = (beside[name].arrays[0][1] for name in x.operands[:2])
    if x.opcode == "convolution":  # A product on a TPU, one of several if it is dilated.
        inputs = x.attribute(r"dim_labels=\w+_(\w+)->").index("i")
        window = x.attribute(r"window=\{size=([\dx]+)").split("x")
        taps = 1 if "lhs_dilate" in x.rest else math.prod(int(n or 1) for n in window)
        contracted = right[inputs] * taps
    else:
        axes = x.attribute(r'lhs_contracting_dim\w*"?[=:][\[{]([\d,"]*)').replace('"', "")
        contracted = math.prod(left[int(axis)] for axis in axes.split(",") if axis)
    return 2 * times * math.prod(x.arrays[0][1]) * contracted
