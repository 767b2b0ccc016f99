"""The table of the parameters, against counts by hand."""

import contextlib
import dataclasses
import functools
import io
import itertools
import re
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    by_path,
    describe,
    muon,
    orscale,
    orthogonalize,
    state_shardings,
)
from orscale_jax.equinox import dimension_numbers as equinox_numbers
from orscale_jax.flax import linen_dimension_numbers, nnx_dimension_numbers
from orscale_jax.haliax import dimension_numbers as haliax_numbers
from orscale_jax.newton_schulz.platforms import PLATFORMS
from tests import leaves
from tests.runs import FAMILY

DOCS = Path(__file__).parents[2] / "docs"
NUMBERS = by_path(
    {
        "query": Dims(0, (1, 2)),
        "experts": Dims(-2, -1),
        "stem": Dims((0, 1, 2), 3),
        "router": "adamw",
    }
)
# Path, shape, rule, matrices, m, n, and bytes of orscale's state in float32: a momentum
# and, per matrix, six numbers and a flag; two moments under AdamW.
TABLE = [
    ("blocks.0.experts.up", (4, 6, 16), "matrix", 4, 6, 16, 4 * 384 + 28 * 4),
    ("blocks.0.norm.scale", (6,), "adamw", 0, 0, 0, 8 * 6),
    ("blocks.0.out", (6, 6), "matrix", 1, 6, 6, 4 * 36 + 28),
    ("blocks.0.query", (6, 2, 5), "matrix", 1, 6, 10, 4 * 60 + 28),
    ("blocks.0.router", (6, 4), "adamw", 0, 0, 0, 8 * 24),
    ("lm_head.kernel", (6, 10), "adamw", 0, 0, 0, 8 * 60),
    ("stem.kernel", (3, 3, 2, 6), "matrix", 1, 18, 6, 4 * 108 + 28),
    ("wte", (10, 6), "adamw", 0, 0, 0, 8 * 60),
]
# A step count and the two bounds of the ratio belong to no leaf.
MATRIX_BYTES, ADAM_BYTES, SHARED_BYTES = 2352 + 7 * 28, 1200, 4


def with_numbers(numbers):
    return orscale(1e-3, weight_dimension_numbers=numbers)


