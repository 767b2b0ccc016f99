"""How far an update travels through the code: files, functions and frames.

``python -m examples.benchmarks.road`` traces one update of a small model on one device
and on a mesh of Explicit axes, and prints, for this package and for
:func:`optax.contrib.muon`:

- the files and functions that the update enters (without lambdas and comprehensions),
- the frames of the package between ``update`` and the first matrix product.

With ``--list`` it prints these frames, and the functions by file.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import orscale_jax

PACKAGES = {
    "orscale_jax": Path(orscale_jax.__file__).parent,
    "optax": Path(optax.__file__).parent,
}
PRODUCTS = {"dot_general", "matmul", "einsum"}


class Road:
    """What a profiler notes of one trace.

    Attributes:
      functions: The names of the functions entered, by file.
      frames: The frames of the package at the first matrix product.
    """

    def __init__(self, package: Path) -> None:
        """Follow the functions of one package."""
        self._package = str(package)
        self.functions: dict[str, set[str]] = defaultdict(set)
        self.frames: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; the function that :func:`sys.setprofile` wants."""
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(self._package):
            file = code.co_filename.removeprefix(self._package + "/")
            self.functions[file].add(f"{code.co_qualname}:{code.co_firstlineno}")
        elif code.co_name in PRODUCTS and "/jax/" in code.co_filename:
            self.frames = self.frames or list(reversed([*self._above(frame)]))

    def _above(self, frame: FrameType) -> Iterator[str]:
        above: FrameType | None = frame
        while above is not None:
            file = above.f_code.co_filename
            inner = above.f_code.co_name.startswith("<")
            if file.startswith(self._package) and not inner:
                place = file.removeprefix(self._package + "/")
                yield f"{place} {above.f_code.co_qualname}"
            above = above.f_back

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note what is called inside."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self) -> str:
        """The counts in one line."""
        count = sum(map(len, self.functions.values()))
        moves = [frame.split()[0] for frame in self.frames]
        changes = sum(a != b for a, b in itertools.pairwise(moves))
        return (
            f"{len(self.functions):5} files {count:5} functions "
            f"{len(self.frames):5} frames {changes:5} moves between files"
        )


def small_model() -> dict[str, jax.Array]:
    """Matrices, experts, and parameters that AdamW trains."""
    shapes = {
        "embed": {"embedding": (32, 16)},
        "up": {"kernel": (16, 64), "bias": (64,)},
        "down": {"kernel": (64, 16)},
        "experts": {"kernel": (8, 16, 32)},
    }
    return jax.tree.map(
        lambda shape: jnp.full(shape, 0.5), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def on_mesh(params: Any) -> Any:
    """The parameters on a mesh of Explicit axes, sharded along their first axis."""
    count = min(8, len(jax.devices()))
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Explicit,))
    jax.set_mesh(mesh)
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))), params
    )


def follow(optimizer: optax.GradientTransformation, params: Any, package: str) -> Road:
    """Trace one update."""
    road = Road(PACKAGES[package])
    state = optimizer.init(params)
    with road.followed():
        jax.jit(optimizer.update).trace(params, state, params)
    return road


def numbers(params: Any) -> Any:
    """Dimension numbers that both libraries take."""
    del params
    two, three = (optax.contrib.MuonDimensionNumbers(*axes) for axes in ((0, 1), (1, 2)))
    return {
        "embed": {"embedding": None},
        "up": {"kernel": two, "bias": None},
        "down": {"kernel": two},
        "experts": {"kernel": three},
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--list", action="store_true", help="print frames and functions")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    params = small_model()
    roads = {
        "optax.contrib.muon": follow(
            optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers),
            params,
            "optax",
        ),
        "orscale, one device": follow(
            orscale_jax.orscale(0.1, weight_dimension_numbers=numbers(params)),
            params,
            "orscale_jax",
        ),
        "orscale, Explicit mesh": follow(
            orscale_jax.orscale(0.1, weight_dimension_numbers=numbers(params)),
            on_mesh(params),
            "orscale_jax",
        ),
    }
    for name, road in roads.items():
        print(f"{name:24}{road.row()}")
        if arguments.list:
            print(*(f"  {frame}" for frame in road.frames), sep="\n")
            for file, functions in sorted(road.functions.items()):
                print(f"    {len(functions):3} {file}: {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main()
