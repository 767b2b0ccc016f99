"""The text of a compiled program, ``compiled.as_text()``, as instructions that run."""

import itertools
import math
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (4, 8, 16, 32, 64)}
FUSIONS = {"fusion", "fusion-start"}
CALLS = FUSIONS | {"async-start", "call", "call-start", "conditional"}
CALLED = re.compile(
    r"(?:calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\(([^)]*)\)")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")

# The devices that take part in a collective together. Devices 0 to 3 of slices 1 and 2,
# each with its counterpart: {1,2}x{0:3}.
BY_SLICES = r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+)(?::(\d+))?\}"'
# {0,1},{2,3}, or pairs of source and target such as {0->2},{2->0}.
LISTED = r"(?:_xla_megascale_target|source_target_pairs|replica_groups)=\{(\{.*?\})\}"
# Numbers in a shape, transposed, in rows: [4,2]<=[2,4]T(1,0).
COUNTED = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
# Along axes of a mesh: mesh['dcn'=2,'fsdp'=4] {'dcn'}. 'fsdp':(2)2 is a part of an axis,
# of length 2, after a part of length 2.
NAMED = (
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{((?:'\w+'(?::\(\d+\)\d+)?,?)+)\}"
)
# The runtime of several TPU slices numbers the devices of each from a multiple of this.
PER_SLICE = 100_000

Groups = tuple[tuple[int, ...], ...]


class Instruction(NamedTuple):
    """One line: ``%name = type opcode(arguments), attributes``."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of each of its arrays."""
        return [
            (dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in ARRAY.findall(self.type)
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an instruction's one array."""
        return self.arrays[0][1]

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays; contexts of asynchronous pairs are none."""
        return sum(
            BITS.get(kind, 0) * math.prod(shape) // 8 for kind, shape in self.arrays
        )

    @property
    def matrices(self) -> int:
        """Of a grouped product that skips, for each of them, the rows of the others."""
        masked = self.attribute(r'"mask_dim_to_iteration_index":(\["\d)')
        return self.shape[0] if masked else 1

    @property
    def traced(self) -> list[str]:
        """The scopes that it was traced in; empty for what the compiler made itself."""
        _, *scopes = (self.attribute(r'op_name="([^"]*)"') or "").split("/")
        return scopes

    @property
    def groups(self) -> Groups:
        """The devices of a collective that take part together; () if they are all.

        Raises:
          ValueError: If they are listed in a form that is unknown.
        """
        text = self.attributes
        if found := re.search(BY_SLICES, text):
            devices = range(int(found[2]), int(found[3] or found[2]) + 1)
            slices = [PER_SLICE * number for number in _integers(found[1])]
            return tuple(tuple(first + device for first in slices) for device in devices)
        if found := re.search(LISTED, text):
            listed = re.findall(r"\{([^{}]+)\}", found[1])
            return tuple(tuple(map(int, re.findall(r"\d+", group))) for group in listed)
        if found := re.search(COUNTED, text):
            numbers = _numbers(found[2], found[3]).reshape(_integers(found[1]))
        elif found := re.search(NAMED, text):
            numbers = _along_axes(*found.groups())
        elif re.search(r"replica_groups=(?!\{\})", text):
            raise ValueError(f"which devices take part in {self}?")
        else:
            return ()
        return tuple(map(tuple, numbers.tolist()))

    def attribute(self, pattern: str) -> str | None:
        """What the group of a pattern matches in its attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


Computation = dict[str, Instruction]  # In the order of the text: the last is the root.
Program = dict[str, Computation]


class Place(NamedTuple):
    """Where in a program something runs."""

    times: int = 1
    looped: bool = False
    fused: bool = False  # Inside of another kernel.
    scope: str = ""  # What it, or what runs it, was traced in.
    matrices: int = 1  # Of the product that it is a part of.


ONCE = Place()


class Run(NamedTuple):
    """An instruction, the computation that it stands in, and where that runs."""

    instruction: Instruction
    computation: Computation
    place: Place


def parse(text: str) -> tuple[Program, str]:
    """The program, and the name of the computation that it begins with."""
    program: Program = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            current = program.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}}") and current:  # The end of attributes in several lines.
            name, last = current.popitem()
            current[name] = last._replace(attributes=last.attributes + line)
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            name, kind, opcode, arguments = found.groups()
            rest = line[found.end() :]
            current[name] = Instruction(name, kind, opcode, arguments, rest)
    return program, entry


