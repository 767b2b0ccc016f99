"""On 8 virtual devices: the values of one device, without redundant work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import BlockDimensionNumbers, orscale, orthogonalize, state_shardings
from orscale_jax.distributed.platforms import AUTO_TPU
from tests import runs
from tests.platforms import orthogonalize_as
from tests.runs import (
    AUTO,
    EXPLICIT,
    assert_close,
    first_update,
    mesh_of,
    numbers_of,
    placed,
    tree,
)

# Eight of a shape and its transpose, fewer than devices, experts, and what takes AdamW.
SHAPES = {
    **{f"up{i}": (16, 32) for i in range(8)},
    **{f"down{i}": (32, 16) for i in range(8)},
    **{f"odd{i}": (24, 24) for i in range(3)},
    "experts": (8, 32, 16),
    "bias": (16,),
}
NUMBERS = numbers_of(SHAPES)
rng_tree = functools.partial(tree, shapes=SHAPES)
step_of = functools.partial(runs.step_of, donate_argnums=(0, 1))


def on(mesh, spec):
    """The shardings of the tree: of vectors, everywhere."""
    specs = {name: spec(len(s)) if len(s) > 1 else P() for name, s in SHAPES.items()}
    return {name: NamedSharding(mesh, of) for name, of in specs.items()}


def on_the_rows(*axes):
    return lambda rank: P(*[None] * (rank - 2), axes)


def layers(rank):
    return P("expert") if rank == 3 else P(None, "expert")


LAYOUTS = {  # The mesh, and the spec of a leaf of matrices by its rank.
    "rows × columns": (
        {"fsdp": 4, "tensor": 2},
        lambda rank: P(*[None] * (rank - 2), "fsdp", "tensor"),
    ),
    "replicated": ({"data": 8}, lambda rank: P()),
    "rows": ({"fsdp": 8}, on_the_rows("fsdp")),
    "columns": ({"fsdp": 8}, lambda rank: P(*[None] * (rank - 1), "fsdp")),
    "rows, copies": ({"data": 2, "fsdp": 4}, on_the_rows("fsdp")),
    "rows over both": ({"data": 2, "fsdp": 4}, on_the_rows("data", "fsdp")),
    "experts": ({"expert": 8}, layers),
    "experts × rows": (
        {"expert": 4, "fsdp": 2},
        lambda rank: P("expert", "fsdp") if rank == 3 else P(("expert", "fsdp")),
    ),
}


OPTIMIZER = orscale(0.02, weight_dimension_numbers=NUMBERS)


@functools.cache
def expected(steps=2):
    params, state = rng_tree(0), OPTIMIZER.init(rng_tree(0))
    step = step_of(OPTIMIZER)
    for seed in range(1, steps + 1):
        params, state = step(params, state, rng_tree(seed))
    return jax.tree.map(np.asarray, (params, state))


@functools.cache
def flops_alone():
    """FLOPs of Newton–Schulz on one device, from the compiled program."""
    grads = jax.tree.map(jnp.asarray, rng_tree(1))
    lowered = step_of(OPTIMIZER).lower(rng_tree(0), OPTIMIZER.init(grads), grads)
    return hlo_cost.of(lowered.compile().as_text()).flops


# Layouts whose cases the others cover.
SLOW = {"columns", "rows", "rows, copies", "rows over both", "experts × rows"}


@pytest.mark.quick_first_case
@pytest.mark.compiled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in LAYOUTS
    ],
)
def test_a_step_is_that_of_one_device(layout, kind):
    sizes, spec = LAYOUTS[layout]
    mesh = mesh_of(sizes, kind)
    where = on(mesh, spec)
    params = jax.device_put(rng_tree(0), where)
    of_state = state_shardings(OPTIMIZER, params)
    with jax.set_mesh(mesh):
        state = jax.jit(OPTIMIZER.init, out_shardings=of_state)(params)
        step = step_of(OPTIMIZER, out_shardings=(where, of_state))
        types = jax.tree.map(jax.typeof, (params, state))
        for seed in (1, 2):
            grads = jax.device_put(rng_tree(seed), where)
            params, state = step(params, state, grads)
        program = step.lower(params, state, grads).compile().as_text()
    assert step._cache_size() == 1
    assert_close((params, state), expected())
    assert jax.tree.map(jax.typeof, (params, state)) == types
    assert all(params[name].sharding == where[name] for name in params)

    cost = hlo_cost.of(program)
    assert cost.looped_bytes == 0
    kinds = [collective.kind for collective in cost.collectives]
    assert set(kinds) <= {"all-to-all", "all-gather", "all-reduce"}
    # One for all norms, and one for which matrices have received a gradient.
    assert kinds.count("all-reduce") <= 2 * len(sizes)
    assert ("all-gather" in kinds) == (layout in ("replicated", "rows, copies"))
    # Of eight devices, five have zeros where there are three matrices.
    assert cost.flops <= 1.15 * (flops_alone() + 5 * odd_flops()) / 8


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_float64_that_a_context_enables(enable_x64, kind):
    """On Auto axes XLA calls back on a thread outside of the context."""
    mesh = mesh_of({"data": 8}, kind)
    shapes = {name: SHAPES[name] for name in ("up0", "experts")}
    params, grads = (tree(seed, np.float64, shapes) for seed in (0, 1))
    numbers = numbers_of(shapes)
    optimizer = orscale(0.02, ns_dtype=jnp.float64, weight_dimension_numbers=numbers)
    alone, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    params, grads = (placed(values, mesh, P("data")) for values in (params, grads))
    with jax.set_mesh(mesh):
        found, _, _ = first_update(optimizer, params, grads)
    assert {update.dtype for update in found.values()} == {np.dtype(np.float64)}
    assert_close(found, alone, rtol=1e-10, atol=1e-14)


def odd_flops():
    return 5 * 3 * 2 * 24**3


@pytest.mark.compiled
@pytest.mark.parametrize(
    "ns_dtype, platform, sent", [(jnp.bfloat16, "cpu", "xbf16>"), (None, "cuda", "xf16>")]
)
def test_two_bytes_travel(ns_dtype, platform, sent):
    mesh = mesh_of({"fsdp": 8}, EXPLICIT)
    where = NamedSharding(mesh, P("fsdp"))
    grads = {
        f"w{i}": jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=where)
        for i in range(8)
    }
    stage = orthogonalize(ns_dtype=ns_dtype)
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda g: stage.update(g, ())[0]).trace(grads)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    exchanges = [line for line in text.splitlines() if "all_to_all" in line]
    assert len(exchanges) == 2 and all(sent in line for line in exchanges)


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("layout", ["rows × columns", "rows", "replicated"])
def test_as_on_tpus_on_auto_axes(layout):
    single = [name for name, shape in SHAPES.items() if len(shape) == 2]
    grads = {name: rng_tree(1)[name] for name in single}
    wanted, _ = orthogonalize().update(grads, ())
    update = jax.jit(lambda g: orthogonalize().update(g, ())[0])
    alone = hlo_cost.of(update.lower(grads).compile().as_text())

    stage = orthogonalize_as(AUTO_TPU)
    sizes, spec = LAYOUTS[layout]
    where = {name: on(mesh_of(sizes), spec)[name] for name in single}
    sharded = jax.device_put(grads, where)
    update = jax.jit(lambda g: stage.update(g, ())[0], out_shardings=where)
    program = update.lower(sharded).compile()
    assert_close(program(sharded), wanted)
    cost = hlo_cost.of(program.as_text())
    assert cost.looped_bytes == 0
    assert cost.flops <= 1.15 * (alone.flops + 5 * odd_flops()) / 8
    if layout == "rows":
        kinds = {collective.kind for collective in cost.collectives}
        assert kinds == {"all-reduce", "all-to-all"}


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)])
def test_state_sharded_and_parameters_copied(kind):
    """ZeRO-1: parameters and gradients on every device, the state over all of them."""
    mesh = mesh_of({"data": 8}, kind)
    copied = on(mesh, lambda rank: P())
    zero = on(mesh, lambda rank: P(*[None] * (rank - 2), "data"))
    params = jax.device_put(rng_tree(0), copied)
    of_state = state_shardings(OPTIMIZER, jax.device_put(rng_tree(0), zero))
    step = step_of(OPTIMIZER, out_shardings=(copied, of_state))
    with jax.set_mesh(mesh):
        state = jax.jit(OPTIMIZER.init, out_shardings=of_state)(params)
        types = jax.tree.map(jax.typeof, (params, state))
        for seed in (1, 2):
            grads = jax.device_put(rng_tree(seed), copied)
            params, state = step(params, state, grads)
        updates, _ = jax.jit(OPTIMIZER.update)(grads, state, params)
    assert_close((params, state), expected())
    assert jax.tree.map(jax.typeof, (params, state)) == types
    assert jax.tree.map(jax.typeof, updates) == types[0]
    assert optax.tree.get(state, "trace")["up0"].sharding.spec == P("data", None)


@pytest.mark.extended
@pytest.mark.parametrize(
    "of_params, of_grads, of_state",
    [(P("data"), P("data"), P()), (P(), P("data"), P()), (P(), P(), P("data"))],
)
def test_layers_sharded_where_the_state_is_not_and_the_reverse(
    of_params, of_grads, of_state
):
    """The small arrays of the state are not where the matrices are."""
    mesh = mesh_of({"data": 8}, EXPLICIT)
    optimizer = orscale(0.02, weight_dimension_numbers=Dims(1, 2))
    weight, grad = (rng_tree(seed)["experts"] for seed in (0, 1))
    expected = optimizer.update(grad, optimizer.init(weight), weight)
    params, grads, owned = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((weight, of_params), (grad, of_grads), (weight, of_state))
    )
    with jax.set_mesh(mesh):
        where = state_shardings(optimizer, owned)
        state = jax.jit(optimizer.init, out_shardings=where)(params)
        found = jax.jit(optimizer.update)(grads, state, params)
    assert_close(found, expected)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, (params, state))


@pytest.mark.extended
def test_blocks_of_a_single_column():
    """The flags of blocks that have started have the leaf's shape, but no sharding."""
    mesh = mesh_of({"data": 8}, EXPLICIT)
    numbers = BlockDimensionNumbers(0, 1, block_axis=0, blocks=(3, 5))
    optimizer = orscale(0.02, weight_dimension_numbers=numbers)
    weight, grad = (rng_tree(seed)["up0"][:8, :1] for seed in (0, 1))
    expected, _ = optimizer.update(grad, optimizer.init(weight), weight)
    where = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        found, _, _ = first_update(optimizer, *jax.device_put((weight, grad), where))
    assert_close(found, expected)


