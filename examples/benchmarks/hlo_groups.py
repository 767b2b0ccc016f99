"""The devices that take part in a collective together, as a program's text lists them."""

import itertools
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from examples.benchmarks.hlo_program import Instruction

Groups = tuple[tuple[int, ...], ...]
# The runtime of several TPU slices numbers the devices of each from a multiple of this.
PER_SLICE = 100_000


def groups(instruction: Instruction) -> Groups:
    """The groups of a collective, or source and target of each pair; () for all devices.

    Raises:
      ValueError: If they are listed in a form that is unknown.
    """
    for pattern, read in FORMS.items():
        if found := re.search(pattern, instruction.attributes):
            return read(found)
    if re.search(r"replica_groups=(?!\{\})", instruction.attributes):
        raise ValueError(f"which devices take part in {instruction}?")
    return ()


def _listed(found: re.Match[str]) -> Groups:
    """``{0,1},{2,3}``, or pairs such as ``{0->2},{2->0}``."""
    listed = re.findall(r"\{([^{}]+)\}", found[1])
    return tuple(tuple(map(int, re.findall(r"\d+", group))) for group in listed)


def _counted(found: re.Match[str]) -> Groups:
    """``[4,2]<=[2,4]T(1,0)``: numbers in a shape, transposed, in rows."""
    return _rows(_numbers(found[2], found[3]).reshape(_integers(found[1])))


def _named(found: re.Match[str]) -> Groups:
    """``mesh['dcn'=2,'fsdp'=4] {'dcn'}``: along axes of a mesh.

    ``'fsdp':(2)2`` is a part of an axis, of length 2, after a part of length 2.
    """
    lengths = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
    along = [
        (name, int(before or 1), int(before or 1) * int(size or lengths[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", found[4])
    ]
    # The axes, cut where the parts begin and end.
    parts = []
    for name, length in lengths.items():
        ends = {end for other, *ends in along if other == name for end in ends}
        cuts = sorted({1, length} | ends)
        parts += [(name, *cut) for cut in itertools.pairwise(cuts)] or [(name, 1, 1)]
    shape = [end // start for _, start, end in parts]
    # Without device_ids the devices are in the order of their numbers.
    numbers = _numbers(found[2] or str(math.prod(shape)), found[3]).reshape(shape)
    chosen = [
        index
        for name, start, end in along
        for index, (other, first, last) in enumerate(parts)
        if other == name and start <= first and last <= end
    ]
    moved = np.moveaxis(numbers, chosen, range(-len(chosen), 0))
    return _rows(moved.reshape(-1, math.prod(shape[axis] for axis in chosen)))


def _by_slices(found: re.Match[str]) -> Groups:
    """``{1,2}x{0:3}``: devices 0 to 3 of slices 1 and 2, each with its counterpart."""
    slices = _integers(found[1])
    first, last = int(found[2]), int(found[3] or found[2])
    return tuple(
        tuple(PER_SLICE * number + device for number in slices)
        for device in range(first, last + 1)
    )


FORMS: Mapping[str, Callable[[re.Match[str]], Groups]] = {
    r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+)(?::(\d+))?\}"': _by_slices,
    r"_xla_megascale_target=\{(\{.*?\})\}": _listed,
    r"source_target_pairs=\{(\{.*?\})\}": _listed,
    r"replica_groups=\{(\{.*?\})\}": _listed,
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?": _counted,
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{((?:'\w+'(?::\(\d+\)\d+)?,?)+)\}": _named,
}


def _numbers(shape: str, order: str | None) -> np.ndarray:
    """The numbers of all devices, in a shape that is transposed."""
    lengths = _integers(shape)
    numbers = np.arange(math.prod(lengths)).reshape(lengths)
    return numbers.transpose(_integers(order)) if order else numbers


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in numbers.tolist())
