"""Output layers: the parameters with which a model computes the product that it returns.

A model is traced. A walk over its operations records which parameters each array is made
of. A product still counts as the output after operations that may follow an output layer:
a bias, a scale, a mask or another function of the inputs alone, softmax, a squashing
function, a choice, sums and means. It no longer counts after any other operation: a ReLU,
a gate, a norm, a sum with the input of the product (a residual stream), the carry of a
loop.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, names_on

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_SCALINGS = _PRODUCTS | {"mul", "div"}
_KEEPING = _SCALINGS | frozenset(
    "abs add add_any argmax argmin broadcast_in_dim clamp complex concatenate conj "
    "convert_element_type copy cumlogsumexp cumsum dynamic_slice dynamic_update_slice "
    "exp exp2 expm1 gather imag log log1p logistic max min neg optimization_barrier pad "
    "real reduce_max reduce_min reduce_precision reduce_sum reduce_window_sum reshape "
    "rev scatter scatter-add select_n sharding_constraint slice sort split squeeze "
    "stop_gradient sub tanh top_k transpose".split()
)
_HIDDEN_ACTIVATIONS = frozenset(
    "relu relu6 elu celu selu leaky_relu gelu silu mish hard_tanh squareplus".split()
)


class _Made(NamedTuple):
    """What an array is made of."""

    varies: bool = False  # Whether it depends on the inputs of the model.
    weights: frozenset[int] = frozenset()  # The parameters it depends on, but kernels.
    kernels: frozenset[int] = frozenset()  # Of a product, or a sum of them: what made it.
    outer: frozenset[int] = frozenset()  # The kernels that have layers below.


_CONSTANT, _STATISTIC = _Made(), frozenset({-1})


def output_layers(
    function: Callable[..., Any],
    params: PyTree,
    constants: PyTree,
    *args: Any,
    **kwargs: Any,
) -> list[Path]:
    """The kernels of output layers among ``params``; ``constants`` are no inputs."""

    def outputs(params: PyTree, constants: PyTree, args: Any, kwargs: Any) -> list[Any]:
        leaves = jax.tree.leaves(function(params, constants, *args, **kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    call, arrays = of_arrays(outputs, params, constants, args, kwargs)
    paths = [names_on(path) for path, _ in jax.tree.leaves_with_path(params)]
    inputs = len(paths) + len(jax.tree.leaves(constants))
    made = [_Made(i >= inputs, frozenset({i} if i < len(paths) else ())) for i in arrays]
    ends = _walk(jax.make_jaxpr(call)(arrays).jaxpr, made)
    # A product from which another output is computed is a hidden layer's.
    outer = _union(end.outer for end in ends) - _union(end.weights for end in ends)
    return [paths[i] for i in sorted(outer)]


def of_arrays(
    function: Callable[..., Any], *args: Any
) -> tuple[Callable[[dict[int, Any]], Any], dict[int, Any]]:
    """A function of the arrays among some arguments, and these arrays."""
    structure: Any  # The rest (flags, strings) is not traced: a model may branch on it.
    leaves, structure = jax.tree.flatten(args)

    def call(arrays: dict[int, Any]) -> Any:
        filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return function(*structure.unflatten(filled))

    return call, {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)


def _walk(jaxpr: Jaxpr, made: list[_Made]) -> list[_Made]:
    """What the outputs of a program are made of, given its inputs."""
    known = dict(zip(jaxpr.invars, made, strict=True))

    def of(x: Any) -> _Made:
        return _CONSTANT if isinstance(x, Literal) else known.get(x, _CONSTANT)

    def is_float(x: Any) -> bool:
        return jnp.issubdtype(getattr(x.aval, "dtype", bool), jnp.inexact)

    equations: list[Any] = jaxpr.eqns
    for eqn in equations:
        name, params, made = eqn.primitive.name, eqn.params, [of(x) for x in eqn.invars]
        zero = any(isinstance(x, Literal) and x.val == 0 for x in eqn.invars)
        hidden = params.get("name") in _HIDDEN_ACTIVATIONS or (name == "max" and zero)
        inner = (p for p in params.values() if isinstance(p, Jaxpr | ClosedJaxpr))
        body: Any = next(inner, None)
        body = getattr(body, "jaxpr", body)
        if name == "scan":
            results = _of_scan(eqn, made)
        elif name == "cond":
            branches = [_walk(branch.jaxpr, made[1:]) for branch in params["branches"]]
            results = [_kept("select_n", list(m)) for m in zip(*branches, strict=True)]
        elif body and not hidden and len(body.invars) == len(made) and name != "while":
            results = _walk(body, made)
        else:
            # Indices, masks and choices have no gradient: they only say what is taken.
            flowing = [m for m, x in zip(made, eqn.invars, strict=True) if is_float(x)]
            end = _hidden(made)
            if name in ("sqrt", "rsqrt") and eqn.outvars[0].aval.shape:
                # Of a norm, except in a kernel that is normalized itself.
                if end.varies or not end.weights:
                    end = _Made(True, end.weights | _STATISTIC)
            elif not hidden and any(m.varies for m in flowing):
                end = _kept(name, flowing)
            results = [end if is_float(x) else _Made(end.varies) for x in eqn.outvars]
        known.update(zip(eqn.outvars, results, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _hidden(made: Sequence[_Made]) -> _Made:
    """What depends on all of these, and is no product any more."""
    weights = _union(m.weights | m.kernels for m in made)
    return _Made(any(m.varies for m in made), weights)


def _kept(name: str, made: list[_Made]) -> _Made:
    """What an operation makes of floating-point numbers, some of which vary."""
    streams = [m for m in made if m.varies]
    if name in _PRODUCTS and len(streams) == 1:
        below = streams[0].weights | streams[0].kernels
        kernels = _union(m.weights for m in made if not m.varies)
        if kernels & below:  # A tied table, or a layer that is called again.
            return _hidden(made)
        if kernels:
            outer = kernels if below - _STATISTIC else frozenset()
            return _Made(True, below, kernels, outer)
    # Masks, adjacencies and other functions of the inputs alone only scale or shift.
    streams = [m for m in streams if m.weights or m.kernels]
    weights = _union(m.weights for m in streams)
    kernels = _union(m.kernels for m in streams)
    gate = name in _SCALINGS - {"div"} and len(streams) > 1
    products = streams and all(m.kernels for m in streams)
    if name in _KEEPING and products and not gate and not kernels & weights:
        return _Made(True, weights, kernels, _union(m.outer for m in streams))
    return _hidden(made)


def _of_scan(eqn: Any, made: list[_Made]) -> list[_Made]:
    """The carry is hidden; what is collected may be a product at each step."""
    body = eqn.params["jaxpr"].jaxpr

    def count_alike(outside: list[Any], inside: list[Any]) -> int:
        pairs = zip(outside, inside, strict=True)  # Slices have an axis less inside.
        return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)

    end = count_alike(eqn.invars, body.invars)
    first = end - count_alike(eqn.outvars, body.outvars)
    carry = [_hidden([m]) for m in made[first:end]]
    while True:
        after_body = _walk(body, [*made[:first], *carry, *made[end:]])
        after = [_hidden(pair) for pair in zip(carry, after_body, strict=False)]
        if after == carry:
            return carry + after_body[len(carry) :]
        carry = after
