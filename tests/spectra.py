"""Matrices of given singular values, and what becomes of them; adversarial spectra."""

import numpy as np
import scipy.linalg

from tests import oracle


def random_bases(m, n, seed=0):
    """Singular vectors at random, of the rows and of the columns."""
    rng = np.random.default_rng(seed)
    return [np.linalg.qr(rng.normal(size=(k, min(m, n))))[0] for k in (m, n)]


def hadamard_bases(m, n):
    """Bases with entries of one size: rounding errors agree in sign and do not cancel."""
    return [scipy.linalg.hadamard(k)[:, :m] / np.sqrt(k) for k in (m, n)]


def with_spectrum(singular_values, m, n, bases=random_bases):
    u, v = bases(m, n)
    return u * np.asarray(singular_values) @ v.T


def composed(x, rows):
    """The polynomials of the rows on the singular values of matrices, in float64."""
    u, sigma, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u * oracle.compose(rows, sigma)[..., None, :] @ vt


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
