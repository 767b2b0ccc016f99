"""The matrices of a tree, and the boundary between what users pass and what stages see.

Outside: trees whose parameters may be in boxes, of any floating dtype, some of them
without gradients. Inside: bare arrays of one dtype, and the matrices among them. A whole
optimizer crosses it once, and so does each stage that is used by itself.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from orscale_jax.distributed.fusion import Reduction, reduce_all, slices_of_stacks
from orscale_jax.parameters.axes import MatrixAxes, square_root
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    matrix_axes,
    require_matrices,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, box_like, rebox, unbox
from orscale_jax.trees.checks import (
    require_arrays,
    require_fitting,
    require_shapes,
    require_state,
    where_gradients_are,
)

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs

# The groups of a whole optimizer's partition, and so the keys of its state.
MATRIX, ADAMW = "matrix", "adamw"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Which leaves of a tree hold matrices, and along which axes. Hashable.

    Trees are without boxes, except for ``params`` of :meth:`entries` and :meth:`full`.
    *Entries* are a tree whose leaves of matrices are arrays of the batch shape: they have
    one entry for each matrix, such as its norm. On GPUs small ones are computed together.
    """

    structure: Any  # Of the tree.
    axes: tuple[MatrixAxes | None, ...]  # Of each leaf; None if it holds no matrix.

    @classmethod
    def of(
        cls, numbers: WeightDimensionNumbers, tree: PyTree, *, only: bool = False
    ) -> "Matrices":
        """The matrices of a tree by their dimension numbers; ``only`` refuses others."""
        found = (require_matrices if only else matrix_axes)(numbers, tree)
        leaves, structure = jax.tree.flatten(found, is_leaf=is_axes_leaf)
        axes = (leaf if isinstance(leaf, MatrixAxes) else None for leaf in leaves)
        return cls(structure, tuple(axes))

    @property
    def of_leaves(self) -> list[MatrixAxes]:
        """The axes of the leaves of matrices."""
        return [axes for axes in self.axes if axes is not None]

    @property
    def axes_tree(self) -> PyTree:
        """The axes as a tree, masked where there are none."""
        return self.tree_of(self.of_leaves)

    @property
    def mask(self) -> PyTree:
        """A tree of booleans: whether each leaf holds matrices."""
        return self.structure.unflatten(axes is not None for axes in self.axes)

    @property
    def paths(self) -> list[Any]:
        """The paths to the leaves of matrices."""
        return [path for path, _ in jax.tree.leaves_with_path(self.axes_tree)]

    def leaves(self, tree: PyTree) -> list[Any]:
        """The leaves of matrices."""
        nodes = self.structure.flatten_up_to(tree)
        return [x for x, axes in zip(nodes, self.axes, strict=True) if axes is not None]

    def replace(self, tree: PyTree, leaves: Sequence[Any]) -> PyTree:
        """The tree with other leaves of matrices."""
        nodes = self.structure.flatten_up_to(tree)
        places = (i for i, axes in enumerate(self.axes) if axes is not None)
        for place, leaf in zip(places, leaves, strict=True):
            nodes[place] = leaf
        return self.structure.unflatten(nodes)

    def tree_of(self, leaves: Sequence[Any]) -> PyTree:
        """A tree with these leaves of matrices, masked elsewhere."""
        masked = self.structure.unflatten([optax.MaskedNode()] * len(self.axes))
        return self.replace(masked, leaves)

    def rows(self, *trees: PyTree) -> Iterator[Any]:
        """The axes of each leaf of matrices, and that leaf of each tree."""
        return zip(self.of_leaves, *map(self.leaves, trees), strict=True)

    def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """``fn(axes, *leaves)`` of the leaves of matrices; others as in the first."""
        return self.replace(trees[0], [fn(*row) for row in self.rows(*trees)])

    def reduce(self, fn: Reduction, tree: PyTree) -> PyTree:
        """Entries ``axes.reduce(fn, leaf)``."""
        parts = [
            axes.part(leaf, index)
            for axes, leaf in self.rows(tree)
            for index in range(len(axes.labels))
        ]
        along = [axes.within.matrix for axes in self.of_leaves for _ in axes.labels]
        return self.together(self.entries_of_parts(reduce_all(fn, parts, along)))

    def norms(self, tree: PyTree) -> PyTree:
        """Entries: the Frobenius norm of every matrix, in the leaves' dtypes."""
        squares = self.map(lambda _, leaf: jnp.square(leaf), tree)
        return self.map(lambda _, x: square_root(x), self.reduce(jnp.sum, squares))

    def together(self, entries: PyTree) -> PyTree:
        """The same entries, computed together on GPUs."""
        return self.replace(entries, slices_of_stacks(self.leaves(entries)))

    def broadcast(self, entries: PyTree, tree: PyTree) -> PyTree:
        """Entries in shapes that broadcast against the leaves, sharded as these."""
        return self.map(broadcast, self.together(entries), tree)

    def parts(self, tree: PyTree) -> list[jax.Array]:
        """All matrices, as arrays of shape ``(*batch, m, n)``, one for each part."""
        return [part for axes, leaf in self.rows(tree) for part in axes.matrices(leaf)]

    def join(self, parts: Sequence[jax.Array], tree: PyTree) -> PyTree:
        """The inverse of :meth:`parts`: leaves shaped and sharded as a tree's."""
        left = iter(parts)

        def joined(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
            indices = range(len(axes.labels))
            shapes = jax.eval_shape(lambda x: [axes.part(x, i) for i in indices], leaf)
            found = [axes.within.from_matrices(next(left), like) for like in shapes]
            return typed_sharding.shard_like(axes.join(found), leaf)

        return self.tree_of([joined(*row) for row in self.rows(tree)])

    def entries_of_parts(self, entries: Sequence[jax.Array]) -> PyTree:
        """Entries from those of :meth:`parts`, which have the parts' batch shapes."""
        left, leaves = iter(entries), []
        for axes in self.of_leaves:
            own = [next(left) for _ in axes.labels]
            leaves.append(jnp.stack(own, axis=axes.place) if axes.cut else own[0])
        return self.tree_of(leaves)

    def entries(self, params: PyTree, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """Entries ``fn(axes, leaf, *nodes)``, sharded and boxed as the batch axes."""

        def make(axes: MatrixAxes, node: Any, *others: Any) -> Any:
            leaf = unbox(node)
            if not isinstance(leaf, jax.ShapeDtypeStruct):  # Optax's init takes it, too.
                leaf = jnp.asarray(leaf)
            made = typed_sharding.shard_as(
                fn(axes, leaf, *others), leaf, axes.batch_sharding(leaf)
            )
            return box_like(made, node, axes.of_batch)

        # optax.tree.map_params initializes with a placeholder. One array instead of a
        # tree tells it that these arrays do not have the parameters' shapes.
        if type(params).__name__ == "_ParamsPlaceholder":
            return jnp.ones(())
        return self.tree_of([make(*row) for row in self.rows(params, *trees)])

    def full(
        self, params: PyTree, value: float, dtype: Callable[[jax.Array], DTypeLike]
    ) -> PyTree:
        """Entries that all have one value, sharded and boxed as the batch axes."""
        full = typed_sharding.full
        return self.entries(
            params, lambda axes, x: full(axes.batch_shape(x), value, dtype(x), x)
        )


def broadcast(axes: MatrixAxes, entries: jax.Array, leaf: jax.Array) -> jax.Array:
    """Entries of a leaf in a shape that broadcasts against it, sharded as it is."""
    x = axes.per_matrix(entries)
    like = zip(x.shape, leaf.shape, typed_sharding.spec(leaf), strict=True)
    sharding = [entry if size == full else None for size, full, entry in like]
    return typed_sharding.shard_as(x, leaf, sharding)


# Makes a transformation of bare arrays, given the matrices of the tree.
Stage: TypeAlias = Callable[[Matrices], optax.GradientTransformation]


def on_parameters(
    optimizer_of: Callable[[PyTree], Optimizer],
    mu_dtype: DTypeLike | None,
    *,
    keep_dtypes: bool = False,
) -> Optimizer:
    """The whole optimizer that ``optimizer_of(parameters)`` is for given parameters.

    It sees bare arrays in float32 (float64 if any leaf is), and only parameters that have
    gradients; without parameters, the updates. Updates come out in the dtype to which
    gradient, parameter and ``mu_dtype`` promote, as in Optax, and sharded like the
    parameters; every leaf of the state with its dtype, sharding and box of before.
    With ``keep_dtypes``, for a single stage, updates keep their own dtypes instead.
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
            (require_shapes if keep_dtypes else require_fitting)(grads, weights)
        place = grads if weights is None else weights
        abstract = jax.tree.map(_abstract, place)
        wanted = jax.eval_shape(init, abstract)
        if jax.tree.leaves((old, wanted)):  # Of a stage without state, anything will do.
            require_state(old, wanted, abstract)
        dtype = compute_dtype((grads, weights))

        def widened(leaf: Any) -> Any:
            floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            return jnp.asarray(leaf, dtype) if floating else _as_jax(leaf)

        def cast(leaf: jax.Array, update: Any, param: Any) -> jax.Array:
            if keep_dtypes:
                return leaf.astype(jnp.result_type(update))
            dtype = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))
            dtype = dtype if mu_dtype is None else jnp.promote_types(dtype, mu_dtype)
            return typed_sharding.shard_like(leaf.astype(dtype), jnp.asarray(param))

        def kept(leaf: jax.Array, before: Any) -> jax.Array:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return leaf
            cast = leaf.astype(jnp.result_type(before))
            return typed_sharding.shard_like(cast, jnp.asarray(before))

        wide_grads, wide_state, wide_weights = jax.tree.map(
            widened, (grads, old, weights)
        )
        optimizer = optimizer_of(wide_grads if weights is None else wide_weights)
        if not keep_dtypes:  # On GPUs XLA computes small leaves of one shape together.
            leaves, structure = jax.tree.flatten(wide_grads)
            wide_grads = jax.tree.unflatten(structure, slices_of_stacks(leaves))
        steps, state_after = optimizer.update(
            wide_grads, wide_state, wide_weights, **extra_args
        )
        steps = jax.tree.map(cast, steps, grads, place)
        state_after = jax.tree.map(kept, state_after, old)
        return rebox(steps, updates), rebox(state_after, state)

    return optax.GradientTransformationExtraArgs(init, update)


def on_matrices(numbers: WeightDimensionNumbers, stage: Stage) -> Optimizer:
    """A stage for the matrices of the trees that it is given, which hold nothing else."""

    def optimizer_of(tree: PyTree) -> Optimizer:
        matrices = Matrices.of(numbers, tree, only=True)
        return optax.with_extra_args_support(stage(matrices))

    return on_parameters(optimizer_of, None, keep_dtypes=True)


def compute_dtype(tree: Any) -> jnp.dtype:
    """The dtype of norms and ratios: float64 if any leaf is float64, else float32."""
    double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf without values and sharding: JAX keeps what it traces for equal ones."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))


def _as_jax(leaf: Any) -> Any:
    """JAX's array for a NumPy array, which may have a dtype that JAX has not."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
