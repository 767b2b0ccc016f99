"""Dimension numbers from the types of a Flax model's modules.

A shape does not say which axes of a leaf are rows and which columns; the module that
made the leaf does. :func:`nnx_dimension_numbers` and :func:`linen_dimension_numbers` ask
it. What no type says is an error that names the parameter, never a guess.

This module alone needs Flax.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import linen, nnx
from flax.core import meta
from jax.experimental.xla_metadata import set_xla_metadata
from optax.contrib import MuonDimensionNumbers

from orscale_jax import _matrix
from orscale_jax._matrix import PyTree


@dataclasses.dataclass(frozen=True)
class Weight:
    """What the type of a module says of one of its matrices.

    Attributes:
      shape: As the module declares it, without the axes that a transformation of the
        module stacks; None for a size that it does not declare.
      reduction_axis: The axes of ``shape`` that make up the rows, not negative.
      output_axis: The axes of ``shape`` that make up the columns, not negative. The
        axes in neither are a batch of matrices.

    Example:
      >>> from orscale_jax.flax import Weight
      >>> Weight((8, 16, 32), reduction_axis=1, output_axis=2)  # 8 experts
      Weight(shape=(8, 16, 32), reduction_axis=1, output_axis=2)
    """

    shape: tuple[int | None, ...]
    reduction_axis: int | tuple[int, ...]
    output_axis: int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _GroupedWeight(Weight):
    """The kernel of a convolution in groups: the last axis but one counts one group's.

    Its matrices share the last axis, which dimension numbers cannot split.
    """

    groups: int


@dataclasses.dataclass(frozen=True)
class _Open:
    """Why a type does not settle a parameter."""

    reason: str


Found: TypeAlias = Weight | _Open | None
Rule: TypeAlias = Callable[[Any], Mapping[str, Found]]
Rules: TypeAlias = Mapping[type, Rule]
Overrides: TypeAlias = Mapping[str, MuonDimensionNumbers | None]
_Path: TypeAlias = tuple[str, ...]
_Numbers: TypeAlias = MuonDimensionNumbers | _Open | None

# Hold modules and parameters for their owner, which is the one that knows what they are.
_CONTAINERS = (nnx.List, nnx.Dict)
_CALLS = itertools.count()


@dataclasses.dataclass(frozen=True)
class _Traced(meta.AxisMetadata[Any]):
    """A Linen parameter, where it is created, with what its module says of it.

    Lifted transformations tell every box about the axes that they add, wherever they
    put them: nothing has to be read off the shapes.
    """

    value: Any
    found: Found
    axes: tuple[int, ...]  # Where the module's own axes stand.
    rank: int

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "_Traced":
        return dataclasses.replace(self, value=meta.replace_boxed(self.value, val))

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Traced":
        rank = self.rank + 1
        added = index % rank
        return dataclasses.replace(
            self,
            value=meta.add_axis(self.value, index, params),
            axes=tuple(axis + (axis >= added) for axis in self.axes),
            rank=rank,
        )

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Traced":
        removed = index % self.rank
        return dataclasses.replace(
            self,
            value=meta.remove_axis(self.value, index, params),
            axes=tuple(axis - (axis > removed) for axis in self.axes),
            rank=self.rank - 1,
        )


# With a key of the kind that nn.WeightNorm and nn.SpectralNorm expect on their paths.
jax.tree_util.register_pytree_with_keys(
    _Traced,
    lambda box: (
        [(jax.tree_util.DictKey("value"), box.value)],
        (box.found, box.axes, box.rank),
    ),
    lambda static, values: _Traced(next(iter(values)), *static),
)


def nnx_dimension_numbers(
    model: nnx.Module,
    *,
    heads: Collection[str] = (),
    overrides: Overrides | None = None,
    rules: Rules | None = None,
) -> Callable[[PyTree], PyTree]:
    """The ``weight_dimension_numbers`` of an NNX model, from its modules' types.

    Kernels of ``Linear``, ``LinearGeneral`` (and so ``MultiHeadAttention``), ``Einsum``,
    ``Conv``, ``ConvTranspose``, ``LoRA`` and of the cells made of them are matrices.
    Embeddings, norms, biases, depthwise convolutions and parameters of fewer than two
    axes take AdamW, and so does every parameter with a name on its path that is one of
    ``heads`` or that :func:`orscale_jax.orscale` takes for an embedding or an output
    head. Axes that ``nnx.vmap`` or ``nnx.scan`` put in front of what a module declares
    are a batch.

    Args:
      model: The module whose ``nnx.Param`` variables are optimized.
      heads: Names on the paths of output heads, beside those that the library knows.
      overrides: Regular expressions, for whole dotted paths of parameters, to the
        dimension numbers of the leaf as it stands, or to None for AdamW. The first that
        matches counts, and before everything else.
      rules: Types of modules of your own to a function from the module to a
        :class:`Weight`, or None for AdamW, for each of its attributes that is a
        parameter (or that holds parameters). A rule holds for subclasses, and comes
        before the one for a type of Flax.

    Returns:
      A callable from the parameters to their tree of
      :class:`optax.contrib.MuonDimensionNumbers` and None, as
      ``weight_dimension_numbers`` takes it. The parameters may be
      ``nnx.state(model, nnx.Param)`` or a part of it (``nnx.LoRAParam``), with variables
      or with bare arrays, or the ``nnx.to_pure_dict`` of either.

    Raises:
      ValueError: If a type does not settle a parameter, or a leaf has not the shape that
        its module declares; one error for all of them. If a name of ``heads`` or an
        expression of ``overrides`` is on no path.

    Example:
      >>> import jax, optax
      >>> from flax import nnx
      >>> from orscale_jax import orscale
      >>> from orscale_jax.flax import nnx_dimension_numbers
      >>> model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> numbers = nnx_dimension_numbers(model)
      >>> numbers(nnx.state(model, nnx.Param))["out"]["kernel"]
      MuonDimensionNumbers(reduction_axis=(0, 1), output_axis=2)
      >>> optimizer = nnx.Optimizer(
      ...     model, orscale(0.02, weight_dimension_numbers=numbers), wrt=nnx.Param
      ... )

    References:
      https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/index.html
    """
    rules = {**NNX_RULES, **(rules or {})}
    shapes = {
        path: np.shape(jax.tree.leaves(param)[0])
        for path, param in _by_path(nnx.state(model, nnx.Param)).items()
    }
    owners = {
        _strings(path): module
        for path, module in nnx.iter_modules(model)
        if not (path and isinstance(module, _CONTAINERS))
    }
    found = {
        path: _nnx_numbers(path, shape, owners, rules) for path, shape in shapes.items()
    }
    numbers = _settle(shapes, found, heads, overrides or {})

    def weight_dimension_numbers(params: PyTree) -> PyTree:
        def look_up(entries: Any, _: Any) -> MuonDimensionNumbers | None:
            path = _keys(entries)
            if path not in numbers:
                raise ValueError(
                    f"parameter {'.'.join(path)!r} is no nnx.Param of the model that "
                    "nnx_dimension_numbers was given: pass it the model that is trained."
                )
            return numbers[path]

        return jax.tree_util.tree_map_with_path(look_up, params, is_leaf=_is_variable)

    return weight_dimension_numbers


def linen_dimension_numbers(
    module: linen.Module,
    *args: Any,
    rngs: Any = None,
    method: Callable[..., Any] | str | None = None,
    heads: Collection[str] = (),
    overrides: Overrides | None = None,
    rules: Rules | None = None,
    **kwargs: Any,
) -> PyTree:
    """The ``weight_dimension_numbers`` of a Linen model, from its modules' types.

    Which types a model holds is known only while it runs, so ``module.init`` is traced,
    without computing anything. Kernels of ``Dense``, ``DenseGeneral`` (and so attention),
    ``Einsum``, ``Conv``, ``ConvTranspose``, ``ConvLocal`` and of the cells made of them
    are matrices; the rest is as in :func:`nnx_dimension_numbers`. Axes that ``nn.vmap``
    or ``nn.scan`` add are a batch, wherever ``variable_axes`` puts them.

    Args:
      module: The model, not bound.
      *args: What ``module.init`` takes after its keys: arrays, or
        ``jax.ShapeDtypeStruct`` in their place.
      rngs: The keys of ``module.init``; None: one key for all.
      method: Of the module, as for ``module.init``; None: ``__call__``.
      heads: As in :func:`nnx_dimension_numbers`.
      overrides: As in :func:`nnx_dimension_numbers`.
      rules: As in :func:`nnx_dimension_numbers`; the names are those of ``self.param``.
      **kwargs: Keyword arguments of ``module.init``, such as ``train=False``.

    Returns:
      A tree of the structure of ``module.init(...)["params"]`` with a
      :class:`optax.contrib.MuonDimensionNumbers`, or None for AdamW, for each parameter;
      where the parameter is in a box, as ``nn.with_partitioning`` makes them, in the
      place of the box, so that it suits the parameters with and without boxes.

    Raises:
      ValueError: As :func:`nnx_dimension_numbers`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from orscale_jax.flax import linen_dimension_numbers
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=2)
      >>> numbers = linen_dimension_numbers(attention, jnp.ones((1, 3, 8)))
      >>> numbers["query"]["kernel"]
      MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))

    References:
      https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html
    """
    if rngs is None:
        rngs = jax.random.key(0)
    owners: dict[_Path, str] = {}
    interceptor = _interceptor({**LINEN_RULES, **(rules or {})}, owners)
    with linen.intercept_methods(interceptor), _its_own_jit_cache():
        traced = _abstract_params(module, rngs, args, method, kwargs)
    # The boxes are pytree nodes, and a module may name its parameters after those.
    params = _abstract_params(module, rngs, args, method, kwargs)
    boxes, leaves = _by_path(traced), _by_path(params)
    shapes = {
        path: np.shape(jax.tree.leaves(leaf)[0]) if jax.tree.leaves(leaf) else ()
        for path, leaf in leaves.items()
    }
    found = {
        path: _linen_numbers(shape, boxes.get(path), owners.get(path))
        for path, shape in shapes.items()
    }
    numbers = _settle(shapes, found, heads, overrides or {})
    return jax.tree_util.tree_map_with_path(
        lambda entries, _: numbers[_keys(entries)], params, is_leaf=meta.is_axis_metadata
    )


# What each type says of its parameters, for NNX and Linen.


def _none_of(*names: str) -> Rule:
    return lambda module: dict.fromkeys(names)


def _nnx_linear(module: nnx.Linear) -> Mapping[str, Found]:
    return _dense((module.in_features,), (module.out_features,))


def _linen_dense(module: Any) -> Mapping[str, Found]:
    return _dense((None,), (module.features,))


def _nnx_linear_general(module: nnx.LinearGeneral) -> Mapping[str, Found]:
    return _dense(
        module.in_features, module.out_features, tuple(dict(module.batch_axis).values())
    )


def _linen_dense_general(module: linen.DenseGeneral) -> Mapping[str, Found]:
    inputs, batch = (
        (None,) * len(_as_tuple(axes)) for axes in (module.axis, module.batch_dims)
    )
    return _dense(inputs, _as_tuple(module.features), batch)


def _dense(
    inputs: tuple[int | None, ...],
    outputs: tuple[int | None, ...],
    batch: tuple[int | None, ...] = (),
) -> Mapping[str, Found]:
    first, second = len(batch), len(batch) + len(inputs)
    shape = batch + inputs + outputs
    rows, columns = tuple(range(first, second)), tuple(range(second, len(shape)))
    return {"kernel": Weight(shape, rows, columns), "bias": None}


def _lora(module: nnx.LoRA) -> Mapping[str, Found]:
    inputs, outputs = module.in_features, module.out_features
    # The rank is an argument of the constructor alone.
    return {
        "lora_a": Weight((inputs, None), 0, 1),
        "lora_b": Weight((None, outputs), 0, 1),
    }


def _nnx_einsum(module: nnx.Einsum) -> Mapping[str, Found]:
    return _einsum(module.einsum_str, tuple(module.kernel_shape))


def _linen_einsum(module: linen.Einsum) -> Mapping[str, Found]:
    if module.einsum_str is None:
        return {
            "kernel": _Open("its einsum_str is given to the call, not to the module"),
            "bias": None,
        }
    return _einsum(module.einsum_str, tuple(module.shape))


def _einsum(equation: str, shape: tuple[int, ...]) -> Mapping[str, Found]:
    operands, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    rows = tuple(i for i, x in enumerate(kernel) if x in inputs and x not in outputs)
    columns = tuple(i for i, x in enumerate(kernel) if x in outputs and x not in inputs)
    alone = set(kernel) - set(inputs) - set(outputs)
    if "." in kernel or alone or len(set(kernel)) < len(kernel):
        return {
            "kernel": _Open(
                f"{equation!r} sums the kernel alone, repeats a letter or has an ellipsis"
            ),
            "bias": None,
        }
    # Without rows or columns it is a scale, or one inner product: no matrix.
    weight = Weight(shape, rows, columns) if rows and columns else None
    return {"kernel": weight, "bias": None}


def _nnx_conv(module: nnx.Conv) -> Mapping[str, Found]:
    groups = module.feature_group_count
    return _conv(
        module.kernel_size, module.in_features // groups, module.out_features, groups
    )


def _linen_conv(module: linen.Conv) -> Mapping[str, Found]:
    size = _as_tuple(module.kernel_size)
    return _conv(size, None, module.features, module.feature_group_count)


def _conv(
    size: Iterable[int | None], inputs: int | None, outputs: int, groups: int = 1
) -> Mapping[str, Found]:
    shape = (*size, inputs, outputs)
    rank = len(shape)
    axes = tuple(range(rank - 1)), rank - 1
    weight = Weight(shape, *axes) if groups == 1 else _GroupedWeight(shape, *axes, groups)
    return {"kernel": weight, "bias": None}


def _nnx_conv_transpose(module: nnx.ConvTranspose) -> Mapping[str, Found]:
    return _conv_transpose(
        module.kernel_size,
        module.in_features,
        module.out_features,
        module.transpose_kernel,
    )


def _linen_conv_transpose(module: linen.ConvTranspose) -> Mapping[str, Found]:
    return _conv_transpose(
        _as_tuple(module.kernel_size), None, module.features, module.transpose_kernel
    )


def _conv_transpose(
    size: Iterable[int], inputs: int | None, outputs: int, transposed: bool
) -> Mapping[str, Found]:
    if not transposed:
        return _conv(size, inputs, outputs)
    shape = (*size, outputs, inputs)
    rank = len(shape)
    rows = (*range(rank - 2), rank - 1)
    return {"kernel": Weight(shape, rows, rank - 2), "bias": None}


def _linen_conv_local(module: linen.ConvLocal) -> Mapping[str, Found]:
    """A matrix for each pixel of the output, (pixels..., window, features)."""
    pixels = (None,) * len(_as_tuple(module.kernel_size))
    return _dense((None,), (module.features,), pixels)


_NORM = _none_of("scale", "bias")

NNX_RULES: Rules = {
    nnx.Linear: _nnx_linear,
    nnx.LinearGeneral: _nnx_linear_general,
    nnx.Einsum: _nnx_einsum,
    nnx.Conv: _nnx_conv,
    nnx.ConvTranspose: _nnx_conv_transpose,
    nnx.LoRA: _lora,
    nnx.Embed: _none_of("embedding"),
    nnx.BatchNorm: _NORM,
    nnx.LayerNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.InstanceNorm: _NORM,
    nnx.WeightNorm: _none_of("scales"),
    nnx.PReLU: _none_of("negative_slope"),
}
LINEN_RULES: Rules = {
    linen.Dense: _linen_dense,
    linen.DenseGeneral: _linen_dense_general,
    linen.recurrent.DenseParams: _linen_dense,
    linen.Einsum: _linen_einsum,
    linen.Conv: _linen_conv,
    linen.ConvTranspose: _linen_conv_transpose,
    linen.ConvLocal: _linen_conv_local,
    linen.Embed: _none_of("embedding"),
    linen.BatchNorm: _NORM,
    linen.LayerNorm: _NORM,
    linen.RMSNorm: _NORM,
    linen.GroupNorm: _NORM,
    linen.InstanceNorm: _NORM,
    linen.PReLU: _none_of("negative_slope"),
}


def _declared(module: Any, rules: Rules) -> Mapping[str, Found]:
    for kind in type(module).__mro__:
        if kind in rules:
            return rules[kind](module)
    return {}


# From a type to the axes of a leaf.


def _nnx_numbers(
    path: _Path,
    shape: tuple[int, ...],
    owners: Mapping[_Path, nnx.Module],
    rules: Rules,
) -> _Numbers:
    depth = max(i for i in range(len(path) + 1) if path[:i] in owners)
    owner, name = owners[path[:depth]], path[depth]
    declared = _declared(owner, rules)
    if name not in declared:
        return _undeclared(type(owner).__name__, shape)
    found = declared[name]
    if not isinstance(found, Weight):
        return found
    # Transformations stack in front unless told otherwise, and nothing keeps what they
    # were told; in front or not, the sizes have to be those that the module declares.
    stacked = max(len(shape) - len(found.shape), 0)
    return _place(found, tuple(range(stacked, len(shape))), shape)


def _linen_numbers(shape: tuple[int, ...], box: Any, owner: str | None) -> _Numbers:
    if isinstance(box, _Traced):
        return _place(box.found, box.axes, shape)
    return _undeclared(owner or "the module that owns it", shape)


def _undeclared(owner: str, shape: tuple[int, ...]) -> _Numbers:
    return None if len(shape) < 2 else _Open(f"there is no rule for it in {owner}")


def _place(found: Found, axes: tuple[int, ...], shape: tuple[int, ...]) -> _Numbers:
    """What ``found`` says of a leaf in which the module's own axes are ``axes``."""
    if not isinstance(found, Weight):
        return found
    own = tuple(shape[axis] for axis in axes)
    if len(own) != len(found.shape) or any(
        declared not in (None, size)
        for declared, size in zip(found.shape, own, strict=True)
    ):
        return _Open(
            f"its module declares {found.shape}, which has to stand behind the stacked "
            "axes, if there are any"
        )
    if isinstance(found, _GroupedWeight):
        return None if own[-2] == 1 else _Open(f"it is split in {found.groups} groups")
    rows, columns = (
        tuple(axes[axis] for axis in _as_tuple(own_axes))
        for own_axes in (found.reduction_axis, found.output_axis)
    )
    return MuonDimensionNumbers(_as_axis(rows), _as_axis(columns))


