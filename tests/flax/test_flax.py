"""Dimension numbers from module types: layers, whole models, stacks, unresolved types.

The models follow the examples of google/flax (lm1b and lm1b_nnx's transformer, imagenet's
ResNet, mnist's CNN), written with Flax's public modules alone and no table of axes.
"""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze, unfreeze
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    by_path,
    convert_state,
    describe,
    diagnostics,
    muon,
    orscale,
)
from orscale_jax.flax import Weight, linen_dimension_numbers, nnx_dimension_numbers
from orscale_jax.parameters.dimension_numbers import matrix_axes
from tests.derivatives import axes_by_derivatives
from tests.runs import assert_all_change, assert_close, squares

MATRIX = Dims(0, 1)
CONVOLUTION = Dims((0, 1, 2), 3)
PROJECTION = Dims(0, (1, 2))  # (embed, heads, head_dim)
MERGE = Dims((0, 1), 2)  # (heads, head_dim, embed)


@pytest.fixture(autouse=True)
def broadcasting_as_flax_does():
    with jax.numpy_rank_promotion("allow"):
        yield


def inserted(numbers, axis=0):
    """The numbers of a leaf with one more axis there, at 0, 1 or the end (-1)."""
    if numbers is None or axis == -1:
        return numbers
    return Dims(*jax.tree.map(lambda a: a + (a >= axis), tuple(numbers)))


def is_numbers(node):
    return node is None or isinstance(node, Dims)


def table(numbers):
    """Dotted path to dimension numbers."""
    leaves = jax.tree.leaves_with_path(numbers, is_leaf=is_numbers)
    return {".".join(str(entry.key) for entry in path): leaf for path, leaf in leaves}


def nnx_table(model, **kwargs):
    numbers = nnx_dimension_numbers(model, **kwargs)
    return table(numbers(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


def abstract(build):
    """A model of shapes alone."""
    return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def linen_numbers(module, *inputs, **options):
    params = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    return linen_dimension_numbers(module, *inputs, **options)(params)


def linen_table(module, *inputs, **options):
    return table(linen_numbers(module, *inputs, **options))


def attention(prefix):
    """Without biases: that of a key has no gradient except for rounding."""
    kernels = {"query": PROJECTION, "key": PROJECTION, "value": PROJECTION, "out": MERGE}
    return {f"{prefix}.{name}.kernel": numbers for name, numbers in kernels.items()}


def linear(*prefixes, bias=True, kernel=MATRIX):
    biases = adamw(*(f"{prefix}.bias" for prefix in prefixes if bias))
    return {f"{prefix}.kernel": kernel for prefix in prefixes} | biases


def adamw(*paths):
    return dict.fromkeys(paths)


def norms(*prefixes):
    return adamw(
        *(f"{prefix}.{name}" for prefix in prefixes for name in ("scale", "bias"))
    )


def train_nnx(model, loss, numbers, steps=2, wrt=nnx.Param, rate=0.02):
    optimizer = nnx.Optimizer(
        model, orscale(rate, weight_dimension_numbers=numbers), wrt=wrt
    )

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model))

    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, wrt)))
    for _ in range(steps):
        step(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, wrt))
    assert_all_change(before, after)
    return after


# Single layers, against the axes that their own derivatives show.


NNX_LAYERS = {
    "linear": (lambda r: nnx.Linear(3, 4, rngs=r), (2, 3)),
    "general": (
        lambda r: nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), rngs=r),
        (2, 2, 3),
    ),
    "general_batch": (
        lambda r: nnx.LinearGeneral(
            3, (2, 4), axis=-1, batch_axis={0: 2}, use_bias=False, rngs=r
        ),
        (2, 2, 3),
    ),
    "einsum": (lambda r: nnx.Einsum("bti,iho->btho", (3, 2, 4), rngs=r), (1, 2, 3)),
    "einsum_reversed": (lambda r: nnx.Einsum("ti,oi->to", (4, 3), rngs=r), (2, 3)),
    "einsum_experts": (
        lambda r: nnx.Einsum("...ei,oie->...eo", (4, 3, 2), (2, 4), rngs=r),
        (2, 2, 3),
    ),
    "conv": (lambda r: nnx.Conv(2, 3, (2, 2), rngs=r), (1, 3, 3, 2)),
    "conv_1d": (lambda r: nnx.Conv(2, 3, 3, rngs=r), (1, 4, 2)),
    "conv_transpose": (lambda r: nnx.ConvTranspose(2, 3, (2, 2), rngs=r), (1, 3, 3, 2)),
    "conv_transpose_kernel": (
        lambda r: nnx.ConvTranspose(2, 3, (2, 2), transpose_kernel=True, rngs=r),
        (1, 3, 3, 2),
    ),
}
LINEN_LAYERS = {
    "dense": (nn.Dense(4), (2, 3)),
    "general": (nn.DenseGeneral((4, 5), axis=(1, -1)), (2, 2, 3)),
    "general_batch": (nn.DenseGeneral((2, 4), axis=-1, batch_dims=0), (2, 2, 3)),
    "einsum": (nn.Einsum((3, 2, 4), "bti,iho->btho"), (1, 2, 3)),
    "einsum_reversed": (nn.Einsum((4, 3), "t i, o i -> t o"), (2, 3)),
    "conv": (nn.Conv(3, (2, 2)), (1, 3, 3, 2)),
    "conv_1d": (nn.Conv(3, 3), (1, 4, 2)),
    "conv_transpose": (nn.ConvTranspose(3, (2, 2)), (1, 3, 3, 2)),
    "conv_transpose_kernel": (
        nn.ConvTranspose(3, (2, 2), transpose_kernel=True),
        (1, 3, 3, 2),
    ),
    # Windows do not overlap, so that each input belongs to one pixel.
    "conv_local": (nn.ConvLocal(3, (2, 2), strides=2, padding="VALID"), (1, 4, 4, 2)),
}


