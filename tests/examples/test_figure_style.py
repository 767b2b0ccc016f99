"""What all figures of the examples have in common."""

import json

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from examples import figure_style as style
from examples.pretrain.operation import report
from examples.pretrain.optimizers import OPTIMIZERS

DARK = ("axes.facecolor", "figure.facecolor", "savefig.facecolor")


def luminance(color):
    """The relative luminance of WCAG 2."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_optimizers_have_colours_of_their_own():
    assert len(set(style.COLORS.values())) == len(style.COLORS)
    for name in style.COLORS:
        assert style.color_of(name, OPTIMIZERS) == report.look(name)["color"]


@pytest.mark.parametrize("name", ["adamw", "muon_moonlight", "orscale"])
def test_lines_stand_out_from_the_paper(name):
    contrast = 1.05 / (luminance(style.COLORS[name]) + 0.05)
    assert contrast > 3  # As WCAG asks of graphics.


def test_paper_is_white_whatever_the_users_style(tmp_path):
    curve = np.array([1, 2]), np.array([3.0, 2.0])
    path = tmp_path / "new" / "losses.png"
    with matplotlib.rc_context(dict.fromkeys(DARK, "black")):
        report.draw_losses(path, {"adamw": curve}, "byte", "A run")
    drawn = np.asarray(Image.open(path).convert("RGB"))
    assert drawn.shape[1] == style.WIDTH * style.DPI
    assert np.all(drawn[[0, 0, -1, -1], [0, -1, 0, -1]] == 255)
    assert np.mean(drawn.min(-1) > 250) > 0.8


def test_letters_are_nine_points_at_700_pixels():
    """A pixel of CSS is 0.75 points."""
    page_inches = 700 * 0.75 / 72
    assert style.SMALL * page_inches / style.WIDTH > 9


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