def _settle(
    shapes: Mapping[_Path, tuple[int, ...]],
    found: Mapping[_Path, _Numbers],
    heads: Collection[str],
    overrides: Overrides,
) -> dict[_Path, MuonDimensionNumbers | None]:
    """Overrides before names before types; what is then still open is an error."""
    _check_used(shapes, heads, overrides)
    numbers: dict[_Path, MuonDimensionNumbers | None] = {}
    still_open: list[str] = []
    for path, by_type in found.items():
        name = ".".join(path)
        pattern = next((p for p in overrides if re.fullmatch(p, name)), None)
        if pattern is not None:
            numbers[path] = overrides[pattern]
        elif any(_matrix.names_embedding_or_head(key) or key in heads for key in path):
            numbers[path] = None
        elif isinstance(by_type, _Open):
            still_open.append(f"  {name!r} of shape {shapes[path]}: {by_type.reason}")
        else:
            numbers[path] = by_type
    if still_open:
        raise ValueError(
            "the types of the modules do not say which axes of these parameters are rows "
            "and which are columns:\n" + "\n".join(still_open) + "\nPass overrides={"
            "path: optax.contrib.MuonDimensionNumbers(reduction_axis=..., "
            "output_axis=...)} for each, or None there for AdamW, or rules={type of its "
            "module: ...}."
        )
    return numbers