def of_nnx(build):
    layer = build(nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def apply(kernel, x):
        layer = nnx.merge(graph, params, rest)
        layer.kernel = nnx.Param(kernel)
        return layer(x)

    return apply, layer.kernel[...], nnx_table(layer)


def of_linen(layer, x):
    params = layer.init(jax.random.key(0), x)["params"]

    def apply(kernel, x):
        return layer.apply({"params": params | {"kernel": kernel}}, x)

    return apply, params["kernel"], linen_table(layer, x)


@pytest.mark.extended
@pytest.mark.parametrize(
    "layer, shape",
    [*NNX_LAYERS.values(), *LINEN_LAYERS.values()],
    ids=[*(f"nnx {name}" for name in NNX_LAYERS), *LINEN_LAYERS],
)
def test_a_layer_by_its_derivatives(layer, shape):
    x = jax.random.normal(jax.random.key(1), shape)
    linen = isinstance(layer, nn.Module)
    apply, kernel, found = of_linen(layer, x) if linen else of_nnx(layer)
    axes = matrix_axes({"w": found.pop("kernel")}, {"w": kernel})["w"]
    expected = axes_by_derivatives(apply, kernel, x)
    assert (axes.rows, axes.columns, axes.batch) == expected
    assert set(found.values()) <= {None}


WITHOUT = [
    (lambda r: nnx.Embed(5, 4, rngs=r), None),
    (lambda r: nnx.LayerNorm(4, rngs=r), None),
    (lambda r: nnx.RMSNorm(4, rngs=r), None),
    (lambda r: nnx.BatchNorm(4, rngs=r), None),
    (lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r), None),
    (lambda r: nnx.InstanceNorm(4, rngs=r), None),
    (lambda r: nnx.PReLU(), None),
    (lambda r: nnx.Conv(6, 12, (3, 3), feature_group_count=6, rngs=r), None),
    (lambda r: nnx.Einsum("btd,td->btd", (3, 4), rngs=r), None),  # A scale
    (lambda r: nnx.Einsum("bthd,hd->bth", (2, 4), rngs=r), None),  # Inner products
    (lambda r: nnx.Sequential(nnx.Dropout(0.1)), None),
    (nn.Embed(5, 4), (2,)),
    (nn.LayerNorm(), (2, 4)),
    (nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1)), (2, 3, 4)),
    (nn.RMSNorm(), (2, 4)),
    (nn.BatchNorm(use_running_average=False), (2, 4)),
    (nn.GroupNorm(2), (2, 4)),
    (nn.InstanceNorm(), (2, 3, 4)),
    (nn.PReLU(), (2, 4)),
    (nn.Conv(12, (3, 3), feature_group_count=6), (1, 3, 3, 6)),
]


@pytest.mark.parametrize("layer, shape", WITHOUT)
def test_layers_without_matrices(layer, shape):
    if shape is None:
        found = nnx_table(abstract(layer))
    else:
        dtype = jnp.int32 if isinstance(layer, nn.Embed) else jnp.float32
        found = linen_table(layer, jax.ShapeDtypeStruct(shape, dtype))
    assert set(found.values()) <= {None}


def test_nnx_recurrent_cells_and_wrappers():
    for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell):
        model = abstract(lambda rngs: nnx.RNN(cell(3, 4, rngs=rngs), rngs=rngs))
        arrays = nnx.to_pure_dict(nnx.state(model, nnx.Param))["cell"]
        for path, numbers in nnx_table(model).items():
            _, layer, name = path.split(".")
            gates = arrays[layer][name].shape[-1] // 4
            matrix = Blocks(0, 1, block_axis=1, blocks=gates) if gates > 1 else MATRIX
            assert numbers == (matrix if name == "kernel" else None)
    stacked = nnx.vmap(lambda rngs: nnx.GRUCell(3, 4, rngs=rngs))
    stack = abstract(lambda rngs: stacked(rngs.split(2)))
    gates = Blocks(1, 2, block_axis=2, blocks=3)
    assert nnx_table(stack)["dense_h.kernel"] == gates
    for wrapper in (nnx.WeightNorm, nnx.SpectralNorm):
        convolution = nnx.Conv(2, 3, (2, 2), rngs=nnx.Rngs(0))
        found = nnx_table(wrapper(convolution, rngs=nnx.Rngs(0)))
        assert found.pop("layer_instance.kernel") == CONVOLUTION
        assert set(found.values()) == {None}


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.LSTMCell(4))(x)
        x = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(4)), nn.RNN(nn.GRUCell(4)))(x)
        x = nn.WeightNorm(nn.Dense(3))(x)
        return nn.relu(nn.SpectralNorm(nn.Dense(3))(x, update_stats=True))


@pytest.mark.extended
def test_linen_recurrent_cells_and_wrappers():
    found = linen_table(Wrapped(), jnp.ones((2, 5, 3)))
    assert found["WeightNorm_0.Dense_0/kernel/scale"] is None
    for path, numbers in found.items():
        assert numbers == (MATRIX if path.endswith(".kernel") else None)


