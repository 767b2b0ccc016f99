"""Which files a run reads, and which of them, or which part, it keeps for validation."""

import dataclasses
import glob
import hashlib
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from examples.pretrain.errors import UsageError
from examples.pretrain.shards import is_shard, read_shard

if TYPE_CHECKING:  # At run time it needs tyro, which the benchmarks on a GPU do without.
    from examples.pretrain.config import Config

Files = dict[str, pathlib.Path]  # By name: the path below their common folder.

SEPARATOR = b"\0"  # Between documents. No text holds it.
VALIDATION_SHARE = 0.1
_VALIDATION_NAME = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)

# Not of the library's kind: tests, tables of characters, one huge help text, what some
# versions of Python lack, and what others have installed.
NOT_LIBRARY = frozenset(
    "site-packages dist-packages __pycache__ test tests idle_test idlelib lib2to3 "
    "ensurepip distutils turtledemo encodings pydoc_data __phello__".split()
)


@dataclasses.dataclass(frozen=True)
class Split:
    """One side of the corpus.

    Attributes:
      name: Where it comes from, for messages.
      pieces: Runs of tokens; none continues another. All text is one piece.
    """

    name: str
    pieces: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return sum(len(piece) for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a run trains on and is validated on.

    Attributes:
      train: For training.
      val: For validation; from other files, or from another part of a single one.
      unit: What one token is: "byte" or "token".
      note: What the reader should know of the split; empty for nothing.
    """

    train: Split
    val: Split
    unit: str
    note: str = ""

    def fingerprint(self) -> str:
        """SHA-256 of all tokens and of the split."""
        digest = hashlib.sha256()
        for split in (self.train, self.val):
            digest.update(f"{len(split.pieces)} pieces;".encode())
            for piece in split.pieces:
                digest.update(f"{len(piece)} {piece.dtype.str};".encode())
                digest.update(piece.data)
        return digest.hexdigest()


def read_corpus(config: "Config", vocab_size: int) -> Corpus:
    """Reads the files that the configuration names, or the standard library.

    Args:
      config: Names them.
      vocab_size: All tokens have to be below it.

    Raises:
      UsageError: If files are missing, empty, corrupt or of two kinds.
    """
    train, val = _files(config)
    if not train:
        raise UsageError(
            f"--data {' '.join(config.data)} leaves nothing to train on beside the "
            "validation files: add files to it."
        )
    shards = _are_shards([*train.values(), *val.values()])
    read, unit = (_read_shards, "token") if shards else (_read_texts, "byte")
    if not val:
        return _split_by_position(read(train, vocab_size), unit)
    return Corpus(read(train, vocab_size), read(val, vocab_size), unit)


def read_standard_library() -> Corpus:
    """Reads what runs train on that name no files, as bytes."""
    train, val = _split_by_hash(_standard_library())
    return Corpus(_read_texts(train, 256), _read_texts(val, 256), "byte")


def _files(config: "Config") -> tuple[Files, Files]:
    """The files to train on and those to validate on; none of these for a single one."""
    if not config.data:
        return _split_by_hash(_standard_library())
    found = _find(config.data)
    if not config.val_data:
        return _split_by_name(found)
    val = _find(config.val_data)
    held_out = {path.resolve() for path in val.values()}
    train = {n: path for n, path in found.items() if path.resolve() not in held_out}
    return train, val


def _split_by_position(whole: Split, unit: str) -> Corpus:
    """The last tenth of a single file, but at least one token, goes to validation."""
    (piece,) = whole.pieces
    if len(piece) < 2:
        raise UsageError(
            f"{whole.name} is a single {unit}, which cannot be split: pass --val-data."
        )
    cut = len(piece) - max(round(VALIDATION_SHARE * len(piece)), 1)
    return Corpus(
        Split(f"the first nine tenths of {whole.name}", (piece[:cut],)),
        Split(f"the last tenth of {whole.name}", (piece[cut:],)),
        unit,
        note="A single file is split by position; --val-data names another one to "
        "validate on.",
    )


def _are_shards(paths: list[pathlib.Path]) -> bool:
    shards = [path for path in paths if is_shard(path)]
    texts = [path for path in paths if not is_shard(path)]
    if shards and texts:
        raise UsageError(
            f"{texts[0]} is text and {shards[0]} is a token shard, but a run reads one "
            "kind: narrow --data and --val-data to it."
        )
    return bool(shards)


def _read_texts(files: Files, vocab_size: int) -> Split:
    documents = []
    for _, path in sorted(files.items()):
        text = path.read_bytes()
        if SEPARATOR in text:
            raise UsageError(
                f"{path} holds a zero byte, so it is no text: leave it out, say with a "
                "glob such as 'folder/**/*.txt' (token shards are named .bin)."
            )
        _check_tokens(path, np.frombuffer(text, np.uint8), vocab_size)
        documents.append(text)
    joined = np.frombuffer(SEPARATOR.join(documents), np.uint8)
    return Split(_describe(files), (joined,))


def _read_shards(files: Files, vocab_size: int) -> Split:
    pieces = []
    for _, path in sorted(files.items()):
        piece = read_shard(path)
        _check_tokens(path, piece, vocab_size)
        pieces.append(piece)
    return Split(_describe(files), tuple(pieces))


def _check_tokens(path: pathlib.Path, tokens: np.ndarray, vocab_size: int) -> None:
    largest = tokens.max()
    if largest >= vocab_size:
        raise UsageError(
            f"{path} holds token {largest}, but the vocabulary ends at {vocab_size - 1}: "
            f"pass --model.vocab-size {largest + 1} or more, or write the file again."
        )


def _standard_library() -> Files:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    files = {
        name: path
        for name, path in files.items()
        if NOT_LIBRARY.isdisjoint(name.split("/"))
        and path.is_file()
        and path.stat().st_size
    }
    if len(files) < 2:
        raise UsageError(f"{root} lacks the source of the standard library: pass --data.")
    return files


def _find(patterns: Iterable[str]) -> Files:
    """The files that patterns name."""
    found = {path for pattern in patterns for path in _expand(pattern)}
    # Once each, whatever links to it: it would be on both sides of the split.
    paths = {path.resolve(): path for path in sorted(found, reverse=True)}.values()
    root = os.path.commonpath([path.parent for path in paths])
    return {path.relative_to(root).as_posix(): path for path in paths}


def _expand(pattern: str) -> list[pathlib.Path]:
    exact = pathlib.Path(pattern).exists()
    named = [pattern] if exact else glob.glob(pattern, recursive=True)
    files = []
    for path in (pathlib.Path(name).absolute() for name in named):
        files += _files_below(path) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{pattern}: no such file, and none within or matching.")
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path} is no file that can be read: leave it out.")
        if path.stat().st_size == 0:
            raise UsageError(f"{path} is empty: write it again, or leave it out.")
    return files


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """All but hidden files and empty texts, which source trees are full of."""
    files, seen = list[pathlib.Path](), set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        shown = [name for name in folders if not name.startswith(".")]
        folders[:] = [] if real in seen else shown  # A link may lead back.
        seen.add(real)
        paths = (pathlib.Path(root, name) for name in names if not name.startswith("."))
        files += (path for path in paths if path.is_file())
    return [path for path in files if path.stat().st_size or is_shard(path)]


def _split_by_name(files: Files) -> tuple[Files, Files]:
    val = {name: path for name, path in files.items() if _VALIDATION_NAME.search(name)}
    if val:
        return {name: path for name, path in files.items() if name not in val}, val
    return _split_by_hash(files)


def _split_by_hash(files: Files) -> tuple[Files, Files]:
    """A tenth of the files, but at least one, goes to validation; none of a single one.

    Unless there are very few, a file's side depends on its name alone: adding files moves
    none of the others.
    """
    if len(files) < 2:
        return files, {}
    place = {name: _place(name) for name in files}
    in_order = sorted(files, key=place.__getitem__)
    wanted = sum(place[name] < VALIDATION_SHARE for name in files)
    count = min(max(wanted, 1), len(files) - 1)
    return (
        {name: files[name] for name in in_order[count:]},
        {name: files[name] for name in in_order[:count]},
    )


def _place(name: str) -> float:
    """A number in [0, 1), the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _describe(files: Files) -> str:
    first = str(files[min(files)])
    return first if len(files) == 1 else f"{first} (and {len(files) - 1} more files)"
