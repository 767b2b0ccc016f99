"""A dense decoder and its loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.loss import cross_entropy
from examples.pretrain.models.dense import Dense, weight_dimension_numbers
from examples.pretrain.models.layers import count_parameters
from examples.pretrain.task import Metrics, PyTree


class DecoderTask:
    """Predicts every token from those before it; a batch is B×(T+1) tokens."""

    item = "tokens"
    has_experts = False

    def __init__(self, config: Config):
        sizes = config.model
        if sizes.vocab_size % config.loss_chunks:
            raise UsageError(
                f"--loss-chunks {config.loss_chunks} does not divide the vocabulary of "
                f"{sizes.vocab_size}: choose one that does."
            )
        self.recipe, self.loss_chunks = config.recipe, config.loss_chunks
        self.items_per_example = config.recipe.seq_len
        self.config = dataclasses.replace(
            sizes,
            dtype=self.recipe.compute_dtype,
            param_dtype=self.recipe.param_dtype,
        )
        self.flops_per_example: float | None = self._flops()

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        return Dense(self.config, rngs)

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        return weight_dimension_numbers(
            model, qkv=self.recipe.qkv, per_head=self.recipe.per_head
        )

    def loss(self, model: Any, batch: jax.Array) -> tuple[jax.Array, Metrics]:
        loss = self.cross_entropy(model, model.hidden(batch[:, :-1]), batch)
        return loss, {"loss": loss}

    def evaluate(self, model: Any, batch: jax.Array) -> Metrics:
        return self.loss(model, batch)[1]

    def after_step(self, variables: PyTree, metrics: Metrics) -> PyTree:
        return variables

    def batch(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, self.items_per_example + 1), jnp.int32)

    def cross_entropy(
        self, model: Any, hidden_BxTxD: jax.Array, tokens_BxT1: jax.Array
    ) -> jax.Array:
        """Mean over all positions, in nats."""
        if self.loss_chunks == 1:
            head: Any = model.logits
        else:
            head = model.head_DxV.astype(self.config.dtype)
        return cross_entropy(hidden_BxTxD, head, tokens_BxT1[:, 1:], self.loss_chunks)

    def _flops(self) -> float:
        """6 a weight and token, and 12 a pair of positions, layer and feature.

        Causal attention is counted as if it were not, as is the custom (arXiv:2204.02311,
        appendix B).
        """
        config, T = self.config, self.items_per_example
        model = nnx.eval_shape(lambda: Dense(config, nnx.Rngs(0)))
        weights = count_parameters(model)
        if not config.tied:
            weights -= config.vocab_size * config.width  # Looking up is no product.
        return 6.0 * weights * T + 12.0 * config.layers * config.width * T**2