def test_a_users_rule_holds_inside_cells():
    """Against the library's rule for the cell, which speaks for its layers."""
    nothing = {"kernel": None, "bias": None}
    cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    found = nnx_table(cell, rules={nnx.Linear: lambda module: nothing})
    assert set(found.values()) == {None}
    x, state = jnp.ones((3, 6, 6, 1)), jnp.ones((3, 6, 6, 4))
    rules = {nn.Conv: lambda module: nothing}
    found = linen_table(nn.ConvLSTMCell(4, (3, 3)), (state, state), x, rules=rules)
    assert set(found.values()) == {None}


@pytest.mark.parametrize("axis", [0, -1])
def test_gates_that_are_one_convolution(axis):
    stack = nn.vmap(
        nn.ConvLSTMCell, variable_axes={"params": axis}, split_rngs={"params": True}
    )
    x, state = jnp.ones((2, 3, 6, 6, 1)), jnp.ones((2, 3, 6, 6, 4))
    found = linen_table(stack(4, (3, 3)), (state, state), x)
    first = int(axis == 0)
    rows, columns = tuple(range(first, first + 3)), first + 3
    kernel = Blocks(rows, columns, block_axis=columns, blocks=4)
    assert found == linear("ih", "hh", kernel=kernel)


# Whole models.


class Mlp(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.wi = nnx.Linear(width, hidden, rngs=rngs)
        self.wo = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return self.wo(jax.nn.relu(self.wi(x)))


class Block(nnx.Module):
    """EncoderDecoder1DBlock of lm1b_nnx."""

    def __init__(self, rngs, width=4):
        self.ln1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, width, use_bias=False, decode=False, keep_rngs=False, rngs=rngs
        )
        self.ln2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = Mlp(width, 6, rngs)

    def __call__(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Transformer(nnx.Module):
    """TransformerLM of lm1b_nnx, whose blocks are scanned."""

    def __init__(self, rngs, blocks, width=4, vocabulary=11):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.pos_embedding = nnx.Param(0.1 * jax.random.normal(rngs(), (1, 5, width)))
        self.blocks = blocks
        self.ln = nnx.LayerNorm(width, rngs=rngs)
        self.logitdense = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.pos_embedding
        run = nnx.scan(
            lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        x = run(x, self.blocks)
        return self.logitdense(self.ln(x))


AROUND = adamw(
    "embed.embedding", "pos_embedding", "logitdense.kernel", "logitdense.bias"
) | norms("ln")
TOKENS = jnp.arange(10).reshape(2, 5)


@pytest.mark.extended
def test_an_nnx_transformer():
    rngs = nnx.Rngs(0)
    model = Transformer(rngs, nnx.vmap(Block)(rngs.split(2)))
    block = (
        attention("blocks.attention")
        | linear("blocks.mlp.wi", "blocks.mlp.wo")
        | norms("blocks.ln1", "blocks.ln2")
    )
    rows = {path: inserted(numbers) for path, numbers in block.items()}
    numbers = nnx_dimension_numbers(model, overrides={"logitdense": "adamw"})
    state = nnx.state(model, nnx.Param)
    for params in (state, nnx.to_pure_dict(state)):
        assert table(numbers(params)) == AROUND | rows
    train_nnx(model, lambda model: squares(model(TOKENS)), numbers)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kinds", [{"hijax": True}, {"hijax": True, "ref": True}])
def test_variables_that_are_leaves_or_hold_references(kinds):
    """They train as plain variables do, by whoever computes the gradients."""

    def trained(**kinds):
        with nnx.var_defaults(**kinds):
            first = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
            model = nnx.Sequential(first, nnx.Linear(6, 3, rngs=nnx.Rngs(1)))
            numbers = nnx_dimension_numbers(model)
            tx = orscale(0.1, weight_dimension_numbers=numbers)
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            for _ in range(2):
                arrays = nnx.as_pure(nnx.state(model, nnx.Param))
                grads = jax.tree.map(lambda x: jnp.cos(17 * x), arrays)
                optimizer.update(model, nnx.State(jax.tree.map(nnx.Param, grads)))
            return jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param)))

    assert_close(trained(**kinds), trained(hijax=False), rtol=1e-6)


