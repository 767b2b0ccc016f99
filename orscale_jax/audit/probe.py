"""What an optimizer's first update does to each parameter, whatever it is made of."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from orscale_jax.audit.state import leaves_by_path
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms.master_weights import MasterWeightsState
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.nodes import nodes_of

# How often one gradient is given until a parameter moves: schedules begin at 0, and
# MultiSteps accumulates. After the last one that has moved, the others get fewer.
_UPDATES, _MORE_UPDATES = 128, 16
# Of singular values, or of entries: the squared mean of their squares over the mean of
# their fourth powers is 1 if they are equal. It is 0.78 for any that Jordan's
# Newton–Schulz leaves between 0.68 and 1.13; the gradients here have 0.57 at most.
EVEN_SPECTRUM, EVEN_ENTRIES = 0.6, 0.98
_VECTORS = 16  # They estimate a spectrum, and have all of it of so many rows.

# From gradients, state and parameters: updates, state, and root mean squares of updates.
_Update: TypeAlias = Callable[[PyTree, Any, PyTree], tuple[PyTree, Any, PyTree]]


class FirstUpdate(NamedTuple):
    """What an optimizer's first update does to a parameter: see ParameterRow."""

    kinds: list[str]  # Of each of its parts.
    rms: float
    drifts: bool  # Whether its master weight moves, and the parameter not with it.


def first_updates(
    optimizer: Any, params: PyTree, axes_of: Mapping[Any, MatrixAxes]
) -> dict[Any, FirstUpdate]:
    """The first updates by random gradients, by path; along the axes that are known.

    The root mean square is measured at the parameters themselves. The kind of an update
    is measured at tiny parameters, where neither decay nor the rounding of bfloat16 hides
    it.
    """
    leaf_of = leaves_by_path(unbox(params))
    # One number, or one row, is even by itself: a sign and a polar factor are those that
    # do not shrink with its gradient.
    thin = {path for path, x in leaf_of.items() if _is_thin(x, axes_of.get(path))}
    drawn: list[tuple[jax.Array, ...]] = []
    for seed, (path, leaf) in enumerate(leaf_of.items()):
        draw = functools.partial(_drawn, leaf)
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        weight = draw(3 * seed, 0.02) if abstract else jnp.asarray(leaf)
        gradient, tiny = draw(3 * seed + 1, 1.0), draw(3 * seed + 2, 2.0**-20)
        smaller = draw(3 * seed + 1, 1 / 16) if path in thin else gradient
        drawn.append((weight, tiny, gradient, smaller))
    if not drawn:
        return {}
    structure = jax.tree.structure(params)
    weights, light, grads, smaller_grads = (
        jax.tree.unflatten(structure, column) for column in zip(*drawn, strict=True)
    )
    update = _update_of(optimizer, grads, weights)
    moved, low_bits = _first_moves(optimizer, update, grads, weights)
    alone = _first_moves(optimizer, update, grads, light)[0]
    weight_of = leaves_by_path(unbox(weights))
    again = _first_moves(optimizer, update, smaller_grads, light)[0] if thin else {}
    result = {}
    for path in leaf_of:
        step, rms = alone.get(path, (None, 0.0))
        first, usual_rms = moved.get(path, (None, rms))
        axes = axes_of.get(path)
        parts = 1 if axes is None else len(axes.labels)
        kinds = ["other"] * parts
        drifts = path in low_bits
        if drifts and first is not None:
            drifts = bool(_is_rounded(weight_of[path], first))
        if step is None:
            kinds = ["none"] * parts if first is None else kinds
        elif path not in thin or again.get(path, (None, 0))[1] > rms / 4:
            if even_entries(step) > EVEN_ENTRIES:
                kinds = ["element-wise"] * parts
            else:
                for tried in _possible_axes(step) if axes is None else (axes,):
                    kinds = [
                        "orthogonal"
                        if even_spectrum(step, tried, index) > EVEN_SPECTRUM
                        else "other"
                        for index in range(len(tried.labels))
                    ]
                    if "other" not in kinds:
                        break
        result[path] = FirstUpdate(kinds, usual_rms, drifts)
    return result