def size(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.extended
def test_against_the_table():
    leaves = {path: jnp.ones(shape) for path, shape, *_ in TABLE}
    params = unflatten_dict(leaves, sep=".") | {"absent": None}
    optimizer = orscale(1e-3, weight_dimension_numbers=NUMBERS)
    for tree in (params, jax.eval_shape(lambda: params)):
        description = describe(tree, optimizer)
        found = [
            (r.path, r.shape, r.rule, r.matrices, r.m, r.n, r.state_bytes)
            for r in description.rows
        ]
        assert found == TABLE
        for row in description.rows:
            assert row.parameters == np.prod(row.shape) and row.dtype == np.float32
            if row.rule == "adamw":
                assert row.scale is row.norms is None
            else:
                np.testing.assert_allclose(row.scale, 0.2 * np.sqrt(max(row.m, row.n)))
                assert (row.norms is None) == (tree is not params)
        totals = description.totals
        total = MATRIX_BYTES + ADAM_BYTES + SHARED_BYTES
        assert dataclasses.astuple(totals["matrix"]) == (4, 7, 588, MATRIX_BYTES)
        assert dataclasses.astuple(totals["adamw"]) == (4, 0, 150, ADAM_BYTES)
        assert dataclasses.astuple(totals["shared"]) == (0, 0, 0, SHARED_BYTES)
        assert dataclasses.astuple(totals["all"]) == (8, 7, 738, total)
    assert total == size(optimizer.init(params))


@pytest.mark.extended
def test_the_classes_of_layers():
    """Those of layer_classes, also for the blocks of a leaf and in a selection."""
    params = {"attention": {"qkv": jnp.ones((4, 9)), "out": jnp.ones((4, 4))}}
    params["moe"] = {"gate": jnp.ones((4, 2))}
    numbers = by_path({"qkv": Blocks(0, 1, block_axis=1, blocks=(4, 5))})
    description = describe(params, with_numbers(numbers))
    assert [(row.name, row.layer_class) for row in description.rows] == [
        ("attention.out", "attention output"),
        ("attention.qkv[:, 0:4]", "attention qkv"),
        ("attention.qkv[:, 4:9]", "attention qkv"),
        ("moe.gate", "router"),
    ]
    # That of one selected row still tells from what stands beside it.
    assert [row.layer_class for row in description.select("gate").rows] == ["router"]


@pytest.mark.extended
def test_norms_against_numpy():
    tree = leaves.random_tree(0)
    description = describe(tree, with_numbers(leaves.DIMENSIONS))
    for name in leaves.KINDS:
        matrices = leaves.matrices(name, tree[name])
        for row in description.select(f"^{name}$").rows:
            alike = [m for m in matrices if m.shape == (row.m, row.n)]
            norms = [np.linalg.norm(matrix) for matrix in alike]
            if not row.block:
                np.testing.assert_allclose(row.norms, (min(norms), max(norms)), rtol=1e-6)
                assert row.matrices == len(matrices) == len(alike)
            else:
                for norm in row.norms:
                    assert min(abs(norm / other - 1) for other in norms) < 1e-6
    low = jnp.full((300, 300), 0.1, jnp.bfloat16)  # A bfloat16 sum would stagnate.
    [row] = describe({"w": low}).rows
    np.testing.assert_allclose(row.norms[0], 300 * float(low[0, 0]), rtol=1e-5)
    [row] = describe({"w": np.ones((2, 3))}).rows
    np.testing.assert_allclose(row.norms, [6**0.5] * 2, rtol=1e-6)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("blocks", [3, (4, 1, 1)])
def test_bytes_of_state_that_is_not_divided_into_blocks(blocks):
    params = {"qkv": jnp.ones((5, 6))}
    ours = with_numbers(Blocks(0, 1, block_axis=1, blocks=blocks))
    for other in (optax.adafactor(0.1, 2), optax.lbfgs(memory_size=3)):
        optimizer = optax.chain(ours, other)
        total = describe(params, optimizer).totals["all"]
        assert total.state_bytes == size(optimizer.init(params))


def test_without_an_optimizer_it_describes_muon():
    params = {"w": jnp.ones((4, 8)), "b": jnp.ones(3)}
    assert str(describe(params)) == str(describe(params, muon(1e-3)))
    assert str(describe(params)) != str(describe(params, orscale(1e-3)))


def test_owners_of_the_state():
    description = describe(jnp.ones((2, 3)), orscale(0.1))
    [row] = description.rows  # It owns what its matrix keeps.
    assert (row.path, row.state_bytes, description.shared_bytes) == ("", 24 + 28, 4)
    assert "(the only leaf)" in str(description)
    listed = [jnp.ones(3), (jnp.ones(5), jnp.ones(7))]
    chain = optax.chain(optax.trace(0.9), optax.scale_by_adam())
    description = describe(listed, chain)
    assert [row.state_bytes for row in description.rows] == [36, 60, 84]
    assert description.shared_bytes == 4
    # Other dtypes, and a frozen part.
    params = {"w": jnp.ones((3, 4), jnp.bfloat16), "v": jnp.ones((3, 4), jnp.bfloat16)}
    groups = {"on": muon(0.1, mu_dtype=jnp.float32), "off": optax.set_to_zero()}
    optimizer = optax.partition(groups, {"w": "on", "v": "off"})
    frozen, trained = describe(params, optimizer).rows
    assert (frozen.state_bytes, trained.state_bytes) == (0, 4 * 12)


OPTIMIZERS = {
    "orscale": orscale(0.1),
    "wrapped": optax.MultiSteps(optax.inject_hyperparams(muon)(0.1), 2),
    "a rule": muon(0.1, weight_dimension_numbers=by_path({"w": "matrix"})),
    "parted": optax.partition(
        {"a": orscale(0.1), "b": optax.adamw(0.1)},
        {"conv": "a", "c": "a", "w": "a", "layers": "a"},
    ),
}


def test_why_a_parameter_has_its_rule():
    shapes = {
        "up": (4, 8),
        "b": (8,),
        "embed": (9, 4),
        "table": (4, 9),
        "conv": (3, 3, 4),
    }
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    axes = Dims((0, 1), 2)
    by_name = {"up": "shape", "b": "shape", "embed": "name"}
    by_rule = by_path({"table": "adamw", "conv": axes})
    given = dict.fromkeys(params) | {"conv": axes}
    nested = by_path({"up": "matrix"}, otherwise=by_rule)
    for numbers, whys in (
        (by_rule, by_name | dict.fromkeys(("table", "conv"), "rule")),
        (nested, by_name | dict.fromkeys(("up", "table", "conv"), "rule")),
        (given, dict.fromkeys(params, "numbers") | {"b": "shape"}),
        (lambda _: given, dict.fromkeys(params, "numbers") | {"b": "shape"}),
    ):
        optimizer = muon(1e-3, weight_dimension_numbers=numbers)
        rows = describe(params, optimizer).rows
        assert {row.path: row.why for row in rows} == whys
    assert {row.why for row in describe(params, optax.adam(1e-3)).rows} == {""}


LAYERS = ("inner", "middle", "lm_head", "out")


def call(model, tokens):
    x = model.embed(tokens)
    for name in LAYERS[:-1]:
        x = jax.tree.map(jax.nn.relu, getattr(model, name)(x))
    return model.out(x)


class Linen(nn.Module):
    def setup(self):
        self.embed = nn.Embed(9, 4)
        for name in LAYERS:
            setattr(self, name, nn.Dense(4))

    __call__ = call


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(9, 4, rngs=rngs)
        for name in LAYERS:
            setattr(self, name, nnx.Linear(4, 4, rngs=rngs))

    __call__ = call


class Equinox(eqx.Module):  # Haliax's modules are Equinox's.
    embed: eqx.Module
    inner: eqx.Module
    middle: eqx.Module
    lm_head: eqx.Module
    out: eqx.Module

    __call__ = call


def linen_model(*tokens, **overrides):
    numbers = linen_dimension_numbers(Linen(), *tokens, **overrides)
    return jax.eval_shape(Linen().init, jax.random.key(0), *tokens)["params"], numbers


def nnx_model(*tokens, **overrides):
    model = Nnx(nnx.Rngs(0))
    return model, nnx_dimension_numbers(model, *tokens, **overrides)


def equinox_model(*tokens, **overrides):
    key = jax.random.key(0)
    layers = [eqx.nn.Linear(4, 4, key=key) for _ in LAYERS]
    model = Equinox(eqx.nn.Embedding(9, 4, key=key), *layers)
    return model, equinox_numbers(model, *tokens, **overrides)


def haliax_model(*tokens, **overrides):
    key, vocabulary = jax.random.key(0), hax.Axis("vocabulary", 9)
    axes = hax.make_axes(a=4, b=4, c=4, d=4, e=4)
    layers = [hax.nn.Linear.init(*ends, key=key) for ends in itertools.pairwise(axes)]
    model = Equinox(hax.nn.Embedding.init(vocabulary, axes[0], key=key), *layers)
    named = [hax.named(token, ()) for token in tokens]
    return model, haliax_numbers(model, *named, **overrides)


@pytest.mark.parametrize("library", [linen_model, nnx_model, equinox_model, haliax_model])
def test_why_a_parameter_of_a_module_has_its_rule(library):
    expected = {"embed": "module", "inner": "rule", "middle": "module", "lm_head": "name"}
    overrides = {r"inner\.(kernel|weight)": "adamw"}
    traced = [(jnp.array(1),), ()][: 1 + (library is not linen_model)]
    for inputs in traced:
        expected["out"] = "output" if inputs else "module"
        params, numbers = library(*inputs, overrides=overrides)
        rows = describe(params, muon(1e-3, weight_dimension_numbers=numbers)).rows
        of_biases = {row.why for row in rows if row.path.endswith("bias")}
        whys = {row.path.split(".")[0]: row.why for row in rows if len(row.shape) == 2}
        assert (of_biases, whys) == ({"shape"}, expected)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_a_refused_dtype_is_not_a_wrong_shape(dtype):
    """Though the dimension numbers name axes, which a stand-in has to have."""
    params = {"w": jnp.ones((4, 8), dtype), "experts": jnp.ones((2, 4, 8))}
    numbers = {"w": Dims(0, 1), "experts": Dims(1, 2)}
    description = describe(params, muon(1e-3, weight_dimension_numbers=numbers))
    experts, refused = description.rows
    assert (refused.rule, refused.check) == ("refused", (dtype.dtype.name,))
    assert (refused.matrices, refused.state_bytes, experts.matrices) == (0, None, 2)
    [message] = description.refusals
    remedy = {"int32": "keep it out", "complex64": "Put None for it"}[dtype.dtype.name]
    assert "'w' of shape (4, 8)" in message and remedy in message
    if dtype == jnp.complex64:  # The remedy.
        described = describe(
            params, muon(1e-3, weight_dimension_numbers=numbers | {"w": None})
        )
        assert [row.rule for row in described.rows] == ["matrix", "adamw"]


def test_dimension_numbers_in_place_of_the_optimizer():
    with pytest.raises(
        ValueError, match=r"optimizer is of type dict: .*muon\(rate, weight_"
    ):
        describe({"w": jnp.ones((4, 8))}, {"w": Dims(0, 1)})
    with pytest.raises(TypeError, match="multiple values for argument 'optimizer'"):
        describe({"w": jnp.ones((4, 8))}, {"w": Dims(0, 1)}, optimizer=muon(0.1))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        describe({"w": jnp.ones((4, 8))}, weight_dimension_numbers={"w": Dims(0, 1)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_the_optimizer_refuses_is_marked(name):
    """The table says so with the optimizer's own words, which it keeps for update."""
    params = {
        "c": jnp.ones((4, 4), jnp.complex64),
        "conv": jnp.ones((3, 3, 4)),
        "layers": [{"up": nn.Partitioned(jnp.ones((2, 4, 8)), ("l", None, None))}] * 2,
        "w": jnp.ones((4, 8)),
    }
    optimizer = OPTIMIZERS[name]
    description = describe(params, optimizer)
    found = [(row.path, row.rule, ", ".join(row.check)) for row in description.rows]
    assert found == [
        ("c", "refused", "complex64"),
        ("conv", "refused", "ambiguous"),
        ("layers.0.up", "refused", "ambiguous"),
        ("layers.1.up", "refused", "ambiguous"),
        ("w", "matrix", ""),
    ]
    assert description.rows[1].shape == (3, 3, 4)
    assert [row.label for row in description.rows] == ["a" * (name == "parted")] * 5
    assert description.totals["refused"].leaves == 4
    assert description.state_bytes_per_parameter is None
    # One error lists all that are ambiguous.
    of_shape, of_dtype = description.refusals
    assert "'conv' of shape (3, 3, 4)" in of_shape and "'layers.*.up' × 2" in of_shape
    assert "Pass weight_dimension_numbers" in of_shape and "'c'" in of_dtype
    assert str(description).count("\nrefused: ") == 2
    assert str(description).startswith("parameter ")
    # What to write: rules, with the axes left to fill in.
    written = re.search(r"^by_path\(.*?^}\)$", str(description), re.DOTALL | re.MULTILINE)
    rules = written[0].replace("reduction_axis=..., output_axis=...", "-2, -1")
    numbers = eval(rules, {"by_path": by_path, "MuonDimensionNumbers": Dims})
    after = describe(params, with_numbers(numbers))
    found = [row.rule for row in after.rows]
    assert found == ["adamw", "matrix", "matrix", "matrix", "matrix"]
    with pytest.raises(ValueError, match="are ambiguous"):
        jax.eval_shape(optimizer.init, params)


def test_what_to_write_of_layers_that_differ():
    """A rule each; none for integers, which nobody trains."""
    shapes = {"l0": (2, 3, 4), "l1": (3, 4, 2), "m0": (2, 2, 2), "m1": (2, 2, 2)}
    dtypes = {"n0": jnp.float32, "n1": jnp.complex64, "i": jnp.int32}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    params |= {name: jnp.ones((2, 3, 4), dtype) for name, dtype in dtypes.items()}
    written = re.findall(r'r"\^(.*)\$": (\w+|"adamw")', str(describe(params)))
    axes = "MuonDimensionNumbers"
    assert dict(written) == {"l0": axes, "l1": axes, r"m\d+": axes, "n0": axes} | {
        "n1": '"adamw"'
    }


def test_wrong_numbers_are_still_an_error():
    for numbers in (Dims(0, 1), by_path({"x": Dims(0, 3)}), by_path({"y": "adamw"})):
        with pytest.raises(ValueError, match=r"does not fit|matches no parameter"):
            describe({"x": jnp.ones((2, 3, 4)), "b": jnp.ones(3)}, with_numbers(numbers))


def test_nothing_to_describe():
    params = {"a": None, "b": optax.MaskedNode()}
    description = describe(params, orscale(0.1))
    assert description.rows == () and description.totals["all"].leaves == 0
    assert str(description).startswith("parameter")
    empty = describe({"w": jnp.ones((0, 3))})
    [row] = empty.rows
    assert (row.matrices, row.norms, row.parameters) == (1, None, 0)
    assert not empty.plan.groups


INJECTED = optax.inject_hyperparams(
    orscale, static_args=("ns_steps", "weight_dimension_numbers")
)


@pytest.mark.parametrize(
    "build, given, scale",
    [
        (orscale, {"consistent_rms": None}, 1.0),
        (muon, {"scale_mode": "unit_rms_norm"}, 2.0),
        (orscale, {"consistent_rms": 0.3}, 1.2),
        (FAMILY["hyperball"], {}, None),  # Without s.
        (INJECTED, {}, None),  # It is known in the run.
    ],
)
def test_scale_and_axes_are_the_optimizers(build, given, scale):
    """Also of leaves that are ambiguous without its dimension numbers."""
    numbers = {"w": Dims(1, 0), "x": Dims(1, 2)}
    params = {"w": jnp.ones((16, 4)), "x": jnp.ones((2, 4, 16))}
    optimizer = build(0.1, weight_dimension_numbers=numbers, **given)
    rows = describe(params, optimizer).rows
    assert [(row.m, row.n, row.scale) for row in rows] == [(4, 16, scale)] * 2
    assert [row.matrices for row in rows] == [1, 2]


def test_optimizers_whose_matrices_are_not_noted_or_not_those_of_the_leaves():
    """Inside jax.vmap they are of one model of several; a compiled init says nothing."""
    one = orscale(0.1)
    stacked = {"w": jnp.ones((5, 4, 8)), "b": jnp.ones((5, 8))}
    mapped = optax.GradientTransformation(jax.vmap(one.init), jax.vmap(one.update))
    _, row = describe(stacked, mapped).rows
    assert (row.rule, row.matrices, row.m, row.scale) == ("matrix", 0, 0, None)
    assert row.state_bytes == 5 * (4 * 32 + 28)
    params, compiled = (
        {"w": jnp.ones((4, 8))},
        optax.GradientTransformation(jax.jit(one.init), one.update),
    )
    for _ in range(2):
        [row] = describe(params, compiled).rows
        assert (row.rule, row.m, row.n) == ("matrix", 4, 8)


def test_other_groups_need_no_dimension_numbers():
    params = {"w": jnp.ones((4, 8)), "x": jnp.ones((2, 3, 4))}
    groups = {"ours": muon(0.1), "adam": optax.adam(0.1)}
    optimizer = optax.partition(groups, {"w": "ours", "x": "adam"})
    assert [row.rule for row in describe(params, optimizer).rows] == ["matrix", "other"]


def test_the_plan_is_that_of_the_optimizers_settings():
    """On a mesh: how many steps, and what is slow."""
    mesh = AbstractMesh((2, 4), ("dcn", "fsdp"), (AxisType.Auto,) * 2)
    w = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("dcn"))
    )
    params = {"a": w, "b": w}

    def plan(**given):
        optimizer = orscale(0.1, param_shardings=PartitionSpec("dcn"), **given)
        return describe(params, optimizer).plan

    usual = plan()
    assert plan(ns_steps=10).flops > 1.5 * usual.flops
    assert plan(slow_axes=("dcn",)).slow_bytes and not usual.slow_bytes
    # The plan is that of the shardings that init and state_shardings would see.
    assert describe(params, orscale(0.1)).plan == usual
    with jax.checking_leaks():
        describe({"w": jnp.ones((4, 8))}, optax.inject_hyperparams(muon)(0.1))


MESH = AbstractMesh((2, 4), ("dcn", "fsdp"), (AxisType.Explicit,) * 2)
SQUARE = jax.ShapeDtypeStruct(
    (64, 64), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec("fsdp"))
)


