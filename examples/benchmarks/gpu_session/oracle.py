"""The polar factor and Algorithm 1 in float64, in NumPy.

With the defaults of :func:`orscale_jax.orscale`: momentum 0.95, Nesterov, decay 0.1,
consistent RMS 0.2, calibrated ratios from 0.1 to 5.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from orscale_jax.newton_schulz.coefficients import PRESETS

ROWS = np.asarray(PRESETS["polar_express"])[:5].tolist()


def exact_polar(x: np.ndarray) -> np.ndarray:
    """The polar factor of a matrix of full rank, by its SVD."""
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def newton_schulz(x: np.ndarray, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Five steps of the plain iteration; operands of products are rounded to ``dtype``.

    Sums are in float64 for float64, and in float32 for narrower types. A zero matrix
    gives zero.
    """
    wide = np.float64 if dtype == np.float64 else np.float32

    def rounded(y: np.ndarray) -> np.ndarray:
        return y.astype(dtype).astype(wide)

    x = rounded(x / (np.linalg.norm(x) or 1.0))
    for a, b, c in ROWS:
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(b * gram + c * gram @ gram) @ x)
    return x


def orscale(
    weight: np.ndarray, gradients: Iterable[np.ndarray], rate: float
) -> np.ndarray:
    """What a matrix is after a step for each gradient."""
    momentum, c = np.zeros_like(weight), None
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient
        lookahead = 0.95 * momentum + gradient
        if c is None and not lookahead.any():
            continue  # Before its first direction a matrix does not decay.
        scale = 0.2 * max(weight.shape) ** 0.5
        direction = 0.1 * weight + scale * newton_schulz(lookahead)
        norm = np.linalg.norm(weight)
        if c is None:
            c = norm / (np.linalg.norm(direction) + 1e-6)
        ratio = norm / (np.linalg.norm(c * direction) + 1e-6)
        weight = weight - rate * np.clip(ratio, 0.1, 5.0) * direction
    return weight
