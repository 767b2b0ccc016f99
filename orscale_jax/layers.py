"""A scan over layers whose backward pass steps them, and holds one layer's gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import validate
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_state
from orscale_jax.trees.names import name_and_shape, quoted
from orscale_jax.trees.nodes import nodes_of


def init_layers(
    optimizer: optax.GradientTransformation, stacked_params: PyTree, *, axis: int = 0
) -> optax.OptState:
    """Make the state of stacked layers for :func:`vjp_layers`.

    It is the state of one layer with a new leading axis: ``jax.vmap(optimizer.init)``. To
    see that the step of a parameter does not depend on other gradients, the optimizer
    steps a small copy of one layer, once for each leaf, whose gradient is NaN. This
    compiles a small program.

    Args:
      optimizer: Any Optax optimizer whose step of a parameter depends on no gradient but
        its own. It sees the names and shapes of one layer.
      stacked_params: The parameters of L layers, stacked along one axis of each leaf.
      axis: The axis of the layers. MaxText's is 1 (``param_scan_axis``).

    Returns:
      The state. Each array has shape (L, ...), also the counts of schedules.

    Raises:
      ValueError: If the leaves do not have the same number of layers; if a step depends
        on the gradient of another parameter; or if the state has accumulated gradients.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import init_layers, muon
      >>> state = init_layers(muon(1e-3, mu_dtype="int8"), {"w": jnp.ones((12, 64, 64))})
      >>> optax.tree.get(state, "trace")["w"].shape
      (12, 64, 64)
    """
    validate.transformation("optimizer", optimizer)
    _number_of_layers(stacked_params, axis)
    _require_separate_steps(optimizer, _one_layer(stacked_params, axis))
    return jax.vmap(optimizer.init, in_axes=axis)(stacked_params)


def vjp_layers(
    layer: Callable[[PyTree, Any], Any],
    optimizer: optax.GradientTransformation,
    stacked_params: PyTree,
    stacked_state: optax.OptState,
    x: Any,
    *,
    axis: int = 0,
) -> tuple[Any, Callable[..., tuple[Any, PyTree, optax.OptState, jax.Array]]]:
    """Apply stacked layers one after the other; the pullback also steps them.

    It is :func:`jax.vjp` of a scan over the layers, except that the pullback steps each
    layer as soon as its gradients are known, and does not return them. The gradients of
    one layer exist at a time. The forward pass keeps the input of each layer, and the
    pullback computes the layer again, as with :func:`jax.checkpoint`.

    Call it inside :func:`jax.jit`, and donate the parameters and the state, so that the
    steps happen in place. Afterwards use only the new ones.

    Args:
      layer: ``layer(params, x)`` is the output of a layer with the parameters of this
        layer. It has the shapes and dtypes of ``x``. Whatever else has a gradient must be
        a leaf of ``x``, which each layer may return unchanged. ``layer`` may close over
        integers, masks and constants.
      optimizer: The optimizer that made the state: see :func:`init_layers`.
      stacked_params: The parameters of L layers, stacked along one axis of each leaf.
      stacked_state: The state that :func:`init_layers` or the last step has made.
      x: The input of the first layer: a tree of floating-point arrays.
      axis: The axis of the layers in the parameters.

    Returns:
      The output of the last layer, and ``pull``. ``dx, params, state, square = pull(dy)``
      takes the gradient by the output, and returns the gradient by ``x``, the stepped
      parameters and their state, and the squared norm of all gradients of the layers, a
      float32 scalar. ``pull(dy, step=False)`` leaves the parameters and the state as
      they are. Gradients are linear in ``dy``, so clipping by a global norm is
      ``pull(dy, step=False)``, and then ``pull(scale * dy)``.

    Raises:
      TypeError: If ``x`` has a leaf that is not floating-point, or the output of ``layer``
        has other shapes or dtypes than ``x``.
      ValueError: If ``layer`` closes over a traced floating-point array, whose gradient
        would be lost. An array that is not traced, such as a weight that a jitted
        function takes from the module around it, is a constant, as for :func:`jax.grad`.
        Also if the leaves do not have the same number of layers, or the state does not fit
        them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from orscale_jax import init_layers, muon, vjp_layers
      >>> params, x = {"w": jnp.stack([jnp.eye(4)] * 3)}, jnp.ones((2, 4))
      >>> optimizer = muon(0.1)
      >>> @jax.jit
      ... def train_step(params, state, x):
      ...     y, pull = vjp_layers(lambda p, x: x @ p["w"], optimizer, params, state, x)
      ...     loss, dy = jax.value_and_grad(lambda y: jnp.mean(y**2))(y)
      ...     dx, params, state, square = pull(dy)
      ...     return params, state, loss
      >>> state = init_layers(optimizer, params)
      >>> for _ in range(3):
      ...     params, state, loss = train_step(params, state, x)
      >>> bool(loss < 1)
      True

    References:
      Lv et al. 2023, *Full Parameter Fine-tuning for Large Language Models with Limited
      Resources* (LOMO), arXiv:2306.09782, steps parameters in the backward pass by SGD.
    """
    count = _number_of_layers(stacked_params, axis)
    first = _one_layer(stacked_params, axis)
    _require_layer(layer, first, x)
    wanted = jax.eval_shape(jax.vmap(optimizer.init, in_axes=axis), stacked_params)
    try:
        require_state(*unbox((stacked_state, wanted, stacked_params)))
    except ValueError as error:
        raise ValueError(
            f"pass the state of init_layers(optimizer, stacked_params): {error}"
        ) from None

    # Leaves of x that each layer returns unchanged are kept once.
    structure = jax.tree.structure(x)
    jaxpr = jax.make_jaxpr(layer)(first, x).jaxpr
    given = jaxpr.invars[-structure.num_leaves :]
    same = [a is b for a, b in zip(given, jaxpr.outvars, strict=True)]

    def changing(x: Any) -> list[Any]:
        return [a for a, kept in zip(jax.tree.leaves(x), same, strict=True) if not kept]

    def forward(x: Any, i: Any) -> tuple[Any, Any]:
        return layer(_take(stacked_params, i, axis), x), changing(x)

    y, inputs = jax.lax.scan(forward, x, jnp.arange(count))

    def input_of(i: Any) -> Any:
        saved = iter(_take(inputs, i))
        both = zip(jax.tree.leaves(x), same, strict=True)
        return structure.unflatten(a if kept else next(saved) for a, kept in both)

    def pull(dy: Any, *, step: bool = True) -> Any:
        def read(params: PyTree, state: optax.OptState, i: Any) -> tuple[PyTree, Any]:
            return _take(params, i, axis), _take(state, i)

        def back(j: Any, carry: Any) -> Any:
            # What is read of the stacks is carried. If it were read in the same iteration
            # that writes, XLA would read it anew for each use, and so copy the stacks.
            dy, params, state, square, (p, s) = carry
            i = count - 1 - j
            grads, dx = jax.vjp(layer, p, input_of(i))[1](dy)
            square += _squared_norm(grads)
            if step:  # Once dx is known, nothing else of the layer is needed.
                grads, dx = _barrier((grads, dx))
                updates, s = optimizer.update(grads, s, p)
                p = optax.apply_updates(p, updates)
                params, state = _put(params, p, i, axis), _put(state, s, i)
            return dx, params, state, square, read(params, state, i - 1)

        last = read(stacked_params, stacked_state, count - 1)
        carry = dy, stacked_params, stacked_state, jnp.float32(0), last
        return jax.lax.fori_loop(0, count, back, carry)[:-1]

    return y, pull


_barrier = jax.lax.optimization_barrier


def _take(tree: PyTree, i: Any, axis: int = 0) -> PyTree:
    return jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(a, i, axis, keepdims=False), tree
    )


def _put(tree: PyTree, part: PyTree, i: Any, axis: int = 0) -> PyTree:
    return jax.tree.map(
        lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, i, axis), tree, part
    )


def _squared_norm(tree: PyTree) -> jax.Array:
    wide = jax.tree.map(lambda a: jnp.abs(a).astype(jnp.float32), tree)
    return optax.tree.norm(wide, squared=True)


def _one_layer(stacked_params: PyTree, axis: int) -> PyTree:
    """The first layer's parameters, abstract."""
    return jax.eval_shape(lambda tree: _take(tree, 0, axis), stacked_params)