def test_the_platform_is_that_of_the_mesh():
    """Of one that is not there, too: each sends entries of its own dtype."""

    def described(kind, sizes=(2, 4), count=8):
        device = None if kind is None else AbstractDevice(kind, None, kind)
        types = (AxisType.Explicit,) * 2
        mesh = AbstractMesh(sizes, ("dcn", "fsdp"), types, abstract_device=device)
        sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
        w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
        return describe({f"w{i}": w for i in range(count)}).plan

    cpu, gpu, rocm, tpu = map(described, ("cpu", "gpu", "rocm", "tpu"))
    sizes = [PLATFORMS[name].dtype.itemsize for name in ("cpu", "tpu")]
    assert cpu.fast_bytes * sizes[1] == tpu.fast_bytes * sizes[0] > 0
    assert gpu == rocm != cpu and gpu != tpu
    assert described(None) == described(jax.default_backend())
    # Of a single device, that a CPU's stacks have at most 32 arrays.
    for kind, stacks in {"cpu": 2, "tpu": 1}.items():
        assert len(described(kind, (1, 1), count=64).groups) == stacks


def test_each_optimizer_has_a_plan_of_its_own():
    params = {f"{group}{i}": SQUARE for group in "ab" for i in range(4)}
    groups = {"a": muon(0.1), "b": muon(0.2, ns_steps=9)}
    both = optax.partition(groups, {name: name[0] for name in params})
    plan = describe(params, both).plan
    alone = [
        describe(
            {name: w for name, w in params.items() if name[0] == group}, optimizer
        ).plan
        for group, optimizer in groups.items()
    ]
    assert plan.groups == alone[0].groups + alone[1].groups
    assert plan.flops == alone[0].flops + alone[1].flops
    assert plan.fast_bytes == alone[0].fast_bytes + alone[1].fast_bytes


