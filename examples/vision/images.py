"""Labelled images, and what normalizes them."""

import dataclasses

import numpy as np

CLASSES = 10
SIZE = 32


@dataclasses.dataclass(frozen=True)
class Images:
    """One side of a data set.

    Attributes:
      pixels: N×32×32×3, uint8.
      labels: N, int32, below 10.
    """

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each channel, over all pixels.

    Attributes:
      mean: Of R, G and B, float32.
      std: Likewise.
    """

    mean: np.ndarray
    std: np.ndarray

    def normalize(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels as float32 of mean 0 and variance 1."""
        return (pixels.astype(np.float32) - self.mean) / self.std


def statistics(images: Images) -> Statistics:
    """The statistics of images, as a rule those of training."""
    values = np.arange(256.0)
    means, stds = [], []
    for channel in range(3):
        # Exact, and without a copy of all pixels in float64.
        share = np.bincount(images.pixels[..., channel].ravel(), minlength=256)
        mean = np.average(values, weights=share)
        means.append(mean)
        stds.append(np.sqrt(np.average((values - mean) ** 2, weights=share)))
    return Statistics(np.array(means, np.float32), np.array(stds, np.float32))
