"""A table of layouts: wherever parameters, gradients and state are, the update is one.

A leaf of the tree stands for a row of the table, named by a shape and by the layouts of
parameter, gradient and state. All rows of an optimizer are one program.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    describe,
    family,
    keep_master_weights,
    master_weights,
    muon,
    orscale,
    orthogonalize,
    qk_clip,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
    state_shardings,
    where_nonzero,
)
from orscale_jax.trees.boxes import unbox
from tests.leaves import relative_error
from tests.runs import AUTO, EXPLICIT, mesh_of, types_of

SIZES = {"a": 4, "b": 2}
PLACES = {
    "whole": P(),
    "rows": P("a"),
    "columns": P(None, "a"),
    "both": P(("a", "b")),
    "tiles": P("b", "a"),
}
# Layouts of parameters, gradients and state.
ALL = tuple(itertools.product(["whole", "rows", "columns"], repeat=3))
COMMON = (
    ("whole", "whole", "rows"),  # ZeRO-1.
    ("whole", "rows", "whole"),  # Scattered gradients.
    ("rows", "whole", "rows"),  # Replicated gradients of sharded parameters.
)
MORE = (
    *COMMON,
    ("rows", "columns", "rows"),
    ("columns", "rows", "both"),
    ("tiles", "both", "rows"),
    ("both", "tiles", "columns"),
)
# A quarter of them has, of the 32 rows of a block of 8-bit momentum:
SHAPES = {
    "short": ((32, 24), Dims(0, 1)),  # a quarter,
    "query": ((64, 24), Dims(0, 1)),  # half,
    "key": ((192, 64), Dims(0, 1)),  # one and a half,
    "blocks": ((128, 24), Dims(0, 1)),  # all,
    "odd": ((100, 24), Dims(0, 1)),  # 25, which is no power of two,
    "layers": ((4, 40, 24), Dims(1, 2)),  # one and a quarter, of another matrix,
    "column": ((8, 1), Blocks(0, 1, block_axis=0, blocks=(3, 5))),  # two, of one block,
    "adamw": ((8, 24), None),  # and no block at all.
}
# Each device has whole matrices.
STACKS = {
    "query": ((4, 50, 24), Dims(1, 2)),
    "key": ((4, 40, 48), Dims(1, 2)),
    "layers": ((8, 100, 24), Dims(1, 2)),
    "adamw": ((8, 24), None),
}
STATES = {
    "floats": muon,
    "bfloat16": functools.partial(muon, mu_dtype="bfloat16"),
    "int8": functools.partial(muon, mu_dtype="int8"),
    "ratio": functools.partial(orscale, mu_dtype="int8"),
    "largest": functools.partial(orscale, anchor="largest"),
    "normuon": functools.partial(family.normuon, mu_dtype="int8"),
    "hyperball": family.hyperball,
    "aurora": family.aurora,
    "master weights": functools.partial(muon, mu_dtype="int8"),
    "QK-Clip": muon,
}


def table(kinds, layouts=(("rows",) * 3,), shapes=SHAPES):
    """The rows by name: shape, numbers, layouts."""
    return {
        f"{kind}-{'-'.join(layout)}": (*shapes[kind], layout)
        for kind in kinds
        for layout in layouts
    }


def optimizer_of(state, rows):
    numbers = {name: dims for name, (_, dims, _) in rows.items()}
    optimizer = STATES[state](0.02, weight_dimension_numbers=numbers)
    if state == "master weights":
        return keep_master_weights(optimizer)
    if state == "QK-Clip":
        return optax.chain(optimizer, qk_clip(by_heads, threshold=1.0))
    return optimizer


def by_heads(params, factors):
    """Queries and keys that lie apart, whose four heads are along the last axis."""
    for query, of_heads in factors.items():
        key = query.replace("query", "key")
        for name, factor in ((query, of_heads.query), (key, of_heads.key)):
            repeats = params[name].shape[-1] // 4
            params[name] *= jnp.repeat(factor, repeats, axis=-1)[..., None, :]
    return params


def inputs(state, rows):
    """Parameters, gradients of two steps, and the largest logits."""
    dtype = jnp.bfloat16 if state == "master weights" else jnp.float32
    trees = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        shapes = {name: shape for name, (shape, *_) in rows.items()}
        trees.append(
            {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
        )
    logits = {
        name: jnp.broadcast_to(jnp.asarray([0.5, 2.0, 4.0, 3.0]), (*shape[:-2], 4))
        for name, (shape, *_) in rows.items()
        if name.startswith("query") and state == "QK-Clip"
    }
    return *trees, logits


def second_update(optimizer, before, params, *grads_and_logits):
    """The second update, the state after it, and where there are any, master weights."""
    *grads, logits = grads_and_logits
    extra = {"max_logits": logits} if logits else {}
    update, state = jax.jit(optimizer.update), before
    for grad in grads:
        updates, state = update(grad, state, params, **extra)
    if hasattr(state, "low_bits"):  # Its upper halves are parameters.
        new = master_weights(state, optax.apply_updates(params, updates))
        return new, state.inner_state
    return updates, state


@functools.cache
def on_one_device(state, *rows):
    rows = table(*rows)
    optimizer, given = optimizer_of(state, rows), inputs(state, rows)
    return jax.device_get(second_update(optimizer, optimizer.init(given[0]), *given))


def assert_same(found, expected):
    """Silent errors were 30 % and more; codes of 8 bits may differ by one."""
    pairs = zip(*map(jax.tree.leaves_with_path, (found, expected)), strict=True)
    wrong = {}
    for (path, x), (_, wanted) in pairs:
        x, wanted = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
        error = relative_error(x, wanted) if wanted.any() else np.abs(x).max(initial=0)
        if not error < 2e-3:
            wrong[jax.tree_util.keystr(path)] = error
    assert not wrong


def cases():
    """The state, the types of the axes, the kinds of shapes, and the layouts."""
    mostly = ("query", "key", "layers", "column", "adamw")
    yield pytest.param("int8", (EXPLICIT,), ("short", "key"), COMMON, id="quick")
    for state in STATES:
        for types in ((EXPLICIT,), (AUTO,), (EXPLICIT, AUTO)):
            if len(types) == 1 or state in ("ratio", "master weights"):
                marks = pytest.mark.extended
                name = "-".join([state, *(kind.name.lower() for kind in types)])
                yield pytest.param(state, types, mostly, MORE, id=name, marks=marks)
    for state in ("floats", "int8"):
        name, marks = f"{state}-all", pytest.mark.slow
        yield pytest.param(state, (EXPLICIT,), tuple(SHAPES), ALL, id=name, marks=marks)


@pytest.mark.parametrize("state, types, kinds, layouts", [*cases()])
def test_a_table_of_layouts(state, types, kinds, layouts):
    rows, mesh = table(kinds, layouts), mesh_of(SIZES, *types)
    optimizer, (params, *grads, logits) = optimizer_of(state, rows), inputs(state, rows)

    def place(tree, which):
        return jax.device_put(
            tree, {name: sharding(mesh, *row, which) for name, row in rows.items()}
        )

    owned, params, *grads = (
        place(tree, which)
        for tree, which in zip((params, params, *grads), (2, 0, 1, 1), strict=True)
    )
    with jax.set_mesh(mesh):
        of_state = state_shardings(optimizer, owned)
        before = jax.jit(optimizer.init, out_shardings=of_state)(params)
        found = second_update(optimizer, before, params, *grads, logits)
    assert_same(found, on_one_device(state, kinds, layouts))
    if types == (EXPLICIT,) and state != "master weights":
        assert types_of(found) == types_of((params, before))


def sharding(mesh, shape, _, layout, which):
    """The sharding of a row; axes that do not divide the shape are left out."""
    entries = []
    for size, names in itertools.zip_longest(shape, PLACES[layout[which]]):
        parts = math.prod(SIZES[name] for name in names or ())
        entries.append(names if size and size % parts == 0 else None)
    return NamedSharding(mesh, P(*entries[: len(shape)]))


@pytest.mark.extended
@pytest.mark.parametrize("state", STATES)
def test_manual_axes(state):
    """Inside ``jax.shard_map`` each device has the whole matrices of some layers."""
    rows = table(STACKS, shapes=STACKS)
    optimizer, given = optimizer_of(state, rows), inputs(state, rows)

    def alone(*given):
        return second_update(optimizer, optimizer.init(given[0]), *given)[0]

    expected = jax.jit(alone)(*given)
    mesh = mesh_of(SIZES, AUTO)
    for names in ({"a"}, {"a", "b"}):
        each = jax.shard_map(
            alone, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=names
        )
        assert_same(jax.jit(each)(*given), expected)


# Parameters in boxes, whose names say which axes ``jax.shard_map`` divides.

BOXES = {
    "linen": lambda x, names: nn.Partitioned(x, names),
    "nnx": lambda x, names: nnx.Param(x, out_sharding=names, eager_sharding=False),
    "logical": lambda x, names: nn.LogicallyPartitioned(
        x, names, rules=(("a", "a"), ("b", "b"))
    ),
}
BOXED = {
    "orscale": orscale(0.02),
    "master weights": keep_master_weights(muon(0.02, mu_dtype="int8")),
    "normuon": family.normuon(0.02),
    "orthogonalize": orthogonalize(),
    "scale_by_shape": scale_by_shape(),
    "ratio": scale_by_calibrated_trust_ratio(),
    "where nonzero": where_nonzero(optax.identity()),
}


def boxed(kind, x, names):
    return {"dense": {"kernel": BOXES[kind](x, names)}}


def manually(fn, mesh, spec):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))


@pytest.mark.parametrize("kind", BOXES)
def test_parts_of_matrices_in_boxes_are_refused(kind):
    mesh, x = mesh_of(SIZES), jnp.ones((16, 8))
    message = (
        r"'dense.kernel' of shape \(4, 8\) is a part .*\('a',\) for axis 0.*\['a', 'b'\]"
    )

    def updated(optimizer, init, x):
        params = boxed(kind, x, ("a", None))
        return unbox(optimizer.update(params, init(params), params)[0])

    for optimizer in BOXED.values():
        whole = optimizer.init(boxed(kind, x, ("a", None)))
        for init in (optimizer.init, lambda _, whole=whole: whole):
            step = functools.partial(updated, optimizer, init)
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(manually(step, mesh, P("a")), x)
    with pytest.raises(ValueError, match=message):  # Not a plan that nobody follows.
        manually(
            lambda x: describe(boxed(kind, x, ("a", None)), optimizer=orscale(0.02)) or x,
            *(mesh, P("a")),
        )(x)
    # Axes of one device divide nothing, and those of layers no matrix.
    step = functools.partial(updated, BOXED["orscale"], BOXED["orscale"].init)
    jax.eval_shape(manually(step, mesh_of({"a": 1, "b": 2}), P("a")), x)
    layers = orscale(0.02, weight_dimension_numbers=Dims(1, 2))

    def of_layers(x):
        params = boxed(kind, x, ("a",))
        return unbox(layers.update(params, layers.init(params), params)[0])

    jax.eval_shape(manually(of_layers, mesh, P("a")), jnp.ones((8, 16, 8)))


@pytest.mark.extended
def test_remedies_for_parts_of_matrices():
    """Gradients inside and the optimizer outside, or AdamW."""
    mesh = mesh_of(SIZES)
    rng = np.random.default_rng(0)
    x, target = (jnp.asarray(rng.normal(size=(16, 8)), jnp.float32) for _ in range(2))
    of_part = jax.grad(lambda x, target: jnp.sum(jnp.sin(x) * target))
    gradient = manually(of_part, mesh, P("a"))
    muons, adamw = (
        muon(0.02),
        muon(0.02, weight_dimension_numbers={"dense": {"kernel": None}}),
    )

    def step(optimizer, gradient, x, target):
        params = boxed("linen", x, ("a", None))
        grads = boxed("linen", gradient(x, target), ("a", None))
        return unbox(optimizer.update(grads, optimizer.init(params), params)[0])

    on_mesh = jax.device_put((x, target), NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(step, muons, gradient))(*on_mesh)
    assert_same(found, jax.device_get(step(muons, of_part, x, target)))
    found = manually(functools.partial(step, adamw, of_part), mesh, P("a"))(x, target)
    assert_same(found, step(adamw, of_part, x, target))


@pytest.mark.parametrize("build", [functools.partial(muon, 0.02), orthogonalize])
def test_parts_of_matrices_by_an_argument_are_refused(build):
    """As those in boxes."""
    mesh, x = mesh_of(SIZES), {"out": jnp.ones((8, 8)), "up": jnp.ones((16, 8))}

    def updated(param_shardings, x):
        optimizer = build(param_shardings=param_shardings)
        return optimizer.update(x, optimizer.init(x), x)[0]

    def trace(param_shardings):
        step = functools.partial(updated, param_shardings)
        jax.eval_shape(manually(step, mesh, P("a")), x)

    specs = {"out": P(), "up": P("a")}
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    for given in (specs, placed, lambda _: specs):
        with pytest.raises(ValueError, match=r"'up' .* is a part .* correct param_shard"):
            trace(given)
    for given in (None, P(), {"out": P("c"), "up": None}):
        trace(given)
    # Each device has whole matrices of some layers.
    layers, whole = (
        jnp.ones((8, 16, 8)),
        muon(0.02, weight_dimension_numbers=Dims(1, 2), param_shardings=P("a")),
    )
    jax.eval_shape(
        manually(lambda x: whole.update(x, whole.init(x), x)[0], mesh, P("a")), layers
    )
