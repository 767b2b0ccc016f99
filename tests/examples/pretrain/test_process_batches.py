import grain
import numpy as np
import pytest

from examples.pretrain.batches import Windows, train_batches
from examples.pretrain.config import UsageError
from examples.pretrain.data import Corpus, Split
from examples.pretrain.process_batches import process_batches
from tests.examples.pretrain import tiny

SPLIT = Split("train.bin", (np.arange(16 * 30 + 1, dtype=np.uint16),))
CORPUS = Corpus(SPLIT, SPLIT, 2**16, "token")
CONFIG = tiny.config(batch_size=12)


class Counted(Windows):
    """Windows that remember which of them were read."""

    def __init__(self):
        super().__init__(SPLIT, CONFIG.seq_len)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def part(process, processes, windows=None):
    source = Windows(SPLIT, CONFIG.seq_len) if windows is None else windows
    examples = grain.MapDataset.source(source).seed(CONFIG.seed).shuffle().repeat()
    return process_batches(examples, CONFIG.batch_size, process, processes)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 12])
def test_parts_make_the_batch_of_one_process(processes):
    whole = train_batches(CONFIG, CORPUS)
    parts = [part(process, processes) for process in range(processes)]
    for step in (0, 2, 1, 40):  # In any order; 30 windows are 2.5 batches.
        joined = np.concatenate([part[step] for part in parts])
        np.testing.assert_array_equal(joined, whole[step])


def test_a_run_goes_on_with_another_number_of_processes():
    """8 → 4 → 1 of the issue, here 6 → 3 → 1, at steps in the midst of epochs."""
    whole = train_batches(CONFIG, CORPUS)
    for first, last, processes in ((0, 4, 6), (4, 9, 3), (9, 12, 1)):
        parts = [part(process, processes) for process in range(processes)]
        for step in range(first, last):
            joined = np.concatenate([part[step] for part in parts])
            np.testing.assert_array_equal(joined, whole[step])


def test_a_process_reads_its_own_examples_alone():
    windows = [Counted() for _ in range(3)]
    parts = [part(process, 3, windows[process]) for process in range(3)]
    for step in range(2):  # Within an epoch.
        for process in parts:
            process[step]
    read = [set(source.read) for source in windows]
    assert [len(source.read) for source in windows] == [8, 8, 8]
    assert len(set.union(*read)) == 24


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match=r"batch of 12 does not divide among 5 .*multip"):
        part(0, 5)
    for process in (-1, 3):
        with pytest.raises(ValueError, match=f"process {process} is not one of 3"):
            part(process, 3)
