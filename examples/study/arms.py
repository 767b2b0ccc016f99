"""The optimizers that are compared, and at which learning rates."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arm:
    """An optimizer of the study.

    Attributes:
      optimizer: One of `examples.pretrain.optimizers.OPTIMIZERS`.
      rate: Where its grid begins, over AdamW's best. Beside it AdamW's parameters keep
        AdamW's best rate; an arm that begins at 1 shares its rate with them.
      after: The arm whose mean ratios it replays, if it does.
    """

    optimizer: str
    rate: float = 1.0
    after: str | None = None

    @property
    def shared(self) -> bool:
        """Whether AdamW's parameters have the learning rate of the matrices."""
        return self.rate == 1.0


ARMS: dict[str, Arm] = {
    "adamw": Arm("adamw"),
    "muon": Arm("muon", rate=4.0),
    "muon_moonlight": Arm("muon_moonlight"),
    "orscale": Arm("orscale"),
    # Controls.
    "pooled": Arm("pooled"),
    "pooled_by_class": Arm("pooled_by_class"),
    "replayed": Arm("muon_moonlight", after="orscale"),
    # Anchors.
    "full_rank_anchor": Arm("full_rank_anchor"),
    "largest_anchor": Arm("largest_anchor"),
    "pooled_full_rank_anchor": Arm("pooled_full_rank_anchor"),
    # Rivals.
    "hyperball": Arm("hyperball", rate=4.0),
    "normuon": Arm("normuon"),
}
