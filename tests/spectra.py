"""Singular values of matrices on which rounding does most."""

import numpy as np


def adversarial(m, rng):
    """Spectra of ``m`` values by name; most have zeros that rounding makes negative."""
    return {
        "worst": np.r_[np.full(7, 0.377), np.zeros(m - 7)],
        "rank one": np.eye(m)[0],
        "rank one and noise": np.r_[1, np.full(m - 1, 1e-4)],
        "low rank": np.r_[np.ones(m // 8), np.zeros(m - m // 8)],
        "two clusters": np.r_[np.ones(m // 2), np.full(m // 2, 1e-3)],
        "log-uniform": 10 ** rng.uniform(-6, 0, m),
        "flat": np.ones(m),
    }
