"""Each token times its experts' matrices: rows times the matrix of their group."""

import jax
import jax.numpy as jnp

# Rows of one group that the CPU multiplies at once.
BLOCK = 128


def routed(
    x_BxTxD: jax.Array,
    selected_BxTxK: jax.Array,
    weight_BxTxK: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
) -> jax.Array:
    """The weighted sum of each token's experts; those beyond the E give zero."""
    (*BT, D), E, K = x_BxTxD.shape, gate_ExDxF.shape[0], selected_BxTxK.shape[-1]
    expert_M = selected_BxTxK.reshape(-1)
    expert_M = jnp.where((expert_M >= 0) & (expert_M < E), expert_M, E)
    order_M = jnp.argsort(expert_M)
    sizes_E = jnp.zeros(E, jnp.int32).at[expert_M].add(1, mode="drop")
    here_Mx1 = (jnp.arange(expert_M.size) < sizes_E.sum())[:, None]

    # Masked on both sides: neither the rows after the last group nor their gradients are
    # defined.
    x_MxD = jnp.where(here_Mx1, x_BxTxD.reshape(-1, D)[order_M // K], 0)
    h_MxF = jax.nn.silu(grouped_product(x_MxD, gate_ExDxF, sizes_E))
    h_MxF *= grouped_product(x_MxD, up_ExDxF, sizes_E)
    y_MxD = jnp.where(here_Mx1, grouped_product(h_MxF, down_ExFxD, sizes_E), 0)

    y_MxD = y_MxD.at[jnp.argsort(order_M)].get(unique_indices=True)
    y_BxTxKxD = y_MxD.reshape(*BT, K, D)
    return jnp.einsum("btkd,btk->btd", y_BxTxKxD, weight_BxTxK).astype(x_BxTxD.dtype)


def grouped_product(
    x_MxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array
) -> jax.Array:
    """The product of each row with its group's matrix.

    The rows lie group after group, `sizes_E` of each. Rows that come after the last group
    have no defined result.
    """
    return jax.lax.platform_dependent(
        x_MxD, w_ExDxF, sizes_E, cpu=in_blocks, default=jax.lax.ragged_dot
    )


def in_blocks(x_MxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The same by products of whole blocks of rows, each with a copy of its matrix.

    On a CPU `ragged_dot` multiplies every row with every matrix: with 8 groups of 512
    rows, 128 × 256, its gradient takes 14 times as long as this one's (JAX 0.10).
    """
    (M, D), E = x_MxD.shape, w_ExDxF.shape[0]
    S = min(BLOCK, M)
    G = -(-M // S) + E  # Blocks that suffice, however the rows are distributed.
    ends_E = jnp.cumsum(sizes_E)
    block_ends_E = jnp.cumsum(-(-sizes_E // S))
    # Where a group's blocks begin, as against its rows.
    shifts_E = jnp.roll(block_ends_E * S, 1).at[0].set(0) - (ends_E - sizes_E)
    rows_M = jnp.arange(M)
    places_M = rows_M + shifts_E[_group(rows_M, ends_E)]
    x_GxSxD = (
        jnp.zeros((G * S, D), x_MxD.dtype)
        .at[places_M]
        .set(x_MxD, unique_indices=True, indices_are_sorted=True)
        .reshape(G, S, D)
    )
    w_GxDxF = w_ExDxF[_group(jnp.arange(G), block_ends_E)]
    y_GxSxF = jnp.einsum("gsd,gdf->gsf", x_GxSxD, w_GxDxF)
    return (
        y_GxSxF.reshape(G * S, -1)
        .at[places_M]
        .get(unique_indices=True, indices_are_sorted=True)
    )


def _group(indices: jax.Array, ends_E: jax.Array) -> jax.Array:
    """The group that each index lies in; the last one's for those beyond it."""
    groups = jnp.searchsorted(ends_E, indices, side="right")
    return jnp.minimum(groups, ends_E.size - 1)
