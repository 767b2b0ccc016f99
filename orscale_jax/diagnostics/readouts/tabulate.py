"""A reading as a table on the host, with a row for every matrix."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from orscale_jax.diagnostics.per_matrix import OTHER, classes_of, names_of
from orscale_jax.diagnostics.readouts.reading import Reading, known_leaves
from orscale_jax.trees.boxes import PyTree


def tabulate(
    reading: Reading,
    classes: PyTree | None = None,
    measurements: Mapping[str, PyTree] | None = None,
) -> dict[str, np.ndarray]:
    """Fetch a reading and lay it out as columns, with a row for every matrix.

    This waits for the device. ``pandas.DataFrame(tabulate(reading))`` is a data frame.

    Args:
      reading: From :func:`read`.
      classes: See :func:`summarize`.
      measurements: Further trees with one entry per matrix, by the name of their column.

    Returns:
      Arrays of equal length by name. The names are ``matrix``, ``class``, the fields of
      the reading that are not None, and the measurements.

    Raises:
      ValueError: If ``classes`` or a measurement does not fit, or an array is also on
        devices of other processes.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics, muon
      >>> params = {"up": jnp.ones((2, 8))}
      >>> table = diagnostics.tabulate(diagnostics.read(muon(1e-3).init(params), params))
      >>> list(table)
      ['matrix', 'class', 'weight_norm', 'started']
      >>> print(table["matrix"][0], table["weight_norm"])
      up [4.]
    """
    trees = {name: tree for name, tree in reading._asdict().items() if tree is not None}
    trees |= measurements or {}
    like = reading.weight_norm
    for name, tree in trees.items():
        _require_fitting(name, tree, like, whole=name in (measurements or {}))
    names, labels = names_of(like), classes_of(classes, like)
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(like)]
    columns = {"matrix": np.array(names), "class": np.repeat(labels or [OTHER], sizes)}
    arrays = jax.device_get([known_leaves(tree, reading) for tree in trees.values()])
    flat = (_flat(leaves, sizes) for leaves in arrays)
    return columns | dict(zip(trees, flat, strict=True))


def _flat(leaves: list[Any], sizes: list[int]) -> np.ndarray:
    """The entries of all leaves; those of a leaf that is None are NaN, or False."""
    dtype = next((leaf.dtype for leaf in leaves if leaf is not None), np.dtype("f"))
    missing = False if dtype.kind == "b" else np.nan
    return np.concatenate(
        [
            np.full(size, missing, dtype) if leaf is None else np.ravel(leaf)
            for leaf, size in zip(leaves, sizes, strict=True)
        ]
    )


def _require_fitting(name: str, tree: PyTree, like: PyTree, *, whole: bool) -> None:
    """Refuse other shapes and other matrices, or, if ``whole``, fewer matrices."""
    shapes, wanted = (
        {path: np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(t)}
        for t in (tree, like)
    )
    if not shapes.items() <= wanted.items() or (whole and shapes != wanted):
        raise ValueError(
            f"{name} does not have one entry for each matrix: pass a tree like those of "
            "the reading, with arrays of their shapes."
        )
    for path, leaf in jax.tree.leaves_with_path(tree):
        here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        if not here and not leaf.is_fully_replicated:
            raise ValueError(
                f"{name} at {jax.tree_util.keystr(path)} is also on devices of other "
                "processes: compile read() with replicated out_shardings, or gather "
                "it with jax.experimental.multihost_utils.process_allgather."
            )