@pytest.mark.extended
def test_lora_adapters_are_trained_alone():
    rngs = nnx.Rngs(0)
    linear = nnx.LoRALinear(
        6, 4, lora_rank=2, b_initializer=nnx.initializers.normal(), rngs=rngs
    )
    around = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
    around.lora_b[...] = jnp.ones((2, 3))
    model = nnx.Sequential(linear, around)
    numbers = nnx_dimension_numbers(model)
    found = table(numbers(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    assert {path for path, of in found.items() if of is None} == {
        "layers.0.bias",
        "layers.1.base_module.bias",
    }
    assert {of for of in found.values() if of is not None} == {MATRIX}
    x = jax.random.normal(jax.random.key(1), (5, 6))
    frozen = jnp.copy(linear.kernel[...])
    train_nnx(model, lambda model: squares(model(x)), numbers, wrt=nnx.LoRAParam)
    np.testing.assert_array_equal(frozen, linear.kernel[...])


class Product(nnx.Module):
    """A layer of a user's own, such as Tunix's Einsum: its type has no rule."""

    def __init__(self, *shape):
        self.w = nnx.Param(jnp.ones(shape))


# How Qwix adds adapters to a module: beside its parameter, and for an einsum with the
# equation. A layer, the shapes of the adapters, the equation, and their numbers.
ADAPTERS = {
    "linear": (lambda r: nnx.Linear(8, 6, rngs=r), (8, 2), (2, 6), None, MATRIX, MATRIX),
    "general": (
        lambda r: nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), rngs=r),
        (8, 2), (2, 15), None, MATRIX, MATRIX,
    ),
    "batch": (
        lambda r: nnx.LinearGeneral(8, (2, 3), batch_axis={0: 5}, rngs=r),
        (5, 8, 2), (5, 2, 6), None, Dims(1, 2), Dims(1, 2),
    ),
    "heads": (
        lambda r: nnx.Einsum("BTD,NDH->BTNH", (2, 8, 3), rngs=r),
        (8, 2), (2, 2, 3), "BTD,Dr,rNH->BTNH", MATRIX, Dims(0, (1, 2)),
    ),
    "convolution": (
        lambda r: nnx.Conv(3, 6, (2, 2), rngs=r),
        (2, 2, 3, 2), (2, 6), None, CONVOLUTION, MATRIX,
    ),
    "own product": (lambda _: Product(8, 6), (8, 2), (2, 6), None, MATRIX, MATRIX),
    "own batch": (
        lambda _: Product(5, 8, 6), (5, 8, 2), (5, 2, 6), None, Dims(1, 2), Dims(1, 2)
    ),
    "own convolution": (
        lambda _: Product(3, 8, 6), (3, 8, 2), (2, 6), None, Dims((0, 1), 2), MATRIX
    ),
    "own keys and values": (
        lambda _: Product(2, 2, 8, 3), (8, 2), (2, 2, 2, 3), "BSD,Dr,rCKH->CBSKH",
        MATRIX, Dims(0, (1, 2, 3)),
    ),
    "own merged heads": (
        lambda _: Product(2, 3, 8), (2, 3, 2), (2, 8), "BTNH,NHr,rD->BTD",
        Dims((0, 1), 2), MATRIX,
    ),
    "own experts": (
        lambda _: Product(4, 8, 6), (4, 8, 2), (2, 6), "EBD,EDr,rF->EBF",
        Dims(1, 2), MATRIX,
    ),
    "tied table": (lambda r: nnx.Embed(9, 8, rngs=r), (8, 2), (2, 9), None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_beside_any_parameter(name, stacked):
    """Only they are asked for, so that a frozen base needs no rules."""
    build, a, b, equation, *expected = ADAPTERS[name]
    layer = build(nnx.Rngs(0))
    [own] = {"kernel", "w", "embedding"} & vars(layer).keys()
    for end, shape in (("a", a), ("b", b)):
        value = jnp.ones((7,) * stacked + shape)
        setattr(layer, f"{own}_lora_{end}", nnx.LoRAParam(value))
    if equation:
        setattr(layer, f"{own}_lora_einsum_str", equation)
    model = nnx.Dict(layer=layer, frozen=nnx.Param(jnp.ones((4, 4))))
    params = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    found = nnx_dimension_numbers(model, wrt=nnx.LoRAParam)(params)["layer"]
    for end, numbers in zip("ab", expected, strict=True):
        if numbers and stacked:
            axes = (numbers.reduction_axis, numbers.output_axis)
            numbers = Dims(*jax.tree.map(lambda axis: axis + 1, axes))
        assert found[f"{own}_lora_{end}"] == numbers
    with pytest.raises(ValueError, match=r"'frozen' of shape .* in flax.*Dict"):
        nnx_dimension_numbers(model)


@pytest.mark.parametrize("kind", ["types", "names"])
def test_adapters_of_a_head_take_adamw(kind):
    layer = nnx.Linear(8, 6, rngs=nnx.Rngs(0)) if kind == "types" else Product(8, 6)
    own = "kernel" if kind == "types" else "w"
    for end, shape in (("a", (8, 2)), ("b", (2, 6))):
        setattr(layer, f"{own}_lora_{end}", nnx.LoRAParam(jnp.ones(shape)))
    model = nnx.Dict(lm_head=layer)
    params = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    found = nnx_dimension_numbers(model, wrt=nnx.LoRAParam)(params)
    assert set(found["lm_head"].values()) == {None}


class Adapted(nn.Module):
    """A parameter of a Linen module's own, and the adapters that Qwix adds."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        w = self.param("w", init, (8, 6))
        a = self.param("w_lora_a", init, (8, 2))
        return x @ w + x @ a @ self.param("w_lora_b", init, (2, 6))


def test_adapters_in_linen():
    model = nn.Sequential([Adapted(), nn.relu])
    numbers = linen_numbers(model, jnp.ones((1, 8)), overrides={r"w$": "adamw"})
    numbers = numbers["layers_0"]
    assert numbers == {"w": None, "w_lora_a": MATRIX, "w_lora_b": MATRIX}


class LinenBlock(nn.Module):
    """EncoderDecoder1DBlock of flax/examples/lm1b."""

    width: int = 4

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm(name="ln1")(x)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False, name="attention")(y)
        y = nn.Dense(6, name="wi")(nn.LayerNorm(name="ln2")(x))
        x = x + nn.Dense(self.width, name="wo")(nn.relu(y))
        # The block's own parameter: 1-D, and so no matrix, also when stacked.
        return x * self.param("gain", nn.initializers.ones, (self.width,)), None


LINEN_BLOCK = (
    attention("attention") | linear("wi", "wo") | norms("ln1", "ln2") | {"gain": None}
)
LINEN_AROUND = {"embed.embedding": None} | norms("ln")


class LinenTransformer(nn.Module):
    """TransformerLM of flax/examples/lm1b, scanned, with tied embeddings."""

    layers: int
    axis: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 4, name="embed")
        x, _ = nn.scan(
            nn.remat(LinenBlock),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.layers,
        )(name="blocks")(embed(tokens), None)
        return embed.attend(nn.LayerNorm(name="ln")(x))


# As many layers as features: the shapes alone would not tell the axes apart.
@pytest.mark.quick_first_case
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("layers", [3, 4])
def test_linen_stacks_along_any_axis(axis, layers):
    scanned = LinenTransformer(layers, axis)
    assert linen_table(scanned, TOKENS) == LINEN_AROUND | {
        f"blocks.{path}": inserted(numbers, axis) for path, numbers in LINEN_BLOCK.items()
    }


@pytest.mark.extended
def test_tracing_leaves_nothing_in_the_cache_of_nn_jit():
    x = jnp.ones((2, 3))
    for first in (True, False):
        module = nn.jit(nn.Dense)(5 + first)
        if first:
            module.init(jax.random.key(0), x)
        assert linen_table(module, x) == {"kernel": MATRIX, "bias": None}
        params = module.init(jax.random.key(0), x)["params"]
        assert {type(leaf) for leaf in params.values()} == {type(x)}
        rules = {nn.Dense: lambda module: {"kernel": None}}
        assert linen_table(module, x, rules=rules) == {"kernel": None, "bias": None}


class SharedScope(nn.Module):
    """The LoRA layer of nn.share_scope's documentation."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4)
        nn.share_scope(self, dense)
        a = self.param("a", nn.initializers.normal(), (3, 2))
        b = self.param("b", nn.initializers.normal(), (2, 4))
        return dense(x) + x @ a @ b


def test_modules_that_share_a_scope_keep_their_own_parameters():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"'a' of shape \(3, 2\): .*SharedScope"):
        linen_dimension_numbers(SharedScope(), x)
    nested = nn.Sequential([nn.Dense(3), SharedScope()])
    with pytest.raises(ValueError, match=r"'layers_1\.a' of .*SharedScope"):
        linen_dimension_numbers(nested, x, rngs={"params": jax.random.key(0)})
    rules = {SharedScope: lambda m: {"a": Weight((None, 2), 0, 1), "b": None}}
    expected = {"kernel": MATRIX, "bias": None, "a": MATRIX, "b": None}
    assert linen_table(SharedScope(), x, rules=rules) == expected


# Parameters that types do not settle.


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Param(jax.random.normal(rngs(), (4, 8, 16)))
        self.down = nnx.List([nnx.Param(jax.random.normal(rngs(), (16, 8)))])
        self.gain = nnx.Param(jnp.ones(8))
        self.mix = nnx.Conv(4, 8, (3, 3), feature_group_count=2, rngs=rngs)


def test_open_nnx_parameters_are_one_error():
    with pytest.raises(ValueError, match="do not say which") as error:
        nnx_dimension_numbers(Experts(nnx.Rngs(0)))
    text = str(error.value)
    assert (
        f"'up' of shape (4, 8, 16): there is no rule for it in {__name__}.Experts" in text
    )
    assert "'down.0' of shape (16, 8)" in text
    assert "overrides=" in text and "rules=" in text
    assert "gain" not in text and "mix" not in text


@pytest.mark.extended
def test_overrides_and_rules_for_nnx():
    overrides = {r"mix\.kernel": "adamw", r"^(up|down\.\d+)$": Dims(-2, -1)}
    expected = {"up": Dims(-2, -1), "down.0": Dims(-2, -1), "gain": None}
    expected |= linear("mix", kernel=None)  # Overrides the groups.
    model = Experts(nnx.Rngs(0))
    assert nnx_table(model, overrides=overrides) == expected
    rules = {
        Experts: lambda module: {
            "up": Weight((4, 8, 16), 1, 2),
            "down": Weight((16, 8), (0,), (1,)),
            "gain": None,
        }
    }
    only_mix = {r"mix\.kernel": "adamw"}
    expected |= {"up": Dims(1, 2), "down.0": MATRIX}
    assert nnx_table(model, overrides=only_mix, rules=rules) == expected

    class Subclass(Experts):
        pass

    stacked = nnx.vmap(Subclass)(nnx.Rngs(0).split(3))
    expected |= {"up": Dims(2, 3), "down.0": Dims(1, 2)}
    assert nnx_table(stacked, overrides=only_mix, rules=rules) == expected


class OpenLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (3, 3))
        x = nn.Conv(4, (2,), feature_group_count=2)(nn.Dense(4)(x @ w))
        return nn.relu(nn.Einsum((4, 5))(x, "btd,de->bte"))