def equations(jaxpr, name):
    """The equations of a primitive, inner calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, name)


@pytest.mark.extended
@pytest.mark.parametrize("grads_are", ["copied", "sharded"])
def test_only_narrow_arrays_are_gathered_for_copied_parameters(grads_are):
    """ZeRO-1 and 2: Q in ns_dtype is gathered, and no update, though W is replicated."""
    mesh = mesh_of({"data": 8}, EXPLICIT)
    shapes = {"a": (16, 24), "b": (16, 24), "layers": (8, 4, 6), "bias": (24,)}

    def typed(x, where):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def abstract(axis):
        specs = {name: P(*[None] * (len(s) - 1), axis) for name, s in shapes.items()}
        specs = specs | {"layers": P(axis)}
        where = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        return {k: typed(x, where[k]) for k, x in tree(0, shapes=shapes).items()}

    numbers = numbers_of(shapes)
    optimizer = orscale(1e-3, ns_dtype=jnp.bfloat16, weight_dimension_numbers=numbers)
    params = abstract(None)
    grads = params if grads_are == "copied" else abstract("data")
    of_state = state_shardings(optimizer, abstract("data"))
    state = jax.tree.map(typed, jax.eval_shape(optimizer.init, params), of_state)
    with jax.set_mesh(mesh):
        traced = jax.jit(optimizer.update).trace(grads, state, params)
    moved = [equation.invars[0].aval for equation in equations(traced.jaxpr, "reshard")]
    leaves = {shape for shape in shapes.values() if len(shape) > 1}
    gathered = [x for x in moved if x.shape in leaves and any(x.sharding.spec)]
    branches = 3  # CPU, TPU and the other platforms; CPU takes them from here.
    assert len(gathered) == 3 * branches
    assert {x.dtype for x in gathered} == {jnp.dtype(jnp.bfloat16)}
    updates, _ = traced.out_info
    assert not any(any(x.sharding.spec) for x in updates.values())


@pytest.mark.extended
@pytest.mark.compiled
def test_auto_axes_made_explicit_for_the_optimizer():
    """The recipe of docs/sharding.md for TPUs."""
    mesh = mesh_of({"fsdp": 8}, AUTO)
    where = on(mesh, on_the_rows("fsdp"))
    params, grads = (jax.device_put(rng_tree(seed), where) for seed in (0, 1))
    of_state = state_shardings(OPTIMIZER, params)
    specs = jax.tree.map(lambda sharding: sharding.spec, (where, of_state, where))
    with jax.set_mesh(mesh):
        state = jax.jit(OPTIMIZER.init, out_shardings=of_state)(params)
        update = jax.jit(jax.sharding.explicit_axes(OPTIMIZER.update, in_sharding=specs))
        found, _ = update(grads, state, params)
        text = update.lower(grads, state, params).as_text()
    assert "CustomSPMDPartitioning" not in text and "all_to_all" in text
    alone, _ = OPTIMIZER.update(rng_tree(1), OPTIMIZER.init(rng_tree(0)), rng_tree(0))
    assert_close(found, alone)


# Sizes of the mesh, the sharding, the arrays, and the arguments of the stage.
STAGES = {
    "aol_scales_the_rows_of_squares": (
        *({"fsdp": 8}, P(None, "fsdp"), {"w": SHAPES["odd0"]}),
        {"ns_preconditioning": "aol"},
    ),
    # Four devices share each matrix, whose columns this axis divides in name only.
    "an_axis_of_one_device": (
        *({"data": 8, "tensor": 1}, P(None, "tensor")),
        *({"up": (8, 16), "small": (4, 4)}, {}),
    ),
    "arrays_without_entries": (
        *({"fsdp": 8}, P(None, "fsdp")),
        {"none": (0, 16, 8), "narrow": (1, 16, 0), "w": (1, 16, 8)},
        {"weight_dimension_numbers": Dims(1, 2)},
    ),
    "without_jit": ({"fsdp": 8}, P("fsdp"), {"w": SHAPES["up0"]}, {}),
}


@pytest.mark.parametrize(
    "kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=[pytest.mark.extended] if "out" in n else []) for n in STAGES],
)
def test_the_stage_alone(case, kind):
    sizes, spec, shapes, arguments = STAGES[case]
    mesh, stage = mesh_of(sizes, kind), orthogonalize(**arguments)
    wrap = (lambda f: f) if case == "without_jit" else jax.jit
    found = wrap(lambda g: stage.update(g, ())[0])(
        placed(tree(1, shapes=shapes), mesh, spec)
    )
    assert_close(found, stage.update(tree(1, shapes=shapes), ())[0])


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_mapped_over_a_population(kind):
    """Also where only some arrays, or only the number of steps, are mapped."""
    mesh = mesh_of({"fsdp": 8}, kind)
    on = NamedSharding(mesh, P(None, "fsdp"))
    grads = np.stack([rng_tree(seed)["up0"] for seed in range(3)])
    sharded = jax.device_put(grads, on)
    one = jax.device_put(grads[0], NamedSharding(mesh, P("fsdp")))

    def update(grads, steps):
        return orthogonalize(ns_steps=steps).update(grads, ())[0]

    with jax.set_mesh(mesh):
        all_of_them = jax.jit(jax.vmap(lambda g: update({"w": g}, 5)))(sharded)
        some = jax.jit(jax.vmap(lambda g: update({"w": g, "v": one}, 5)))(sharded)
        steps = jax.jit(jax.vmap(lambda k: update({"w": one}, k)))(jnp.arange(1, 4))
    wanted = [update({"w": g}, 5)["w"] for g in grads]
    np.testing.assert_allclose(all_of_them["w"], wanted, atol=1e-5)
    np.testing.assert_allclose(some["w"], wanted, atol=1e-5)
    np.testing.assert_allclose(some["v"], [wanted[0]] * 3, atol=1e-5)
    wanted = [update({"w": grads[0]}, k)["w"] for k in (1, 2, 3)]
    np.testing.assert_allclose(steps["w"], wanted, atol=1e-5)


@pytest.mark.extended
def test_gradients_sharded_like_their_activations():
    """A mesh axis of four devices: two shards of the heads, two of their columns."""
    mesh = mesh_of({"fsdp": 2, "tensor": 4}, AUTO)
    rng = np.random.default_rng(0)
    kernel, x = (rng.normal(size=s).astype(np.float32) for s in ((16, 2, 32), (32, 16)))
    optimizer = orscale(0.02, weight_dimension_numbers=Dims(0, 2))

    def step(kernel, x, constrain):
        grads = jax.grad(lambda w: jnp.sum(constrain(x @ w.reshape(16, 64)) ** 2))(kernel)
        return optimizer.update(grads, optimizer.init(kernel), kernel)[0]

    expected = step(kernel, x, lambda h: h)
    sharded = jax.device_put((kernel, x), NamedSharding(mesh, P("fsdp")))
    by_tensor = NamedSharding(mesh, P("fsdp", "tensor"))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=by_tensor)
    found = jax.jit(functools.partial(step, constrain=constrain))(*sharded)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_differentiated(kind):
    mesh = mesh_of({"fsdp": 8}, kind)
    x, direction = rng_tree(1)["up0"], rng_tree(2)["up0"]

    def loss(x):
        return jnp.sum(orthogonalize(ns_steps=3).update({"w": x}, ())[0]["w"] * direction)

    wanted = jax.jit(jax.grad(loss))(x)
    sharding = NamedSharding(mesh, P("fsdp"))
    direction = jax.device_put(direction, sharding)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(jax.device_put(x, sharding))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.compiled
def test_programs_for_other_coefficients_are_told_apart():
    """A persistent cache has only the text as key, not the partitioner's callback."""
    mesh = mesh_of({"fsdp": 8}, AUTO)
    grads = {"w": jax.device_put(rng_tree(1)["up0"], NamedSharding(mesh, P("fsdp")))}

    def constants(**arguments):
        stage = orthogonalize(**arguments)
        text = jax.jit(lambda g: stage.update(g, ())[0]).lower(grads).as_text()
        return [line for line in text.splitlines() if "stablehlo.constant" in line]

    assert constants() == constants()
    assert constants() != constants(ns_steps=4)
    assert constants() != constants(ns_coeffs="dion")


