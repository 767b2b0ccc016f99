"""What unusual inputs do; docs/troubleshooting.md has a row for each."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers,
    by_path,
    convert_state,
    family,
    muon,
    orscale,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
    where_nonzero,
)
from orscale_jax.flax import linen_dimension_numbers, nnx_dimension_numbers
from orscale_jax.transforms.trust_ratio import R_MIN
from tests.everything import OPTIMIZERS
from tests.runs import (
    NUMBERS,
    SHAPES,
    assert_close,
    assert_same_bits,
    has_ratios,
    mesh_of,
    numbers_of,
    readout,
    step_of,
    tree,
    types_of,
)

BUILDS = ("orscale", "vision", "muon")
RATE, DECAY = 1e-2, 0.1
STEPS = 5
WHEN = pytest.mark.parametrize("when", [0, 2], ids=["first", "middle"])
# The parts that a bad gradient reaches, out of those of `split`.
REACH = {"everywhere": {"w", "0", "1", "2", "b"}, "one_expert": {"1"}}
WHERE = pytest.mark.parametrize("where", REACH)
BAD = pytest.mark.parametrize("bad", [np.nan, -np.inf])
# Where the trust ratio's configuration makes no difference.
ORSCALE_MUON = pytest.mark.parametrize("name", ["orscale", "muon"])


def tier(name):
    return pytest.param(name, marks=() if name == "orscale" else pytest.mark.extended)


ALL = pytest.mark.parametrize("name", [tier(name) for name in (*BUILDS, "normuon")])


@pytest.fixture(params=map(tier, BUILDS))
def name(request):
    return request.param


def eager(optimizer):
    """The optimizer's init, and a step to updates, parameters and state."""

    def step(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    return optimizer.init, step


def compiled(optimizer):
    init, step = eager(optimizer)
    return init, jax.jit(step)


@functools.cache
def build(name):
    return OPTIMIZERS[name](RATE, weight_dimension_numbers=NUMBERS)


@functools.cache
def standard(name):
    """Cached, since it takes a while to compile."""
    return compiled(build(name))


def gradients(steps=STEPS):
    return [tree(seed) for seed in range(1, steps + 1)]


def train(optimizer, grads, params=None):
    """(updates, params after, state after) of every step."""
    init, step = optimizer
    params = tree(0) if params is None else params
    state, seen = init(params), []
    for gradient in grads:
        updates, params, state = step(gradient, state, params)
        seen.append((updates, params, state))
    return seen


@functools.cache
def undisturbed(name):
    return train(standard(name), gradients())


def split(values):
    """By part: the matrix w, the experts 0, 1 and 2, the bias where there is one."""
    parts = {"w": values["w"]} | {str(i): x for i, x in enumerate(values["stack"])}
    if isinstance(values["b"], jax.Array):
        parts["b"] = values["b"]
    return {part: np.asarray(value) for part, value in parts.items()}


def ratios(state, field="trust_ratio"):
    return split(readout(state, field))


def spoil(gradient, where, change):
    if where == "everywhere":
        return jax.tree.map(change, gradient)
    expert = change(gradient["stack"][1])
    return gradient | {"stack": gradient["stack"].at[1].set(expert)}


def one_entry(bad):
    """Set one entry of each matrix and of each vector."""
    return lambda leaf: leaf.at[(..., *(1,) * min(leaf.ndim, 2))].set(bad)


def assert_others_same(seen, expected, where):
    """Parameters and ratios without a bad gradient are the same, to the bit."""
    for (_, params, state), (_, params_2, state_2) in zip(seen, expected, strict=True):
        pairs = [(split(params), split(params_2))]
        if has_ratios(state):
            pairs += [
                (ratios(state, field), ratios(state_2, field))
                for field in ("calibration", "raw_trust_ratio", "trust_ratio")
            ]
        for found, reference in pairs:
            for part in found.keys() - REACH[where]:
                np.testing.assert_array_equal(found[part], reference[part])


def on_matrices(change):
    return jax.tree.map(lambda x: change(x) if x.ndim > 1 else x, tree(0))


def rank_1(x):
    return x[..., :1] * x[..., :1, :]


# Gradients.


@ALL
@WHEN
@WHERE
def test_zero_gradients(name, when, where):
    grads = gradients()
    grads[when] = spoil(grads[when], where, jnp.zeros_like)
    seen = train(standard(name), grads)
    assert_others_same(seen, undisturbed(name), where)
    updates, params, state = seen[when]
    before = tree(0) if when == 0 else seen[when - 1][1]
    for part in REACH[where] - {"b"}:
        moved = (split(params)[part] != split(before)[part]).any()
        assert moved == (when > 0)  # Later steps follow the momentum.
        if name == "orscale":
            c = ratios(state, "calibration")[part]
            assert (c == 0) == (when == 0)
            assert c == 0 or c == ratios(seen[0][2], "calibration")[part]
            assert ratios(state)[part] == 1 or when
    if where == "everywhere":
        chex.assert_tree_all_finite(updates)
    # The matrix begins one step later, as it would have begun at this one.
    if when == 0:
        late = train(standard(name), grads[1:])
        for (_, found, _), (_, expected, _) in zip(seen[1:], late, strict=True):
            for part in REACH[where] - {"b"}:
                np.testing.assert_array_equal(split(found)[part], split(expected)[part])


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="XLA flushes denormals to zero on the CPU"
)
@WHEN
@WHERE
@pytest.mark.quick_first_case
def test_denormal_gradients(name, when, where):
    def run(change):
        grads = gradients()
        grads[when] = spoil(grads[when], where, change)
        return [params for _, params, _ in train(standard(name), grads)]

    denormal = run(lambda g: jnp.asarray(np.sign(g) * np.float32(1e-40)))
    assert_same_bits(denormal, run(jnp.zeros_like))


