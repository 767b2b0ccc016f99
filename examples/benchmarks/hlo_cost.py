"""What one device does in a compiled program, read from the program's text.

    python -m examples.benchmarks.hlo_cost hlo/*.txt

XLA's own ``cost_analysis()`` counts a loop's body once, and says nothing of collectives.
Here a body counts as often as it runs; every branch of a conditional counts.

- *Cycles* are the TPU compiler's estimates, where the text has them: of kernels, a fusion
  being one. Collectives and copies have no estimate and count as none.
- *Bytes* of a collective are those of its results on one device, and of its operands for
  reduce-scatter: in either case of the whole that is gathered or reduced.
- *FLOPs* are those of matrix products and convolutions.
"""

import dataclasses
import math
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
BITS = {"pred": 8, "bf16": 16} | {
    f"{kind}{bits}": bits
    for kind, sizes in {"s": (4, 8, 16, 32, 64), "f": (16, 32, 64)}.items()
    for bits in sizes
}
BITS |= {f"u{bits}": bits for bits in (4, 8, 16, 32, 64)}
CALLS = {"async-start", "call", "conditional", "fusion"}
CALLED = re.compile(
    r"(?:calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\(([^)]*)\)")
NAME = re.compile(r"%([\w.-]+)")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line: ``%name = type opcode(arguments), attributes``."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return NAME.findall(self.arguments)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an instruction's one array."""
        return _arrays(self.type)[0][1]

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays; contexts of asynchronous pairs are none."""
        return sum(
            BITS.get(dtype, 0) * math.prod(shape) // 8
            for dtype, shape in _arrays(self.type)
        )

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


Computation = dict[str, Instruction]  # In the order of the text: the last is the root.
Program = dict[str, Computation]


class Run(NamedTuple):
    """An instruction, the computation that it stands in, and how often it runs."""

    instruction: Instruction
    computation: Computation
    times: int
    looped: bool
    fused: bool


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
        return self.total * (self.devices - 1) // self.devices


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one device for one run of the program."""

    cycles: int
    flops: int
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
    program, entry = _parse(text)
    cycles = flops = 0
    collectives = []
    chains: set[tuple[str, str | None]] = set()
    for run in _runs(program, entry):
        instruction = run.instruction
        if not run.fused:
            cycles += run.times * _cycles(instruction)
        flops += run.times * _flops(instruction, run.computation)
        kind = instruction.opcode.removesuffix("-done")
        # One that runs beside a chain of kernels is printed in each of them.
        chain = instruction.attribute(r'chain_id="(\d+)"')
        if kind in COLLECTIVES and (chain is None or (kind, chain) not in chains):
            chains.add((kind, chain))
            nbytes = _moved(instruction, run.computation)
            devices = _devices(instruction)
            collectives.append(Collective(kind, nbytes, run.times, run.looped, devices))
    return Cost(cycles, flops, tuple(collectives))


def _devices(instruction: Instruction) -> int:
    """The size of a collective's groups: listed, counted, or by axes of a mesh."""
    listed = instruction.attribute(r"replica_groups=\{\{([\d,]*)\}")
    if listed:
        return len(listed.split(","))
    counted = instruction.attribute(r"replica_groups=\[\d+,(\d+)\]")
    if counted:
        return int(counted)
    named = instruction.attribute(r"replica_groups=(mesh\[[^\]]*\] \{[^}]*\})")
    if not named:
        return 0
    mesh, _, axes = named.partition("]")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes))


def _parse(text: str) -> tuple[Program, str]:
    program: Program = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            current = program.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            name, type_, opcode, arguments = found.groups()
            attributes = line[found.end() :]
            current[name] = Instruction(name, type_, opcode, arguments, attributes)
    return program, entry


def _runs(
    program: Program, name: str, times: int = 1, looped: bool = False, fused: bool = False
) -> Iterator[Run]:
    computation = program[name]
    for instruction in computation.values():
        yield Run(instruction, computation, times, looped, fused)
        if instruction.opcode == "while":
            body = instruction.attribute(r"body=%?([\w.-]+)") or ""
            trips = _trips(instruction, computation, program)
            yield from _runs(program, body, times * trips, True, fused)
        elif instruction.opcode in CALLS:
            fused_there = fused or instruction.opcode == "fusion"
            for called in CALLED.findall(instruction.attributes):
                for inner in re.findall(r"[\w.-]+", called):
                    yield from _runs(program, inner, times, looped, fused_there)


def _trips(loop: Instruction, computation: Computation, program: Program) -> int:
    """How often a loop's body runs: as the compiler noted, or from its counter."""
    if noted := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(noted)
    try:
        condition = program[loop.attribute(r"condition=%?([\w.-]+)") or ""]
        body = program[loop.attribute(r"body=%?([\w.-]+)") or ""]
        test = _root(condition)
        counter, limit = test.operands
        if test.attribute(r"direction=(\w+)") != "LT":
            raise ValueError("not to a limit from below")
        index = int(condition[counter].attribute(r"index=(\d+)") or "")
        first = computation[loop.operands[0]].operands[index]
        increment = body[_root(body).operands[index]]
        if increment.opcode != "add":
            raise ValueError("not by addition")
        [step] = [name for name in increment.operands if body[name].opcode == "constant"]
        start = _constant(first, computation)
        distance = _constant(limit, condition) - start
        return -(-distance // _constant(step, body))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"how often does {loop.name} run? {loop}") from error


def _root(computation: Computation) -> Instruction:
    return list(computation.values())[-1]


def _constant(name: str, computation: Computation) -> int:
    instruction = computation[name]
    if instruction.opcode == "copy":
        return _constant(instruction.operands[0], computation)
    if instruction.opcode != "constant":
        raise ValueError(f"{name} is no constant")
    return int(instruction.arguments)


def _cycles(instruction: Instruction) -> int:
    if instruction.opcode in CALLS - {"fusion"} | {"while"}:
        return 0  # What they run is counted.
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)


def _moved(collective: Instruction, computation: Computation) -> int:
    """Bytes; an asynchronous pair is counted where it is done, and its start is not."""
    if not collective.opcode.startswith("reduce-scatter"):
        return collective.nbytes
    start = collective
    if collective.opcode.endswith("-done"):
        start = computation[collective.operands[0]]
    return sum(computation[name].nbytes for name in start.operands)


def _flops(instruction: Instruction, computation: Computation) -> int:
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


def _arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in ARRAY.findall(type_)
    ]


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
