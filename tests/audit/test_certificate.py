"""The update on a mesh against that of one device: faults are named, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    assert_same_on,
    by_path,
    describe,
    keep_master_weights,
    muon,
    polar_factor,
)
from orscale_jax.audit.certificate import certify
from tests.audit import silent_faults
from tests.audit.silent_faults import (
    AXES,
    FAULTS,
    NUMBERS,
    SHAPES,
    SPECS,
    newton_schulz,
)
from tests.everything import OPTIMIZERS
from tests.runs import AUTO, EXPLICIT, mesh_of
from tests.test_recipes import (  # A fixture.
    built,
    init,
    loss_fn,
    page,  # noqa: F401
    table,
)


def abstract(mesh, shapes=SHAPES, specs=SPECS, dtype=jnp.float32):
    return {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, specs[name])
        )
        for name, shape in shapes.items()
    }


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", FAULTS)
def test_a_published_fault_is_found_and_named(name):
    _, optimizer, leaf, words = FAULTS[name]
    mesh = mesh_of(AXES)
    params = abstract(mesh)
    certificate = certify(optimizer, params, mesh, {})
    [row] = [row for row in certificate.rows if row.path == leaf]
    assert row.errors[0] > 1e-3 and words in row.cause, certificate
    with pytest.raises(AssertionError, match="NOT the update of one device"):
        assert_same_on(mesh, optimizer, params)


# What must not be taken for a fault.
HEADS = {
    "q": (16, 4, 6),
    "qkv": (16, 36),
    "experts": (3, 8, 12),
    "up": (12, 16),
    "b": (5,),
}
OF_HEADS = {
    "q": Dims(0, 2),
    "qkv": Blocks(0, 1, block_axis=1, blocks=(20, 8, 8)),
    "experts": Dims(1, 2),
    "up": Dims(0, 1),
    "b": None,
}
LAYOUTS = {
    "Auto": (AXES, (AUTO,)),
    "Explicit": ({"data": 4, "tensor": 2}, (EXPLICIT,)),
    "uneven": ({"data": 5}, (AUTO,)),
    "mixed": (
        {"stage": 2, "data": 2, "one": 1, "tensor": 2},
        (EXPLICIT, AUTO, AUTO, EXPLICIT),
    ),
}
SAME = {
    name: make(1e-2, weight_dimension_numbers=OF_HEADS)
    for name, make in OPTIMIZERS.items()
}
SAME["a warm-up"] = optax.MultiSteps(
    muon(optax.linear_schedule(0.0, 1e-2, 3), weight_dimension_numbers=OF_HEADS), 2
)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SAME)
def test_no_false_alarm(name, layout):
    if (name, layout) == ("a warm-up", "mixed"):
        pytest.skip("optax.MultiSteps does not compile there, even around optax.sgd")
    axes, kinds = LAYOUTS[layout]
    params = {key: jnp.zeros(shape) for key, shape in HEADS.items()}
    certificate = assert_same_on(mesh_of(axes, *kinds), SAME[name], params)
    assert certificate.same and len(certificate.rows) == len(HEADS)


@pytest.mark.extended
def test_no_false_alarm_for_optax_and_a_trainer():
    mesh = mesh_of(AXES)
    trainers = silent_faults.a_trainers(silent_faults.right)

    def halved(g):  # Nothing tells how often this loop runs.
        return jax.lax.while_loop(lambda g: jnp.sum(g * g) > 1, lambda g: g / 2, g)

    loops = optax.stateless(lambda grads, params: jax.tree.map(halved, grads))
    for optimizer in (optax.adamw(1e-3), silent_faults.OPTAX, trainers, loops):
        assert_same_on(mesh, optimizer, abstract(mesh))


@pytest.mark.extended
# SOAP begins with eigenvectors of singular matrices, which rounding chooses.
@pytest.mark.parametrize("name", [x for x in table() if not x.startswith("track_3")])
def test_no_false_alarm_for_a_recipe(page, name):  # noqa: F811
    optimizer, _ = built(page, name)
    params = jax.eval_shape(init, jax.random.key(0))
    if name == "kimi_k2":  # QK-Clip wants the logits.
        with pytest.raises(ValueError, match="arguments, bind them with functools"):
            assert_same_on(mesh_of({"data": 8}), optimizer, params)
        tokens = jax.ShapeDtypeStruct((4, 9), int)
        _, logits = jax.eval_shape(loss_fn, params, tokens)
        logits = jax.tree.map(lambda x: np.full(x.shape, 200.0, x.dtype), logits)
        update = functools.partial(optimizer.update, max_logits=logits)
        optimizer = optax.GradientTransformation(optimizer.init, update)
    assert_same_on(mesh_of({"data": 4, "tensor": 2}), optimizer, params)


@pytest.mark.extended
def test_in_the_dtypes_of_the_parameters():
    """In bfloat16 rounding moves more, and is measured; ours multiplies float32 here."""
    ours = muon(1e-2, weight_dimension_numbers=NUMBERS)
    mesh = mesh_of(AXES)
    params = abstract(mesh, dtype=jnp.bfloat16)
    for optimizer, is_exact in [
        (ours, True),
        (keep_master_weights(ours), True),
        (silent_faults.OPTAX, False),
    ]:
        certificate = assert_same_on(mesh, optimizer, params, steps=2)
        in_float32, own = (
            max(x) for x in zip(*(x.errors for x in certificate.rows), strict=True)
        )
        assert in_float32 < 1e-3 and is_exact == (own < 1e-3)


def test_narrow_products_of_parameters_in_float32():
    """What rounding does is measured, and a fault beside it is found."""

    def grown(updates, params):
        many = jax.sharding.get_abstract_mesh().size > 1
        return jax.tree.map(lambda u: u * (1 + 0.3 * many), updates)

    def narrow(grads, params):
        return {"w": newton_schulz(grads["w"].astype(jnp.float16)).astype(jnp.float32)}

    optimizer, broken = optax.stateless(narrow), optax.stateless(grown)
    mesh = mesh_of({"data": 4, "tensor": 2})
    params = abstract(mesh, {"w": (4, 32, 48)}, {"w": P(None, "tensor", "data")})
    [row] = assert_same_on(mesh, optimizer, params).rows
    assert max(row.errors) > 1e-3
    [row] = certify(optax.chain(optimizer, broken), params, mesh, {}).rows
    assert row.cause.startswith("it is 1.3 times as large")


def on_shards(fn):
    """A stage whose devices see only their own rows."""

    def update(updates, params):
        specs = {"in_specs": (P("x"),) * 2, "out_specs": P("x")}
        run = jax.shard_map(fn, **specs, check_vma=False)
        return jax.tree.map(run, updates, params)

    return optax.stateless(update)


def some_rows(mesh):
    where = NamedSharding(mesh, P("x"))
    return {"w": jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=where)}


@pytest.mark.extended
def test_what_never_moves_is_not_certified():
    mesh = mesh_of({"x": 4})
    for optimizer in (
        optax.MultiSteps(muon(1e-2), 256),
        optax.chain(muon(1e-2), optax.set_to_zero()),
    ):
        with pytest.raises(AssertionError, match="no update in 128 moves it"):
            assert_same_on(mesh, optimizer, some_rows(mesh))
    # Beside a parameter that moves, one may be frozen.
    params = some_rows(mesh) | {"b": jnp.zeros(4)}
    frozen = optax.transforms.freeze({"w": False, "b": True})
    certificate = assert_same_on(mesh, optax.chain(muon(1e-2), frozen), params)
    updates = {row.path: row.updates for row in certificate.rows}
    assert updates["b"] == 0 and updates["w"] >= 6
    assert f"in {updates['w']} updates; 1 did not move)" in certificate.verdict


@pytest.mark.extended
@pytest.mark.parametrize("steps", [3, 6])
def test_a_fault_at_every_fifth_step(steps):
    mesh = mesh_of({"x": 4})
    shards = on_shards(lambda u, p: polar_factor(u))
    whole = optax.stateless(lambda u, p: jax.tree.map(polar_factor, u))

    def update(grads, count, params):
        both = (x.update(grads, (), params)[0]["w"] for x in (shards, whole))
        return {"w": jnp.where(count % 5 == 4, *both)}, count + 1

    periodic = optax.GradientTransformation(lambda _: jnp.zeros((), int), update)
    if steps == 3:
        certificate = assert_same_on(mesh, periodic, some_rows(mesh), steps=3)
        assert "in 3 updates)" in certificate.verdict
    else:
        with pytest.raises(AssertionError, match="each shard along x is computed alone"):
            assert_same_on(mesh, periodic, some_rows(mesh))


@pytest.mark.extended
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("whole", [False, True])
def test_a_test_for_missing_gradients_by_shards(whole, momentum):
    """Decay where there is a gradient: of the matrix, or of a device's rows."""
    mesh = mesh_of({"x": 4})
    matrices = optax.stateless(
        lambda u, p: jax.tree.map(lambda u, p: u + 0.1 * p * jnp.any(u != 0), u, p)
    )
    shards = on_shards(lambda u, p: u + 0.1 * p * jnp.any(u != 0))
    optimizer = optax.chain(optax.trace(momentum), matrices if whole else shards)
    if whole:
        assert_same_on(mesh, optimizer, some_rows(mesh))
    else:
        with pytest.raises(AssertionError, match="where gradients are zero, "):
            assert_same_on(mesh, optimizer, some_rows(mesh))


