"""AdamW's moments of 8 bits, against float64 NumPy, written from the docstring alone."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx
from jax.sharding import PartitionSpec as P

from orscale_jax import (
    Int8AdamState,
    check_state,
    convert_state,
    describe,
    keep_master_weights,
    muon,
    state_shardings,
)
from orscale_jax.transforms import momentum as int8_blocks
from orscale_jax.trees.boxes import unbox
from orscale_jax.trees.nodes import nodes_of
from tests.runs import (
    AUTO,
    EXPLICIT,
    assert_close,
    assert_same_bits,
    mesh_of,
    placed,
    run,
    tree,
)

SHAPES = {"embed": (70, 50), "head": (50, 70), "stack": (2, 6, 40), "b": (40,), "c": ()}
AXES = {"embed": 1, "head": 0, "stack": 2}  # Of the blocks.
NUMBERS = dict.fromkeys(SHAPES)
HYPER = {"adam_b1": 0.8, "adam_b2": 0.9, "weight_decay": 0.0}
gradients = functools.partial(tree, shapes=SHAPES)


def adamw(dtype="int8", rate=0.1, **options):
    options = {"weight_dimension_numbers": NUMBERS} | HYPER | options
    return muon(rate, adam_moments_dtype=dtype, **options)


def moments(state):
    [found] = nodes_of(state, Int8AdamState)
    return found


def oracle(x, axis, top, least):
    """Scales, codes and their step of every entry, in float64."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    scales = np.stack([
        np.abs(x[..., i : i + 32]).max(-1).astype(np.float32).astype(ml_dtypes.bfloat16)
        for i in range(0, x.shape[-1], 32)
    ], -1).astype(np.float64)  # fmt: skip
    steps = np.repeat(scales / top, 32, -1)[..., : x.shape[-1]]
    codes = np.clip(np.rint(x / steps), least, top)
    alike = np.abs(x).astype(np.float32).astype(ml_dtypes.bfloat16) == np.float32(
        steps * top
    )
    codes = np.where(alike, np.sign(x) * top, codes)  # What rounds to its scale.
    return (np.moveaxis(array, -1, axis) for array in (scales, codes, steps))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_against_float64_numpy(nesterov):
    """A step is computed from moments before they are rounded, from what was kept."""
    optimizer = adamw(adam_nesterov=nesterov)
    params = gradients(0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    kept = dict.fromkeys(SHAPES, (0.0, 0.0))
    for t in range(1, 6):
        found, state = update(gradients(t), state, params)
        adam = moments(state)
        for name, grad in gradients(t).items():
            grad, (m, root) = np.asarray(grad, np.float64), kept[name]
            m, v = 0.8 * m + 0.2 * grad, 0.9 * root**2 + 0.1 * grad**2
            first = m / (1 - 0.8**t)
            if nesterov:
                first = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * grad / (1 - 0.8**t)
            step = -0.1 * first / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
            np.testing.assert_allclose(found[name], step, rtol=1e-5, atol=1e-6)
            if len(SHAPES[name]) < 2:
                kept[name] = m, np.sqrt(v)
                np.testing.assert_allclose(adam.nu[name], v, rtol=1e-5)
                assert isinstance(adam.nu_scale[name], optax.MaskedNode)
                continue
            rounded = []
            for x, codes, scales, top, least in (
                (m, adam.mu, adam.mu_scale, 127, -127),
                (np.sqrt(v), adam.nu, adam.nu_scale, 255, 1),
            ):
                wanted_scales, wanted, steps = oracle(x, AXES[name], top, least)
                np.testing.assert_array_equal(
                    np.asarray(scales[name], float), wanted_scales
                )
                # In float32 an entry may fall on the other side of a half.
                off = np.abs(np.asarray(codes[name], int) - wanted)
                assert off.max() <= 1 and off.mean() < 0.01
                rounded.append(np.asarray(codes[name], float) * steps)
            kept[name] = rounded
    assert (adam.mu["embed"].dtype, adam.nu["embed"].dtype) == (jnp.int8, jnp.uint8)


def test_bounds_of_the_root():
    """Half a step, or nearly one at both ends; never zero, and to the bit once more."""
    x = np.random.default_rng(0).normal(size=(40, 96)) ** 2
    x *= np.exp(6 * np.random.default_rng(1).normal(size=x.shape))
    x[0, 0], x[1, 32:64], x[2, 1] = 0, 0, 1e-30
    x = x.astype(np.float32)
    codes, scales = int8_blocks.encode(jnp.asarray(x), 1, jnp.uint8)
    steps = np.repeat(np.asarray(scales, np.float64) / 255, 32, 1)
    found = int8_blocks.decode(codes, scales, jnp.float32)
    error = np.abs(np.sqrt(np.asarray(found, np.float64)) - np.sqrt(x.astype(float)))
    inside = (codes > 1) & (codes < 255)
    assert (error <= np.where(inside, 0.5, 255 / 254) * steps * (1 + 1e-4)).all()
    np.testing.assert_array_equal(found == 0, steps == 0)
    largest = codes.reshape(40, 3, 32).max(-1)
    assert (largest[scales > 0] == 255).all() and codes[steps > 0].min() == 1
    assert_same_bits(int8_blocks.encode(found, 1, jnp.uint8), (codes, scales))


def test_no_step_explodes():
    """A large gradient beside small ones, which then vanish."""
    params = {"embed": jnp.zeros((2, 32))}
    optimizer = adamw(weight_dimension_numbers={"embed": None}, rate=1.0)
    state = optimizer.init(params)
    grads = jnp.full((2, 32), 1e-3).at[0, 0].set(1.0)
    for _ in range(30):
        updates, state = optimizer.update({"embed": grads}, state, params)
        assert jnp.abs(updates["embed"]).max() < 1.1
        grads = grads.at[:, 1:].set(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_dtypes_of_parameters(dtype):
    """Complex parameters keep floats; those of 16 bits have the codes of float32."""
    params = {n: x.astype(dtype) for n, x in gradients(0).items()}
    (_, state) = run(adamw(), params, 2, lambda t: jax.tree.map(
        lambda x: x.astype(dtype), gradients(t)
    ))[-1]  # fmt: skip
    adam = moments(state)
    if dtype == "complex64":
        assert adam.mu["embed"].dtype == jnp.complex64
        assert not jax.tree.leaves(adam.nu_scale)
        return
    wide = {n: x.astype(dtype).astype("float32") for n, x in gradients(0).items()}
    (_, wanted) = run(adamw(), wide, 2, lambda t: jax.tree.map(
        lambda x: x.astype(dtype).astype("float32"), gradients(t)
    ))[-1]  # fmt: skip
    assert adam.mu["b"].dtype == dtype
    for field in ("mu", "nu", "mu_scale", "nu_scale"):
        found, same = (getattr(x, field)["embed"] for x in (adam, moments(wanted)))
        assert_same_bits(found, same)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e25])
