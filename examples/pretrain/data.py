"""Which files a run reads, and which of them, or which part, it keeps for validation.

Files are text, read as bytes, or shards of uint16 tokens. nanoGPT writes the tokens alone
(train.bin, val.bin). modded-nanogpt puts 256 int32 before them: a magic number, the
version of the format, the count of tokens, zeros.
"""

import dataclasses
import glob
import hashlib
import os
import pathlib
import re
import sysconfig
from collections.abc import Sequence

import numpy as np

from examples.pretrain.errors import UsageError

Files = dict[str, pathlib.Path]  # By name: the path below their common folder.

SEPARATOR = b"\0"  # Between documents. No text holds it.
VALIDATION_SHARE = 0.1
_VALIDATION_NAME = re.compile(r"(?<![a-z])val(id|idation)?(?![a-z])", re.IGNORECASE)
MAGIC, MAGIC_OF_UINT32, VERSION = 20240520, 20240801, 1
HEADER_INTS = 256
# What other formats begin with.
OTHER_FORMATS = {
    b"\x93NUMPY": "a .npy file", b"PK\x03\x04": "a zip or .npz file",
    b"\x1f\x8b\x08": "a gzip file", b"\x28\xb5\x2f\xfd": "a zstd file",
}  # fmt: skip

# Not of the library's kind: tests, tables of characters, one huge help text, what some
# versions of Python lack, and what others have installed.
NOT_LIBRARY = frozenset(
    "site-packages dist-packages __pycache__ test tests idle_test idlelib lib2to3 "
    "ensurepip distutils turtledemo encodings pydoc_data __phello__".split()
)