def _number_of_layers(stacked_params: PyTree, axis: int) -> int:
    leaves = jax.tree.leaves_with_path(stacked_params)
    if not leaves:
        raise ValueError("stacked_params has no arrays: pass those of the layers.")
    for path, leaf in leaves:
        if not -np.ndim(leaf) <= axis < np.ndim(leaf):
            raise ValueError(
                f"parameter {name_and_shape(path, leaf)} has no axis {axis}: stack the "
                "layers along it, or pass the axis of the layers as axis=."
            )
        count, wanted = np.shape(leaf)[axis], np.shape(leaves[0][1])[axis]
        if count != wanted:
            raise ValueError(
                f"parameter {name_and_shape(path, leaf)} has {count} layers along axis "
                f"{axis}, but parameter {name_and_shape(*leaves[0])} has {wanted}: stack "
                "all leaves of the same layers, and pass their axis as axis=."
            )
    return wanted


def _require_layer(layer: Callable[[PyTree, Any], Any], params: PyTree, x: Any) -> None:
    """Refuse inputs that have no gradients, and a layer that would lose gradients."""
    for path, leaf in jax.tree.leaves_with_path(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"x {name_and_shape(path, leaf)} has dtype {jnp.result_type(leaf)}, which "
                "has no gradient: let `layer` close over it."
            )
    # It finds what would have a gradient: floating-point arrays that are traced.
    _, closed_over = jax.closure_convert(layer, params, x)
    if closed_over:
        raise ValueError(
            "`layer` closes over traced arrays, whose gradients would be lost: "
            f"{', '.join(str(jax.typeof(a)) for a in closed_over)}. Put parameters of "
            "each layer into stacked_params, and shared ones into x as leaves that "
            "`layer` returns unchanged: pull returns their gradients. Compute constants "
            "inside of `layer`, or by NumPy."
        )