def test_options_count_where_the_number_of_steps_is_traced():
    """It is by default under inject_hyperparams; then the plan is of plain steps."""

    def plan(wrap, **given):
        optimizer = wrap(muon)(0.1, slow_axes=("dcn",), **given)
        return describe({"w": SQUARE}, optimizer).plan

    usual, nine = plan(lambda muon: muon), plan(optax.inject_hyperparams, ns_steps=9)
    assert nine == plan(optax.inject_hyperparams) == usual


@pytest.mark.parametrize("name", FAMILY)
def test_the_family(name):
    """Every array belongs to a row."""
    params = {"w": jnp.ones((2, 6)), "x": jnp.ones((2, 3, 4)), "qkv": jnp.ones((6, 9))}
    numbers = {
        "w": Dims(0, 1),
        "x": Dims(1, 2),
        "qkv": Blocks(1, 0, block_axis=1, blocks=(4, 5)),
    }
    optimizer = FAMILY[name](0.1, weight_dimension_numbers=numbers)
    description = describe(params, optimizer)
    rows = sum(row.state_bytes for row in description.rows)
    assert rows + description.shared_bytes == size(optimizer.init(params))
    assert description.shared_bytes <= 12  # Steps and bounds.


TEXT = """\
parameter     shape      rule    why    matrices    state bytes
────────────  ─────────  ──────  ─────  ──────────  ───────────
bias          (1000,)    adamw   shape                    8,000
layers.stack  (2, 1, 4)  matrix  rule   2 of 1 × 4           88
wte           (2, 2)     adamw   name                        32
────────────  ─────────  ──────  ─────  ──────────  ───────────
matrix        1 leaf                    2                    88
adamw         2 leaves                                    8,032
shared                                                        4
all           3 leaves                  2                 8,124

all parameters are float32
state: 8.028 bytes per parameter

stacks for Newton–Schulz
2 of 1 × 4: layers.stack
"""
WIDE = """\
parameter     shape      rule    why    class      matrices      s  ‖W‖        parameters  state bytes
────────────  ─────────  ──────  ─────  ─────────  ──────────  ───  ─────────  ──────────  ───────────
bias          (1000,)    adamw   shape  bias                                        1,000        8,000
layers.stack  (2, 1, 4)  matrix  rule   other      2 of 1 × 4  0.4  2 … 4.472           8           88
wte           (2, 2)     adamw   name   embedding                                       4           32
"""  # noqa: E501


