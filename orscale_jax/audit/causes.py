"""The likely cause of an update that differs on a mesh from that of one device."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Place: TypeAlias = tuple[slice, ...]

# What rounding moves in float32. The sorted entries of other matrices may be as close as
# 1e-4, where these are large.
_ROUNDING, _SORTED = 5e-3, 1e-5
_EVEN_SPECTRUM, _EVEN_ENTRIES = 0.6, 0.98  # See audit/probe.py.


def cause_of(
    found: Array,
    wanted: Array,
    agree: bool,
    shards: Sequence[Place],
    lengths: Sequence[int],
    alone: Iterable[tuple[str, Array, Sequence[Place]]],
) -> str:
    """The likely cause of a difference, in words.

    Args:
      found: The update on the mesh.
      wanted: The update on one device.
      agree: Whether all devices that hold an entry have the same.
      shards: The places of the devices' shards.
      lengths: The lengths of the mesh's axes.
      alone: The updates of devices that see their shards only, cut along some axes of the
        mesh: the axes, the update, the places of the shards.
    """
    if not np.isfinite(found).all():
        return "it is not finite on the mesh"
    if not agree:
        return "devices that hold the same entries have different updates of them"
    if not found.any() or not wanted.any():
        return f"it moves on {'the mesh' if found.any() else 'one device'} only"
    if (factor := _factor(found, wanted)) is not None:
        shard = found[shards[0]].shape
        causes = _causes_of_factor(factor, found.shape, shard, lengths)
        told = f": {', or '.join(causes)}" if causes else ""
        return f"it is {factor:.3g} times as large{told}"
    matrices = [*np.ndindex(found.shape[:-2])] if found.ndim > 2 else []
    if still := sum(not found[i].any() for i in matrices):
        return f"{still} of {len(matrices)} matrices do not move on the mesh"
    for what, places in (("shard", shards), ("matrix", matrices)):
        factors = [_factor(found[i], wanted[i]) for i in places if found[i].size > 1]
        if len(factors) > 1 and None not in factors:
            return f"each {what} has a factor of its own: a norm of each {what} alone"
    if _close(np.sort(found, None), np.sort(wanted, None), _SORTED):
        return "its entries are in wrong places: rows and columns, or shards, exchanged"
    if _even_entries(found) > _EVEN_ENTRIES > _even_entries(wanted):
        return "it is element-wise on the mesh: another rule, such as AdamW's"
    is_polar = _has_even_spectrum(wanted)
    for axes, other, places in alone:
        if None not in [_factor(found[at], other[at]) for at in places]:
            told = ": the matrix is orthogonalized by shards" if is_polar else ""
            return f"each shard along {axes} is computed alone{told}"
    if not is_polar:
        return "unknown"
    u, v = _wide_matrices(found), _wide_matrices(wanted)
    products = u @ v.conj().swapaxes(1, 2)
    if _close(products, products.conj().swapaxes(1, 2), 4 * _ROUNDING):
        return (
            "its singular vectors are right, but not its singular values: Newton–Schulz "
            "did not run, or began with a norm of too many or too few shards"
        )
    if _has_even_spectrum(found):
        return (
            "it is the polar factor of another matrix: shards of the momentum are wrong, "
            "or scaled by norms of too few shards"
        )
    return "it is no polar factor: Newton–Schulz did not run, or not on whole matrices"


def _factor(found: Array, wanted: Array) -> float | None:
    """The number by which one array is a multiple of the other, if it is one."""
    squares = np.vdot(wanted, wanted).real or 1
    factor = float(np.vdot(wanted, found).real / squares)
    return factor if _close(found, factor * wanted) else None


def _close(found: Array, wanted: Array, tolerance: float = _ROUNDING) -> bool:
    return bool(np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted))


def _causes_of_factor(
    factor: float, shape: Sequence[int], shard: Sequence[int], lengths: Sequence[int]
) -> list[str]:
    """What a factor of all entries may come from: norms, and scales of other shapes."""
    subsets = (itertools.combinations(lengths, n) for n in range(1, len(lengths) + 1))
    counts = sorted({math.prod(some) for some in itertools.chain(*subsets)})
    others: dict[str, Sequence[int]] = {}
    if len(shape) > 1:
        others = {"a shard": shard[-2:], "rows and columns exchanged": shape[:-3:-1]}
        for count in counts:
            m, n = (-(-size // count) * count for size in shape[-2:])
            others[f"a matrix padded to {m} × {n}"] = m, n
    candidates = [
        (f"the scale of {what}", (theirs / ours) ** 0.5)
        for what, other in others.items()
        for theirs, ours in zip(_scales(*other), _scales(*shape[-2:]), strict=True)
    ] + [
        (f"a norm that counts {count} shards too many or too few", count**power)
        for count, power in itertools.product(counts, (-1, -0.5, 0.5, 1))
    ]
    known = (what for what, x in candidates if math.isclose(factor, x, rel_tol=_ROUNDING))
    return list(dict.fromkeys(known))


def _scales(m: int, n: int) -> list[float]:
    """The squares of the scales of an m × n matrix that are in use."""
    return [max(m, n), max(1, n / m), n / m]


def _wide_matrices(x: Array) -> Array:
    """The matrices of an array by its last two axes, with no fewer columns than rows."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.swapaxes(1, 2) if x.shape[1] > x.shape[2] else x


def _has_even_spectrum(x: Array) -> bool:
    """Whether all singular values of each matrix are about equal."""
    if x.ndim < 2:
        return False
    x = _wide_matrices(x)
    gram = x @ x.conj().swapaxes(1, 2)
    squares = np.trace(gram, axis1=1, axis2=2).real ** 2
    return bool(
        np.all(squares > _EVEN_SPECTRUM * x.shape[1] * np.sum(abs(gram) ** 2, (1, 2)))
    )


def _even_entries(x: Array) -> float:
    """1 if all entries have one size, and less otherwise."""
    return float(np.mean(abs(x) ** 2) ** 2 / (np.mean(abs(x) ** 4) or 1))
