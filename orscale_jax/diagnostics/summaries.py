"""A reading as flat scalars for any logger, or as a table with a row for every matrix."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import validate
from orscale_jax.diagnostics.reading import Reading, fields_of, known_leaves
from orscale_jax.parameters.expressions import matching
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import distinct_names
from orscale_jax.trees.nodes import broadcast_prefix, is_function, is_masked

OTHER = "other"
# The quantities that are summarized, in this order; a reading of muon lacks some.
QUANTITIES = ("trust_ratio", "raw_trust_ratio", "relative_step", "growth")
PERCENTILES = {"p05": 5.0, "p50": 50.0, "p95": 95.0}

# Shares of matrices, and the field and the condition that they count.
SHARES: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    "share_at_r_min": ("at_r_min", jnp.asarray),
    "share_at_r_max": ("at_r_max", jnp.asarray),
    "share_not_started": ("started", jnp.logical_not),
    "share_not_anchored": ("calibration", lambda c: c == 0),
    "share_without_scale": ("calibration", jnp.isinf),
    "share_not_finite": ("weight_norm", lambda norm: ~jnp.isfinite(norm)),
}


def summarize(
    reading: Reading,
    classes: PyTree | None = None,
    prefix: str = "optimizer/",
    *,
    matrices: str | None = None,
) -> dict[str, jax.Array]:
    r"""Summarize a reading as flat scalars, over all matrices and over each class.

    :math:`\hat r`, r, the relative step and the growth each have ``mean``, ``p05``,
    ``p50``, ``p95``, ``min`` and ``max``. Every matrix has weight 1, also in stacks and
    blocks. The first relative step of a matrix that was zero is infinite, and is left out
    (NaN if there is no other).

    ``trust_ratio/uniform`` is the geometric mean of :math:`\hat r`, weighted by the
    relative steps if the reading has them. A ratio that all matrices share acts as a
    factor of the learning rate. ``trust_ratio/spread`` is the standard deviation of
    :math:`\log \hat r` with the same weights. Both are over matrices whose c is set and
    finite, whose D is not zero, and whose :math:`\hat r` is positive and finite. If there
    are no such matrices, they are 1 and 0.

    The shares of matrices are ``share_at_r_min``, ``share_at_r_max``,
    ``share_not_started`` (no update so far), ``share_not_anchored`` (c is still unset),
    ``share_without_scale`` (no initial scale) and ``share_not_finite`` (their norms).

    Args:
      reading: From :func:`read`.
      classes: Tree of strings like the parameters, such as :func:`layer_classes` makes,
        or a prefix of one. None: no classes.
      prefix: The beginning of all names.
      matrices: A regular expression. Matrices with a match anywhere in their names, such
        as ``experts.up[3]``, are also reported one by one. None: no matrices.

    Returns:
      Scalars by name, which are JAX arrays, also under ``jax.jit``. Examples of names are
      ``optimizer/trust_ratio/mean`` and ``optimizer/share_at_r_max`` for all matrices,
      ``optimizer/attention_query/trust_ratio/p95`` for a class, and
      ``optimizer/blocks.0.up.kernel/growth`` for one matrix.

    Raises:
      ValueError: If ``reading`` is not a reading, ``classes`` does not fit, or
        ``matrices`` is not an expression or matches no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics, orscale
      >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
      >>> reading = diagnostics.read(orscale(1e-3).init(params), params)
      >>> scalars = diagnostics.summarize(reading, classes={"up": "mlp", "down": None})
      >>> print(scalars["optimizer/trust_ratio/p50"], scalars["optimizer/mlp/growth/max"])
      1.0 1.0
    """
    trees = fields_of(reading)
    leaves = {name: known_leaves(tree, reading) for name, tree in trees.items()}
    class_tree = classes_of(classes, reading.weight_norm)
    labels = [label.replace(" ", "_") + "/" for label in class_tree]
    scalars: dict[str, jax.Array] = {}
    for group in ["", *sorted({*labels} if classes is not None else ())]:
        members = [i for i, label in enumerate(labels) if group in ("", label)]
        vectors = {
            field: vector(known)
            for field, arrays in leaves.items()
            if (known := [arrays[i] for i in members if arrays[i] is not None])
        }
        if not any(x.size for x in vectors.values()):
            continue  # Stacks without matrices have no mean.
        statistics = _statistics(vectors)
        scalars |= {f"{prefix}{group}{key}": value for key, value in statistics.items()}
    if matrices is None:
        return scalars
    chosen = matching("matrices", matrices, _names_of(reading.weight_norm))
    for field in [field for field in QUANTITIES if field in trees]:
        values = vector(jax.tree.leaves(trees[field]))
        pairs = zip(_names_of(trees[field]), values, strict=True)
        scalars |= {f"{prefix}{k}/{field}": x for k, x in pairs if k in chosen}
    return scalars


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
      the reading that are not None, and the measurements. If the optimizer of a matrix
      does not hold a field, the entry is NaN for numbers, False for flags, and True for
      ``started``.

    Raises:
      ValueError: If ``reading`` is not a reading, if ``classes`` or a measurement does
        not fit it, or if an array is also on devices of other processes.

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
    trees = fields_of(reading) | dict(measurements or {})
    like = reading.weight_norm
    wanted = {path: np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(like)}
    sizes = [math.prod(shape) for shape in wanted.values()]
    labels = np.repeat(classes_of(classes, like), sizes)
    columns = {"matrix": np.array(_names_of(like)), "class": labels}
    for name, tree in trees.items():
        rows_of_tree = jax.tree.leaves_with_path(tree)
        shapes = {path: np.shape(leaf) for path, leaf in rows_of_tree}
        # The optimizers of some leaves may not hold a field of the reading.
        lacking = shapes != wanted and name in (measurements or {})
        if lacking or not shapes.items() <= wanted.items():
            raise ValueError(
                f"{name} does not have one entry for each matrix: pass a tree like those "
                "of the reading, with arrays of their shapes."
            )
        for path, leaf in rows_of_tree:
            here = getattr(leaf, "is_fully_addressable", True)
            if not here and not leaf.is_fully_replicated:
                raise ValueError(
                    f"{name} at {jax.tree_util.keystr(path)} is also on devices of other "
                    "processes: compile read() with replicated out_shardings, or gather "
                    "it with jax.experimental.multihost_utils.process_allgather."
                )
        fetched = jax.device_get(known_leaves(tree, reading))
        leaves = [
            None if leaf is None else np.asarray(leaf, getattr(leaf, "dtype", float))
            for leaf in fetched
        ]
        dtypes = (leaf.dtype for leaf in leaves if leaf is not None)
        dtype = next(dtypes, np.dtype(np.float32))
        # Of a matrix that lacks a flag, no warning is due.
        missing = name == "started" if dtype.kind == "b" else np.nan
        columns[name] = np.concatenate(
            [
                np.full(size, missing, dtype) if leaf is None else np.ravel(leaf)
                for leaf, size in zip(leaves, sizes, strict=True)
            ]
        )
    return columns


def _is_label(node: Any) -> bool:
    return node is None or isinstance(node, str)


@jax.jit
def _statistics(vectors: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Statistics of all quantities, from one sort, and the shares."""
    statistics: dict[str, jax.Array] = {}
    fields = {name: vectors[name] for name in QUANTITIES if name in vectors}
    if fields:
        broken = jnp.array([jnp.isnan(x).any() for x in fields.values()])
        # NaN from here on: infinity, and what some matrices lack.
        longest = max(x.size for x in fields.values())
        counted = (jnp.where(jnp.isinf(x), jnp.nan, x) for x in fields.values())
        known = jnp.stack(
            [jnp.pad(x, (0, longest - x.size), constant_values=jnp.nan) for x in counted]
        )
        shares = jnp.array([*PERCENTILES.values()])
        percentiles = jnp.nanpercentile(known, shares, axis=1)
        rows = {
            "mean": jnp.nanmean(known, axis=1),
            **dict(zip(PERCENTILES, percentiles, strict=True)),
            "min": jnp.nanmin(known, axis=1),
            "max": jnp.nanmax(known, axis=1),
        }
        for statistic, row in rows.items():
            row = jnp.where(broken, jnp.nan, row)
            statistics |= {f"{name}/{statistic}": row[i] for i, name in enumerate(fields)}
    if "trust_ratio" in vectors:
        ratio, c = vectors["trust_ratio"], vectors["calibration"]
        measured = (c > 0) & jnp.isfinite(c) & (ratio > 0) & jnp.isfinite(ratio)
        measured &= vectors["direction_norm"] > 0
        step = vectors.get("relative_step", jnp.zeros_like(ratio))
        weight = jnp.where(measured & jnp.isfinite(step), step, 0)
        weight = jnp.where(jnp.any(weight > 0), weight, measured.astype(ratio.dtype))
        total, log = jnp.sum(weight), jnp.log(jnp.where(measured, ratio, 1))
        weight /= jnp.where(total > 0, total, 1)
        mean = jnp.sum(weight * log)
        statistics["trust_ratio/uniform"] = jnp.exp(mean)
        variance = jnp.sum(weight * jnp.square(log - mean))
        statistics["trust_ratio/spread"] = jnp.sqrt(variance)
    for share, (field, condition) in SHARES.items():
        if field in vectors:
            statistics[share] = jnp.mean(condition(vectors[field]), dtype=jnp.float32)
    return statistics


