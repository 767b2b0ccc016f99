"""Which windows of the corpus a step sees: a pure function of seed and step."""

import contextlib
import os

import grain
import numpy as np

from examples.pretrain.config import Config, TextRecipe
from examples.pretrain.data import Corpus, Split, read_corpus
from examples.pretrain.errors import RunError, UsageError
from examples.pretrain.task import Data

# Not the run's seed: runs of different seeds are validated on the same windows.
VALIDATION_SEED = 0


def read_text(config: Config) -> Data:
    """The corpus that the configuration names."""
    corpus = read_corpus(config.data, config.val_data, config.model.vocab_size)
    train, val = corpus.train, corpus.val
    return Data(
        train=train_windows(config.recipe, corpus),
        validation=validation_windows(config.recipe, corpus),
        unit=corpus.unit,
        description=f"{train.tokens:,} {corpus.unit}s to train on, {val.tokens:,} to "
        f"validate on, from {train.name}" + (f"\n{corpus.note}" if corpus.note else ""),
        facts={
            "corpus_tokens": {"train": train.tokens, "val": val.tokens},
            "corpus_sha256": corpus.fingerprint(),
        },
    )


class Windows:
    """Every piece of a split, cut into windows of seq_len + 1 tokens.

    Neighbours share one token, which is the last target of one and the first input of the
    next: each token is predicted once. A file that is mapped must stay as it is.
    """

    def __init__(self, split: Split, seq_len: int):
        self._pieces = split.pieces
        self._files = [getattr(piece, "filename", None) for piece in split.pieces]
        self._stamps = [*map(_stamp, self._files)]
        self._seq_len = seq_len
        per_piece = [(len(piece) - 1) // seq_len for piece in split.pieces]
        self._ends = np.cumsum(per_piece)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        piece = int(np.searchsorted(self._ends, index, side="right"))
        with contextlib.suppress(FileNotFoundError):  # A map outlives a name.
            if _stamp(self._files[piece]) != self._stamps[piece]:
                raise RunError(
                    f"{self._files[piece]} has changed since the run began. Put it back "
                    "and rerun the same command to resume from the last checkpoint, or "
                    "begin anew with another --out."
                )
        first = int(self._ends[piece - 1]) if piece else 0
        start = (index - first) * self._seq_len
        window = self._pieces[piece][start : start + self._seq_len + 1]
        return window.astype(np.int32)


def _stamp(file: str | None) -> tuple[int, int] | None:
    """The size and the time stamp of a file that is mapped; None for what was read."""
    if file is None:
        return None
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def train_windows(recipe: TextRecipe, corpus: Corpus) -> grain.MapDataset:
    """Windows without end; an epoch sees every one once, in a new order."""
    windows = _windows(corpus.train, recipe)
    return grain.MapDataset.source(windows).seed(recipe.seed).shuffle().repeat()


def validation_windows(recipe: TextRecipe, corpus: Corpus) -> grain.MapDataset:
    """The windows of every validation, in whole batches."""
    windows = _windows(corpus.val, recipe)
    batches = len(windows) // recipe.batch_size
    if recipe.val_batches is not None:
        batches = min(recipe.val_batches, batches)
    shuffled = grain.MapDataset.source(windows).seed(VALIDATION_SEED).shuffle()
    return shuffled[: batches * recipe.batch_size]


def _windows(split: Split, recipe: TextRecipe) -> Windows:
    windows = Windows(split, recipe.seq_len)
    if len(windows) < recipe.batch_size:
        raise UsageError(
            f"{split.name}: {split.tokens} tokens make {len(windows)} windows of "
            f"{recipe.seq_len + 1}, and one batch takes {recipe.batch_size}: "
            "add data, or lower --batch-size or --seq-len."
        )
    return windows
