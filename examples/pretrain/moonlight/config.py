"""The sizes of Moonlight models."""

import dataclasses

from examples.pretrain.models.layers import LayerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoonlightConfig(LayerConfig):
    """The sizes of a Moonlight model; those of Moonlight-16B-A3B by default.

    Base of the rotary positions and epsilon of the norms are those of the paper's public
    code; Moonlight's own release has 50,000 and 1e-5.
    """

    # Tokens that there are.
    vocab_size: int = 163_840
    # Features of a token.
    width: int = 2048
    # Blocks of attention and MLP or mixture.
    layers: int = 27
    # Blocks with an MLP, the first ones.
    dense_layers: int = 1
    # Width of the MLP.
    dense_hidden: int = 10_944
    # Heads of attention.
    heads: int = 16
    # Rank of the latent that keys and values are made of.
    kv_rank: int = 512
    # Features of a head's query and key that know no position.
    nope_dim: int = 128
    # Features of a head's query and key that rotary positions turn.
    rope_dim: int = 64
    # Features of a head's value.
    value_dim: int = 128
    # Routed experts of a mixture.
    experts: int = 64
    # Routed experts that a token takes.
    experts_per_token: int = 6
    # Shared experts of a mixture, which every token takes.
    shared_experts: int = 2
    # Width of an expert.
    expert_hidden: int = 1408
    # Factor of the routed experts' weights, whose sum is 1 without it.
    routed_scale: float = 2.446
    # Coefficient of the auxiliary loss that evens out the loads.
    aux: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes(
            *"vocab_size width dense_hidden heads kv_rank nope_dim rope_dim".split(),
            *"value_dim shared_experts expert_hidden".split(),
        )
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} of layers={self.layers}: at least one "
                "layer has to be a mixture"
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: choose between 1 and "
                f"experts={self.experts}"
            )
        if self.rope_dim % 2:
            raise ValueError(
                f"rope_dim={self.rope_dim}: rotary positions turn pairs of features; "
                "choose an even number"
            )

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers


# Weights start as in DeepSeek-V3 and the paper's public code.
MOONLIGHT_16B_A3B = MoonlightConfig(init_std=0.006)