def test_open_linen_parameters_are_one_error():
    x = jnp.ones((2, 5, 3))
    with pytest.raises(ValueError, match="do not say which") as error:
        linen_dimension_numbers(OpenLinen(), x)
    text = str(error.value)
    assert f"'w' of shape (3, 3): there is no rule for it in {__name__}.OpenLinen" in text
    assert "Conv_0" not in text
    assert "'Einsum_0.kernel' of shape (4, 5): its einsum_str is given to the" in text
    overrides = {"^w$": "matrix", "Einsum.*kernel": MATRIX}
    found = linen_table(OpenLinen(), x, overrides=overrides)
    groups = Blocks((0, 1), 2, block_axis=2, blocks=2)
    assert found == {"w": MATRIX} | linear("Dense_0", "Einsum_0") | linear(
        "Conv_0", kernel=groups
    )


@pytest.mark.extended
def test_a_grouped_convolution_has_a_matrix_for_each_group():
    layer = nnx.Conv(4, 6, (3,), feature_group_count=2, padding="VALID", rngs=nnx.Rngs(0))
    assert nnx_table(layer)["kernel"] == Blocks((0, 1), 2, block_axis=2, blocks=2)
    seen = jax.jacobian(lambda x: layer(x)[0])(jnp.ones((3, 4))) != 0
    for group in range(2):  # Three adjacent outputs, from two inputs.
        outputs = seen[3 * group : 3 * (group + 1)].any(axis=(0, 1))
        assert outputs.tolist() == [group == 0] * 2 + [group == 1] * 2


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "equation, shape", [("bi,ijk->bj", (3, 4, 2)), ("...i,...io->...o", (2, 3, 4))]
)
def test_an_einsum_without_rows_and_columns_is_refused(equation, shape):
    with pytest.raises(ValueError, match="sums the kernel alone"):
        nnx_dimension_numbers(nnx.Einsum(equation, shape, rngs=nnx.Rngs(0)))