def _require_separate_steps(optimizer: Any, params: PyTree) -> None:
    """Refuse an optimizer that sees other gradients than the one of its parameter."""

    def small(leaf: Any) -> jax.Array:
        shape = list(leaf.shape)
        for axis, size in enumerate(shape):
            while size > 128 and not size % 2:  # A multiple of the number of heads.
                size //= 2
            shape[axis] = size
        return jnp.ones(shape, leaf.dtype)

    def two_updates(grads: PyTree, params: PyTree) -> PyTree:  # The first rate may be 0.
        state, seen = optimizer.init(params), []
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            seen.append(updates)
        return seen, state

    with jax.ensure_compile_time_eval():  # Also while a program is traced.
        params = jax.tree.map(small, params)
        leaves, structure = jax.tree.flatten(params)
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        run = jax.jit(two_updates)
        wanted, state = run(params, params)
        if nodes_of(state, optax.MultiStepsState):
            raise ValueError(
                "optax.MultiSteps holds the gradients of all layers: leave it out, and "
                "accumulate inside of `layer`, by jax.lax.map(lambda x: layer(params, x), "
                "x) for x of shape (microbatches, ...)."
            )
        for k, path in enumerate(paths):
            grads = [jnp.full_like(a, jnp.nan) if i == k else a for i, a in enumerate(leaves)]
            found, _ = run(structure.unflatten(grads), params)
            for one, other in zip(wanted, found, strict=True):
                pairs = zip(paths, *map(structure.flatten_up_to, (one, other)), strict=True)
                for i, (of, a, b) in enumerate(pairs):
                    if i != k and not jnp.array_equal(a, b, equal_nan=True):
                        raise ValueError(
                            f"the step of parameter {quoted(of)} depends on the gradient "
                            f"of {quoted(path)}, but each layer is stepped before the "
                            "gradients of the next are known. Leave out what looks at "
                            "several gradients, such as optax.clip_by_global_norm and "
                            "optax.apply_if_finite. The norm of all gradients is the root "
                            "of the square that pull(dy, step=False) returns; "
                            "pull(scale * dy) then steps by scaled gradients."
                        )
