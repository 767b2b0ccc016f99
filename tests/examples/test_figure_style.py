"""What all figures of the examples have in common."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from examples import figure_style as style
from examples.pretrain.operation import report


def luminance(color):
    """The relative luminance of WCAG 2."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("name", ["adamw", "muon_moonlight", "orscale"])
def test_lines_stand_out_from_the_paper(name):
    contrast = 1.05 / (luminance(style.COLORS[name]) + 0.05)
    assert contrast > 3  # As WCAG asks of graphics.


@pytest.mark.parametrize(
    ("key", "name"),
    [("widths", "DavidNet"), ("experts", "Mixture of experts"), ("heads", "Decoder")],
)
def test_a_title_names_model_rate_and_seed(tmp_path, key, name):
    facts = {f"model.{key}": 2, "learning_rate": 4e-3, "seed": 3, "rates": "shared"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "summary.csv").write_text("parameters\n12345\n")
    told = "12,345 parameters; learning rate 0.004; seed 3"
    assert report.run_line(tmp_path) == f"{name}, {told}"
