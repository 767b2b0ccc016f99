"""Token shards: files of uint16 tokens, with or without a header.

nanoGPT writes the tokens alone (train.bin, val.bin). modded-nanogpt puts 256 int32
before them: a magic number, the version of the format, the count of tokens, zeros.
"""

import pathlib

import numpy as np

from examples.pretrain.errors import UsageError

MAGIC = 20240520
MAGIC_OF_UINT32 = 20240801
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


def is_shard(path: pathlib.Path) -> bool:
    """Whether a file is read as tokens, not as text."""
    return path.suffix == ".bin"


def read_shard(path: pathlib.Path) -> np.ndarray:
    """The tokens of a shard, mapped rather than read into memory.

    Raises:
      UsageError: If the file is empty, cut off, or of another format.
    """
    size = path.stat().st_size
    if size == 0:
        raise UsageError(f"{path} is empty: write the shard again, or leave it out.")
    if size % 2:
        raise UsageError(
            f"{path} has an odd length of {size} bytes, so it is no array of uint16 "
            "tokens (cut off?): write it again."
        )
    offset = _check_header(path, size)
    if size == offset:
        raise UsageError(f"{path} holds no tokens: write it again, or leave it out.")
    return np.memmap(path, dtype="<u2", mode="r", offset=offset)


def _check_header(path: pathlib.Path, size: int) -> int:
    """Where the tokens begin."""
    header = np.fromfile(path, dtype="<i4", count=min(HEADER_INTS, size // 4))
    if header.size and header[0] == MAGIC_OF_UINT32:
        raise UsageError(
            f"{path} is a shard of uint32 tokens (llm.c, Llama 3): convert it to uint16."
        )
    if not header.size or header[0] != MAGIC:
        return 0
    if header.size < HEADER_INTS:
        raise UsageError(f"{path} ends within its header (cut off?): write it again.")
    version, count, present = header[1], header[2], (size - HEADER_BYTES) // 2
    if version != VERSION:
        raise UsageError(
            f"{path} has version {version} of the shard format; only version {VERSION} "
            "is known: convert it."
        )
    if count != present:
        raise UsageError(
            f"{path} should hold {count} tokens by its header but holds {present} "
            "(cut off?): write it again."
        )
    return HEADER_BYTES
