import itertools

import numpy as np
import pytest

from examples.pretrain.batches import Windows, train_windows, validation_windows
from examples.pretrain.data import Corpus, Split
from examples.pretrain.errors import UsageError
from tests.examples.pretrain import tiny


def recipe(**changes):
    return tiny.config(**changes).recipe


def corpus(*train, val=500):
    """Pieces of the lengths asked for, in which every token is another."""
    ends = list(itertools.accumulate(train, initial=0))
    pieces = tuple(np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(ends))
    return Corpus(
        Split("train.bin", pieces),
        Split("val.bin", (np.arange(val, dtype=np.uint16),)),
        unit="token",
    )


def test_windows_cover_every_piece_and_cross_none():
    windows = Windows(corpus(33, 16, 1, 40).train, seq_len=16)
    assert len(windows) == 2 + 0 + 0 + 2
    got = [windows[index] for index in range(len(windows))]
    for window, first in zip(got, (0, 16, 50, 66), strict=True):
        np.testing.assert_array_equal(window, np.arange(first, first + 17))
        assert window.dtype == np.int32


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
    assert len(set(first)) == 44
    assert set(first) == set(second)
    assert first != second


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
