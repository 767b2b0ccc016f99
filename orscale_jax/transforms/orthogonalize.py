"""The stage that replaces every matrix by its polar factor.

On one device arrays of one shape share stacks; on a mesh they are exchanged so that every
device orthogonalizes whole matrices.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from orscale_jax import validate
from orscale_jax.distributed.exchange import on_shards
from orscale_jax.distributed.placement import Placement, SlowAxes, without_devices
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.newton_schulz.platforms import (
    DEFAULT_STEPS,
    DEFAULTS,
    PLATFORMS,
    Branch,
    NewtonSchulz,
    Platform,
    compiled_on_any_platform,
    on_any_platform,
)
from orscale_jax.newton_schulz.stacks import on_one_device
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.sharding.param_shardings import ParamShardings, ParamSpecs
from orscale_jax.transforms.matrices import Matrices, on_matrices
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.nodes import TraceLog


@dataclasses.dataclass(frozen=True)
class PolarOptions:
    """Options of polar factors: the iteration, its memory, the mesh.

    They are hashable: on one device, equal options share a compiled program.
    """

    settings: NewtonSchulz  # Its dtype is None for the platform's.
    stack_bytes: int | None = None  # The largest stack; None for the platform's limit.
    # The mesh of arrays whose types name none; None for that of the context.
    mesh: Mesh | AbstractMesh | None = None
    # The axes of the mesh that cross slow links; None to ask its devices.
    slow_axes: SlowAxes | None = dataclasses.field(default=None, hash=False)

    @classmethod
    def of(
        cls,
        ns_steps: int | jax.Array | None,
        ns_coeffs: Coefficients,
        ns_dtype: DTypeLike | None,
        ns_preconditioning: str,
        mesh: Mesh | AbstractMesh | None = None,
        slow_axes: SlowAxes | None = None,
        max_stack_bytes: int | None = None,
    ) -> Self:
        """Arguments of :func:`orthogonalize`, checked."""
        # The default is no number: optax.inject_hyperparams would make an array of it,
        # and traced steps have neither the Gram form nor that for float16.
        steps = DEFAULT_STEPS if ns_steps is None else ns_steps
        settings = NewtonSchulz.of(steps, ns_coeffs, ns_dtype, ns_preconditioning, "ns_")
        if max_stack_bytes is not None:
            validate.count("max_stack_bytes", max_stack_bytes)
        validate.mesh("mesh", mesh)
        validate.slow_axes("slow_axes", slow_axes)
        return cls(settings, max_stack_bytes, mesh, slow_axes)

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process."""
        return vars(self) | without_devices(self.mesh, self.slow_axes)

    def platform(self, name: str) -> Platform:
        return PLATFORMS[name].running(self.settings, self.stack_bytes)


# What the audit reads: each stage with its matrices, without tracers.
initialized: TraceLog[tuple[Matrices, PolarOptions]] = TraceLog("polar")


