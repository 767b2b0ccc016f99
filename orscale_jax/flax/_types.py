"""What the types of NNX's and Linen's modules say of their parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

from flax import linen, nnx

from orscale_jax._module_types import (
    Found,
    GroupedWeight,
    Open,
    Rules,
    Weight,
    as_tuple,
    none_of,
)


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
        (None,) * len(as_tuple(axes)) for axes in (module.axis, module.batch_dims)
    )
    return _dense(inputs, as_tuple(module.features), batch)


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
            "kernel": Open("its einsum_str is given to the call, not to the module"),
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
            "kernel": Open(
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
    size = as_tuple(module.kernel_size)
    return _conv(size, None, module.features, module.feature_group_count)


def _conv(
    size: Iterable[int | None], inputs: int | None, outputs: int, groups: int = 1
) -> Mapping[str, Found]:
    shape = (*size, inputs, outputs)
    rank = len(shape)
    axes = tuple(range(rank - 1)), rank - 1
    weight = (
        Weight(shape, *axes)
        if groups == 1
        else GroupedWeight(shape, *axes, rank - 1, groups, inputs=rank - 2)
    )
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
        as_tuple(module.kernel_size), None, module.features, module.transpose_kernel
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
    pixels = (None,) * len(as_tuple(module.kernel_size))
    return _dense((None,), (module.features,), pixels)


_NORM = none_of("scale", "bias")

NNX_RULES: Rules = {
    nnx.Linear: _nnx_linear,
    nnx.LinearGeneral: _nnx_linear_general,
    nnx.Einsum: _nnx_einsum,
    nnx.Conv: _nnx_conv,
    nnx.ConvTranspose: _nnx_conv_transpose,
    nnx.LoRA: _lora,
    nnx.Embed: none_of("embedding"),
    nnx.BatchNorm: _NORM,
    nnx.LayerNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.InstanceNorm: _NORM,
    nnx.WeightNorm: none_of("scales"),
    nnx.PReLU: none_of("negative_slope"),
}
LINEN_RULES: Rules = {
    linen.Dense: _linen_dense,
    linen.DenseGeneral: _linen_dense_general,
    linen.recurrent.DenseParams: _linen_dense,
    linen.Einsum: _linen_einsum,
    linen.Conv: _linen_conv,
    linen.ConvTranspose: _linen_conv_transpose,
    linen.ConvLocal: _linen_conv_local,
    linen.Embed: none_of("embedding"),
    linen.BatchNorm: _NORM,
    linen.LayerNorm: _NORM,
    linen.RMSNorm: _NORM,
    linen.GroupNorm: _NORM,
    linen.InstanceNorm: _NORM,
    linen.PReLU: none_of("negative_slope"),
}
