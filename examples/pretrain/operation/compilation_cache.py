"""JAX's cache of compiled programs, without which a run goes on."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console

_OF_JAX = re.compile(r"Error .* persistent compilation cache entry for '[^']*': (.*)")


@contextlib.contextmanager
def failing_in_one_message(console: Console) -> Iterator[None]:
    """Says once that the cache cannot be read or written; JAX warns for every program."""
    show, said = warnings.showwarning, False

    def show_first(message: Warning | str, *place: Any, **more: Any) -> None:
        nonlocal said
        failure = _OF_JAX.match(str(message))
        if failure is None:
            show(message, *place, **more)
        elif not said:
            said = True
            folder = jax.config.values["jax_compilation_cache_dir"]
            console.print(
                f"The compilation cache in {folder} fails ({failure[1]}). The run goes "
                "on without it. Make room there, or delete the folder if its files are "
                "damaged.",
                highlight=False,
            )

    warnings.showwarning = show_first
    try:
        yield
    finally:
        warnings.showwarning = show
