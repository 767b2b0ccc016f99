"""What a compiled program sends between regions of devices: slices, nodes or processes.

Bytes are those that a device receives from other regions:

- *all-to-all, collective-permute*: what devices of other regions send to it.
- *all-gather, reduce-scatter*: the devices of a region share the load. Each receives an
  equal part of what the others hold, or have summed, and passes it on inside.
- *all-reduce*: a reduce-scatter and an all-gather.

*Buffers* are the whole results of the same collectives, what does not cross included. A
program for several TPU slices hands these to the hosts, which send them. It shows the
exchange as a ``send`` and a ``recv``, and numbers devices as the runtime does. A
collective that stays in a slice numbers those of the slice from 0; it never crosses.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from examples.benchmarks.hlo_groups import Groups, groups
from examples.benchmarks.hlo_program import Computation, Instruction, parse, runs

Group = tuple[int, ...]
# The region of each device, by its number in the text.
Regions = Mapping[int, int]
TRANSFERS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}


class Collective(NamedTuple):
    """A collective operation, by what each device hands to it.

    Attributes:
      kind: Its opcode.
      operand: Bytes of the operands of one device.
      groups: The devices that take part together; of a permutation, source and target.
      times: How often it runs.
    """

    kind: str
    operand: int
    groups: Groups
    times: int


@dataclasses.dataclass(frozen=True)
class Crossings:
    """What crosses, in one run of the program.

    Attributes:
      received: Bytes that each device receives from other regions.
      messages: Parts in which they arrive.
      buffers: Bytes of one device's results of collectives that cross.
      collectives: How many cross.
    """

    received: Mapping[int, int]
    messages: Mapping[int, int]
    buffers: int
    collectives: int


def of(text: str, regions: Regions) -> Crossings:
    """What crosses in the text of a compiled program, ``compiled.as_text()``."""
    received: Counter[int] = Counter(dict.fromkeys(regions, 0))
    messages: Counter[int] = Counter(dict.fromkeys(regions, 0))
    buffers = count = 0
    for collective in collectives(text, sorted(regions)):
        crossing = [group for group in collective.groups if _crosses(group, regions)]
        for group in crossing:
            for device in _receivers(collective.kind, group):
                nbytes, parts = _received(collective, group, device, regions)
                received[device] += collective.times * nbytes
                messages[device] += collective.times * parts
        if crossing:
            buffers += collective.times * _result(collective, crossing[0])
            count += collective.times
    return Crossings(received, messages, buffers, count)


def regions_of(
    devices: Iterable[jax.Device], region: Callable[[jax.Device], int]
) -> Regions:
    """The region of each device of a program.

    Args:
      devices: All of them, in the order of the mesh.
      region: Of a device, such as its process.
    """
    return {number: region(device) for number, device in enumerate(devices)}


def slices_of(devices: Iterable[jax.Device]) -> Regions:
    """The slice of each TPU, by its number in the runtime of several slices."""
    return {device.id: device.slice_index for device in devices}


def collectives(text: str, devices: Sequence[int]) -> Iterator[Collective]:
    """All collectives that a program runs; asynchronous pairs once."""
    program, entry = parse(text)
    chains: set[tuple[str, str]] = set()
    for instruction, computation, place in runs(program, entry):
        kind = _kind(instruction)
        if kind is None:
            continue
        # One that runs beside a chain of kernels is printed in each of them.
        chain = instruction.attribute(r'chain_id="(\d+)"')
        if chain is not None:
            if (kind, chain) in chains:
                continue
            chains.add((kind, chain))
        operand = _operand(instruction, computation)
        together = groups(instruction) or (tuple(devices),)
        yield Collective(kind, operand, together, place.times)


def _kind(instruction: Instruction) -> str | None:
    """The collective that an instruction is, or starts."""
    if instruction.opcode == "send":
        return TRANSFERS.get(
            instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') or ""
        )
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in TRANSFERS.values() else None


def _operand(instruction: Instruction, computation: Computation) -> int:
    return sum(computation[name].nbytes for name in instruction.operands)


def _crosses(group: Group, regions: Regions) -> bool:
    """Whether its devices are of several regions."""
    return len({regions.get(device) for device in group}) > 1


def _receivers(kind: str, group: Group) -> Group:
    return group[1:] if kind == "collective-permute" else group


def _received(
    collective: Collective, group: Group, device: int, regions: Regions
) -> tuple[int, int]:
    """Bytes that a device receives from other regions, and in how many parts."""
    if collective.kind == "collective-permute":
        return collective.operand, 1
    within = sum(regions[other] == regions[device] for other in group)
    others = len(group) - within
    if collective.kind == "all-to-all":
        return others * collective.operand // len(group), others
    elsewhere = len({regions[other] for other in group}) - 1
    part = collective.operand
    if collective.kind != "all-gather":
        part = -(-part // len(group))
    ways = 2 if collective.kind == "all-reduce" else 1
    return ways * part * others // within, ways * elsewhere


def _result(collective: Collective, group: Group) -> int:
    if collective.kind == "all-gather":
        return collective.operand * len(group)
    if collective.kind == "reduce-scatter":
        return collective.operand // len(group)
    return collective.operand