@ALL
@WHERE
@pytest.mark.parametrize("power", [99, -99], ids=["1e30", "1e-30"])
@pytest.mark.parametrize("when", [0, 2, None], ids=["first", "middle", "always"])
def test_huge_and_tiny_gradients(name, when, where, power):
    grads = [
        spoil(g, where, lambda leaf: leaf * 2.0**power) if when in (step, None) else g
        for step, g in enumerate(gradients())
    ]
    seen, expected = train(standard(name), grads), undisturbed(name)
    assert_others_same(seen, expected, where)
    chex.assert_tree_all_finite([(updates, params) for updates, params, _ in seen])
    # Alone, or before any other, the scale of a gradient does not matter at all.
    for step in {0: [0], 2: [], None: range(STEPS)}[when]:
        found, reference = split(seen[step][0]), split(expected[step][0])
        for part in found.keys() - {"b"}:
            np.testing.assert_array_equal(found[part], reference[part])
    if power > 0 and where == "everywhere":  # AdamW's square is infinite.
        before = expected[1][1] if when == 2 else tree(0)
        decay_alone = -RATE * DECAY * before["b"]
        np.testing.assert_allclose(seen[when or 0][0]["b"], decay_alone, rtol=1e-5)


@ALL
@BAD
@WHEN
@WHERE
def test_gradients_that_are_not_finite(name, bad, when, where):
    grads = gradients()
    grads[when] = spoil(grads[when], where, one_entry(bad))
    seen, expected = train(standard(name), grads), undisturbed(name)
    assert_others_same(seen, expected, where)
    for updates, params, state in seen[when:]:
        for part in REACH[where] - {"b"}:
            assert np.isnan(split(updates)[part]).all()
            assert np.isnan(split(params)[part]).all()
            if name == "orscale":
                assert np.isnan(ratios(state)[part])
                first = 0 if when == 0 else ratios(expected[0][2], "calibration")[part]
                assert ratios(state, "calibration")[part] == first
        if where == "everywhere":  # AdamW goes entry by entry.
            assert np.isnan(params["b"]).tolist() == [False, True, False, False]


@pytest.mark.parametrize("where", [..., (0, 0), 3], ids=["all", "one", "a row"])
@pytest.mark.extended
def test_no_shape_hides_a_first_gradient_of_nan(where):
    """XLA's maximum on CPUs ignores NaN in such arrays, and zeros do not move."""
    params = {"w": jnp.ones((64, 100)), "v": jnp.ones((48, 130))}
    grads = jax.tree.map(lambda x: jnp.zeros_like(x).at[where].set(jnp.nan), params)
    for make in (orscale, muon, family.hyperball):
        optimizer = make(RATE, ns_steps=2)
        updates, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        assert all(jnp.isnan(leaf).all() for leaf in updates.values())
        if has_ratios(state):
            assert jnp.isnan(jnp.stack([*readout(state, "trust_ratio").values()])).all()


@pytest.mark.quick_first_case
def test_rank_1(name):
    params = on_matrices(rank_1)
    seen = train(standard(name), gradients(), params)
    chex.assert_tree_all_finite([(updates, params) for updates, params, _ in seen])
    if name == "orscale":
        [(expected, _, _)] = train(standard("muon"), gradients(1), params)
        assert_close(ratios(seen[0][2]), dict.fromkeys(["w", "0", "1", "2"], 1.0), atol=0)
        assert_close(seen[0][0], expected, rtol=1e-5, atol=1e-8)
    grads = jax.tree.map(lambda g: rank_1(g) if g.ndim > 1 else g, tree(1))
    [(updates, _, _)] = train(standard(name), [grads])
    chex.assert_tree_all_finite(updates)
    stage = orthogonalize(weight_dimension_numbers=NUMBERS | {"b": Dims(0, 1)})
    q, _ = stage.update(grads | {"b": jnp.zeros((1, 1))}, optax.EmptyState())
    for matrix in [q["w"], *q["stack"]]:
        largest, *others = np.linalg.svd(matrix, compute_uv=False)
        assert 0.84 < largest < 1.15 and max(others) < 1e-3


@pytest.mark.extended
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_that_cancels(name, nesterov):
    """With μ = 1/2: M̃ = G/4 − 3/2 G/6 = 0, or M = G/2 − G/2 = 0, exactly: it rests."""
    optimizer = OPTIMIZERS[name](RATE, momentum=0.5, nesterov=nesterov)
    grad = {"w": 6 * jnp.round(8 * tree(1)["w"])}
    back = jax.tree.map(lambda g: -g / (6 if nesterov else 2), grad)
    (_, _, first), (updates, _, state) = train(
        compiled(optimizer), [grad, back], {"w": tree(0)["w"]}
    )
    if name != "muon":
        c = readout(state, "calibration")["w"]
        assert c == readout(first, "calibration")["w"]
        assert readout(state, "trust_ratio")["w"] == 1
    assert not updates["w"].any()


# Weights.


