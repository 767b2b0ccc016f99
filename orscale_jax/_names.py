"""What error messages and tables call the leaves of a tree."""

import re
from typing import Any

import numpy as np

# "lm_head" and "LMHead_0" both end in "head".
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def key_name(entry: Any) -> str:
    """The bare name of one path entry, whatever the container."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def dotted(path: Any) -> str:
    """A path as its readers write it, such as ``blocks.0.mlp.up.kernel``."""
    return ".".join(key_name(entry) for entry in path)


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
    """The subject of an error message, with its verb: one parameter, or a list."""
    if len(parameters) == 1:
        return f"parameter {parameters[0]} is"
    return "\n  ".join([f"{len(parameters)} parameters", *parameters]) + "\nare"
