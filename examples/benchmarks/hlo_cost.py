"""What one device does in a compiled program, read from the program's text.

    python -m examples.benchmarks.hlo_cost hlo/*.txt

XLA's own ``cost_analysis()`` counts a loop's body once, and says nothing of collectives.
Here a body counts as often as it runs; every branch of a conditional counts.

- *Cycles* are the TPU compiler's estimates, where the text has them: of kernels, a fusion
  being one. Collectives, grouped products (``ragged_dot``) and kernels by Pallas have no
  estimate and count as none.
- *Bytes* of a collective are those of its results on one device, and of its operands for
  reduce-scatter: in either case of the whole that is gathered or reduced.
- A collective is *exposed* if no product stands between its start and its end: then the
  device waits. A scheduled program prints instructions in the order in which they are
  issued. One that a kernel runs beside products of its own is not exposed.
- *Traffic* is what kernels read and write. An array counts whole where a kernel reads it,
  and as large as its slices where the kernel reads those alone, of it or of a multiple.
  An array that is updated in place counts as large as what is new. Collectives and
  kernels of Pallas count as any other: their operands and their results.
- *FLOPs* are those of matrix products and convolutions, and of cuDNN's attention as if it
  were not causal; without kernels by Pallas.
- The *model* of an H100: a kernel takes as long as its bytes at 2.9 TB/s or its FLOPs at
  650 TFLOP/s, whichever is longer, and 2 µs for its launch. Large arrays and products
  reach these rates.

The gradient of a grouped product is one product for each group, with a mask of the rows
of the others, which the kernel skips. The compiler's estimate knows nothing of the mask:
it is divided by the number of groups, as if every block of rows were one group's.

:func:`crossings` counts what a program sends between slices, nodes or processes.
"""

import dataclasses
import pathlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from examples.benchmarks.hlo import (
    CALLED,
    CALLS,
    FUSIONS,
    Computation,
    Instruction,
    Program,
    parse,
    runs,
)
from examples.benchmarks.program import TRANSFERS, Collective, collectives, flops_of
from orscale_jax.newton_schulz.hardware import Hardware

