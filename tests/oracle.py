"""Algorithm 1 of the paper in float64 NumPy, written from the paper alone.

It shares no code with the package but the default clip: matrices are 2-D arrays in a
dict, one Python object per matrix, plain loops.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from orscale_jax.transforms.trust_ratio import R_MAX, R_MIN

# Amsel et al. 2025 (arXiv:2505.16932): 5 steps, lower bound 1e-3, safety factor 1.02.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def svd_polar(x):
    """The exact polar factor of a full-rank matrix."""
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def newton_schulz(x, rows=POLAR_EXPRESS, safety=1.02):
    x = np.asarray(x, np.float64)
    norm = np.linalg.norm(x)
    if norm == 0:
        return np.zeros_like(x)
    return iterated(x / (safety * norm), rows)


def iterated(x, rows):
    """The steps alone, of a matrix that is normalized."""
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def rows_of(table, steps):
    """One row per step; beyond the table its last."""
    return [table[min(i, len(table) - 1)] for i in range(steps)]


def compose(rows, x):
    """What the steps make of a singular value."""
    for a, b, c in rows:
        x = a * x + b * x**3 + c * x**5
    return x


def frobenius(x, eps):
    return np.linalg.norm(x) + eps


def root_mean_square(x, eps):
    return np.sqrt(np.mean(x**2)) + eps


class NeuronRMS:
    """NorMuon's normalization of one (inputs, neurons) matrix (arXiv:2510.05491)."""

    def __init__(self, b2=0.95, eps=1e-8, kept=False):
        self.b2, self.eps, self.kept = b2, eps, kept
        self.mean_squares = 0.0

    def __call__(self, q):
        squares = np.array([np.mean(neuron**2) for neuron in q.T])
        self.mean_squares = self.b2 * self.mean_squares + (1 - self.b2) * squares
        normalized = q / (np.sqrt(self.mean_squares) + self.eps)
        norm = np.linalg.norm(q) if self.kept else np.sqrt(min(q.shape))
        return normalized * norm / np.linalg.norm(normalized)


def balanced_polar(x, iterations=2, beta=0.5):
    """Aurora's polar factor (arXiv:2606.27715), for a matrix without rows of zeros."""
    m, n = np.shape(x)
    if m < n:
        return balanced_polar(np.transpose(x), iterations, beta).T
    if m == n:
        return newton_schulz(x)
    weights = 1 / np.linalg.norm(x, axis=1)
    for _ in range(iterations - 1):
        leverage = np.sum(newton_schulz(np.diag(weights) @ x) ** 2, axis=1)
        weights = weights * (n / m / leverage) ** beta
    return newton_schulz(np.diag(weights) @ x)


@dataclasses.dataclass
class Matrix:
    """One matrix under OrScale (``adaptive``), Muon, an ablation or a relative.

    ``denominator`` names what the ratio's denominator is the ``norm`` of, ``polar`` makes
    Q, ``after_q`` makes what Q goes through before s, ``anchor`` is what sets c: where Q
    is not zero, for the first time since the start or since :meth:`unset`. While the
    momentum is zero the matrix rests: D is zero.
    """

    weight: np.ndarray
    rms: float | None = 0.2
    calibrate: bool = True
    adaptive: bool = True
    momentum: float = 0.95
    nesterov: bool = True
    decay: float = 0.1
    r_min: float = R_MIN
    r_max: float = R_MAX
    eps: float = 1e-6
    denominator: str = "D"
    norm: Callable = frobenius
    coupled: bool = True
    polar: Callable = newton_schulz
    after_q: Callable = lambda: lambda q: q
    anchor: str = "first"
    anchor_steps: int = 100
    c: float | None = None
    first_weight_norm: float = 0.0
    r: float = 1.0
    clipped: float = 1.0

    def __post_init__(self):
        self.weight = np.asarray(self.weight, np.float64)
        self.buffer = np.zeros_like(self.weight)
        self.normalize = self.after_q()
        self.unset()

    def unset(self):
        """Forget c."""
        self.directions = []
        self.c = None if self.calibrate else 1.0

    def step(self, gradient, rate):
        self.look(gradient)
        self.move(rate)

    def look(self, gradient):
        """The direction and its ratio."""
        gradient = np.asarray(gradient, np.float64)
        self.buffer = self.momentum * self.buffer + gradient
        lookahead = (
            self.momentum * self.buffer + gradient if self.nesterov else self.buffer
        )
        # What float32 flushes to zero is zero.
        self.moves = not np.abs(lookahead).max() < np.finfo(np.float32).tiny
        lookahead = lookahead if self.moves else np.zeros_like(lookahead)
        scale = 1.0 if self.rms is None else self.rms * max(self.weight.shape) ** 0.5
        self.scaled_q = scale * self.normalize(self.polar(lookahead))
        decayed = self.decay * self.moves * self.weight
        self.direction = decayed + self.scaled_q
        if self.adaptive:
            seen = {"D": self.direction, "sQ": self.scaled_q, "M": lookahead}
            self.measure(seen[self.denominator])

    def move(self, rate):
        if self.coupled:
            self.weight = self.weight - rate * self.clipped * self.direction
        else:
            shrunk = (1 - rate * self.decay * self.moves) * self.weight
            self.weight = shrunk - rate * self.clipped * self.scaled_q

    def measure(self, measured):
        numerator = self.norm(self.weight, 0)
        if self.calibrate and self.moves:
            self.c = self.anchored(numerator, measured)
        neutral = self.c in (None, np.inf) or numerator == 0 or not measured.any()
        self.r = 1.0 if neutral else numerator / self.norm(self.c * measured, self.eps)
        self.clipped = min(max(self.r, self.r_min), self.r_max)

    def anchored(self, weight_norm, measured):
        if not self.directions:
            self.first_weight_norm = weight_norm
        self.directions.append(self.norm(measured, self.eps))
        if self.first_weight_norm == 0:
            return np.inf
        count = self.anchor_steps if self.anchor == "largest" else 1
        return self.first_weight_norm / max(self.directions[:count])


@dataclasses.dataclass
class Sphere:
    """One matrix under Hyperball, with Q for the update (arXiv:2606.16899)."""

    weight: np.ndarray
    momentum: float = 0.95

    def __post_init__(self):
        self.weight = np.asarray(self.weight, np.float64)
        self.radius = np.linalg.norm(self.weight)
        self.buffer = np.zeros_like(self.weight)

    def step(self, gradient, rate):
        gradient = np.asarray(gradient, np.float64)
        self.buffer = self.momentum * self.buffer + gradient
        q = newton_schulz(self.momentum * self.buffer + gradient)
        moved = self.weight - rate * self.radius * q / np.linalg.norm(q)
        self.weight = self.radius * moved / np.linalg.norm(moved)


@dataclasses.dataclass
class AdamW:
    """Decoupled weight decay, bias-corrected moments (arXiv:1711.05101)."""

    weight: np.ndarray
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1

    def __post_init__(self):
        self.weight = np.asarray(self.weight, np.float64)
        self.first = np.zeros_like(self.weight)
        self.second = np.zeros_like(self.weight)
        self.count = 0

    def step(self, gradient, rate):
        gradient = np.asarray(gradient, np.float64)
        self.count += 1
        self.first = self.b1 * self.first + (1 - self.b1) * gradient
        self.second = self.b2 * self.second + (1 - self.b2) * gradient**2
        first = self.first / (1 - self.b1**self.count)
        second = self.second / (1 - self.b2**self.count)
        step = first / (np.sqrt(second) + self.eps) + self.decay * self.weight
        self.weight = self.weight - rate * step