def test_zero_weights(name):
    params = jax.tree.map(jnp.zeros_like, tree(0))
    seen = train(standard(name), gradients(), params)
    chex.assert_tree_all_finite([(updates, params) for updates, params, _ in seen])
    if name == "vision":  # Later r is that of small weights, and clipped.
        assert list(ratios(seen[0][2]).values()) == [1] * 4
        assert list(ratios(seen[1][2]).values()) == [0.5] * 4
        return
    plain = train(standard("muon"), gradients(), params)
    for (_, found, state), (_, expected, _) in zip(seen, plain, strict=True):
        if name == "orscale":
            assert list(ratios(state, "calibration").values()) == [0] * 4
            assert list(ratios(state, "anchor_count").values()) == [1] * 4
            assert list(ratios(state).values()) == [1] * 4
        assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "scale, c, ratio",
    [
        (1e-30, lambda c: c == 0, 1),  # ‖W‖² underflows: like zero weights.
        (1e-12, lambda c: 0 < c < 99, R_MIN),  # ε outweighs c‖D‖: r < r_min.
        (1e-3, lambda c: 0 < c < 99, 1),
        (1e15, lambda c: 0 < c < np.inf, 1),
        (1e25, lambda c: c == 0, np.nan),  # ‖W‖² overflows.
    ],
)
def test_weights_of_extreme_scale(scale, c, ratio):
    params = jax.tree.map(lambda p: p * scale, tree(0))
    [(updates, _, state)] = train(standard("orscale"), gradients(1), params)
    for part, value in ratios(state, "calibration").items():
        assert c(value)
        np.testing.assert_allclose(ratios(state)[part], ratio, rtol=1e-2)
        assert np.isfinite(split(updates)[part]).all() == np.isfinite(ratio)


# Shapes.


@pytest.mark.extended
@ORSCALE_MUON
def test_matrices_with_one_row_or_column(name):
    """Q is the normalised gradient."""
    shapes = {"row": (1, 5), "column": (5, 1), "one": (1, 1)}
    params, grad = tree(0, shapes=shapes), tree(1, shapes=shapes)
    optimizer = OPTIMIZERS[name](RATE, weight_decay=0.0)
    [(updates, _, state)] = train(compiled(optimizer), [grad], params)
    for key in shapes:
        u, g = (x / np.linalg.norm(x) for x in (updates[key], grad[key]))
        np.testing.assert_allclose(-u, g, rtol=1e-5)
        if name == "orscale":
            np.testing.assert_allclose(readout(state, "trust_ratio")[key], 1, rtol=1e-5)
            direction = readout(state, "calibration")[key] * 0.2 * max(shapes[key]) ** 0.5
            assert 0.84 < np.linalg.norm(params[key]) / direction < 1.15


@pytest.mark.extended
@pytest.mark.parametrize("name", ["orscale", "muon", "aurora", "hyperball"])
def test_empty_leaves(name):
    empty = {
        "rows": (0, 4), "columns": (4, 0), "merged": (0, 3, 4), "blocks": (4, 0),
        "batch": (0, 3, 4), "none": (0,),
    }  # fmt: skip
    numbers = NUMBERS | {
        "rows": Dims(0, 1), "columns": Dims(0, 1), "merged": Dims((0, 1), 2),
        "blocks": BlockDimensionNumbers(0, 1, block_axis=1, blocks=2),
        "batch": Dims(1, 2), "none": None,
    }  # fmt: skip
    optimizer = OPTIMIZERS[name](RATE, weight_dimension_numbers=numbers)
    nothing = tree(0, shapes=empty)
    seen = train(
        compiled(optimizer), [g | nothing for g in gradients()], tree(0) | nothing
    )
    for (updates, params, state), (_, expected, _) in zip(
        seen, undisturbed(name), strict=True
    ):
        assert {key: updates[key].shape for key in empty} == empty
        assert_close({key: params[key] for key in SHAPES}, expected, 1e-6, 1e-8)
        if name == "orscale":
            c, ratio = readout(state, "calibration"), readout(state, "trust_ratio")
            assert c["batch"].shape == ratio["batch"].shape == (0,)
            assert c["blocks"].shape == ratio["blocks"].shape == (2,)
            for key in ("rows", "columns", "merged", "blocks"):
                assert (c[key] == 0).all() and (ratio[key] == 1).all()


@pytest.mark.extended
def test_scalars():
    others = {"gain": jnp.float32(2.0), "python": 3.0}
    grads = [{"gain": jnp.float32(s), "python": s} for s in (1.0, -0.5)]
    adamw = train(compiled(optax.adamw(RATE, b2=0.95, weight_decay=DECAY)), grads, others)
    with_matrix = [g | {"w": tree(1)["w"]} for g in grads]
    seen = train(compiled(orscale(RATE)), with_matrix, others | {"w": tree(0)["w"]})
    for (updates, _, _), (expected, _, _) in zip(seen, adamw, strict=True):
        assert_close({key: updates[key] for key in others}, expected, atol=0)


# Dtypes and modes of JAX.


