"""One matrix for each head of attention."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks, by_path, describe, muon, orscale
from orscale_jax.equinox import dimension_numbers as equinox_numbers
from orscale_jax.flax import linen_dimension_numbers, nnx_dimension_numbers
from orscale_jax.haliax import dimension_numbers as haliax_numbers
from orscale_jax.parameters.dimension_numbers import matrix_axes
from tests import leaves
from tests.runs import AUTO, EXPLICIT, first_update, mesh_of, placed, run

# Width, query heads, heads of keys and of values, features of a head; layers.
D, H, K, F, L = 8, 4, 2, 4, 2


def cut(w, count, axis=1):
    return np.split(w, count, axis)


def along(w, axis):
    """The matrices at each index of an axis."""
    return list(np.moveaxis(w, axis, 0))


def in_layers(function):
    return lambda w: [matrix for layer in w for matrix in function(layer)]


# For each layout: the path, the shape, the rule of `by_path` (None: the default rule),
# `head_size`, and the matrices by NumPy, of rows and columns.
QKV = "attention.qkv"
OUT = "attention.out"
LAYOUTS = {
    "query": ("attention.query", (D, H, F), Dims(0, (1, 2)), True, lambda w: along(w, 1)),
    "query, 2-D": ("attn.q_proj", (D, H * F), None, F, lambda w: cut(w, H)),
    "query of PyTorch": (
        "attn.q_proj.weight", (H * F, D), Dims(1, 0), F, lambda w: cut(w.T, H),
    ),
    "query of Gemma": ("attn.q_einsum", (H, D, F), Dims(1, (0, 2)), True, list),
    "queries by group": (
        "attn.q_proj", (K, H // K, F, D), Dims(3, (0, 1, 2)), True,
        lambda w: [w[k, g].T for k in range(K) for g in range(H // K)],
    ),
    "key": ("attention.key", (D, K, F), Dims(0, (1, 2)), F, lambda w: along(w, 1)),
    "key of one head": ("attn.k_proj", (D, F), None, F, lambda w: [w]),
    "output": (OUT, (H, F, D), Dims((0, 1), 2), True, list),
    "output, 2-D": ("attn.c_proj", (H * F, D), None, F, lambda w: cut(w, H, 0)),
    "qkv, side by side": (
        "attn.c_attn", (D, 3 * H * F), None, F, lambda w: cut(w, 3 * H),
    ),
    "qkv of blocks": (
        QKV, (D, 3 * H * F), Blocks(0, 1, block_axis=1, blocks=3), F,
        lambda w: cut(w, 3 * H),
    ),
    "qkv, grouped": (
        QKV, (D, (H + 2 * K) * F), None, F, lambda w: cut(w, H + 2 * K),
    ),
    "qkv, of one head": (QKV, (D, 24), None, 8, lambda w: cut(w, 3)),
    "qkv by group": (
        QKV, (D, K, (H // K + 2) * F), Dims(0, (1, 2)), F,
        lambda w: cut(w.reshape(D, -1), H + 2 * K),
    ),
    "qkv, parts first": (
        QKV, (D, 3, H, F), Dims(0, (1, 2, 3)), True,
        lambda w: cut(w.reshape(D, -1), 3 * H),
    ),
    "qkv in front": (
        QKV, (3, D, H * F), Dims(1, (0, 2)), F,
        lambda w: [head for part in w for head in cut(part, H)],
    ),
    "qkv within heads": (
        QKV, (D, H, 3 * F), Dims(0, (1, 2)), F, lambda w: cut(w.reshape(D, -1), 3 * H),
    ),
    "kv of Gemma": (
        "attn.kv_einsum", (2, K, D, F), Dims(2, (0, 1, 3)), F,
        lambda w: list(w.reshape(-1, D, F)),
    ),
    "latent, up to key and value": (
        "mla.kv_up", (D, H * 5), None, 5, lambda w: cut(w, H),
    ),
    "latent, up to key, and to value": (
        "mla.kv_b_proj", (D, H * 5), None, (3, 2),
        lambda w: [m for head in cut(w, H) for m in np.split(head, [3], 1)],
    ),
    "latent, up, 3-D": (
        "mla.kv_up", (D, H, 4), Dims(0, (1, 2)), (2, 2),
        lambda w: [m for head in along(w, 1) for m in cut(head, 2)],
    ),
    "layers": (
        "layers.attention.query", (L, D, H, F), Dims(1, (2, 3)), True,
        in_layers(lambda w: along(w, 1)),
    ),
    "layers, 2-D": (
        "layers.attention.qkv", (L, D, 3 * H * F), Dims(1, 2), F,
        in_layers(lambda w: cut(w, 3 * H)),
    ),
    "by expression": (
        "attn.c_attn", (D, 3 * H * F), None, {"c_attn": F}, lambda w: cut(w, 3 * H),
    ),
    "pairs, 2-D": ("attn.q_proj", (D, H * F), None, 2 * F, lambda w: cut(w, 2)),
    "pairs, qkv": (
        QKV, (D, 3 * H * F), Blocks(0, 1, block_axis=1, blocks=3), 2 * F,
        lambda w: cut(w, 6),
    ),
}  # fmt: skip


def values(shape, step=0, dtype=np.float64):
    return np.random.default_rng(step).normal(size=shape).astype(dtype)


def numbers_of(name):
    path, _, rule, head_size, _ = LAYOUTS[name]
    rules = {} if rule is None else {re.escape(path): rule}
    return by_path(rules, head_size=head_size)


def tree_of(name, leaf):
    *modules, last = LAYOUTS[name][0].split(".")
    return functools.reduce(lambda tree, key: {key: tree}, modules[::-1], {last: leaf})


@pytest.mark.quick_first_case
@pytest.mark.parametrize("start", range(4))
def test_each_head_is_a_matrix(start, subtests):
    for name in list(LAYOUTS)[start::4]:
        with subtests.test(name):
            heads_are_matrices(name)


def heads_are_matrices(name):
    _, shape, _, _, by_hand = LAYOUTS[name]
    weight = values(shape)
    tree = tree_of(name, weight)
    [axes] = jax.tree.leaves(
        matrix_axes(numbers_of(name), tree),
        is_leaf=lambda node: hasattr(node, "matrices"),
    )
    stacks = axes.batches(jnp.asarray(weight))
    found = [m for stack in stacks for m in stack.reshape(-1, *stack.shape[-2:])]
    assert len(found) == len(by_hand(weight))
    by_first = {float(m[0, 0]): np.asarray(m) for m in found}
    for matrix in by_hand(jnp.asarray(weight)):
        np.testing.assert_array_equal(by_first[float(matrix[0, 0])], matrix)


# Layouts, and how they lie on a mesh if heads do, or if only the width does.
SHARDED = {
    "query": (P("a", "b"), P(("a", "b"))),
    "output, 2-D": (P("b", "a"), P(None, ("a", "b"))),
    "qkv, grouped": (P("a", "b"), P(("a", "b"))),
    "qkv, of one head": (P("a", "b"), P(("a", "b"))),  # Fewer than devices
    "qkv, parts first": (P("a", None, "b"), P(("a", "b"))),
    "latent, up to key, and to value": (P("a", "b"), P(("a", "b"))),
    "layers": (P(None, "a", "b"), P(None, ("a", "b"))),
    "pairs, 2-D": (P("a", "b"), P(("a", "b"))),
}
OTHERS = ("query of PyTorch", "kv of Gemma", "qkv by group", "pairs, qkv")


def together(names, step, dtype):
    return {name: values(LAYOUTS[name][1], step, dtype) for name in names}


def apart(tree):
    return {name: LAYOUTS[name][4](np.asarray(leaf)) for name, leaf in tree.items()}


def numbers_together(tree):
    return {
        name: jax.tree.leaves(
            numbers_of(name)(tree_of(name, leaf)),
            is_leaf=lambda node: isinstance(node, Dims | Blocks),
        )[0]
        for name, leaf in tree.items()
    }


def assert_close(found, expected, tolerance):
    for name, heads in apart(found).items():
        for head, other in zip(heads, expected[name], strict=True):
            assert leaves.relative_error(head, other) < tolerance, name


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "names, build",
    [
        (("query", "qkv, parts first", "kv of Gemma"), orscale),
        ((*SHARDED, *OTHERS), orscale),
        ((*SHARDED, *OTHERS), muon),
    ],
)
def test_heads_take_the_steps_of_separate_parameters(enable_x64, names, build):
    build = functools.partial(build, ns_dtype=jnp.float64)
    params = together(names, 0, np.float64)
    whole = build(0.02, weight_dimension_numbers=numbers_together(params))
    heads = build(0.02, weight_dimension_numbers=dict.fromkeys(names, Dims(0, 1)))
    found = run(whole, params, 3, lambda step: together(names, step, np.float64))
    expected = run(
        heads, apart(params), 3, lambda step: apart(together(names, step, np.float64))
    )
    for (tree, _), (separate, _) in zip(found, expected, strict=True):
        assert_close(tree, separate, 1e-11)


@pytest.mark.extended
@pytest.mark.parametrize("build", [orscale, pytest.param(muon, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("sharded", ["heads", "width"])
def test_on_a_mesh(build, kind, sharded):
    mesh = mesh_of({"a": 2, "b": 4}, kind)
    params, grads = (together(SHARDED, step, np.float32) for step in (0, 1))
    optimizer = build(0.02, weight_dimension_numbers=dict.fromkeys(SHARDED, Dims(0, 1)))
    expected, _ = optimizer.update(
        apart(grads), optimizer.init(apart(params)), apart(params)
    )
    specs = {name: both[sharded == "width"] for name, both in SHARDED.items()}
    optimizer = build(0.02, weight_dimension_numbers=numbers_together(params))
    params, grads = (placed(tree, mesh, specs) for tree in (params, grads))
    with jax.set_mesh(mesh):
        optimizer.init(params)  # It sees how they are sharded.
        updates, state, after = first_update(optimizer, params, grads)
    assert_close(updates, expected, 1e-4)
    if kind == EXPLICIT:
        assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def of_nnx(model):
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return params, nnx_dimension_numbers(model, head_size=True)(params)


def nnx_attention():
    return of_nnx(nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0)))


def nnx_einsums():
    qkv = nnx.Einsum("BTD,SNDH->SBTNH", (3, H, D, F), rngs=nnx.Rngs(0))
    vec = nnx.Einsum("BTNH,NHD->BTD", (H, F, D), rngs=nnx.Rngs(0))
    return of_nnx(nnx.Dict(attn=nnx.Dict(qkv_einsum=qkv, attn_vec_einsum=vec)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(H, name="attention")(x), None


def linen_scanned():
    axes = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}}
    module, x = nn.scan(Block, length=L, **axes)(), jnp.ones((1, 3, D))
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert params["attention"]["query"]["kernel"].shape == (D, L, H, D // H)
    return params, linen_dimension_numbers(module, x, head_size=True)


def equinox_attention():
    @eqx.filter_vmap
    def build(key):
        return eqx.nn.MultiheadAttention(H, D, key=key)

    model = build(jax.random.split(jax.random.key(0), L))
    params = eqx.filter(model, eqx.is_inexact_array)
    return params, equinox_numbers(model, head_size=D // H)(params)


def haliax_attention():
    groups, queries, size, width = hax.make_axes(kv=K, group=H // K, size=F, embed=D)
    key = jax.random.key(0)
    model = {
        "q_proj": hax.nn.Linear.init(width, (groups, queries, size), key=key),
        "k_proj": hax.nn.Linear.init(width, (groups, size), key=key),
        "o_proj": hax.nn.Linear.init((groups, queries, size), width, key=key),
    }
    params = eqx.filter({"attention": model}, eqx.is_inexact_array)
    numbers = haliax_numbers({"attention": model}, head_size=F)(params)
    return params, numbers


# For each library, the matrices of each projection: how many, and their shape.
LIBRARIES = {
    nnx_attention: {"query": (H, D, 2), "key": (H, D, 2), "out": (H, 2, D)},
    nnx_einsums: {"qkv": (3 * H, D, F), "vec": (H, F, D)},
    linen_scanned: {"query": (L * H, D, 2), "out": (L * H, 2, D)},
    equinox_attention: {
        "query": (L * H, D, 2),
        "value": (L * H, D, 2),
        "output": (L * H, 2, D),
    },
    haliax_attention: {"q_proj": (H, D, F), "k_proj": (K, D, F), "o_proj": (H, F, D)},
}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda build: build.__name__)
@pytest.mark.extended
def test_libraries(library):
    params, numbers = library()
    description = describe(params, orscale(1e-3, weight_dimension_numbers=numbers))
    for name, expected in LIBRARIES[library].items():
        [row] = (r for r in description.select(name).rows if r.rule == "matrix")
        assert (row.matrices, row.m, row.n) == expected, name
        assert not row.check


def shapes(**by_name):
    return {name: jnp.ones(shape) for name, shape in by_name.items()}


REFUSED = {
    "two axes, and no number": (
        {"attn": shapes(c_attn=(D, 3 * D), c_proj=(D, D))}, {}, True,
        "'attn.c_attn' of shape (8, 24), class 'attention qkv': nothing says how many "
        "heads axis 1 of length 24 holds: pass head_size=",
    ),
    "not divisible": (
        {"attn": shapes(q_proj=(D, D))}, {}, 3,
        "'attn.q_proj' of shape (8, 8), class 'attention query': heads of 3 do not "
        "divide its 8 features",
    ),
    "a weight of PyTorch without a rule": (
        {"attn": {"q_proj": shapes(weight=(D, D))}}, {}, F,
        "parameter 'attn.q_proj.weight' of shape (8, 8) is to be divided by head_size, "
        "and a weight is (outputs, inputs) in PyTorch",
    ),
    "blocks across heads": (
        {"attn": shapes(q_proj=(D, 18))},
        {"q_proj": Blocks(0, 1, block_axis=1, blocks=2)}, 6,
        "heads of 6 do not divide its 18 features in blocks of (9, 9)",
    ),
    "pairs across projections": (
        {"attn": shapes(qkv=(D, 36))},
        {"qkv": Blocks(0, 1, block_axis=1, blocks=3)}, 2 * F,
        "heads of 8 do not divide its 36 features in blocks of (12, 12, 12)",
    ),
    "blocks of the inputs": (
        {"attn": shapes(q_proj=(D, 16))},
        {"q_proj": Blocks(0, 1, block_axis=0, blocks=2)}, F, "lie along another axis",
    ),
    "no axis for a class without one": (
        {"mixer": jnp.ones((D, D))}, {}, {"mixer": F},
        "'mixer' of shape (8, 8), class 'other': its class does not say along which axis "
        "heads lie",
    ),
    "all four fused": (
        {"attn": shapes(qkvo=(D, 4 * D))}, {}, F,
        "class 'attention qkvo': its class does not say",
    ),
    "no attention": (
        {"mlp": shapes(up=(D, D))}, {}, True, "head_size divides no parameter",
    ),
    "no such path": (
        {"attn": shapes(q_proj=(D, D))}, {}, {"q_porj": F},
        "'q_porj' of head_size matches no parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_unknown_or_does_not_fit_is_refused(case):
    tree, rules, head_size, message = REFUSED[case]
    numbers = by_path(rules, head_size=head_size)
    with pytest.raises(ValueError, match=re.escape(message)):
        numbers(tree)


@pytest.mark.parametrize(
    "given, message",
    [
        (0, "head_size=0 is not valid: pass the number"),
        ("12", "head_size='12' is not valid"),
        ({"q": 1.5}, r"head_size\['q'\]=1.5 is not val"),
        ((3, 0), r"head_size=\(3, 0\) is not valid"),
        ((), r"head_size=\(\) is not valid"),
        ([4], r"head_size=\[4\] is not valid: pass a map"),
        (np.array(8), "head_size="),
    ],
)
def test_arguments_are_checked_at_once(given, message):
    with pytest.raises(ValueError, match=message):
        by_path({}, head_size=given)


def test_all_misfits_are_in_one_error():
    tree = {"attn": shapes(q_proj=(D, 15), o_proj=(15, D))}
    with pytest.raises(ValueError, match=r"(?s)attn\.o_proj.*q_proj.*with False if it"):
        by_path({}, head_size=F)(tree)


def test_expressions_choose_projections():
    attention = shapes(c_attn=(D, 3 * D), c_proj=(D, D), k_rope=(D, 2), gate=(D, D))
    tree = {"attn": attention, "mlp": shapes(up=(D, D))}
    numbers = by_path({}, head_size={"c_proj": False, "attn": D // H})(tree)
    assert numbers["attn"].pop("c_attn") == Blocks(0, 1, block_axis=1, blocks=3 * H)
    assert {*numbers["attn"].values(), *numbers["mlp"].values()} == {Dims(0, 1)}


def test_latent_attention_has_heads_of_three_sizes():
    """A mapping has them; one number fits one of the projections, and is refused."""
    tree = {"mla": shapes(q_up=(D, 6 * H), kv_up=(D, 7 * H), out=(3 * H, D))}
    sizes = {"q_up": 6, "kv_up": (4, 3), "out": 3}
    found = by_path({}, head_size=sizes)(tree)["mla"]
    assert found["q_up"] == Blocks(0, 1, block_axis=1, blocks=H)
    assert found["kv_up"] == Blocks(0, 1, block_axis=1, blocks=(4, 3) * H)
    assert found["out"] == Blocks(0, 1, block_axis=0, blocks=H)
    with pytest.raises(ValueError, match=r"kv_up.*heads of 6 do not divide its \d+"):
        by_path({}, head_size=6)(tree)


def test_numbers_of_another_rule_are_divided():
    model = {"attention": shapes(query=(D, H, F), out=(H, F, D)), "bias": jnp.ones(D)}
    given = {
        "attention": {"query": Dims(0, (1, 2)), "out": Dims((0, 1), 2)},
        "bias": None,
    }
    numbers = by_path({}, otherwise=given, head_size=True)(model)
    expected = {"query": Dims(0, 2), "out": Dims(1, 2)}
    assert numbers == {"attention": expected, "bias": None}


def test_of_a_masked_tree():
    """Under optax.partition, a group may have no attention."""
    tree = {"attention": shapes(q_proj=(D, D)), "mlp": shapes(up=(D, D))}
    numbers = by_path({}, head_size=D // H)
    groups = {name: orscale(1e-3, weight_dimension_numbers=numbers) for name in "ab"}
    labels = {"attention": {"q_proj": "a"}, "mlp": {"up": "b"}}
    optimizer = optax.partition(groups, labels)
    rows = {row.path: row for row in describe(tree, optimizer).rows}
    assert rows["attention.q_proj"].state_bytes - rows["mlp.up"].state_bytes == 28 * 3
