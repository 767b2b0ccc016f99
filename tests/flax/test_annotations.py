"""Annotated Flax, Haliax and Equinox models on meshes, with AdamW as the control."""

import contextlib
import functools

import chex
import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.layout import Format
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

import orscale_jax.equinox
import orscale_jax.haliax
from orscale_jax import orscale, state_shardings
from orscale_jax.flax import linen_dimension_numbers, nnx_dimension_numbers
from tests import runs

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
RULES = (("rows", "fsdp"), ("columns", "tensor"), ("layers", None), ("experts", "fsdp"))
RATE = 1e-3
mesh_of = functools.partial(runs.mesh_of, {"fsdp": 4, "tensor": 2})
STEPS = 2


def assert_close(found, wanted):
    """Compare parameters after some steps, in boxes or not."""
    pairs = (jax.tree.map(np.asarray, jax.tree.leaves(tree)) for tree in (found, wanted))
    runs.assert_close(*pairs, rtol=2e-5, atol=2e-5)


def numbers_of(state):
    """The one array with numbers of each matrix, or its sharding."""
    [leaf] = jax.tree.leaves(optax.tree.get(state, "numbers"))
    return leaf


# NNX


class Pair(nnx.Module):
    """Two layers, whose kernels are annotated if there are names."""

    def __init__(self, rngs, *names, width=32):
        init, annotate = nnx.initializers.lecun_normal(), nnx.with_partitioning
        up, down = (annotate(init, of) if of else init for of in (names, names[::-1]))
        self.up = nnx.Linear(16, width, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(width, 16, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def on_mesh(rngs):
    return Pair(rngs, "fsdp", "tensor")


def squares(model):
    return jnp.mean(jnp.square(model(X)))


def sharded(node):
    """Constrain the variables of a model or an optimizer to their annotations."""
    state = nnx.state(node)
    specs = nnx.get_partition_spec(state)
    nnx.update(node, jax.lax.with_sharding_constraint(state, specs))


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def nnx_step(model, optimizer):
    optimizer.update(model, nnx.grad(squares)(model))


def nnx_trained(model, optimizer, steps=STEPS):
    for _ in range(steps):
        nnx_step(model, optimizer)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@functools.cache
def nnx_alone():
    """The same model on one device, without annotations."""
    model = on_mesh_alone()
    optimizer = nnx.Optimizer(model, orscale(RATE), wrt=nnx.Param)
    return nnx_trained(model, optimizer)


@pytest.mark.extended
@pytest.mark.parametrize("created", ["eagerly", "in jit"])
def test_nnx(created):
    def create():
        model = on_mesh(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, orscale(RATE), wrt=nnx.Param)
        if created == "in jit":
            sharded(model)
            sharded(optimizer)
        return model, optimizer

    with jax.set_mesh(mesh_of()):
        model, optimizer = (nnx.jit(create) if created == "in jit" else create)()
        assert_close(nnx_trained(model, optimizer), nnx_alone())
    assert model.up.kernel.get_value().sharding.spec == P("fsdp", "tensor")
    for leaf in jax.tree.leaves(nnx.state(optimizer)):
        if leaf.ndim == 2:
            assert leaf.sharding.spec in [P(*names) for names in LAYOUTS]


@pytest.mark.extended
def test_nnx_on_explicit_axes():
    """Creation and an update; a matmul on such axes would need an out_sharding."""
    gradients = jax.tree.map(lambda x: jnp.cos(17 * x), nnx.state(on_mesh_alone()))
    wanted = on_mesh_alone()
    optimizer = nnx.Optimizer(wanted, orscale(RATE), wrt=nnx.Param)
    optimizer.update(wanted, gradients)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        model = on_mesh(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, orscale(RATE), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            gradients = jax.tree.map(lambda x: jnp.cos(17 * x), nnx.state(model))
            optimizer.update(model, gradients)

        step(model, optimizer)
    assert_close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(wanted)))


def on_mesh_alone():
    return Pair(nnx.Rngs(0))


def in_turn(tx_of, *models):
    """The parameters of models that are trained a step at a time, one after the other."""
    pairs = [(model, nnx.Optimizer(model, tx_of(), wrt=nnx.Param)) for model in models]
    for _ in range(STEPS):
        for pair in pairs:
            nnx_step(*pair)
    return [nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in models]


LAYOUTS = [("fsdp", "tensor"), ("tensor", "fsdp")]


@pytest.mark.extended
@pytest.mark.parametrize("injected", [False, True])
def test_two_models_of_equal_names_and_different_layouts(injected):
    """Each optimizer keeps its own annotations; an injected one warns, and is right."""
    pair = functools.partial(Pair, width=24)

    def tx_of():
        return optax.inject_hyperparams(orscale)(RATE) if injected else orscale(RATE)

    wanted = in_turn(tx_of, *(pair(nnx.Rngs(seed)) for seed in (0, 1)))
    cannot_tell = pytest.warns(UserWarning, match="pass param_shardings")
    with jax.set_mesh(mesh_of()), cannot_tell if injected else contextlib.nullcontext():
        models = [pair(nnx.Rngs(seed), *names) for seed, names in enumerate(LAYOUTS)]
        assert_close(in_turn(tx_of, *models), wanted)
    placed = [model.up.kernel.get_value().sharding.spec for model in models]
    assert injected or placed == [P(*names) for names in LAYOUTS]


class Layer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        self.linear = nnx.Linear(16, 16, kernel_init=init, rngs=rngs)


@pytest.mark.extended
def test_nnx_layers():
    """Kernels (16, 4, 16): arrays per matrix are sharded as layers."""
    create = nnx.vmap(
        Layer,
        out_axes=nnx.StateAxes({nnx.Param: 1}),
        transform_metadata={nnx.PARTITION_NAME: "tensor"},
    )

    @nnx.jit
    def step(model, optimizer):
        gradients = jax.tree.map(lambda x: jnp.cos(17 * x), nnx.state(model, nnx.Param))
        optimizer.update(model, gradients)

    with jax.set_mesh(mesh_of()):
        model = create(nnx.Rngs(0).split(4))
        numbers = nnx_dimension_numbers(model, partition_names=["tensor"])
        tx = orscale(RATE, weight_dimension_numbers=numbers)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step(model, optimizer)
    assert model.linear.kernel.get_value().shape == (16, 4, 16)
    array = numbers_of(optimizer.opt_state)
    assert array.shape == (7, 4) and array.sharding.spec == P(None, "tensor")
    where = numbers_of(state_shardings(tx, nnx.state(model, nnx.Param)))
    assert where.spec == P(None, "tensor")


@pytest.mark.parametrize("annotation", ["names", "sharding", "format"])
def test_layers_on_an_axis_that_only_annotations_identify(annotation):
    """Layers on axis 1, as in MaxText, with their name kept, and as many as features."""
    where = NamedSharding(runs.mesh_of({"layers": 1}), P(None, "layers"))
    of = {"names": ("rows", "layers", "columns"), "sharding": where}.get(annotation)
    model = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(
        jnp.ones((16, 16, 16)),
        out_sharding=of or Format(sharding=where),
        eager_sharding=False,
    )
    params = nnx.state(model, nnx.Param)
    assert nnx_dimension_numbers(model)(params)["kernel"] == Dims(1, 2)
    numbers = nnx_dimension_numbers(model, partition_names=["layers"])
    assert numbers(params)["kernel"] == Dims(0, 2)
    model.kernel.set_metadata(nnx.PARTITION_NAME, "layers")
    assert nnx_dimension_numbers(model)(params)["kernel"] == Dims(0, 2)


@pytest.mark.extended
def test_a_layer_name_that_no_variable_has():
    with pytest.raises(ValueError, match="'layers' in partition_names is in no"):
        nnx_dimension_numbers(on_mesh_alone(), partition_names=["layers"])


# The operations of MaxText on an optimizer's state, in their order.


def spec_of_variable(variable, rules):
    """MaxText's spec: from the metadata, cut to the rank of the value."""
    value = variable.get_value()
    if not hasattr(value, "shape"):
        return None
    names = variable.get_metadata("out_sharding", None) or ()
    return P(*[dict(rules).get(name) for name in names][: len(value.shape)])


@pytest.mark.extended
def test_maxtext_with_nnx():
    """A factory without parameters, an abstract state, shardings of variables."""

    def get_optimizer(config, schedule):
        return orscale(schedule, weight_decay=config["weight_decay"])

    def build():
        model = Pair(nnx.Rngs(0), "rows", "columns")
        tx = get_optimizer({"weight_decay": 0.1}, optax.constant_schedule(RATE))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    mesh = mesh_of()
    with nnx.logical_axis_rules(RULES), nnx.use_eager_sharding(False):
        graph, shapes = nnx.split(nnx.eval_shape(build))
        where = jax.tree.map(
            lambda v: NamedSharding(mesh, spec_of_variable(v, RULES)),
            shapes,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        state = jax.jit(lambda: nnx.state(build()), out_shardings=where)()

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=where)
        def step(state):
            model, optimizer = nnx.merge(graph, state)
            optimizer.update(model, nnx.grad(squares)(model))
            return nnx.state((model, optimizer))

        for _ in range(2):
            state = step(state)
    model, _ = nnx.merge(graph, state)
    assert_close(nnx.to_pure_dict(nnx.state(model)), nnx_alone())


# Linen


def dense(features, *names, logical=False):
    init = nn.initializers.lecun_normal()
    annotate = nn.with_logical_partitioning if logical else nn.with_partitioning
    return nn.Dense(features, kernel_init=annotate(init, names) if names else init)


class LinenPair(nn.Module):
    names: tuple[str, ...] = ()
    logical: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(dense(32, *self.names, logical=self.logical)(x))
        return dense(16, *self.names[::-1], logical=self.logical)(x)


class LinenLayers(nn.Module):
    """Layers (4, 16, 16), scanned."""

    names: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            lambda module, x, _: (nn.tanh(dense(16, *self.names)(x)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
            metadata_params={nn.PARTITION_NAME: "tensor"},
        )
        return scanned(self, x, None)[0]


def linen_state(model, tx, key):
    params = model.init(key, X)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def linen_step(state):
    def loss(params):
        return jnp.mean(jnp.square(state.apply_fn({"params": params}, X)))

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def linen_alone(model, tx):
    state = linen_state(model, tx, jax.random.key(0))
    for _ in range(STEPS):
        state = jax.jit(linen_step)(state)
    return state


def linen_placed(model, tx, mesh, logical=False):
    """A state made where it is annotated to be, and its shardings."""
    init = functools.partial(linen_state, model, tx)
    specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
    specs = nn.logical_to_mesh(specs, RULES) if logical else specs
    where = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.jit(init, out_shardings=where)(jax.random.key(0)), where


def linen_trained(state, where):
    step = jax.jit(linen_step, donate_argnums=0, out_shardings=where)
    for _ in range(STEPS):
        state = step(state)
    return state


@pytest.mark.extended
@pytest.mark.parametrize("names", ["mesh", "logical", "logical, boxes removed"])
def test_linen(names):
    tx, mesh, logical = orscale(RATE), mesh_of(), names != "mesh"
    of = ("rows", "columns") if logical else ("fsdp", "tensor")
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        state, where = linen_placed(LinenPair(of, logical), tx, mesh, logical)
        if names == "logical, boxes removed":
            state = nn.meta.unbox(state)
        state = linen_trained(state, where)
    assert_close(state.params, linen_alone(LinenPair(), tx).params)


@pytest.mark.extended
def test_linen_layers_and_checkpoints_on_another_mesh(tmp_path):
    numbers = linen_dimension_numbers(LinenLayers(("fsdp", None)), X)
    tx, mesh = orscale(RATE, weight_dimension_numbers=numbers), mesh_of()
    with jax.set_mesh(mesh):
        state, where = linen_placed(LinenLayers(("fsdp", None)), tx, mesh)
        by_type = jax.tree.leaves(state_shardings(tx, state.params))
        annotated = jax.tree.leaves(where.opt_state)
        for x, y, leaf in zip(
            annotated, by_type, jax.tree.leaves(state.opt_state), strict=True
        ):
            assert x.is_equivalent_to(y, leaf.ndim)
        state = linen_trained(state, where)
    wanted = linen_alone(LinenLayers(), tx)
    assert_close(state.params, wanted.params)
    array = numbers_of(state.opt_state)
    assert array.shape == (7, 4) and array.sharding.spec == P(None, "tensor")

    other = runs.mesh_of({"fsdp": 2, "tensor": 4})
    init = functools.partial(linen_state, LinenLayers(("fsdp", None)), tx)
    abstract = jax.eval_shape(init, jax.random.key(0))
    specs = jax.tree.leaves(nn.get_partition_spec(abstract))
    leaves, structure = jax.tree.flatten(abstract)
    target = structure.unflatten(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(other, spec))
        for x, spec in zip(leaves, specs, strict=True)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (state.params, state.opt_state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", (target.params, target.opt_state)
        )
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (restored[1], state.opt_state)))
    with jax.set_mesh(other):
        state = state.replace(params=restored[0], opt_state=restored[1])
        state = jax.jit(linen_step)(state)
    assert_close(state.params, jax.jit(linen_step)(wanted).params)


