"""A step whose optimizer state is in the host's memory, compiled for four v5p chips.

    python -m examples.benchmarks.host_offload     # needs libtpu, and no TPU

A stack of residual blocks, FSDP, float32. Nothing is run: the figures are the compiler's
own, for one chip and one step. For GPUs there are none: those that JAX 0.10 compiles for
without one have no memory but the device's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from examples.benchmarks import topologies
from examples.benchmarks.ahead_of_time import line, placed
from examples.benchmarks.hlo_program import Instruction, parse
from examples.gallery.host_offload import LARGE, on_host
from orscale_jax import orscale, state_shardings

TOPOLOGY = "v5p:2x2x1"
LAYERS, WIDTH, TOKENS = 4, 1024, 8192
MIB = 2**20
# Of the state's fields, which lie on the host; None: all.
CHOICES: dict[str, tuple[str, ...] | None] = {
    "nothing": (),
    "momentum": LARGE,
    "all of the state": None,
}
COLUMNS = (
    "on the host", "device, MiB", "host, MiB", "in, MiB", "out, MiB", "copies",
    "kernels while it comes in", "kernels while it goes out",
)  # fmt: skip
_KERNELS = {"fusion", "convolution", "dot", "custom-call", "while", "call"}


class Transfer(NamedTuple):
    """A copy between the host's memory and the device's.

    Attributes:
      nbytes: Its size.
      inward: Whether to the device.
      kernels: How many kernels run between its start and its end.
    """

    nbytes: int
    inward: bool
    kernels: int


def transfers(text: str) -> list[Transfer]:
    """The asynchronous copies from and to the host in a compiled program."""
    program, entry = parse(text)
    started: dict[str, int] = {}
    found, kernels = [], 0
    for name, instruction in program[entry].items():
        kernels += instruction.opcode in _KERNELS
        if instruction.opcode == "copy-start":
            started[name] = kernels
        elif instruction.opcode == "copy-done":
            [start] = instruction.operands
            to_host = _is_on_host(instruction)
            if to_host or "S(5)" in program[entry][start].type:
                during = kernels - started[start]
                found.append(Transfer(instruction.nbytes, not to_host, during))
    return found


def _is_on_host(instruction: Instruction) -> bool:
    return "S(5)" in instruction.type


def compiled(devices: Sequence[jax.Device], fields: tuple[str, ...] | None) -> Any:
    """The step with the chosen fields of its state on the host."""
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("fsdp"))
    shape = (WIDTH, 4 * WIDTH)
    params = {
        f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        for i in range(LAYERS)
    }
    optimizer = orscale(1e-2, param_shardings=params)
    at_rest = on_host(state_shardings(optimizer, params), fields)
    state = placed(jax.eval_shape(optimizer.init, params), at_rest)

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(_loss)(params, x)
        state = jax.device_put(state, jax.memory.Space.Device)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    where = jax.tree.map(lambda p: p.sharding, params)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32, sharding=rows)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(where, at_rest))
    return jitted.lower(params, state, x).compile()


def _loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params.values():
        low = w.astype(jnp.bfloat16)
        x = x + jnp.tanh(x.astype(jnp.bfloat16) @ low) @ low.T
    return jnp.mean(x**2)


def row_of(name: str, program: Any) -> str:
    """A row of the table on docs/host_offload.md."""
    memory = program.memory_analysis()
    found = transfers(program.as_text())
    large = [copy for copy in found if copy.nbytes >= MIB]
    moved = [sum(c.nbytes for c in found if c.inward == way) / MIB for way in (1, 0)]
    kernels = [
        ", ".join(str(c.kernels) for c in large if c.inward == way) for way in (1, 0)
    ]
    cells = [
        name,
        f"{memory.argument_size_in_bytes / MIB:.1f}",
        f"{memory.host_argument_size_in_bytes / MIB:.1f}",
        f"{moved[0]:.1f}",
        f"{moved[1]:.1f}",
        str(len(found)),
        *kernels,
    ]
    return line(cells)


def main() -> None:
    """Prints the table."""
    devices = topologies.tpus(TOPOLOGY)
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'--:|' * 5}---|---|", flush=True)
    for name, fields in CHOICES.items():
        print(row_of(name, compiled(devices, fields)), flush=True)


if __name__ == "__main__":
    main()
