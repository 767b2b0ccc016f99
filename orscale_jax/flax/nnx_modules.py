"""Dimension numbers from the types of an NNX model's modules."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from flax import nnx

from orscale_jax import validate
from orscale_jax.flax.rules import NNX_RULES, is_holder, with_adapters
from orscale_jax.parameters import module_types, output_layers
from orscale_jax.parameters.module_types import ModuleRules, Rule, adamw_only
from orscale_jax.parameters.path_rules import Rules
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, by_name

# Containers declare nothing: the module that owns them knows what their parameters are.
_CONTAINERS = (nnx.List, nnx.Dict)


def nnx_dimension_numbers(
    model: nnx.Module,
    *args: Any,
    wrt: Any = nnx.Param,
    overrides: Rules | None = None,
    rules: ModuleRules | None = None,
    partition_names: Collection[str] = (),
    **kwargs: Any,
) -> Callable[[PyTree], PyTree]:
    """Make ``weight_dimension_numbers`` of an NNX model from the types of its modules.

    Kernels of ``Linear``, ``LinearGeneral`` (and so ``MultiHeadAttention``), ``Einsum``,
    ``Conv``, ``ConvTranspose``, ``LoRA`` and of the cells made of them are matrices. If
    the kernel of a cell holds several gates, each gate is a matrix. The adapters of low
    rank that Qwix puts beside the parameters of any module are also matrices. AdamW
    trains embeddings, norms, biases, depthwise convolutions and parameters of fewer than
    two axes. It also trains an output layer, which is the kernel whose product becomes
    the output of the model. Its name shows an output layer, or a trace if you pass the
    inputs of the model. Other names decide only about parameters whose module type says
    nothing. AdamW trains a variable that several modules share if one of the modules says
    so. If ``nnx.vmap`` or ``nnx.scan`` put axes in front of the axes that a module
    declares, these are batch axes.

    Args:
      model: The module whose variables are optimized.
      *args: The arguments of a call of the model, which is traced to find its output
        layer: arrays or ``jax.ShapeDtypeStruct``. Without them, only names show the
        output layer.
      wrt: Which variables are optimized, as for ``nnx.Optimizer``: ``nnx.LoRAParam`` if
        all others are frozen.
      overrides: Rules as in :func:`orscale_jax.by_path`, for leaves with their stacked
        axes, such as ``{"readout": "adamw"}`` for a head of that name. They take
        precedence over everything else, and match the paths that errors of this function
        show.
      rules: A mapping from types of modules to functions. A function takes a module and
        returns a mapping from each attribute that is a parameter (or holds parameters) to
        a :class:`Weight`, or to None for AdamW. A rule also applies to subclasses without
        a rule, and replaces the library's rule for the same type.
      partition_names: The ``nnx.PARTITION_NAME`` of transformations that stack modules
        along another axis than the first. Axes with these names in the variables'
        annotations are batch axes, at any position. Names that variables keep in their
        metadata under ``nnx.PARTITION_NAME`` itself, as MaxText's do, need not be given.
      **kwargs: Keyword arguments of the call.

    Returns:
      A callable from the parameters to their tree of
      :class:`optax.contrib.MuonDimensionNumbers`, None for AdamW, and
      :class:`orscale_jax.BlockDimensionNumbers` for gates and grouped convolutions, as
      ``weight_dimension_numbers`` takes it. The parameters may be
      ``nnx.state(model, nnx.Param)`` or a part of it (``nnx.LoRAParam``), with variables
      or with bare arrays, or the ``nnx.to_pure_dict`` of either.

    Raises:
      ValueError: If a type does not determine the axes of a parameter, or a leaf's shape
        is not the one that its module declares (one error lists all of them), and in the
        cases of :func:`orscale_jax.by_path`.

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
      ...     model, orscale(1e-3, weight_dimension_numbers=numbers), wrt=nnx.Param
      ... )

    References:
      https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/index.html
    """
    validate.model("model", model, nnx.Module)

    def adapted(rule: Rule) -> Rule:
        return lambda module: with_adapters(rule(module), vars(module))

    known: ModuleRules = {nnx.Module: adamw_only(), **NNX_RULES, **(rules or {})}
    every_rule = {cls: adapted(rule) for cls, rule in known.items()}
    params = by_name(nnx.state(model, wrt), is_holder)
    leaves = {path: jax.tree.leaves(param)[0] for path, param in params.items()}
    # The axes that count modules, by their names in the variables' annotations.
    stacked: dict[Path, dict[str, int]] = {}
    for path, param in params.items():
        own_name = param.get_metadata(nnx.PARTITION_NAME, None)
        wanted = {*partition_names, own_name} - {None}
        annotation = param.get_metadata("out_sharding", None) or ()
        layout = getattr(annotation, "sharding", annotation)  # Of a Format.
        names = getattr(layout, "spec", layout)  # Of a NamedSharding.
        stacked[path] = {name: axis for axis, name in enumerate(names) if name in wanted}
    for name in partition_names:
        if not any(name in axes for axes in stacked.values()):
            raise ValueError(
                f"{name!r} in partition_names is in no variable's annotation: annotate "
                "the parameters, and give the transformation transform_metadata="
                f"{{nnx.PARTITION_NAME: {name!r}}}."
            )
    owners = {(): model} | {
        tuple(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if not (path and isinstance(module, _CONTAINERS))
    }
    # A variable that several modules share is in the state where it is met first.
    shared: dict[Path, list[Path]] = {}
    for places in nnx.find_duplicates(model, only=nnx.Variable):
        paths = [tuple(map(str, path)) for path in places]
        shared[paths[0]] = paths
    by_type = {
        path: module_types.numbers_by_owner(
            shared.get(path, [path]),
            np.shape(leaf),
            owners,
            every_rule,
            stacked[path].values(),
            rules or {},
        )
        for path, leaf in leaves.items()
    }
    output: list[Path] = []
    if args or kwargs:
        graph, *states = nnx.split(model, nnx.Any(nnx.Param, wrt), ...)

        def outputs(every: PyTree, rest: PyTree, *args: Any, **kwargs: Any) -> Any:
            called: Any = nnx.merge(graph, every, rest)
            return called(*args, **kwargs)

        output = output_layers.output_layers(outputs, *states, *args, **kwargs)
    resolved = module_types.resolved(leaves, by_type, overrides, output, shared)
    kind = f"nnx.{wrt.__name__}" if isinstance(wrt, type) else f"variable {wrt}"
    return module_types.look_up(
        *resolved, is_holder, f"{kind} of the model that nnx_dimension_numbers"
    )
