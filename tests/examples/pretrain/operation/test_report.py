"""What a run shows at its end: when an optimizer reaches AdamW's loss, and curves."""

import numpy as np

from examples.pretrain.operation import report

STEPS = np.array([10, 20, 30, 40])
CURVES = {
    "adamw": (STEPS, np.array([4.0, 3.5, 3.0, 2.5])),
    "muon_moonlight": (STEPS, np.array([4.0, 3.0, 2.0, 1.0])),
    "orscale": (STEPS, np.array([4.0, 3.9, 3.8, 3.7])),
}


def test_when_an_optimizer_reaches_adamws_final_loss():
    told = {name: report.reaching(name, CURVES) for name in CURVES}
    words = ["", "25 steps (62%)", "not reached"]
    assert told == dict(zip(CURVES, words, strict=True))
    # The first validation is as early as can be said.
    assert report.step_of_reaching(CURVES["muon_moonlight"], 5.0) == 10
    others = {name: CURVES[name] for name in ("muon_moonlight", "orscale")}
    assert report.reaching("orscale", others) == ""


def test_curves_in_lines_of_text():
    """A place is the middle of what it stands for; what covers what is in the order."""
    curves = CURVES | {"orscale": (STEPS, np.array([4.0, np.nan, 1.0, 1.0]))}
    assert report.plotted(curves, width=4, height=4).splitlines() == [
        "Validation loss: A AdamW, B Muon+Moonlight, C OrScale",
        "  4.00 |CA  ",
        "       | BA ",
        "       |  BA",
        "  1.00 |  CC",
        "       +----",
        "        step 10 40",
    ]
