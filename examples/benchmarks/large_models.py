"""The matrices of models that are trained on large clusters, and how they are sharded.

Every mesh has an axis "expert" and an axis "fsdp". Experts are sharded over the first,
and their rows over the second. Other matrices are sharded over both.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec as P

from examples.benchmarks.models import Leaves, experts, layers, matrix, named

SHARDED = ("expert", "fsdp")


class Mixture(NamedTuple):
    """The sizes of a mixture of experts with latent attention, as DeepSeek-V3's.

    Attributes:
      hidden: The width of the residual stream.
      layers: All of them.
      dense: How many of the first have one feed-forward network.
      width: Its width.
      experts: In each of the other layers.
      expert: The width of an expert.
      shared: The width of the experts that are always active.
      heads: Of attention, whose keys have 128 + 64 entries and whose values have 128.
      query_latent: The width of the queries' latent vector; None where there is none.
    """

    hidden: int
    layers: int
    dense: int
    width: int
    experts: int
    expert: int
    shared: int
    heads: int
    query_latent: int | None


MOONLIGHT = Mixture(2048, 27, 1, 10944, 64, 1408, 2816, 16, None)
DEEPSEEK_V3 = Mixture(7168, 61, 3, 18432, 256, 2048, 2048, 128, 1536)
KIMI_K2 = Mixture(7168, 61, 1, 18432, 384, 2048, 2048, 64, 1536)
KEY_LATENT = 512


def dense_70b(mesh: Mapping[str, int]) -> Leaves:
    """The matrices of Llama 3 70B."""
    block = {
        "query": (8192, 8192),
        "key": (8192, 1024),
        "value": (8192, 1024),
        "out": (8192, 8192),
        "gate": (8192, 28672),
        "up": (8192, 28672),
        "down": (28672, 8192),
    }
    return layers(80, _sharded(mesh, block))


def mixture(mesh: Mapping[str, int], sizes: Mixture) -> Leaves:
    """The matrices of a mixture of experts."""
    attention = _sharded(mesh, _attention(sizes))
    first = _sharded(mesh, _feed_forward(sizes.hidden, sizes.width))
    shared = _sharded(mesh, _feed_forward(sizes.hidden, sizes.shared))
    spec = P("expert", "fsdp", None)
    routed = {
        name: experts(sizes.experts, rows, columns, spec)
        for name, (rows, columns) in _feed_forward(sizes.hidden, sizes.expert).items()
    }
    others = {**named("shared", shared), **routed}
    return {
        **layers(sizes.layers, attention),
        **layers(sizes.dense, named("mlp", first)),
        **layers(sizes.layers - sizes.dense, others, first=sizes.dense),
    }


def _attention(sizes: Mixture) -> dict[str, tuple[int, int]]:
    hidden, heads, latent = sizes.hidden, sizes.heads, sizes.query_latent
    queries = {"q": (latent or hidden, heads * 192)}
    if latent is not None:
        queries["q_a"] = (hidden, latent)
    return queries | {
        "kv_a": (hidden, KEY_LATENT + 64),
        "kv_b": (KEY_LATENT, heads * 256),
        "out": (heads * 128, hidden),
    }


def _feed_forward(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}


def _sharded(mesh: Mapping[str, int], shapes: Mapping[str, tuple[int, int]]) -> Leaves:
    return {name: matrix(*shape, _spec(mesh, *shape)) for name, shape in shapes.items()}


def _spec(mesh: Mapping[str, int], rows: int, columns: int) -> P:
    """Over both axes by rows, by columns, or by each along one, as they divide."""
    over = mesh["expert"] * mesh["fsdp"]
    if rows % over == 0:
        return P(SHARDED, None)
    if columns % over == 0:
        return P(None, SHARDED)
    return P("fsdp", "expert")


MODELS: Mapping[str, Callable[[Mapping[str, int]], Leaves]] = {
    "Moonlight 16B": lambda mesh: mixture(mesh, MOONLIGHT),
    "dense 70B": dense_70b,
    "DeepSeek-V3 671B": lambda mesh: mixture(mesh, DEEPSEEK_V3),
    "Kimi K2 1T": lambda mesh: mixture(mesh, KIMI_K2),
}
