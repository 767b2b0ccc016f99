"""The matrices of a tree, and the boundary between what users pass and what stages see.

Outside: trees whose parameters may be in boxes, of any floating dtype, some of them
without gradients. Inside: bare arrays of one dtype, and the matrices among them. A whole
optimizer crosses it once, and so does each stage that is used by itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from orscale_jax.newton_schulz.fusion import fuse_small_on_gpu, sum_all
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    matrix_axes,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.trees.boxes import PyTree, annotated_spec, box_like, is_box, rebox, unbox
from orscale_jax.trees.checks import (
    require_arrays,
    require_fitting,
    require_shapes,
    require_state,
    where_gradients_are,
)
from orscale_jax.trees.names import name_and_shape
from orscale_jax.trees.nodes import is_masked

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs

# The groups of a whole optimizer's partition, and so the keys of its state.
MATRIX, ADAMW = "matrix", "adamw"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Which leaves of a tree hold matrices, and along which axes. Hashable.

    Trees are without boxes, except for ``params`` of :meth:`scalars`.
    *Scalars* are a tree whose leaves of matrices are arrays of the batch shape: they have
    one number for each matrix, such as its norm.
    """

    structure: Any  # Of the tree.
    axes: tuple[MatrixAxes | None, ...]  # Of each leaf; None if it holds no matrix.

    @classmethod
    def of(
        cls, numbers: WeightDimensionNumbers, tree: PyTree, *, only: bool = False
    ) -> "Matrices":
        """The matrices of a tree by their dimension numbers; ``only`` refuses others."""
        axes_tree = matrix_axes(numbers, tree)
        if only:
            jax.tree.map_with_path(_require_matrix, axes_tree, tree, is_leaf=is_axes_leaf)
        leaves, structure = jax.tree.flatten(axes_tree, is_leaf=is_axes_leaf)
        axes = (leaf if isinstance(leaf, MatrixAxes) else None for leaf in leaves)
        return cls(structure, tuple(axes))

    @property
    def of_leaves(self) -> list[MatrixAxes]:
        """The axes of the leaves of matrices."""
        return [axes for axes in self.axes if axes is not None]

    @property
    def mask(self) -> PyTree:
        """A tree of booleans: whether each leaf holds matrices."""
        return self.structure.unflatten(axes is not None for axes in self.axes)

    @property
    def paths(self) -> list[Any]:
        axes_tree = self.tree_of(self.of_leaves)  # Masked where there are none.
        return [path for path, _ in jax.tree.leaves_with_path(axes_tree)]

    def leaves(self, tree: PyTree) -> list[Any]:
        nodes = self.structure.flatten_up_to(tree)
        return [x for x, axes in zip(nodes, self.axes, strict=True) if axes is not None]

    def replace(self, tree: PyTree, leaves: Sequence[Any]) -> PyTree:
        nodes = self.structure.flatten_up_to(tree)
        indices = (i for i, axes in enumerate(self.axes) if axes is not None)
        for i, leaf in zip(indices, leaves, strict=True):
            nodes[i] = leaf
        return self.structure.unflatten(nodes)

    def tree_of(self, leaves: Sequence[Any]) -> PyTree:
        """A tree with these leaves of matrices, masked elsewhere."""
        masked = self.structure.unflatten([optax.MaskedNode()] * len(self.axes))
        return self.replace(masked, leaves)

    def each(self, *trees: PyTree) -> Iterator[Any]:
        """The axes of each leaf of matrices, and that leaf of each tree."""
        return zip(self.of_leaves, *map(self.leaves, trees), strict=True)

    def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """``fn(axes, *leaves)`` of the leaves of matrices; others as in the first."""
        return self.replace(trees[0], [fn(*row) for row in self.each(*trees)])

    def sums(self, fn: Callable[[jax.Array], jax.Array], *trees: PyTree) -> list[PyTree]:
        """Scalars for each tree: the sum over every matrix of ``fn`` of its entries."""
        groups = [
            [axes.part(fn(leaf), index) for leaf in leaves]
            for axes, *leaves in self.each(*trees)
            for index in range(len(axes.labels))
        ]
        along = [axes.within.matrix for axes in self.of_leaves for _ in axes.labels]
        sums = sum_all(groups, along)
        return [self.scalars_of_batches([x[i] for x in sums]) for i in range(len(trees))]

    def batches(self, tree: PyTree) -> list[jax.Array]:
        """All matrices, as arrays of shape ``(*batch, m, n)``, one for each part."""
        return [x for axes, leaf in self.each(tree) for x in axes.batches(leaf)]

    def from_batches(self, batches: Sequence[jax.Array], tree: PyTree) -> PyTree:
        """The inverse of :meth:`batches`: leaves shaped and sharded as a tree's."""
        left = iter(batches)

        def joined(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
            indices = range(len(axes.labels))
            shapes = jax.eval_shape(lambda x: [axes.part(x, i) for i in indices], leaf)
            parts = [axes.within.from_matrices(next(left), like) for like in shapes]
            return typed_sharding.shard_like(axes.join(parts), leaf)

        return self.tree_of([joined(*row) for row in self.each(tree)])

    def scalars_of_batches(self, scalars: Sequence[jax.Array]) -> PyTree:
        """Scalars from those of :meth:`batches`, which have their batch shapes."""
        left = iter(scalars)
        return self.tree_of(
            [axes.join([next(left) for _ in axes.labels]) for axes in self.of_leaves]
        )

    def require_whole(self, params: PyTree, known: ParamSpecs | None = None) -> None:
        """Refuse matrices of which each device has a part, as boxes or arguments say."""
        mesh = jax.sharding.get_abstract_mesh()
        manual = {name for name in mesh.manual_axes if mesh.shape[name] > 1}
        if not manual:
            return
        nodes = self.leaves(params)
        given = known and known.given(self.tree_of([unbox(x) for x in nodes]), None)
        for path, axes, node, spec in zip(
            self.paths, self.of_leaves, nodes, given or [None] * len(nodes), strict=True
        ):
            source = "param_shardings"
            if spec is None:
                source, spec = "its box", annotated_spec(node) if is_box(node) else None
            by_axis = typed_sharding.axes_of(spec or PartitionSpec(), unbox(node).ndim)
            for axis in axes.matrix:
                if manual.intersection(by_axis[axis]):
                    raise ValueError(
                        f"parameter {name_and_shape(path, unbox(node))} is a part of its "
                        f"matrices: {source} has {by_axis[axis]} for axis {axis}, and "
                        f"within jax.shard_map over {sorted(manual)} each device "
                        "computes alone. Compute the gradients there, and call init and "
                        "update of the optimizer outside of it; or leave the parameter "
                        "to AdamW, with None in weight_dimension_numbers. If the "
                        f"parameter is whole there, correct {source}."
                    )

    def scalars(self, params: PyTree, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """Scalars ``fn(axes, leaf, *nodes)``, sharded and boxed as the batch axes.

        They may have several numbers of each matrix, along a first axis.
        """

        def make(axes: MatrixAxes, node: Any, *others: Any) -> Any:
            leaf = unbox(node)
            if not isinstance(leaf, jax.ShapeDtypeStruct):  # Optax's init takes it, too.
                leaf = jnp.asarray(leaf)
            made, batch = fn(axes, leaf, *others), axes.batch_sharding(leaf)
            first = (None,) * (made.ndim - len(batch))
            made = typed_sharding.shard_as(made, leaf, (*first, *batch))
            return box_like(made, node, lambda names: (*first, *axes.of_batch(names)))

        # optax.tree.map_params initializes with a placeholder. One array instead of a
        # tree tells it that these arrays do not have the parameters' shapes.
        if type(params).__name__ == "_ParamsPlaceholder":
            return jnp.ones(())
        self.require_whole(params)
        return self.tree_of([make(*row) for row in self.each(params, *trees)])

    def constants(self, params: PyTree, values: Sequence[float]) -> PyTree:
        """Several scalars of each matrix, along a first axis, in the dtype of norms."""

        def of(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
            full = functools.partial(typed_sharding.full, axes.batch_shape(leaf))
            return jnp.stack([full(value, compute_dtype(leaf), leaf) for value in values])

        return self.scalars(params, of)


def _require_matrix(path: Any, axes: Any, subtree: PyTree) -> None:
    """Refuse a parameter that a stage for matrices alone would not handle."""
    if is_masked(axes) and jax.tree.leaves(subtree):
        raise ValueError(
            f"parameter {name_and_shape(path, subtree)} is not a matrix, but this stage "
            "takes matrices only: route it elsewhere with optax.partition (as orscale "
            "does), or give its axes in weight_dimension_numbers."
        )


def broadcast(axes: MatrixAxes, scalars: jax.Array, leaf: jax.Array) -> jax.Array:
    """Scalars of a leaf's matrices, to broadcast against it, sharded as it is."""
    x = axes.expand(scalars)
    like = zip(x.shape, leaf.shape, typed_sharding.spec(leaf), strict=True)
    sharding = [names if size == full else None for size, full, names in like]
    return typed_sharding.shard_as(x, leaf, sharding)


# Makes a transformation of bare arrays, given the matrices of the tree.
MakeStage: TypeAlias = Callable[[Matrices], optax.GradientTransformation]


def on_parameters(
    optimizer_of: Callable[[PyTree], Optimizer], mu_dtype: DTypeLike | None
) -> Optimizer:
    """Wrap ``optimizer_of(parameters)`` as an optimizer for what users pass.

    Updates are sharded like the parameters, and have the dtype to which gradient,
    parameter and ``mu_dtype`` promote, as in Optax.
    """

    def cast(leaf: jax.Array, update: Any, param: Any) -> jax.Array:
        dtype = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))
        dtype = dtype if mu_dtype is None else jnp.promote_types(dtype, mu_dtype)
        return typed_sharding.shard_like(leaf.astype(dtype), jnp.asarray(param))

    def fused(grads: PyTree) -> PyTree:
        # On GPUs XLA computes small leaves of one shape together.
        leaves, structure = jax.tree.flatten(grads)
        return jax.tree.unflatten(structure, fuse_small_on_gpu(leaves))

    return _on_bare_arrays(optimizer_of, require_fitting, fused, cast)


def on_matrices(numbers: WeightDimensionNumbers, stage: MakeStage) -> Optimizer:
    """A stage for the matrices of the trees that it is given, which hold nothing else.

    Updates keep their dtypes.
    """

    def optimizer_of(tree: PyTree) -> Optimizer:
        matrices = Matrices.of(numbers, tree, only=True)
        return optax.with_extra_args_support(stage(matrices))

    def cast(leaf: jax.Array, update: Any, _: Any) -> jax.Array:
        return leaf.astype(jnp.result_type(update))

    return _on_bare_arrays(optimizer_of, require_shapes, lambda updates: updates, cast)


def _on_bare_arrays(
    optimizer_of: Callable[[PyTree], Optimizer],
    require: Callable[[PyTree, PyTree], None],
    prepared: Callable[[PyTree], PyTree],
    cast: Callable[[jax.Array, Any, Any], jax.Array],
) -> Optimizer:
    """``optimizer_of(parameters)`` for boxed arrays of any dtype.

    It sees bare arrays in float32 (float64 if any leaf is float64), and only parameters
    that have gradients; if ``update`` has no parameters, it sees the updates. Afterwards,
    every leaf of the state gets back its dtype, sharding and box. ``cast`` takes a step,
    the update and its parameter.
    """

    def init(params: PyTree) -> PyTree:
        require_arrays(bare := unbox(params))
        return optimizer_of(bare).init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        grads, old, weights = unbox((updates, state, params))
        if weights is not None:
            weights = where_gradients_are(grads, weights)
            require(grads, weights)
        place = grads if weights is None else weights
        # Without shardings, so that JAX caches the trace.
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), place
        )
        like = abstract
        if jax.sharding.get_abstract_mesh().manual_axes:  # For require_whole.
            like = rebox(abstract, updates if params is None else params)
        wanted = unbox(jax.eval_shape(init, like))
        if jax.tree.leaves((old, wanted)):  # Of a stage without state, anything will do.
            require_state(old, wanted, abstract)
        dtype = compute_dtype((grads, weights))

        def widened(leaf: Any) -> Any:
            floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            return jnp.asarray(leaf, dtype) if floating else leaf

        def kept(leaf: jax.Array, before: Any) -> jax.Array:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return leaf
            leaf = leaf.astype(jnp.result_type(before))
            return typed_sharding.shard_like(leaf, jnp.asarray(before))

        wide_grads, wide_old, wide_weights = jax.tree.map(widened, (grads, old, weights))
        optimizer = optimizer_of(wide_grads if weights is None else wide_weights)
        steps, state_after = optimizer.update(
            prepared(wide_grads), wide_old, wide_weights, **extra_args
        )
        steps = jax.tree.map(cast, steps, grads, place)
        state_after = jax.tree.map(kept, state_after, old)
        return rebox(steps, updates), rebox(state_after, state)

    return optax.GradientTransformationExtraArgs(init, update)


def compute_dtype(tree: Any) -> jnp.dtype:
    """The dtype of norms and ratios: float64 if any leaf is float64, else float32."""
    double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.dtype(jnp.float64 if double else jnp.float32)
