"""The optimizers that are compared, and at which learning rates."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arm:
    """An optimizer of the study.

    Attributes:
      optimizer: One of `examples.pretrain.optimizers.OPTIMIZERS`.
      label: In tables and figures.
      rate: The scale of the matrices' learning rates: in the first study the inherited
        one over AdamW's best, in the second the first one over the workload's.
      shared: Whether AdamW's parameters have the rate of the matrices in the first study.
        Otherwise they keep AdamW's best.
      replays: The arm whose mean ratio at each step is a factor of the rate, if one is.
    """

    optimizer: str
    label: str
    rate: float = 1.0
    shared: bool = True
    replays: str | None = None


ARMS: dict[str, Arm] = {
    "adamw": Arm("adamw", "AdamW"),
    "muon": Arm("muon", "Muon (s = 1)", rate=4.0, shared=False),
    "muon_moonlight": Arm("muon_moonlight", "Muon+Moonlight"),
    "orscale": Arm("orscale", "OrScale"),
    # Controls.
    "pooled": Arm("pooled", "One ratio for all"),
    "pooled_by_class": Arm("pooled_by_class", "One ratio per class"),
    "replayed": Arm("muon_moonlight", "OrScale's mean replayed", replays="orscale"),
    # The same, with AdamW's parameters at AdamW's best rate.
    "muon_moonlight_apart": Arm(
        "muon_moonlight", "Muon+Moonlight, AdamW's rate apart", shared=False
    ),
    "orscale_apart": Arm("orscale", "OrScale, AdamW's rate apart", shared=False),
    # Anchors.
    "full_rank_anchor": Arm("full_rank_anchor", "OrScale, full-rank anchor"),
    "largest_anchor": Arm("largest_anchor", "OrScale, largest anchor"),
    "pooled_full_rank_anchor": Arm(
        "pooled_full_rank_anchor", "One ratio for all, full-rank anchor"
    ),
    # Rivals.
    "hyperball": Arm("hyperball", "Hyperball", rate=4.0, shared=False),
    "normuon": Arm("normuon", "NorMuon"),
}

ABLATIONS: dict[str, Arm] = {
    "polar_factor_denominator": Arm(
        "polar_factor_denominator", "‖Q‖ denominator (s = 1)", shared=False
    ),
    "momentum_denominator": Arm(
        "momentum_denominator", "‖M̃‖ denominator (s = 1)", shared=False
    ),
    "momentum_rms_denominator": Arm(
        "momentum_rms_denominator", "RMS(M̃) + Moonlight", shared=False
    ),
    "uncalibrated": Arm("uncalibrated", "Uncalibrated", shared=False),
    "decoupled_weight_decay": Arm("decoupled_weight_decay", "Decoupled weight decay"),
    "bfloat16_calibration": Arm("bfloat16_calibration", "Calibration in bfloat16"),
    "unclipped": Arm("unclipped", "No clip"),
}
# The second protocol has these and some of the above.
CONTROLS: dict[str, Arm] = {
    "adamw_apart": Arm("adamw_apart", "AdamW, two rates", rate=0.5),
    "orscale_on_normuon": Arm("orscale_on_normuon", "OrScale's ratio on NorMuon"),
    "one_scale": Arm("one_scale", "Muon+Moonlight, one scale for all shapes"),
}
# Candidates for a better rule: docs/study/better_rule_protocol.md.
CANDIDATES: dict[str, Arm] = {
    name: Arm(name, label)
    for name, label in (
        ("scale_between", "A scale between"),
        ("ratio_within_class", "Ratio within the class"),
        ("model_optimum", "r* of the class"),
        ("twice_the_decay", "Twice the decay"),
        ("orscale_twice_the_decay", "OrScale, twice the decay"),
    )
}
# Momenta and weights in fewer bits: docs/study/low_memory_protocol.md.
LOW_MEMORY: dict[str, Arm] = {
    name: Arm(name, label)
    for name, label in (
        ("bfloat16_momentum", "bfloat16 momentum"),
        ("int8_momentum", "8-bit momentum"),
        ("rounding_to_nearest", "bfloat16 weights, rounded to nearest"),
        ("master_weights", "bfloat16 weights, master weights"),
        ("stochastic_rounding", "bfloat16 weights, stochastic rounding"),
    )
}
KNOWN = ARMS | ABLATIONS | CONTROLS | CANDIDATES | LOW_MEMORY
# Those whose best rate is found for the mean of all seeds.
SETTLED = (
    "adamw", "muon_moonlight", "orscale", "pooled", "replayed", "full_rank_anchor",
)  # fmt: skip
# Of the workloads with rates of another.
SENSITIVE = ("adamw", "muon_moonlight", "orscale", "full_rank_anchor")