def orthogonalize(
    *,
    ns_steps: int | jax.Array | None = None,
    ns_coeffs: Coefficients = "polar_express",
    ns_dtype: DTypeLike | None = None,
    ns_preconditioning: str = "frobenius",
    max_stack_bytes: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    slow_axes: SlowAxes | None = None,
    param_shardings: ParamShardings = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Replace every matrix by its polar factor, :math:`Q = \mathrm{NS}_k(\tilde M)`.

    Args:
      ns_steps: Newton–Schulz steps :math:`k`, at least 1. None: 5. A traced number takes
        the plain iteration, which is slower.
      ns_coeffs: A preset or table of :func:`polar_factor`, such as
        :func:`polar_express_coefficients` makes.
      ns_dtype: See ``dtype`` of :func:`polar_factor`.
      ns_preconditioning: See ``preconditioning`` of :func:`polar_factor`.
      max_stack_bytes: The largest size of a stack on each device, in bytes. Leaves whose
        matrices have the same shape, or its transpose, go through Newton–Schulz together
        in stacks. None: 256 MiB on GPU; 256 MiB and at most 32 leaves on CPU; 16 MiB on
        TPU.
      mesh: See :func:`orscale`.
      slow_axes: See :func:`orscale`.
      param_shardings: See :func:`orscale`.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or, from ``init`` and ``update``, if a leaf
        is not a matrix.

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
    settings = ns_steps, ns_coeffs, ns_dtype, ns_preconditioning
    options = PolarOptions.of(*settings, mesh, slow_axes, max_stack_bytes)
    stage = functools.partial(orthogonalize_stage, options, ParamSpecs(param_shardings))
    return on_matrices(weight_dimension_numbers, stage)


def orthogonalize_stage(
    options: PolarOptions, param_specs: ParamSpecs, matrices: Matrices
) -> optax.GradientTransformation:
    """:func:`orthogonalize` for given matrices."""

    def init(params: PyTree) -> optax.EmptyState:
        known = options
        if not options.settings.is_static:
            # A tracer may not leave. Steps that are no int count as traced.
            settings = dataclasses.replace(
                options.settings, steps=np.int32(DEFAULTS.steps), table=DEFAULTS.table
            )
            known = dataclasses.replace(options, settings=settings)
        matrices.require_whole(params, param_specs)
        initialized.note((matrices, known))
        param_specs.learn(params)
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.EmptyState]:
        # Factors are sharded as the parameters: where momentum is sharded and weights
        # are not, Q is gathered here, in the dtype of the products.
        like = updates if params is None else params
        qs = matrices.batches(updates)
        wanted = [(None,) * x.ndim for x in qs]
        if any(map(typed_sharding.is_sharded, matrices.leaves(like))):
            wanted = [tuple(typed_sharding.spec(x)) for x in matrices.batches(like)]
        mesh, placement = typed_sharding.mesh_of(qs, options.mesh), None
        # An array without entries is its own factor.
        filled = [i for i, x in enumerate(qs) if x.size]
        if mesh is not None and filled:
            known = _known_specs(param_specs, matrices, updates, mesh)
            pairs = [(qs[i], known[i]) for i in filled]
            placement = Placement.of(pairs, mesh, options.mesh, options.slow_axes)
        if filled:
            xs = [qs[i] for i in filled]
            chosen = options, tuple(wanted[i] for i in filled), placement
            tracing = any(isinstance(x, jax.core.Tracer) for x in xs)
            compiled = mesh is None and options.settings.is_static and not tracing
            run: Branch = compiled_on_any_platform if compiled else on_any_platform
            found = run(_on_platform, chosen, xs, options.settings.traced)
            for i, q in zip(filled, found, strict=True):
                qs[i] = q
        return matrices.from_batches(qs, like), state

    return optax.GradientTransformation(init, update)


def _on_platform(
    name: str,
    chosen: tuple[PolarOptions, Sequence[tuple[Any, ...]], Placement | None],
    xs: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    """One platform's branch; ``traced`` are the settings that are traced."""
    options, specs, placement = chosen
    platform = options.platform(name)
    if placement is None:
        qs = on_one_device(platform.with_traced(traced), xs)
    else:
        qs = on_shards(platform, platform.pack(xs, to_send=True), traced, placement)
    # Resharded before the cast, to send the narrower dtype.
    placed = map(typed_sharding.shard_as, qs, xs, specs)
    return [q.astype(x.dtype) for q, x in zip(placed, xs, strict=True)]


def _known_specs(
    param_specs: ParamSpecs, matrices: Matrices, updates: PyTree, mesh: AbstractMesh
) -> list[PartitionSpec | None]:
    """The specs of all arrays of matrices; None where types say them, or nobody does."""
    leaves = matrices.leaves(updates)
    of_leaves: list[PartitionSpec | None] = [None] * len(leaves)
    if not mesh.are_all_axes_explicit:
        of_leaves = param_specs.on(mesh, matrices.tree_of(leaves))
    rows = zip(matrices.of_leaves, leaves, of_leaves, strict=True)
    return [
        part for axes, x, spec in rows for part in _part_specs(axes, x.shape, spec, mesh)
    ]


@functools.lru_cache(maxsize=4096)
def _part_specs(
    axes: MatrixAxes,
    shape: tuple[int, ...],
    spec: PartitionSpec | None,
    mesh: AbstractMesh,
) -> tuple[PartitionSpec | None, ...]:
    """The specs of the matrices ``(*batch, m, n)`` of a leaf, one for each part."""
    if spec is None:
        return (None,) * len(axes.labels)
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return tuple(typed_sharding.inferred(axes.batches, leaf, mesh))