@pytest.mark.extended
@pytest.mark.compiled
def test_the_mesh_argument():
    mesh = mesh_of({"fsdp": 8}, AUTO)
    where = NamedSharding(mesh, P("fsdp"))
    grads = {f"w{i}": rng_tree(1)["up0"] for i in range(8)}
    stage = orthogonalize(mesh=mesh)
    update = jax.jit(lambda g: stage.update(g, ())[0], in_shardings=where)
    wanted, _ = orthogonalize().update(grads, ())
    assert_close(update(grads), wanted)
    cost = hlo_cost.of(update.lower(grads).compile().as_text())
    assert {c.kind for c in cost.collectives} == {"all-to-all"}

    alone = jax.jit(lambda g: orthogonalize().update(g, ())[0], in_shardings=where)
    assert "CustomSPMDPartitioning" not in alone.lower(grads).as_text()
    with jax.set_mesh(mesh):
        assert "CustomSPMDPartitioning" in alone.lower(grads).as_text()

    other = AbstractMesh((4, 2), ("fsdp", "tensor"))
    stage = orthogonalize(mesh=other)
    with pytest.raises(ValueError, match=r"'tensor': 2.*on a mesh.*'fsdp': 8"):
        stage.update(jax.device_put(grads, where), ())
    with pytest.raises(ValueError, match=r"mesh='data'.*jax\.sharding\.Mesh"):
        orthogonalize(mesh="data")


