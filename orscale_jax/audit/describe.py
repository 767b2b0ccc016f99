"""The public ``describe``: the audit of an optimizer before a run."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from orscale_jax import _checks
from orscale_jax.audit.checks import Checks
from orscale_jax.audit.description import Description, ParameterRow
from orscale_jax.audit.probe import first_updates
from orscale_jax.audit.state import (
    REFUSED,
    AbstractState,
    Kept,
    leaves_by_path,
    nbytes,
    nbytes_per_device,
)
from orscale_jax.distributed.engine import PolarOptions
from orscale_jax.distributed.exchange import plan_exchange
from orscale_jax.distributed.plan import Bucket, Group, MeshShape, Plan, ShardedArray
from orscale_jax.distributed.platforms import DEFAULTS, Platform, StackKey, plan_stacks
from orscale_jax.distributed.slow_links import SlowAxes, slices_of_mesh
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import (
    UndecidedError,
    WeightDimensionNumbers,
    matrix_axes,
)
from orscale_jax.parameters.layer_classes import layer_classes
from orscale_jax.sharding import typed_sharding
from orscale_jax.sharding.param_shardings import UNKNOWN
from orscale_jax.transforms.matrices import ADAMW, MATRIX, compute_dtype
from orscale_jax.transforms.orthogonalize import polar_options
from orscale_jax.transforms.stages import CONSISTENT_RMS, SPECTRAL, Scale
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.names import distinct_names, quoted

_REMEDY = (
    "leave weight_dimension_numbers out of describe(), or pass those that the optimizer "
    "was built with"
)


def describe(
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    consistent_rms: float | None = CONSISTENT_RMS,
    scale_mode: str = SPECTRAL,
    optimizer: optax.GradientTransformation | None = None,
    probe: bool = False,
    platform: str | None = None,
    ns_steps: int = 5,
    ns_coeffs: Coefficients = "polar_express",
    ns_dtype: DTypeLike | None = None,
    ns_preconditioning: str = "frobenius",
    max_stack_bytes: int | None = None,
    slow_axes: SlowAxes | None = None,
) -> Description:
    r"""Tabulate which parameters are matrices, of what shape, and what each costs.

    Use it to audit a run before it starts: it shows a matrix that went to AdamW, an
    embedding that did not, or an expert stack taken for one matrix. Parameters may be
    abstract (:func:`jax.eval_shape`), so that nothing need be allocated.

    Args:
      params: The parameters, which may be abstract, or a model of Flax NNX (then its
        ``nnx.Param``, or what the ``nnx.Optimizer`` trains) or of Equinox. Leaves that
        are None or masked have no row.
      weight_dimension_numbers: The dimension numbers of the optimizer; see
        :func:`orscale`. None: those that ``optimizer`` has, if it is of this library.
      consistent_rms: See :func:`orscale`.
      scale_mode: See :func:`orscale`.
      optimizer: The optimizer (or a ``flax.nnx.Optimizer``), for the columns "rule" and
        "state bytes": its ``init`` is traced, not run. The rule is then what the types of
        its state tell, and under :func:`optax.partition` there is a column "label". The
        scale and the settings of Newton–Schulz are the optimizer's, except for arguments
        of this function that differ from their defaults; steps that are traced, as inside
        :func:`optax.inject_hyperparams`, count as five. None: the table is that of
        :func:`orscale`.
      probe: Whether to run the optimizer, too, whatever it is made of, on random
        gradients: the columns "first update" and "its RMS" say what it does to each
        parameter. Parameters that are abstract are drawn, and all is allocated.
      platform: The platform whose plan of Newton–Schulz is shown: ``"cpu"``, ``"gpu"`` or
        ``"tpu"``. None: that of the parameters' mesh, or of JAX's default backend.
      ns_steps: See :func:`orscale`.
      ns_coeffs: See :func:`orscale`.
      ns_dtype: See :func:`orscale`.
      ns_preconditioning: See :func:`orscale`.
      max_stack_bytes: See :func:`orthogonalize`.
      slow_axes: See :func:`orscale`. The mesh may be one that does not exist here
        (:class:`jax.sharding.AbstractMesh`): nothing but this then tells of slow links.

    Returns:
      A :class:`Description` with ``rows``, ``totals``, ``plan`` and ``select(regex)``,
      which ``print`` shows as a table. In it, leaves that differ only by numbers in their
      names, such as those of layers, have one line. A leaf that the optimizer would
      refuse, because its shape is ambiguous or it is complex, has the rule "refused", and
      the error is below the table. s is the scale of the step,
      :math:`0.2 \sqrt{\max(m, n)}` by default, and ‖W‖ the smallest and the largest
      Frobenius norm among the matrices of a line. It is missing for arrays that are
      sharded over several processes, so that a single one of them can print the table.

    Raises:
      ValueError: If an argument is not valid, leaves are no arrays or do not fit their
        dimension numbers, the optimizer has other matrices, or it keeps vectors that hold
        several parameters (:func:`optax.flatten`). With ``probe``, also if a leaf is
        refused, the mesh is abstract, or ``update`` needs arguments beside parameters and
        loss.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import describe, orscale
      >>> params = {"up": jnp.eye(4, 16), "bias": jnp.zeros(16), "lm_head": jnp.eye(4)}
      >>> description = describe(params, optimizer=orscale(1e-3))
      >>> for row in description.rows:
      ...     print(row.path, row.rule, row.scale, row.state_bytes)
      bias adamw None 128
      lm_head adamw None 128
      up matrix 0.8 281
      >>> description.totals["all"]
      Total(leaves=3, matrices=1, parameters=96, state_bytes=549)
    """
    for name, value in (
        ("params", params),
        ("weight_dimension_numbers", weight_dimension_numbers),
    ):
        if isinstance(value, optax.GradientTransformation):
            raise ValueError(
                f"{name} is an optimizer: pass it by name, as in "
                "describe(params, optimizer=optimizer)."
            )
    scale = Scale.of(consistent_rms, scale_mode)
    options = polar_options(
        ns_steps=ns_steps,
        ns_coeffs=ns_coeffs,
        ns_dtype=ns_dtype,
        ns_preconditioning=ns_preconditioning,
        max_stack_bytes=max_stack_bytes,
        slow_axes=slow_axes,
    )
    params = trained(params, optimizer)
    leaf_of = leaves_by_path(unbox(params))
    for path, leaf in leaf_of.items():
        if not (hasattr(leaf, "dtype") or isinstance(leaf, float | complex)):
            raise ValueError(
                f"parameter {quoted(path)} is of type {type(leaf).__name__}: pass "
                "arrays, or abstract ones, such as jax.ShapeDtypeStruct."
            )
    mesh = next((mesh for mesh in map(_mesh, leaf_of.values()) if mesh is not None), None)
    if platform is None:
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
        backend = jax.default_backend() if device is None else device.platform
        platform = backend if backend in ("cpu", "tpu") else "gpu"
    _checks.choice("platform", platform, ("cpu", "gpu", "tpu"))
    optimizer = getattr(optimizer, "tx", optimizer)  # That of a flax.nnx.Optimizer.
    if probe and optimizer is None:
        _checks.refuse("probe", probe, "pass the optimizer to run, in optimizer=")
    refused: dict[Any, UndecidedError] = {}
    while True:
        try:
            state = None if optimizer is None else AbstractState.of(optimizer, params)
            axes_of = _matrices(weight_dimension_numbers, params, state)
            break
        except UndecidedError as error:
            if probe or not leaf_of.keys() - refused >= {*error.paths}:
                raise
            refused |= dict.fromkeys(error.paths, error)
            # In place of each, a vector, which any optimizer gives to AdamW.
            leaves = (
                jax.ShapeDtypeStruct((np.size(leaf),), jnp.float32)
                if path in refused
                else leaf
                for path, leaf in leaf_of.items()
            )
            params = jax.tree.unflatten(jax.tree.structure(unbox(params)), leaves)
    stages = [options]
    if state is not None and state.polar:
        stages = [_with_given(options, own) for own in state.polar]
    probed = first_updates(optimizer, params, axes_of) if probe else {}
    if state is not None:
        axes_of = {p: own for p, own in axes_of.items() if state.kept[p].rule == MATRIX}
    class_of = leaves_by_path(layer_classes(params))
    checks = Checks(leaf_of, axes_of, class_of)
    rows, planned = [], [list[ParameterRow]() for _ in stages]
    for name, (path, leaf) in zip(distinct_names(leaf_of), leaf_of.items(), strict=True):
        kept = Kept(ADAMW, scale=scale) if state is None else state.kept[path]
        if scale != Scale.of(CONSISTENT_RMS):
            kept = kept._replace(scale=scale)
        if path in refused:
            kept = kept._replace(rule=REFUSED, arrays=None)
        row = ParameterRow(
            path=name,
            shape=np.shape(leaf),
            dtype=jnp.result_type(leaf),
            rule=kept.rule,
            parameters=math.prod(np.shape(leaf)),
            state_bytes=None if kept.arrays is None else nbytes(kept.arrays),
            layer_class=class_of[path],
            label=kept.label,
        )
        parts, found = [row], probed.get(path)
        if path in axes_of:
            parts = list(_parts(row, leaf, axes_of[path], kept.arrays, kept.scale))
        for index, part in enumerate(parts):
            check = list(checks.reasons(path, part)) if path in axes_of else []
            if row.rule == ADAMW and not jnp.issubdtype(row.dtype, jnp.inexact):
                check.append(str(row.dtype))  # Its gradients are refused.
            if path in refused:
                real = jnp.issubdtype(row.dtype, jnp.floating)
                check.append("ambiguous" if real else str(row.dtype))
            if found is not None:
                kind = found.kinds[index if len(found.kinds) == len(parts) else 0]
                check += ["master weights drift"] * found.drifts
                part = dataclasses.replace(
                    part, first_update=kind, first_update_rms=found.rms
                )
            rows.append(dataclasses.replace(part, check=tuple(check)))
            if part.rule == MATRIX and part.parameters:
                planned[kept.stage].append(part)
    words, shape, on_device = "", None, None
    if mesh is not None:
        slices = slices_of_mesh(mesh, stages[0].slow_axes) or {}
        shape = MeshShape(dict(mesh.shape), slices)
        words = " × ".join(f"{size} {name}" for name, size in mesh.shape.items())
        along = " and ".join(f"{n} along {name}" for name, n in slices.items())
        known = {"from the types of the arrays"}
        if mesh.are_all_axes_auto:
            matrices = jax.tree.map_with_path(
                lambda path, leaf: leaf if path in axes_of else optax.MaskedNode(),
                unbox(params),
            )
            specs = [] if state is None else state.specs
            known = {own.source(mesh.abstract_mesh, matrices) for own in specs}
        elif not mesh.are_all_axes_explicit:
            known = {UNKNOWN}
        planned = [[] if UNKNOWN in known else own for own in planned]
        source = " and ".join(sorted(known))
        words += (along and f", slices: {along}") + (source and f", shardings {source}")
        if state is not None and not refused:
            on_device = nbytes_per_device(optimizer, params)
    return Description(
        tuple(rows),
        _plan([stage.platform(platform) for stage in stages], planned, shape),
        None if state is None else state.shared_bytes,
        words,
        on_device,
        tuple(dict.fromkeys(map(str, refused.values()))),
    )


def _matrices(
    weight_dimension_numbers: WeightDimensionNumbers,
    params: PyTree,
    state: AbstractState | None,
) -> dict[Any, MatrixAxes]:
    """The axes of all matrices whose axes are known, by path.

    Raises:
      ValueError: If an optimizer of this library has other matrices.
    """
    if state is None:
        return leaves_by_path(matrix_axes(weight_dimension_numbers, params))
    known = {path: own.axes for path, own in state.kept.items() if own.axes}
    rules = {path: own.rule for path, own in state.kept.items()}
    bare, given = unbox(params), weight_dimension_numbers is not None

    # Without numbers, only matrices of which the optimizer did not say the axes.
    asked = {
        path
        for path, rule in rules.items()
        if (rule == MATRIX and path not in known) or (given and rule in (MATRIX, ADAMW))
    }
    found = None
    if given:  # For the probe, also of what other optimizers train.
        with contextlib.suppress(UndecidedError):
            found = matrix_axes(weight_dimension_numbers, bare)
    try:
        if found is None:
            ours = jax.tree.map_with_path(
                lambda path, leaf: leaf if path in asked else optax.MaskedNode(), bare
            )
            found = matrix_axes(weight_dimension_numbers, ours)
    except UndecidedError as error:
        raise ValueError(f"{error} Or {_REMEDY}.") from error
    axes_of = leaves_by_path(found)

    def name(axes: MatrixAxes | None, other: MatrixAxes | None) -> str:
        """Axes only where both are matrices."""
        if axes is None:
            return ADAMW
        if other is None:
            return MATRIX
        blocks = f" in blocks of {list(axes.sizes)}" if axes.sizes else ""
        return f"matrices of rows {axes.rows} and columns {axes.columns}{blocks}"

    for path in rules if given else ():
        ours, theirs = axes_of.get(path), known.get(path)
        # Transposed, they are the same matrices.
        if ours and theirs and (ours.columns, ours.rows) == (theirs.rows, theirs.columns):
            ours = dataclasses.replace(ours, rows=theirs.rows, columns=theirs.columns)
        if (path in known or rules[path] == ADAMW) and ours != theirs:
            raise ValueError(
                f"parameter {quoted(path)} is {name(ours, theirs)} here and "
                f"{name(theirs, ours)} in the optimizer: {_REMEDY}."
            )
    return axes_of | known


def _with_given(given: PolarOptions, own: PolarOptions) -> PolarOptions:
    """The options of an optimizer with those given that differ from their defaults."""

    def changed(given: Any, defaults: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(given)]
        fields = {name: getattr(given, name) for name in names}
        return {k: v for k, v in fields.items() if v != getattr(defaults, k)}

    defaults = PolarOptions(DEFAULTS)
    settings = dataclasses.replace(
        own.settings, **changed(given.settings, defaults.settings)
    )
    return dataclasses.replace(own, **changed(given, defaults) | {"settings": settings})


def _parts(
    row: ParameterRow,
    leaf: Any,
    axes: MatrixAxes,
    arrays: Sequence[Any] | None,
    scale: Scale | None,
) -> Iterator[ParameterRow]:
    """The rows of the parts of a leaf of matrices, from that of the leaf."""
    mesh = _mesh(leaf)
    specs = () if mesh is None else typed_sharding.inferred(axes.matrices, leaf, mesh)

    def divided(array: Any) -> bool:
        """Whether a part has its share of an array; the first part has the others."""
        if not axes.sizes or array.shape == axes.batch_shape(leaf):
            return bool(axes.sizes)
        axis = axes.block_axis  # Of the leaf, or of the scales of 8-bit momentum.
        return bool(array.ndim == leaf.ndim and array.shape[axis] == leaf.shape[axis])

    for index, label in enumerate(axes.labels):
        part = functools.partial(axes.part, index=index)
        shaped = jax.eval_shape(part, leaf)
        batch_shape = axes.within.batch_shape(shaped)
        m, n = axes.within.matrix_shape(shaped)
        own = (
            jax.eval_shape(part, array) if divided(array) else array
            for array in arrays or ()
            if divided(array) or index == 0
        )
        yield dataclasses.replace(
            row,
            block=label,
            shape=shaped.shape if label else leaf.shape,
            rule=MATRIX,
            matrices=math.prod(batch_shape),
            batch_shape=batch_shape,
            m=m,
            n=n,
            scale=None if scale is None else scale.value(m, n),
            norms=_norms(axes, leaf, index),
            mesh_axes=typed_sharding.axes_of(specs[index], len(batch_shape) + 2)
            if specs
            else (),
            parameters=math.prod(shaped.shape),
            state_bytes=None if arrays is None else nbytes(own),
        )


def _norms(axes: MatrixAxes, leaf: Any, index: int) -> tuple[float, float] | None:
    """The smallest and the largest norm in a part, where this process knows them."""
    concrete = isinstance(leaf, jax.Array | np.ndarray)
    if not concrete or isinstance(leaf, jax.core.Tracer) or not math.prod(leaf.shape):
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # No collective, so that one process may print a table.
        if not leaf.is_fully_replicated:
            return None
        leaf = leaf.addressable_data(0)
    part = axes.part(jnp.asarray(leaf, compute_dtype(leaf)), index)
    norms = axes.within.norms(part)
    least, most = jax.device_get((norms.min(), norms.max()))
    return float(least), float(most)


def _mesh(leaf: Any) -> Mesh | AbstractMesh | None:
    """The mesh of a leaf, if it has several devices."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return None
    mesh: Mesh | AbstractMesh = sharding.mesh
    return mesh if mesh.size > 1 else None


