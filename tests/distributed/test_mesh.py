"""On 8 virtual devices: the values of one device, without redundant work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import hlo_cost
from orscale_jax import (
    BlockDimensionNumbers,
    describe,
    family,
    muon,
    orscale,
    orthogonalize,
    state_shardings,
)
from orscale_jax.newton_schulz.platforms import TPU
from tests import runs
from tests.platforms import orthogonalize_as
from tests.runs import (
    AUTO,
    EXPLICIT,
    assert_close,
    equations,
    first_update,
    mesh_of,
    numbers_of,
    placed,
    tree,
    types_of,
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


LAYOUTS = {  # The mesh, and the spec of a leaf of matrices by its rank.
    "rows × columns": (
        {"fsdp": 4, "tensor": 2},
        lambda rank: P(*[None] * (rank - 2), "fsdp", "tensor"),
    ),
    "replicated": ({"data": 8}, lambda rank: P()),
    "rows": ({"fsdp": 8}, lambda rank: P(*[None] * (rank - 2), "fsdp")),
    "experts": (
        {"expert": 8},
        lambda rank: P("expert") if rank == 3 else P(None, "expert"),
    ),
}


OPTIMIZER = orscale(0.02, weight_dimension_numbers=NUMBERS)


@functools.cache
def alone():
    """Two steps on one device, and the FLOPs of its compiled program."""
    params, state = rng_tree(0), OPTIMIZER.init(rng_tree(0))
    step = step_of(OPTIMIZER).lower(params, state, params).compile()
    for seed in (1, 2):
        params, state = step(params, state, rng_tree(seed))
    return jax.tree.map(np.asarray, (params, state)), hlo_cost.of(step.as_text()).flops


@pytest.mark.quick_first_case
@pytest.mark.compiled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_one_device(layout, kind):
    sizes, spec = LAYOUTS[layout]
    mesh = mesh_of(sizes, kind)
    where = on(mesh, spec)
    params = jax.device_put(rng_tree(0), where)
    of_state = state_shardings(OPTIMIZER, params)
    with jax.set_mesh(mesh):
        state = jax.jit(OPTIMIZER.init, out_shardings=of_state)(params)
        step = step_of(OPTIMIZER, out_shardings=(where, of_state))
        program = step.lower(params, state, params).compile()
        types = types_of((params, state))
        for seed in (1, 2):
            grads = jax.device_put(rng_tree(seed), where)
            params, state = program(params, state, grads)
    expected, flops = alone()
    assert_close((params, state), expected)
    assert types_of((params, state)) == types
    assert all(params[name].sharding == where[name] for name in params)

    cost = hlo_cost.of(program.as_text())
    assert cost.looped_bytes == 0
    kinds = [collective.kind for collective in cost.collectives]
    assert set(kinds) <= {"all-to-all", "all-gather", "all-reduce"}
    # One for all norms, and one for which matrices have received a gradient.
    assert kinds.count("all-reduce") <= 2 * len(sizes)
    assert ("all-gather" in kinds) == (layout == "replicated")
    # Of eight devices, five have zeros where there are three matrices.
    assert cost.flops <= 1.15 * (flops + 5 * odd_flops()) / 8


def sharded(values, mesh, spec):
    return jax.device_put(values, NamedSharding(mesh, spec))


def update_alone(values, **arguments):
    """Of the stage."""
    return orthogonalize(**arguments).update(values, ())[0]


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_float64_that_a_context_enables(enable_x64, kind):
    mesh = mesh_of({"data": 8}, kind)
    shapes = {name: SHAPES[name] for name in ("up0", "experts")}
    params, grads = (tree(seed, np.float64, shapes) for seed in (0, 1))
    numbers = numbers_of(shapes)
    optimizer = orscale(
        0.02,
        ns_dtype=jnp.float64,
        param_shardings=P("data"),
        weight_dimension_numbers=numbers,
    )
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
    grads = sharded([rng_tree(0)["up0"]] * 8, mesh, P("fsdp"))
    with jax.set_mesh(mesh):
        traced = jax.jit(functools.partial(update_alone, ns_dtype=ns_dtype)).trace(grads)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    exchanges = [line for line in text.splitlines() if "all_to_all" in line]
    assert len(exchanges) == 2 and all(sent in line for line in exchanges)


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("layout", ["rows × columns", "rows", "replicated"])
def test_as_on_tpus_where_no_sharding_is_known(layout):
    single = [name for name, shape in SHAPES.items() if len(shape) == 2]
    grads = {name: rng_tree(1)[name] for name in single}
    alone = hlo_cost.of(jax.jit(update_alone).lower(grads).compile().as_text())
    stage = orthogonalize_as(TPU)
    sizes, spec = LAYOUTS[layout]
    where = {name: on(mesh_of(sizes), spec)[name] for name in single}
    placed = jax.device_put(grads, where)
    update = jax.jit(lambda g: stage.update(g, ())[0], out_shardings=where)
    with pytest.warns(UserWarning, match="pass param_shardings"):
        program = update.lower(placed).compile()
    assert_close(program(placed), update_alone(grads))
    cost = hlo_cost.of(program.as_text())
    assert cost.looped_bytes == 0
    assert cost.flops <= 1.15 * (alone.flops + 5 * odd_flops()) / 8
    if layout == "rows":
        kinds = {collective.kind for collective in cost.collectives}
        assert kinds == {"all-reduce", "all-to-all"}


@pytest.mark.extended
def test_layers_in_one_array_are_spread_by_parts():
    """Each of eight devices takes three of the twenty-four matrices, in two stacks."""
    shapes, most = {"gate": (12, 8, 16), "up": (12, 8, 16)}, 2 * 4 * 8 * 16
    numbers = numbers_of(shapes)
    optimizer = orthogonalize(max_stack_bytes=most, weight_dimension_numbers=numbers)
    grads = tree(0, shapes=shapes)
    wanted, _ = optimizer.update(grads, optimizer.init(grads))
    mesh = mesh_of({"data": 2, "fsdp": 4}, EXPLICIT)
    grads = placed(grads, mesh, P(None, "fsdp"))
    plan = describe(grads, optimizer).plan
    assert [group.matrices_per_device for group in plan.groups] == [2, 1]
    found, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    assert_close(found, wanted)


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


# Sizes of the mesh, the sharding, the arrays, and the arguments of the stage.
STAGES = {
    "aol_scales_the_rows_of_squares": (
        *({"fsdp": 8}, P(None, "fsdp"), {"w": SHAPES["odd0"]}),
        {"ns_preconditioning": "aol"},
    ),
    # Four devices share each matrix, whose columns this axis divides in name only.
    "an_axis_of_one_device": (
        *({"data": 8, "tensor": 1}, P(None, "tensor")),
        *({"up": (8, 16), "small": (4, 6)}, {}),
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
    values = tree(1, shapes=shapes)
    update = functools.partial(update_alone, **arguments)
    placed, run = sharded(values, mesh_of(sizes, kind), spec), update
    if case != "without_jit":  # There arrays themselves say how they are sharded.
        run = jax.jit(functools.partial(update, param_shardings=spec))
    found = run(placed)
    assert_close(found, update(values), atol=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_mapped_over_a_population(kind):
    """Also where only some arrays, or only the number of steps, are mapped."""
    grads = np.stack([rng_tree(seed)["up0"] for seed in range(3)])
    mesh = mesh_of({"fsdp": 8}, kind)
    population, one = (
        sharded(grads, mesh, P(None, "fsdp")),
        sharded(grads[0], mesh, P("fsdp")),
    )
    with jax.set_mesh(mesh):
        update = functools.partial(update_alone, param_shardings=P("fsdp"))
        alone = jax.jit(jax.vmap(update))(population)
        some = jax.jit(jax.vmap(lambda g: update({"w": g, "v": one})))(population)
        steps = jax.jit(jax.vmap(lambda k: update(one, ns_steps=k)))(jnp.arange(1, 4))
    wanted = [update_alone(g) for g in grads]
    np.testing.assert_allclose(alone, wanted, atol=1e-5)
    np.testing.assert_allclose(some["w"], wanted, atol=1e-5)
    np.testing.assert_allclose(some["v"], [wanted[0]] * 3, atol=1e-5)
    wanted = [update_alone(grads[0], ns_steps=k) for k in (1, 2, 3)]
    np.testing.assert_allclose(steps, wanted, atol=1e-5)


@pytest.mark.extended
def test_gradients_sharded_like_their_activations():
    """A mesh axis of four devices: two shards of the heads, two of their columns."""
    mesh = mesh_of({"fsdp": 2, "tensor": 4}, AUTO)
    rng = np.random.default_rng(0)
    kernel, x = (rng.normal(size=s).astype(np.float32) for s in ((16, 2, 32), (32, 16)))
    optimizer = orscale(
        0.02, param_shardings=P("fsdp"), weight_dimension_numbers=Dims(0, 2)
    )

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
    def derivative(x, direction):
        update = functools.partial(update_alone, ns_steps=3, param_shardings=P("fsdp"))
        return jax.grad(lambda x: jnp.sum(update(x) * direction))(x)

    given = rng_tree(1)["up0"], rng_tree(2)["up0"]
    with jax.set_mesh(mesh := mesh_of({"fsdp": 8}, kind)):
        found = jax.jit(derivative)(*sharded(given, mesh, P("fsdp")))
    assert_close(found, jax.jit(derivative)(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.extended
@pytest.mark.compiled
def test_the_mesh_argument():
    mesh = mesh_of({"fsdp": 8}, AUTO)
    where = NamedSharding(mesh, P("fsdp"))
    grads = {f"w{i}": rng_tree(1)["up0"] for i in range(8)}
    given = functools.partial(update_alone, mesh=mesh, param_shardings=P("fsdp"))
    update = jax.jit(given, in_shardings=where)
    assert_close(update(grads), update_alone(grads))
    cost = hlo_cost.of(update.lower(grads).compile().as_text())
    assert {c.kind for c in cost.collectives} == {"all-to-all"}

    other = AbstractMesh((4, 2), ("fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"'tensor': 2.*on a mesh.*'fsdp': 8"):
        update_alone(jax.device_put(grads, where), mesh=other)
    with pytest.raises(ValueError, match=r"mesh='data'.*jax\.sharding\.Mesh"):
        orthogonalize(mesh="data")


def two(seed):
    """Arrays of NumPy, which are not placed yet."""
    return {k: np.asarray(rng_tree(seed)[k]) for k in ("up0", "bias")}


@pytest.mark.extended
def test_numpy_arrays_that_in_shardings_place_on_explicit_axes():
    """Their types name no mesh; those of the state or of the parameters do."""
    where = NamedSharding(mesh_of({"fsdp": 8}, EXPLICIT), P("fsdp"))
    params, grads, optimizer = two(0), two(1), orscale(0.02)
    state = optimizer.init(params)
    of_state = state_shardings(optimizer, jax.device_put(params, where))
    update = jax.jit(optimizer.update, in_shardings=(where, of_state, where))
    found = update(grads, jax.device_put(state, of_state), params)
    assert_close(found, optimizer.update(grads, state, params))

    update = jax.jit(orthogonalize().update, in_shardings=(where, None, where))
    found, _ = update(grads["up0"], (), jax.device_put(params["up0"], where))
    assert_close(found, update_alone(grads["up0"]))
    assert found.sharding.is_equivalent_to(where, 2)


@pytest.mark.extended
def test_arrays_that_are_not_placed_yet():
    optimizer = orscale(0.02, param_shardings=P())

    def first_step(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)

    with jax.set_mesh(mesh_of({"fsdp": 4, "data": 2})):
        found = jax.jit(first_step)(two(1), two(0))
    assert_close(found, first_step(two(1), two(0)))


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
    assert types_of(updates) == types_of(params)


@pytest.mark.compiled
@pytest.mark.extended
def test_no_mesh_no_extra_operation():
    grads = {"w": rng_tree(1)["up0"], "v": rng_tree(1)["odd0"]}
    jaxpr = str(jax.make_jaxpr(update_alone)(grads))
    assert "custom_partitioning" not in jaxpr and "shard_map" not in jaxpr


# The relatives: exchanges of matrices as for Muon, and small sums.


RECTANGULAR = {n: None if n[0] == "o" else numbers for n, numbers in NUMBERS.items()}


def cost_of(make, layout, numbers=NUMBERS):
    optimizer = make(0.02, weight_dimension_numbers=numbers)
    sizes, spec = LAYOUTS[layout]
    where = on(mesh := mesh_of(sizes, EXPLICIT), spec)
    params, grads = (jax.device_put(rng_tree(seed), where) for seed in (0, 1))
    of_state = state_shardings(optimizer, params)
    with jax.set_mesh(mesh):
        state = jax.jit(optimizer.init, out_shardings=of_state)(params)
        step = step_of(optimizer, out_shardings=(where, of_state))
        text = step.lower(params, state, grads).compile().as_text()
    cost = hlo_cost.of(text)
    by_kind = dict.fromkeys(("all-to-all", "all-reduce"), 0)
    for collective in cost.collectives:
        by_kind[collective.kind] += collective.nbytes
    return cost, by_kind


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["hyperball", "normuon", "aurora"])
@pytest.mark.parametrize("layout", ["rows × columns", "rows"])
def test_collectives(name, layout):
    """Beyond them only vectors and scalars, not in loops. Aurora exchanges twice."""
    plain, plain_bytes = cost_of(orscale if name == "hyperball" else muon, layout)
    flops, exchanged = plain.flops, plain_bytes["all-to-all"]
    if name == "aurora":
        again, again_bytes = cost_of(muon, layout, RECTANGULAR)
        flops, exchanged = flops + again.flops, exchanged + again_bytes["all-to-all"]
    cost, found = cost_of(getattr(family, name), layout)
    assert cost.looped_bytes == 0 and cost.flops == flops
    assert set(found) == set(plain_bytes)
    assert found["all-to-all"] == exchanged
    matrices = {"experts": 8} | {name: 1 for name in NUMBERS if name[0] in "udo"}
    scalars = sum(matrices.values())
    n, longer = (
        sum(of(SHAPES[leaf][-2:]) * count for leaf, count in matrices.items())
        for of in (lambda side: side[1], max)
    )
    # Of Aurora, vectors of M̃ and of U.
    entries = {"hyperball": 0, "normuon": n, "aurora": 2 * longer}[name]
    # In float32, on each axis of the mesh.
    axes = len(LAYOUTS[layout][0])
    most = plain_bytes["all-reduce"] + 4 * axes * (entries + 2 * scalars)
    assert found["all-reduce"] <= most
