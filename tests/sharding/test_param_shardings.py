"""Auto axes whose shardings are known: the program of Explicit axes."""

import copy
import functools
import warnings

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from examples.benchmarks import hlo_cost
from orscale_jax import (
    BlockDimensionNumbers,
    assert_same_on,
    check_state,
    describe,
    orscale,
    orthogonalize,
    state_shardings,
)
from orscale_jax.sharding.param_shardings import ParamSpecs
from tests import runs
from tests.runs import AUTO, EXPLICIT, equations, mesh_of, numbers_of

SPECS = {
    "up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"),
    "experts": P("fsdp", None, "tensor"), "fused": P(None, "tensor"),
    "grouped": P("fsdp"), "bias": P(),
}  # fmt: skip
SHAPES = {
    "up": (16, 32), "down": (32, 16), "experts": (4, 8, 16), "fused": (16, 48),
    "grouped": (16, 40), "bias": (8,),
}  # fmt: skip
NUMBERS = numbers_of(SHAPES) | {
    "fused": BlockDimensionNumbers(0, 1, block_axis=1, blocks=4),
    "grouped": BlockDimensionNumbers(0, 1, block_axis=1, blocks=(24, 8, 8)),
}
MESH = {"fsdp": 4, "tensor": 2}
slow = pytest.mark.slow
build = functools.partial(orscale, 1e-2, weight_dimension_numbers=NUMBERS)
tree = functools.partial(runs.tree, shapes=SHAPES)


def placed(mesh):
    return tuple(runs.placed(tree(seed), mesh, SPECS) for seed in (0, 1))


def first_update(optimizer, kind):
    """The update, and the compiled program's cost."""
    params, grads = placed(mesh_of(MESH, kind))
    where = state_shardings(optimizer, params)
    state = jax.jit(optimizer.init, out_shardings=where)(params)
    kept = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(optimizer.update, out_shardings=(kept, where))
    program = update.lower(grads, state, params).compile()
    updates, _ = program(grads, state, params)
    return updates, hlo_cost.of(program.as_text())


@functools.cache
def wanted():
    return build().update(tree(1), build().init(tree(0)), tree(0))[0]


def assert_close(found):
    runs.assert_close(found, wanted(), rtol=2e-5, atol=1e-6)


GIVEN = {
    "shardings": lambda mesh: jax.tree.map(lambda x: x.sharding, placed(mesh)[0]),
    "arrays": lambda mesh: placed(mesh)[0],
    "abstract": lambda mesh: {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in placed(mesh)[0].items()
    },
    "boxes": lambda mesh: {k: nn.Partitioned(1, tuple(s)) for k, s in SPECS.items()},
    "function": lambda mesh: lambda params: {name: SPECS[name] for name in params},
}


@pytest.mark.extended
@pytest.mark.compiled
def test_the_program_of_explicit_axes():
    _, typed = first_update(build(), EXPLICIT)
    # Given, and seen by state_shardings.
    for optimizer in (build(param_shardings=SPECS), build()):
        found, cost = first_update(optimizer, AUTO)
        assert_close(found)
        assert cost.flops == typed.flops
        assert cost.collective_bytes == pytest.approx(typed.collective_bytes, rel=0.02)
        assert cost.looped_bytes == typed.looped_bytes == 0


@pytest.mark.extended
@pytest.mark.parametrize("name", GIVEN)
def test_accepted_kinds_of_param_shardings(name):
    mesh = mesh_of(MESH)
    params, grads = placed(mesh)

    def trace(given):
        optimizer = build(param_shardings=given)
        state = optimizer.init(params)
        return str(jax.make_jaxpr(optimizer.update)(grads, state, params))

    found, expected = trace(GIVEN[name](mesh)), trace(SPECS)
    assert found.count("shard_map") == expected.count("shard_map") > 0
    assert found == expected


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize(
    "given", [P(), pytest.param(SPECS | {"up": P("tensor", "fsdp")}, marks=slow)]
)
def test_other_shardings_cost_a_transfer_and_change_no_number(given):
    found, _ = first_update(build(param_shardings=given), AUTO)
    assert_close(found)


