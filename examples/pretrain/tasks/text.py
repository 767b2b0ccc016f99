"""Text and tokens as data."""

from examples.pretrain.batches import train_windows, validation_windows
from examples.pretrain.config import Config
from examples.pretrain.data import read_corpus
from examples.pretrain.task import Data


def read_text(config: Config) -> Data:
    """The corpus that the configuration names.

    Raises:
      UsageError: If files are missing, corrupt, or too few for a batch.
    """
    recipe, corpus = config.recipe, read_corpus(config, config.model.vocab_size)
    return Data(
        train=train_windows(recipe, corpus),
        validation=validation_windows(recipe, corpus),
        unit=corpus.unit,
        description=f"{corpus.train.tokens:,} {corpus.unit}s to train on, "
        f"{corpus.val.tokens:,} to validate on, from {corpus.train.name}"
        + (f"\n{corpus.note}" if corpus.note else ""),
        facts={
            "corpus_tokens": {"train": corpus.train.tokens, "val": corpus.val.tokens},
            "corpus_sha256": corpus.fingerprint(),
        },
    )