def test_what_is_not_finite_makes_its_block_nan(bad):
    params = gradients(0)
    grads = params | {"embed": params["embed"].at[3, 40].set(bad)}
    (_, state) = run(adamw(), params, 2, lambda t: grads if t == 1 else params)[-1]
    wanted = np.zeros((70, 2), bool)
    wanted[3, 1] = True
    np.testing.assert_array_equal(np.isnan(moments(state).nu_scale["embed"]), wanted)
    with pytest.raises(ValueError, match=r"[mn]u_scale of .*'embed' is not finite"):
        check_state(state, adamw(), params)


def test_stacked_layers_are_separate_layers():
    """Under vmap and scan, as one optimizer for each layer."""
    layers = {name: jnp.stack([tree(s, shapes=SHAPES)[name] for s in range(3)])
              for name in SHAPES}  # fmt: skip
    optimizer = adamw()
    state = jax.vmap(optimizer.init)(layers)
    step = jax.jit(jax.vmap(optimizer.update))
    steps, after = step(layers, state, layers)

    def body(_, layer):
        grads, state = layer
        return None, optimizer.update(grads, state, grads)

    _, scanned = jax.jit(lambda *given: jax.lax.scan(body, None, given))(layers, state)
    near = functools.partial(assert_close, rtol=1e-5, atol=1e-5)  # Codes to the bit.
    near(scanned, (steps, after))
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], layers)
        alone = jax.jit(optimizer.update)(one, optimizer.init(one), one)
        near(jax.tree.map(lambda x, i=i: x[i], (steps, after)), alone)


