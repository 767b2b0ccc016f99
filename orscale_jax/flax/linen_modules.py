"""Dimension numbers from the types of a Linen model's modules."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.core import meta
from jax.experimental.xla_metadata import set_xla_metadata

from orscale_jax import validate
from orscale_jax.flax.rules import LINEN_RULES, is_holder, with_adapters
from orscale_jax.parameters import module_types, output_layers
from orscale_jax.parameters.module_types import Declared, ModuleRules, Numbers
from orscale_jax.parameters.path_rules import Rules
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, by_name

_CALLS = itertools.count()


@dataclasses.dataclass(frozen=True)
class _Traced(meta.AxisMetadata[Any]):
    """A Linen parameter at its creation, with what its module declares about it.

    Lifted transformations tell every box which axes they add, at any position: nothing
    has to be inferred from shapes.
    """

    value: Any
    declared: Declared
    axes: tuple[int, ...]  # The positions of the module's own axes.
    rank: int

    def unbox(self) -> Any:
        return self.value

    # A model may read the variables of a module that it has called, to tie its head.

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(meta.unbox(self.value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)

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


for _operator in "getitem neg add radd sub rsub mul rmul truediv matmul rmatmul".split():
    _name = f"__{_operator}__"
    setattr(_Traced, _name, lambda box, *x, n=_name: getattr(box.__jax_array__(), n)(*x))

# The key is of the kind that nn.WeightNorm and nn.SpectralNorm expect on their paths.
jax.tree_util.register_pytree_with_keys(
    _Traced,
    lambda box: (
        [(jax.tree_util.DictKey("value"), box.value)],
        (box.declared, box.axes, box.rank),
    ),
    lambda static, values: _Traced(next(iter(values)), *static),
)


def linen_dimension_numbers(
    module: linen.Module,
    *args: Any,
    rngs: Any = None,
    method: Callable[..., Any] | str | None = None,
    overrides: Rules | None = None,
    rules: ModuleRules | None = None,
    **kwargs: Any,
) -> Callable[[PyTree], PyTree]:
    """Make ``weight_dimension_numbers`` of a Linen model from the types of its modules.

    The modules of a model are known only while the model runs, so ``module.init`` is
    traced, without computing anything. Kernels of ``Dense``, ``DenseGeneral`` (and so
    attention), ``Einsum``, ``Conv``, ``ConvTranspose``, ``ConvLocal`` and of the cells
    made of them are matrices, except the kernel of the output layer. All other parameters
    are treated as in :func:`nnx_dimension_numbers`. Axes that ``nn.vmap`` or ``nn.scan``
    add are batch axes, wherever ``variable_axes`` puts them.

    Args:
      module: The model, not bound.
      *args: The arguments of ``module.init`` after its keys: arrays or
        ``jax.ShapeDtypeStruct``.
      rngs: The keys of ``module.init``; None: one key for all.
      method: The module's method, as for ``module.init``; None: ``__call__``.
      overrides: See :func:`nnx_dimension_numbers`.
      rules: See :func:`nnx_dimension_numbers`; the names are those of ``self.param``.
      **kwargs: Keyword arguments of ``module.init``, such as ``train=False``.

    Returns:
      A callable from the parameters, ``module.init(...)["params"]``, to their tree of
      :class:`optax.contrib.MuonDimensionNumbers`, None for AdamW, and
      :class:`orscale_jax.BlockDimensionNumbers` for gates and grouped convolutions, as
      ``weight_dimension_numbers`` takes it. Where a parameter is in a box, such as one
      made by ``nn.with_partitioning``, the entry stands for the whole box.

    Raises:
      ValueError: In the same cases as :func:`nnx_dimension_numbers`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from orscale_jax.flax import linen_dimension_numbers
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=2)
      >>> x = jnp.ones((1, 3, 8))
      >>> numbers = linen_dimension_numbers(attention, x)
      >>> params = attention.init(jax.random.key(0), x)["params"]
      >>> numbers(params)["query"]["kernel"]
      MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))

    References:
      https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html
    """
    validate.model("module", module, linen.Module)
    if rngs is None:  # Abstract: a key would be sent to the device.
        rngs = jax.eval_shape(lambda: jax.random.key(0))
    owners: dict[Path, type] = {(): type(module)}
    around: dict[Path, Declared] = {}  # By modules around a parameter's own.
    interceptor = _interceptor(rules or {}, owners, around)
    # Our boxes stay out of nn.jit's cache, and its earlier results out of this trace.
    own_cache = set_xla_metadata(orscale_jax=str(next(_CALLS)))

    def init(rngs: Any, args: Any, kwargs: Any) -> PyTree:
        return module.init(rngs, *args, method=method, **kwargs).get("params", {})

    call, arrays = output_layers.of_arrays(init, rngs, args, kwargs)
    with linen.intercept_methods(interceptor), own_cache:
        traced = jax.eval_shape(call, arrays)
    # Without our boxes: they are pytree nodes, and a module may name parameters by path.
    # JAX remembers a function's trace: this is another function.
    params = jax.eval_shape(lambda arrays: call(arrays), arrays)
    boxes = by_name(traced, is_holder)
    leaves = {
        path: next(iter(jax.tree.leaves(leaf)), optax.MaskedNode())
        for path, leaf in by_name(params, is_holder).items()
    }
    by_type: dict[Path, Numbers] = {}
    for path, leaf in leaves.items():
        shape, box = np.shape(leaf), boxes.get(path)
        if isinstance(box, _Traced):
            declared = around.get(path, box.declared)
            by_type[path] = module_types.located(declared, box.axes, shape)
        else:
            by_type[path] = module_types.numbers_by_owner([path], shape, owners, {})

    def outputs(params: PyTree, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        # As in init, without the names of axes over which BatchNorm would average.
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            for name, value in params.items():
                module.scope.put_variable("params", name, value)
            function: Any = method or "__call__"
            if isinstance(function, str):
                function = getattr(type(module), function)
            return getattr(function, "__func__", function)(module, *args, **kwargs)

        return linen.init_with_output(call, module)(rngs, *args, **kwargs)[0]

    output = output_layers.output_layers(outputs, params, rngs, *args, **kwargs)
    resolved = module_types.resolved(leaves, by_type, overrides, output)
    return module_types.look_up(
        *resolved, is_holder, "parameter of the module that linen_dimension_numbers"
    )


def _interceptor(
    users_rules: ModuleRules, owners: dict[Path, type], around: dict[Path, Declared]
) -> Callable[..., Any]:
    """Make an interceptor that boxes each parameter after a method of its module."""
    rules = {**LINEN_RULES, **users_rules}

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        module = context.module
        if module.scope is None or not module.is_mutable_collection("params"):
            return result
        # Where two modules share a scope, the outer one returns last, and owns it.
        owners[tuple(module.path)] = type(module)
        arrays = module.variables.get("params", {})
        declared = with_adapters(module_types.declarations(module, rules), arrays)
        for dotted, declaration in declared.items():
            *inside, _ = path = (*module.path, *dotted.split("."))
            cls = owners.get(tuple(inside), object)
            if "." in dotted and module_types.nearest(cls, rules) not in users_rules:
                around[path] = declaration
        for name, value in arrays.items():
            if isinstance(value, Mapping):
                continue
            several = len(jax.tree.leaves(value)) > 1  # A tuple of arrays.

            def boxed(leaf: Any, name: str = name, several: bool = several) -> Any:
                rank = np.ndim(meta.unbox(leaf))
                # Another parameter may belong to an outer module that shares this scope.
                if isinstance(leaf, _Traced) or (name not in declared and rank > 1):
                    return leaf
                said = None if several and rank < 2 else declared.get(name)
                return _Traced(leaf, said, tuple(range(rank)), rank)

            boxes = jax.tree.map(boxed, value, is_leaf=meta.is_axis_metadata)
            module.put_variable("params", name, boxes)
        return result

    return intercept
