import itertools

import numpy as np
import pytest

from examples.pretrain.batches import Windows, train_batches, validation_batches
from examples.pretrain.config import UsageError
from examples.pretrain.data import Corpus, Split
from tests.examples.pretrain import tiny


def corpus(*train, val=500):
    """Pieces of the lengths asked for, in which every token is another."""
    ends = list(itertools.accumulate(train, initial=0))
    pieces = tuple(np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(ends))
    return Corpus(
        Split("train.bin", pieces),
        Split("val.bin", (np.arange(val, dtype=np.uint16),)),
        vocab_size=2**16,
        unit="token",
    )


def test_windows_cover_every_piece_and_cross_none():
    windows = Windows(corpus(33, 16, 1, 40).train, seq_len=16)
    assert len(windows) == 2 + 0 + 0 + 2
    got = [windows[index] for index in range(len(windows))]
    for window, first in zip(got, (0, 16, 50, 66), strict=True):
        np.testing.assert_array_equal(window, np.arange(first, first + 17))
        assert window.dtype == np.int32


def test_a_batch_depends_on_seed_and_step_alone():
    data = corpus(3000)
    one, two = (train_batches(tiny.config(), data) for _ in range(2))
    forwards = [one[step] for step in range(200)]
    backwards = [two[step] for step in reversed(range(200))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    assert forwards[0].shape == (4, 17)
    other = train_batches(tiny.config(seed=1), data)
    assert not np.array_equal(forwards, [other[step] for step in range(200)])


def test_an_epoch_holds_every_window_once_and_the_next_in_another_order():
    data = corpus(16 * 30 + 1, 16 * 14 + 1)  # 44 windows: 11 batches an epoch.
    batches = train_batches(tiny.config(), data)
    starts = np.concatenate([batches[step][:, 0] for step in range(22)])
    first, second = starts[:44], starts[44:]
    assert len(set(first)) == 44
    assert set(first) == set(second)
    assert not np.array_equal(first, second)


def test_seeds_share_the_validation_windows():
    data = corpus(3000)
    one, two = (validation_batches(tiny.config(seed=seed), data) for seed in (0, 1))
    assert len(one) == 2
    np.testing.assert_array_equal(one, two)
    assert len({int(start) for batch in one for start in batch[:, 0]}) == 8


def test_a_validation_takes_what_there_is():
    data = corpus(3000, val=16 * 4 * 3)
    assert len(validation_batches(tiny.config(val_batches=100), data)) == 2


@pytest.mark.parametrize(
    ("make", "name"), [(train_batches, "train.bin"), (validation_batches, "val.bin")]
)
def test_too_little_for_a_batch_is_refused(make, name):
    data = corpus(64, val=64)  # 3 windows, and a batch takes 4.
    with pytest.raises(
        UsageError, match=rf"{name}: 64 tokens make 3 .*add data.*--batch"
    ):
        make(tiny.config(), data)
