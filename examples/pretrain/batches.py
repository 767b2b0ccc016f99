"""Which windows of the corpus a step sees: a pure function of seed and step."""

from collections.abc import Sequence

import grain
import numpy as np

from examples.pretrain.config import Config, UsageError
from examples.pretrain.data import Corpus, Split

# Not the run's seed: runs of different seeds are validated on the same windows.
VALIDATION_SEED = 0


class Windows:
    """Every piece of a split, cut into windows of seq_len + 1 tokens.

    Neighbours share one token, which is the last target of one and the first input of the
    next: each token is predicted once.
    """

    def __init__(self, split: Split, seq_len: int):
        self._pieces = split.pieces
        self._seq_len = seq_len
        per_piece = [(len(piece) - 1) // seq_len for piece in split.pieces]
        self._ends = np.cumsum(per_piece)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        piece = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[piece - 1]) if piece else 0
        start = (index - first) * self._seq_len
        window = self._pieces[piece][start : start + self._seq_len + 1]
        return window.astype(np.int32)


def train_batches(config: Config, corpus: Corpus) -> Sequence[np.ndarray]:
    """An endless sequence of batches; an epoch sees every window once, in a new order.

    Item i is what step i sees, of shape (batch_size, seq_len + 1), and does not depend on
    the items asked for before: the step alone is the position in the data.
    """
    windows = _windows(corpus.train, config)
    shuffled = grain.MapDataset.source(windows).seed(config.seed).shuffle()
    return shuffled.repeat().batch(config.batch_size)


def validation_batches(config: Config, corpus: Corpus) -> list[np.ndarray]:
    """The batches of every validation."""
    windows = _windows(corpus.val, config)
    count = min(config.val_batches, len(windows) // config.batch_size)
    shuffled = grain.MapDataset.source(windows).seed(VALIDATION_SEED).shuffle()
    batches = shuffled.batch(config.batch_size)
    return [batches[index] for index in range(count)]


def _windows(split: Split, config: Config) -> Windows:
    windows = Windows(split, config.seq_len)
    if len(windows) < config.batch_size:
        raise UsageError(
            f"{split.name}: {split.tokens} tokens make {len(windows)} windows of "
            f"{config.seq_len + 1}, and one batch takes {config.batch_size}: "
            "add data, or lower --batch-size or --seq-len."
        )
    return windows