@functools.cache
def small():
    params = {
        "bias": jnp.ones(1000),
        "layers": {"stack": jnp.asarray([[[1.0, 1, 1, 1]], [[2, 4, 0, 0]]])},
        "wte": jnp.ones((2, 2)),
    }
    numbers = by_path({"stack": Dims(1, 2)})
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    return describe(params, optimizer)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"w": jnp.eye(2), "f": jax.nn.relu}, "'f' is of type custom_jvp"),
        ({"w": jnp.eye(2), "f": len}, "'f' is of type builtin.*"),
        ("model", "is of type str"),
    ],
)
def test_what_is_no_array_is_no_parameter(params, kind):
    """For any optimizer of this library, which names it and what to pass instead."""
    for refused in (describe, orscale(0.1).init, FAMILY["hyperball"](0.1).init):
        with pytest.raises(ValueError, match=f"parameter .*{kind}: pass arrays.*eqx.fil"):
            refused(params)
    orscale(0.1).init(eqx.filter(params, eqx.is_inexact_array))  # The remedy.
    state = orscale(0.1).init({"w": jnp.eye(2)})
    with pytest.raises(
        ValueError, match="optimizer is of type PartitionState: pass a grad"
    ):
        describe({"w": jnp.eye(2)}, state)


def test_the_printed_table():
    """With the columns that decide what to change; and its lines with all columns."""
    assert str(small()) + "\n" == TEXT
    wide = small().to_text().splitlines(keepends=True)
    assert "".join(wide[:5]) == WIDE and wide[10:] == TEXT.rstrip().splitlines(True)[10:]


