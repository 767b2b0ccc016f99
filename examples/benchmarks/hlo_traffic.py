"""Bytes that the kernels of a compiled program read and write.

An array counts whole where a kernel reads it, and as large as its slices where the kernel
reads those alone. An array that is updated in place counts as large as what is new.
Collectives and kernels of Pallas count as any other: their operands and their results.
"""

from collections.abc import Iterable
from typing import NamedTuple

from examples.benchmarks.hlo_program import CALLED, Computation, Instruction, Program

SLICES = {"slice", "dynamic-slice"}
UPDATE = "dynamic-update-slice"


class Traffic(NamedTuple):
    """Bytes of one launch of a kernel."""

    read: int
    written: int


def of(instruction: Instruction, computation: Computation, program: Program) -> Traffic:
    """The traffic of an instruction that is a kernel."""
    operands = [computation[name].nbytes for name in instruction.operands]
    if instruction.opcode == "fusion":
        return _of_fusion(instruction, operands, program)
    if instruction.opcode in SLICES:
        return Traffic(instruction.nbytes, instruction.nbytes)
    if instruction.opcode == UPDATE:
        return Traffic(operands[1], operands[1])
    if instruction.opcode.endswith("-start"):  # Its results name its operands, too.
        return Traffic(sum(operands), sum(operands))
    return Traffic(sum(operands), instruction.nbytes)


def _of_fusion(fusion: Instruction, operands: Iterable[int], program: Program) -> Traffic:
    [called] = CALLED.findall(fusion.attributes)
    inner = program[called.lstrip("%")]
    parameters = {
        int(instruction.arguments): name
        for name, instruction in inner.items()
        if instruction.opcode == "parameter"
    }
    read = sum(
        _read(parameters[i], nbytes, inner)
        for i, nbytes in enumerate(operands)
        if i in parameters  # The rest is not used.
    )
    *_, root = inner.values()
    results = root.operands if root.opcode == "tuple" else [root.name]
    return Traffic(read, sum(_written(name, inner) for name in results))


def _read(name: str, nbytes: int, inner: Computation) -> int:
    """What a kernel reads of an operand of this size, named so inside of it."""
    total = 0
    for user in inner.values():
        if name not in user.operands:
            continue
        if user.opcode in SLICES:
            total += user.nbytes
        elif user.opcode == "bitcast":
            total += _read(user.name, nbytes, inner)
        elif user.opcode != UPDATE or user.operands[0] != name:
            return nbytes
    return min(total, nbytes)


def _written(name: str, inner: Computation) -> int:
    """What a kernel writes of a result, named so inside of it."""
    result = inner[name]
    if result.opcode == "bitcast":
        return _written(result.operands[0], inner)
    if result.opcode == UPDATE:
        return inner[result.operands[1]].nbytes
    return result.nbytes