@pytest.mark.extended
@pytest.mark.parametrize(
    "params_dtype, grads_dtype",
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16),
        (jnp.float64, jnp.float32),
        (jnp.float32, jnp.float64),
        (jnp.float64, jnp.bfloat16),
    ],
)
def test_gradients_of_another_dtype(params_dtype, grads_dtype):
    """Fixed parameters, so that only the state and the updates are rounded."""

    def run(params, grads):
        init, step = standard("orscale")
        state = init(params)
        for gradient in grads:
            updates, _, state = step(gradient, state, params)
        return updates, state

    rounding = float(max(jnp.finfo(params_dtype).eps, jnp.finfo(grads_dtype).eps))
    with jax.enable_x64(jnp.float64 in (params_dtype, grads_dtype)):
        params, grads = tree(0, params_dtype), [tree(s, grads_dtype) for s in range(1, 4)]
        updates, state = run(params, grads)
        expected, _ = run(*optax.tree.cast((params, grads), jnp.float32))
        promoted = jnp.promote_types(params_dtype, grads_dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {promoted}
        for leaf in jax.tree.leaves(readout(state, "trace")):
            assert leaf.dtype == params_dtype
    for key in SHAPES:
        found, reference = (np.asarray(x[key], np.float64) for x in (updates, expected))
        error = np.linalg.norm(found - reference) / np.linalg.norm(reference)
        assert error < max(4 * rounding, 1e-5), (key, error, rounding)


@pytest.mark.extended
def test_sam(name):
    """With gradients that are the same everywhere, SAM changes nothing."""
    sam = optax.contrib.sam(build(name), optax.sgd(0.1), sync_period=2, opaque_mode=True)

    def update(grads, state, params):
        return sam.update(grads, state, params, grad_fn=lambda *_: grads)

    params = tree(0) | {"w": jnp.zeros(SHAPES["w"])}
    around = compiled(optax.GradientTransformation(sam.init, update))
    seen, expected = (train(o, [tree(1)] * 3, params) for o in (around, standard(name)))
    for (_, found, _), (_, reference, _) in zip(seen, expected, strict=True):
        assert_close(found, reference, atol=0)


@pytest.mark.quick_first_case
def test_differentiated_by_zero_weights(name):
    init, step = standard(name)
    params = jax.tree.map(jnp.zeros_like, tree(0))

    def total(params):
        updates, *_ = step(tree(1), init(params), params)
        return sum(jnp.sum(update) for update in updates.values())

    found = jax.grad(total)(params)
    # r is 1 there: only the first term of -η r̂ (λW + sQ) depends on W.
    for key in ("w", "stack"):
        np.testing.assert_allclose(found[key], -RATE * DECAY, rtol=1e-5)


@pytest.mark.quick_first_case
@pytest.mark.compiled
@pytest.mark.parametrize("kind", [np.float64, np.array, float])
def test_float32_with_x64_on(name, kind):
    scalars = {"learning_rate": RATE, "weight_decay": DECAY, "momentum": 0.95}
    wide = {key: kind(value) for key, value in (scalars | {"adam_b1": 0.9}).items()}
    with jax.enable_x64(True):
        optimizer = OPTIMIZERS[name](weight_dimension_numbers=NUMBERS, **wide)
        state = optimizer.init(tree(0))
        text = jax.jit(optimizer.update).lower(tree(0), state, tree(0)).as_text()
        seen = train(compiled(optimizer), gradients())
    assert "xf64>" not in text
    for found, (_, expected, state) in zip(seen, undisturbed(name), strict=True):
        assert {leaf.dtype for leaf in found[1].values()} == {np.dtype("f4")}
        np.testing.assert_allclose(found[1]["b"], expected["b"], rtol=1e-6)
        for key in ("w", "stack"):
            np.testing.assert_array_equal(found[1][key], expected[key])
        types = [[x.dtype for x in jax.tree.leaves(s)] for s in (found[2], state)]
        assert types[0] == types[1]


ZERO = np.zeros((3, 4), np.float32)
SOME = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
# Weights and gradients in which something is zero, and nothing should be NaN.
DEGENERATE = {
    "zero_gradients": (SOME[0], [ZERO, SOME[1], ZERO]),
    "zero_weights": (ZERO, [SOME[1], SOME[0], ZERO]),
    "zero_everything": (ZERO, [ZERO, ZERO]),
    "no_rows": (ZERO[:0], [ZERO[:0]]),
}
EAGER = [pytest.param(eager, eps, marks=pytest.mark.extended) for eps in (1e-6, 0.0)]


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("stepping, eps", [(compiled, 1e-6), *EAGER])
def test_debug_nans(case, stepping, eps):
    """No false alarm: values that a where discards are no NaNs either."""
    weight, grads = DEGENERATE[case]
    steps = stepping(orscale(RATE, eps=eps, momentum=0.0, weight_decay=0.0))
    with jax.debug_nans(True):
        train(steps, [{"w": g} for g in grads], {"w": jnp.asarray(weight)})
        if case == "zero_gradients":
            with pytest.raises(FloatingPointError):
                train(steps, [{"w": SOME[1] * np.nan}], {"w": jnp.asarray(weight)})


@pytest.mark.extended
def test_debug_infs():
    with jax.debug_infs(True):
        for weight in (SOME[0], ZERO):
            train(
                compiled(orscale(RATE)), [{"w": SOME[1]}] * 2, {"w": jnp.asarray(weight)}
            )


@pytest.mark.extended
@pytest.mark.parametrize("dtype, anchor", [("bfloat16", "first"), ("float32", "largest")])
def test_strict_dtype_promotion(dtype, anchor):
    """A chain of the stages by hand takes the steps of orscale."""
    numbers = {"w": Dims(0, 1), "stack": Dims(1, 2)}
    given = {"weight_dimension_numbers": numbers}
    chain = optax.chain(
        optax.trace(0.95, nesterov=True),
        orthogonalize(**given),
        scale_by_shape(jnp.float32(0.2), **given),
        where_nonzero(optax.add_decayed_weights(DECAY), **given),
        scale_by_calibrated_trust_ratio(anchor=anchor, **given),
        optax.scale_by_learning_rate(RATE),
    )
    params, *grads = ({key: tree(s, dtype)[key] for key in numbers} for s in range(3))
    with jax.numpy_dtype_promotion("strict"):
        _, (_, found, _) = train(compiled(chain), grads, params)
    if dtype == "float32":
        _, (_, expected, _) = train(
            compiled(orscale(RATE, anchor=anchor, **given)), grads, params
        )
        assert_close(found, expected, atol=1e-7)
    chex.assert_tree_all_finite(found)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}


@pytest.mark.extended
def test_checking_leaks():
    step = step_of(orscale(lambda step: RATE / (1 + step)))
    params = {"w": tree(0)["w"]}
    with jax.checking_leaks():
        state = jax.jit(orscale(lambda step: RATE).init)(params)
        carry = step(params, state, params)
        jax.lax.scan(lambda carry, _: (step(*carry, params), None), carry, length=2)
    chex.assert_tree_all_finite(carry)


