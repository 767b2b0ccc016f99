"""A scan over layers whose backward pass steps them, and holds one layer's gradients."""

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import validate
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_state
from orscale_jax.trees.names import name_and_shape
from orscale_jax.trees.nodes import nodes_of


def init_layers(
    optimizer: optax.GradientTransformation, stacked_params: PyTree, *, axis: int = 0
) -> optax.OptState:
    """Make the state of stacked layers for :func:`vjp_layers`.

    It compiles and runs a small program, which looks for steps of a parameter that depend
    on the gradient of another one.

    Args:
      optimizer: Any Optax optimizer that steps each parameter by its own gradient. It
        sees the names and the shapes of one layer. If it draws random numbers, they are
        the same in all layers.
      stacked_params: The parameters of L layers, stacked along one axis of each leaf.
      axis: The axis of the layers, from 0 on. It is 1 in MaxText (``param_scan_axis``).

    Returns:
      ``jax.vmap(optimizer.init)``: each array has shape (L, ...), also a count.

    Raises:
      ValueError: If the leaves have other numbers of layers, if a step is found to depend
        on the gradient of another parameter, or if the state is that of
        :func:`optax.apply_if_finite` or :class:`optax.MultiSteps`.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import init_layers, muon
      >>> state = init_layers(muon(1e-3, mu_dtype="int8"), {"w": jnp.ones((12, 64, 64))})
      >>> optax.tree.get(state, "trace")["w"].shape
      (12, 64, 64)
    """
    validate.transformation("optimizer", optimizer)
    _, one = _number_and_first(stacked_params, axis)
    # In a thread of its own nothing is traced, and no mesh is set.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(_require_separate_steps, optimizer, one).result()
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
    """Apply layers one after the other, with a pullback that steps them.

    It is :func:`jax.vjp` of a scan, except that the pullback does not return the
    gradients of a layer: it steps the layer by them. The inputs of layers are kept, and
    the rest is computed again, as with :func:`jax.checkpoint`. Donate parameters and
    state to :func:`jax.jit`, and use only the new ones after ``pull``.

    Args:
      layer: ``layer(params, x)`` returns the output of a layer, of the shapes and dtypes
        of ``x``. It may close over integers, booleans and constants.
      optimizer: The optimizer that :func:`init_layers` was given.
      stacked_params: The parameters of L layers, stacked along one axis of each leaf.
      stacked_state: What :func:`init_layers` or the last ``pull`` has returned.
      x: The input of the first layer: floating-point arrays. Leaves that ``layer``
        returns unchanged, such as shared parameters, are kept only once.
      axis: The axis of the layers in the parameters, from 0 on.

    Returns:
      The output of the last layer, and ``pull``. Given the gradient by this output,
      ``dx, params, state, square = pull(dy)`` returns the gradient by ``x``, the stepped
      parameters, their state, and the squared norm of all gradients in float32.
      ``pull(dy, step=False)`` returns the same four, and steps nothing. Gradients are
      linear in ``dy``: to clip them, measure the norm without a step, and then call
      ``pull(scale * dy)``.

    Raises:
      TypeError: If a parameter or a leaf of ``x`` is not floating-point, or if ``layer``
        does not return a leaf of ``x``.
      ValueError: If ``layer`` closes over a traced floating-point array, whose gradient
        would be lost, if the leaves have other numbers of layers, or if the state is of
        another optimizer. As in :func:`jax.grad`, arrays that are not traced are
        constants, and nobody can tell whether one of them is a parameter.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from orscale_jax import init_layers, muon, vjp_layers
      >>> optimizer, params = muon(0.1), {"w": jnp.stack([jnp.eye(4)] * 3)}
      >>> @jax.jit
      ... def train_step(params, state, x):
      ...     y, pull = vjp_layers(lambda p, x: x @ p["w"], optimizer, params, state, x)
      ...     loss, dy = jax.value_and_grad(lambda y: jnp.mean(y**2))(y)
      ...     dx, params, state, square = pull(dy)
      ...     return params, state, loss
      >>> state = init_layers(optimizer, params)
      >>> for _ in range(3):
      ...     params, state, loss = train_step(params, state, jnp.ones((2, 4)))
      >>> bool(loss < 1)
      True

    References:
      Lv et al. 2023, *Full Parameter Fine-tuning for Large Language Models with Limited
      Resources*, arXiv:2306.09782, steps by SGD in the backward pass (LOMO).
    """
    count, one = _number_and_first(stacked_params, axis)
    wanted = jax.eval_shape(jax.vmap(optimizer.init, in_axes=axis), stacked_params)
    try:
        require_state(*unbox((stacked_state, wanted, stacked_params)))
    except ValueError as error:
        message = "pass the state of init_layers(optimizer, stacked_params)"
        hint = "docs/layers.md converts the state of whole stacks"
        raise ValueError(f"{message} ({hint}): {error}") from None
    _require_gradients(layer, one, x)
    # Leaves of x that are returned unchanged are not stacked: None stands for them.
    jaxpr, (leaves, tree) = jax.make_jaxpr(layer)(one, x).jaxpr, jax.tree.flatten(x)
    of_x = jaxpr.invars[-len(leaves) :]
    pairs = itertools.zip_longest(of_x, jaxpr.outvars[: len(leaves)])
    same = [a is b for a, b in pairs]

    def forward(x: Any, i: Any) -> tuple[Any, Any]:
        pairs = zip(jax.tree.leaves(x), same, strict=True)
        changing = [None if s else a for a, s in pairs]
        return layer(_take(stacked_params, i, axis), x), changing

    y, inputs = jax.lax.scan(forward, x, jnp.arange(count))

    def pull(dy: Any, *, step: bool = True) -> Any:
        def back(j: Any, carry: Any) -> Any:
            # p and s have been read in the iteration before. If they were read where the
            # stacks are written, XLA would read them anew for each use, also after the
            # writing, and would therefore copy the stacks.
            dy, params, state, square, p, s = carry
            i = count - 1 - j
            pairs = zip(leaves, _take(inputs, i), strict=True)
            x = jax.tree.unflatten(tree, [a if b is None else b for a, b in pairs])
            # The step waits for dx: then no other intermediate of the layer is needed.
            grads, dx = jax.lax.optimization_barrier(jax.vjp(layer, p, x)[1](dy))
            for g in jax.tree.leaves(grads):
                square += jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32)))
            if step:
                updates, s = optimizer.update(grads, s, p)
                params = _put(params, optax.apply_updates(p, updates), i, axis)
                state = _put(state, s, i)
            p, s = _take(params, i - 1, axis), _take(state, i - 1)
            return dx, params, state, square, p, s

        p, s = _take(stacked_params, count - 1, axis), _take(stacked_state, count - 1)
        carry = dy, stacked_params, stacked_state, jnp.float32(0), p, s
        return jax.lax.fori_loop(0, count, back, carry)[:4]

    return y, pull


