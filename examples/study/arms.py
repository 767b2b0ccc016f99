"""The optimizers that are compared, and at which learning rates."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arm:
    """An optimizer of the study.

    Attributes:
      optimizer: One of `examples.pretrain.optimizers.OPTIMIZERS`.
      rate: The learning rate that the search begins with, over AdamW's best.
      shared: Whether AdamW's parameters have the rate of the matrices. Otherwise they
        keep AdamW's best.
    """

    optimizer: str
    rate: float = 1.0
    shared: bool = True


ARMS: dict[str, Arm] = {
    "adamw": Arm("adamw"),
    "muon": Arm("muon", rate=4.0, shared=False),
    "muon_moonlight": Arm("muon_moonlight"),
    "orscale": Arm("orscale"),
    # Controls.
    "pooled": Arm("pooled"),
    "pooled_by_class": Arm("pooled_by_class"),
    "replayed": Arm("muon_moonlight"),
    # Anchors.
    "full_rank_anchor": Arm("full_rank_anchor"),
    "largest_anchor": Arm("largest_anchor"),
    "pooled_full_rank_anchor": Arm("pooled_full_rank_anchor"),
    # Rivals.
    "hyperball": Arm("hyperball", rate=4.0, shared=False),
    "normuon": Arm("normuon"),
}
