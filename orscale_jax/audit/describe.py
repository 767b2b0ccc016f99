"""The public ``describe``: the audit of an optimizer before a run."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax import validate
from orscale_jax.audit.certificate import certify
from orscale_jax.audit.checks import Checks
from orscale_jax.audit.description import Description, ParameterRow
from orscale_jax.audit.plan import Group, Plan
from orscale_jax.audit.probe import FirstUpdate, first_updates
from orscale_jax.audit.state import (
    REFUSED,
    AbstractState,
    leaves_by_path,
    nbytes,
    nbytes_per_device,
)
from orscale_jax.distributed.costs import Bucket, ShardedArray
from orscale_jax.distributed.exchange import cost_model, plan_exchange
from orscale_jax.distributed.mesh import MeshShape
from orscale_jax.distributed.placement import slices_of_mesh
from orscale_jax.newton_schulz.platforms import DEFAULTS, Platform
from orscale_jax.newton_schulz.stacks import StackKey, plan_stacks
from orscale_jax.optimizers import muon
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import UndecidedError
from orscale_jax.sharding import param_shardings, typed_sharding
from orscale_jax.transforms.matrices import ADAMW, MATRIX, compute_dtype
from orscale_jax.transforms.orthogonalize import PolarOptions
from orscale_jax.transforms.stages import Scale
from orscale_jax.transforms.trust_ratio import NUMBERS
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.checks import require_arrays
from orscale_jax.trees.names import distinct_names


@param_shardings.audit()
def describe(
    params: PyTree,
    optimizer: optax.GradientTransformation | None = None,
    *,
    probe: bool = False,
) -> Description:
    r"""Tabulate how each parameter will be trained, and what its state costs.

    Use it to audit a run before it starts. It shows a matrix that AdamW trains, an
    embedding that Muon trains, or a stack of experts that is treated as one matrix.
    Parameters may be abstract (:func:`jax.eval_shape`), so that nothing is allocated.

    Args:
      params: The parameters, which may be abstract, or a model of Flax NNX or Equinox. Of
        an NNX model, the table shows the variables that the ``nnx.Optimizer`` trains,
        or all ``nnx.Param``. Leaves that are None or masked have no row.
      optimizer: The optimizer, which may be any Optax optimizer, or a
        ``flax.nnx.Optimizer``. Only the latter passes functions of labels and masks the
        paths that training does. Its ``init`` is traced, not run. The types in its state
        tell the rule of each parameter, and under :func:`optax.partition` there is a
        column "label". Steps of Newton–Schulz that are traced, as inside
        :func:`optax.inject_hyperparams`, count as five. None: :func:`muon` with its
        defaults.
      probe: Whether to run the optimizer on random gradients. The columns "first update"
        and "its RMS" then say what it did to each parameter. This allocates parameters,
        gradients and state; abstract parameters are drawn at random. For parameters on
        a mesh, the result also has a ``certificate``, which compares the updates with
        those of one device. If the devices of the mesh are not there, as on an abstract
        mesh, devices that are there take their places.

    Returns:
      A :class:`Description` with ``rows``, ``totals``, ``plan`` and ``select(regex)``.
      ``print`` shows it as a table, in which leaves whose names differ only by numbers,
      such as those of layers, share a line. ``to_text()`` is the table with all columns,
      and ``to_csv()`` has a row for each leaf. The column "why" says what has decided on
      the rule: see ``why`` of :class:`ParameterRow`. If the optimizer would refuse a
      leaf, because its shape is ambiguous or it is complex, the rule is "refused", and
      the error is below the table. s is the scale of the step,
      :math:`0.2 \sqrt{\max(m, n)}` by default. ‖W‖ is the smallest and the largest
      Frobenius norm among the matrices of a line. It is missing for arrays that are
      sharded over several processes, so that a single process can print the table.

    The plan of Newton–Schulz is for the platform of the parameters' mesh, or else for
    JAX's default backend. The mesh may have devices that you do not have, such as
    ``jax.sharding.AbstractMesh(..., abstract_device=tpu)`` with the device
    ``jax.sharding.AbstractDevice("TPU v5p", num_cores=None, platform="tpu")``. Only the
    optimizer's ``slow_axes`` then tell which links are slow.

    Raises:
      ValueError: If ``optimizer`` is not an optimizer, leaves are not arrays or do not
        fit its dimension numbers, or it keeps vectors that hold several parameters
        (:func:`optax.flatten`). With ``probe``, also if a leaf is refused, ``update``
        needs arguments beside parameters and loss, the optimizer closes over the mesh
        (:func:`assert_same_on` takes such optimizers), or a mesh that is not there has to
        be replaced by a single device.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import describe, orscale
      >>> params = {"up": jnp.eye(4, 16), "bias": jnp.zeros(16), "lm_head": jnp.eye(4)}
      >>> description = describe(params, orscale(1e-3))
      >>> for row in description.rows:
      ...     print(row.path, row.rule, row.scale, row.state_bytes)
      bias adamw None 128
      lm_head adamw None 128
      up matrix 0.8 284
      >>> description.totals["all"]
      Total(leaves=3, matrices=1, parameters=96, state_bytes=544)
    """
    if optimizer is None:
        if probe:
            validate.refuse("probe", probe, "pass the optimizer to run")
        optimizer = muon(0.0)
    params = trained(params, optimizer)
    optimizer = getattr(optimizer, "tx", optimizer)  # That of a flax.nnx.Optimizer.
    validate.transformation("optimizer", optimizer)
    require_arrays(unbox(params))
    leaf_of = leaves_by_path(unbox(params))
    state, refused, params = _traced(optimizer, params)
    if probe and refused:
        raise next(iter(refused.values()))
    # A compiled or mapped init does not tell the axes: those of two need no telling.
    axes_of = {
        path: kept.axes or MatrixAxes((), (0,), (1,))
        for path, kept in state.kept.items()
        if path not in refused
        and (kept.axes or (kept.rule == MATRIX and np.ndim(leaf_of[path]) == 2))
    }
    mesh = next((mesh for mesh in map(_mesh, leaf_of.values()) if mesh is not None), None)
    probed, certificate = dict[Any, FirstUpdate](), None
    if probe:
        probed = first_updates(optimizer, params, axes_of)
        if mesh is not None:
            certificate = certify(optimizer, params, mesh, axes_of)
    why_of = {path: kept.why for path, kept in state.kept.items()}
    checks = Checks(leaf_of, axes_of, why_of)
    stages = state.polar or [PolarOptions(DEFAULTS)]
    rows, planned = list[ParameterRow](), [list[_Planned]() for _ in stages]
    for stage, row, array in _rows(leaf_of, state, refused, axes_of, probed, checks):
        rows.append(row)
        if row.matrices and row.parameters:
            planned[stage].append((row, array))
    words, shape, on_device = "", None, None
    if mesh is not None:
        slices = slices_of_mesh(mesh, stages[0].slow_axes) or {}
        shape = MeshShape(dict(mesh.shape), slices)
        words = " × ".join(f"{size} {name}" for name, size in mesh.shape.items())
        along = " and ".join(f"{n} along {name}" for name, n in slices.items())
        words += along and f", slices: {along}"
        if not refused:
            on_device = nbytes_per_device(optimizer, params)
    platform = _platform(leaf_of.values())
    return Description(
        tuple(rows),
        _plan([stage.platform(platform) for stage in stages], planned, shape)._replace(
            is_traced=not all(stage.settings.is_static for stage in stages)
        ),
        state.shared_bytes,
        words,
        on_device,
        tuple(dict.fromkeys(map(str, refused.values()))),
        certificate,
    )


# Of an array of matrices: its shape, and the axes of the mesh that shard each of its own.
_Array: TypeAlias = tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]
_Planned: TypeAlias = tuple[ParameterRow, _Array]


def _traced(
    optimizer: optax.GradientTransformation, params: PyTree
) -> tuple[AbstractState, dict[Any, UndecidedError], PyTree]:
    """The state, the error of each leaf that is refused, and parameters that are not."""
    leaf_of, structure = leaves_by_path(unbox(params)), jax.tree.structure(unbox(params))
    refused: dict[Any, UndecidedError] = {}
    while True:
        try:
            return AbstractState.of(optimizer, params), refused, params
        except UndecidedError as error:
            if not leaf_of.keys() - refused >= {*error.paths}:
                raise
            refused |= dict.fromkeys(error.paths, error)
        accepted = dict(leaf_of)
        for path, why in refused.items():
            # In place of a dtype, float32. In place of an ambiguous shape, that of a
            # vector, which any optimizer gives to AdamW.
            shape = np.shape(leaf_of[path])
            shape = shape if why.of_dtype else (math.prod(shape),)
            accepted[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
        params = jax.tree.unflatten(structure, accepted.values())


def _rows(
    leaf_of: Mapping[Any, Any],
    state: AbstractState,
    refused: Collection[Any],
    axes_of: Mapping[Any, MatrixAxes],
    probed: Mapping[Any, FirstUpdate],
    checks: Checks,
) -> Iterator[tuple[int, ParameterRow, _Array]]:
    """The rows of all leaves, each with its stage of Newton–Schulz and its array."""
    for name, (path, leaf) in zip(distinct_names(leaf_of), leaf_of.items(), strict=True):
        kept, first = state.kept[path], probed.get(path)
        if path in refused:
            kept = kept._replace(rule=REFUSED, why="", arrays=None)  # Of a stand-in.
        row = ParameterRow(
            path=name,
            shape=np.shape(leaf),
            dtype=jnp.result_type(leaf),
            rule=kept.rule,
            why=kept.why,
            parameters=math.prod(np.shape(leaf)),
            state_bytes=None if kept.arrays is None else nbytes(kept.arrays),
            kind=checks.kinds[path],
            label=kept.label,
        )
        parts: list[_Planned] = [(row, ((), ()))]
        if path in axes_of:
            parts = list(_parts(row, leaf, axes_of[path], kept.arrays, kept.scale))
        for index, (part, array) in enumerate(parts):
            check = list(checks.reasons(path, part)) if path in axes_of else []
            if row.rule == ADAMW and not jnp.issubdtype(row.dtype, jnp.inexact):
                check.append(str(row.dtype))  # Its gradients are refused.
            if path in refused:
                real = jnp.issubdtype(row.dtype, jnp.floating)
                check.append("ambiguous" if real else str(row.dtype))
            if first is not None:
                check += ["master weights drift"] * first.drifts
                part = dataclasses.replace(
                    part, first_update=first.kinds[index], first_update_rms=first.rms
                )
            yield kept.stage, dataclasses.replace(part, check=tuple(check)), array


def _platform(leaves: Iterable[Any]) -> str:
    """The platform of the first mesh that has one, or of JAX's default backend."""
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves)
    devices = (mesh.abstract_mesh.abstract_device for mesh in meshes if mesh is not None)
    device = next((device for device in devices if device is not None), None)
    # Devices of JAX 0.10.0 do not say it.
    platform = getattr(device, "platform", jax.default_backend())
    return platform if platform in ("cpu", "tpu") else "gpu"


