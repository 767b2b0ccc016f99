"""The memory of weights and optimizer states, for three models on 8, 64 and 512 chips.

    python -m examples.benchmarks.memory
    python -m examples.benchmarks.memory --models 7B --counts 16

Nothing is allocated: `describe` counts the bytes of arrays that have shapes only, on an
`AbstractMesh`. Norms are whole on each chip; all other parameters are sharded over all
chips. For another optimizer or option, add an entry to `CHOICES`.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks import models
from examples.benchmarks.ahead_of_time import line
from examples.benchmarks.host_offload import LARGE, on_host
from examples.benchmarks.models import Leaf, Leaves, Mesh, dense, moonlight, over_all
from orscale_jax import describe, keep_master_weights, muon, state_shardings

Numbers = Mapping[str, Dims | None]
BFLOAT16, COUNTS = "bfloat16", (8, 64, 512)
MODELS: Mapping[str, Callable[[Mesh], Leaves]] = {
    "1.1B": lambda mesh: dense(over_all(mesh), models.TINYLLAMA),
    "7B": lambda mesh: dense(over_all(mesh), models.LLAMA2_7B),
    "16B": moonlight,
}


class Choice(NamedTuple):
    """An optimizer with some of its options."""

    name: str  # How the page calls it.
    optimizer: Callable[[Numbers], optax.GradientTransformation]
    weights: str = "float32"  # Their dtype.
    on_host: tuple[str, ...] = ()  # Fields of the state that are there between the steps.


def ours(optimizer: Callable[..., Any], mu_dtype: str | None = None) -> Any:
    """An optimizer of this library for given dimension numbers."""
    return lambda numbers: optimizer(
        1e-3, mu_dtype=mu_dtype, weight_dimension_numbers=numbers
    )


def mastered(mu_dtype: str | None = None) -> Any:
    return lambda numbers: keep_master_weights(ours(muon, mu_dtype)(numbers))


def in_8_bits(numbers: Numbers) -> optax.GradientTransformation:
    inner = muon(
        1e-3,
        mu_dtype="int8",
        weight_dimension_numbers=numbers,
        adam_moments_dtype="int8",
    )
    return keep_master_weights(inner, bits=8)


CHOICES = (
    Choice("`optax.adamw`", lambda _: optax.adamw(1e-3)),
    Choice('`optax.adamw`, `mu_dtype="bfloat16"`',
           lambda _: optax.adamw(1e-3, mu_dtype=BFLOAT16)),
    Choice("`muon`", ours(muon)),
    Choice('`muon`, `mu_dtype="bfloat16"`', ours(muon, BFLOAT16)),
    Choice('`muon`, `mu_dtype="int8"`', ours(muon, "int8")),
    Choice("`keep_master_weights(muon)`", mastered(), weights=BFLOAT16),
    Choice('`keep_master_weights(muon)`, `mu_dtype="bfloat16"`', mastered(BFLOAT16),
           weights=BFLOAT16),
    Choice("`keep_master_weights(muon, bits=8)`, all in 8 bits", in_8_bits,
           weights=BFLOAT16),
    Choice("`muon`, momentum and moments offloaded", ours(muon), on_host=LARGE),
)  # fmt: skip


class Held(NamedTuple):
    """Bytes in one kind of memory: for each parameter of the model, and on each chip."""

    per_parameter: float
    per_chip: int


@dataclasses.dataclass(frozen=True)
class Options:
    """Which tables."""

    models: tuple[str, ...] = tuple(MODELS)
    """Of these."""
    counts: tuple[int, ...] = COUNTS
    """Numbers of chips."""


def placed(model: str, chips: int, dtype: str) -> tuple[dict[str, Any], Numbers]:
    """The parameters of a model on so many chips, and their dimension numbers.

    Experts are over up to 64 chips. Equal leaves of several layers are one array, with an
    axis in front for layers.
    """
    sizes = {"fsdp": chips}
    if model == "16B":
        sizes = {"fsdp": chips // min(64, chips), "expert": min(64, chips)}
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    alike: dict[tuple[str, Leaf], int] = collections.Counter(
        (name.partition(".")[2] if name[0].isdigit() else name, leaf)
        for name, leaf in MODELS[model](sizes).items()
    )
    stacked = {
        name: Leaf((count, *leaf.shape), P(None, *leaf.spec))
        for (name, leaf), count in alike.items()
    }
    numbers = {name: leaf.numbers and Dims(-2, -1) for name, leaf in alike}
    return models.placed(stacked, mesh, dtype), numbers


def of_weights(params: Mapping[str, jax.ShapeDtypeStruct]) -> Held:
    """The weights themselves."""
    arrays = params.values()
    [each] = {array.dtype.itemsize for array in arrays}
    return Held(each, sum(_shard_bytes(x, x.sharding) for x in arrays))


def of_state(
    params: Mapping[str, Any], numbers: Numbers, choice: Choice
) -> tuple[Held, Held]:
    """The state: what of it is on the chips, and what in their hosts' memory."""
    optimizer = choice.optimizer(numbers)
    described = describe(params, optimizer)
    each, chip = described.state_bytes_per_parameter, described.state_bytes_per_device
    assert each is not None and chip is not None
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
    at_rest = on_host(state_shardings(optimizer, params), choice.on_host)
    moved = [
        (array, sharding)
        for array, sharding in zip(state, jax.tree.leaves(at_rest), strict=True)
        if sharding.memory_kind == "pinned_host"
    ]
    nbytes = sum(array.size * array.dtype.itemsize for array, _ in moved)
    host = Held(
        nbytes / described.totals["all"].parameters,
        sum(_shard_bytes(array, sharding) for array, sharding in moved),
    )
    return Held(each - host.per_parameter, chip - host.per_chip), host


def rows(model: str, counts: Sequence[int]) -> Iterator[list[str]]:
    """The rows of the table of a model, in bytes and MB."""

    def row(name: str, held: Sequence[Held], weights: str = "") -> list[str]:
        own = held[0].per_parameter
        both = f"{own + jnp.dtype(weights).itemsize:.3f}" if weights else ""
        megabytes = [each.per_chip / 1e6 for each in held]  # Three digits, or more.
        cells = [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in megabytes]
        return [name, f"{own:.3f}", both, *cells]

    for dtype in ("float32", BFLOAT16):
        held = [of_weights(placed(model, chips, dtype)[0]) for chips in counts]
        yield row(f"weights in {dtype}", held)
    for choice in CHOICES:
        each = (placed(model, chips, choice.weights) for chips in counts)
        on_chip, hosted = zip(*(of_state(*x, choice) for x in each), strict=True)
        yield row(choice.name, on_chip, choice.weights)
        if choice.on_host:
            yield row(f"{choice.name}: on the host", hosted)


def table(model: str, counts: Sequence[int] = COUNTS) -> str:
    """The table of a model."""
    per_chip = [f"{count} chips, MB each" for count in counts]
    headings = [f"{model} parameters", "bytes per parameter", "with weights", *per_chip]
    lines = [headings, ["---", *["--:"] * (2 + len(counts))], *rows(model, counts)]
    return "\n".join(map(line, lines))


def _shard_bytes(array: Any, sharding: NamedSharding) -> int:
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize


def main(options: Options) -> None:
    for model in options.models:
        print(table(model, options.counts), end="\n\n", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
