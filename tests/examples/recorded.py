"""What the paper's public PyTorch models compute, and their weights.

The files are those of ../shared/reference/models; `tests/data/models` has copies. See
`RecordedModel` for what they hold.
"""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "models"
# Of a comparison in each precision, relative to the largest entry.
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
PyTree = Any
# The path of a parameter of ours that a PyTorch name stands for, the index in it, and the
# array in its layout, of one in PyTorch's; `inverse` leads back.
Place = tuple[tuple[str | int, ...], tuple[int, ...]]


class RecordedModel:
    """A model of PyTorch: weights from a seed, outputs and gradients in float64.

    Attributes:
      arrays: The recorded arrays by name.
      config: The model's sizes, as PyTorch's code calls them.
    """

    def __init__(self, name: str):
        self.arrays = dict(np.load(FOLDER / f"{name}.npz"))
        self.config = json.loads(str(self.arrays.get("config", "{}")))
        self.shapes = json.loads(str(self.arrays["shapes"]))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by their names, in order, of which each has its own seed."""
        seed = int(self["seed"])
        return {
            name: _initial(name, np.random.default_rng([seed, j]).standard_normal(shape))
            for j, (name, shape) in enumerate(sorted(self.shapes.items()))
        }

    def ours(self, place: Callable[[str], Place], like: PyTree, dtype: str) -> PyTree:
        """The weights in a tree like the parameters of our model."""
        tree = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, dtype), like)
        for name, weight in self.weights.items():
            path, index = place(name)
            _at(tree, path)[index] = to_ours(name, weight)
        for path, leaf in jax.tree.leaves_with_path(tree):
            assert not np.isnan(leaf).any(), f"no weight for {path}"
        return tree

    def assert_same_gradients(
        self, gradients: PyTree, place: Callable[[str], Place], dtype: str
    ) -> None:
        """Compare norms and 16 entries of the gradient of every parameter."""
        gradients = jax.tree.map(np.asarray, gradients)
        for name in self.weights:
            path, index = place(name)
            found = to_pytorch(name, _at(gradients, path)[index])
            assert list(found.shape) == self.shapes[name]
            norm = self[f"grad_norm/{name}"]
            # In float32 a sum of millions of squares depends on the machine.
            found_norm = np.linalg.norm(found.astype(np.float64))
            assert_close(found_norm, norm, dtype, name)
            places = np.linspace(0, found.size - 1, 16).astype(int)
            entries = found.reshape(-1)[places]
            assert_close(entries, self[f"grad_at/{name}"], dtype, name, scale=norm)


def assert_close(
    found: Any, expected: Any, dtype: str, name: str = "", scale: float | None = None
) -> None:
    """Compare up to rounding errors relative to a scale, by default the largest entry."""
    scale = np.max(np.abs(expected)) if scale is None else scale
    tolerance = TOLERANCES[dtype] * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=name)


def to_ours(name: str, array: np.ndarray) -> np.ndarray:
    """Linear weights are (out, in) in PyTorch, convolutions (out, in, height, width)."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array if _is_table(name) else array.T


def to_pytorch(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    return array if _is_table(name) else array.T


def _is_table(name: str) -> bool:
    return name in ("tok_emb.weight", "embed_tokens.weight")


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)


def _initial(name: str, z: np.ndarray) -> np.ndarray:
    if name.endswith("bias"):
        return 0.1 * z
    if z.ndim < 2:
        return 1 + 0.1 * z
    return z / np.sqrt(z[0].size)
