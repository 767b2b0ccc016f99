"""The memory of a whole training step that never holds the gradients, for one chip.

    python -m examples.benchmarks.one_layer_at_a_time                    # TPU v5p
    python -m examples.benchmarks.one_layer_at_a_time --platform gpu     # H100
    python -m examples.benchmarks.one_layer_at_a_time --models GPT-2-XL --layers 4

It compiles the step of `examples.gallery.one_layer_at_a_time` ahead of time, and prints
what the compiler allocates for it. No chip is needed, and no array is made. A model takes
some minutes. `make bench-tpu` and `make bench-gpu` install what it needs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from optax.contrib import MuonDimensionNumbers

from examples.benchmarks import topologies
from examples.gallery import one_layer_at_a_time as example
from examples.gallery.one_layer_at_a_time import LLAMA_3_8B, Sizes

EXPERTS, CHOSEN = 64, 8  # Of each layer, and of them for a token on average.
MATRIX, STACK = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(1, 2)
ATTENTION = ("query", "key", "value", "out")


def numbers(params: Any) -> Any:
    """Of the mixture: AdamW trains routers, tables and norms."""
    of_others = dict.fromkeys(ATTENTION, MATRIX)
    return {
        name: STACK if array.ndim == 3 else of_others.get(name)
        for name, array in params.items()
    }


def mixture(sizes: Sizes, params: Any, x: jax.Array) -> jax.Array:
    """A layer of one sequence, each of whose experts takes the tokens that it prefers."""
    [x] = x
    x += example.attention(sizes, params, x)
    h = example.norm(params["mlp_norm"], x)
    scores = jax.nn.softmax((h @ params["router"]).astype(jnp.float32))
    weights, tokens = jax.lax.top_k(scores.T, len(h) * CHOSEN // EXPERTS)
    taken = h[tokens]  # (experts, tokens of each, width)
    hidden = jax.nn.silu(taken @ params["gate"]) * (taken @ params["up"])
    out = hidden @ params["down"] * weights[..., None].astype(x.dtype)
    return x.at[tokens].add(out)[None]


class Model(NamedTuple):
    """A decoder, and how many sequences a batch has."""

    sizes: Sizes
    sequences: int = 1
    experts: bool = False

    @property
    def layer(self) -> Callable[..., Any]:
        return functools.partial(mixture if self.experts else example.layer, self.sizes)

    def shapes(self) -> Any:
        shapes, s = example.shapes(self.sizes), self.sizes
        if self.experts:
            n, up = s.layers, (s.layers, EXPERTS, s.width, s.hidden)
            down = (n, EXPERTS, s.hidden, s.width)
            router = {"router": (n, s.width, EXPERTS)}
            shapes["layers"] |= {"gate": up, "up": up, "down": down, **router}
        return shapes


MODELS: Mapping[str, Model] = {
    "Llama-3-8B": Model(LLAMA_3_8B),
    # Of the width, the layers and the heads of GPT-2 XL; the gated layers of Llama have
    # as many parameters as those of GPT-2 if they have this hidden width.
    "GPT-2-XL": Model(Sizes(48, 1600, 25, 25, 4288, 50_304, 12), 4),
    # Of the sizes of OLMoE 1B-7B.
    "mixture": Model(Sizes(16, 2048, 16, 16, 1024, 50_304, 12), experts=True),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    platform: Literal["tpu", "gpu"] = "tpu"
    """One chip: a v5p, or an H100."""
    models: tuple[str, ...] = tuple(MODELS)
    """Of Llama-3-8B, GPT-2-XL and mixture."""
    layers: int | None = None
    """How many layers; all without it."""
    tokens: int = 4096
    """Of a step."""


class Row(NamedTuple):
    """A step in bytes."""

    parameters: int
    arguments: int  # Parameters, state and tokens.
    allocated: int  # With temporaries, and results that do not replace arguments.
    saved: int  # Of the temporaries, the inputs of layers.
    peak: int  # Of all that is in use at a time.

    def cells(self) -> Iterator[str]:
        """In the order of `COLUMNS`."""
        temporaries, others = self.allocated - self.arguments, self.allocated - self.saved
        yield f"{self.parameters / 1e9:.2f}"
        for nbytes in (self.arguments, temporaries, self.saved, others):
            yield f"{nbytes / self.parameters:.2f}"
        yield f"{self.allocated / 1e9:.1f}"
        yield f"{self.peak / 1e9:.1f}"
        yield f"{(self.peak - self.saved) / self.parameters:.2f}"


COLUMNS = (
    "model", "parameters, billions", "weights and state, bytes per parameter",
    "temporaries, bytes per parameter", "of these saved inputs, bytes per parameter",
    "all but saved inputs, bytes per parameter", "all, GB", "peak, GB",
    "peak but saved inputs, bytes per parameter",
)  # fmt: skip


def measured(model: Model, tokens: int, device: jax.Device) -> Row:
    """What a compiler allocates for the step of a model."""
    sharding = SingleDeviceSharding(device)
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    optimizer = example.make_optimizer(
        1e-3, **{"weight_dimension_numbers": numbers} if model.experts else {}
    )
    params = jax.tree.map(
        lambda shape: placed(shape, jnp.bfloat16),
        model.shapes(),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    state = jax.tree.map(
        lambda a: placed(a.shape, a.dtype),
        jax.eval_shape(functools.partial(example.init_state, optimizer), params),
    )
    batch = placed((model.sequences, tokens // model.sequences + 1), jnp.int32)
    step = functools.partial(example.train_step, optimizer, model.layer)
    # For TPUs the compiler chooses the layouts: it would otherwise copy some stacks into
    # others before the loops, and back. (`compiled.input_formats` then has them.)
    chosen = Format(Layout.AUTO, sharding) if device.platform == "tpu" else None
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(chosen, chosen, None),
        out_shardings=(chosen, chosen, None, None),
    )
    lowered = jitted.lower(params, state, batch)
    gpu = device.platform != "tpu" and device.platform != "cpu"
    options = topologies.GPU_COMPILER_OPTIONS if gpu else {}
    found: Any = lowered.compile(compiler_options=dict(options)).memory_analysis()
    made = found.output_size_in_bytes - found.alias_size_in_bytes
    counted = found.argument_size_in_bytes + found.temp_size_in_bytes + made
    return Row(
        sum(math.prod(a.shape) for a in jax.tree.leaves(params)),
        found.argument_size_in_bytes,
        # JAX 0.10 does not say it. On TPUs, temp_size_in_bytes has more than main memory.
        getattr(found, "total_allocation_bytes", counted),
        model.sizes.layers * tokens * model.sizes.width * 2,
        found.peak_memory_in_bytes,
    )


def main(options: Options) -> None:
    device = (
        topologies.tpus("v5p:2x2x1")[0]
        if options.platform == "tpu"
        else topologies.h100s(1)[0]
    )
    print(f"| {' | '.join(COLUMNS)} |\n|---{'|--:' * (len(COLUMNS) - 1)}|")
    for name in options.models:
        model = MODELS[name]
        if options.layers is not None:
            model = model._replace(sizes=model.sizes._replace(layers=options.layers))
        row = measured(model, options.tokens, device)
        print(f"| {name} | {' | '.join(row.cells())} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