# What only names an array, or calls something else.
NO_KERNELS = CALLS - FUSIONS | {
    "after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter",
    "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
UNKNOWN = 2**63 - 1  # What the TPU compiler says of kernels that it cannot estimate.
BYTES_PER_SECOND, FLOPS_PER_SECOND, LAUNCH = 2.9e12, 650e12, 2e-6
# Computed where they are used: of the entries that nothing uses, nothing is read.
ELEMENTWISE = {"bitcast", "convert", "multiply"}
SLICES, UPDATE = {"slice", "dynamic-slice"}, "dynamic-update-slice"


class Traffic(NamedTuple):
    """Bytes that kernels read and write."""

    read: int
    written: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one device for one run of the program."""

    cycles: int  # As the compiler estimates them.
    flops: int
    kernels: int  # Launches, those of copies among them.
    traffic: Traffic
    collectives: tuple[Collective, ...]

    @property
    def collective_bytes(self) -> int:
        return sum(c.total for c in self.collectives)

    @property
    def looped_bytes(self) -> int:
        """The bytes of collectives inside loops, which cannot be merged with others."""
        return sum(c.total for c in self.collectives if c.looped)

    @property
    def exposed_bytes(self) -> int:
        """The bytes of exposed collectives."""
        return sum(c.total for c in self.collectives if not c.flops)


def of(text: str) -> Cost:
    """The cost of the text of a compiled program, ``compiled.as_text()``."""
    return by_scope(text, ())[""]


def by_scope(text: str, scopes: Collection[str]) -> dict[str, Cost]:
    """The same of its parts, by the `jax.named_scope` that they were traced in.

    A kernel that was fused from two scopes has that of its last operation. What is in
    none of the scopes is "".
    """
    program, entry = parse(text)
    issued = list(runs(program, entry, scopes))
    found = list(collectives(issued))
    costs = {}
    for scope in (*scopes, ""):
        cycles = flops = kernels = read = written = 0
        for run in issued:
            instruction, computation, place = run
            if place.scope != scope:
                continue
            flops += flops_of(run)
            opcode = instruction.opcode
            # What a call runs is counted instead of it.
            if not place.fused and opcode not in NO_KERNELS:
                cycles_of = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
                if cycles_of < UNKNOWN:
                    cycles += place.times * cycles_of // place.matrices
                if not opcode.endswith("-done"):
                    kernels += place.times
                    traffic = traffic_of(instruction, computation, program)
                    read += place.times * traffic.read
                    written += place.times * traffic.written
        part = tuple(c for c in found if c.scope == scope)
        costs[scope] = Cost(cycles, flops, kernels, Traffic(read, written), part)
    return costs


class Kernel(NamedTuple):
    """One kernel of the text, which may run many times."""

    scope: str
    traced: str  # The end of what it was traced in.
    result: str
    times: int
    nbytes: int  # Of one launch.
    flops: int
    adds: bool = False  # Something to a product.

    @property
    def seconds(self) -> float:
        """Of one launch."""
        return LAUNCH + max(self.nbytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)


def kernels(text: str, scopes: Collection[str] = ()) -> Iterator[Kernel]:
    """All kernels of a compiled program, in the order in which they are issued."""
    program, entry = parse(text)
    current: Kernel | None = None
    for run in runs(program, entry, scopes):
        instruction, computation, place = run
        flops = flops_of(run) // place.times
        if place.fused and current is not None:
            adds = current.adds or (current.flops > 0 and instruction.opcode == "add")
            current = current._replace(flops=current.flops + flops, adds=adds)
            continue
        if current is not None:
            yield current
        current = None
        opcode = instruction.opcode
        if opcode in NO_KERNELS or opcode.endswith("-done"):
            continue
        traffic = traffic_of(instruction, computation, program)
        arrays = (f"{dtype}{list(shape)}" for dtype, shape in instruction.arrays)
        current = Kernel(
            place.scope, "/".join(instruction.traced[-2:]), " ".join(arrays),
            place.times, traffic.read + traffic.written, flops,
            bool(instruction.attribute(r'"beta":(1)')),
        )  # fmt: skip
    if current is not None:
        yield current


def traffic_of(
    instruction: Instruction, computation: Computation, program: Program
) -> Traffic:
    """The traffic of one launch of a kernel."""
    operands = [computation[name].nbytes for name in instruction.operands]
    if instruction.opcode in SLICES:
        return Traffic(instruction.nbytes, instruction.nbytes)
    if instruction.opcode == UPDATE:
        return Traffic(operands[1], operands[1])
    if instruction.opcode not in FUSIONS:
        if instruction.opcode.endswith("-start"):  # Its results name its operands, too.
            return Traffic(sum(operands), sum(operands))
        return Traffic(sum(operands), instruction.nbytes)
    [called] = CALLED.findall(instruction.attributes)
    inner = program[called.lstrip("%")]

    def read(name: str, nbytes: int) -> int:
        """What it reads of an operand of this size, named so inside of it."""
        total = 0
        for user in inner.values():
            if name not in user.operands:
                continue
            if user.opcode in SLICES:
                total += user.nbytes
            elif user.opcode in ELEMENTWISE and user.nbytes:
                total += read(user.name, user.nbytes) * nbytes // user.nbytes
            elif user.opcode != UPDATE or user.operands[0] != name:
                return nbytes
        return min(total, nbytes)

    def written(name: str) -> int:
        result = inner[name]
        while result.opcode == "bitcast":
            result = inner[result.operands[0]]
        return (
            inner[result.operands[1]].nbytes if result.opcode == UPDATE else result.nbytes
        )

    parameters = [x for x in inner.values() if x.opcode == "parameter"]
    *_, root = inner.values()
    results = root.operands if root.opcode == "tuple" else [root.name]
    return Traffic(
        sum(read(x.name, operands[int(x.arguments)]) for x in parameters),
        sum(map(written, results)),
    )


def exposed_seconds(cost: Cost, regions: Mapping[int, int], hardware: Hardware) -> float:
    """How long a device waits for collectives, by the rates of its links and products.

    It waits for one as long as that takes beyond the products beside it, and for an
    exposed one all of that. A collective between regions goes over slow links. Messages
    themselves take no time, links are never congested, what is beside two collectives
    counts for both, and what hosts send for TPUs of several slices is left out.
    """
    seconds = 0.0
    for collective in cost.collectives:
        groups = collective.groups or (tuple(regions),)
        crosses = any(len({regions.get(device) for device in x}) > 1 for x in groups)
        link = hardware.slow if crosses else hardware.fast
        share = 1 - 1 / len(groups[0])  # What a device keeps is not sent.
        ways = {"collective-permute": 1 / share, "all-reduce": 2}.get(collective.kind, 1)
        sending = ways * share * collective.total / link.bytes_per_second
        seconds += max(0, sending - collective.flops / hardware.flops_per_second)
    return seconds


class Crossings(NamedTuple):
    """What crosses between regions of devices, in one run of a program.

    Bytes are those that a device receives from other regions:

    - *all-to-all, collective-permute*: what devices of other regions send to it.
    - *all-gather, reduce-scatter*: the devices of a region share the load. Each receives
      an equal part of what the others hold, or have summed, and passes it on inside.
    - *all-reduce*: a reduce-scatter and an all-gather.
    """

    received: Mapping[int, int]  # By each device.
    messages: Mapping[int, int]  # Parts in which they arrive.
    buffers: int  # Bytes of one device's whole results of these collectives.
    collectives: int  # How many cross.


def crossings(text: str, regions: Mapping[int, int]) -> Crossings:
    """What crosses in the text of a compiled program.

    A program for several TPU slices hands the buffers to the hosts, which send them. It
    shows the exchange as a ``send`` and a ``recv``, and numbers devices as the runtime
    does. A collective that stays in a slice numbers those of the slice from 0; it never
    crosses.

    Args:
      text: ``compiled.as_text()``.
      regions: The slice, node or process of each device, by its number in the text.
    """
    received, messages = (Counter(dict.fromkeys(regions, 0)) for _ in range(2))
    buffers = count = 0
    for collective in collectives(list(runs(*parse(text))), by_hosts=True):
        kind, part, times = collective.kind, collective.operand, collective.times
        groups = collective.groups or (tuple(sorted(regions)),)
        crossing = [x for x in groups if len({regions.get(device) for device in x}) > 1]
        if not crossing or kind not in TRANSFERS.values():
            continue
        size = len(crossing[0])
        whole = {"all-gather": part * size, "reduce-scatter": part // size}
        buffers += times * whole.get(kind, part)
        count += times
        for group in crossing:
            if kind == "collective-permute":
                received[group[1]] += times * part
                messages[group[1]] += times
                continue
            shared = part if kind == "all-gather" else -(-part // size)
            ways = 2 if kind == "all-reduce" else 1
            for device in group:
                within = sum(regions[other] == regions[device] for other in group)
                others = size - within
                if kind == "all-to-all":
                    received[device] += times * (others * part // size)
                    messages[device] += times * others
                else:
                    elsewhere = len({regions[other] for other in group}) - 1
                    received[device] += times * (ways * shared * others // within)
                    messages[device] += times * ways * elsewhere
    return Crossings(received, messages, buffers, count)


def main(paths: list[str]) -> None:
    for path in paths:
        cost = of(pathlib.Path(path).read_text())
        print(f"{path}: {cost.cycles / 1e6:.4g} Mcycles, {cost.flops / 1e9:.4g} GFLOP")
        for c in cost.collectives:
            where = " in a loop" if c.looped else ""
            size = f"{c.total / 1e6:.4g} MB beside {c.flops / 1e9:.4g} GFLOP"
            print(f"  {c.kind}{where}: {c.times}, {size}")


if __name__ == "__main__":
    main(sys.argv[1:])
