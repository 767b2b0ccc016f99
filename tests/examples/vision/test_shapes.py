import numpy as np

from examples.vision.shapes import SHAPES, draw_shapes


def test_images_depend_on_the_seed_and_their_side_alone():
    train, test = draw_shapes(100, 50)
    again, more = draw_shapes(30, 60)
    np.testing.assert_array_equal(train.pixels[:30], again.pixels)
    np.testing.assert_array_equal(test.pixels, more.pixels[:50])
    assert not np.array_equal(train.pixels[:50], test.pixels)
    other, _ = draw_shapes(30, 0, seed=1)
    assert not np.array_equal(other.pixels, again.pixels)
    assert train.pixels.shape == (100, 32, 32, 3)
    assert (train.pixels.dtype, train.labels.dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(np.bincount(train.labels), np.full(10, 10))


def test_every_shape_has_an_inside_and_keeps_within_its_radius():
    line = np.linspace(-1.3, 1.3, 131)
    x, y = (grid[None] for grid in np.meshgrid(line, line))
    for name, distance in SHAPES.items():
        inside = distance(x, y) < 0
        assert 0.1 < inside[np.hypot(x, y) < 1].mean() < 0.95, name
        assert not inside[np.hypot(x, y) > 1.2].any(), name
