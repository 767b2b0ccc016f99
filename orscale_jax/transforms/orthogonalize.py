"""The stage that replaces every matrix by its polar factor."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from orscale_jax import _checks
from orscale_jax.distributed import engine
from orscale_jax.distributed.engine import PolarOptions
from orscale_jax.newton_schulz import arithmetic, preconditioning
from orscale_jax.newton_schulz.coefficients import Coefficients, coefficient_table
from orscale_jax.newton_schulz.polar import NewtonSchulz
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    require_matrices,
)
from orscale_jax.parameters.matrix_specs import matrix_specs
from orscale_jax.sharding import (
    meshes,
    param_shardings as _param_shardings,
    typed_sharding,
)
from orscale_jax.sharding.param_shardings import ParamShardings
from orscale_jax.transforms.per_matrix import map_matrices
from orscale_jax.trees.boxes import PyTree, on_bare_arrays


def orthogonalize(
    *,
    ns_steps: int | jax.Array = 5,
    ns_coeffs: Coefficients = "polar_express",
    ns_dtype: DTypeLike | None = None,
    ns_preconditioning: str = "frobenius",
    ns_products: str = "xla",
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
      ns_dtype: See ``dtype`` of :func:`polar_factor`.
      ns_preconditioning: See ``preconditioning`` of :func:`polar_factor`.
      ns_products: Deprecated. XLA computes all products: ``"pallas"`` gives a warning and
        the same results as ``"xla"``.
      max_stack_bytes: The largest stack on each device, in bytes. Leaves whose matrices
        have the same shape, or its transpose, go through Newton–Schulz together in
        stacks. None: 256 MiB on GPU; 256 MiB and at most 32 leaves on CPU; 16 MiB on TPU,
        but 256 MiB for arrays on Auto axes whose shardings are unknown.
      mesh: See :func:`orscale`.
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
    _checks.count("ns_steps", ns_steps)
    _checks.dtype("ns_dtype", ns_dtype)
    preconditioning.check("ns_preconditioning", ns_preconditioning)
    arithmetic.check_products("ns_products", ns_products)
    if max_stack_bytes is not None:
        _checks.count("max_stack_bytes", max_stack_bytes)
    _checks.mesh("mesh", mesh)
    _param_shardings.check(param_shardings)
    settings = NewtonSchulz(
        steps=ns_steps,
        table=coefficient_table(ns_coeffs, argument="ns_coeffs"),
        preconditioning=ns_preconditioning,
        dtype=ns_dtype,
    )
    return orthogonalize_by(
        PolarOptions(settings, max_stack_bytes, mesh),
        param_shardings,
        weight_dimension_numbers,
    )


def orthogonalize_by(
    options: PolarOptions,
    param_shardings: ParamShardings = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    """:func:`orthogonalize` of checked settings, on given platforms."""

    def init(params: PyTree) -> optax.EmptyState:
        require_matrices(weight_dimension_numbers, params)
        _param_shardings.note_annotations(params)
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.EmptyState]:
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        # Factors are sharded as the parameters: where momentum is sharded and weights
        # are not, Q is gathered here, in the dtype of the products.
        like = updates if params is None else params
        matrices = map_matrices(lambda axes, x: axes.matrices(x), axes_tree, updates)
        specs = map_matrices(_typed_specs, axes_tree, updates, like)
        factors = engine.polar_factors(
            jax.tree.leaves(matrices),
            jax.tree.leaves(specs),
            _auto_specs(param_shardings, axes_tree, updates, options.mesh),
            options,
        )
        join = functools.partial(_join, iter(factors))
        return map_matrices(join, axes_tree, updates, like), state

    return on_bare_arrays(optax.GradientTransformation(init, update))


def _typed_specs(axes: LeafAxes, _: jax.Array, like: jax.Array) -> list[PartitionSpec]:
    """The shardings of the matrices of ``like``, where its type has any."""
    return [PartitionSpec(*typed_sharding.spec(part)) for part in axes.matrices(like)]


def _auto_specs(
    param_shardings: ParamShardings,
    axes_tree: PyTree,
    updates: PyTree,
    given_mesh: Mesh | AbstractMesh | None,
) -> list[PartitionSpec] | None:
    """The shardings of all matrices on Auto axes; None if they are unknown."""
    mesh = meshes.mesh_of(jax.tree.leaves(updates), given_mesh)
    if mesh is None or not meshes.is_auto(mesh):
        return None
    specs = _param_shardings.specs_of(param_shardings, updates, mesh)
    if specs is None:
        return None

    def of_leaf(axes: Any, leaf: Any, spec: Any) -> Any:
        if isinstance(axes, optax.MaskedNode):
            return axes
        return matrix_specs(axes, leaf.shape, spec, mesh)

    tree = jax.tree.map(of_leaf, axes_tree, updates, specs, is_leaf=is_axes_leaf)
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _join(
    factors: Iterator[jax.Array], axes: LeafAxes, _: jax.Array, leaf: jax.Array
) -> jax.Array:
    """The next factors, shaped and sharded like a leaf."""

    def part(index: int) -> jax.Array:
        like = jax.eval_shape(functools.partial(axes.part, index=index), leaf)
        return axes.within.from_matrices(next(factors), like)

    joined = axes.join([part(index) for index in range(len(axes.labels))])
    return typed_sharding.shard_like(joined, leaf)
