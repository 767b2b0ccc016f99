"""What error messages and tables call the leaves of a tree."""

from typing import Any

import numpy as np


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


def listed(parameters: list[str]) -> str:
    """The subject of an error message, with its verb: one parameter, or a list."""
    if len(parameters) == 1:
        return f"parameter {parameters[0]} is"
    return "\n  ".join([f"{len(parameters)} parameters", *parameters]) + "\nare"