@pytest.mark.extended
def test_an_update_that_rounding_decides():
    """As SOAP's, which begins with eigenvectors of singular matrices."""

    def chaotic(g):
        many = jax.sharding.get_abstract_mesh().size > 1
        return jnp.sin(1e6 * g * (1 + many * 1e-5))

    optimizer = optax.stateless(lambda grads, params: jax.tree.map(chaotic, grads))
    with pytest.raises(AssertionError, match="rounding decides it, on one device"):
        assert_same_on(mesh_of({"data": 8}), optimizer, {"w": jnp.zeros((8, 16))})


@pytest.mark.extended
def test_a_fault_in_narrow_dtypes_only():
    def update(grads, state, params=None):
        many = jax.sharding.get_abstract_mesh().size > 1
        narrow = [g.dtype == jnp.bfloat16 for g in jax.tree.leaves(grads)]
        return jax.tree.map(lambda g: g * (1 + many * any(narrow)), grads), state

    mesh = mesh_of(AXES)
    twice = optax.GradientTransformation(lambda params: (), update)
    certificate = certify(twice, abstract(mesh, dtype=jnp.bfloat16), mesh, {})
    assert {row.cause[:33] for row in certificate.rows} == {
        "only in the parameters' dtypes: a"
    }
    assert {row.errors for row in certificate.rows} == {(0.0, 1.0)}