def runs(
    program: Program,
    name: str,
    scopes: Collection[str] = (),
    place: Place = ONCE,
    unknown_trips: int | None = None,
) -> Iterator[Run]:
    """Everything that a computation runs, its loops and calls, too.

    Args:
      program: All computations.
      name: Which one.
      scopes: Names that were given by `jax.named_scope`. The outermost one counts.
      place: Where it runs itself.
      unknown_trips: How often a loop counts whose length nothing tells; None to raise.
    """
    computation = program[name]
    found = _scopes(computation, scopes)
    for instruction in computation.values():
        here = place._replace(
            scope=place.scope or found[instruction.name],
            matrices=place.matrices * instruction.matrices,
        )
        yield Run(instruction, computation, here)
        if instruction.opcode == "while":
            body = instruction.attribute(r"body=%?([\w.-]+)") or ""
            try:
                trips = _trips(instruction, computation, program)
            except ValueError:
                if unknown_trips is None:
                    raise
                trips = unknown_trips
            inside = here._replace(times=here.times * trips, looped=True)
            yield from runs(program, body, scopes, inside, unknown_trips)
        elif instruction.opcode in CALLS:
            inside = here._replace(fused=here.fused or instruction.opcode in FUSIONS)
            for called in CALLED.findall(instruction.attributes):
                for inner in re.findall(r"[\w.-]+", called):
                    yield from runs(program, inner, scopes, inside, unknown_trips)


def _scopes(computation: Computation, scopes: Collection[str]) -> dict[str, str]:
    """The scope of each instruction, or nothing.

    What the compiler made itself, such as an all-gather, belongs to what uses it first,
    and to what it uses where nothing of a scope uses it.
    """
    found = {
        name: next((scope for scope in instruction.traced if scope in scopes), "")
        for name, instruction in computation.items()
    }
    made = {name for name, instruction in computation.items() if not instruction.traced}
    for name in reversed(computation):
        for operand in made.intersection(computation[name].operands):
            found[operand] = found[name] or found[operand]
    for name in computation:
        if name in made:
            used = (found.get(operand, "") for operand in computation[name].operands)
            found[name] = found[name] or next(filter(None, used), "")
    return found


def _trips(loop: Instruction, computation: Computation, program: Program) -> int:
    """How often a loop's body runs: as the compiler noted, or from its counter."""
    if noted := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(noted)

    def constant(name: str, computation: Computation) -> int:
        instruction = computation[name]
        if instruction.opcode == "copy":
            return constant(instruction.operands[0], computation)
        if instruction.opcode != "constant":
            raise ValueError(f"{name} is no constant")
        return int(instruction.arguments)

    try:
        condition = program[loop.attribute(r"condition=%?([\w.-]+)") or ""]
        body = program[loop.attribute(r"body=%?([\w.-]+)") or ""]
        *_, test = condition.values()
        counter, limit = test.operands
        if test.attribute(r"direction=(\w+)") != "LT":
            raise ValueError("not to a limit from below")
        index = int(condition[counter].attribute(r"index=(\d+)") or "")
        first = computation[loop.operands[0]].operands[index]
        *_, root = body.values()
        increment = body[root.operands[index]]
        if increment.opcode != "add":
            raise ValueError("not by addition")
        [step] = [name for name in increment.operands if body[name].opcode == "constant"]
        distance = constant(limit, condition) - constant(first, computation)
        return -(-distance // constant(step, body))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"how often does {loop.name} run? {loop}") from error


def _along_axes(mesh: str, shape: str | None, order: str | None, axes: str) -> np.ndarray:
    """The numbers of devices along axes of a mesh, in rows: see ``NAMED``."""
    lengths = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    along = [
        (name, int(before or 1), int(before or 1) * int(size or lengths[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    # The axes, cut where the parts begin and end.
    parts = []
    for name, length in lengths.items():
        ends = {end for other, *ends in along if other == name for end in ends}
        cuts = sorted({1, length} | ends)
        parts += [(name, *cut) for cut in itertools.pairwise(cuts)] or [(name, 1, 1)]
    sizes = [end // start for _, start, end in parts]
    # Without device_ids the devices are in the order of their numbers.
    numbers = _numbers(shape or str(math.prod(sizes)), order).reshape(sizes)
    chosen = [
        index
        for name, start, end in along
        for index, (other, first, last) in enumerate(parts)
        if other == name and start <= first and last <= end
    ]
    moved = np.moveaxis(numbers, chosen, range(-len(chosen), 0))
    return moved.reshape(-1, math.prod(sizes[axis] for axis in chosen))


def _numbers(shape: str, order: str | None) -> np.ndarray:
    """The numbers of all devices, in a shape that is transposed."""
    numbers = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return numbers.transpose(_integers(order)) if order else numbers


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