@pytest.mark.parametrize(
    "given, words",
    [
        (SPECS | {"up": P("data")}, r"PartitionSpec.*'data'.*|P\('data'.*'up'.*the axes"),
        (SPECS | {"up": P("fsdp", "fsdp")}, "'up'.*named twice"),
        (
            SPECS | {"up": P(None, None, "fsdp")},
            "'up' of shape .16, 32.*has fewer axes",
        ),
        (SPECS | {"experts": P(("fsdp", "tensor"))}, "'experts'.*do not divide 4"),
        ({"up": P("fsdp")}, "param_shardings must be a tree"),
        (SPECS | {"up": ("fsdp", None)}, "PartitionSpec .not a tuple."),
        ("fsdp", "param_shardings='fsdp' is not valid"),
    ],
)
def test_bad_param_shardings(given, words):
    params, grads = placed(mesh_of(MESH))
    optimizer = build(param_shardings=given)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(optimizer.update, grads, state, params)


def test_explicit_axes_ignore_param_shardings():
    params, grads = placed(mesh_of(MESH, EXPLICIT))
    optimizer = build(param_shardings={"nonsense": P("nowhere")})
    jax.eval_shape(optimizer.update, grads, optimizer.init(params), params)


# What an optimizer learns.


def specs_of(optimizer, grads, state, params):
    """The shardings that a step takes its arrays for; None where it assumes them."""
    # A new function each time: JAX caches the trace of one that it has seen.
    trace = jax.make_jaxpr(lambda *args: optimizer.update(*args))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpr = trace(grads, state, params)
    if any("pass param_shardings, or call init" in str(w.message) for w in caught):
        return None
    assert not caught
    [first, *_] = equations(jaxpr.jaxpr, "shard_map")
    return [spec for spec in first.params["in_specs"] if len(spec) > 1]


def one(name="up", kind=AUTO, mesh=None, spec=None):
    """One parameter and its gradient."""
    mesh = mesh or mesh_of(MESH, kind)
    where = NamedSharding(mesh, SPECS[name] if spec is None else spec)
    return [{name: jax.device_put(tree(seed)[name], where)} for seed in (0, 1)]


def see_placed(optimizer, params):
    return optimizer.init(params)


def see_abstract(optimizer, params):
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    where = state_shardings(optimizer, abstract)
    return jax.jit(optimizer.init, out_shardings=where)(params)


@pytest.mark.parametrize("see", [see_placed, see_abstract])
def test_init_and_state_shardings_remember_bare_parameters(see):
    params, grads = one()
    optimizer = orscale(1e-2)
    state = see(optimizer, params)
    assert specs_of(optimizer, grads, state, params) == [P("fsdp", "tensor")]
    updates, _ = jax.jit(optimizer.update)(grads, state, params)
    assert updates["up"].sharding.is_equivalent_to(params["up"].sharding, 2)


@pytest.mark.parametrize(
    "clone", [lambda x: cloudpickle.loads(cloudpickle.dumps(x)), copy.deepcopy]
)
def test_what_is_remembered_can_be_pickled_copied_and_hashed(clone):
    params, grads = one()
    specs = ParamSpecs(None)
    specs.learn(params)
    again = clone(specs)
    mesh = mesh_of(MESH).abstract_mesh
    traced = jax.eval_shape(lambda x: again.on(mesh, x) and x, grads)
    assert jax.tree.structure(traced) == jax.tree.structure(grads)
    assert again.on(mesh, grads) == [P("fsdp", "tensor")]
    assert {specs: 1}[specs] and again != specs
    stage = orthogonalize()
    stage.init(params)
    assert specs_of(clone(stage), grads, (), params) == [P("fsdp", "tensor")]


def test_an_init_that_is_traced_tells_nothing_and_forgets_nothing():
    params, grads = one()
    optimizer = orscale(1e-2)
    state = jax.jit(optimizer.init)(params)
    words = r"parameter 'up' of shape .16, 32. on the mesh .*'fsdp': 4.* param_shardings"
    with pytest.warns(UserWarning, match=words):
        updates, _ = jax.jit(optimizer.update)(grads, state, params)
    runs.assert_close(updates["up"], wanted_alone("up"), rtol=2e-5, atol=1e-6)
    # The two remedies of the warning.
    given = orscale(1e-2, param_shardings=SPECS["up"])
    assert specs_of(given, grads, state, params) == [P("fsdp", "tensor")]
    optimizer.init(params)
    jax.jit(lambda p: optimizer.init(p))(params)
    assert specs_of(optimizer, grads, state, params) == [P("fsdp", "tensor")]


