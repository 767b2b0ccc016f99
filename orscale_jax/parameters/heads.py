"""Each head of attention as a matrix: projections cut into pieces of one size."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from optax.contrib import MuonDimensionNumbers

from orscale_jax import validate
from orscale_jax.parameters import expressions
from orscale_jax.parameters.dimension_numbers import (
    BlockDimensionNumbers,
    DimensionNumbers,
    as_axis,
    as_tuple,
)
from orscale_jax.parameters.layer_classes import Names, module_and_array
from orscale_jax.trees.names import Path, dotted, folded, names_on, of_shape
from orscale_jax.trees.nodes import is_masked

HeadSize: TypeAlias = bool | int | tuple[int, ...]
HeadSizes: TypeAlias = HeadSize | expressions.ByExpression[HeadSize]

# Classes of projections, and whether their heads are inputs.
DIVIDED = {
    "attention query": False,
    "attention key": False,
    "attention value": False,
    "attention qkv": False,
    "attention kv": False,
    "attention latent up": False,
    "attention output": True,
}
# Of latent attention: one rotated key for all heads.
_SHARED = re.compile(r"\b(rope|rotary|pe)\b")


def compiled(sizes: HeadSizes) -> tuple[HeadSize, expressions.Pairs[HeadSize]]:
    """Check ``head_size``: the size where no expression matches, and the expressions."""
    parts = isinstance(sizes, tuple) and not any(isinstance(x, tuple) for x in sizes)
    one = parts or isinstance(sizes, str) or hasattr(sizes, "shape")
    if one or not isinstance(sizes, Iterable):
        return _checked("head_size", sizes), ()
    return True, expressions.compiled(sizes, "head_size", "sizes of heads", _checked)


def _checked(name: str, value: Any) -> HeadSize:
    sizes = value if isinstance(value, tuple) and value else (value,)
    if isinstance(value, bool) or all(validate.is_whole(x) and x > 0 for x in sizes):
        return value
    validate.refuse(name, value, "pass the number of features of a head, True or False")


def divided(
    leaves: list[tuple[Any, Any]],
    numbers: Mapping[Path, Any],
    default: HeadSize,
    sizes: expressions.Pairs[HeadSize],
) -> dict[Path, DimensionNumbers]:
    """The dimension numbers of the projections that are divided into heads, by path."""
    matrices = [
        (path, leaf)
        for path, leaf in leaves
        if is_masked(leaf) or isinstance(numbers.get(names_on(path)), DimensionNumbers)
    ]
    size_of = expressions.values(sizes, matrices, "head_size")
    names, by_head, misfits = Names.of(leaves), {}, []
    for entries, leaf in matrices:
        path, layer = names_on(entries), names.layer_class(entries)
        size = size_of.get(path, default)
        key = layer == "attention key" and module_and_array(entries)[0][-1]
        if size is False or is_masked(leaf) or (key and _SHARED.search(key)):
            continue
        try:
            if layer in DIVIDED:
                own = _by_head(numbers[path], np.shape(leaf), size, DIVIDED[layer])
                by_head[path] = own
            elif layer == "attention qkvo" or (path in size_of and layer == "other"):
                raise ValueError("its class does not say along which axis heads lie")
        except ValueError as misfit:
            detail = f"{of_shape(leaf)}, class {layer!r}: {misfit}"
            misfits.append((dotted(entries), detail))
    if misfits:
        raise ValueError(
            f"head_size does not divide these parameters into heads:{folded(misfits)}"
            '\nPass head_size={"expression for its path": size} for each, with False '
            "if it stays whole, or name its matrices by a rule: "
            "orscale_jax.BlockDimensionNumbers."
        )
    if not by_head and not any(is_masked(leaf) for _, leaf in leaves):
        raise ValueError(
            "head_size divides no parameter: none has the class of a projection of "
            "attention (orscale_jax.diagnostics.layer_classes). Leave head_size out, or "
            "name the matrices by rules: orscale_jax.BlockDimensionNumbers."
        )
    return by_head


def _by_head(
    numbers: DimensionNumbers, shape: tuple[int, ...], size: HeadSize, inputs: bool
) -> DimensionNumbers:
    """Axes that count heads become batch axes, and the last one is cut into heads."""
    rows, columns = (
        tuple(sorted(int(axis) % len(shape) for axis in as_tuple(axes)))
        for axes in (numbers.reduction_axis, numbers.output_axis)
    )
    *counting, axis = rows if inputs else columns
    length = shape[axis]
    whole: tuple[int, ...] = (length,)
    if isinstance(numbers, BlockDimensionNumbers):
        if numbers.stride:
            raise ValueError(f"its blocks by {numbers} take turns")
        block_axis = int(numbers.block_axis) % len(shape)
        if block_axis == axis:
            whole = numbers.sizes(length)
        elif block_axis not in counting:
            raise ValueError(f"its blocks by {numbers} lie along another axis")
    if size is True and not counting and len(whole) == 1:
        raise ValueError(
            f"nothing says how many heads axis {axis} of length {length} holds: pass "
            "head_size="
        )
    head = whole if size is True else as_tuple(size)
    heads = head * (length // max(1, sum(head)))
    ends, ends_of_heads = (set(itertools.accumulate(sizes)) for sizes in (whole, heads))
    if sum(heads) != length or not ends <= ends_of_heads:
        features = f"{length} features" + f" in blocks of {whole}" * (len(whole) > 1)
        raise ValueError(f"heads of {sum(head)} do not divide its {features}")
    rows_and_columns = (axis, as_axis(columns)) if inputs else (as_axis(rows), axis)
    if len(heads) == 1:
        return MuonDimensionNumbers(*rows_and_columns)
    blocks = len(heads) if len(set(heads)) == 1 else heads
    return BlockDimensionNumbers(*rows_and_columns, block_axis=axis, blocks=blocks)
