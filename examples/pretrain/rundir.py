"""The folder of a run: one process at a time, and one configuration for good."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from examples.pretrain.config import Config, UsageError
from examples.pretrain.data import Corpus

# These leave the result as it is: where it goes, which arms come now (they do not touch
# each other), how often to save, and where the data lies (its fingerprint is compared).
FREE_OPTIONS = frozenset({"out", "arms", "checkpoint_every", "data", "val_data"})


@contextlib.contextmanager
def claim(config: Config, corpus: Corpus) -> Iterator[None]:
    """Holds the folder for this process, as the home of this configuration.

    Raises:
      UsageError: If another process holds it, or it is the home of another configuration.
    """
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {config.out} cannot be a folder: {error}.") from error
    with open(config.out / ".lock", "w") as lock:
        try:
            # The system releases it when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is running in {config.out}.") from None
        _settle(config.out / "config.json", config, corpus)
        yield


def read_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The configuration and the corpus of a run, as its config.json tells them."""
    return json.loads((folder / "config.json").read_text())


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two runs' facts disagree on."""
    names = dict.fromkeys([*a, *b])
    return {n: (a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)}


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file that is seen whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _settle(path: pathlib.Path, config: Config, corpus: Corpus) -> None:
    facts = _facts(config, corpus)
    if not path.exists():
        write_atomically(path, json.dumps(facts, indent=2) + "\n")
        return
    different = differences(read_facts(path.parent), facts)
    if different.keys() - FREE_OPTIONS:
        raise UsageError(
            f"{path.parent} holds a run of another configuration:\n"
            + "\n".join(
                f"  {name}: {there} there, {now} now"
                for name, (there, now) in different.items()
            )
            + "\nPass the same options to carry it on, or another --out to start anew."
        )


def _facts(config: Config, corpus: Corpus) -> dict[str, Any]:
    """What config.json holds."""
    facts = dataclasses.asdict(config)
    del facts["out"]  # The file lies there.
    facts["vocab_size"] = corpus.vocab_size
    facts["unit"] = corpus.unit
    facts["corpus_tokens"] = {"train": corpus.train.tokens, "val": corpus.val.tokens}
    facts["corpus_sha256"] = corpus.fingerprint()
    return json.loads(json.dumps(facts))  # Tuples become the lists that are read back.