@pytest.mark.extended
def test_a_cast_on_the_mesh_only():
    def cast(g):
        many = jax.sharding.get_abstract_mesh().size > 1
        return g.astype(jnp.bfloat16).astype(g.dtype) if many else g

    optimizer = optax.stateless(lambda grads, params: jax.tree.map(cast, grads))
    with pytest.raises(AssertionError, match="a narrow dtype: a cast, or a narrow sum"):
        assert_same_on(mesh_of({"data": 8}), optimizer, {"w": jnp.zeros((8, 16))})


@pytest.mark.extended
def test_a_fault_of_an_optimizer_that_refuses_shards():
    """They tell nothing of its cause."""

    def update(grads, state, params=None):
        if grads["w"].shape != (8, 16):
            raise TypeError("not the model's shape")
        many = jax.sharding.get_abstract_mesh().size > 1
        return jax.tree.map(lambda g: g + many * g**2, grads), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    mesh = mesh_of({"data": 8})
    params = abstract(mesh, {"w": (8, 16)}, {"w": P("data")})
    certificate = certify(optimizer, params, mesh, {})
    assert certificate.rows[0].cause == "no cause was found"


@pytest.mark.extended
def test_an_optimizer_that_closes_over_a_mesh():
    mesh = mesh_of({"data": 8})
    params = {"w": jnp.zeros((16, 8))}
    assert_same_on(mesh, lambda mesh: muon(1e-2, mesh=mesh), params)
    with pytest.raises(ValueError, match="call assert_same_on with the function"):
        assert_same_on(mesh, muon(1e-2, mesh=mesh), params)


def looped(steps):
    """Optax's Muon, whose table of coefficients makes a loop of Newton–Schulz."""
    return optax.contrib.muon(1e-2, ns_coeffs=((3.4445, -4.775, 2.0315),) * steps)


