"""The card, its driver and its clock."""

import functools
import subprocess
from typing import NamedTuple

import jax


class Card(NamedTuple):
    """What does not change while a process runs."""

    name: str
    driver: str
    jax: str


@functools.cache
def this_card() -> Card:
    """JAX's first device; without `nvidia-smi`, the driver is empty."""
    name = jax.devices()[0].device_kind
    return Card(name, _nvidia_smi("driver_version"), jax.__version__)


def clock() -> str:
    """The clock of the multiprocessors in MHz, now; empty without `nvidia-smi`."""
    return _nvidia_smi("clocks.sm")


def peak_bytes() -> int | None:
    """The most that the process has had on the card so far, where JAX knows it."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    line = (found.stdout.splitlines() or [""])[0].strip()
    return "" if line.startswith("[") else line  # Such as [N/A].