# Haliax and Equinox


@pytest.mark.extended
def test_haliax():
    In, Out, Layers = hax.make_axes(rows=16, columns=32, layers=4)
    mapping = {"rows": "fsdp", "columns": "tensor"}

    def create():
        init = functools.partial(hax.nn.Linear.init, In, Out, use_bias=False)
        keys = jax.random.split(jax.random.key(0), 4)
        return hax.vmap(lambda key: init(key=key), Layers)(keys)

    tx = orscale(
        RATE, weight_dimension_numbers=orscale_jax.haliax.dimension_numbers(create())
    )

    def start():
        model = create()
        return model, tx.init(model)

    def step(model, state):
        gradients = jax.tree.map(lambda x: jnp.cos(17 * x), model)
        updates, state = tx.update(gradients, state, model)
        return optax.apply_updates(model, updates), state

    wanted, wanted_state = step(*start())
    with jax.set_mesh(mesh_of()), hax.axis_mapping(mapping):
        model, state = hax.named_jit(start, out_axis_resources=mapping)()
        assert numbers_of(state).shape == (7, 4)
        model, state = hax.named_jit(step, axis_resources=mapping)(model, state)
    placed = dict(zip(model.weight.axes, model.weight.array.sharding.spec, strict=True))
    assert placed == {Layers: None, In: "fsdp", Out: "tensor"}
    assert_close(model, wanted)
    assert jax.tree.structure(state) == jax.tree.structure(wanted_state)


@pytest.mark.extended
def test_equinox_with_filter_shard_and_the_module_as_parameters():
    """Functions and sizes among a module's fields have no gradients."""
    model = eqx.nn.MLP(16, 8, 32, depth=1, key=jax.random.key(0))
    numbers = orscale_jax.equinox.dimension_numbers(model)
    tx = orscale(RATE, weight_dimension_numbers=numbers)

    @eqx.filter_jit
    def step(model, state):
        gradients = eqx.filter_grad(lambda m: jnp.mean(jnp.square(jax.vmap(m)(X))))(model)
        updates, state = tx.update(gradients, state, model)
        return eqx.apply_updates(model, updates), state

    def trained(model):
        state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        for _ in range(STEPS):
            model, state = step(model, state)
        return eqx.filter(model, eqx.is_inexact_array)

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        on_mesh = eqx.filter_shard(model, NamedSharding(mesh, P("fsdp")))
        found = trained(on_mesh)
    assert_close(found, trained(model))