# Hyperparameters.


@pytest.mark.extended
@ORSCALE_MUON
def test_learning_rate_zero(name):
    optimizer = OPTIMIZERS[name](0.0, weight_dimension_numbers=NUMBERS)
    seen = train(compiled(optimizer), gradients(2))
    for _, params, _ in seen:
        assert_same_bits(params, tree(0))
    expected = jax.tree.map(lambda a, b: 0.95 * a + b, *gradients(2))
    for key in ("w", "stack"):
        found = readout(seen[-1][2], "trace")[key]
        np.testing.assert_allclose(found, expected[key], rtol=1e-5, atol=1e-6)
    if name == "orscale":
        first, last = (ratios(state, "calibration") for _, _, state in seen)
        assert all(0 < value < np.inf for value in first.values()) and first == last


@pytest.mark.extended
def test_weight_decay_zero(name):
    optimizer = OPTIMIZERS[name](RATE, weight_decay=0.0, weight_dimension_numbers=NUMBERS)
    [(_, params, _)] = train(compiled(optimizer), [jax.tree.map(jnp.zeros_like, tree(1))])
    assert_same_bits(params, tree(0))  # Including the bias.


# Parts of a tree.


def of_model(table, kernel, scale, up):
    blocks = {"query": {"kernel": kernel, "scale": scale}, "up": up}
    return {"embed": {"table": table}, "blocks": blocks}


MODEL = of_model((5, 4), (3, 4, 5), (3, 4), (4, 6))
FOR_MODEL = {
    "weight_dimension_numbers": of_model(None, Dims(1, 2), None, Dims(0, 1)),
    "weight_decay_mask": of_model(False, True, False, False),
    "param_shardings": of_model(P(), P("data"), P(), P()),
}


def with_numbers(rules, **arguments):
    return FOR_MODEL | {"weight_dimension_numbers": by_path(rules, **arguments)}


FORMS = {
    "trees": FOR_MODEL,
    "by_path": with_numbers({"kernel": Dims(1, 2), "scale|table": "adamw"}),
    "otherwise": with_numbers(
        {"table": "adamw"}, otherwise=FOR_MODEL["weight_dimension_numbers"]
    ),
    "functions": {key: lambda _, given=given: given for key, given in FOR_MODEL.items()},
}


@pytest.mark.parametrize(
    ("masked", "form"),
    [
        (["embed", "blocks.query"], "trees"),
        (["blocks"], "by_path"),  # Without any kernel.
        (["embed"], "otherwise"),  # Without any table.
        (["embed", "blocks.query"], "functions"),
    ],
)
@pytest.mark.extended
def test_a_part_of_a_model(masked, form):
    """Labels of subtrees mask whole subtrees: what is given below them is ignored."""
    params = jax.tree.map(jnp.ones, MODEL, is_leaf=lambda x: isinstance(x, tuple))
    labels = {"embed": "ours", "blocks": {"query": "ours", "up": "ours"}}
    labels = labels | {path: "sgd" for path in masked if "." not in path}
    if "blocks.query" in masked:
        labels["blocks"] = {"query": "sgd", "up": "ours"}

    def updates(labels):
        ours = orscale(RATE, **FORMS[form])
        optimizer = optax.partition({"ours": ours, "sgd": optax.sgd(RATE)}, labels)
        state = optimizer.init(params)
        if form == "trees" and len(masked) == 2:
            return optimizer.update(params, state, params)[0]
        return jax.eval_shape(optimizer.update, params, state, params)[0]

    with jax.set_mesh(mesh_of({"data": 1})):
        found, expected = updates(labels), updates(jax.tree.broadcast(labels, params))
    assert types_of(found) == types_of(expected)
    if form == "trees" and len(masked) == 2:
        assert_same_bits(found, expected)


FROZEN = {"w": False, "stack": True, "b": False}
PARTIAL = {
    "masked": lambda whole: optax.masked(whole, {k: not v for k, v in FROZEN.items()}),
    "partition": lambda whole: optax.partition(
        {"train": whole, "freeze": optax.set_to_zero()},
        {key: "freeze" if frozen else "train" for key, frozen in FROZEN.items()},
    ),
    "freeze": lambda whole: optax.chain(whole, optax.transforms.freeze(FROZEN)),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("how", PARTIAL)
@ALL
def test_frozen_and_masked_subtrees(name, how):
    seen = train(compiled(PARTIAL[how](build(name))), gradients())
    for gradient, (updates, params, state), (_, expected, _) in zip(
        gradients(), seen, undisturbed(name), strict=True
    ):
        for key in ("w", "b"):
            np.testing.assert_allclose(params[key], expected[key], rtol=1e-6, atol=1e-8)
        if how == "masked":  # Optax passes masked updates on.
            assert_same_bits(updates["stack"], gradient["stack"])
        else:
            assert_same_bits(params["stack"], tree(0)["stack"])
        if how != "freeze":  # Without any state for the stack.
            assert jax.tree.leaves(readout(state, "trace")["stack"]) == []


@pytest.mark.extended
def test_a_clip_spreads_a_nan_and_apply_if_finite_skips_it(name):
    clip = optax.clip_by_global_norm(1.0)
    grads = spoil(tree(1), "one_expert", one_entry(jnp.nan))
    clipped, _ = clip.update(grads, clip.init(grads))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(clipped))
    around = compiled(optax.apply_if_finite(optax.chain(clip, build(name)), 5))
    (none, _, skipped), (_, found, after) = train(around, [grads, tree(2)])
    assert not any(leaf.any() for leaf in jax.tree.leaves(none))
    assert skipped.total_notfinite == 1
    [(_, expected, state)] = train(around, [tree(2)])
    assert_same_bits((found, after.inner_state), (expected, state.inner_state))