@pytest.mark.extended
def test_stacks():
    """Against stacks by hand, with the default limit and another."""
    params = {f"layer{i}": jnp.ones((6, 8), jnp.bfloat16) for i in range(7)}
    params |= {"down": jnp.ones((8, 6)), "experts": jnp.ones((3, 6, 8))}
    params["qkv"] = jnp.ones((6, 20))
    numbers = by_path(
        {"experts": Dims(1, 2), "qkv": Blocks(0, 1, block_axis=1, blocks=(8, 8, 4))}
    )

    def found(**given):
        stage = orthogonalize(weight_dimension_numbers=numbers, **given)
        return describe(params, stage)

    alike = ("down", *(f"layer{i}" for i in range(7)), "qkv[:, 0:8]", "qkv[:, 8:16]")
    assert [group[:2] for group in found().plan.groups] == [
        (alike, ((10, 6, 8, 1),)),
        (("experts",), ((3, 6, 8, 1),)),
        (("qkv[:, 16:20]",), ((1, 4, 6, 1),)),
    ]
    # Stacked in float32, whatever the parameters' dtype: 192 bytes each.
    groups = found(max_stack_bytes=192 * 4).plan.groups
    assert [len(group.names) for group in groups] == [4, 1, 3, 3, 1]
    names = "down, layer* × 7, qkv[:, 0:8], qkv[:, 8:16]"
    assert f"10 of 6 × 8: {names}" in str(found()).splitlines()