@dataclasses.dataclass(frozen=True)
class Split:
    """One side of the corpus."""

    name: str  # Where it comes from, for messages.
    pieces: tuple[np.ndarray, ...]  # None continues another. All text is one piece.

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return sum(len(piece) for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a run trains on and is validated on."""

    train: Split
    val: Split  # From other files, or from another part of a single one.
    unit: str  # "byte" or "token".
    note: str = ""  # What the reader should know of the split.

    def fingerprint(self) -> str:
        """SHA-256 of all tokens and of the split."""
        digest = hashlib.sha256()
        for split in (self.train, self.val):
            digest.update(f"{len(split.pieces)} pieces;".encode())
            for piece in split.pieces:
                digest.update(f"{len(piece)} {piece.dtype.str};".encode())
                digest.update(piece.data)
        return digest.hexdigest()


def read_corpus(
    data: Sequence[str] = (), val_data: Sequence[str] = (), vocab_size: int = 256
) -> Corpus:
    """Reads files, folders and globs, or the source of Python's standard library.

    To validate on, it takes `val_data`, else the files with "val" in their name, else a
    tenth of the files by a hash of their names; of a single file its last tenth.
    """
    train = _find(data) if data else _standard_library()
    if val_data:
        val = _find(val_data)
        held_out = {path.resolve() for path in val.values()}
        train = {n: path for n, path in train.items() if path.resolve() not in held_out}
    else:
        val = {
            name: path for name, path in train.items() if _VALIDATION_NAME.search(name)
        }
        if not data or not val:
            val = _by_hash(train)
        train = {name: path for name, path in train.items() if name not in val}
    if not train:
        raise UsageError(
            f"--data {' '.join(data)} leaves nothing to train on beside the validation "
            "files: add files to it."
        )
    files = [*train.values(), *val.values()]
    shards = [path for path in files if _is_shard(path)]
    texts = [path for path in files if not _is_shard(path)]
    if shards and texts:
        raise UsageError(
            f"{texts[0]} is text and {shards[0]} is a token shard, but a run reads one "
            "kind: narrow --data and --val-data to it."
        )
    unit = "token" if shards else "byte"
    if val:
        return Corpus(_read(train, vocab_size), _read(val, vocab_size), unit)
    # The last tenth of a single file, but at least one token.
    whole = _read(train, vocab_size)
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


def read_shard(path: pathlib.Path) -> np.ndarray:
    """The tokens of a shard, mapped rather than read into memory."""
    size, offset = path.stat().st_size, 0
    with open(path, "rb") as file:
        start = file.read(8)
    for begins, kind in OTHER_FORMATS.items():
        if start.startswith(begins):
            raise UsageError(f"{path} is {kind}: write its tokens as a shard of uint16.")
    header = np.fromfile(path, "<i4", count=HEADER_INTS)
    if header.size and header[0] in (MAGIC, MAGIC_OF_UINT32):
        offset = 4 * HEADER_INTS
        wanted = [MAGIC, VERSION, max(size - offset, 0) // 2]
        if header.size < HEADER_INTS or header[:3].tolist() != wanted:
            raise UsageError(
                f"{path} begins with {header[:3].tolist()}: magic number, version and "
                f"count of tokens. A whole shard of uint16 tokens of this length has "
                f"{wanted} (cut off, or of another kind?): write it again, or convert it."
            )
    if size == offset or size % 2:
        raise UsageError(
            f"{path} holds {size - offset} bytes of tokens, which make no uint16 (empty, "
            "or cut off?): write it again, or leave it out."
        )
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=offset)
    low, high = sorted(int(half.max(initial=0)) for half in (tokens[::2], tokens[1::2]))
    # The halves of wider integers: the upper ones are zeros, or small.
    if len(tokens) >= 64 and high > 16 * low:
        raise UsageError(
            f"{path} holds at most {low} in every other place, and {high} elsewhere, as "
            "integers of 32 or 64 bits do: write its tokens as uint16."
        )
    return tokens


def _is_shard(path: pathlib.Path) -> bool:
    return path.suffix == ".bin"


def _read(files: Files, vocab_size: int) -> Split:
    """The pieces of shards, or all texts in one, in the order of their names."""
    pieces = []
    for _, path in sorted(files.items()):
        piece = read_shard(path) if _is_shard(path) else np.fromfile(path, np.uint8)
        if not _is_shard(path) and not piece.all():
            raise UsageError(
                f"{path} holds a zero byte, so it is no text: leave it out, say with a "
                "glob such as 'folder/**/*.txt' (token shards are named .bin)."
            )
        if (largest := piece.max()) >= vocab_size:
            raise UsageError(
                f"{path} holds token {largest}, but the vocabulary ends at "
                f"{vocab_size - 1}: pass --model.vocab-size {largest + 1} or more, or "
                "write the file again."
            )
        pieces.append(piece)
    first = str(files[min(files)])
    name = first if len(files) == 1 else f"{first} (and {len(files) - 1} more files)"
    if _is_shard(path):
        return Split(name, tuple(pieces))
    joined = SEPARATOR.join(piece.tobytes() for piece in pieces)
    return Split(name, (np.frombuffer(joined, np.uint8),))


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


def _find(patterns: Sequence[str]) -> Files:
    """The files that patterns name."""
    found = set[pathlib.Path]()
    for pattern in patterns:
        exact = pathlib.Path(pattern).exists()
        files = list[pathlib.Path]()
        for name in [pattern] if exact else glob.glob(pattern, recursive=True):
            path = pathlib.Path(name).absolute()
            files += _files_below(path) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"{pattern}: no such file, and none within or matching.")
        for path in files:
            if not path.is_file():
                raise UsageError(f"{path} is no file that can be read: leave it out.")
            if path.stat().st_size == 0:
                raise UsageError(f"{path} is empty: write it again, or leave it out.")
        found.update(files)
    # Once each, whatever links to it: it would be on both sides of the split.
    paths = {path.resolve(): path for path in sorted(found, reverse=True)}.values()
    root = os.path.commonpath([path.parent for path in paths])
    return {path.relative_to(root).as_posix(): path for path in paths}


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """All but hidden files and empty texts, which source trees are full of."""
    found = (
        path
        for path in folder.rglob("*")
        if not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
    files = [path for path in found if path.is_file()]
    return [path for path in files if path.stat().st_size or _is_shard(path)]


def _by_hash(files: Files) -> Files:
    """A tenth of the files, but at least one; none of a single one.

    Unless there are very few, a file's side depends on its name alone: adding files moves
    none of the others.
    """
    if len(files) < 2:
        return {}
    place = {
        # A number in [0, 1), the same on every machine and in every process.
        name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
        for name in files
    }
    in_order = sorted(files, key=place.__getitem__)
    wanted = sum(place[name] < VALIDATION_SHARE for name in files)
    count = min(max(wanted, 1), len(files) - 1)
    return {name: files[name] for name in in_order[:count]}
