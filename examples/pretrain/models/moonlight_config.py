"""The sizes of Moonlight models."""

import dataclasses

from examples.pretrain.models.layers import LayerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoonlightConfig(LayerConfig):
    """The sizes of a Moonlight model; those of Moonlight-16B-A3B by default.

    Base of the rotary positions and epsilon of the norms are those of the paper's public
    code; Moonlight's own release has 50,000 and 1e-5.
    """

    vocab_size: int = 163_840
    width: int = 2048
    layers: int = 27
    # The first layers, which have an MLP instead of a mixture, and its width.
    dense_layers: int = 1
    dense_hidden: int = 10_944
    # Attention: rank of the latent; width of a head's query and key without position and
    # with one, and of its value.
    heads: int = 16
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    # The mixture.
    experts: int = 64
    experts_per_token: int = 6
    shared_experts: int = 2
    expert_hidden: int = 1408
    # Factor of the routed experts' weights, whose sum is 1 without it.
    routed_scale: float = 2.446
    # Coefficient of the auxiliary loss that evens out the loads.
    aux: float = 0.0

    def __post_init__(self) -> None:
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


PRESETS = {
    "tiny": MoonlightConfig(
        vocab_size=256,
        width=64,
        layers=3,
        dense_hidden=256,
        heads=4,
        kv_rank=32,
        nope_dim=16,
        rope_dim=16,
        value_dim=16,
        experts=8,
        experts_per_token=2,
        shared_experts=1,
        expert_hidden=64,
    ),
    # Weights start as in DeepSeek-V3 and the paper's public code.
    "moonlight_16b_a3b": MoonlightConfig(init_std=0.006),
}