@pytest.mark.parametrize(
    ("params", "numbers", "shown", "hidden"),
    [
        ({"w": (2, 3)}, None, "", ["‖W‖", "class", "label", "blocks"]),
        ({"w": jnp.ones((2, 3))}, None, "1 of 2 × 3", ["first update", "‖W‖"]),
        ({"w": jnp.zeros((2, 3))}, None, "‖W‖", ["  parameters "]),
        ({"w": (2, 3), "b": (4,)}, None, "all parameters are float32", ["dtype"]),
        ({"w": (2, 3), "b": jnp.ones(4, jnp.bfloat16)}, None, "dtype", ["all param"]),
        ({"w": (2, 3)}, Dims(1, 0), "3 × 2", ["check"]),
        ({"b": (4,)}, None, "adamw", ["  s  ", "stacks"]),
        ({"qkv": (4, 12), "b": (3,)}, None, "rule    why    check   matrices", []),
    ],
)
def test_columns_that_say_nothing_are_left_out(params, numbers, shown, hidden):
    shapes = {
        name: jax.ShapeDtypeStruct(x, jnp.float32) if isinstance(x, tuple) else x
        for name, x in params.items()
    }
    text = str(describe(shapes, with_numbers(numbers)))
    assert shown in text
    assert [word for word in hidden if word in text] == []


CSV = """\
path,shape,dtype,rule,parameters,state_bytes,layer_class,label,why,matrices,m,n,scale,\
norms,block,blocks,check,first_update,first_update_rms
bias,"(1000,)",float32,adamw,1000,8000,bias,,shape,0,0,0,,,,,,,
layers.stack,"(2, 1, 4)",float32,matrix,8,88,other,,rule,2,1,4,0.4,\
"(2.0, 4.4721360206604)",,,,,
wte,"(2, 2)",float32,adamw,4,32,embedding,,name,0,0,0,,,,,,,
"""


def test_csv_and_notebooks():
    assert small().to_csv() == CSV
    assert repr(small()) == TEXT.rstrip()  # In a terminal, without print.
    assert small()._repr_html_() == f"<pre style='white-space: pre'>{TEXT.rstrip()}</pre>"
    escaped = describe({"<b>": jnp.ones(2)})._repr_html_()
    assert "&lt;b&gt;" in escaped and "<b>" not in escaped


def test_select():
    chosen = small().select(r"^layers\.|bias")
    assert [row.path for row in chosen.rows] == ["bias", "layers.stack"]
    assert chosen.totals["all"].state_bytes == 8088 and chosen.shared_bytes == 0
    for wrong, message in (("(", "missing"), ("expert", "first are.*'bias'")):
        with pytest.raises(ValueError, match=rf"^expression='.*' is .*{message}"):
            small().select(wrong)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(("name", "outputs"), [("memory.md", 2), ("parameters.md", 7)])
def test_the_output_on_the_page(name, outputs):
    """A text block is what the Python block above it prints."""
    page = DOCS / name
    blocks = re.findall(
        r"^```(python|text)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    while blocks[-1][0] != "text":  # tests/test_docs.py runs them all.
        blocks.pop()
    namespace, printed = {"__name__": "__main__"}, ""
    for language, text in blocks:
        if language == "text":
            assert text == printed
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(text, page, "exec"), namespace)
        printed = output.getvalue()
    assert [language for language, _ in blocks].count("text") == outputs