def test_nnx_stacks_along_another_axis_than_the_first_are_refused():
    @nnx.vmap(out_axes=nnx.StateAxes({nnx.Param: 1}))
    def build(rngs):
        return nnx.Linear(4, 5, rngs=rngs)

    stacked = build(nnx.Rngs(0).split(3))
    assert stacked.kernel.shape == (4, 3, 5)
    with pytest.raises(ValueError, match=r"'kernel' of .*declares \(4, 5\)"):
        nnx_dimension_numbers(stacked)
    found = nnx_table(stacked, overrides={"kernel": Dims(0, 2)})
    assert found == {"kernel": Dims(0, 2), "bias": None}


@pytest.mark.parametrize("shape", [(4, 6), (5,), (4, 5, 1)])
def test_a_leaf_of_another_shape_than_its_module_declares(shape):
    model = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(jnp.ones(shape))
    with pytest.raises(ValueError, match="'kernel' of shape"):
        nnx_dimension_numbers(model)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_names_that_match_no_path(kind):
    def build(**kwargs):
        if kind == "nnx":
            return nnx_dimension_numbers(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), **kwargs)
        return linen_dimension_numbers(nn.Dense(3), jnp.ones((1, 2)), **kwargs)

    with pytest.raises(ValueError, match=r"'vocab' of overrides matches no .*'bias'"):
        build(overrides={"vocab": "adamw"})
    with pytest.raises(ValueError, match=r"overrides\['k'\]=None is not valid: pass"):
        build(overrides={"k": None})
    with pytest.raises(ValueError, match=r"overrides, expression 'k': .* has 2 axes"):
        build(overrides={"k": Dims(1, 2)})


def test_parameters_of_another_model():
    numbers = nnx_dimension_numbers(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"'mlp\.kernel' is no nnx\.Param of the model"):
        numbers({"mlp": {"kernel": jnp.ones((2, 3))}})
    numbers = linen_dimension_numbers(nn.Dense(3), jnp.ones((1, 2)))
    variables = {"params": {"kernel": jnp.ones((2, 3))}}
    assert numbers(variables) == {"params": {"kernel": MATRIX}}  # As e3nn trains them.
    message = r"'cache\.kernel' is no parameter of the module .* its parameters only"
    with pytest.raises(ValueError, match=message):
        numbers(variables | {"cache": variables["params"]})


def test_overrides_come_before_names_and_types():
    model = nnx.Dict(head=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert nnx_table(model) == linear("head", kernel=None)
    assert nnx_table(model, overrides={r"head\.kernel": "matrix"}) == linear("head")
    embed = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
    assert nnx_table(embed, overrides={"embedding": "matrix"}) == {"embedding": MATRIX}


class Factored(nn.Module):
    """Jaxpi's dense layer, whose kernel is a tuple of a scale and a matrix."""

    features: int

    @nn.compact
    def __call__(self, x):
        def init(key):
            v = nn.initializers.lecun_normal()(key, (x.shape[-1], self.features))
            return jnp.linalg.norm(v, axis=0), v

        g, v = self.param("kernel", init)
        return x @ (g * v) + self.param("bias", nn.initializers.zeros, self.features)


class FactoredNet(nn.Module):
    stacked: bool = False

    @nn.compact
    def __call__(self, x):
        make = Factored
        if self.stacked:
            axes = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}}
            make = nn.vmap(Factored, **axes, in_axes=None, axis_size=2)
            x = make(8)(x).sum(0)
        return nn.remat(Factored)(1)(nn.tanh(Factored(8)(nn.tanh(x))))


@pytest.mark.parametrize("stacked", [False, True])
def test_a_parameter_that_is_a_tuple(stacked):
    """A rule holds for its arrays of two axes; an override names each."""
    model, x = FactoredNet(stacked), jnp.ones((2, 3))
    rules = {Factored: lambda m: {"kernel": Weight((None, m.features), 0, 1)}}
    with pytest.raises(
        ValueError, match=r"'\w*Factored_0\.kernel\.1' of .* rule for it in"
    ):
        linen_dimension_numbers(model, x)
    first = {r"^VmapF.*kernel\.1": Dims(0, 2)} if stacked else {}
    overrides = first | {r"^Factored_0\.kernel\.1": "matrix"}
    for given in ({"rules": rules}, {"overrides": overrides}):
        numbers = linen_numbers(model, x, **given)
        assert numbers["Factored_0"] == {"bias": None, "kernel": (None, MATRIX)}
        assert numbers["CheckpointFactored_0"]["kernel"] == (None, None)  # The output
        if stacked:
            assert numbers["VmapFactored_0"]["kernel"] == (None, Dims(0, 2))


