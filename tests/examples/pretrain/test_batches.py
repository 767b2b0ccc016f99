"""Windows of a text, and the batches of them: which step sees what, on any mesh."""

import collections
import itertools
import types

import grain
import jax
import numpy as np
import pytest

from examples.pretrain.batches import Windows, train_windows, validation_windows
from examples.pretrain.data import Corpus, Split
from examples.pretrain.errors import UsageError
from examples.pretrain.loading import Batches, part_of_process, process_batches
from examples.pretrain.meshes import MeshConfig, batch_sharding, make_mesh
from tests.examples.pretrain import tiny


def recipe(**changes):
    return tiny.config(**changes).recipe


def corpus(*train, val=500):
    """Pieces of the lengths asked for, in which every token is another."""
    ends = list(itertools.accumulate(train, initial=0))
    pieces = tuple(np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(ends))
    held_out = Split("val.bin", (np.arange(val, dtype=np.uint16),))
    return Corpus(Split("train.bin", pieces), held_out, unit="token")


def test_windows_cover_every_piece_and_cross_none():
    windows = Windows(corpus(33, 16, 1, 40).train, seq_len=16)
    assert len(windows) == 2 + 0 + 0 + 2
    for index, first in enumerate((0, 16, 50, 66)):
        np.testing.assert_array_equal(windows[index], np.arange(first, first + 17))
        assert windows[index].dtype == np.int32


def test_a_window_depends_on_seed_and_place_alone():
    data = corpus(3000)
    one, two = (train_windows(recipe(), data) for _ in range(2))
    forwards = [one[index] for index in range(400)]
    backwards = [two[index] for index in reversed(range(400))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    other = train_windows(recipe(seed=1), data)
    assert not np.array_equal(forwards, [other[index] for index in range(400)])


def test_an_epoch_holds_every_window_once_and_the_next_in_another_order():
    windows = train_windows(recipe(), corpus(16 * 30 + 1, 16 * 14 + 1))
    starts = [int(windows[index][0]) for index in range(88)]
    first, second = starts[:44], starts[44:]
    assert len(set(first)) == 44 and set(first) == set(second) and first != second


def test_seeds_share_the_validation_windows():
    data = corpus(3000)
    one, two = (validation_windows(recipe(seed=seed), data) for seed in (0, 1))
    assert len(one) == 2 * 4
    np.testing.assert_array_equal(list(one), list(two))
    assert len({int(window[0]) for window in one}) == 8


def test_a_validation_takes_the_whole_batches_that_there_are():
    data = corpus(3000, val=16 * 4 * 3)  # 11 windows: 2 batches of 4.
    for val_batches in (100, None):
        assert len(validation_windows(recipe(val_batches=val_batches), data)) == 8


@pytest.mark.parametrize(
    ("make", "name"), [(train_windows, "train.bin"), (validation_windows, "val.bin")]
)
def test_too_little_for_a_batch_is_refused(make, name):
    data = corpus(64, val=64)  # 3 windows, and a batch takes 4.
    with pytest.raises(
        UsageError, match=rf"{name}: 64 tokens make 3 .*add data.*--batch"
    ):
        make(recipe(), data)


# Batches

CORPUS, RECIPE = corpus(16 * 30 + 1), recipe(batch_size=12)


class Counted(Windows):
    """Windows that remember which of them were read."""

    def __init__(self):
        super().__init__(CORPUS.train, RECIPE.seq_len)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def whole_batch(step):
    windows = train_windows(RECIPE, CORPUS)
    return np.stack([windows[index] for index in range(12 * step, 12 * step + 12)])


@pytest.mark.parametrize("parts", [1, 2, 3, 12])
def test_parts_make_the_batch_of_one_process(parts):
    windows = train_windows(RECIPE, CORPUS)
    of_parts = [process_batches(windows, 12, part, parts) for part in range(parts)]
    for step in (0, 2, 1, 40):  # In any order; 30 windows are 2.5 batches.
        joined = np.concatenate([part[step] for part in of_parts])
        np.testing.assert_array_equal(joined, whole_batch(step))


def test_a_part_reads_its_own_examples_alone():
    for part in range(3):
        source = Counted()
        batches = process_batches(grain.MapDataset.source(source), 12, part, 3)
        for step in range(2):
            batches[step]
        first = range(4 * part, 4 * part + 4)
        assert source.read == [*first, *(12 + index for index in first)]


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
    examples = grain.MapDataset.source(Windows(CORPUS.train, 16))[:24]
    batches = Batches(examples, 12, mesh())
    assert len(batches) == 2
    joined = np.concatenate([batches[0], batches[1]])
    np.testing.assert_array_equal(joined, np.stack(list(examples)))


def test_a_batch_that_does_not_divide_among_devices_is_refused():
    with pytest.raises(UsageError, match=r"batch of 10 .* among 4 devices: .*multiple"):
        Batches(train_windows(RECIPE, CORPUS), 10, mesh())
    Batches(train_windows(RECIPE, CORPUS), 10, mesh(tensor=2))


Device = collections.namedtuple("Device", "number process_index")


def cluster(starts, copies, size):
    """Stands for a sharding over devices of several processes.

    Args:
      starts: The first row of each device.
      copies: Devices with the same rows.
      size: Devices of a process.
    """
    rows = {Device(n, n // size): (slice(start, None),) for n, start in enumerate(starts)}
    return types.SimpleNamespace(
        spec=jax.P("data"),
        num_devices=len(starts),
        mesh=types.SimpleNamespace(shape={"data": len(starts) // copies}),
        devices_indices_map=lambda shape: rows,
    )


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
        found.append(part_of_process(cluster(starts, copies, size), 8))
    assert found == parts


def test_processes_whose_rows_overlap_in_part_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    overlapping = cluster([0, 0, 0, 4, 4, 4], copies=3, size=2)
    with pytest.raises(UsageError, match=r"overlap in part: .*--mesh\.tensor"):
        part_of_process(overlapping, 8)
