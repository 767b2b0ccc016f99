"""Images, which of them a step sees, and how they are changed.

Both are a function of seed and step. The augmentation is that of the DavidNet speedrun: a
random crop of 32×32 out of the image with 4 reflected pixels on each side, a horizontal
flip of one image in two, and a square of 8×8 cut out, that is, set to the mean. The
paper's public code cuts nothing out.

References:
  Page 2018, *How to train your ResNet*; DeVries & Taylor 2017, arXiv:1708.04552.
"""

import dataclasses

import grain
import numpy as np

from examples.pretrain.errors import UsageError

CLASSES = 10
SIZE = 32
PADDING = 4
CUTOUT = 8
# From the padded image to the pixels of the image, along one axis: 4 3 2 1 0 1 2 …
_REFLECTED = np.pad(np.arange(SIZE), PADDING, mode="reflect")

# "pixels", B×32×32×3 in float32, and "labels", B in int32.
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Images:
    """One side of a data set."""

    pixels: np.ndarray  # N×32×32×3, uint8.
    labels: np.ndarray  # N, int32, below 10.

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of R, G and B over all pixels, float32."""

    mean: np.ndarray
    std: np.ndarray

    def normalize(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels as float32 of mean 0 and variance 1."""
        return (pixels.astype(np.float32) - self.mean) / self.std


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to an image of training."""

    statistics: Statistics  # Of the training images.
    cutout: int = CUTOUT  # The side of the square that is cut out; 0 for none.

    def __post_init__(self) -> None:
        if not 0 <= self.cutout <= SIZE:
            raise UsageError(f"cutout {self.cutout} must be from 0 to {SIZE}.")

    def __call__(self, example: Batch, rng: np.random.Generator) -> Batch:
        """The example as one epoch shows it."""
        shifts, cuts = 2 * PADDING + 1, SIZE - self.cutout + 1
        top, left, cut_top, cut_left, flip = rng.integers((shifts, shifts, cuts, cuts, 2))
        rows = _REFLECTED[top : top + SIZE]
        columns = _REFLECTED[left : left + SIZE][:: -1 if flip else 1]
        cropped = example["pixels"][rows[:, None], columns]
        pixels = self.statistics.normalize(cropped)
        cut = np.s_[cut_top : cut_top + self.cutout, cut_left : cut_left + self.cutout]
        pixels[cut] = 0.0
        return {"pixels": pixels, "labels": example["labels"]}


@dataclasses.dataclass(frozen=True)
class _Examples:
    """Images one by one."""

    images: Images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"pixels": self.images.pixels[index], "labels": self.images.labels[index]}


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


def train_examples(
    images: Images, augmentation: Augmentation, batch_size: int, seed: int
) -> grain.MapDataset:
    """Images without end; an epoch shows every one once, in a new order.

    What example i is does not depend on the examples asked for before.

    Raises:
      UsageError: If they do not fill a batch.
    """
    if len(images) < batch_size:
        raise UsageError(
            f"A batch of {batch_size} is more than the {len(images)} images: lower it."
        )
    shuffled = grain.MapDataset.source(_Examples(images)).seed(seed).shuffle()
    # Repeated first: an image is changed in another way in each epoch.
    return shuffled.repeat().random_map(augmentation)


def evaluation_examples(
    images: Images, statistics: Statistics, count: int | None = None
) -> grain.MapDataset:
    """The first images in their order, or all, normalized and not augmented."""

    def normalized(example: Batch) -> Batch:
        return example | {"pixels": statistics.normalize(example["pixels"])}

    examples = grain.MapDataset.source(_Examples(images)).map(normalized)
    return examples if count is None else examples[:count]
