"""A decoder in the style of MaxText: scanned layers, logical axis names, and a mesh.

    python -m examples.gallery.maxtext_style     # a minute; loss 0.3

nn.scan stacks the layers on axis 1 of each parameter: the projection to the heads is
(embed, layers, heads, head_dim). Rules by path say which axes are rows and columns. The
axis of the layers, which they leave out, counts matrices.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.spmd import logical_to_mesh_sharding
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, muon

VOCABULARY, HEADS, PROJECTIONS = 64, 4, ("query", "key", "value")
AXES = (("embed", "fsdp"), ("heads", "tensor"), ("mlp", "tensor"))
RULES = {  # The first that matches decides.
    r"embedder|scale": "adamw",
    r"self_attention\.out": MuonDimensionNumbers((0, -2), -1),
    r"self_attention": MuonDimensionNumbers(0, (-2, -1)),
    r"wi|wo": MuonDimensionNumbers(0, -1),
}


def weight(module: nn.Module, name: str, **axes: int) -> Any:
    """A parameter whose axes have these logical names and sizes."""
    init = nn.with_logical_partitioning(nn.initializers.normal(0.1), tuple(axes))
    return module.param(name, init, tuple(axes.values()))


class SelfAttention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, size = x.shape[-1], x.shape[-1] // HEADS
        axes = {"embed": width, "heads": HEADS, "head_dim": size}
        heads = [jnp.tensordot(x, weight(self, name, **axes), 1) for name in PROJECTIONS]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        out = weight(self, "out", heads=HEADS, head_dim=size, embed=width)
        return jnp.tensordot(mixed, out, 2)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x += SelfAttention(name="self_attention")(nn.RMSNorm()(x))
        wi = weight(self, "wi", embed=x.shape[-1], mlp=4 * x.shape[-1])
        wo = weight(self, "wo", mlp=4 * x.shape[-1], embed=x.shape[-1])
        return x + nn.gelu(nn.RMSNorm()(x) @ wi) @ wo, None


class Decoder(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, self.width, name="token_embedder")
        x, _ = nn.scan(
            Layer,
            length=self.layers,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(name="layers")(embed(tokens), None)
        return embed.attend(nn.RMSNorm()(x))


def main(steps: int = 100, width: int = 32, layers: int = 3) -> tuple[list[float], Any]:
    """The losses, and the state after the last step, in Flax's boxes."""
    jax.config.update("jax_num_cpu_devices", 8)  # Before JAX looks for devices.
    devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
    mesh = Mesh(np.reshape(devices[:8], (4, 2)), ("fsdp", "tensor"))
    model = Decoder(width, layers)
    rate = optax.warmup_cosine_decay_schedule(0, 0.01, steps // 10, steps)
    optimizer = muon(rate, weight_dimension_numbers=by_path(RULES))

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 2), int))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def train_step(state: TrainState, key: jax.Array) -> tuple[jax.Array, TrainState]:
        start, stride = jax.random.randint(key, (2, 64, 1), 0, VOCABULARY)
        tokens = (start + stride % 4 * jnp.arange(16)) % VOCABULARY

        def loss_fn(params: Any) -> jax.Array:
            log_p = jax.nn.log_softmax(state.apply_fn({"params": params}, tokens[:, :-1]))
            return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return loss, state.apply_gradients(grads=grads)

    keys = jax.random.split(jax.random.key(0), steps + 1)
    with jax.set_mesh(mesh), nn.logical_axis_rules(AXES):
        specs = nn.get_partition_spec(jax.eval_shape(init, keys[0]))
        where = logical_to_mesh_sharding(specs, mesh)
        state = jax.jit(init, out_shardings=where)(keys[0])
        step = jax.jit(train_step, donate_argnums=0, out_shardings=(None, where))
        losses = []
        for key in keys[1:]:
            loss, state = step(state, key)
            losses.append(float(loss))
    return losses, state


if __name__ == "__main__":
    losses, state = main()
    query = state.params["layers"]["self_attention"]["query"].value
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print(f"query: {query.shape}, {query.sharding.spec}")