@pytest.mark.extended
def test_numpy_arrays_that_in_shardings_place_on_explicit_axes():
    """Their types name no mesh; those of the state or of the parameters do."""
    mesh = mesh_of({"fsdp": 8}, EXPLICIT)
    where = NamedSharding(mesh, P("fsdp"))
    params, grads = (
        {k: np.asarray(rng_tree(i)[k]) for k in ("up0", "bias")} for i in (0, 1)
    )
    optimizer = orscale(0.02)
    state = optimizer.init(params)
    of_state = state_shardings(optimizer, jax.device_put(params, where))
    update = jax.jit(optimizer.update, in_shardings=(where, of_state, where))
    found = update(grads, jax.device_put(state, of_state), params)
    assert_close(found, optimizer.update(grads, state, params))

    stage = orthogonalize()
    update = jax.jit(stage.update, in_shardings=(where, None, where))
    found, _ = update(grads["up0"], (), jax.device_put(params["up0"], where))
    assert_close(found, stage.update(grads["up0"], ())[0])
    assert found.sharding.is_equivalent_to(where, 2)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("axes", [("data", "fsdp"), ("fsdp", "data")])
@pytest.mark.extended
def test_arrays_that_are_not_placed_yet(axes):
    """JAX passes the partitioner's callback no mesh for them, though one is set."""
    mesh = mesh_of(dict(zip(axes, (2, 4), strict=True)), AUTO)
    params, grads = (
        {k: np.asarray(rng_tree(i)[k]) for k in ("up0", "bias")} for i in (0, 1)
    )
    optimizer = orscale(0.02)

    def first_step(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)

    with jax.set_mesh(mesh):
        found = jax.jit(first_step)(grads, params)
    assert_close(found, first_step(grads, params))