def _check_used(
    paths: Iterable[_Path], heads: Collection[str], overrides: Overrides
) -> None:
    names = [".".join(path) for path in paths]
    keys = {key for path in paths for key in path}
    for pattern in overrides:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"no parameter's path matches {pattern!r} in overrides: the paths are "
                f"{', '.join(names)}."
            )
    for head in heads:
        if head not in keys:
            raise ValueError(
                f"{head!r} in heads is on no parameter's path: the paths are "
                f"{', '.join(names)}."
            )


# Linen: what runs.


def _its_own_jit_cache() -> Any:
    """Keeps the boxes out of what nn.jit remembers, and what it remembers out of here."""
    return set_xla_metadata(orscale_jax=str(next(_CALLS)))


def _interceptor(rules: Rules, owners: dict[_Path, str]) -> Callable[..., Any]:
    """Boxes each parameter once a method of the module that created it has run."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        module = context.module
        if module.scope is not None and module.is_mutable_collection("params"):
            _box(module, _declared(module, rules), owners)
        return result

    return intercept


def _box(
    module: linen.Module, declared: Mapping[str, Found], owners: dict[_Path, str]
) -> None:
    for name, value in module.variables.get("params", {}).items():
        if isinstance(value, Mapping | _Traced):
            continue
        rank = np.ndim(meta.unbox(value))
        if name in declared or rank < 2:
            box = _Traced(value, declared.get(name), tuple(range(rank)), rank)
            module.put_variable("params", name, box)
        else:
            # Perhaps of the module around it, which shares its scope and is yet to come.
            owners[(*module.path, name)] = type(module).__name__


def _abstract_params(
    module: linen.Module, rngs: Any, args: Any, method: Any, kwargs: Any
) -> PyTree:
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def init(rngs: Any, arrays: Mapping[int, jax.Array]) -> Any:
        # The rest (flags, strings) stays what it is: a model may branch on it.
        filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return module.init(rngs, *args, method=method, **kwargs)

    variables = jax.eval_shape(init, rngs, arrays)
    return variables.get("params", {})


# Paths.


def _by_path(tree: PyTree) -> dict[_Path, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
    return {_keys(entries): leaf for entries, leaf in leaves}


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable) or meta.is_axis_metadata(node)


def _keys(entries: Any) -> _Path:
    return _strings(_matrix.key_name(entry) for entry in entries)


def _strings(path: Iterable[Any]) -> _Path:
    return tuple(str(key) for key in path)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _as_axis(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else axes