@pytest.mark.extended
def test_a_tree_that_grows():
    """Without jit and by a new shape, so that old ones have the same instructions."""

    def new(seed):
        return {"new": tree(seed)["w"][:, :3], "new_bias": tree(seed)["b"]}

    numbers = NUMBERS | {"new": Dims(0, 1), "new_bias": None}
    large = orscale(RATE, weight_dimension_numbers=numbers)
    expected = train(eager(build("orscale")), gradients(4))
    params = expected[1][1] | new(7)
    state = convert_state(expected[1][2], large, params, allow_new=True)
    grads = [gradients(4)[step] | new(20 + step) for step in (2, 3)]
    alone = {"new": new(7)["new"]}
    [(_, anchored, first)] = train(
        eager(orscale(RATE)), [{"new": grads[0]["new"]}], alone
    )
    for step in (2, 3):
        updates, state = large.update(grads[step - 2], state, params)
        params = optax.apply_updates(params, updates)
        assert_same_bits({key: params[key] for key in SHAPES}, expected[step][1])
        if step == 2:
            assert_same_bits(params["new"], anchored["new"])
    for field in ("calibration", "trust_ratio"):
        assert_same_bits(ratios(state, field), ratios(expected[-1][2], field))
    c = readout(state, "calibration")["new"]
    assert c == readout(first, "calibration")["new"]


def refuses(optimizer, state, params, words, grads=None):
    """Without computing anything: update refuses its arguments while it is traced."""
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(
            optimizer.update, params if grads is None else grads, state, params
        )


def accepts(optimizer, state, params, grads=None):
    grads = params if grads is None else grads
    updates, _ = jax.eval_shape(optimizer.update, grads, state, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, grads)


GROWN = [SHAPES | {"grown": SHAPES[leaf]} for leaf in ("w", "b")]
# The shapes of the state's parameters, those of now, and what the error says.
MISFITS = [
    *((SHAPES, grown, "grown' is missing.*allow_new=True") for grown in GROWN),
    *((grown, SHAPES, "grown' is in the state, but") for grown in GROWN),
    *(
        (
            *(SHAPES | {leaf: then}, SHAPES | {leaf: now}),
            rf"{field} of parameter '{leaf}' has shape {re.escape(str(then))}"
            rf".*of {re.escape(str(now))}",
        )
        for leaf, then, now, field in [
            ("stack", (1, 4, 5), (3, 4, 5), "trace"),  # One expert becomes three.
            ("w", (6, 1), (6, 4), "trace"),  # LoRA of rank 1 becomes one of rank 4.
            ("w", (4, 6), (6, 4), "trace"),
            ("b", (1,), (4,), "mu"),
            ("b", (), (1,), "mu"),
        ]
    ),
]


@pytest.mark.parametrize("then, now, words", MISFITS)
@ORSCALE_MUON
def test_the_state_of_other_parameters(name, then, now, words):
    old, new = (
        OPTIMIZERS[name](RATE, weight_dimension_numbers=numbers_of(s))
        for s in (then, now)
    )
    refuses(new, old.init(tree(0, shapes=then)), tree(0, shapes=now), words)


@pytest.mark.parametrize("axes", [Dims(0, (1, 2)), Dims(0, 2), None])
def test_the_state_of_other_matrices(axes):
    optimizer = orscale(RATE, weight_dimension_numbers=NUMBERS | {"stack": axes})
    refuses(optimizer, build("orscale").init(tree(0)), tree(0), "stack' ?(has|is)")


def test_one_state_array_per_matrix_in_a_chain_of_stages():
    stages = {
        "ratio": scale_by_calibrated_trust_ratio,
        "norm": functools.partial(family.hyperball, RATE),
        "neurons": functools.partial(family.normuon, RATE),
    }
    old, new = (tree(0, shapes={"stack": (n, 4, 5)}) for n in (1, 3))
    for stage in stages.values():
        optimizer = stage(weight_dimension_numbers={"stack": Dims(1, 2)})
        refuses(optimizer, optimizer.init(old), new, "of parameter 'stack' has shape")


OTHERS = {
    "orscale": orscale(RATE),
    "muon": muon(RATE),
    "largest": orscale(RATE, anchor="largest"),
    "scheduled": orscale(lambda step: RATE),
    "normuon": family.normuon(RATE),
    "hyperball": family.hyperball(RATE),
    "optax.muon": optax.contrib.muon(RATE),
    "adamw": optax.adamw(RATE),
    "chain": optax.chain(optax.clip(1.0), orscale(RATE)),
}


@pytest.mark.parametrize("new", ["orscale", "muon", "largest", "normuon", "hyperball"])
def test_the_state_of_another_optimizer(new, subtests):
    params = {key: tree(0)[key] for key in ("w", "b")}
    for old in OTHERS:
        with subtests.test(old):
            state = OTHERS[old].init(params)
            if {old, new} != {"orscale", "largest"} and old != new:
                words = r"the state.* orscale_jax.convert_state\(state"
                refuses(OTHERS[new], state, params, words)
                state = convert_state(state, OTHERS[new], params, momentum=0.9)
            accepts(OTHERS[new], state, params)


def as_lists(node):
    """What plain msgpack makes of a state."""
    if isinstance(node, dict):
        return {key: as_lists(child) for key, child in node.items()}
    return [as_lists(child) for child in node] if isinstance(node, tuple) else node


