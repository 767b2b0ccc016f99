"""Dimension numbers from the types of an Equinox model's modules.

Equinox keeps weights as ``(out, in, ...)``, and ``eqx.filter_vmap`` stacks biases and
norms into leaves of two axes, which look like matrices. :func:`dimension_numbers` takes
the axes from the module that made the leaf. Where a module's type does not determine
them, an error names the parameter.

Needs Equinox.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx

from orscale_jax.parameters.module_types import (
    Declared,
    ModuleRules,
    Rule,
    Weight as Weight,
    adamw_only,
    convolution,
    of_module_tree,
)
from orscale_jax.parameters.path_rules import Rules
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import by_name


def dimension_numbers(
    model: PyTree,
    *args: Any,
    overrides: Rules | None = None,
    rules: ModuleRules | None = None,
    **kwargs: Any,
) -> Callable[[PyTree], PyTree]:
    """Make ``weight_dimension_numbers`` of an Equinox model from its modules' types.

    Weights of ``Linear`` (and so of ``MLP`` and ``MultiheadAttention``), ``Conv`` and
    ``ConvTranspose`` are matrices. AdamW trains embeddings, norms, biases, depthwise
    convolutions and parameters of fewer than two axes. It also trains an output layer,
    which a name or a trace of the model shows. Other names decide only about parameters
    whose module type says nothing. If ``eqx.filter_vmap`` puts axes in front of the axes
    that a module declares, these are batch axes. Recurrent cells concatenate the weights
    of their gates, and have one matrix per gate. Grouped convolutions that are not
    depthwise have one matrix per group. Both use
    :class:`orscale_jax.BlockDimensionNumbers`.

    Args:
      model: The model, or a tree of modules. It may be abstract.
      *args: The arguments of a call of the model, which is traced to find its output
        layer; without them, only names tell it.
      overrides: See :func:`orscale_jax.flax.nnx_dimension_numbers`.
      rules: See :func:`orscale_jax.flax.nnx_dimension_numbers`; ``Weight`` is also here.
      **kwargs: Keyword arguments of the call.

    Returns:
      A callable from the parameters, such as ``eqx.filter(model, eqx.is_inexact_array)``,
      to their tree of :class:`optax.contrib.MuonDimensionNumbers`,
      :class:`orscale_jax.BlockDimensionNumbers` and None, as ``weight_dimension_numbers``
      takes it.

    Raises:
      ValueError: In the same cases as :func:`orscale_jax.flax.nnx_dimension_numbers`.

    Example:
      >>> import equinox as eqx, jax
      >>> from orscale_jax import orscale
      >>> from orscale_jax.equinox import dimension_numbers
      >>> model = eqx.nn.Conv2d(3, 8, kernel_size=5, key=jax.random.key(0))
      >>> numbers = dimension_numbers(model)
      >>> params = eqx.filter(model, eqx.is_inexact_array)
      >>> numbers(params).weight
      MuonDimensionNumbers(reduction_axis=(1, 2, 3), output_axis=0)
      >>> optimizer = orscale(1e-3, weight_dimension_numbers=numbers)

    References:
      https://docs.kidger.site/equinox/api/nn/linear/
    """
    every_rule = {**RULES, **(rules or {})}
    if args or kwargs:  # BatchNorm would average over a named axis of jax.vmap.
        model = eqx.nn.inference_mode(model)
    return of_module_tree(model, eqx.Module, (args, kwargs), every_rule, overrides)


def _linear(module: eqx.nn.Linear) -> Mapping[str, Declared]:
    features = module.out_features, module.in_features
    shape = tuple(1 if size == "scalar" else size for size in features)
    return {"weight": Weight(shape, reduction_axis=1, output_axis=0), "bias": None}


def _conv(module: eqx.nn.Conv | eqx.nn.ConvTranspose) -> Mapping[str, Declared]:
    inputs = module.in_channels // module.groups
    shape = (module.out_channels, inputs, *module.kernel_size)
    return {"weight": convolution(shape, 1, 0, module.groups), "bias": None}


def _cell(gates: int) -> Rule:
    """The rule of a cell that concatenates the weights of its gates."""
    return lambda m: {
        "weight_ih": Weight((gates * m.hidden_size, m.input_size), 1, 0, blocks=gates),
        "weight_hh": Weight((gates * m.hidden_size, m.hidden_size), 1, 0, blocks=gates),
        "bias": None,
        "bias_n": None,
    }


def _shared(module: eqx.nn.Shared) -> Mapping[str, Declared]:
    """An embedding's table takes AdamW, in whichever of its owners it is kept."""
    owners = by_name(module(), lambda node: isinstance(node, eqx.nn.Embedding)).values()
    tables = {id(node.weight) for node in owners if isinstance(node, eqx.nn.Embedding)}
    kept = by_name(module.pytree).items()
    return {".".join(("pytree", *at)): None for at, x in kept if id(x) in tables}


_NORM = adamw_only("weight", "bias")

RULES: ModuleRules = {
    eqx.nn.Linear: _linear,
    eqx.nn.Conv: _conv,
    eqx.nn.ConvTranspose: _conv,
    eqx.nn.GRUCell: _cell(3),
    eqx.nn.LSTMCell: _cell(4),
    eqx.nn.Embedding: adamw_only("weight"),
    eqx.nn.LayerNorm: _NORM,
    eqx.nn.RMSNorm: _NORM,
    eqx.nn.GroupNorm: _NORM,
    eqx.nn.BatchNorm: _NORM,
    eqx.nn.WeightNorm: adamw_only("g"),
    eqx.nn.PReLU: adamw_only("negative_slope"),
    eqx.nn.Shared: _shared,
    eqx.nn.StateIndex: adamw_only("init"),  # Without eqx.nn.make_with_state.
}