def _names_of(tree: PyTree) -> list[str]:
    """The names of the matrices: ``blocks.0.up``, or ``layers.up[2, 17]`` in a stack."""
    # With masked leaves, which have names in the table of describe, too.
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_masked)
    names = distinct_names(path for path, _ in leaves)
    return [
        name + (str(list(index)) if index else "")
        for name, (_, array) in zip(names, leaves, strict=True)
        if not is_masked(array)
        for index in np.ndindex(np.shape(array))
    ]


def classes_of(classes: PyTree | None, tree: PyTree) -> list[str]:
    """The class of each leaf; "other" where none is given."""
    if is_function(classes, _is_label):
        validate.refuse("classes", classes, "pass a tree, such as layer_classes(params)")
    misfit = "classes must be a tree of the parameters' structure, or a prefix of it"
    labels = broadcast_prefix(unbox(classes, _is_label), tree, misfit, _is_label)
    for label in jax.tree.leaves(labels, is_leaf=_is_label):
        if not _is_label(label):
            validate.refuse("classes", label, "pass a tree of strings")
    # By the leaves of the tree, which may hold None beside them.
    return jax.tree.leaves(jax.tree.map(lambda _, label: label or OTHER, tree, labels))


def vector(leaves: list[Any]) -> jax.Array:
    """The entries of all leaves one after the other, whole on every device."""
    whole = (typed_sharding.gather(jnp.asarray(leaf)) for leaf in leaves)
    return jnp.concatenate([x.reshape(math.prod(x.shape)) for x in whole])
