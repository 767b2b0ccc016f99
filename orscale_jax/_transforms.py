"""The stages of OrScale's matrix branch, each a gradient transformation of its own."""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import (
    _checks,
    _engine,
    _mesh,
    _param_shardings,
    _preconditioning,
    _sharding,
)
from orscale_jax._axes import LeafAxes
from orscale_jax._boxes import box_like, on_bare_arrays, unbox
from orscale_jax._matrix import (
    PyTree,
    WeightDimensionNumbers,
    is_axes_leaf,
    require_matrices,
)
from orscale_jax._param_shardings import ParamShardings
from orscale_jax._polar import Coefficients, coefficient_table
from orscale_jax._precision import compute_dtype
from orscale_jax._updates import require_params


def orthogonalize(
    *,
    ns_steps: int | jax.Array = 5,
    ns_coeffs: Coefficients = "polar_express",
    ns_dtype: DTypeLike | None = None,
    ns_preconditioning: str = "frobenius",
    max_stack_bytes: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    param_shardings: ParamShardings = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Replace every matrix by its polar factor, :math:`Q = \mathrm{NS}_k(\tilde M)`.

    Args:
      ns_steps: Newton–Schulz steps :math:`k`, at least 1.
      ns_coeffs: A preset or table of :func:`polar_factor`, such as
        :func:`polar_express_coefficients` makes.
      ns_dtype: As ``dtype`` of :func:`polar_factor`.
      ns_preconditioning: As ``preconditioning`` of :func:`polar_factor`.
      max_stack_bytes: Leaves whose matrices have one shape, or its transpose, go through
        Newton–Schulz together in stacks of up to this size, on each device. None:
        256 MiB, on TPU 16 (256 on Auto axes), and on CPU no more than 32 leaves.
      mesh: As in :func:`orscale`.
      param_shardings: As in :func:`orscale`.
      weight_dimension_numbers: As in :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or (from ``update``) a leaf is no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import orthogonalize
      >>> stage = orthogonalize(ns_steps=8)
      >>> grads = {"kernel": jnp.array([[0.0, 2.0], [-5.0, 0.0]])}
      >>> updates, _ = stage.update(grads, stage.init(grads))
      >>> print(updates["kernel"].round(3) + 0.0)
      [[ 0.  1.]
       [-1.  0.]]

    References:
      Lou & You, *OrScale*, eq. (1) and Algorithm 1, line 3.
    """
    _checks.count("ns_steps", ns_steps)
    _checks.dtype("ns_dtype", ns_dtype)
    _preconditioning.check("ns_preconditioning", ns_preconditioning)
    if max_stack_bytes is not None:
        _checks.count("max_stack_bytes", max_stack_bytes)
    _checks.mesh("mesh", mesh)
    _param_shardings.check(param_shardings)
    map_all = functools.partial(
        _engine.polar_factors,
        dtype=ns_dtype,
        max_bytes=max_stack_bytes,
        mesh=mesh,
        steps=ns_steps,
        table=coefficient_table(ns_coeffs, argument="ns_coeffs"),
        preconditioning=ns_preconditioning,
    )

    def init(params: PyTree) -> optax.EmptyState:
        _param_shardings.note_annotations(params)
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.EmptyState]:
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        # Where momentum is sharded and weights are not, Q is gathered, and in ns_dtype.
        like = updates if params is None else params
        parts = map_matrices(lambda axes, leaf: axes.matrices(leaf), axes_tree, updates)
        specs = map_matrices(_typed_specs, axes_tree, updates, like)
        known = _known_specs(param_shardings, axes_tree, updates, mesh)
        factors = iter(map_all(jax.tree.leaves(parts), jax.tree.leaves(specs), known))
        joined = functools.partial(_from_matrices, factors)
        return map_matrices(joined, axes_tree, updates, like), state

    return on_bare_arrays(optax.GradientTransformation(init, update))


def _typed_specs(axes: LeafAxes, _: jax.Array, like: jax.Array) -> list[PartitionSpec]:
    """How the matrices of a leaf like this one are sharded, as types say."""
    return [PartitionSpec(*_sharding.spec(part)) for part in axes.matrices(like)]


def _known_specs(
    given: ParamShardings,
    axes_tree: PyTree,
    updates: PyTree,
    mesh: Mesh | AbstractMesh | None,
) -> list[PartitionSpec] | None:
    """How all matrices are sharded on Auto axes, if that is known."""
    on_mesh = _mesh.mesh_of(jax.tree.leaves(updates), mesh)
    if on_mesh is None or not _mesh.is_auto(on_mesh):
        return None
    specs = _param_shardings.specs_of(given, updates, on_mesh)
    if specs is None:
        return None

    def of_leaf(axes: Any, leaf: Any, spec: Any) -> Any:
        if isinstance(axes, optax.MaskedNode):
            return axes
        return _param_shardings.matrix_specs(axes, leaf.shape, spec, on_mesh)

    found = jax.tree.map(of_leaf, axes_tree, updates, specs, is_leaf=is_axes_leaf)
    return jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _from_matrices(
    matrices: Iterator[jax.Array],
    axes: LeafAxes,
    _: jax.Array,
    leaf: jax.Array,
) -> jax.Array:
    """What is made of the next matrices, and shaped and sharded like a leaf."""

    def part(index: int) -> jax.Array:
        like = jax.eval_shape(functools.partial(axes.part, index=index), leaf)
        return axes.within.from_matrices(next(matrices), like)

    joined = axes.join([part(index) for index in range(len(axes.labels))])
    return _sharding.shard_like(joined, leaf)


def scale_by_shape(
    consistent_rms: ArrayLike | None = 0.2,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every ``(m, n)`` matrix by :math:`s = \text{rms} \cdot \sqrt{\max(m, n)}`.

    With it the entries of a semi-orthogonal Q have root mean square ``consistent_rms``
    whatever their shape, which matches AdamW's at 0.2.

    Args:
      consistent_rms: The root mean square; ``None`` for :math:`s = 1`. (Optax's own
        ``scale_by_shape`` takes ``None`` for another rule, the width scaling.)
      weight_dimension_numbers: As in :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or (from ``update``) a leaf is no matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_shape
      >>> stage = scale_by_shape(0.2)
      >>> updates = {"kernel": jnp.ones((2, 100))}
      >>> print(stage.update(updates, stage.init(updates))[0]["kernel"][0, 0])
      2.0

    References:
      Liu et al. 2025, arXiv:2502.16982, section 2.2; Lou & You, *OrScale*, section 2.
    """
    _checks.number("consistent_rms", consistent_rms, at_least=0, optional=True)
    if consistent_rms is None:
        return optax.identity()

    def root_of_larger(m: int, n: int) -> float:
        return math.sqrt(max(m, n))

    def scale(axes: LeafAxes, leaf: jax.Array) -> jax.Array:
        dtype = compute_dtype(leaf)
        rms = jnp.asarray(consistent_rms, dtype)
        factor = rms * jnp.asarray(axes.by_shape(root_of_larger, leaf), dtype)
        return (factor * leaf.astype(dtype)).astype(leaf.dtype)

    return per_matrix_leaf(scale, weight_dimension_numbers)


class FromFirstNonzeroUpdateState(NamedTuple):
    """State of :func:`from_first_nonzero_update`."""

    #: Tree as the matrices; leaves of the batch shape of their leaf, 0 or 1, dtype int8.
    started: PyTree
    #: The state of the inner transformation.
    inner_state: optax.OptState


def from_first_nonzero_update(
    inner: optax.GradientTransformation,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Apply ``inner`` to a matrix from the first step on which its update is not zero.

    OrScale makes D in it: a matrix that has received no momentum yet (an expert without
    tokens, a frozen branch) keeps :math:`D = 0` instead of :math:`D = \lambda W`. It
    stays as it is, and :math:`D \neq 0` tells the next stage that the paper's "first
    non-zero update" has come.

    Args:
      inner: A transformation that keeps the updates' structure, such as
        :func:`optax.add_decayed_weights`. What it makes of zeros before that step is
        replaced by zeros.
      weight_dimension_numbers: As in :func:`orscale`.

    Returns:
      A transformation whose state holds, per matrix, whether it has started, and the
      state of ``inner``, which runs at every step.

    Raises:
      ValueError: From ``init`` and ``update``, if a leaf is no matrix.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import from_first_nonzero_update
      >>> stage = from_first_nonzero_update(optax.add_decayed_weights(0.1))
      >>> params = {"kernel": jnp.ones((2, 2))}
      >>> state = stage.init(params)
      >>> zero = {"kernel": jnp.zeros((2, 2))}
      >>> print(stage.update(zero, state, params)[0]["kernel"].max())
      0.0

    References:
      Lou & You, *OrScale*, Definition 2.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> FromFirstNonzeroUpdateState:
        started = _filled(weight_dimension_numbers, params, 0, lambda _: jnp.int8)
        return FromFirstNonzeroUpdateState(started, inner.init(params))

    def update(
        updates: PyTree,
        state: FromFirstNonzeroUpdateState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, FromFirstNonzeroUpdateState]:
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        transformed, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        started = map_matrices(
            lambda axes, before, u: before | _any_nonzero(axes, u).astype(before.dtype),
            axes_tree,
            state.started,
            updates,
        )
        updates = map_matrices(
            lambda axes, on, u: jnp.where(
                per_matrix(axes, on, u) != 0, u, jnp.zeros_like(u)
            ),
            axes_tree,
            started,
            transformed,
        )
        return updates, FromFirstNonzeroUpdateState(started, inner_state)

    return on_bare_arrays(optax.GradientTransformationExtraArgs(init, update))


def _any_nonzero(axes: LeafAxes, leaf: jax.Array) -> jax.Array:
    """Whether a matrix has an entry that is not zero (NaN is not), of the batch shape."""
    # The reduction that Newton–Schulz begins with: of the same array, it runs once.
    return axes.reduce(functools.partial(jnp.max, initial=0), jnp.abs(leaf)) != 0


class CalibratedTrustRatioState(NamedTuple):
    """State of :func:`scale_by_calibrated_trust_ratio`.

    Trees as the matrices. Leaves have the batch shape of their leaf (``()`` for a plain
    matrix) and dtype float32 (float64 for float64 parameters).
    """

    #: The constant c, 0 while unset, inf for a matrix without initial scale.
    calibration: PyTree
    #: The ratio r before clipping, 1 before the first step.
    raw_trust_ratio: PyTree
    #: The ratio r̂ that was applied, 1 before the first step.
    trust_ratio: PyTree


def scale_by_calibrated_trust_ratio(
    *,
    calibrate: bool = True,
    r_min: ArrayLike = 0.1,
    r_max: ArrayLike = 5.0,
    eps: ArrayLike = 1e-6,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every direction D by its clipped, calibrated trust ratio.

    .. math::

      r = \frac{\|W\|_F}{c \, \|D\|_F + \varepsilon}, \qquad
      \hat r = \mathrm{clip}(r, r_{\min}, r_{\max}), \qquad D \mapsto \hat r D,

    where :math:`c = \|W\|_F / (\|D\|_F + \varepsilon)` is set once per matrix, at the
    first step at which D is not zero and everything in c is finite, so that r starts at
    1 and measures growth since then. Until then, and wherever D is zero, r is 1.

    A matrix whose norm is zero at that step has no initial scale: its c becomes infinite,
    which stands for "none", and it keeps r = 1 for good. A D that is not finite never
    enters c and gives r = NaN.

    Args:
      calibrate: Whether to anchor c; if False, c = 1. It may change between runs: a
        state without calibration is anchored at its next direction, and one with it
        goes on with c = 1.
      r_min: Lower bound of the ratio applied. ``-inf`` for none.
      r_max: Upper bound of the ratio applied, at least 0. ``inf`` for none.
      eps: The floor :math:`\varepsilon`, at least 0.
      weight_dimension_numbers: As in :func:`orscale`.

    Returns:
      A transformation with :class:`CalibratedTrustRatioState`. Norms and ratios are
      float32 (float64 for float64); updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, a leaf is no matrix, or ``params`` is
        missing from ``update``.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_calibrated_trust_ratio
      >>> stage = scale_by_calibrated_trust_ratio()
      >>> params, direction = {"kernel": jnp.ones((2, 2))}, {"kernel": jnp.eye(2)}
      >>> _, state = stage.update(direction, stage.init(params), params)
      >>> params = {"kernel": 3 * jnp.ones((2, 2))}
      >>> _, state = stage.update(direction, state, params)
      >>> print(state.trust_ratio["kernel"].round(3))
      3.0

    References:
      Lou & You, *OrScale*, Definitions 1 and 2, Algorithm 1, lines 4 to 11.
    """
    _checks.flag("calibrate", calibrate)
    _checks.number("r_min", r_min)
    _checks.number("r_max", r_max, at_least=0, infinite=True)
    _checks.ordered("r_min", r_min, "r_max", r_max)
    _checks.number("eps", eps, at_least=0)

    def init(params: PyTree) -> CalibratedTrustRatioState:
        def filled(value: float) -> PyTree:
            return _filled(weight_dimension_numbers, params, value, compute_dtype)

        return CalibratedTrustRatioState(
            calibration=filled(0.0 if calibrate else 1.0),
            raw_trust_ratio=filled(1.0),
            trust_ratio=filled(1.0),
        )

    scale = functools.partial(_scaled, calibrate, (eps, r_min, r_max))

    def update(
        updates: PyTree, state: CalibratedTrustRatioState, params: PyTree | None = None
    ) -> tuple[PyTree, CalibratedTrustRatioState]:
        require_params(updates, params)
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        scaled = map_matrices(scale, axes_tree, updates, params, state.calibration)

        pick = functools.partial(_picked, scaled)
        fields = (pick(f"state.{name}") for name in CalibratedTrustRatioState._fields)
        return pick("updates"), CalibratedTrustRatioState(*fields)

    return on_bare_arrays(optax.GradientTransformation(init, update))


class _Scaled(NamedTuple):
    """What one leaf becomes."""

    updates: jax.Array
    state: CalibratedTrustRatioState


def _picked(scaled: PyTree, part: str) -> PyTree:
    """That part of every leaf."""
    found = operator.attrgetter(part)
    return jax.tree.map(found, scaled, is_leaf=lambda x: isinstance(x, _Scaled))


def _scaled(
    calibrate: bool,
    bounds: tuple[ArrayLike, ArrayLike, ArrayLike],
    axes: LeafAxes,
    direction: jax.Array,
    weight: jax.Array,
    c: jax.Array,
) -> _Scaled:
    """Scale the matrices of a leaf; ``bounds`` are eps, r_min and r_max."""
    dtype = compute_dtype((direction, weight))
    d = direction.astype(dtype)
    norms = (_sharding.shard_like(axes.norms(x), c) for x in (weight.astype(dtype), d))
    limits = (jnp.asarray(bound, dtype) for bound in bounds)
    found = _measured(c.astype(dtype) if calibrate else None, *norms, *limits)
    return _Scaled(
        (per_matrix(axes, found.trust_ratio, d) * d).astype(direction.dtype),
        jax.tree.map(lambda scalar: scalar.astype(c.dtype), found),
    )


# Of many leaves with one batch shape, all but the first find it traced.
@jax.jit
def _measured(
    c: jax.Array | None,
    w_norm: jax.Array,
    d_norm: jax.Array,
    eps: jax.Array,
    r_min: jax.Array,
    r_max: jax.Array,
) -> CalibratedTrustRatioState:
    """What the norms make of c, which is None for no calibration."""
    c = jnp.ones_like(w_norm) if c is None else _anchor(c, w_norm, d_norm, eps)
    raw = _trust_ratio(c, w_norm, d_norm, eps)
    return CalibratedTrustRatioState(c, raw, jnp.clip(raw, r_min, r_max))


def _anchor(
    c: jax.Array, w_norm: jax.Array, d_norm: jax.Array, eps: jax.Array
) -> jax.Array:
    """Definition 2: set c where it is unset and the first direction has come."""
    directed = (d_norm > 0) & jnp.isfinite(d_norm)
    # jax_debug_nans also sees what a where discards: nothing is divided by zero.
    anchor = w_norm / (jnp.where(directed, d_norm, 1) + eps)
    ready = _unset(c) & directed & jnp.isfinite(anchor)
    return jnp.where(ready, jnp.where(anchor > 0, not_one(anchor), jnp.inf), c)


def _unset(c: jax.Array) -> jax.Array:
    """0 from ``init``, or 1 from the checkpoint of a run without calibration."""
    return (c == 0) | (c == 1)


def not_one(c: jax.Array) -> jax.Array:
    """The number next to 1 where c is 1, which stands for no calibration.

    In float32, as which c may be stored where it is computed in float64.
    """
    next_to_one = 1 - jnp.finfo(jnp.float32).epsneg
    return jnp.where(c.astype(jnp.float32) == 1, next_to_one, c)


def _trust_ratio(
    c: jax.Array, w_norm: jax.Array, d_norm: jax.Array, eps: jax.Array
) -> jax.Array:
    """Definition 1, and 1 where c is unset or infinite or there is no direction."""
    neutral = (c == 0) | jnp.isinf(c) | (d_norm == 0)
    c, d = (jnp.where(neutral, 1, x) for x in (c, d_norm))
    ratio = jnp.where(neutral, 1, w_norm / (c * d + eps))
    return jnp.where(jnp.isfinite(d_norm), ratio, jnp.nan)


def map_matrices(fn: Callable[..., Any], axes_tree: PyTree, *trees: PyTree) -> PyTree:
    """``fn(axes, *leaves)`` at every leaf of matrices; other places stay as they are."""

    def at(axes: Any, *leaves: Any) -> Any:
        if isinstance(axes, optax.MaskedNode):
            return leaves[0]
        # NumPy's have dtypes that JAX's may not have.
        return fn(axes, *map(jnp.asarray, leaves))

    return jax.tree.map(at, axes_tree, *trees, is_leaf=is_axes_leaf)


def per_matrix(axes: LeafAxes, scalars: jax.Array, leaf: jax.Array) -> jax.Array:
    """Scalars of the batch shape, to broadcast against a leaf, and sharded as it is.

    They are the state's, which may be sharded otherwise.
    """
    spread = axes.per_matrix(scalars)
    like = zip(spread.shape, leaf.shape, _sharding.spec(leaf), strict=True)
    entries = [entry if size == full else None for size, full, entry in like]
    return _sharding.shard_as(spread, leaf, entries)


def _filled(
    weight_dimension_numbers: WeightDimensionNumbers,
    params: PyTree,
    value: float | bool,
    dtype: Callable[[jax.Array], DTypeLike],
) -> PyTree:
    """One ``value`` per matrix."""

    def fill(axes: Any, node: Any) -> Any:
        if isinstance(axes, optax.MaskedNode):
            return axes
        leaf = jnp.asarray(unbox(node))
        filled = jnp.full(axes.batch_shape(leaf), value, dtype(leaf))
        filled = _sharding.shard_as(filled, leaf, axes.batch_sharding(leaf))
        return box_like(filled, node, axes.of_batch)

    if type(params).__name__ == "_ParamsPlaceholder":
        # To optax.tree.map_params, what has not the parameters' shapes is one leaf.
        return jnp.full((), value)
    axes_tree = require_matrices(weight_dimension_numbers, params)
    return jax.tree.map(fill, axes_tree, params, is_leaf=is_axes_leaf)


def per_matrix_leaf(
    fn: Callable[[LeafAxes, jax.Array], jax.Array],
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    """The stateless transformation that maps ``fn`` over the matrices."""

    def update(updates: PyTree, _: PyTree | None = None) -> PyTree:
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        return map_matrices(fn, axes_tree, updates)

    return on_bare_arrays(optax.stateless(update))