def _is_thin(leaf: Any, axes: MatrixAxes | None) -> bool:
    """Whether a leaf is one number, or has matrices of one row or one column."""
    if axes is None:
        return np.size(leaf) == (max(leaf.shape) if np.ndim(leaf) > 1 else 1)
    parts = (
        jax.eval_shape(functools.partial(axes.part, index=index), leaf)
        for index in range(len(axes.labels))
    )
    return any(min(axes.within.matrix_shape(part)) == 1 for part in parts)


def _drawn(leaf: Any, seed: int, size: float) -> jax.Array:
    """Positive random numbers like a parameter that shrink along each of its axes.

    Their rows are alike and of several sizes, so that no spectrum is even by chance; nor
    is that of their signs.
    """
    # Beside others on a mesh, the sharding of one device would not be accepted.
    given, sharding = getattr(leaf, "sharding", None), None
    if isinstance(given, NamedSharding):
        sharding = NamedSharding(running_mesh(given.mesh), given.spec)
    return draw(np.shape(leaf), jnp.result_type(leaf), sharding)(seed, size)


def running_mesh(mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh, or one of devices that are there, with shorter axes if need be."""
    devices = jax.devices()
    if isinstance(mesh, Mesh) and {*mesh.devices.flat} <= {*devices}:
        return mesh
    sizes = list(mesh.axis_sizes)
    while math.prod(sizes) > len(devices):
        longest = sizes.index(max(sizes))
        sizes[longest] //= next(n for n in itertools.count(2) if not sizes[longest] % n)
    if math.prod(sizes) == 1 < mesh.size:
        raise ValueError(
            f"the optimizer has to run on a mesh like {dict(mesh.shape)}, but there is "
            "one device: call jax.config.update('jax_num_cpu_devices', 8) before JAX "
            "starts."
        )
    chosen = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types)


@functools.cache
def draw(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[..., jax.Array]:
    """A function of a seed and a size: see ``_drawn``."""

    def drawn(seed: int, size: float) -> jax.Array:
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros(shape, dtype)
        x = jax.random.uniform(jax.random.key(seed), shape, jnp.float32, 1 / 8, 1) * size
        for axis, length in enumerate(shape):
            others = [other for other in range(len(shape)) if other != axis]
            x *= jnp.expand_dims(4 ** -jnp.linspace(0.0, 1.0, length), others)
        return x.astype(dtype)

    return jax.jit(drawn, out_shardings=sharding)


def runnable(optimizer: Any, grads: PyTree, state: Any, params: PyTree) -> Any:
    """Its ``update``, or its error. What needs a loss is given that of a linear model."""

    def loss(grads: PyTree, params: PyTree) -> Any:
        products = jax.tree.map(lambda g, p: jnp.sum(g * p).real, grads, params)
        return sum(x.astype(jnp.float32) for x in jax.tree.leaves(products))

    def with_loss(grads: PyTree, state: Any, params: PyTree) -> Any:
        value, value_fn = loss(grads, params), functools.partial(loss, grads)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        return optimizer.update(grads, state, params, **extra)

    errors = []
    # Of optimizer.update itself, JAX would keep the trace for the user's step.
    for update in (
        lambda *x: optimizer.update(*x),
        with_loss,
        lambda grads, state, _: optimizer.update(grads, state),
    ):
        try:
            jax.eval_shape(update, grads, state, params)
            return update
        except Exception as error:  # Whatever a foreign update raises.
            errors.append(error)
    raise errors[0]


def _update_of(optimizer: Any, grads: PyTree, params: PyTree) -> _Update:
    """Its ``update``, compiled, with the root mean squares."""
    state = optimizer.init(params)  # Not traced: it sees the shardings.
    try:
        update = runnable(optimizer, grads, state, params)
    except Exception as error:
        raise ValueError(
            "the probe calls optimizer.update(gradients, state, params), which raised "
            f"{type(error).__name__}: {error}\nPass probe=False, or an optimizer that "
            "needs no other arguments."
        ) from error

    def measured(grads: PyTree, state: Any, params: PyTree) -> Any:
        updates, state = update(grads, state, params)
        wide = jax.tree.map(lambda u: abs(u).astype(jnp.float32), unbox(updates))
        squares = jax.tree.map(lambda u: jnp.sum(u * u) / max(1, u.size), wide)
        return updates, state, jax.tree.map(jnp.sqrt, squares)

    return jax.jit(measured)


def _first_moves(
    optimizer: Any, update: _Update, grads: PyTree, params: PyTree
) -> tuple[dict[Any, tuple[Any, float]], set[Any]]:
    """The first update of each parameter that is not 0, and its root mean square.

    Also the parameters whose master weights have low bits after all updates.
    """
    state, left = optimizer.init(params), _UPDATES
    moved: dict[Any, tuple[Any, float]] = {}
    paths = leaves_by_path(unbox(params)).keys()
    while left and moved.keys() != paths:
        updates, state, sizes = update(grads, state, params)
        updates, left = leaves_by_path(unbox(updates)), left - 1
        for path, rms in leaves_by_path(jax.device_get(sizes)).items():
            if path not in moved and rms != 0:
                moved[path], left = (updates[path], float(rms)), _MORE_UPDATES
    low_bits = {
        path
        for node in nodes_of(state, MasterWeightsState)
        for path, low in leaves_by_path(unbox(node.low_bits)).items()
        if low.any()
    }
    return moved, low_bits


def _possible_axes(leaf: jax.Array) -> Iterator[MatrixAxes]:
    """The ways to take axes for batch, rows and columns of matrices that are not thin.

    All of them for up to four axes. Five have 90, each of which is compiled: from there
    on, batch, rows and columns are neighbouring axes in this order.
    """
    for roles in itertools.product("bmn", repeat=leaf.ndim):
        if leaf.ndim > 4 and not re.fullmatch("b*m+n+", "".join(roles)):
            continue
        batch, rows, columns = (
            tuple(axis for axis in range(leaf.ndim) if roles[axis] == role)
            for role in "bmn"
        )
        axes = MatrixAxes(batch, rows, columns)
        if () < rows < columns and (not _is_thin(leaf, axes) or _is_thin(leaf, None)):
            yield axes


@jax.jit
def _is_rounded(weight: jax.Array, update: jax.Array) -> jax.Array:
    """Whether a weight loses a part of its update, as none does with a master weight."""
    exact = weight.astype(jnp.float32) + update.astype(jnp.float32)
    lost = abs(exact - exact.astype(weight.dtype).astype(jnp.float32))
    return (lost > 2**-16 * abs(exact)).any()


@jax.jit
def even_entries(update: jax.Array) -> jax.Array:
    """How even the entries are, at the worst index of the first axis."""
    first = int(update.ndim > 1 and update.size > update.shape[0])
    rest = tuple(range(first, update.ndim))
    x = abs(update).astype(jnp.float32)
    squares = jnp.square(x / jnp.maximum(x.max(rest, keepdims=True), 1e-37))
    return (squares.mean(rest) ** 2 / jnp.square(squares).mean(rest)).min()


@functools.partial(jax.jit, static_argnums=(1, 2))
def even_spectrum(update: jax.Array, axes: MatrixAxes, index: int) -> jax.Array:
    """How even the worst spectrum of a part is: (tr A)² / (k tr A²), of A = U Uᵀ.

    k are the rows, or the columns where these are fewer. It is computed, or estimated,
    from products with vectors: nothing is gathered.
    """
    x, axes = axes.part(update, index), axes.within
    few, many = sorted(
        (axes.rows, axes.columns),
        key=lambda axes_of_side: math.prod(x.shape[axis] for axis in axes_of_side),
    )
    shape = [size if axis in few else 1 for axis, size in enumerate(x.shape)]
    k = math.prod(shape)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = x / jnp.maximum(abs(x).max(axes.matrix, keepdims=True), 1e-37)
    signs = jax.random.rademacher(jax.random.key(0), (_VECTORS, k))
    vectors = k**0.5 * jnp.eye(k) if k <= _VECTORS else signs

    def squared_norm(vector: jax.Array) -> jax.Array:
        y = jnp.sum(x.conj() * vector.reshape(shape), few, keepdims=True)
        z = jnp.sum(x * y, many, keepdims=True)
        return jnp.sum(jnp.square(abs(z)), axes.matrix)

    squares = jax.lax.map(squared_norm, vectors.astype(x.dtype)).mean(0)
    total = jnp.sum(jnp.square(abs(x)), axes.matrix)
    return jnp.min(total**2 / (k * squares))
