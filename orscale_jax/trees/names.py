"""The names of the leaves of a tree, for rules, messages and tables."""

import collections
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

Path: TypeAlias = tuple[str, ...]

_NUMBER = re.compile(r"([0-9]+)(?![^\[]*\]$)")  # But not the place of a block.

_LINES = 16  # Of a list of parameters in a message.

# What stands between the names in one key of a flat dictionary: "mlp.up", "mlp/~/up",
# "mlp__up", "['mlp']['up']"; ":0" follows the names of TensorFlow's variables.
_BETWEEN = re.compile(r":\d+$|[./~:|\[\]'\"]+|__+")
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")
# Attributes of boxes that were flattened away, below the name of the array in the box.
_BOXES = frozenset({"value", "raw_value", "array", "data_array"})
_ARRAYS = frozenset(
    "kernel weight weights w embedding embeddings scale gamma offset beta bias b".split()
)


def key_name(entry: Any) -> str:
    """The bare name of one path entry, whatever the container."""
    return jax.tree_util.keystr((entry,), simple=True)


def names_on(path: Any) -> Path:
    """The bare names on a path, whatever the containers."""
    return tuple(key_name(entry) for entry in path)


def by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
    """The leaves of a tree by the names on their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {names_on(path): leaf for path, leaf in leaves}


def dotted(path: Any) -> str:
    """A path with dots, such as ``blocks.0.mlp.up.kernel``."""
    return ".".join(_names_in(path))


def keys_on(path: Any) -> Path:
    """The names on a path, the same for nested containers and for any flat dictionary."""
    keys = [key for name in _names_in(path) for key in _BETWEEN.split(name) if key]
    if len(keys) > 1 and keys[0] == "params":  # This names nothing.
        del keys[0]
    while len(keys) > 1 and keys[-1] in _BOXES and keys[-2] in _BOXES | _ARRAYS:
        del keys[-1]
    return tuple(keys)


def without_names(keys: Path) -> bool:
    """Whether keys say nothing: only indexes, and attributes of boxes."""
    return all(key in _BOXES or key.isdigit() for key in keys)


def quoted(path: Any) -> str:
    """A path in quotes, for an error message."""
    return repr(dotted(path)) if path else "(the only leaf)"


def name_and_shape(path: Any, leaf: Any) -> str:
    """A leaf, for an error message."""
    return f"{quoted(path)}{of_shape(leaf)}"


def of_shape(leaf: Any) -> str:
    """What follows the name of a leaf in an error message."""
    return f" of shape {np.shape(leaf)}"


@functools.lru_cache(maxsize=2**16)
def words(key: str) -> str:
    """A snake_case or CamelCase name as words: "LMHead_0" is "lm head 0"."""
    return " ".join(_WORD.findall(key)).lower()


def folded(leaves: Sequence[tuple[str, str]]) -> str:
    """Indented lines for names and what follows each; one line for many layers."""
    names, details = zip(*leaves, strict=True)
    lines, groups = [""], merged(names, details)
    for text, members in groups[:_LINES]:
        name, times, count = text.partition(" × ")
        shown = repr(name) if name else "(the only leaf)"
        lines.append(f"{shown}{times}{count}{details[members[0]]}")
    if rest := sum(len(members) for _, members in groups[_LINES:]):
        lines.append(f"and {rest:,} more")
    return "\n  ".join(lines)


def listed(leaves: Sequence[tuple[str, str]]) -> str:
    """The subject and verb of an error message: one parameter, or a list of them."""
    if len(leaves) == 1:
        return f"parameter {folded(leaves).strip()} is"
    return f"{len(leaves):,} parameters{folded(leaves)}\nare"


def distinct_names(paths: Iterable[Any]) -> list[str]:
    """The names of leaves in tables and logs: paths with dots, no two of them alike."""
    paths = list(paths)
    split, whole = map(_names_in, paths), map(names_on, paths)
    # A key that ends like the index of a matrix (up[0]) is quoted. If two names are still
    # alike (a.b as one key, and b inside a), so are empty keys, tuples, dots and quotes.
    for of_leaves, quote in ((split, r"\]$"), (whole, r"^$|\]$|[.'\"]")):
        names = [
            ".".join(repr(key) if re.search(quote, key) else key for key in keys)
            for keys in of_leaves
        ]
        if len({*names}) == len(names):
            break
    return names


def merged(
    names: Sequence[str], keys: Sequence[Hashable] | None = None
) -> list[tuple[str, list[int]]]:
    """The names and indexes of entries with equal keys and, but for numbers, names.

    A merged name has ``*`` for numbers that differ, or the first of them if other entries
    are called alike, and says how many entries it stands for: ``blocks.*.up × 12``.
    """
    groups: dict[Any, list[int]] = {}
    texts = [_NUMBER.split(name) for name in names]
    for index, text in enumerate(texts):
        key = tuple(text[::2]), None if keys is None else keys[index]
        groups.setdefault(key, []).append(index)
    alike = collections.Counter(text for text, _ in groups)

    def shown(column: Iterable[str], is_alone: bool) -> str:
        first, *others = dict.fromkeys(column)
        if not others:
            return first
        return "*" if is_alone else f"{{{first},{others[0]}{',…' * bool(others[1:])}}}"

    result = []
    for (text, _), members in groups.items():
        columns = zip(*(texts[index] for index in members), strict=True)
        name = "".join(shown(column, alike[text] == 1) for column in columns)
        count = f" × {len(members):,}" if len(members) > 1 else ""
        result.append((name + count, members))
    return result


def _names_in(path: Any) -> list[str]:
    """The names on a path: several for one key of a dictionary that is a tuple."""
    names: list[str] = []
    for entry in path:
        key = getattr(entry, "key", None)
        names += map(str, key) if isinstance(key, tuple) else [key_name(entry)]
    return names
