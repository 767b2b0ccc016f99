"""Batches on the devices, of which every process reads its own part."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
from jax.sharding import Mesh, NamedSharding

from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import batch_sharding

PyTree = Any
# Grain counts the batches of a repeated data set in floats, which end at 2⁶³.
_ENDLESS = 2**48
_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # In batches.


class Batches:
    """The batches of a run, or of a validation, sharded over a mesh.

    Item i belongs to step i and depends on nothing else: the step is the position in the
    data, whatever the mesh and the number of processes. The examples are in their order;
    endless, or whole batches.
    """

    def __init__(self, examples: grain.MapDataset, batch_size: int, mesh: Mesh):
        self._sharding = batch_sharding(mesh)
        self._size = batch_size
        self._local = process_batches(
            examples, batch_size, *part_of_process(self._sharding, batch_size)
        )

    def __len__(self) -> int:
        return len(self._local)

    def __getitem__(self, index: int) -> PyTree:
        return self._placed(self._local[index])

    def read_ahead(self, start: int, end: int) -> Iterator[PyTree]:
        """The batches of the steps from `start` to `end`, read before they are due."""
        ahead = self._local[start:end].to_iter_dataset(_AHEAD)
        return map(self._placed, ahead)

    def _placed(self, local: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(
                self._sharding, x, (self._size, *x.shape[1:])
            ),
            local,
        )


def process_batches(
    examples: grain.MapDataset, batch_size: int, part: int = 0, parts: int = 1
) -> Any:
    """One part of each batch; no other example is read.

    Item i belongs to step i. All parts, one after another, are the batch that a single
    process would have.
    """
    # Parts follow one another: number i·P + p is part p of step i.
    return examples[:_ENDLESS].batch(batch_size // parts)[part::parts]


def part_of_process(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """Which part of a batch the devices of this process take, and how many there are.

    Processes whose devices hold the same rows take the same part.
    """
    names = sharding.spec[0] if len(sharding.spec) else None
    axes = (names,) if isinstance(names, str) else names or ()
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % shards:
        raise UsageError(
            f"A batch of {batch_size} does not divide among {shards} devices: choose a "
            f"batch size that is a multiple of {shards}, or another mesh."
        )
    rows: dict[int, set[int]] = {}
    places: Any = sharding.devices_indices_map((batch_size,))
    for device, (part,) in places.items():
        rows.setdefault(device.process_index, set()).add(part.start or 0)
    parts: Sequence[tuple[int, ...]] = sorted({tuple(sorted(r)) for r in rows.values()})
    if sum(map(len, parts)) != shards:
        raise UsageError(
            "Two processes hold rows of the batch that overlap in part: choose a mesh "
            "whose --mesh.tensor divides the devices of a process, or is divided by them."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)
