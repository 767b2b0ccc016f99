"""Validation losses: when an optimizer reaches AdamW's, and curves in lines of text."""

import numpy as np

from examples.pretrain.curves import Curve, as_text

STEPS = np.array([10, 20, 30, 40])


def curve(*losses):
    return Curve(STEPS, np.array(losses))


def test_a_curve_of_a_table():
    rows = [{"step": "1", "val_loss": ""}, {"step": "2", "val_loss": "0.5"}]
    assert Curve.of(rows) == Curve(np.array([2]), np.array([0.5]))


def test_when_an_optimizer_reaches_adamws_final_loss():
    adamw = curve(4.0, 3.5, 3.0, 2.5)
    assert curve(4.0, 3.0, 2.0, 1.0).reaching(adamw) == "25 steps (62%)"
    assert curve(4.0, 3.9, 3.8, 3.7).reaching(adamw) == "not reached"
    # The first validation is as early as can be said.
    assert curve(1.0, 0.5, 0.5, 0.5).reaching(adamw) == "10 steps (25%)"


def test_curves_in_lines_of_text():
    """A place is the middle of what it stands for; what covers what is in the order."""
    curves = {
        "adamw": curve(4.0, 3.5, 3.0, 2.5),
        "muon": curve(4.0, 3.0, 2.0, 1.0),
        "orscale": curve(4.0, np.nan, 1.0, 1.0),
    }
    assert as_text(curves, width=4, height=4).splitlines() == [
        "Validation loss: A AdamW, B muon, C OrScale",
        "  4.00 |CA  ",
        "       | BA ",
        "       |  BA",
        "  1.00 |  CC",
        "       +----",
        "        step 10 40",
    ]
