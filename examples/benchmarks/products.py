"""The rate of the products that Newton–Schulz is made of, by form, as a Markdown table.

    python -m examples.benchmarks.products            # a minute on a CPU

Wide matrices X (m×n) and tall ones (n×m) are iterated by different letters of einsum,
without transposing any. GFLOP/s, the best of all turns; results are float32.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from examples.benchmarks.timing import in_turns

FORMS = {
    "XXᵀ, wide": ("...ik,...jk->...ij", "X", "X"),
    "XᵀX, tall": ("...ki,...kj->...ij", "Y", "Y"),
    "AA": ("...ij,...jk->...ik", "A", "A"),
    "PX, wide": ("...ij,...jk->...ik", "A", "X"),
    "XP, tall": ("...ij,...jk->...ik", "Y", "A"),
    "XXᵀ, tall transposed first": ("...ki,...kj->...ij", "Y", "Y"),
}
SIZES = ((768, 768), (768, 3072), (2048, 2048))
KINDS = (("float32", ()), ("bfloat16", ()), ("float32", (4,)))
TURNS = 7


def operands(m: int, n: int, batch: tuple[int, ...], dtype: str) -> dict[str, jax.Array]:
    shapes = {"X": (m, n), "Y": (n, m), "A": (m, m)}
    return {name: jnp.ones((*batch, *shape), dtype) for name, shape in shapes.items()}


def product(form: str, given: dict[str, jax.Array]) -> Callable[[], jax.Array]:
    letters, *names = FORMS[form]

    @functools.partial(jax.jit, static_argnums=2)
    def multiply(x: jax.Array, y: jax.Array, transposed: bool) -> jax.Array:
        if transposed:
            x = y = jax.lax.optimization_barrier(x.mT)
            return jnp.einsum(
                "...ik,...jk->...ij", x, y, preferred_element_type=jnp.float32
            )
        return jnp.einsum(letters, x, y, preferred_element_type=jnp.float32)

    x, y = (given[name] for name in names)
    return lambda: jax.block_until_ready(multiply(x, y, "first" in form))


def rate(form: str, m: int, n: int, dtype: str, batch: tuple[int, ...]) -> float:
    run = product(form, operands(m, n, batch, dtype))
    run()
    best = min(in_turns({form: run}, range(TURNS))[form])
    third = m if form == "AA" else n
    return (batch[0] if batch else 1) * 2 * m * m * third / best / 1e9


def main() -> None:
    heads = [
        f"{m}×{n} {dtype}{', 4 at once' if batch else ''}"
        for (m, n), (dtype, batch) in itertools.product(SIZES, KINDS)
    ]
    print("| product | " + " | ".join(heads) + " |")
    print("| --- |" + " --: |" * len(heads))
    for form in FORMS:
        rates = [
            rate(form, m, n, dtype, batch)
            for (m, n), (dtype, batch) in itertools.product(SIZES, KINDS)
        ]
        print(f"| {form} | " + " | ".join(f"{r:.0f}" for r in rates) + " |", flush=True)


if __name__ == "__main__":
    main()
