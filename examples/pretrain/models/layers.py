"""What the models share: linear layers, rotary positions, MLPs, stacks of blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from examples.pretrain.models.sharding import Init, constrain, named, platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What all layers of a model agree on."""

    # Base of the wavelengths of the rotary positions.
    rope_base: float = 10_000.0
    # Number added to the mean square that a norm divides by.
    norm_eps: float = 1e-6
    # Standard deviation of initial weights. None: the inverse root of the fan-in.
    init_std: float | None = None
    # Numbers that activations are computed in, and those that weights are kept in.
    dtype: DTypeLike = "float32"
    param_dtype: DTypeLike = "float32"
    # One block with stacked parameters (L, ...) instead of a list of blocks.
    scan: bool = True
    # Activations of a block are computed again in the backward pass.
    remat: bool = False

    @property
    def precise_dtype(self) -> jnp.dtype:
        """For what is not to be rounded to bfloat16."""
        return jnp.promote_types(jnp.float32, self.dtype)

    def check_sizes(self, *names: str) -> None:
        """Raises ValueError if one of the sizes is below 1."""
        for name in names:
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name}={size}: choose at least 1")

    def weight_init(self, default: Init) -> Init:
        if self.init_std is None:
            return default
        return jax.nn.initializers.normal(self.init_std)


def linear(
    inputs: int, outputs: int, names: tuple[str, str], config: LayerConfig, rngs: nnx.Rngs
) -> nnx.Linear:
    """A linear layer without bias; its kernel is (inputs, outputs)."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=named(config.weight_init(nnx.initializers.lecun_normal()), *names),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def embedding(
    vocab_size: int, width: int, config: LayerConfig, rngs: nnx.Rngs
) -> nnx.Embed:
    default = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    return nnx.Embed(
        vocab_size,
        width,
        embedding_init=named(config.weight_init(default), "vocab", "embed"),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def look_up(embed: nnx.Embed, tokens_BxT: jax.Array) -> jax.Array:
    """The rows of an embedding table, whole on every device.

    In a table whose width is sharded over axes of the batch, all would look up all.
    """
    table_VxD = constrain(embed.embedding[...].astype(embed.dtype), "vocab", None)
    return constrain(jnp.take(table_VxD, tokens_BxT, axis=0), "batch", "length", None)


def rms_norm(width: int, config: LayerConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        width,
        epsilon=config.norm_eps,
        scale_init=named(nnx.initializers.ones, "norm"),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def rotate(x_BxTxNxH: jax.Array, base: float) -> jax.Array:
    """Rotary positions: turn each pair of features by an angle that grows with position.

    The product of a query and a key then depends on their distance alone. A pair is a
    feature of the first half and one of the second.
    """
    T, H = x_BxTxNxH.shape[1], x_BxTxNxH.shape[3]
    dtype = x_BxTxNxH.dtype
    precise = jnp.promote_types(jnp.float32, dtype)
    exponent_P = jnp.linspace(0, 1, H // 2, endpoint=False, dtype=precise)
    angle_TxP = jnp.arange(T, dtype=precise)[:, None] * base ** -exponent_P[None, :]
    cos_1xTx1xP, sin_1xTx1xP = (
        f(angle_TxP).astype(dtype)[None, :, None, :] for f in (jnp.cos, jnp.sin)
    )
    a_BxTxNxP, b_BxTxNxP = jnp.split(x_BxTxNxH, 2, axis=-1)
    return jnp.concatenate(
        [
            a_BxTxNxP * cos_1xTx1xP - b_BxTxNxP * sin_1xTx1xP,
            a_BxTxNxP * sin_1xTx1xP + b_BxTxNxP * cos_1xTx1xP,
        ],
        axis=-1,
    )


class Relu2Mlp(nnx.Module):
    """ReLU² between two matrices."""

    def __init__(self, width: int, hidden: int, config: LayerConfig, rngs: nnx.Rngs):
        self.up = linear(width, hidden, ("embed", "mlp"), config, rngs)
        self.down = linear(hidden, width, ("mlp", "embed"), config, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        h_BxTxF = jnp.square(jax.nn.relu(self.up(x_BxTxD)))
        return self.down(constrain(h_BxTxF, "batch", "length", "mlp"))


class SwigluMlp(nnx.Module):
    """SwiGLU: what goes up is multiplied by a gate before it goes down."""

    def __init__(self, width: int, hidden: int, config: LayerConfig, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, ("embed", "mlp"), config, rngs)
        self.up = linear(width, hidden, ("embed", "mlp"), config, rngs)
        self.down = linear(hidden, width, ("mlp", "embed"), config, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        h_BxTxF = jax.nn.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD)
        return self.down(constrain(h_BxTxF, "batch", "length", "mlp"))


class Block(nnx.Module):
    """Attention, then MLP, each on a normed copy and added to the stream."""

    def __init__(
        self, attention: Any, mlp: Any, hidden: int, config: Any, rngs: nnx.Rngs
    ):
        self.attention_norm = rms_norm(config.width, config, rngs)
        self.attention = attention(config, rngs)
        self.mlp_norm = rms_norm(config.width, config, rngs)
        self.mlp = mlp(config.width, hidden, config, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, None]:
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        x_BxTxD = x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))
        return constrain(x_BxTxD, "batch", "length", None), None


def stack(
    make: Callable[[nnx.Rngs], nnx.Module], count: int, scan: bool, rngs: nnx.Rngs
) -> Any:
    """Blocks in a list, or one block with parameters stacked along an axis "layers"."""
    if not scan:
        return nnx.List([make(rngs) for _ in range(count)])
    names = {nnx.PARTITION_NAME: "layers"}
    return nnx.vmap(make, transform_metadata=names)(rngs.split(count))


def run(
    blocks: Any, x: jax.Array, *per_block: jax.Array, remat: bool
) -> tuple[jax.Array, Any]:
    """The output of the last block, and what each gives besides, stacked.

    A block is called with what the one before it returns and its own part of `per_block`,
    and returns two values: `x` for the next, and what is stacked.
    """

    scan = not isinstance(blocks, nnx.List)
    # A loop copies what the backward pass needs into stacks, and from them: on a GPU that
    # takes half as long as all else. There a program of all blocks compiles in seconds.
    unroll = platform() == "gpu"

    def step(graphdef: nnx.GraphDef) -> Callable[[Any, Any], tuple[Any, Any]]:
        def apply(x: Any, inputs: Any) -> tuple[Any, Any]:
            state, *rest = inputs
            return nnx.merge(graphdef, state)(x, *rest)

        return jax.checkpoint(apply, prevent_cse=unroll or not scan) if remat else apply

    if scan:
        graphdef, state = nnx.split(blocks)
        return jax.lax.scan(step(graphdef), x, (state, *per_block), unroll=unroll)
    outputs = []
    for i, block in enumerate(blocks):
        graphdef, state = nnx.split(block)
        x, output = step(graphdef)(x, (state, *(array[i] for array in per_block)))
        outputs.append(output)
    return x, jax.tree.map(lambda *arrays: jnp.stack(arrays), *outputs or [None])


def count_parameters(model: nnx.Module) -> int:
    """Entries of all parameters, also of an abstract model (`nnx.eval_shape`)."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
