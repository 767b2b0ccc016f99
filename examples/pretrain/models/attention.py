"""Causal attention by the platform's fused kernel where it fits, else written out."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from examples.pretrain.models.sharding import mesh_axes, platform

# Of queries (B, T, N, H), keys and values (B, T, N, U): the means of values.
Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
LANES = 128  # Of a TPU: what blocks of splash attention are multiples of.
LARGEST_BLOCK = 1024


class Choice(NamedTuple):
    """How attention is computed."""

    kernel: Kernel | None  # None: written out.
    why: str  # A line for the start of a run.


def choose(dtype: DTypeLike, length: int, features: int, value_features: int) -> Choice:
    """The kernel for a head's queries and keys, and values, of so many features.

    The platform is that of the mesh in context; without a mesh it is JAX's default.
    """
    on, dtype, refused = platform(), jnp.dtype(dtype), ""
    if on not in ("gpu", "tpu"):
        refused = f"there is no fused kernel for the platform {on}"
    elif dtype.itemsize != 2:
        refused = f"fused kernels take 16-bit activations, and these are {dtype}"
    elif on == "tpu" and length % LANES:
        refused = f"splash attention needs a multiple of {LANES} tokens, not {length}"
    elif on == "gpu":
        like = jax.ShapeDtypeStruct((1, length, 1, features), dtype)
        values = jax.ShapeDtypeStruct((1, length, 1, value_features), dtype)
        try:
            jax.eval_shape(cudnn, like, like, values)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            refused = f"cuDNN refuses heads of {features} features: {error}"
    if refused:
        return Choice(None, f"Attention is written out: {refused}.")
    if on == "gpu":
        return Choice(cudnn, f"Attention is cuDNN's fused kernel, in {dtype}.")
    return Choice(splash_attention, f"Attention is splash attention, in {dtype}.")


def causal_attention(
    queries: Sequence[jax.Array], keys: Sequence[jax.Array], v_BxSxNxU: jax.Array
) -> jax.Array:
    """The mean of the values up to each position, weighted by the softmax of its scores.

    Queries (B, T, N, ·) and keys (B, S, N, ·) come in parts, the products of which are
    summed. The heads share a part of keys that has no axis for them.
    """
    features = sum(part.shape[-1] for part in queries)
    length, value_features = v_BxSxNxU.shape[1], v_BxSxNxU.shape[-1]
    kernel, _ = choose(v_BxSxNxU.dtype, length, features, value_features)
    if kernel is None:
        return written_out(queries, keys, v_BxSxNxU)
    shape = v_BxSxNxU.shape[:3]
    k_BxSxNxH = jnp.concatenate(
        [
            part if part.ndim == 4
            else jnp.broadcast_to(part[:, :, None], (*shape, part.shape[-1]))
            for part in keys
        ],
        axis=-1,
    )  # fmt: skip
    q_BxTxNxH = jnp.concatenate(queries, axis=-1)
    batch, heads = mesh_axes("batch"), mesh_axes("heads")
    if batch + heads:
        spec = PartitionSpec(batch, None, heads)
        # Kernels do not say over which axes their results vary.
        kernel = jax.shard_map(
            kernel, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
        )
    return kernel(q_BxTxNxH, k_BxSxNxH, v_BxSxNxU)


def written_out(
    queries: Sequence[jax.Array], keys: Sequence[jax.Array], v_BxSxNxU: jax.Array
) -> jax.Array:
    """The same from scores of at least float32.

    `jax.nn.dot_product_attention` rounds to float32, also of float64.
    """
    precise = jnp.promote_types(jnp.float32, v_BxSxNxU.dtype)
    features = sum(part.shape[-1] for part in queries)
    products = [
        jnp.einsum(
            "btnh,bsnh->bnts" if k.ndim == 4 else "btnh,bsh->bnts",
            q,
            k,
            preferred_element_type=precise,
        )
        for q, k in zip(queries, keys, strict=True)
    ]
    scores_BxNxTxS = functools.reduce(jnp.add, products) * features**-0.5
    T = scores_BxNxTxS.shape[-1]
    causal_1x1xTxT = jnp.tri(T, dtype=bool)[None, None]
    lowest = jnp.finfo(precise).min
    share_BxNxTxS = jax.nn.softmax(jnp.where(causal_1x1xTxT, scores_BxNxTxS, lowest))
    return jnp.einsum("bnts,bsnh->btnh", share_BxNxTxS.astype(v_BxSxNxU.dtype), v_BxSxNxU)


def cudnn(q_BxTxNxH: jax.Array, k_BxSxNxH: jax.Array, v_BxSxNxU: jax.Array) -> jax.Array:
    """By cuDNN. Values with fewer features than keys are padded to as many."""
    H, U = k_BxSxNxH.shape[-1], v_BxSxNxU.shape[-1]
    v_BxSxNxH = jnp.pad(v_BxSxNxU, [(0, 0)] * 3 + [(0, max(H - U, 0))])
    return jax.nn.dot_product_attention(
        q_BxTxNxH, k_BxSxNxH, v_BxSxNxH, is_causal=True, implementation="cudnn"
    )[..., :U]


def splash_attention(
    q_BxTxNxH: jax.Array,
    k_BxSxNxH: jax.Array,
    v_BxSxNxU: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """By JAX's kernel for TPUs, or by an interpreter of it on any platform."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # Takes long.
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    _, T, N, H = q_BxTxNxH.shape
    block = max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if T % size == 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((T, T))] * N),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
            use_fused_bwd_kernel=True,
        ),
        interpret=interpret,
    )  # fmt: skip
    q, k, v = (x.swapaxes(1, 2) for x in (q_BxTxNxH * H**-0.5, k_BxSxNxH, v_BxSxNxU))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)
