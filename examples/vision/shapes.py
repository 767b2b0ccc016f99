"""Ten shapes in noise: a data set that needs no files.

Each image has one shape of random place, size, angle and colour, before a background of
two random colours that may be lighter or darker than it, and noise. So no pixel says what
the shape is: a linear model has to guess, and a network has to find edges first.
"""

from collections.abc import Callable

import numpy as np

from examples.vision.batches import CLASSES, SIZE, Images

Coordinates = np.ndarray  # N×32×32, in radii of the shape.

SMALLEST, LARGEST = 8.0, 12.0  # Radii in pixels.
TILT = 0.5  # Largest angle, in radians.
NOISE = 12.0  # Standard deviation, of 256.
CONTRAST = 90.0  # Least distance of the shape's colour from the background's mean.
_CHUNK = 2_000  # Images that are drawn at once.


# By label: where a shape is, below zero inside and above zero outside, in radii.
SHAPES: dict[str, Callable[[Coordinates, Coordinates], np.ndarray]] = {
    "disk": lambda x, y: np.hypot(x, y) - 0.9,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.7) - 0.22,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.78,
    "frame": lambda x, y: np.abs(np.maximum(np.abs(x), np.abs(y)) - 0.62) - 0.2,
    "triangle": lambda x, y: -0.52 + np.max(
        [x * np.cos(a) + y * np.sin(a) for a in 2 * np.pi / 3 * np.arange(3)], axis=0),
    "cross": lambda x, y: np.minimum(
        np.maximum(np.abs(x) - 1, np.abs(y) - 0.27),
        np.maximum(np.abs(x) - 0.27, np.abs(y) - 1)),
    "star": lambda x, y: (
        np.hypot(x, y) - 0.68 - 0.34 * np.cos(5 * np.arctan2(y, x))),
    "bar": lambda x, y: np.maximum(np.abs(x) - 1, np.abs(y) - 0.4),
    "pair": lambda x, y: np.hypot(np.abs(x) - 0.58, y) - 0.42,
    "crescent": lambda x, y: np.maximum(np.hypot(x, y) - 1, 0.75 - np.hypot(x - 0.5, y)),
}  # fmt: skip


def draw_shapes(
    train: int = 10_000, test: int = 2_000, seed: int = 0
) -> tuple[Images, Images]:
    """Images for training and others for testing, in which all shapes are as frequent.

    The images depend on the seed and on their side alone: those of a smaller number are
    the first of a larger one.
    """
    return _draw(train, (seed, 0)), _draw(test, (seed, 1))


def _draw(count: int, seed: tuple[int, int]) -> Images:
    labels = np.arange(count, dtype=np.int32) % CLASSES
    chunks = [
        _draw_chunk(labels[start : start + _CHUNK], np.random.default_rng((*seed, start)))
        for start in range(0, count, _CHUNK)
    ]
    empty = np.empty((0, SIZE, SIZE, 3), np.uint8)
    return Images(np.concatenate([empty, *chunks]), labels)


def _draw_chunk(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # Drawn for a whole chunk, so that the number of images changes none of them.
    radius = rng.uniform(SMALLEST, LARGEST, _CHUNK)
    coverage = np.empty((len(labels), SIZE, SIZE))
    x, y = _coordinates(radius, rng)
    for label, distance in enumerate(SHAPES.values()):
        of_class = np.flatnonzero(labels == label)
        in_pixels = distance(x[of_class], y[of_class]) * _per_image(radius[of_class])
        coverage[of_class] = np.clip(0.5 - in_pixels, 0, 1)
    shape, background = _colours(rng)
    noise = rng.normal(0, NOISE, (_CHUNK, SIZE, SIZE, 3))
    count = len(labels)
    share = coverage[..., None]
    pixels = share * shape[:count] + (1 - share) * background[:count] + noise[:count]
    return np.clip(pixels.round(), 0, 255).astype(np.uint8)


def _coordinates(
    radius: np.ndarray, rng: np.random.Generator
) -> tuple[Coordinates, Coordinates]:
    """Each pixel's place as the shape sees it: moved, turned and scaled."""
    angle = rng.uniform(-TILT, TILT, _CHUNK)
    room = SIZE / 2 - radius  # All but corners is within the image.
    centre = rng.uniform(-1, 1, (2, _CHUNK)) * room
    pixel = np.arange(SIZE) - (SIZE - 1) / 2
    dx = pixel[None, None, :] - _per_image(centre[0])
    dy = pixel[None, :, None] - _per_image(centre[1])
    cos, sin = _per_image(np.cos(angle) / radius), _per_image(np.sin(angle) / radius)
    return cos * dx + sin * dy, cos * dy - sin * dx


def _colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A colour of the shape, and a background that blends two."""
    shape, one, other = rng.uniform(30, 225, (3, _CHUNK, 1, 1, 3))
    angle = rng.uniform(0, 2 * np.pi, _CHUNK)
    pixel = np.linspace(-0.5, 0.5, SIZE)
    along = _per_image(np.cos(angle)) * pixel[None, None, :]
    along = along + _per_image(np.sin(angle)) * pixel[None, :, None]
    share = np.clip(along + 0.5, 0, 1)[..., None]
    background = share * one + (1 - share) * other
    # Move the shape's colour away from the background's mean where they are too close.
    gap = shape - (one + other) / 2
    size = np.linalg.norm(gap, axis=-1, keepdims=True)
    stretch = np.maximum(CONTRAST / np.maximum(size, 1e-6), 1)
    return shape + (stretch - 1) * gap, background


def _per_image(values: np.ndarray) -> np.ndarray:
    return values[:, None, None]
