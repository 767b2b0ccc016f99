"""Output layers, whatever their names: a trace finds them, and AdamW trains them."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax.equinox import dimension_numbers as equinox_numbers
from orscale_jax.flax import linen_dimension_numbers, nnx_dimension_numbers
from orscale_jax.parameters.dimension_numbers import is_resolvable
from orscale_jax.trees.names import dotted


@pytest.fixture(autouse=True)
def broadcasting_as_flax_does():
    with jax.numpy_rank_promotion("allow"):
        yield


class Model(nn.Module):
    """A model from a function; its layers are named as by ``nn.compact``."""

    call: object
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, *inputs):
        return self.call(*inputs)


def hidden(x, *widths):
    for width in widths or (8, 8):
        x = nn.relu(nn.Dense(width)(x))
    return x


def residual(x):
    return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))


def resnet(x):
    x = nn.Conv(8, (3, 3))(x)
    for _ in range(2):
        y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        x = nn.relu(x + nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3))(y)))
    return x


def actor_critic(x):
    actor = nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))
    return jax.nn.log_softmax(actor), nn.Dense(1)(hidden(x)).squeeze(-1)


def tied(tokens):
    table = nn.Embed(11, 8)
    return table.attend(nn.tanh(nn.Dense(8)(table(tokens))))


def dueling(x):
    x = hidden(x)
    value, advantage = nn.Dense(1)(x), nn.Dense(4)(x)
    return value + advantage - advantage.mean(-1, keepdims=True)


def critics(x):
    many = nn.vmap(
        Model, variable_axes={"params": 0}, split_rngs={"params": True},
        in_axes=None, axis_size=2,
    )  # fmt: skip
    return many(lambda x: nn.Dense(1)(hidden(x)))(x).min(0)


def over_time(x):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            carry, y = nn.GRUCell(8)(carry, x)
            return carry, nn.Dense(5)(y)

    axes = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    return nn.scan(Step, **axes, in_axes=1, out_axes=1)()(jnp.zeros((2, 8)), x)


def feeding_back(x):
    """The prediction is the next input, as in Flax's seq2seq example."""

    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            state, token = carry
            state, y = nn.LSTMCell(8)(state, jax.nn.one_hot(token, 5))
            logits = nn.Dense(5)(y)
            return (state, logits.argmax(-1)), logits

    axes = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    start = (hidden(x, 8), hidden(x, 8)), jnp.zeros(2, int)
    return nn.scan(Step, **axes, length=3)()(start, None)[1]


def graph_network(x):
    edges = nn.relu(nn.Dense(8)(x[jnp.array([0, 1, 1])]))
    nodes = jax.ops.segment_sum(edges, jnp.array([0, 0, 1]), 2)
    return jax.ops.segment_sum(nn.Dense(3)(nn.relu(nodes)), jnp.array([0, 0]), 1)


def graph_convolution(x, adjacency):
    return nn.log_softmax(adjacency @ nn.Dense(3)(nn.relu(adjacency @ nn.Dense(8)(x))))


def transformer(tokens):
    x = nn.Embed(11, 8)(tokens)
    x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
    return nn.Dense(11)(nn.LayerNorm()(residual(x)))


def autoencoder(x):
    x = nn.Conv(4, (3, 3))(nn.relu(nn.Conv(4, (3, 3))(x)))
    return nn.sigmoid(nn.ConvTranspose(1, (3, 3))(nn.relu(x)))


