"""The names of the leaves of a tree, for rules, messages and tables."""

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import numpy as np

Path: TypeAlias = tuple[str, ...]

# "lm_head" and "LMHead_0" both end in "head".
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def key_name(entry: Any) -> str:
    """The bare name of one path entry, whatever the container."""
    return jax.tree_util.keystr((entry,), simple=True)


def names_on(path: Any) -> Path:
    """The bare names on a path, whatever the containers."""
    return tuple(key_name(entry) for entry in path)


def dotted(path: Any) -> str:
    """A path with dots, such as ``blocks.0.mlp.up.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def quoted(path: Any) -> str:
    """A path in quotes, for an error message."""
    return repr(dotted(path)) if path else "(the only leaf)"


def name_and_shape(path: Any, leaf: Any) -> str:
    """A leaf, for an error message."""
    return f"{quoted(path)} of shape {np.shape(leaf)}"


def words(key: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return [word.lower() for word in _WORD.findall(key)]


def listed(parameters: list[str]) -> str:
    """The subject and verb of an error message: one parameter, or a list of them."""
    if len(parameters) == 1:
        return f"parameter {parameters[0]} is"
    return "\n  ".join([f"{len(parameters)} parameters", *parameters]) + "\nare"


def distinct_names(paths: Iterable[Any]) -> list[str]:
    """The names of leaves in tables and logs: paths with dots, no two of them alike.

    A key that ends like the index of a matrix (``up[0]``) is quoted. If two names would
    still be alike (``a.b`` as one key, and ``b`` inside ``a``), so are, in all names of
    the tree, keys that are empty or hold a dot or a quotation mark.
    """
    of_leaves = [names_on(path) for path in paths]
    for quote in (r"\]$", r"^$|\]$|[.'\"]"):
        names = [
            ".".join(repr(key) if re.search(quote, key) else key for key in keys)
            for keys in of_leaves
        ]
        if len({*names}) == len(names):
            break
    return names