def test_a_state_restored_without_a_target(name):
    optimizer = build(name)
    state = optimizer.init(tree(0))
    for restored in (serialization.to_state_dict(state), as_lists(state), None):
        refuses(optimizer, restored, tree(0), "without a target.*from_state_dict")
    inner = optax.tree.set(state.inner_states["matrix"], inner_state=[1, 2])
    broken = state._replace(inner_states=state.inner_states | {"matrix": inner})
    refuses(optimizer, broken, tree(0), "inner_states.matrix.inner_state' is a list")
    blob = serialization.to_bytes(state)
    raw = serialization.msgpack_restore(blob)
    accepts(optimizer, serialization.from_state_dict(state, raw), tree(0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bfloat16, jnp.float16])
@pytest.mark.quick_first_case
def test_a_state_of_other_dtypes(dtype):
    optimizer = build("orscale")
    state = optimizer.init(tree(0))
    cast = optax.tree.set(
        state, trace=jax.tree.map(lambda x: x.astype(dtype), readout(state, "trace"))
    )
    if jnp.issubdtype(dtype, jnp.floating):
        accepts(optimizer, cast, tree(0))
    else:
        refuses(optimizer, cast, tree(0), "trace of parameter 'stack'.*dtype (int|comp)")


@pytest.mark.extended
def test_states_that_fit():
    """No false alarm, whatever is around the optimizer or around the arrays."""
    params, optimizer = tree(0), build("orscale")
    guarded = optax.apply_if_finite(optimizer, 3)
    few = {key: params[key] for key in ("w", "b")}
    for wrapped, given in (
        (optax.MultiSteps(guarded, 2).gradient_transformation(), params),
        (optax.masked(optimizer, {"w": True, "stack": False, "b": True}), params),
        (optax.inject_hyperparams(orscale)(RATE), few),
        (optax.flatten(orscale(RATE)), few),
    ):
        accepts(wrapped, wrapped.init(given), given)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    accepts(optimizer, jax.tree.map(np.asarray, optimizer.init(params)), half)
    population = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    states = jax.vmap(optimizer.init)(population)
    vmapped = optax.GradientTransformation(optimizer.init, jax.vmap(optimizer.update))
    accepts(vmapped, states, population)
    refuses(optimizer, states, params, "count has shape .2,.")


# Low precision around the optimizer.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("factory", [orscale, muon, family.normuon])
@pytest.mark.quick_first_case
def test_hyperparameters_of_low_precision(factory, dtype):
    """optax.inject_hyperparams casts them to the dtype of the parameters."""
    params = tree(0, dtype, shapes={"w": (6, 4), "b": (4,)})
    rate, eps = jnp.asarray(RATE, dtype), np.asarray(1e-3, dtype)
    for argument, value in [
        ("weight_decay", rate),
        ("ns_coeffs", jnp.ones(3, dtype)),
        ("adam_eps", eps),
        ("adam_eps", eps[()]),
    ]:
        with pytest.raises(ValueError, match=f"^{argument} has dtype .*float32"):
            factory(RATE, **{argument: value})
    scheduled, inject = factory(lambda count: rate), optax.inject_hyperparams
    refuses(scheduled, scheduled.init(params), params, "schedule learning_rate has dtype")
    with pytest.raises(ValueError, match=r"rate has .*hyperparam_dtype=jnp\.float32"):
        inject(factory)(RATE).init(params)
    wide = inject(factory, hyperparam_dtype=jnp.float32)(RATE)
    state = wide.init(params)
    accepts(wide, state, params)
    state.hyperparams["learning_rate"] = rate
    refuses(wide, state, params, "rate has dtype")


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool"])
def test_integers_are_not_trained(dtype):
    """Optax's AdamW moves them by floats, which are rounded to nothing."""
    params = {"count": jnp.arange(3).astype(dtype), "w": jnp.eye(3)}
    of_w = {"w": jnp.ones((3, 3))}
    optimizer = orscale(RATE, weight_dimension_numbers={"count": None, "w": Dims(0, 1)})
    state = optimizer.init(params)
    float0 = np.zeros(3, jax.dtypes.float0)  # From jax.grad with allow_int.
    for grads in (params["count"], jnp.ones(3), float0):
        with pytest.raises(ValueError, match=r"'count' has dtype .* Keep others out of"):
            optimizer.update(of_w | {"count": grads}, state, params)
    # As the error says.
    count, trained = params["count"], {"w": params["w"]}
    optimizer = orscale(RATE)
    grads = jax.grad(lambda p: (p["w"] @ count.astype(float)).sum())(trained)
    updates, _ = optimizer.update(grads, optimizer.init(trained), trained)
    assert optax.apply_updates(trained, updates)["w"].any()


@pytest.mark.extended
def test_momentum_that_overflows_float16():
    """M tends to G / (1 − μ): 65504 is the largest number of float16."""
    params = tree(0, jnp.float16, shapes={"w": (6, 4)})
    grads = [{"w": jnp.full((6, 4), 40_000.0, jnp.float16)}] * 3
    for mu_dtype, finite in ((None, False), (jnp.float32, True)):
        optimizer = orscale(RATE, momentum=0.5, mu_dtype=mu_dtype)
        seen = train(compiled(optimizer), grads, params)
        momentum = readout(seen[-1][2], "trace")["w"]
        assert jnp.isfinite(momentum).all() == finite


