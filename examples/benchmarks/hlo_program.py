"""The text of a compiled program, ``compiled.as_text()``, as instructions that run."""

import math
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

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

    @property
    def groups(self) -> int:
        """Matrices of a grouped product that skips, for each, the rows of the others."""
        masked = self.attribute(r'"mask_dim_to_iteration_index":(\["\d)')
        return self.shape[0] if masked else 1

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def traced(self) -> list[str]:
        """The scopes that it was traced in; empty for what the compiler made itself."""
        _, *scopes = (self.attribute(r'op_name="([^"]*)"') or "").split("/")
        return scopes


Computation = dict[str, Instruction]  # In the order of the text: the last is the root.
Program = dict[str, Computation]


class Place(NamedTuple):
    """Where in a program something runs.

    Attributes:
      times: How often.
      looped: Whether in a loop.
      fused: Whether inside of another kernel.
      scope: What it, or what runs it, was traced in: a name of `jax.named_scope`.
      groups: Of the product that it is a part of, as of :class:`Instruction`.
    """

    times: int = 1
    looped: bool = False
    fused: bool = False
    scope: str = ""
    groups: int = 1


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
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            name, type_, opcode, arguments = found.groups()
            attributes = line[found.end() :]
            current[name] = Instruction(name, type_, opcode, arguments, attributes)
    return program, entry


def runs(
    program: Program, name: str, scopes: Collection[str] = (), place: Place = ONCE
) -> Iterator[Run]:
    """Everything that a computation runs, its loops and calls, too.

    Args:
      program: All computations.
      name: Which one.
      scopes: Names that were given by `jax.named_scope`. The outermost one counts.
      place: Where it runs itself.
    """
    computation = program[name]
    found = _scopes(computation, scopes)
    for instruction in computation.values():
        here = place._replace(
            scope=place.scope or found[instruction.name],
            groups=place.groups * instruction.groups,
        )
        yield Run(instruction, computation, here)
        if instruction.opcode == "while":
            body = instruction.attribute(r"body=%?([\w.-]+)") or ""
            trips = _trips(instruction, computation, program)
            inside = here._replace(times=here.times * trips, looped=True)
            yield from runs(program, body, scopes, inside)
        elif instruction.opcode in CALLS:
            fused = here.fused or instruction.opcode == "fusion"
            inside = here._replace(fused=fused)
            for called in CALLED.findall(instruction.attributes):
                for inner in re.findall(r"[\w.-]+", called):
                    yield from runs(program, inner, scopes, inside)


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


def _arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in ARRAY.findall(type_)
    ]
