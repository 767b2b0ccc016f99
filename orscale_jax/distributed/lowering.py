"""Operations that depend on what a program is lowered for, which tracing does not know.

:mod:`jax.export` refuses operations whose names are not guaranteed to be stable, and
those that call back into Python. Exported programs get other ones instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh

# Arrays to arrays; the first results have the types of the first operands.
Function: TypeAlias = Callable[..., Sequence[jax.Array]]

# The names of GPUs, as of ``jax.lax.platform_dependent``.
GPUS = ("cuda", "rocm")

_layout_p = Primitive("layout_unless_exported")
_choice_p = Primitive("partitioned_unless_exported")
_choice_p.multiple_results = True


def with_layout(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Constrain the layout of an array; in an exported program, the compiler chooses it.

    Args:
      x: The array.
      order: Its axes, from the outermost to the innermost in memory.
    """
    return _layout_p.bind(x, order=tuple(order))


def partitioned(
    operands: Sequence[jax.Array],
    mesh: AbstractMesh,
    operation: Function,
    exported: Function,
    results: int,
) -> tuple[jax.Array, ...]:
    """Apply an operation that calls back for the program of one device.

    It is lowered for devices, but their number alone enters its program. JAX, if it knew
    of the operation, would refuse programs with several meshes over the same devices.

    Args:
      operands: The operands.
      mesh: The mesh that they are on.
      operation: A function made by ``jax.experimental.custom_partitioning``.
      exported: The same function for programs that are exported, or lowered for more
        devices than there are.
      results: The number of results, of the types of the first operands.
    """
    chosen = {"mesh": mesh, "operation": operation, "exported": exported}
    return tuple(_choice_p.bind(*operands, **chosen, results=results))


def _is_for_export(ctx: Any) -> bool:
    return bool(ctx.module_context.lowering_parameters.for_export)


def _lower_layout(ctx: Any, x: Any, *, order: tuple[int, ...]) -> Any:
    def constrained(x: jax.Array) -> jax.Array:
        return x if _is_for_export(ctx) else with_layout_constraint(x, Layout(order))

    return mlir.lower_fun(constrained, multiple_results=False)(ctx, x)


def _batch_layout(operands: Any, axes: Any, *, order: tuple[int, ...]) -> Any:
    outermost = jnp.moveaxis(operands[0], axes[0], 0)
    return with_layout(outermost, (0, *(axis + 1 for axis in order))), 0


def _lower_choice(
    ctx: Any,
    *operands: Any,
    mesh: AbstractMesh,
    operation: Function,
    exported: Function,
    results: int,
) -> Any:
    on_devices = None if _is_for_export(ctx) else _on_devices(ctx, mesh)
    if on_devices is None:
        return mlir.lower_fun(exported)(ctx, *operands)
    return mlir.lower_fun(operation)(on_devices, *operands)


def _on_devices(ctx: Any, mesh: AbstractMesh) -> Any:
    """The context with devices and a mesh; None if there are too few devices."""
    module = ctx.module_context
    if not isinstance(module.axis_context, mlir.ShardingContext):
        return ctx
    count = module.axis_context.num_devices
    devices = () if module.backend is None else tuple(module.backend.devices()[:count])
    if len(devices) < count:
        return None
    named = mesh if mesh.size == count else AbstractMesh((count,), ("devices",))
    context = mlir.ShardingContext(count, devices, named)
    return ctx.replace(module_context=module.replace(axis_context=context))


_layout_p.def_impl(lambda x, *, order: with_layout_constraint(x, Layout(order)))
_layout_p.def_abstract_eval(lambda x, *, order: x)
ad.deflinear2(_layout_p, lambda x, _, **params: [_layout_p.bind(x, **params)])
batching.primitive_batchers[_layout_p] = _batch_layout
mlir.register_lowering(_layout_p, _lower_layout)

_choice_p.def_impl(lambda *operands, operation, **_: operation(*operands))
_choice_p.def_abstract_eval(lambda *operands, results, **_: operands[:results])
mlir.register_lowering(_choice_p, _lower_choice)
