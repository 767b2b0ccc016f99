"""The stage that replaces every matrix by its polar factor."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from orscale_jax import validate
from orscale_jax.distributed import engine
from orscale_jax.distributed.engine import PolarOptions
from orscale_jax.distributed.slow_links import SlowAxes
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.newton_schulz.iteration import NewtonSchulz
from orscale_jax.newton_schulz.platforms import DEFAULTS
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.sharding.param_shardings import ParamShardings, ParamSpecs
from orscale_jax.transforms.matrices import Matrices, on_matrices
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.nodes import TraceLog

# What the audit reads: each stage with its matrices, without tracers.
initialized: TraceLog[tuple[Matrices, PolarOptions]] = TraceLog("polar")


def orthogonalize(
    *,
    ns_steps: int | jax.Array = 5,
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
      ns_steps: Newton–Schulz steps :math:`k`, at least 1.
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
    options = polar_options(*settings, mesh, slow_axes, max_stack_bytes)
    stage = functools.partial(orthogonalize_stage, options, ParamSpecs(param_shardings))
    return on_matrices(weight_dimension_numbers, stage)


def polar_options(
    ns_steps: int | jax.Array,
    ns_coeffs: Coefficients,
    ns_dtype: DTypeLike | None,
    ns_preconditioning: str,
    mesh: Mesh | AbstractMesh | None = None,
    slow_axes: SlowAxes | None = None,
    max_stack_bytes: int | None = None,
) -> PolarOptions:
    """Arguments of :func:`orthogonalize`, checked."""
    settings = NewtonSchulz.of(
        ns_steps, ns_coeffs, ns_dtype, ns_preconditioning, prefix="ns_"
    )
    if max_stack_bytes is not None:
        validate.count("max_stack_bytes", max_stack_bytes)
    validate.mesh("mesh", mesh)
    validate.slow_axes("slow_axes", slow_axes)
    return PolarOptions(settings, max_stack_bytes, mesh, slow_axes)


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
        parts = matrices.batches(updates)
        if any(map(typed_sharding.is_sharded, matrices.leaves(like))):
            specs = [
                PartitionSpec(*typed_sharding.spec(x)) for x in matrices.batches(like)
            ]
        else:
            specs = [PartitionSpec(*[None] * x.ndim) for x in parts]
        mesh = typed_sharding.mesh_of(jax.tree.leaves(updates), options.mesh)
        auto_specs = None
        if mesh is not None and not mesh.are_all_axes_explicit:
            leaves = matrices.leaves(updates)
            known = param_specs.on(mesh, matrices.tree_of(leaves))
            auto_specs = [
                part
                for axes, x, spec in zip(matrices.of_leaves, leaves, known, strict=True)
                for part in _part_specs(axes, x.shape, spec, mesh)
            ]
        qs = engine.polar_factors(parts, specs, auto_specs, options)
        return matrices.from_batches(qs, like), state

    return optax.GradientTransformation(init, update)


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
