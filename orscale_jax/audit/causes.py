"""The likely cause of an update that differs on a mesh from that of one device."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
# A computation that a mesh may have carried out instead: its name, and its update.
Hypothesis: TypeAlias = tuple[str, Array]

# Rounding in float32, of what two equal computations differ by; of sorted entries, those
# of millions of other numbers of the same kind may be as close as 1e-4.
_ROUNDING, _SORTED = 5e-3, 1e-5
# See orscale_jax/audit/probe.py.
_EVEN_SPECTRUM, _EVEN_ENTRIES = 0.6, 0.98


class Difference(NamedTuple):
    """The first update of a leaf that differs on the mesh from that of one device."""

    found: Array  # On the mesh.
    wanted: Array
    agree: bool  # Whether all devices that hold an entry have the same.
    shards: Sequence[tuple[slice, ...]]  # The places of the devices' different shards.
    lengths: Sequence[int]  # Of the axes of the mesh.


def cause_of(
    difference: Difference,
    others: Mapping[str, Array],
    hypotheses: Callable[[], Iterable[Hypothesis]],
) -> str:
    """The likely cause, in words.

    Args:
      difference: Both updates.
      others: The updates of the other leaves on one device, by name.
      hypotheses: Other computations, which are carried out only if they are asked for.
    """
    found, wanted, agree, shards, _ = difference
    if not np.isfinite(found).all():
        return "it is not finite on the mesh"
    if not agree:
        return "devices that hold the same entries have different updates of them"
    if not found.any() or not wanted.any():
        where = "on one device" if found.any() else "on the mesh"
        return f"the parameter does not move {where}"
    if (scale := _factor(found, wanted)) is not None:
        return _of_factor(scale, difference)
    matrices = [*np.ndindex(found.shape[:-2])] if found.ndim > 2 else []
    for what, places in (("shard", shards), ("matrix", matrices)):
        factors = [_factor(found[i], wanted[i]) for i in places if found[i].size > 1]
        known = [factor for factor in factors if factor is not None]
        if 1 < len(known) == len(factors):
            return (
                f"each {what} has a factor of its own, {min(known):.3g} to "
                f"{max(known):.3g}: a norm of too few or too many shards or matrices"
            )
    still = [i for i in matrices if wanted[i].any() and not found[i].any()]
    if still:
        return f"{len(still)} of {len(matrices)} matrices do not move on the mesh"
    for name, other in others.items():
        if other.shape == found.shape and _close(found, other):
            return f"it is the update of {name}"
    if _close(np.sort(found, None), np.sort(wanted, None), _SORTED):
        return "its entries are in wrong places: rows and columns, or shards, exchanged"
    if found.ndim > 1 and _even_entries(found) > _EVEN_ENTRIES > _even_entries(wanted):
        return "it is element-wise on the mesh: another rule, such as AdamW's"
    for words, other in hypotheses():
        pairs = [(found[i], other[i]) for i in shards]
        if all(_factor(*pair) is not None for pair in pairs):
            parts_are_even = all(_even_spectrum(part) for part, _ in pairs)
            if "alone" in words and parts_are_even and _even_spectrum(wanted):
                return f"{words}: the matrix is orthogonalized by shards"
            return f"{words}: a norm of too few shards"
    if not _even_spectrum(wanted):
        return "unknown"
    if _same_singular_vectors(found, wanted):
        return (
            "its singular vectors are right, but not its singular values: Newton–Schulz "
            "began with a norm of too many or too few shards, or took other steps"
        )
    if _even_spectrum(found):
        return (
            "it is the polar factor of another matrix: shards of the momentum are wrong, "
            "or scaled by different norms"
        )
    return "it is not the polar factor of any matrix: parts of it are computed alone"


def _factor(found: Array, wanted: Array) -> float | None:
    """The number by which one array is a multiple of the other, if it is one."""
    squares = float(np.vdot(wanted, wanted).real)
    if not squares:
        return None if found.any() else 1.0
    factor = float(np.vdot(wanted, found).real) / squares
    return factor if _close(found, factor * wanted) else None


def _close(found: Array, wanted: Array, tolerance: float = _ROUNDING) -> bool:
    """Whether the norm of the difference is within rounding."""
    return bool(np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted))


def _of_factor(factor: float, difference: Difference) -> str:
    """What a factor of all entries may come from."""
    *_, shards, lengths = difference
    shape, causes = difference.found.shape, []
    sizes = [len(range(*at.indices(n))) for at, n in zip(shards[0], shape, strict=True)]
    counts = {
        math.prod(some)
        for size in range(1, len(lengths) + 1)
        for some in itertools.combinations(lengths, size)
    } - {1}

    def scales(m: int, n: int) -> list[float]:
        """The squared scales of an m × n matrix that are in use."""
        return [max(m, n), max(1, n / m), max(1, m / n), n / m]

    if len(shape) > 1:
        m, n = shape[-2:]
        others = {"a shard": sizes[-2:], "rows and columns exchanged": (n, m)}
        for count in sorted(counts):
            rows, columns = (-(-x // count) * count for x in (m, n))
            others[f"a matrix padded to {rows} × {columns}"] = (rows, columns)
        causes = [
            f"the scale of {what}"
            for what, other in others.items()
            if tuple(other) != (m, n)
            and any(
                math.isclose(abs(factor), (theirs / ours) ** 0.5, rel_tol=_ROUNDING)
                for theirs, ours in zip(scales(*other), scales(m, n), strict=True)
            )
        ]
    for count, power in itertools.product(sorted(counts), (-1, -0.5, 0.5, 1)):
        if math.isclose(abs(factor), count**power, rel_tol=_ROUNDING):
            causes.append(f"a norm that counts {count} shards too many or too few")
    known = f": {', or '.join(dict.fromkeys(causes))}" if causes else ""
    return f"it is {factor:.3g} times as large{known}"


def _matrices(x: Array) -> Array:
    """The matrices of an array by its last two axes, with more columns than rows."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.swapaxes(1, 2) if x.shape[1] > x.shape[2] else x


def _even_spectrum(x: Array) -> bool:
    """Whether all singular values of each matrix are about equal."""
    if x.ndim < 2:
        return False
    x = _matrices(x)
    gram = x @ x.conj().swapaxes(1, 2)
    traces = np.trace(gram, axis1=1, axis2=2).real
    spread = x.shape[1] * np.sum(abs(gram) ** 2, (1, 2))
    return bool(np.all(traces**2 > _EVEN_SPECTRUM * spread))


def _even_entries(x: Array) -> float:
    """How even the entries are: 1 if they have one size."""
    return float(np.mean(abs(x) ** 2) ** 2 / np.mean(abs(x) ** 4))


def _same_singular_vectors(found: Array, wanted: Array) -> bool:
    """Whether U Vᵀ is symmetric for each matrix: both have one polar factor."""
    u, v = _matrices(found), _matrices(wanted)
    products = u @ v.conj().swapaxes(1, 2)
    return _close(products, products.conj().swapaxes(1, 2), 4 * _ROUNDING)