X, IMAGES, SERIES = jnp.ones((2, 4)), jnp.ones((2, 6, 6, 3)), jnp.ones((2, 5, 4))
TOKENS = jnp.ones((2, 5), int)
# For each model: its inputs, and the kernels of its output layers. In nested calls the
# outermost layer is made, and numbered, first.
HEADS = {
    "classifier": (lambda x: nn.Dense(10)(hidden(x)), (X,), "Dense_0"),
    "with softmax and a temperature": (
        lambda x: nn.softmax(nn.Dense(3)(hidden(x, 8)) / 0.1), (X,), "Dense_0",
    ),
    "ResNet": (lambda x: nn.Dense(9)(resnet(x).mean((1, 2))), (IMAGES,), "Dense_0"),
    "all of convolutions": (
        lambda x: nn.Conv(3, (1, 1))(resnet(x)).mean((1, 2)), (IMAGES,), "Conv_0",
    ),
    "actor and critic": (actor_critic, (X,), "Dense_0 Dense_2"),
    "dueling": (dueling, (X,), "Dense_2 Dense_3"),
    "ensemble of critics": (critics, (X,), "VmapModel_0.Dense_0"),
    "in a loop over time": (over_time, (SERIES,), "ScanStep_0.Dense_0"),
    "fed back": (feeding_back, (X,), "ScanStep_0.Dense_0"),
    "graph network": (graph_network, (X,), "Dense_1"),
    "graph convolution": (graph_convolution, (X, jnp.ones((2, 2))), "Dense_0"),
    "transformer": (transformer, (TOKENS,), "Dense_0"),
    "remat": (lambda x: nn.remat(nn.Dense)(3)(hidden(x)), (X,), "CheckpointDense_0"),
    "jit": (lambda x: nn.jit(nn.Dense)(3)(hidden(x)), (X,), "JitDense_0"),
    "masked": (
        lambda x: jnp.where(x[:, :1] > 0, nn.Dense(3)(hidden(x)), -1e9), (X,), "Dense_0",
    ),
    "normalized kernel": (
        lambda x: nn.WeightNorm(nn.Dense(3))(hidden(x)), (X,), "Dense_0",
    ),
    "hidden states beside it": (
        lambda x: (y := hidden(x), nn.Dense(3)(y), nn.Dense(2)(nn.Dense(5)(y))),
        (X,), "Dense_2 Dense_3",
    ),
    "behind a mask that is added": (  # As in JaxMARL, with a critic beside it.
        lambda x, mask: (nn.Dense(3)(y := hidden(x)) - (1 - mask) * 1e9, nn.Dense(1)(y)),
        (X, jnp.ones((2, 3))), "Dense_0 Dense_3",
    ),
    "beside a norm of the inputs": (  # As in OTT's potentials.
        lambda x: nn.Dense(1)(hidden(x)).squeeze(-1) + jnp.square(x).sum(-1) / 2,
        (X,), "Dense_0",
    ),
    "wide and deep": (
        lambda x: nn.Dense(1)(x) + nn.Dense(1)(hidden(x)), (X,), "Dense_1",
    ),
    "autoencoder": (autoencoder, (IMAGES,), "ConvTranspose_0"),
}  # fmt: skip
HIDDEN = {
    "a layer alone": (nn.Dense(3), (X,)),
    "attention alone": (nn.MultiHeadDotProductAttention(2), (SERIES,)),
    "behind a norm of the inputs": (
        lambda x: nn.Dense(3)(x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))), (X,),
    ),
    "ReLU": (hidden, (X,)),
    "GELU": (lambda x: nn.gelu(nn.Dense(8)(hidden(x))), (X,)),
    "gate": (lambda x: nn.Dense(8)(hidden(x)) * nn.sigmoid(nn.Dense(8)(x)), (X,)),
    "norm": (lambda x: nn.LayerNorm()(nn.Dense(8)(hidden(x))), (X,)),
    "batch statistics": (
        lambda x: nn.BatchNorm(use_running_average=True)(nn.Dense(8)(hidden(x))), (X,),
    ),
    "unit length": (
        lambda x: (y := nn.Dense(8)(x)) / jnp.linalg.norm(y, axis=-1, keepdims=True),
        (X,),
    ),
    "residual": (lambda x: residual(residual(nn.Dense(8)(x))), (X,)),
    "residual of an embedding": (lambda x: residual(nn.Embed(11, 8)(x)), (TOKENS,)),
    "ResNet": (resnet, (IMAGES,)),
    "states": (lambda x: nn.RNN(nn.GRUCell(8))(x), (SERIES,)),
    "scores of attention": (
        lambda x: jnp.einsum("bqd,bkd->bqk", nn.Dense(8)(hidden(x)), nn.Dense(8)(x)),
        (SERIES,),
    ),
    "below a tied table": (tied, (TOKENS,)),
    "energy": (lambda x: jnp.square(nn.Dense(8)(hidden(x))).sum(), (X,)),
}  # fmt: skip


def adamw_kernels(numbers, end="kernel"):
    """The paths of the modules whose kernels take AdamW."""
    leaves = jax.tree.leaves_with_path(numbers, is_leaf=is_resolvable)
    paths = {dotted(path) for path, own in leaves if own is None}
    return {path[: -len(end) - 1] for path in paths if path.endswith(end)}


def of_linen(call, inputs):
    model = call if isinstance(call, nn.Module) else Model(call)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    return adamw_kernels(linen_dimension_numbers(model, *inputs)(params))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", HEADS)
def test_an_output_layer(name):
    call, inputs, expected = HEADS[name]
    assert of_linen(call, inputs) == set(expected.split())


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_layers_alone(name):
    assert of_linen(*HIDDEN[name]) == set()


class Network(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return scale * self.out(self.drop(nnx.relu(self.norm(self.inner(x)))))


def test_an_output_layer_of_nnx():
    """Only a call shows it; the model is left as it was."""
    model = Network(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))
    assert adamw_kernels(nnx_dimension_numbers(model)(params)) == set()
    abstract = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    for given in (model, abstract):
        assert adamw_kernels(nnx_dimension_numbers(given, X)(params)) == {"out"}
    assert adamw_kernels(nnx_dimension_numbers(model, x=X, scale=2.0)(params)) == {"out"}
    kept = nnx_dimension_numbers(model, X, overrides={"out.kernel": "matrix"})
    assert adamw_kernels(kept(params)) == set()
    after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __call__(self, xs, *, key=None):
        state, _ = jax.lax.scan(
            lambda state, x: (self.cell(x, state), None), jnp.zeros(8), xs
        )
        return jax.nn.sigmoid(self.linear(state))


def test_an_output_layer_of_equinox():
    one, two = jax.random.split(key := jax.random.key(0))
    model = Recurrent(eqx.nn.GRUCell(4, 8, key=one), eqx.nn.Linear(8, 1, key=two))
    params = eqx.filter(model, eqx.is_inexact_array)
    found = [
        equinox_numbers(model, *given, **keys)(params).linear.weight
        for given, keys in (((), {}), ((SERIES[0],), {}), ((SERIES[0],), {"key": key}))
    ]
    assert found == [Dims(1, 0), None, None]
    mlp = eqx.nn.MLP(4, 3, 8, 2, key=key)
    layers = equinox_numbers(mlp, X[0])(eqx.filter(mlp, eqx.is_inexact_array)).layers
    assert [layer.weight for layer in layers] == [Dims(1, 0), Dims(1, 0), None]