PLACEMENT = [
    "Newton–Schulz on 4 expert × 2 fsdp",
    # Half of their bytes in bfloat16 stay; the other seven of eight do not.
    "2 of 16 × 64 over 8 devices, 1 each, "
    f"{2 * 2048 * 7 // 8:,} bytes sent per device: down, up",
    f"2 of 16 × 32 over 2 devices, 1 each, {2 * 1024 // 2:,} bytes sent per device: "
    "experts",
    # Merged with heads in front, which are sharded; copies along the other axis.
    "1 of 16 × 32 over 8 devices, 1 each, "
    f"{2 * 1024 * 3 // 4 + 1024:,} bytes sent per device: heads",
    # A block on each of two devices, and copies along the other axis.
    f"1 of 16 × 24 over 4 devices, 1 each, {3 * 768:,} bytes sent per device: qkv",
    # All devices share it, and add up its Gram matrix five times.
    "1 of 8 × 512 over 8 devices, 8 to one, "
    f"{2 * 1024 * 7 // 8 + 5 * 64 * 6 * 7 // 8:,} bytes sent per device: thin",
    # Products are shorter than transfers, of which they may hide as much.
    "each device: 0.00103 GFLOP, 0.0129 MB over fast links, 0 MB over slow ones; "
    "about 8.97e-05 ms without overlap, 8.63e-05 of them for transfers",
]


def test_placement():
    """The plan of a run: matrices, devices, and the bytes that each device sends."""
    axis_types = (AxisType.Auto,) * 2
    mesh = AbstractMesh((4, 2), ("expert", "fsdp"), axis_types)

    def leaf(shape, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {
        "down": leaf((64, 16), "fsdp", "expert"),
        "experts": leaf((8, 32, 16), "expert", "fsdp"),
        "heads": leaf((16, 4, 8), None, "expert"),
        "qkv": leaf((16, 48), None, "fsdp"),
        "thin": leaf((8, 512), "expert", "fsdp"),
        "up": leaf((16, 64), "expert", "fsdp"),
        "bias": leaf((16,)),
    }
    numbers = {
        "down": Dims(0, 1),
        "experts": Dims(1, 2),
        "heads": Dims(0, (1, 2)),
        "qkv": Blocks(0, 1, block_axis=1, blocks=2),
        "thin": Dims(0, 1),
        "up": Dims(0, 1),
        "bias": None,
    }
    description = describe(
        params,
        muon(
            1e-3, weight_dimension_numbers=numbers, ns_dtype="bfloat16",
            param_shardings=params,
        ),
    )  # fmt: skip
    assert str(description).splitlines()[-7:] == PLACEMENT
    chosen = description.select("experts").plan.groups
    assert chosen == description.plan.groups[1:2]


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_bytes_of_a_device_and_of_a_parameter(kind):
    """Against the arrays on a device, in the line below the table."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "expert"), axis_types=(kind,) * 2)
    specs = {
        "w": PartitionSpec("fsdp"),
        "x": PartitionSpec("expert"),
        "b": PartitionSpec(),
    }
    shapes = {"w": (16, 6), "x": (4, 6, 8), "b": (5,)}
    params = {
        name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }
    numbers = {"w": Dims(0, 1), "x": Dims(1, 2), "b": None}
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    description = describe(params, optimizer)
    placed = jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params))
    state = jax.tree.leaves(placed(params))
    held = sum(array.addressable_shards[0].data.nbytes for array in state)
    assert description.state_bytes_per_device == held < size(state)
    assert description.state_bytes_per_parameter == size(state) / (96 + 192 + 5)
    each = f"{size(state) / 293:.4g} bytes per parameter, {held:,} bytes per device"
    assert f"state: {each}" in str(description).splitlines()
    selected = description.select("b")
    assert selected.state_bytes_per_device is None
    assert selected.state_bytes_per_parameter == 8


@pytest.mark.parametrize(
    ("shapes", "spec", "optimizer", "each"),
    [
        ({}, None, orscale(0.1), None),  # There is no parameter.
        ({"w": (2, 3)}, None, optax.sgd(0.1), 0),  # There is no mesh.
        ({"w": (9, 4)}, "fsdp", optax.sgd(0.1, 0.9), 4),  # It does not divide 9.
        ({"a": (0, 4), "b": (0, 5)}, (), orscale(0.1), None),
    ],
)
def test_state_bytes_that_are_not_known(shapes, spec, optimizer, each):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    placed = None if spec is None else NamedSharding(mesh, PartitionSpec(spec or None))
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
        for (name, shape), dtype in zip(
            shapes.items(), (jnp.float32, jnp.bfloat16), strict=False
        )
    }
    description = describe(params, optimizer)
    assert description.state_bytes_per_parameter == each
    assert spec == () or description.state_bytes_per_device is None
    assert ("state:" in str(description)) == (each is not None)