def check_eagerly(optimizer, params):
    check_state(orscale(1e-2).init(params), optimizer, params)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "audit",
    [
        lambda optimizer, params: describe(params, optimizer),
        check_eagerly,
        lambda optimizer, params: describe(params, optimizer, probe=True),
        lambda optimizer, params: assert_same_on(mesh_of(MESH), optimizer, params),
    ],
)
def test_an_audit_teaches_an_optimizer_nothing(audit):
    params, grads = one()
    optimizer = orscale(1e-2)
    audit(optimizer, params)
    state = jax.jit(optimizer.init)(params)
    assert specs_of(optimizer, grads, state, params) is None
    # Nor does it keep a trace of init, in which a later init would learn nothing.
    boxed = {"up": nn.Partitioned(params["up"], ("fsdp", "tensor"))}
    audit(optimizer, boxed)
    state = jax.jit(optimizer.init)(boxed)
    bare = nn.unbox(state)
    assert specs_of(optimizer, grads, bare, params) == [P("fsdp", "tensor")]
    # Nor does it forget what the optimizer knew.
    audit(optimizer, one(spec=P(None, "fsdp"))[0])
    assert specs_of(optimizer, grads, bare, params) == [P("fsdp", "tensor")]


def wanted_alone(name):
    optimizer = orscale(1e-2)
    params, grads = ({name: tree(seed)[name]} for seed in (0, 1))
    return optimizer.update(grads, optimizer.init(params), params)[0][name]


@pytest.mark.extended
def test_optimizers_models_and_meshes_do_not_confuse_each_other():
    other = mesh_of({"tensor": 2, "fsdp": 4}, AUTO)
    models = {
        "first": one(),
        "another name": one("down"),
        "another mesh": one(mesh=other, spec=P("tensor", "fsdp")),
    }
    optimizer, stranger = orscale(1e-2), orscale(1e-2)
    states = {name: optimizer.init(params) for name, (params, _) in models.items()}
    stranger.init(one(spec=P(None, "tensor"))[0])
    for name, (params, grads) in models.items():
        [leaf] = params.values()
        found = specs_of(optimizer, grads, states[name], params)
        assert found in ([leaf.sharding.spec], [P("fsdp", "tensor")])
        updates, _ = jax.jit(optimizer.update)(grads, states[name], params)
        [update] = updates.values()
        assert update.sharding.is_equivalent_to(leaf.sharding, 2)
        runs.assert_close(update, wanted_alone(next(iter(params))), rtol=2e-5, atol=1e-6)
    params, grads = one(spec=P(None, "fsdp"))
    optimizer.init(params)  # The same parameter, on the same mesh, sharded otherwise.
    with pytest.warns(UserWarning, match=r"'up'.* as .*'tensor'.* for each model"):
        jax.jit(lambda *x: optimizer.update(*x))(grads, states["first"], params)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
@pytest.mark.parametrize("known", [True, False])
def test_axes_of_both_kinds(kinds, known):
    params, grads = one(mesh=(mesh := mesh_of(MESH, *kinds)))
    optimizer = orscale(1e-2)
    with jax.set_mesh(mesh):
        state = (optimizer.init if known else jax.jit(optimizer.init))(params)
    assert (specs_of(optimizer, grads, state, params) is not None) == known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not known else "error")
        updates, _ = jax.jit(optimizer.update)(grads, state, params)
    runs.assert_close(updates["up"], wanted_alone("up"), rtol=2e-5, atol=1e-6)
    assert updates["up"].sharding.is_equivalent_to(params["up"].sharding, 2) or not known


def test_annotations_are_found_without_an_argument():
    """By an update that sees bare arrays."""
    optimizer = orscale(learning_rate=1e-2)
    params, grads = placed(mesh_of(MESH))
    boxed = {k: nn.Partitioned(params[k], tuple(SPECS[k])) for k in ("up", "down")}
    state = nn.meta.unbox(jax.eval_shape(optimizer.init, boxed))
    grads, params = ({k: x[k] for k in boxed} for x in (grads, params))
    known = [SPECS["down"], SPECS["up"]]
    assert specs_of(optimizer, grads, state, params) == known
    # The last boxes of these names and shapes count.
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    jax.eval_shape(optimizer.init, jax.tree.map(nnx.Param, abstract))
    assert specs_of(optimizer, grads, state, params) is None


def test_inject_hyperparams_needs_param_shardings():
    """The optimizer that it makes for `update` was never initialized."""
    params, grads = one()
    make = optax.inject_hyperparams(orscale)
    optimizer = make(learning_rate=1e-2)
    state = optimizer.init(params)
    assert specs_of(optimizer, grads, state, params) is None
    given = make(learning_rate=1e-2, param_shardings=SPECS["up"])
    assert specs_of(given, grads, state, params) == [SPECS["up"]]


def test_a_mesh_is_no_tree_of_shardings():
    with pytest.raises(ValueError, match=r"param_shardings=.* pass a mesh as mesh="):
        build(param_shardings=mesh_of(MESH))


