"""Times of steps, and what share of the card's rate they reach.

*steps*: five optimizers, six models. On 500 small matrices Optax's Muon, whose program
has thousands of kernels, and NorMuon are left out: they take long to compile. A dtype
beside a name is that of the products; without one it is the platform's.

*recipe*: the matrices of a mixture of experts, as many layers as fit one card. A public
recipe for JAX trains 26 layers, 2560 wide, with 64 experts of 512 in each. Here are 8 of
them: 2.2 billion parameters, whose weights, gradients and momentum in float32 take 27 GB.

*symmetric_kernel*: the products of :mod:`examples.benchmarks.symmetric`, by XLA and, on
Hopper cards, by its kernel.

Of *steps* and *recipe* there are two times. *A step* is a call, whose buffers the host
hands over one by one: with hundreds of small leaves that takes longer than the
arithmetic. A step *on the device* is one of several inside a call.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from examples.benchmarks import symmetric
from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.gpu_session.session import Case, Measured
from examples.benchmarks.models import Leaf, Leaves, gpt2, of_shapes, scanned_gpt2
from examples.benchmarks.shapes import CASES, copies, nominal_flops
from examples.benchmarks.timing import TURNS, Quartiles, repeated, seconds_of
from examples.pretrain.operation.peaks import peak_flops

STEP, ON_DEVICE, MIB = "time of a step", "time of a step on the device", 2**20
OPTIMIZERS = ("orscale", "muon", "optax.contrib.muon", "optax.adamw", "normuon")
BFLOAT16 = ("orscale, bfloat16", "muon, bfloat16")
FEW = ("orscale", "muon", "optax.adamw")
SMALL = "500 matrices of 32×64"


def mixture(layers: int, width: int, experts: int, hidden: int) -> Leaves:
    """Layers of attention and of experts."""
    up, down = (experts, width, hidden), (experts, hidden, width)
    block = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    return of_shapes(copies(layers, {**block, "gate": up, "up": up, "down": down}))


Models = Mapping[str, Callable[[], Leaves]]
MODELS: Models = {
    "GPT-2 124M": gpt2,
    "GPT-2 124M, layers scanned": scanned_gpt2,
    SMALL: lambda: of_shapes(CASES["tiny"]),
    "4 blocks of a 1.1B model": lambda: of_shapes(copies(4, CASES["1.1B"])),
    "64 experts of 2048×1408": lambda: of_shapes(CASES["experts"]),
    "DavidNet": lambda: of_shapes(CASES["davidnet"]),
}
TINY: Models = {"experts": lambda: {**mixture(1, 16, 2, 8), "bias": Leaf((8,))}}
RECIPE_OF: Models = {
    "8 layers of 64 experts of 2560×512": lambda: mixture(8, 2560, 64, 512)
}


@functools.cache  # It compiles for seconds.
def product_rate(tiny: bool) -> float:
    """The best median of FLOPs per second of square products in bfloat16."""

    def rate(size: int) -> float:
        # Random: a card multiplies constants faster, since they cost less power.
        x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
        multiply = jax.jit(
            functools.partial(jnp.matmul, preferred_element_type="float32")
        )
        jax.block_until_ready(multiply(x, x))
        return 2 * size**3 / seconds_of(lambda: multiply(x, x)).median

    return max(map(rate, (32, 16) if tiny else (8192, 4096)))


def shares(
    flops: float, seconds: Quartiles, tiny: bool, where: str = ""
) -> Iterator[Measured]:
    """FLOPs over a time, in percent of the product rate and, where known, of the peak."""
    peak = peak_flops(jax.devices()[0].device_kind)
    for name, rate in (("product rate", product_rate(tiny)), ("peak", peak)):
        if rate is not None:
            share = seconds.map(functools.partial(operator.truediv, 100 * flops / rate))
            yield Measured(f"share of the {name}{where}", "%", share)


def _of_step(
    variant: str, model: Callable[[], Leaves], times: int, turns: int, tiny: bool
) -> Iterator[Measured]:
    """A step of random float32 parameters, or so many in one call.

    Products of ours are in the platform's default dtype, those of `optax.contrib.muon` in
    that of the gradients, which for float32 means TF32 on GPUs. The shares are of the
    nominal FLOPs of Newton–Schulz. The peak of the memory is that of the process up to
    here, and thus of a case before this one if that had more.
    """
    leaves = model()
    numbers = {key: leaf.numbers for key, leaf in leaves.items()}
    name, _, dtype = variant.partition(", ")
    optimizer = contenders(numbers, dtype or None)[name]
    params, grads = (
        {
            key: 0.02 * jax.random.normal(jax.random.fold_in(seed, i), leaf.shape)
            for i, (key, leaf) in enumerate(leaves.items())
        }
        for seed in jax.random.split(jax.random.key(0))
    )
    step = step_of(optimizer)

    def several(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        def one(_: Any, held: Any) -> Any:
            # Nothing that depends on the gradients alone is to be moved out of the loop.
            held, g = jax.lax.optimization_barrier((held, grads))
            return step(*held, g)

        return jax.lax.fori_loop(0, times, one, (params, state))

    held = [params, jax.jit(optimizer.init)(params)]
    del params
    jitted = jax.jit(step if times == 1 else several, donate_argnums=(0, 1))
    compiled = jitted.lower(*held, grads).compile()
    seconds = seconds_of(repeated(compiled, held, grads), turns).times(1 / times)
    yield Measured(STEP if times == 1 else ON_DEVICE, "ms", seconds.times(1e3))
    if name != "optax.adamw":
        shapes = {key: leaf.shape for key, leaf in leaves.items() if leaf.numbers}
        where = "" if times == 1 else " on the device"
        yield from shares(nominal_flops(shapes), seconds, tiny, where)
    if times > 1:
        return
    if (memory := compiled.memory_analysis()) is not None:
        temporaries = memory.temp_size_in_bytes / MIB
        yield Measured("temporaries", "MiB", Quartiles.of([temporaries]))
    stats = jax.devices()[0].memory_stats() or {}
    if (peak := stats.get("peak_bytes_in_use")) is not None:
        yield Measured("peak of the process", "MiB", Quartiles.of([peak / MIB]))


def _steps(
    models: Models, optimizers: Sequence[str], times: int, turns: int, tiny: bool
) -> Sequence[Sequence[Case]]:
    """So many in a call, and one."""
    return [
        [
            Case(name, optimizer, quantity,
                 functools.partial(_of_step, optimizer, model, count, turns, tiny))
            for optimizer in (FEW if name == SMALL else optimizers)
            for quantity, count in ((ON_DEVICE, times), (STEP, 1))
        ]
        for name, model in (TINY if tiny else models).items()
    ]  # fmt: skip


steps = functools.partial(_steps, MODELS, OPTIMIZERS + BFLOAT16, 16, TURNS)
recipe = functools.partial(_steps, RECIPE_OF, OPTIMIZERS[:3], 3, 3)


def _of_product(shape: tuple[int, ...]) -> Iterator[Measured]:
    xla = symmetric.seconds("XLA", *shape)
    yield Measured("time of XLA's product", "µs", xla.times(1e6))
    if symmetric.on_hopper():
        kernel = symmetric.seconds("kernel", *shape)
        yield Measured("time of the kernel", "µs", kernel.times(1e6))
        yield Measured(
            "the kernel's rate", "%", kernel.map(lambda x: 100 * xla.median / x)
        )


def symmetric_kernel(tiny: bool) -> Sequence[Sequence[Case]]:
    products = {"one": [(1, 64, 128)]} if tiny else symmetric.PRODUCTS
    return [
        [
            Case(f"{name}, {'×'.join(map(str, shape))}", "symmetric product",
                 "time of XLA's product", functools.partial(_of_product, shape))
            for name, shapes in products.items()
            for shape in shapes
        ]
    ]  # fmt: skip
