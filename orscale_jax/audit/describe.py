"""The public ``describe``: the audit of an optimizer before a run."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from orscale_jax import _checks
from orscale_jax.audit.checks import Checks
from orscale_jax.audit.description import Description
from orscale_jax.audit.rows import ParameterRow
from orscale_jax.audit.state import (
    AbstractState,
    Kept,
    leaves_by_path,
    nbytes,
    nbytes_per_device,
)
from orscale_jax.distributed.slow_links import SlowAxes, slices_of_mesh
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    matrix_axes,
)
from orscale_jax.parameters.layer_classes import layer_classes
from orscale_jax.sharding import typed_sharding
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.transforms.matrices import compute_dtype
from orscale_jax.transforms.orthogonalize import polar_options
from orscale_jax.transforms.stages import SPECTRAL, Scale
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import distinct_names


def describe(
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    consistent_rms: float | None = 0.2,
    scale_mode: str = SPECTRAL,
    optimizer: optax.GradientTransformation | None = None,
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
      params: The parameters, which may be abstract. Leaves that are None or masked have
        no row.
      weight_dimension_numbers: The dimension numbers of the optimizer; see
        :func:`orscale`.
      consistent_rms: See :func:`orscale`.
      scale_mode: See :func:`orscale`.
      optimizer: The optimizer (or a ``flax.nnx.Optimizer``), for the columns "rule" and
        "state bytes": its ``init`` is traced, not run. The rule is then what the types of
        its state tell, under :func:`optax.partition` there is a column "label", and with
        ``learning_rate_multipliers`` a column "η ×". None:
        the table is that of :func:`orscale` with these dimension numbers. An optimizer
        of this library must have the same matrices as the table.
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
      A :class:`Description` with ``rows``, ``totals``, ``select(regex)``, and tables for
      ``print``, rich and notebooks. In these, leaves that differ only by numbers in their
      names, such as those of layers, have one line; with ``unmerged()``, one each. s is
      the scale of the step, :math:`0.2 \sqrt{\max(m, n)}` by default, and ‖W‖ the
      smallest and the largest Frobenius norm among the matrices of a line. It is missing
      for arrays that are sharded over several processes, so that a single one of them
      can print the table.

    Raises:
      ValueError: If leaves are ambiguous (all of them are listed) or do not fit their
        dimension numbers, or the optimizer has other matrices, or it keeps vectors that
        hold several parameters (:func:`optax.flatten`).

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
    scale = Scale.of(consistent_rms, scale_mode)
    options = polar_options(
        ns_steps=ns_steps,
        ns_coeffs=ns_coeffs,
        ns_dtype=ns_dtype,
        ns_preconditioning=ns_preconditioning,
        max_stack_bytes=max_stack_bytes,
        slow_axes=slow_axes,
    )
    planned_for = options.platform(_platform(platform, params))
    leaf_of = leaves_by_path(unbox(params))
    optimizer = getattr(optimizer, "tx", optimizer)  # That of a flax.nnx.Optimizer.
    state = None if optimizer is None else AbstractState.of(optimizer, params)
    axes_of = _matrices(weight_dimension_numbers, params, state)
    names, class_of = distinct_names(leaf_of), leaves_by_path(layer_classes(params))
    checks = Checks.of(leaf_of, axes_of, class_of)
    kept_of = {} if state is None else state.kept
    multipliers_of = {} if state is None else state.multipliers
    rows = tuple(
        dataclasses.replace(
            row,
            layer_class=class_of[path],
            check=checks.reasons(path, row, axes_of.get(path), class_of[path]),
            multipliers=multipliers_of.get(path, row.multipliers),
        )
        for name, (path, leaf) in zip(names, leaf_of.items(), strict=True)
        for row in _rows(name, leaf, axes_of.get(path), kept_of.get(path), scale)
    )
    mesh = _first_mesh(leaf_of.values())
    return Description(
        rows,
        None if state is None else nbytes(state.shared),
        {} if mesh is None else dict(mesh.shape),
        ({} if mesh is None else slices_of_mesh(mesh, slow_axes)) or {},
        None if mesh is None or state is None else nbytes_per_device(optimizer, params),
        planned_for,
        rows,
        _sharding_source([] if state is None else state.specs, mesh, params, axes_of),
    )


def _platform(given: str | None, params: PyTree) -> str:
    """The given platform, or that of the parameters' devices."""
    if given is not None:
        _checks.choice("platform", given, ("cpu", "gpu", "tpu"))
        return given
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    devices = (
        sharding.mesh.devices.flat[0]
        for sharding in shardings
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    )
    device = next(devices, None)
    backend = jax.default_backend() if device is None else device.platform
    return backend if backend in ("cpu", "tpu") else "gpu"


def _matrices(
    weight_dimension_numbers: WeightDimensionNumbers,
    params: PyTree,
    state: AbstractState | None,
) -> dict[Any, MatrixAxes]:
    """The axes of the optimizer's matrices, by path."""
    if state is None:
        return leaves_by_path(matrix_axes(weight_dimension_numbers, params))
    if weight_dimension_numbers is None:  # Another optimizer's may be ambiguous.
        params = state.only_ours(params)
    axes_of = leaves_by_path(matrix_axes(weight_dimension_numbers, params))
    return state.only_matrices(axes_of, leaves_by_path(unbox(params)))