def test_annotations_beside_leaves_that_are_no_parameters():
    """None among the leaves, a NamedSharding for an annotation."""
    optimizer = orscale(1e-2)
    mesh = mesh_of(MESH)
    params, grads = placed(mesh)
    where = NamedSharding(mesh, SPECS["up"])
    boxed = {"a_up": nnx.Param(params["up"], out_sharding=where), "none": None}
    state = optimizer.init(boxed)
    for tree in optax.tree.get_all_with_path(state, "numbers"):
        assert tree[1]["a_up"].get_metadata("out_sharding").spec == P(None)
    state = jax.tree.map(lambda x: x, nnx.as_pure(state))
    grads, params = ({"a_up": x["up"], "none": None} for x in (grads, params))
    assert specs_of(optimizer, grads, state, params) == [SPECS["up"]]


@pytest.mark.extended
def test_annotations_do_not_stand_in_the_way_of_vmap():
    """Annotations of another model name the axis over which this one is mapped."""
    mesh = mesh_of(MESH)
    stage = orthogonalize()
    stage.init({"b_up": nn.Partitioned(jnp.ones((8, 16)), ("fsdp", "tensor"))})
    population = jax.device_put(jnp.ones((4, 8, 16)), NamedSharding(mesh, P("fsdp")))

    def update(x):
        return stage.update({"b_up": x}, ())[0]["b_up"]

    with jax.set_mesh(mesh):
        mapped = jax.vmap(update, spmd_axis_name="fsdp")
        with pytest.warns(UserWarning, match="pass param_shardings"):
            assert jax.eval_shape(mapped, population).shape == (4, 8, 16)
        stage = orthogonalize(param_shardings=P("fsdp", "tensor"))
        mapped = jax.vmap(lambda x: update(x), spmd_axis_name="fsdp")
        with pytest.raises(ValueError, match=r"jax.vmap maps over \['fsdp'\] here"):
            jax.eval_shape(mapped, population)


def after_boxes(of_up, name):
    """Whether a step of bare arrays is sharded as their boxes were, seen by init."""
    optimizer = orscale(1e-2)
    params, grads = placed(mesh_of(MESH))
    boxed = {name: of_up(params["up"])}
    state = nn.meta.unbox(jax.eval_shape(optimizer.init, boxed))
    grads, params = ({name: x["up"]} for x in (grads, params))
    return specs_of(optimizer, grads, state, params) == [SPECS["up"]]


def test_annotations_of_another_mesh_are_ignored():
    assert not after_boxes(lambda x: nn.Partitioned(x, ("data", "model")), "other_up")


def test_logical_names_are_those_of_the_rules_in_effect():
    names = ("rows", "columns")
    with nn.logical_axis_rules((("rows", "fsdp"), ("columns", "tensor"))):
        assert after_boxes(lambda x: nn.LogicallyPartitioned(x, names), "logical_up")


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "kind, given", [(AUTO, P("tensor")), (EXPLICIT, None), (EXPLICIT, P("tensor"))]
)
def test_a_population_mapped_over_an_axis_of_the_mesh(kind, given):
    """Devices along it have different matrices, and not replicas to share the work."""
    mesh = mesh_of(MESH, kind)
    population = np.random.default_rng(2).normal(size=(4, 8, 16)).astype(np.float32)
    spec = P("fsdp", "tensor")
    sharded = jax.device_put(population, NamedSharding(mesh, spec))
    stage = orthogonalize(param_shardings=given)

    def update(x):
        return stage.update({"w": x}, stage.init({"w": x}))[0]["w"]

    with jax.set_mesh(mesh):
        found = jax.jit(jax.vmap(update, spmd_axis_name="fsdp"))(sharded)
    assert found.sharding.is_equivalent_to(sharded.sharding, 3)
    wanted = jax.vmap(update)(population)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_manual_axes_beside_sharded_explicit_ones():
    mesh = mesh_of(MESH, EXPLICIT)
    optimizer = orscale(1e-2)

    @functools.partial(
        jax.shard_map, in_specs=P(), out_specs=P(), axis_names={"fsdp"}, check_vma=False
    )
    def update(x):
        return optimizer.update({"w": x}, optimizer.init({"w": x}), {"w": x})[0]["w"]

    with jax.set_mesh(mesh):
        x = jax.device_put(tree(0)["up"], NamedSharding(mesh, P(None, "tensor")))
        with pytest.raises(ValueError, match=r"shard_map over \['fsdp'\].*\['tensor'\]"):
            jax.jit(update)(x)
