"""Matrices at which a careful person looks twice before a run."""

from collections.abc import Sequence

from orscale_jax._names import words

_FUSED = frozenset({"qkv", "kv", "fused"})
_FUSED_NAMES = frozenset({"c_attn", "in_proj", "gate_up", "gate_up_proj"})
_ROUTERS = frozenset({"router", "gate", "gating"})
_TABLES = frozenset({"output", "out", "table", "lookup", "codebook"})
_THIN = 16


def reasons(
    keys: Sequence[str], batch_shape: tuple[int, ...], m: int, n: int, in_blocks: bool
) -> tuple[str, ...]:
    """Why a leaf that is taken for matrices may be something else.

    Args:
      keys: The keys of its path.
      batch_shape: How its matrices are counted.
      m: Rows of each matrix.
      n: Columns of each matrix.
      in_blocks: Whether dimension numbers divide it into blocks.
    """
    found = {word for key in keys for word in words(key)}
    fused = _FUSED & found or _FUSED_NAMES.intersection(keys)
    # Only what names the module: blocks.0.attention.out maps within the model.
    table = len(keys) <= 2 and _TABLES & found
    checks = {
        "fused?": bool(fused) and not in_blocks,
        "router?": bool(_ROUTERS & found),
        "table or head?": bool(table),
        f"{_longer(m, n)} times as long": _longer(m, n) >= _THIN,
        "batch of one": 1 in batch_shape,
    }
    return tuple(reason for reason, holds in checks.items() if holds)


def _longer(m: int, n: int) -> int:
    """How many times one side of a matrix has the length of the other."""
    return max(m, n) // max(1, min(m, n))