def test_modules_that_are_used_twice():
    shared = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    model = nnx.Dict(a=shared, b=shared, c=nnx.Linear(3, 3, rngs=nnx.Rngs(1)))
    assert nnx_table(model) == linear("a", "c")

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(3, name="dense")
            return dense(dense(x))

    assert linen_table(Twice(), jnp.ones((2, 3))) == linear("dense")

    class TwiceStacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.vmap(
                nn.DenseGeneral, variable_axes={"params": -2}, split_rngs={"params": True}
            )((2, 2), axis=(-2, -1), use_bias=False, name="stack")
            return stack(stack(x))

    # The second call removes the box's axis first, and adds it again afterwards.
    found = linen_table(TwiceStacked(), jnp.ones((4, 2, 2)))
    assert found == {"stack.kernel": Dims((0, 1), (2, 4))}


class Tied(nnx.Module):
    """A variable is in the state under the first of its names only."""

    def __init__(self, vocabulary, layer=None):
        self.token = nnx.Embed(vocabulary, 8, rngs=nnx.Rngs(0))
        self.layer = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(1))
        if layer:
            self.decoder = nnx.Linear(8, vocabulary, use_bias=False, rngs=nnx.Rngs(2))
            self.decoder.kernel = self.token.embedding
        else:
            self.decoder = self.token.embedding


@pytest.mark.parametrize("vocabulary", [8, 11])
@pytest.mark.parametrize("layer", [False, True])
def test_a_tied_table_takes_adamw(vocabulary, layer):
    name = "decoder.kernel" if layer else "decoder"
    wanted = {name: None, "layer.kernel": MATRIX}
    assert nnx_table(Tied(vocabulary, layer)) == wanted


class TiedLinen(nn.Module):
    """Its head reads the variables of its embedding, as in Transformers' Flax models."""

    logits: object
    make: object = nn.initializers.normal()

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(11, 8, embedding_init=self.make, name="wte")
        x = nn.Dense(8, name="layer")(table(tokens))
        return self.logits(x, table.variables["params"]["embedding"])


@pytest.mark.parametrize(
    "logits",
    [
        lambda x, table: nn.Dense(11, use_bias=False).apply(
            {"params": {"kernel": table.T}}, x
        ),
        lambda x, table: jnp.dot(x, jnp.transpose(table)),
        lambda x, table: (table @ x.T).T,
        lambda x, table: x @ -table[:5].astype(x.dtype).T,
        lambda x, table: x @ (2 * table).reshape(table.shape[0], -1).T,
        lambda x, table: x @ (table / 2).T + 0 * (table + 1).sum(),
        lambda x, table: x @ nn.unbox(table).T,
    ],
)
def test_a_model_may_read_the_variables_of_its_modules(logits):
    wanted = {"wte.embedding": None, "layer.kernel": MATRIX, "layer.bias": None}
    tokens = jnp.ones(3, int)
    assert linen_table(TiedLinen(logits), tokens) == wanted
    boxed = nn.with_partitioning(nn.initializers.normal(), ("vocab", None))
    model = TiedLinen(lambda x, table: logits(x, nn.unbox(table)), boxed)
    assert linen_dimension_numbers(model, tokens)(
        model.init(jax.random.key(0), tokens)["params"]
    )["wte"] == {"embedding": None}


def test_layers_that_share_a_kernel():
    a, b = (nnx.Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((8, 8), (8, 8)))
    b.kernel = a.kernel
    assert nnx_table(nnx.Dict(a=a, b=b)) == linear("a") | adamw("b.bias")
    # Of names, too, any may say that it is a head.
    assert nnx_table(nnx.Dict(a=a, lm_head=b))["a.kernel"] is None
    own = nnx.Dict(a=a, alias=nnx.List([a.kernel]))
    assert nnx_table(own) == linear("a")
    general = nnx.LinearGeneral(8, (2, 4), rngs=nnx.Rngs(0))
    general.kernel = a.kernel
    owners = (
        r"'a\.kernel' of shape \(8, 8\): its owners disagree; 'a\.kernel' in flax\.\S*"
        r"\.Linear: Muon.*'b\.kernel' in \S*LinearGeneral: its.* declares \(8, 2, 4\)"
    )
    with pytest.raises(ValueError, match=owners):
        nnx_dimension_numbers(nnx.Dict(a=a, b=general))


# Other containers, and modules of the other kind.


def test_frozen_parameters():
    x = jnp.ones((2, 3))
    params = freeze(nn.Dense(4).init(jax.random.key(0), x)["params"])
    given = linen_dimension_numbers(nn.Dense(4), x)
    numbers = given(unfreeze(params))
    with pytest.raises(ValueError, match=r"(?s)must be a tree of.*not as FrozenDict"):
        matrix_axes(numbers, params)
    with pytest.raises(ValueError, match=r"parameters alone, variables\['params'\]"):
        matrix_axes(numbers, {"params": params})
    with pytest.raises(ValueError, match=r"(?s)different type.*'dict'>\.$"):
        matrix_axes([MATRIX, None], {"bias": jnp.ones(4)})
    for found in (
        given(params),
        nnx_dimension_numbers(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))(params),
        by_path({"bias": "adamw"})(params),
    ):
        assert found == freeze({"bias": None, "kernel": MATRIX})
    with flax.config.temp_flip_flag("return_frozendict", True):
        assert linen_numbers(nn.Dense(4), x) == freeze(numbers)


@pytest.mark.extended
def test_labels_from_a_function_freeze_a_part_of_an_nnx_model():
    """As docs/parameters.md freezes it; a tree of labels fits only init or update."""
    model = Tied(11)

    def labels(params):
        return jax.tree.map_with_path(
            lambda path, _: "frozen" if "layer" in jax.tree_util.keystr(path) else "on",
            params,
        )

    numbers = nnx_dimension_numbers(model)
    groups = {
        "on": muon(1e-2, weight_dimension_numbers=numbers), "frozen": optax.set_to_zero()
    }  # fmt: skip
    optimizer = nnx.Optimizer(model, optax.partition(groups, labels), wrt=nnx.Param)
    frozen, trained = (
        jnp.copy(model.layer.kernel[...]),
        jnp.copy(model.token.embedding[...]),
    )
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert jnp.array_equal(model.layer.kernel[...], frozen)
    assert not jnp.array_equal(model.token.embedding[...], trained)


