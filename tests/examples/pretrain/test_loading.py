import collections
import types

import grain
import jax
import numpy as np
import pytest

from examples.pretrain.batches import Windows, train_windows
from examples.pretrain.data import Corpus, Split
from examples.pretrain.errors import UsageError
from examples.pretrain.loading import Batches, part_of_process, process_batches
from examples.pretrain.meshes import MeshConfig, batch_sharding, make_mesh
from tests.examples.pretrain import tiny

SPLIT = Split("train.bin", (np.arange(16 * 30 + 1, dtype=np.uint16),))
CORPUS = Corpus(SPLIT, SPLIT, "token")
RECIPE = tiny.config(batch_size=12).recipe


class Counted(Windows):
    """Windows that remember which of them were read."""

    def __init__(self):
        super().__init__(SPLIT, RECIPE.seq_len)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def whole_batch(step):
    windows = train_windows(RECIPE, CORPUS)
    return np.stack([windows[index] for index in range(12 * step, 12 * step + 12)])


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_parts_make_the_batch_of_one_process(parts):
    windows = train_windows(RECIPE, CORPUS)
    of_parts = [process_batches(windows, 12, part, parts) for part in range(parts)]
    for step in (0, 2, 1, 40):  # In any order; 30 windows are 2.5 batches.
        joined = np.concatenate([part[step] for part in of_parts])
        np.testing.assert_array_equal(joined, whole_batch(step))


def test_a_part_reads_its_own_examples_alone():
    sources = [Counted() for _ in range(3)]
    for part, source in enumerate(sources):
        batches = process_batches(grain.MapDataset.source(source), 12, part, 3)
        for step in range(2):
            batches[step]
    assert [source.read for source in sources] == [
        [*range(4 * part, 4 * part + 4), *range(4 * part + 12, 4 * part + 16)]
        for part in range(3)
    ]


def test_parts_that_there_are_not_are_refused():
    windows = train_windows(RECIPE, CORPUS)
    with pytest.raises(UsageError, match=r"batch of 12 does not divide among 5 .*multip"):
        process_batches(windows, 12, 0, 5)
    for part in (-1, 3):
        with pytest.raises(ValueError, match=f"part {part} is not one of 3"):
            process_batches(windows, 12, part, 3)


# On meshes


def mesh(devices=4, **axes):
    return make_mesh(MeshConfig(**axes), jax.devices()[:devices])


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, {"tensor": 2}, {"expert": 4}])
def test_batches_are_the_same_on_every_mesh(axes):
    batches = Batches(train_windows(RECIPE, CORPUS), 12, mesh(**axes))
    for step in (3, 0):
        batch = batches[step]
        np.testing.assert_array_equal(batch, whole_batch(step))
        assert batch.sharding == batch_sharding(mesh(**axes))
        rows = 12 * axes.get("tensor", 1) // 4
        assert {shard.data.shape for shard in batch.addressable_shards} == {(rows, 17)}


def test_batches_read_ahead_are_those_that_indexing_gives():
    """From any step on, over the end of an epoch."""
    batches = Batches(train_windows(RECIPE, CORPUS), 12, mesh())
    ahead = list(batches.read_ahead(1, 7))
    assert len(ahead) == 6
    for step, batch in enumerate(ahead, start=1):
        np.testing.assert_array_equal(batch, whole_batch(step))
        assert batch.sharding == batches[step].sharding


def test_examples_that_end_make_whole_batches():
    examples = grain.MapDataset.source(Windows(SPLIT, 16))[:24]
    batches = Batches(examples, 12, mesh())
    assert len(batches) == 2
    joined = np.concatenate([batches[0], batches[1]])
    np.testing.assert_array_equal(joined, np.stack(list(examples)))


def test_a_batch_that_does_not_divide_among_devices_is_refused():
    with pytest.raises(UsageError, match=r"batch of 10 .* among 4 devices: .*multiple"):
        Batches(train_windows(RECIPE, CORPUS), 10, mesh())
    Batches(train_windows(RECIPE, CORPUS), 10, mesh(tensor=2))


Device = collections.namedtuple("Device", "number process_index")


class Cluster:
    """Stands for a sharding over devices of several processes.

    Args:
      starts: The first row of each device.
      copies: Devices with the same rows.
      size: Devices of a process.
    """

    def __init__(self, starts, copies, size):
        self.spec, self.num_devices = jax.P("data"), len(starts)
        self.mesh = types.SimpleNamespace(shape={"data": len(starts) // copies})
        self._rows = {
            Device(number, number // size): (slice(start, None),)
            for number, start in enumerate(starts)
        }

    def devices_indices_map(self, shape):
        return self._rows


@pytest.mark.parametrize(
    ("starts", "copies", "size", "parts"),
    [
        ([0, 2, 4, 6], 1, 2, [(0, 2), (1, 2)]),
        ([4, 6, 0, 2], 1, 2, [(1, 2), (0, 2)]),  # A mesh in another order of devices.
        ([0, 0, 4, 4], 2, 2, [(0, 2), (1, 2)]),  # Tensor axes within a process,
        ([0, 0, 4, 4], 2, 1, [(0, 2), (0, 2), (1, 2), (1, 2)]),  # over two,
        ([0, 0, 0, 0], 4, 2, [(0, 1), (0, 1)]),  # and over all.
    ],
)
def test_the_part_of_each_process(starts, copies, size, parts, monkeypatch):
    found = []
    for process in range(len(starts) // size):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        found.append(part_of_process(Cluster(starts, copies, size), 8))
    assert found == parts


def test_processes_whose_rows_overlap_in_part_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    overlapping = Cluster([0, 0, 0, 4, 4, 4], copies=3, size=2)
    with pytest.raises(UsageError, match=r"overlap in part: .*--mesh\.tensor"):
        part_of_process(overlapping, 8)
