"""What all figures of the examples have in common."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from examples import figure_style as style


def luminance(color):
    """The relative luminance of WCAG 2."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("name", ["adamw", "muon", "orscale"])
def test_lines_stand_out_from_the_paper(name):
    contrast = 1.05 / (luminance(style.COLORS[name]) + 0.05)
    assert contrast > 3  # As WCAG asks of graphics.
