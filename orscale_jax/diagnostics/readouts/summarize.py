"""Statistics of a reading as flat scalars, for any logger."""

import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from orscale_jax import _checks
from orscale_jax.diagnostics.per_matrix import classes_of, names_of, vector
from orscale_jax.diagnostics.readouts.reading import Reading, known_leaves
from orscale_jax.trees.boxes import PyTree

Vectors = Mapping[str, jax.Array]

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

    For :math:`\hat r`, r, the relative step and the growth it gives ``mean``, ``p05``,
    ``p50``, ``p95``, ``min`` and ``max``. Every matrix has weight 1, also in stacks and
    blocks; the first relative step of a matrix that was zero is infinite, and left out
    (NaN if there is no other).
    It also gives the shares of matrices at each bound (``share_at_r_min``,
    ``share_at_r_max``), without an update so far (``share_not_started``), with a c that
    is still unset (``share_not_anchored``), without initial scale
    (``share_without_scale``), and with a norm that is not finite (``share_not_finite``).

    Args:
      reading: From :func:`read`.
      classes: Tree of strings like the parameters, such as :func:`layer_classes` makes,
        or a prefix of one. None: no classes.
      prefix: The beginning of all names.
      matrices: Regular expression: single matrices with a match anywhere in their names
        (such as ``experts.up[3]``) are reported, too. None: none.

    Returns:
      Scalars by name, such as ``optimizer/trust_ratio/mean`` and
      ``optimizer/share_at_r_max``, of a class
      ``optimizer/attention_query/trust_ratio/p95``, of a matrix
      ``optimizer/blocks.0.up.kernel/growth``. Arrays of JAX, also under ``jax.jit``.

    Raises:
      ValueError: If ``classes`` does not fit, or ``matrices`` matches none.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics, orscale
      >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
      >>> reading = diagnostics.read(orscale(1e-3).init(params), params)
      >>> scalars = diagnostics.summarize(reading, classes={"up": "mlp", "down": None})
      >>> print(scalars["optimizer/trust_ratio/p50"], scalars["optimizer/mlp/growth/max"])
      1.0 1.0
    """
    trees = {name: tree for name, tree in reading._asdict().items() if tree is not None}
    leaves = {name: known_leaves(tree, reading) for name, tree in trees.items()}
    labels = classes_of(classes, reading.weight_norm)
    groups = {"": list(range(len(labels)))}
    if classes is not None:
        names = [label.replace(" ", "_") + "/" for label in labels]
        for name in sorted(set(names)):
            groups[name] = [i for i, other in enumerate(names) if other == name]
    scalars: dict[str, jax.Array] = {}
    for name, members in groups.items():
        vectors = {
            field: vector(known)
            for field, arrays in leaves.items()
            if (known := [arrays[i] for i in members if arrays[i] is not None])
        }
        if not any(x.size for x in vectors.values()):
            continue  # Stacks without matrices have no mean.
        of_group = _statistics(vectors) | _shares(vectors)
        scalars |= {f"{prefix}{name}{key}": value for key, value in of_group.items()}
    if matrices is not None:
        scalars |= _single(trees, matrices, prefix)
    return scalars


@jax.jit
def _statistics(vectors: Vectors) -> dict[str, jax.Array]:
    """Statistics of all quantities, from one sort."""
    names = [name for name in QUANTITIES if name in vectors]
    if not names:
        return {}
    # Some matrices may lack a quantity; infinity is left out below.
    longest = max(vectors[name].size for name in names)
    values = jnp.stack(
        [
            jnp.pad(x, (0, longest - x.size), constant_values=jnp.inf)
            for x in (vectors[name] for name in names)
        ]
    )
    known = jnp.where(jnp.isinf(values), jnp.nan, values)
    shares = jnp.array([*PERCENTILES.values()])
    rows = {
        "mean": jnp.nanmean(known, axis=1),
        **dict(zip(PERCENTILES, jnp.nanpercentile(known, shares, axis=1), strict=True)),
        "min": jnp.nanmin(known, axis=1),
        "max": jnp.nanmax(known, axis=1),
    }
    broken = jnp.isnan(values).any(axis=1)
    rows = {name: jnp.where(broken, jnp.nan, row) for name, row in rows.items()}
    return {
        f"{name}/{statistic}": row[index]
        for index, name in enumerate(names)
        for statistic, row in rows.items()
    }


def _shares(vectors: Vectors) -> dict[str, jax.Array]:
    return {
        share: jnp.mean(condition(vectors[field]), dtype=jnp.float32)
        for share, (field, condition) in SHARES.items()
        if field in vectors
    }


def _single(
    trees: Mapping[str, PyTree], expression: str, prefix: str
) -> dict[str, jax.Array]:
    """The quantities of the matrices whose names match."""
    names = names_of(trees["weight_norm"])
    try:
        chosen = {name for name in names if re.search(expression, name)}
    except re.error as error:
        raise ValueError(
            f"matrices={expression!r} is not a regular expression: {error}."
        ) from error
    if not chosen:
        _checks.refuse(
            "matrices", expression, f"no name has it; the first are {names[:3]}"
        )
    return {
        f"{prefix}{name}/{field}": value
        for field in QUANTITIES
        if field in trees
        for name, value in zip(
            names_of(trees[field]), vector(jax.tree.leaves(trees[field])), strict=True
        )
        if name in chosen
    }