def test_modules_behind_a_bridge_are_unresolved():
    x = jnp.ones((2, 3))
    around = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(x)
    model = nnx.Dict(linen=around, nnx=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"'linen\.kernel' .* in flax.*\.ToNNX\n"):
        nnx_dimension_numbers(model)
    found = nnx_table(model, overrides={r"linen\.kernel": "matrix"})
    assert found == linear("linen", "nnx")
    within = nnx.bridge.ToLinen(nnx.Linear, args=(3, 4))
    model = nn.Sequential([nn.Dense(3), within, nn.relu])
    with pytest.raises(ValueError, match=r"'layers_1\.kernel' .* in flax.*\.ToLinen\n"):
        linen_dimension_numbers(model, x)
    found = linen_table(model, x, overrides={r"layers_1\.kernel": "matrix"})
    assert found == linear("layers_0", "layers_1")


class Normalized(nnx.Module):
    """State that is not trained: statistics, a count and keys of dropout, a cache."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.cache = nnx.Cache(jnp.zeros((2, 3, 4)))
        self.down = nnx.Linear(8, 4, rngs=rngs)
        self.rope, self.window = jnp.ones((16, 8)), jnp.tri(4, dtype=bool)
        self.up_again, self.upward = self.up, self.up.kernel

    def __call__(self, x):
        return self.down(self.dropout(self.norm(self.up(x))))


def test_of_an_nnx_model_what_is_trained_counts():
    model = Normalized(nnx.Rngs(0))
    numbers = nnx_dimension_numbers(model)
    names = {
        "up": ("bias", "kernel"),
        "norm": ("bias", "scale"),
        "down": ("bias", "kernel"),
    }
    wanted = {f"{layer}.{name}" for layer in names for name in names[layer]}
    transformation = orscale(1e-2, weight_dimension_numbers=numbers)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    for described in (None, optimizer, transformation):
        assert {row.path for row in describe(model, described).rows} == wanted
    optimizer.update(model, nnx.state(model, nnx.Param))
    found = diagnostics.read(optimizer, model, numbers)
    assert {x.item() for x in jax.tree.leaves(found.anchored)} == {True}
    of_model = diagnostics.read(optimizer.opt_state, model, numbers)
    assert jax.tree.leaves(of_model.growth) == jax.tree.leaves(found.growth)
    diagnostics.summarize(of_model, diagnostics.layer_names(model))
    measured = [
        diagnostics.measure(state, model, numbers)["momentum_stable_rank"]
        for state in (optimizer, optimizer.opt_state)
    ]
    assert len(jax.tree.leaves(measured[0])) == 2
    assert jax.tree.leaves(measured[0]) == jax.tree.leaves(measured[1])
    down = nnx.All(nnx.Param, nnx.PathContains("down"))
    optimizer = nnx.Optimizer(model, transformation, wrt=down)
    rows = describe(model, optimizer).rows
    assert [row.path for row in rows] == ["down.bias", "down.kernel"]


def test_an_nnx_optimizer_goes_on_from_another_ones_state():
    """As convert_state does on bare trees, also where the variables are not trained."""
    model = Normalized(nnx.Rngs(0))

    def step(model, optimizer):
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)

    old = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    for _ in range(3):
        step(model, old)
    numbers = nnx_dimension_numbers(model)
    new = nnx.Optimizer(
        model, muon(1e-2, weight_dimension_numbers=numbers), wrt=nnx.Param
    )
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    bare = nnx.to_pure_dict(nnx.state(old.opt_state[0].mu))
    wanted = 20 * bare["up"]["kernel"]
    for state in (old, old.opt_state):
        new.opt_state = convert_state(state, new, model, momentum=0.95)
        found = optax.tree.get(new.opt_state, "trace")["up"]["kernel"][...]
        assert_close(found, wanted, rtol=1e-6)
    nnx.jit(step)(model, new)
    assert int(optax.tree.get(new.opt_state, "count")[...]) == 4
    assert_all_change(params, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_a_model_that_is_itself_the_tree_of_parameters():
    """Without an nnx.Optimizer its type and its structure stay."""
    params = nnx.Dict(a=nnx.Param(jnp.ones((2, 4, 4))), b=nnx.Variable(jnp.ones(3)))
    numbers = jax.tree.map(lambda leaf: Dims(1, 2) if leaf.ndim == 3 else None, params)
    optimizer = orscale(1e-2, weight_dimension_numbers=numbers)
    grads, state = jax.tree.map(jnp.ones_like, params), optimizer.init(params)
    _, state = optimizer.update(grads, convert_state(state, optimizer, params), params)
    assert diagnostics.read(state, params, numbers).anchored["a"].shape == (2,)
    assert [
        row.path
        for row in describe(params, orscale(1e-3, weight_dimension_numbers=numbers)).rows
    ] == ["a"]
    only = nnx.Dict(a=nnx.Variable(jnp.ones((4, 4))))  # Whatever they are: all.
    assert [row.path for row in describe(only).rows] == ["a"]


def test_a_model_with_hijax_variables():
    """Its table is that of the same model with other variables."""

    def table(hijax):
        with nnx.var_defaults(hijax=hijax):
            model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
            return str(describe(model))

    assert table(True) == table(False) and "matrix" in table(True)