def _parts(
    row: ParameterRow,
    leaf: Any,
    axes: MatrixAxes,
    arrays: Sequence[Any] | None,
    scale: Scale | None,
) -> Iterator[_Planned]:
    """The rows of the parts of a leaf of matrices, from that of the leaf."""
    mesh = _mesh(leaf)
    specs = [PartitionSpec()] * len(axes.labels)
    if mesh is not None:
        specs = typed_sharding.inferred(axes.batches, leaf, mesh)
    batch, axis = axes.batch_shape(leaf), axes.block_axis

    def share(array: Any, index: int) -> Any:
        """What a part has of an array; the first part has what is not divided."""
        alike = array.ndim == leaf.ndim and array.shape[axis] == leaf.shape[axis]
        if axes.has_unequal_blocks and alike:  # Also the scales of 8-bit momentum.
            return jax.eval_shape(functools.partial(axes.part, index=index), array)
        if axes.has_unequal_blocks and array.shape in (batch, (len(NUMBERS), *batch)):
            place = array.ndim - len(batch) + axes.block_position
            own = array.shape[:place] + array.shape[place + 1 :]
            return jax.ShapeDtypeStruct(own, array.dtype)
        return array if index == 0 else jax.ShapeDtypeStruct((0,), array.dtype)

    for index, (label, spec) in enumerate(zip(axes.labels, specs, strict=True)):
        shaped = jax.eval_shape(functools.partial(axes.part, index=index), leaf)
        batch_shape = axes.within.batch_shape(shaped)
        m, n = axes.within.matrix_shape(shaped)
        own = (share(array, index) for array in arrays or ())
        spread = f"in turns of {axes.stride}" if axes.stride else "contiguous"
        part_row = dataclasses.replace(
            row,
            block=label,
            blocks=f"{len(axes.sizes)} {spread}" if axes.sizes and not label else "",
            shape=shaped.shape if label else leaf.shape,
            rule=MATRIX,
            matrices=math.prod(batch_shape),
            m=m,
            n=n,
            scale=None if scale is None else scale.value(m, n),
            norms=_norms(axes, leaf, index),
            parameters=math.prod(shaped.shape),
            state_bytes=None if arrays is None else nbytes(own),
        )
        mesh_axes = typed_sharding.axes_of(spec, len(batch_shape) + 2)
        yield part_row, ((*batch_shape, m, n), mesh_axes)


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
    stages: Sequence[Platform], rows: Sequence[Sequence[_Planned]], mesh: MeshShape | None
) -> Plan:
    """The plan of Newton–Schulz of the stages, each for its own rows of matrices."""
    groups, buckets, of_buckets = [], list[Bucket](), list[list[str]]()
    for platform, of_stage in zip(stages, rows, strict=True):
        names = [row.name for row, _ in of_stage]
        arrays = []
        for row, (shape, axes) in of_stage:
            dtype = compute_dtype(jax.ShapeDtypeStruct((), row.dtype))
            arrays.append(ShardedArray(shape, platform.packed_dtype(dtype), axes))
        if mesh is not None:
            buckets += plan_exchange(platform, arrays, mesh)
            of_buckets += [names] * (len(buckets) - len(of_buckets))
            continue
        keys = [StackKey((*x.shape[:-2], *sorted(x.shape[-2:])), x.dtype) for x in arrays]
        for members in plan_stacks(keys, platform.limits):
            shapes = Counter(keys[i].shape for i in members)
            matrices = tuple(
                (count * math.prod(batch), m, n, 1)
                for (*batch, m, n), count in shapes.items()
            )
            groups.append(Group(tuple(names[i] for i in members), matrices))
    if mesh is None:
        return Plan(tuple(groups))
    return Plan.of(buckets, of_buckets, cost_model(stages[0]))