def _plan(
    stages: Sequence[Platform],
    rows: Sequence[Sequence[ParameterRow]],
    mesh: MeshShape | None,
) -> Plan:
    """The plan of Newton–Schulz of the stages, each for its own rows of matrices."""
    groups, buckets, of_buckets = [], list[Bucket](), list[list[str]]()
    for platform, own in zip(stages, rows, strict=True):
        names = [row.name for row in own]
        arrays = []
        for row in own:
            shape = (*row.batch_shape, row.m, row.n)
            dtype = compute_dtype(jax.ShapeDtypeStruct((), row.dtype))
            axes = row.mesh_axes or ((),) * len(shape)
            arrays.append(ShardedArray(shape, platform.packed_dtype(dtype), axes))
        if mesh is not None:
            buckets += plan_exchange(platform, arrays, mesh)
            of_buckets += [names] * (len(buckets) - len(of_buckets))
            continue
        keys = [StackKey((*x.shape[:-2], *sorted(x.shape[-2:])), x.dtype) for x in arrays]
        limits = platform.limits
        for members in plan_stacks(keys, limits.stack_bytes, limits.stack_length):
            *batch, m, n = keys[members[0]].shape
            matrices = (len(members) * math.prod(batch), m, n, 1)
            groups.append(Group(tuple(names[i] for i in members), (matrices,)))
    if mesh is None:
        return Plan(tuple(groups))
    return Plan.of(buckets, of_buckets, mesh, stages[0].cost_model)
