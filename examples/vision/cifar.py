"""CIFAR-10 from its standard files.

Either the binary version (data_batch_1.bin to data_batch_5.bin, test_batch.bin) or the
Python version (the same names without .bin), both from
https://www.cs.toronto.edu/~kriz/cifar.html. Nothing is downloaded.
"""

import io
import pathlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from examples.pretrain.errors import UsageError
from examples.vision.batches import CLASSES, SIZE, Images

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
IMAGES_PER_FILE = 10_000
PIXEL_BYTES = 3 * SIZE * SIZE
RECORD_BYTES = 1 + PIXEL_BYTES  # The label comes first.

# A file to its pixels, N×3072, and its labels, N.
Reader = Callable[[pathlib.Path], tuple[np.ndarray, np.ndarray]]


def read_cifar10(
    folder: pathlib.Path, images_per_file: int = IMAGES_PER_FILE
) -> tuple[Images, Images]:
    """The images for training and those for testing.

    Args:
      folder: Where the files lie, or the folder above, as the archives make it.
      images_per_file: How many images each file has to hold.

    Raises:
      UsageError: If files are missing, cut off, or of another format.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name the one with CIFAR-10's files.")
    archived = (folder / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py"))
    folder = next((below for below in archived if below.is_dir()), folder)
    # The version of which most files are there.
    versions: dict[str, Reader] = {".bin": _read_binary, "": _read_pickled}
    names = (*TRAIN_FILES, *TEST_FILES)
    missing = {
        suffix: [f"{n}{suffix}" for n in names if not (folder / f"{n}{suffix}").is_file()]
        for suffix in versions
    }
    suffix = min(versions, key=lambda suffix: len(missing[suffix]))
    if missing[suffix]:
        raise UsageError(
            f"{folder} lacks {', '.join(missing[suffix])} of CIFAR-10: unpack "
            "cifar-10-binary.tar.gz or cifar-10-python.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and name its folder."
        )

    def split(names: tuple[str, ...]) -> Images:
        found = []
        for file in (folder / f"{name}{suffix}" for name in names):
            pixels, labels = versions[suffix](file)
            wanted = images_per_file, PIXEL_BYTES
            if len(labels) != images_per_file or pixels.shape != wanted:
                raise UsageError(
                    f"{file} holds {len(labels)} labels and pixels of shape "
                    f"{pixels.shape}; expected {images_per_file} and {wanted} "
                    "(cut off?): unpack it again."
                )
            if labels.min() < 0 or labels.max() >= CLASSES:
                raise UsageError(
                    f"{file} holds label {labels.max()}, but CIFAR-10 has {CLASSES} "
                    "classes (CIFAR-100, or another format?): unpack it again."
                )
            found.append((pixels, labels))
        all_pixels, all_labels = map(np.concatenate, zip(*found, strict=True))
        planes = all_pixels.reshape(-1, 3, SIZE, SIZE)  # All red, all green, all blue.
        in_order = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        return Images(in_order, all_labels.astype(np.int32))

    return split(TRAIN_FILES), split(TEST_FILES)


def _read_binary(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    records = np.fromfile(file, np.uint8)
    if not records.size or records.size % RECORD_BYTES:
        raise UsageError(
            f"{file} has {records.size} bytes, which make no whole number of images of "
            f"{RECORD_BYTES} bytes (cut off?): unpack it again."
        )
    records = records.reshape(-1, RECORD_BYTES)
    return records[:, 1:], records[:, 0]


def _read_pickled(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with warnings.catch_warnings():
            # Python 2 pickled the flags of a dtype as integers.
            warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
            batch = _Unpickler(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"])
    except Exception as error:  # A broken pickle may raise anything.
        raise UsageError(
            f"{file} is no file of CIFAR-10's Python version ({error}): unpack it again."
        ) from error


class _Unpickler(pickle.Unpickler):
    """Loads arrays, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in _ARRAY_PARTS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ARRAY_PARTS[name]


# What a pickled array names; the first has moved from one private module to another.
_ARRAY_PARTS = {
    "_reconstruct": np.empty(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": np.dtype,
}
