"""Logical names for the axes of arrays, and their translation to axes of the mesh.

A parameter keeps the names of its axes in its metadata and knows no mesh. One table, such
as `examples.pretrain.meshes.RULES`, given to Flax's `nnx.logical_axis_rules`, says which
axes of the mesh shard each; all names have to be in it. A training step is traced with
`jax.set_mesh(mesh), nnx.logical_axis_rules(rules)` in effect, which activations are
constrained by. On a mesh with Explicit axes the models run inside of
`jax.sharding.auto_axes`. Without a mesh, or without rules, all names are ignored.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import jax
from flax import nnx
from flax.core import spmd
from jax.sharding import AxisType, Mesh, PartitionSpec

Init: TypeAlias = jax.nn.initializers.Initializer
Rules: TypeAlias = Iterable[tuple[str, str | tuple[str, ...] | None]]
Model = TypeVar("Model", bound=nnx.Module)


def named(init: Init, *names: str | None) -> Init:
    """An initializer whose variable has a logical name for each of its axes."""
    # Not sharded when it is made: that would need a mesh, which a laptop has none of.
    return nnx.with_partitioning(init, names, eager_sharding=False)


def shardings(state: nnx.State, rules: Rules, mesh: Mesh) -> nnx.State:
    """Where the variables of a state, or of an abstract one, lie on a mesh."""
    with nnx.logical_axis_rules(tuple(rules)):
        return nnx.get_named_sharding(state, mesh)


def create(make: Callable[[], Model], rules: Rules, mesh: Mesh) -> Model:
    """A model whose variables are made on the devices they belong to."""
    rules = tuple(rules)
    # On Explicit axes every device would draw the whole of each matrix.
    types = (AxisType.Auto,) * mesh.devices.ndim
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    with jax.set_mesh(auto), nnx.logical_axis_rules(rules):
        graphdef, abstract = nnx.split(nnx.eval_shape(make))
        where = shardings(abstract, rules, auto)
        state = jax.jit(lambda: nnx.state(make()), out_shardings=where)()
    return nnx.merge(graphdef, jax.device_put(state, shardings(abstract, rules, mesh)))


def platform() -> str:
    """Of the mesh in context, such as "gpu"; without one JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def mesh_axes(name: str) -> tuple[str, ...]:
    """The axes of the mesh in context over which a logical name is sharded."""
    rules = _rules()
    if not rules:
        return ()
    if name not in rules:
        raise ValueError(f"there is no rule for the logical axis {name!r}: add one")
    axes = rules[name]
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Shard an activation as the names of its axes say."""
    if not _rules():
        return x
    spec = (name and mesh_axes(name) for name in names)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _rules() -> dict[str, str | tuple[str, ...] | None]:
    """The rules in context; none where there is no mesh."""
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    return dict(spmd.get_logical_axis_rules()) if on_mesh else {}