def _rows(
    name: str,
    leaf: Any,
    axes: MatrixAxes | None,
    kept: Kept | None,
    scale: Scale,
) -> list[ParameterRow]:
    """The row of a leaf, or one for each of its parts."""
    row = ParameterRow(
        path=name,
        shape=np.shape(leaf),
        dtype=jnp.result_type(leaf),
        rule="adamw" if kept is None else kept.rule,
        label="" if kept is None else kept.label,
        matrices=0,
        m=0,
        n=0,
        scale=None,
        norms=None,
        parameters=math.prod(np.shape(leaf)),
        state_bytes=None if kept is None else nbytes(kept.arrays),
    )
    if axes is None:
        return [row]
    part = functools.partial(_matrix_row, row, leaf, axes, kept, scale)
    return [part(index) for index in range(len(axes.labels))]


def _matrix_row(
    row: ParameterRow,
    leaf: Any,
    axes: MatrixAxes,
    kept: Kept | None,
    scale: Scale,
    index: int,
) -> ParameterRow:
    """The row of a part of a leaf of matrices, from that of the leaf."""
    part = functools.partial(axes.part, index=index)
    shaped = jax.eval_shape(part, leaf)
    batch_shape = axes.within.batch_shape(shaped)
    m, n = axes.within.matrix_shape(shaped)
    return dataclasses.replace(
        row,
        block=axes.labels[index],
        shape=shaped.shape if axes.labels[index] else leaf.shape,
        rule="matrix",
        matrices=math.prod(batch_shape),
        batch_shape=batch_shape,
        m=m,
        n=n,
        scale=scale.value(m, n),
        norms=_norms(axes.within, part, leaf),
        mesh_axes=_mesh_axes(axes, index, leaf),
        parameters=math.prod(shaped.shape),
        state_bytes=kept and _bytes_of_part(axes, leaf, kept.arrays, index),
    )


def _mesh_axes(axes: MatrixAxes, index: int, leaf: Any) -> tuple[tuple[str, ...], ...]:
    mesh = _mesh(leaf)
    if mesh is None:
        return ()
    spec = typed_sharding.inferred(axes.matrices, leaf, mesh)[index]
    return typed_sharding.axes_of(spec, len(axes.within.batch) + 2)


def _mesh(leaf: Any) -> Mesh | AbstractMesh | None:
    """The mesh of a leaf, if it has several devices."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return None
    mesh: Mesh | AbstractMesh = sharding.mesh
    return mesh if mesh.size > 1 else None


def _first_mesh(leaves: Iterable[Any]) -> Mesh | AbstractMesh | None:
    meshes = map(_mesh, leaves)
    return next((mesh for mesh in meshes if mesh is not None), None)


def _sharding_source(
    specs: Sequence[ParamSpecs],
    mesh: Mesh | AbstractMesh | None,
    params: PyTree,
    axes_of: Mapping[Any, MatrixAxes],
) -> str:
    """Where an optimizer finds the shardings of its matrices on a mesh, in words."""
    if mesh is None:
        return ""
    if not mesh.are_all_axes_auto:
        return "from the types of the arrays"
    matrices = jax.tree.map_with_path(
        lambda path, leaf: leaf if path in axes_of else optax.MaskedNode(), unbox(params)
    )
    found = {known.source(mesh.abstract_mesh, matrices) for known in specs}
    return " and ".join(sorted(found))


def _norms(
    axes: MatrixAxes, part: Callable[[jax.Array], jax.Array], leaf: Any
) -> tuple[float, float] | None:
    concrete = isinstance(leaf, jax.Array | np.ndarray)
    if not concrete or isinstance(leaf, jax.core.Tracer) or not math.prod(leaf.shape):
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # No collective, so that one process may print a table.
        if not leaf.is_fully_replicated:
            return None
        leaf = leaf.addressable_data(0)
    norms = axes.norms(part(jnp.asarray(leaf, compute_dtype(leaf))))
    least, most = jax.device_get((norms.min(), norms.max()))
    return float(least), float(most)


def _bytes_of_part(axes: MatrixAxes, leaf: Any, state: list[Any], index: int) -> int:
    """The bytes of a part's share of the arrays that are divided like the leaf.

    Those with one entry per matrix are divided as well; others count for the first part.
    """
    if not axes.sizes:
        return nbytes(state)

    def divided(array: Any) -> bool:
        if array.shape == axes.batch_shape(leaf):
            return True
        alike = array.ndim == leaf.ndim  # The leaf, or the scales of 8-bit momentum.
        return alike and array.shape[axes.block_axis] == leaf.shape[axes.block_axis]

    part = functools.partial(axes.part, index=index)
    return nbytes(
        jax.eval_shape(part, array) if divided(array) else array
        for array in state
        if divided(array) or index == 0
    )
