"""Dimension numbers from the types of a Haliax model's modules and its named axes.

A Haliax module knows the names of the axes that it sums over and of those that it makes.
:func:`dimension_numbers` looks for them among the axes of each parameter, in any order;
the others, such as the layers of ``haliax.nn.Stacked``, are batch axes. Where a module's
type does not determine them, an error names the parameter.

Needs Haliax, and Equinox, on which Haliax is built.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import haliax as hax
from haliax.util import ensure_tuple
from optax.contrib import MuonDimensionNumbers

from orscale_jax import equinox
from orscale_jax.parameters import path_rules
from orscale_jax.parameters.dimension_numbers import Unresolved, as_axis
from orscale_jax.parameters.module_types import (
    Declared,
    Numbers,
    adamw_only,
    of_module_tree,
)
from orscale_jax.trees.boxes import PyTree


@dataclasses.dataclass(frozen=True)
class NamedWeight:
    """The rows and columns of a matrix, by the names of its axes.

    Attributes:
      reduction_axis: The axis or axes, or their names, that make up the rows.
      output_axis: The axis or axes, or their names, that make up the columns. All other
        axes are batch axes.

    Example:
      >>> import haliax as hax
      >>> from orscale_jax.haliax import NamedWeight
      >>> NamedWeight("embed", ("heads", "head_dim"))
      NamedWeight(reduction_axis='embed', output_axis=('heads', 'head_dim'))
    """

    reduction_axis: Any
    output_axis: Any


Rule: TypeAlias = Callable[[Any], Mapping[str, NamedWeight | Declared]]
Rules: TypeAlias = Mapping[type, Rule]


def dimension_numbers(
    model: PyTree,
    *args: Any,
    overrides: path_rules.Rules | None = None,
    rules: Rules | None = None,
    **kwargs: Any,
) -> Callable[[PyTree], PyTree]:
    """Make ``weight_dimension_numbers`` of a Haliax model from its modules' types.

    Weights of ``Linear`` (and so of ``MLP``), ``MoELinear``, ``Conv`` and
    ``ConvTranspose`` are matrices, from their ``In`` (and window) to their ``Out``. AdamW
    trains embeddings, norms, biases, depthwise convolutions and parameters of fewer than
    two axes. Other grouped convolutions need an override. Names on the path and modules
    of Equinox are treated as in :func:`orscale_jax.equinox.dimension_numbers`, which
    raises the same errors. Dimension numbers stand in place of a named array.

    Args:
      model: The model, or a tree of modules. It may be abstract.
      *args: The arguments of a call of the model, which is traced to find its output
        layer; without them, only names tell it.
      overrides: See :func:`orscale_jax.flax.nnx_dimension_numbers`. Expressions match the
        paths of named arrays.
      rules: See :func:`orscale_jax.flax.nnx_dimension_numbers`. The functions may return
        a :class:`NamedWeight` for each parameter.
      **kwargs: Keyword arguments of the call.

    Example:
      >>> import equinox as eqx, haliax as hax, jax
      >>> from orscale_jax import orscale
      >>> from orscale_jax.haliax import dimension_numbers
      >>> Embed, Heads, Size = hax.make_axes(embed=8, heads=2, head_size=4)
      >>> model = hax.nn.Linear.init((Heads, Size), Embed, key=jax.random.key(0))
      >>> numbers = dimension_numbers(model)
      >>> model.weight.array.shape
      (8, 2, 4)
      >>> numbers(eqx.filter(model, eqx.is_inexact_array)).weight
      MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=0)
      >>> optimizer = orscale(1e-3, weight_dimension_numbers=numbers)

    References:
      https://haliax.readthedocs.io/en/latest/nn/
    """
    return of_module_tree(
        model,
        eqx.Module,
        (args, kwargs),
        {**equinox.RULES, **RULES, **(rules or {})},
        overrides,
        hax.NamedArray,
        _placed,
    )


def _placed(declared: NamedWeight | Numbers, array: hax.NamedArray) -> Numbers:
    """The axes of an array that a declaration names."""
    if not isinstance(declared, NamedWeight):
        return declared
    axes = array.axes
    names = [*map(ensure_tuple, (declared.reduction_axis, declared.output_axis))]
    places: dict[Any, int] = {axis: index for index, axis in enumerate(axes)}
    places |= {axis.name: index for index, axis in enumerate(axes)}
    missing = [axis for axis in (*names[0], *names[1]) if axis not in places]
    if missing:
        return Unresolved(f"its module names {missing}, and its axes are {list(axes)}")
    rows, columns = (tuple(sorted(places[axis] for axis in named)) for named in names)
    # A module that sums over nothing, or makes one number, has no matrix.
    if not rows or not columns:
        return None
    return MuonDimensionNumbers(as_axis(rows), as_axis(columns))


def _linear(module: Any) -> Mapping[str, NamedWeight | Declared]:
    return {"weight": NamedWeight(module.In, module.Out), "bias": None}


def _conv(module: Any) -> Mapping[str, NamedWeight | Declared]:
    weight: NamedWeight | Declared
    if module.groups == 1:
        window = tuple(map(hax.axis_name, module.Spatial))
        weight = NamedWeight((*window, module.In), module.Out)
    elif module.groups == module.In.size:
        weight = None  # Depthwise.
    else:
        weight = Unresolved(f"it is split in {module.groups} groups")
    return {"weight": weight, "bias": None}


RULES: Rules = {
    hax.nn.Linear: _linear,
    hax.nn.MoELinear: _linear,
    hax.nn.Conv: _conv,
    hax.nn.ConvTranspose: _conv,
    hax.nn.Embedding: adamw_only("weight"),
    hax.nn.LayerNorm: adamw_only("weight", "bias"),
    hax.nn.RmsNorm: adamw_only("weight", "bias"),
}
