"""The likely cause of an update that differs on a mesh from that of one device."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from orscale_jax.audit.probe import (
    EVEN_ENTRIES,
    EVEN_SPECTRUM,
    even_entries,
    even_spectrum,
)
from orscale_jax.parameters.axes import MatrixAxes

Array: TypeAlias = np.ndarray[Any, Any]
Shards: TypeAlias = list[tuple[tuple[slice, ...], Array]]  # Places and values.

# What rounding moves in float32. The sorted entries of other matrices may be as close as
# 1e-4, where these are large.
_ROUNDING, _SORTED = 5e-3, 1e-5


def cause_of(
    shards: Shards,
    wanted: Array,
    axes: MatrixAxes,
    counts: Sequence[int],
    alone: Iterable[tuple[str, Shards]],
) -> str:
    """The likely cause of a difference, in words.

    Args:
      shards: The update on the mesh.
      wanted: The update on one device.
      axes: The axes of its matrices.
      counts: The products of lengths of the mesh's axes.
      alone: The updates of devices that see their shards only, cut along some axes of the
        mesh, with these axes.
    """
    found = np.zeros_like(wanted)
    for at, values in shards:
        found[at] = values
    if not np.isfinite(found).all():
        return "it is not finite on the mesh"
    if any((found[at] != values).any() for at, values in shards):
        return "devices that hold the same entries have different updates of them"
    if not found.any() or not wanted.any():
        return f"it moves on {'the mesh' if found.any() else 'one device'} only"
    if _close(found, wanted):
        return "it is off by a few digits of a narrow dtype: a cast, or a narrow sum"
    if (factor := _factor(found, wanted)) is not None:
        shard = shards[0][1].shape
        causes = _causes_of_factor(factor, found.shape, shard, counts)
        told = f": {', or '.join(causes)}" if causes else ""
        return f"it is {factor:.3g} times as large{told}"
    matrices = [*np.ndindex(found.shape[:-2])] if found.ndim > 2 else []
    if still := sum(not found[i].any() for i in matrices):
        return f"{still} of {len(matrices)} matrices do not move on the mesh"
    places = [*{str(at): at for at, _ in shards}.values()]
    for what, parts in (("shard", places), ("matrix", matrices)):
        factors = [_factor(found[i], wanted[i]) for i in parts if found[i].size > 1]
        if len(factors) > 1 and None not in factors:
            return f"each {what} has a factor of its own: a norm of each {what} alone"
    if _close(np.sort(found, None), np.sort(wanted, None), _SORTED):
        return "its entries are in wrong places: rows and columns, or shards, exchanged"
    entries, of_one = (even_entries(jnp.asarray(x)) for x in (found, wanted))
    if entries > EVEN_ENTRIES > of_one:
        return "it is element-wise on the mesh: another rule, such as AdamW's"

    def is_polar(x: Array) -> bool:
        array, parts = jnp.asarray(x), range(len(axes.labels))
        spectra = (even_spectrum(array, axes, part) for part in parts)
        return x.ndim > 1 and all(spectrum > EVEN_SPECTRUM for spectrum in spectra)

    for names, of_shards in alone:
        factors = [_factor(found[at], values) for at, values in of_shards]
        if factors and None not in factors:
            told = ": the matrix is orthogonalized by shards" * is_polar(wanted)
            return f"each shard along {names} is computed alone{told}"
    if not is_polar(wanted):
        return "unknown"
    is_tall = found.shape[-2] > found.shape[-1]
    u, v = (x.swapaxes(-2, -1) if is_tall else x for x in (found, wanted))
    products = u @ v.conj().swapaxes(-2, -1)
    if _close(products, products.conj().swapaxes(-2, -1), 4 * _ROUNDING):
        return (
            "its singular vectors are right, but not its singular values: Newton–Schulz "
            "did not run, or began with a norm of too many or too few shards"
        )
    if is_polar(found):
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
    factor: float, shape: Sequence[int], shard: Sequence[int], counts: Sequence[int]
) -> list[str]:
    """What a factor of all entries may come from: norms, and scales of other shapes."""

    def scales(m: int, n: int) -> list[float]:
        return [max(m, n), max(1, n / m), n / m]  # Squares of those that are in use.

    others: dict[str, Sequence[int]] = {}
    if len(shape) > 1:
        others = {"a shard": shard[-2:], "rows and columns exchanged": shape[:-3:-1]}
        for count in counts:
            m, n = (-(-size // count) * count for size in shape[-2:])
            others[f"a matrix padded to {m} × {n}"] = m, n
    factors = {
        f"the scale of {what}": np.sqrt(np.divide(scales(*other), scales(*shape[-2:])))
        for what, other in others.items()
    }
    for count in counts:
        norm = f"a norm that counts {count} shards too many or too few"
        factors[norm] = np.power(float(count), (-1, -0.5, 0.5, 1))
    return [x for x, y in factors.items() if np.isclose(factor, y, rtol=_ROUNDING).any()]