@pytest.mark.extended
@pytest.mark.compiled
def test_what_the_program_sends():
    """As goodfire-ai/spd 978 saw: products are exchanged in every iteration."""
    mesh = mesh_of({"data": 8})
    shapes, specs = {"w": (16, 32)}, {"w": P("data")}
    params = abstract(mesh, shapes, specs)
    theirs, ours = (assert_same_on(mesh, x, params) for x in (looped(5), muon(1e-2)))
    assert ours.looped_bytes == 0 < 5 * ours.bytes_sent < theirs.looped_bytes
    assert sum(sent.nbytes for sent in theirs.sent) == theirs.bytes_sent
    assert "in loops" in str(theirs) and "in loops" not in str(ours)
    # Every device has all of a replicated matrix, and each computes all.
    replicated = assert_same_on(mesh, looped(5), abstract(mesh, shapes, {"w": P()}))
    assert replicated.repetition == 8 and replicated.bytes_sent == 0
    assert replicated.flops == 5 * 2 * (2 * 16 * 16 * 32 + 16**3)
    assert replicated.temporary_bytes > 0


def test_describe_has_the_certificate():
    mesh = mesh_of({"data": 4, "tensor": 2})
    params = abstract(mesh, {"w": (8, 16)}, {"w": P("data", "tensor")})
    description = describe(params, muon(1e-2), probe=True)
    [row] = description.certificate.rows
    [error] = row.errors
    assert row.path == "w" and error < 1e-3
    assert "on 4 data × 2 tensor: the update of one device for all 1" in str(description)
    assert describe(params, muon(1e-2)).certificate is None
    whole = {"w": jnp.zeros((8, 16))}
    assert describe(whole, muon(1e-2), probe=True).certificate is None


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_described_mesh_has_devices_that_are_there(kind):
    """With shorter axes where there are too few; the plan is that of the whole mesh."""
    mesh = AbstractMesh((2, 64), ("dcn", "fsdp"), (kind,) * 2)
    params = abstract(mesh, {"w": (64, 128)}, {"w": P("fsdp")})
    description = describe(params, muon(1e-2, slow_axes=("dcn",)), probe=True)
    assert description.rows[0].first_update == "orthogonal"
    assert description.certificate.mesh == "2 dcn × 4 fsdp"
    assert description.certificate.same
    assert description.mesh.startswith("2 dcn × 64 fsdp")


@pytest.mark.extended
def test_a_mesh_to_compile_for(monkeypatch):
    """The updates run on devices that are there, the program is for all."""
    mesh = mesh_of({"data": 8})
    params = abstract(
        mesh, {"w": (16, 32), "v": (16, 32)}, {"w": P("data"), "v": P("data")}
    )
    there = assert_same_on(mesh, muon(1e-2), params)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:2])
    elsewhere = assert_same_on(mesh, muon(1e-2), params)
    assert (there.mesh, elsewhere.mesh) == ("8 data", "2 data")
    assert elsewhere.bytes_sent == there.bytes_sent > 0
    assert elsewhere.flops == there.flops


def test_a_single_device_cannot_take_the_place_of_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    mesh = AbstractMesh((4,), ("a",), (AUTO,))
    with pytest.raises(ValueError, match="jax_num_cpu_devices"):
        assert_same_on(mesh, optax.sgd(1.0), {"w": jnp.zeros((8, 8))})


@pytest.mark.extended
def test_the_sharding_of_parameters_that_have_none():
    """Each axis of the mesh cuts the longest axis that it divides."""
    seen = {}

    def init(params):
        seen.update({name: x.sharding.spec for name, x in params.items()})
        return ()

    mesh = mesh_of({"data": 4, "tensor": 2})
    sgd = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    shapes = {"w": (12, 16), "thin": (3, 8), "b": (5,), "s": ()}
    assert_same_on(mesh, sgd, {name: np.zeros(x) for name, x in shapes.items()})
    assert seen == {
        "w": P("tensor", "data"),
        "thin": P(None, ("data", "tensor")),
        "b": P(None),
        "s": P(),
    }


@pytest.mark.extended
def test_a_rule_by_path_and_names_that_fold():
    mesh = mesh_of({"data": 8})
    params = {f"layer{i}": {"w": jnp.zeros((8, 16))} for i in range(2)}
    certificate = assert_same_on(
        mesh, muon(1e-2, weight_dimension_numbers=by_path({})), params
    )
    assert "layer*.w × 2" in str(certificate)