@pytest.mark.parametrize("size", [1e-5, 3e-4])
def test_small_gradients_in_float16(size):
    """Their squares are 0 in float16, and Adam's update would divide by its floor."""
    updates = {}
    for dtype in (jnp.float16, jnp.float32):
        params = {"b": jnp.ones(4, dtype)}
        grads = [{"b": jnp.full(4, size, dtype)}] * 60
        optimizer = compiled(muon(RATE, weight_decay=0.0))
        updates[dtype] = train(optimizer, grads, params)[-1][0]["b"]
    # The first moment is float16, and rounded by up to 0.3 % at 1e-5.
    np.testing.assert_allclose(updates[jnp.float16], updates[jnp.float32], rtol=0.03)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", jnp.float8_e5m2, "uint8", jnp.complex64]
)
@pytest.mark.quick_first_case
def test_dtypes_of_too_few_bits(dtype):
    """Newton–Schulz in float8 would diverge, and JAX does not promote such dtypes."""
    for factory in OPTIMIZERS.values():
        with pytest.raises(ValueError, match=r"mu_dtype=.*16 bits"):
            factory(RATE, mu_dtype=dtype)
    for function in (functools.partial(orscale, RATE), orthogonalize):
        with pytest.raises(ValueError, match=r"ns_dtype=.*16 bits"):
            function(ns_dtype=dtype)
    grads = tree(1) | {"w": jnp.ones((6, 4)).astype(dtype)}
    optimizer = build("muon")
    refuses(
        optimizer, optimizer.init(tree(0)), tree(0), "gradient of parameter 'w'", grads
    )
    if jnp.issubdtype(dtype, jnp.floating):
        params = tree(0) | {"w": tree(0)["w"].astype(dtype)}
        refuses(optimizer, optimizer.init(params), params, "at least 16 bits", grads)


# Arguments.


@pytest.mark.parametrize("factory", [orscale, muon, family.normuon])
def test_arguments_of_other_names(factory):
    with pytest.raises(TypeError, match="'xyz': its arguments are learning_rate, "):
        factory(RATE, xyz=1)
    name = rf"{factory.__name__}\(\): "
    with pytest.raises(TypeError, match=f"{name}too many"):
        factory(RATE, 0.1)
    with pytest.raises(TypeError, match=f"{name}missing .* 'learning_rate'"):
        factory()


@pytest.mark.extended
@pytest.mark.parametrize(
    "argument",
    ["learning_rate", "weight_decay", "adam_learning_rate", "adam_weight_decay"],
)
def test_schedules_that_return_no_number(argument):
    params = {"w": tree(0)["w"], "b": tree(0)["b"]}

    def returning(value):
        return orscale(**{"learning_rate": RATE, argument: lambda step: value})

    for value in (None, "1", True, np.ones(1), np.ones(4), 1j):
        optimizer = returning(value)
        state = optimizer.init(params)
        refuses(optimizer, state, params, f"schedule {argument} returned")
    zero = returning(0)
    accepts(zero, zero.init(params), params)


def test_a_state_where_the_model_belongs():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    for given in (nnx.state(model), nnx.split(model), nnx.to_pure_dict(nnx.state(model))):
        with pytest.raises(ValueError, match=r"pass the model itself.* flax.nnx.Module"):
            nnx_dimension_numbers(given)
    with pytest.raises(ValueError, match=r"pass the model itself.* flax.linen.Module"):
        linen_dimension_numbers({"params": {}}, jnp.ones((1, 3)))


@pytest.mark.parametrize("leaf", SHAPES)
@ORSCALE_MUON
def test_gradients_with_a_leaf_missing_or_too_many(name, leaf):
    optimizer = build(name)
    state, grads = optimizer.init(tree(0)), tree(1)
    with pytest.raises(ValueError, match="you are not passing `params`"):
        optimizer.update(grads, state)
    missing = {key: grads[key] for key in grads.keys() - {leaf}}
    for broken in (missing, grads | {leaf: [1.0, 2.0]}):
        with pytest.raises(ValueError, match=rf"do not fit the parameters: '{leaf}' "):
            optimizer.update(broken, state, tree(0))
    frozen = grads | {leaf: None}
    for none in (None, optax.MaskedNode()):
        with pytest.raises(ValueError, match=f"^the gradient of parameter '{leaf}' is"):
            optimizer.update(grads | {leaf: none}, state, tree(0))
    # Both remedies.
    accepts(optimizer, state, tree(0), grads | {leaf: jnp.zeros_like(grads[leaf])})
    accepts(optimizer, optimizer.init(tree(0) | {leaf: None}), tree(0), frozen)
    with pytest.raises(ValueError, match="surplus"):
        optimizer.update(grads | {"surplus": grads[leaf]}, state, tree(0))
    with pytest.raises(ValueError, match="the whole tree is None in the gradients"):
        optimizer.update(None, state, tree(0))


@pytest.mark.parametrize(
    "leaf, shape, dtype",
    [
        ("w", (4, 6), "float32"),
        ("w", (), "float32"),
        ("stack", (1, 4, 5), "float32"),
        ("b", (1,), "float32"),
        ("w", (6, 4), "complex64"),
        ("b", (4,), "int32"),
    ],
)
@ORSCALE_MUON
def test_gradients_that_do_not_fit(name, leaf, shape, dtype):
    optimizer = build(name)
    grads = tree(1) | {leaf: jnp.ones(shape, dtype)}
    with pytest.raises(ValueError, match=f"'{leaf}'"):
        optimizer.update(grads, optimizer.init(tree(0)), tree(0))


@ORSCALE_MUON
@pytest.mark.extended
def test_ten_thousand_steps(name):
    optimizer, target = build(name), tree(3)

    def loss(params):
        return sum(jnp.sum((params[key] - target[key]) ** 2) for key in SHAPES)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def hundred_steps(carry):
        def step(carry, _):
            return step_of(optimizer)(*carry, jax.grad(loss)(carry[0])), None

        return jax.lax.scan(step, carry, length=100)[0]

    carry = begin = tree(0), optimizer.init(tree(0))
    seen = [carry := hundred_steps(carry) for _ in range(100)]
    assert types_of(carry) == types_of(begin)
    chex.assert_tree_all_finite(carry)
    assert loss(carry[0]) < loss(tree(0))
    if name != "muon":
        assert_same_bits(*(readout(seen[i][1], "calibration") for i in (0, -1)))
