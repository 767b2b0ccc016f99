"""A mixture of experts and its loss."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from examples.pretrain.moonlight.model import (
    Moonlight,
    balanced,
    count_active_parameters,
    weight_dimension_numbers,
)
from examples.pretrain.task import Metrics, PyTree
from examples.pretrain.tasks.decoder import DecoderTask


class MixtureTask(DecoderTask):
    """The same with routing, whose biases move after every step."""

    has_experts = True

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        return Moonlight(self.config, rngs)

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        return weight_dimension_numbers(
            model, router=self.recipe.router, per_head=self.recipe.per_head
        )

    def loss(self, model: Any, batch: jax.Array) -> tuple[jax.Array, Metrics]:
        hidden, routing = model.hidden(batch[:, :-1])
        loss = self.cross_entropy(model, hidden, batch)
        metrics = {"loss": loss, "expert_load": routing.fraction}
        return loss + routing.aux_loss, metrics

    def evaluate(self, model: Any, batch: jax.Array) -> Metrics:
        return {"loss": self.loss(model, batch)[1]["loss"]}

    def after_step(self, variables: PyTree, metrics: Metrics) -> PyTree:
        bias_LxE = variables["routing_bias"]
        rate = self.recipe.balance_rate
        return {"routing_bias": balanced(bias_LxE, metrics["expert_load"], rate)}

    def _flops(self) -> float:
        """The weights that a token meets count, and those of the head."""
        config, T = self.config, self.items_per_example
        model = nnx.eval_shape(lambda: Moonlight(config, nnx.Rngs(0)))
        weights = count_active_parameters(model) + config.vocab_size * config.width
        features = config.heads * (
            config.nope_dim + config.rope_dim + config.value_dim
        )  # Of scores and of values, as against twice the width.
        return 6.0 * weights * T + 6.0 * config.layers * features * T**2