BOXES = {
    "nnx": nnx.Param,
    "linen": lambda x: nn.Partitioned(x, ("embed", "mlp")[: x.ndim]),
    "haliax": lambda x: hax.named(x, ("embed", "mlp")[: x.ndim]),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", BOXES)
def test_boxes(kind):
    bare = {"embed": gradients(0)["embed"], "b": jnp.ones(40)}
    boxed = {name: BOXES[kind](x) for name, x in bare.items()}
    optimizer = muon(0.1, adam_moments_dtype="int8")
    updates, state = optimizer.update(boxed, optimizer.init(boxed), boxed)
    adam = moments(state)
    for tree_of, shape in ((adam.nu, (70, 50)), (adam.nu_scale, (70, 2))):
        assert type(tree_of["embed"]) is type(boxed["embed"])
        assert unbox(tree_of)["embed"].shape == shape
    if kind == "haliax":
        assert [axis.size for axis in adam.nu_scale["embed"].axes] == [70, 2]
    assert_same_bits(convert_state(state, optimizer, boxed), state)
    plain, _ = optimizer.update(bare, optimizer.init(bare), bare)
    assert_same_bits(unbox(updates), plain)


@pytest.mark.parametrize("axes", [AUTO, EXPLICIT])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=str)
def test_meshes(axes, spec):
    """Rows exchange nothing; where shards cut blocks, scales are those of one device."""
    shapes = {"embed": (128, 96)}
    spec = P(*spec, *[None] * (2 - len(spec)))
    mesh = mesh_of({"a": 8}, axes)
    optimizer = adamw(weight_dimension_numbers={"embed": None})
    drawn = functools.partial(tree, shapes=shapes)
    alone = run(optimizer, drawn(0), 2, drawn)[-1]
    with jax.set_mesh(mesh):
        there = [placed(drawn(s), mesh, spec) for s in range(3)]
        found = run(optimizer, there[0], 2, lambda s: there[s])[-1]
        program = jax.jit(optimizer.update).lower(there[1], found[1], found[0]).compile()
    assert_same_bits(moments(found[1]), moments(alone[1]))
    np.testing.assert_allclose(found[0]["embed"], alone[0]["embed"], rtol=1e-4, atol=1e-6)
    shardings = moments(state_shardings(optimizer, there[0]))
    assert shardings.mu["embed"].spec == shardings.nu["embed"].spec == spec
    text = program.as_text()
    exchanges = any(op in text for op in ("all-gather(", "all-reduce(", "all-to-all("))
    assert exchanges == (spec[1] is not None)
    if axes == EXPLICIT:
        assert moments(found[1]).nu["embed"].sharding.spec == spec


def test_conversion_to_floats_and_back():
    """Floats are what the codes stand for, and back they are the same codes."""
    params = gradients(0)
    narrow, wide = adamw(), adamw(None)
    _, state = run(narrow, params, 3, gradients)[-1]
    floats, adam = convert_state(state, wide, params), moments(state)
    found = optax.tree.get(floats, "nu")["embed"]
    steps = np.repeat(np.asarray(adam.nu_scale["embed"], float) / 255, 32, 1)[:, :50]
    roots = np.asarray(adam.nu["embed"]) * steps
    np.testing.assert_allclose(found, roots**2, rtol=1e-6)
    assert optax.tree.get(floats, "count") == 3
    assert_same_bits(convert_state(floats, narrow, params), state)
    for given, optimizer in ((state, wide), (floats, narrow)):
        with pytest.raises(ValueError, match=r"(?s)does not fit.*convert_state"):
            optimizer.update(params, given, params)
    longer = params | {"embed": jnp.ones((80, 50))}
    grown = moments(convert_state(state, narrow, longer, allow_new=True))
    np.testing.assert_array_equal(grown.mu["embed"][:70], adam.mu["embed"])
    assert not grown.nu["embed"][70:].any()


def test_checkpoints_and_bytes(tmp_path):
    """Saved by Orbax with weights of 24 bits, and carried on to the bit."""
    params = optax.tree.cast(gradients(0), jnp.bfloat16)
    optimizer = keep_master_weights(adamw(), bits=8)
    seen = run(optimizer, params, 4, gradients)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", seen[1])
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: (params, optimizer.init(params)))
        restored = checkpointer.restore(tmp_path / "run", like)
    assert_same_bits(restored, seen[1])
    check_state(restored[1], optimizer, restored[0])
    after, state = restored
    for step in (3, 4):
        updates, state = jax.jit(optimizer.update)(gradients(step), state, after)
        after = optax.apply_updates(after, updates)
    assert_same_bits((after, state), seen[-1])
    # Codes and low bits, and two scales for each moment of a token.
    rows = {row.name: row.state_bytes for row in describe(params, optimizer).rows}
    assert rows["embed"] == rows["head"] == 70 * (50 * 3 + 2 * 2 * 2)


def test_the_derivative_is_finite():
    params = {"embed": jnp.zeros((2, 32))}
    optimizer = adamw(weight_dimension_numbers={"embed": None}, adam_eps_root=1e-8)

    def second_step(rate):
        state = optimizer.init(params)
        grads = {"embed": rate * jnp.eye(2, 32)}
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
        return updates["embed"].sum()

    assert np.isfinite(jax.grad(second_step)(0.1))


def test_wrong_arguments_are_refused():
    for wrong in ("float32", "int4", "uint8", jnp.bfloat16, 8):
        with pytest.raises(ValueError, match=r'adam_moments_dtype=.* pass "int8"'):
            adamw(wrong)
    with pytest.raises(ValueError, match=r"adam_b2=0.999 .* \[0, 0.996\)"):
        adamw(adam_b2=0.999)
    adamw(None, adam_b2=0.999)
    adamw(jnp.int8)
