"""Decoders and the operations that training them takes."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from examples.pretrain.models.dense import Dense, DenseConfig, weight_dimension_numbers


class Decoder(NamedTuple):
    """A model in Flax's parts, and what its optimizers ask for."""

    graph: Any
    params: Any
    numbers: Any
    config: DenseConfig

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def flops(self, sequences: int, length: int) -> float:
        """The FLOPs of a gradient: 6 per token and parameter, and those of attention.

        As Chowdhery et al. count them (arXiv:2204.02311, appendix B): the upper half of
        the scores counts, although it is masked, and no recomputation does.
        """
        attention = 12 * self.config.layers * self.config.width * length
        return float(sequences * length * (6 * self.parameters + attention))


def decoder(config: DenseConfig, seed: int = 0) -> Decoder:
    """A decoder with random parameters; query, key and value are matrices."""
    model = Dense(config, nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    return Decoder(graph, params, weight_dimension_numbers(model)(params), config)


def config_of(
    width: int, layers: int, heads: int, vocab: int, *, remat: bool = False
) -> DenseConfig:
    """Float32 parameters, activations in bfloat16, scanned layers, a tied head."""
    return DenseConfig(
        vocab_size=vocab,
        width=width,
        layers=layers,
        heads=heads,
        fused_qkv=False,
        dtype="bfloat16",
        remat=remat,
    )
