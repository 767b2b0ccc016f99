"""The rules for the types of NNX's and Linen's modules."""

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import linen, nnx
from flax.core import meta

from orscale_jax.parameters.dimension_numbers import Unresolved, as_tuple
from orscale_jax.parameters.kinds import EMBEDDING_OR_HEAD, kind_of
from orscale_jax.parameters.module_types import (
    Declared,
    ModuleRules,
    Rule,
    Weight,
    adamw_only,
    convolution,
)
from orscale_jax.trees.names import words

# Sizes of axes; Linen's modules do not know those of their inputs.
_Sizes: TypeAlias = tuple[int | None, ...]
_Parameters: TypeAlias = Mapping[str, Declared]


def is_holder(node: Any) -> bool:
    """Whether ``node`` holds one parameter: a variable of NNX or a box of Linen."""
    return isinstance(node, nnx.Variable) or meta.is_axis_metadata(node)


def with_adapters(declared: _Parameters, arrays: Mapping[str, Any]) -> _Parameters:
    """Also the adapters of low rank that Qwix puts beside the arrays of any module.

    They are (in..., rank) and (rank, out...) with the axes of a batch in front; beside
    those of an einsum is their equation.
    """
    adapters: dict[str, Declared] = {}
    for name in arrays:
        a, b = f"{name}_lora_a", f"{name}_lora_b"
        if a not in arrays or b not in arrays:
            continue
        # Of a table, they make its output head.
        if kind_of(words(name)) in EMBEDDING_OR_HEAD or declared.get(name, name) is None:
            adapters |= {a: None, b: None}
        elif equation := arrays.get(f"{name}_lora_einsum_str"):
            inputs, first, second, outputs = re.split(",|->", equation)
            rank = second[0]
            adapters[a] = _einsum(f"{inputs},{first}->{outputs}{rank}")
            adapters[b] = _einsum(f"{rank},{second}->{outputs}")
        else:
            ranks = (np.ndim(jax.tree.leaves(arrays[key])[0]) for key in (a, b))
            rows = 1 + max(0, operator.sub(*ranks))  # The window of a convolution, too.
            adapters[a] = Weight((None,) * (rows + 1), tuple(range(rows)), rows)
            adapters[b] = Weight((None, None), 0, 1)
    return {**adapters, **declared}


def _kernel(weight: Declared) -> _Parameters:
    return {"kernel": weight, "bias": None}


def _dense(inputs: _Sizes, outputs: _Sizes, batch: _Sizes = ()) -> _Parameters:
    first, second = len(batch), len(batch) + len(inputs)
    shape = batch + inputs + outputs
    rows, columns = tuple(range(first, second)), tuple(range(second, len(shape)))
    return _kernel(Weight(shape, rows, columns))


def _unknown(axes: Any) -> _Sizes:
    return (None,) * len(as_tuple(axes))


def _einsum(equation: str | None, shape: Iterable[int | None] | None = None) -> Declared:
    if equation is None:
        return Unresolved("its einsum_str is given to the call, not to the module")
    operands, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    rows = tuple(i for i, x in enumerate(kernel) if x in inputs and x not in outputs)
    columns = tuple(i for i, x in enumerate(kernel) if x in outputs and x not in inputs)
    alone = set(kernel) - set(inputs) - set(outputs)
    if "." in kernel or alone or len(set(kernel)) < len(kernel):
        reason = "sums the kernel alone, repeats a letter or has an ellipsis"
        return Unresolved(f"{equation!r} {reason}")
    # Without rows or columns it is a scale, or one inner product: no matrix.
    sizes = (None,) * len(kernel) if shape is None else tuple(shape)
    return Weight(sizes, rows, columns) if rows and columns else None


def _conv(
    size: Any, inputs: int | None, outputs: int, groups: int = 1, transposed: bool = False
) -> _Parameters:
    size, each = as_tuple(size), inputs and inputs // groups
    window = len(size)
    if transposed:
        return _kernel(convolution((*size, outputs, each), window + 1, window, 1))
    return _kernel(convolution((*size, each, outputs), window, window + 1, groups))


def _gates(number: int) -> Rule:
    """The rule of an NNX cell whose layers have the kernels of all gates side by side."""
    return lambda m: {
        f"{name}.kernel": Weight(
            (inputs, number * m.hidden_features), 0, 1, blocks=number, block_axis=1
        )
        for name, inputs in (("dense_i", m.in_features), ("dense_h", m.hidden_features))
    }


def _conv_lstm(module: linen.ConvLSTMCell) -> _Parameters:
    """As those of :func:`_gates`, in two convolutions."""
    columns = len(module.kernel_size) + 1
    shape = (*module.kernel_size, None, 4 * module.features)
    weight = Weight(shape, tuple(range(columns)), columns, blocks=4, block_axis=columns)
    return {"ih.kernel": weight, "hh.kernel": weight}


_NORM = adamw_only("scale", "bias")

NNX_RULES: ModuleRules = {
    nnx.Linear: lambda m: _dense((m.in_features,), (m.out_features,)),
    nnx.LinearGeneral: lambda m: _dense(
        m.in_features, m.out_features, tuple(dict(m.batch_axis).values())
    ),
    nnx.Einsum: lambda m: _kernel(_einsum(m.einsum_str, m.kernel_shape)),
    nnx.Conv: lambda m: _conv(
        m.kernel_size, m.in_features, m.out_features, m.feature_group_count
    ),
    nnx.ConvTranspose: lambda m: _conv(
        m.kernel_size, m.in_features, m.out_features, transposed=m.transpose_kernel
    ),
    nnx.LoRA: lambda m: {  # It does not keep the rank, an argument of its constructor.
        "lora_a": Weight((m.in_features, None), 0, 1),
        "lora_b": Weight((None, m.out_features), 0, 1),
    },
    nnx.GRUCell: _gates(3),
    nnx.OptimizedLSTMCell: _gates(4),
    nnx.Embed: adamw_only("embedding"),
    nnx.BatchNorm: _NORM,
    nnx.LayerNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.InstanceNorm: _NORM,
    nnx.WeightNorm: adamw_only("scales"),
    nnx.PReLU: adamw_only("negative_slope"),
}
LINEN_RULES: ModuleRules = {
    linen.Dense: lambda m: _dense((None,), (m.features,)),
    linen.DenseGeneral: lambda m: _dense(
        _unknown(m.axis), as_tuple(m.features), _unknown(m.batch_dims)
    ),
    linen.recurrent.DenseParams: lambda m: _dense((None,), (m.features,)),
    linen.Einsum: lambda m: _kernel(_einsum(m.einsum_str, m.shape)),
    linen.Conv: lambda m: _conv(m.kernel_size, None, m.features, m.feature_group_count),
    linen.ConvTranspose: lambda m: _conv(
        m.kernel_size, None, m.features, transposed=m.transpose_kernel
    ),
    # A matrix for each pixel of the output: (pixels..., window, features).
    linen.ConvLocal: lambda m: _dense((None,), (m.features,), _unknown(m.kernel_size)),
    linen.ConvLSTMCell: _conv_lstm,
    linen.Embed: adamw_only("embedding"),
    linen.BatchNorm: _NORM,
    linen.LayerNorm: _NORM,
    linen.RMSNorm: _NORM,
    linen.GroupNorm: _NORM,
    linen.InstanceNorm: _NORM,
    linen.PReLU: adamw_only("negative_slope"),
}
