"""The class of each layer, by the names of the parameters.

Here, a path is a tuple of keys in words, such as ``("blocks", "0", "mlp", "gate proj")``.
"""

import collections
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.parameters import layer_names
from orscale_jax.trees.names import Path, keys_on, words
from orscale_jax.trees.nodes import is_masked

# The classes whose parameters are no matrices, whatever their shape.
EMBEDDING_OR_HEAD = frozenset({"embedding", "head"})
VECTORS = frozenset({"norm", "scale", "bias"})

_B = re.compile(r"\bb(\d*)$")
_W = ("kernel", "weight", "weights")


class ClassesByName(NamedTuple):
    """The names of all parameters of a tree, which give each its class.

    Attributes:
      below: The keys below each path.
      shapes: The shapes of the arrays that are not masked, by path.
    """

    below: Mapping[Path, set[str]]
    shapes: Mapping[Path, tuple[int, ...]]

    @classmethod
    def of(cls, leaves: Iterable[tuple[Any, Any]]) -> "ClassesByName":
        """Collect the names on the paths of leaves and of masked nodes."""
        below = collections.defaultdict(set)
        shapes = {}
        for path, leaf in leaves:
            keys = _in_words(path)
            if not is_masked(leaf):
                shapes[keys] = np.shape(leaf)
            for depth, key in enumerate(keys):
                below[keys[:depth]].add(key)
        return cls(below, shapes)

    def is_embedding_or_head(self, path: Any) -> bool:
        """Whether a name on the path, or the class, says embedding or output head."""
        named = any(map(layer_names.is_embedding_or_head, _in_words(path)))
        return named or self.layer_class(path) in EMBEDDING_OR_HEAD

    def layer_class(self, path: Any) -> str:
        """The class of the parameter at a path of the tree."""
        keys = _in_words(path)
        layer = _by_path(keys)
        if layer != "norm" and self._is_bias(keys):
            return "bias"
        return layer or self._by_name(*_module_and_array(keys))

    def _is_bias(self, keys: Path) -> bool:
        """Whether a key ends in "b" and one beside it in "w", as in Haiku's modules."""
        if not keys or not _B.search(keys[-1]):
            return False
        beside = self.below[keys[:-1]]
        a, w = (_B.sub(rf"{letter}\1", keys[-1]) for letter in "aw")  # LoRA has a and b.
        return a not in beside and (w in beside or not beside.isdisjoint(_W))

    def _by_name(self, keys: Path, array: Path) -> str:
        """The class, by the name of a module and the array's keys below it."""
        beside = self._beside(keys[:-1], array)
        mlp = _kind_of_mlp(keys, beside)
        within = _part(keys, beside, mlp)
        name = " ".join(keys[-2:] if keys[-1:] and keys[-1].isdigit() else keys[-1:])
        return _by_rules(within, name, beside).format(mlp=mlp)

    def _beside(self, above: Path, array: Path) -> str:
        """The keys in a place, and whether w3 has another shape than w1 and w2."""
        w1, w2, w3 = (
            self.shapes.get((*above, key, *array)) for key in ("w1", "w2", "w3")
        )
        alike = w1 is not None and w3 is not None and w1 == w2 != w3
        return "|".join(sorted(self.below[above]) + ["w1 like w2"] * alike)


# Cached, since an optimizer that is not compiled asks at every step.
@functools.lru_cache(maxsize=2**16)
def _by_path(keys: Path) -> str | None:
    path = ".".join(keys)
    for layer, expression in layer_names.BY_PATH:
        if re.search(expression, path):
            return layer
    return "embedding" if any(map(layer_names.is_embedding_or_head, keys)) else None


@functools.lru_cache(maxsize=2**16)
def _by_rules(within: str, name: str, beside: str) -> str:
    for rule in layer_names.BY_NAME:
        if (
            re.fullmatch(rule.within, within)
            and re.search(rule.name, name)
            and re.search(rule.beside, beside)
        ):
            return rule.layer
    return "other"


def _kind_of_mlp(keys: Path, beside: str) -> str:
    if any(map(layer_names.SHARED.search, keys)):
        return "shared expert"
    mixture = any(map(layer_names.EXPERT.search, keys))
    stacked = layer_names.EXPERTS_THEMSELVES.match(beside)
    return "routed expert" if mixture or stacked else "mlp"


def _part(keys: Path, beside: str, mlp: str) -> str:
    """The part of the model, by the last key that names one, or by the keys beside."""
    for key in reversed(keys):
        if layer_names.ATTENTION.search(key):
            return "attention"
        if layer_names.MLP.search(key) or layer_names.SHARED.search(key):
            return mlp
    return "attention block" if layer_names.QUERY_AND_KEY.match(beside) else "block"


def module_and_array(path: Any) -> tuple[Path, Path]:
    """The keys of a module, or of an array without one, and those of its array below."""
    return _module_and_array(_in_words(path))


def _module_and_array(keys: Path) -> tuple[Path, Path]:
    end = len(keys)
    while end > 1 and layer_names.ARRAY.fullmatch(keys[end - 1]):
        end -= 1
    return keys[:end], keys[end:]


def _in_words(path: Any) -> Path:
    return tuple(key for key in map(words, keys_on(path)) if key)
