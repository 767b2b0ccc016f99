"""Auto axes whose shardings are known: the program of Explicit axes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import BlockDimensionNumbers, orscale, orthogonalize, state_shardings
from orscale_jax.sharding.param_shardings import ParamSpecs
from tests import small

SPECS = {
    "up": P("fsdp", "tensor"),
    "down": P("tensor", "fsdp"),
    "experts": P("fsdp", None, "tensor"),
    "fused": P(None, "tensor"),
    "grouped": P("fsdp"),
    "bias": P(),
}
SHAPES = {
    "up": (16, 32),
    "down": (32, 16),
    "experts": (4, 8, 16),
    "fused": (16, 48),
    "grouped": (16, 40),
    "bias": (8,),
}
NUMBERS = {
    "up": Dims(0, 1),
    "down": Dims(0, 1),
    "experts": Dims(1, 2),
    "fused": BlockDimensionNumbers(0, 1, block_axis=1, blocks=4),
    "grouped": BlockDimensionNumbers(0, 1, block_axis=1, blocks=(24, 8, 8)),
    "bias": None,
}
slow = pytest.mark.slow
build = functools.partial(orscale, 1e-2, weight_dimension_numbers=NUMBERS)
tree = functools.partial(small.tree, shapes=SHAPES)


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)


def placed(mesh):
    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.device_put((tree(0), tree(1)), (where, where))


def first_update(optimizer, kind):
    """The update, the lowered program's text, and the compiled program's cost."""
    params, grads = placed(mesh_of(kind))
    where = state_shardings(optimizer, params)
    state = jax.jit(optimizer.init, out_shardings=where)(params)
    kept = jax.tree.map(lambda x: x.sharding, params)
    lowered = jax.jit(optimizer.update, out_shardings=(kept, where)).lower(
        grads, state, params
    )
    program = lowered.compile()
    updates, _ = program(grads, state, params)
    return updates, lowered.as_text(), hlo_cost.of(program.as_text())


@functools.cache
def wanted():
    updates, _ = build().update(tree(1), build().init(tree(0)), tree(0))
    return jax.tree.map(np.asarray, updates)


def assert_close(found):
    for name, update in wanted().items():
        np.testing.assert_allclose(found[name], update, rtol=2e-5, atol=1e-6)


GIVEN = {
    "specs": lambda mesh: SPECS,
    "shardings": lambda mesh: jax.tree.map(lambda x: x.sharding, placed(mesh)[0]),
    "arrays": lambda mesh: placed(mesh)[0],
    "abstract": lambda mesh: (
        jax.eval_shape(lambda x: x, placed(mesh)[0])
        | {
            name: jax.ShapeDtypeStruct(
                SHAPES[name], jnp.float32, sharding=NamedSharding(mesh, SPECS[name])
            )
            for name in SHAPES
        }
    ),
    "boxes": lambda mesh: {
        k: nn.Partitioned(1, tuple(spec)) for k, spec in SPECS.items()
    },
    "function": lambda mesh: lambda params: {name: SPECS[name] for name in params},
}


@pytest.mark.extended
@pytest.mark.compiled
def test_the_program_of_explicit_axes():
    """Operations, and the bytes and kinds of collectives; no call to a partitioner."""
    found, text, cost = first_update(build(param_shardings=SPECS), AxisType.Auto)
    assert_close(found)
    assert "CustomSPMDPartitioning" not in text
    _, _, typed = first_update(build(), AxisType.Explicit)
    assert cost.flops == typed.flops
    assert cost.collective_bytes == pytest.approx(typed.collective_bytes, rel=0.02)
    assert cost.looped_bytes == typed.looped_bytes == 0
    # Unknown shardings are left to the partitioner.
    _, text, _ = first_update(build(), AxisType.Auto)
    assert "CustomSPMDPartitioning" in text


@pytest.mark.extended
@pytest.mark.parametrize("name", [n for n in GIVEN if n != "specs"])
def test_accepted_kinds_of_param_shardings(name):
    mesh = mesh_of(AxisType.Auto)
    optimizer = build(param_shardings=GIVEN[name](mesh))
    params, grads = placed(mesh)

    def trace(optimizer):
        state = optimizer.init(params)
        return str(jax.make_jaxpr(optimizer.update)(grads, state, params))

    found, expected = map(trace, (optimizer, build(param_shardings=SPECS)))
    assert found.count("shard_map") == expected.count("shard_map") > 0
    assert "custom_partitioning" not in found
    assert found == expected


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize(
    "given", [P(), pytest.param(SPECS | {"up": P("tensor", "fsdp")}, marks=slow)]
)
def test_other_shardings_cost_a_transfer_and_change_no_number(given):
    found, _, _ = first_update(build(param_shardings=given), AxisType.Auto)
    assert_close(found)


@pytest.mark.parametrize(
    "given, words",
    [
        (SPECS | {"up": P("data")}, r"PartitionSpec.*'data'.*|P\('data'.*'up'.*the axes"),
        (SPECS | {"up": P("fsdp", "fsdp")}, "'up'.*named twice"),
        (SPECS | {"up": P(None, None, "fsdp")}, "'up' of shape .16, 32.*it has 2 axes"),
        (SPECS | {"experts": P(("fsdp", "tensor"))}, "'experts'.*do not divide 4"),
        ({"up": P("fsdp")}, "param_shardings must be a tree"),
        (SPECS | {"up": ("fsdp", None)}, "PartitionSpec .not a tuple."),
        ("fsdp", "param_shardings='fsdp' is not valid"),
    ],
)
def test_bad_param_shardings(given, words):
    params, grads = placed(mesh_of(AxisType.Auto))
    optimizer = build(param_shardings=given)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(optimizer.update, grads, state, params)


def test_explicit_axes_ignore_param_shardings():
    params, grads = placed(mesh_of(AxisType.Explicit))
    optimizer = build(param_shardings={"nonsense": P("nowhere")})
    jax.eval_shape(optimizer.update, grads, optimizer.init(params), params)


def shard_map_alone(optimizer, grads, state, params):
    # A new function each time: JAX caches the trace of one that it has seen.
    trace = jax.make_jaxpr(lambda *args: optimizer.update(*args))
    jaxpr = str(trace(grads, state, params))
    return "shard_map" in jaxpr and "custom_partitioning" not in jaxpr


@pytest.mark.extended
@pytest.mark.parametrize("wrap", [lambda f: f, optax.inject_hyperparams])
def test_annotations_are_found_without_an_argument(wrap):
    """A factory that knows no parameters; an update that sees bare arrays."""
    optimizer = wrap(orscale)(learning_rate=1e-2)
    params, grads = placed(mesh_of(AxisType.Auto))
    boxed = {
        f"dense_{k}": nn.Partitioned(params[k], tuple(SPECS[k])) for k in ("up", "down")
    }
    state = nn.meta.unbox(jax.eval_shape(optimizer.init, boxed))
    grads, params = (
        {f"dense_{k}": x[k] for k in ("up", "down")} for x in (grads, params)
    )
    assert shard_map_alone(optimizer, grads, state, params)
    # The last boxes of these names and shapes count.
    jax.eval_shape(optimizer.init, jax.tree.map(nnx.Param, params))
    assert not shard_map_alone(optimizer, grads, state, params)


def test_a_mesh_is_no_tree_of_shardings():
    with pytest.raises(ValueError, match=r"param_shardings=.* pass a mesh as mesh="):
        build(param_shardings=mesh_of(AxisType.Auto))


def test_annotations_beside_leaves_that_are_no_parameters():
    """None among the leaves, a NamedSharding for an annotation."""
    optimizer = orscale(1e-2)
    mesh = mesh_of(AxisType.Auto)
    params, grads = placed(mesh)
    where = NamedSharding(mesh, SPECS["up"])
    boxed = {"a_up": nnx.Param(params["up"], out_sharding=where), "none": None}
    state = optimizer.init(boxed)
    for tree in optax.tree.get_all_with_path(state, "calibration"):
        assert tree[1]["a_up"].get_metadata("out_sharding").spec == P()
    state = jax.tree.map(lambda x: x, nnx.as_pure(state))
    grads, params = ({"a_up": x["up"], "none": None} for x in (grads, params))
    assert shard_map_alone(optimizer, grads, state, params)


@pytest.mark.extended
def test_annotations_do_not_stand_in_the_way_of_vmap():
    """Annotations of another model name the axis over which this one is mapped."""
    mesh = mesh_of(AxisType.Auto)
    stage = orthogonalize()
    stage.init({"b_up": nn.Partitioned(jnp.ones((8, 16)), ("fsdp", "tensor"))})
    population = jax.device_put(jnp.ones((4, 8, 16)), NamedSharding(mesh, P("fsdp")))

    def update(x):
        return stage.update({"b_up": x}, ())[0]["b_up"]

    with jax.set_mesh(mesh):
        mapped = jax.vmap(update, spmd_axis_name="fsdp")
        assert jax.eval_shape(mapped, population).shape == (4, 8, 16)
        stage = orthogonalize(param_shardings=P("fsdp", "tensor"))
        mapped = jax.vmap(lambda x: update(x), spmd_axis_name="fsdp")
        with pytest.raises(ValueError, match=r"jax.vmap maps over \['fsdp'\] here"):
            jax.eval_shape(mapped, population)


def test_annotations_of_another_mesh_are_ignored():
    optimizer = orscale(1e-2)
    params, grads = placed(mesh_of(AxisType.Auto))
    boxed = {"other_up": nn.Partitioned(params["up"], ("data", "model"))}
    state = nn.meta.unbox(jax.eval_shape(optimizer.init, boxed))
    args = ({"other_up": x["up"]} for x in (grads, params))
    grads, params = args
    assert not shard_map_alone(optimizer, grads, state, params)


def test_logical_names_are_those_of_the_rules_in_effect():
    optimizer = orscale(1e-2)
    params, grads = placed(mesh_of(AxisType.Auto))
    with nn.logical_axis_rules((("rows", "fsdp"), ("columns", "tensor"))):
        names = ("rows", "columns")
        boxed = {"logical_up": nn.LogicallyPartitioned(params["up"], names)}
        state = nn.meta.unbox(jax.eval_shape(optimizer.init, boxed))
    grads, params = ({"logical_up": x["up"]} for x in (grads, params))
    assert shard_map_alone(optimizer, grads, state, params)


@pytest.mark.extended
def test_norms_of_sharded_matrices_are_those_of_whole_ones():
    """On a mesh of GPUs a public trainer counted them 2.5 to 7 times."""
    optimizer = build(param_shardings=SPECS)
    params, grads = placed(mesh_of(AxisType.Auto))
    _, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    _, alone = optimizer.update(tree(1), optimizer.init(tree(0)), tree(0))
    for name in ("calibration", "raw_trust_ratio"):
        found, expected = (optax.tree.get(s, name) for s in (state, alone))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), found, expected
        )


@pytest.mark.quick_first_case
@pytest.mark.parametrize("given", [None, P("tensor")])
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit)])
def test_a_population_mapped_over_an_axis_of_the_mesh(kind, given):
    """Devices along it have different matrices, and not replicas to share the work."""
    mesh = mesh_of(kind)
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
    mesh = mesh_of(AxisType.Explicit)
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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_models_of_equal_names_keep_their_own_annotations(order):
    mesh, tree = mesh_of(AxisType.Auto).abstract_mesh, {"twin": jnp.ones((8, 16))}
    names = ("fsdp", "tensor"), ("tensor", "fsdp")
    specs = ParamSpecs(None), ParamSpecs(None)
    for i in order:
        specs[i].note_annotations({"twin": nn.Partitioned(tree["twin"], names[i])})
        specs[i].note_annotations(tree)  # Bare arrays say nothing.
    for own, axes in zip(specs, names, strict=True):
        assert own.on(mesh, tree) == {"twin": P(*axes)}
    # One that was never initialized, as in optax.inject_hyperparams, cannot know.
    with pytest.warns(UserWarning, match="'twin' .* annotated in two ways"):
        assert ParamSpecs(None).on(mesh, tree) is None


def test_parameters_without_annotations_are_not_those_of_another_model():
    mesh, tree = mesh_of(AxisType.Auto).abstract_mesh, {"only": jnp.ones((8, 16))}
    annotated, plain = ParamSpecs(None), ParamSpecs(None)
    annotated.note_annotations({"only": nn.Partitioned(tree["only"], ("fsdp", None))})
    plain.note_annotations({"only": nnx.Param(tree["only"])})
    assert plain.on(mesh, tree) is None
    assert annotated.on(mesh, tree) == {"only": P("fsdp", None)}