def _take(stacked: PyTree, i: Any, axis: int = 0) -> PyTree:
    take = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda a: take(a, i, axis, keepdims=False), stacked)


def _put(stacked: PyTree, one: PyTree, i: Any, axis: int = 0) -> PyTree:
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda a, b: put(a, b, i, axis), stacked, one)


def _number_and_first(stacked_params: PyTree, axis: int) -> tuple[int, PyTree]:
    """The number of layers, and the first layer, abstract."""
    validate.number("axis", axis, at_least=0)
    leaves = jax.tree.leaves_with_path(stacked_params)
    if not leaves:
        raise ValueError("stacked_params has no arrays: pass those of the layers.")
    counts = [np.shape(leaf)[axis : axis + 1] for _, leaf in leaves]
    for (path, leaf), count in zip(leaves, counts, strict=True):
        if count != counts[0] or count in ((), (0,)):
            raise ValueError(
                f"parameter {name_and_shape(path, leaf)} does not have along axis {axis} "
                f"the layers of {name_and_shape(*leaves[0])}, at least one: stack the "
                "same layers in all leaves, and pass their axis as axis=."
            )
        if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"parameter {name_and_shape(path, leaf)} has dtype {dtype} and no "
                "gradient: split it off, as nnx.split(layers, nnx.Param, ...) does."
            )
    return counts[0][0], jax.eval_shape(lambda a: _take(a, 0, axis), stacked_params)


def _require_gradients(layer: Callable[..., Any], params: PyTree, x: Any) -> None:
    """Refuse inputs that have no gradients, and a layer that would lose gradients."""
    for path, leaf in jax.tree.leaves_with_path(x):
        if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"x {name_and_shape(path, leaf)} has dtype {dtype} and no gradient: "
                "let `layer` close over it."
            )
    _, traced = jax.closure_convert(layer, params, x)  # What may have a gradient.
    if traced:
        raise ValueError(
            "`layer` closes over traced arrays, whose gradients would be lost: "
            f"{', '.join(str(jax.typeof(a)) for a in traced)}. Pass those of a layer in "
            "stacked_params, and shared ones as leaves of x that `layer` returns "
            "unchanged. Compute constants inside of `layer`, or by NumPy."
        )


def _require_separate_steps(optimizer: Any, params: PyTree) -> None:
    """Refuse an optimizer by which NaN in a gradient reaches another parameter."""
    if len(jax.tree.leaves(params)) == 1:  # A copy stands for another parameter.
        with contextlib.suppress(Exception):  # An optimizer may refuse this structure.
            jax.eval_shape(optimizer.init, both := [params, params])
            params = both

    def short(n: int) -> int:  # Still a multiple of the number of heads.
        return n if n <= 128 or n % 2 else short(n // 2)

    @jax.jit
    def small() -> PyTree:
        ones = jax.tree.map(lambda a: jnp.ones([*map(short, a.shape)], a.dtype), params)
        return ones, optimizer.init(ones)

    @jax.jit
    def finite(params: PyTree, state: optax.OptState) -> list[jax.Array]:
        """The updates of half of the leaves, while the other half has NaN."""
        (leaves, tree), found = jax.tree.flatten(params), []
        for half in (0, 1):
            grads = [a * jnp.nan if i % 2 == half else a for i, a in enumerate(leaves)]
            updates, _ = optimizer.update(jax.tree.unflatten(tree, grads), state, params)
            others = jax.tree.leaves(updates)[1 - half :: 2]
            found += [jnp.isfinite(u).all() for u in others]
        return found

    _, state = given = small()
    reaches = nodes_of(state, optax.ApplyIfFiniteState, optax.MultiStepsState)
    reaches += [known for known in jax.device_get(finite(*given)) if not known]
    if reaches:
        raise ValueError(
            "a layer is stepped before the next one has gradients, but the optimizer "
            "looks at several gradients or keeps them. Instead of "
            "optax.clip_by_global_norm and optax.apply_if_finite, use the squared norm "
            "that pull(dy, step=False) returns, and pull(scale * dy). Instead of "
            "optax.MultiSteps, accumulate inside of `layer`, by jax.lax.map(lambda x: "
            "layer(params, x), microbatches)."
        )