@pytest.mark.extended
@pytest.mark.parametrize("kinds", [(EXPLICIT,), (EXPLICIT, AUTO)])
def test_without_the_mesh_in_the_context(kinds):
    """Also for leaves of layers and of blocks; from init on."""
    mesh = mesh_of({"x": 2, "y": 4}, *kinds)
    numbers = {"w": Dims(0, 1), "layers": Dims(1, 2)}
    numbers["fused"] = BlockDimensionNumbers(0, 1, block_axis=1, blocks=4)
    shapes = {"w": (16, 24), "layers": (4, 8, 12), "fused": (8, 32)}
    params, grads = (tree(seed, shapes=shapes) for seed in (0, 1))
    optimizer = orscale(0.02, weight_dimension_numbers=numbers)
    expected, _ = optimizer.update(grads, optimizer.init(params), params)
    params, grads = (placed(values, mesh, P("x", "y")) for values in (params, grads))
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    assert_close(updates, expected)
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)


@pytest.mark.extended
def test_no_mesh_no_extra_operation():
    grads = jax.tree.map(jnp.asarray, {"w": rng_tree(1)["up0"], "v": rng_tree(1)["odd0"]})
    stage = orthogonalize()
    jaxpr = str(jax.make_jaxpr(lambda g: stage.update(g, ())[0])(grads))
    assert "custom_partitioning" not in jaxpr and "shard_map" not in jaxpr
