"""Break the numeric code, one line at a time: every mutant has to be caught.

    python -m tests.mutants            # all of them
    python -m tests.mutants 3 7        # some

A mutant is a copy of the tree in which one line is another; it is caught if the tests
named beside it fail. `make mutants` runs all.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("orscale_jax", "tests", "examples", "pyproject.toml")


class Mutant(NamedTuple):
    """One line, what it becomes, and the tests that must notice."""

    module: str
    line: str
    broken: str
    tests: str


MUTANTS = [
    Mutant(
        "_matrix",
        "return jnp.sqrt(jnp.sum(jnp.square(leaf), axis=self.matrix))",
        "return jnp.sqrt(jnp.sum(jnp.square(leaf), axis=self.matrix[-1:]))[..., 0]",
        "test_optimizers.py::test_25_steps_against_float64_numpy",
    ),
    Mutant(
        "_matrix",
        "ordered = leaf.transpose(self.batch + self.rows + self.columns)",
        "ordered = leaf.transpose(self.rows + self.batch + self.columns)",
        "test_transforms.py",
    ),
    Mutant(
        "_polar",
        "polynomial = rounded(b * gram + c * square)",
        "polynomial = rounded(b * gram - c * square)",
        "test_polar.py",
    ),
    Mutant(
        "_polar",
        "a, b, c = rows[jnp.minimum(i, len(rows) - 1)]",
        "a, b, c = rows[jnp.minimum(i, len(rows) - 2)]",
        "test_polar.py",
    ),
    Mutant(
        "_polar",
        "x = x / jnp.where(largest == 0, 1, largest)",
        "x = x / 1",
        "test_polar.py",
    ),
    Mutant(
        "_polar",
        "return x / jnp.where(norm == 0, 1, norm)",
        "return x / norm",
        "test_polar.py",
    ),
    Mutant(
        "_polar",
        "factor = rounded(gram)",
        "factor = gram",
        "test_polar.py test_stability.py",
    ),
    Mutant(
        "_polar",
        "table[0] = _express.divide_argument(table[0], safety)",
        "pass",
        "test_polar_express.py",
    ),
    Mutant(
        "_polar_express",
        "row = row * 2 / (evaluate(row, lower) + evaluate(row, upper))",
        "row = row * 1",
        "test_polar_express.py",
    ),
    Mutant(
        "_polar_express",
        "if step < steps:",
        "if step <= steps:",
        "test_polar_express.py",
    ),
    Mutant(
        "_transforms",
        "factor = rms * float(np.sqrt(max(axes.matrix_shape(leaf))))",
        "factor = rms * float(np.sqrt(min(axes.matrix_shape(leaf))))",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "anchor = w_norm / (jnp.where(directed, d_norm, 1) + eps)",
        "anchor = w_norm / jnp.where(directed, d_norm, 1)",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "ratio = jnp.where(neutral, 1, w_norm / (c * d + eps))",
        "ratio = jnp.where(neutral, 1, w_norm / (c * (d + eps)))",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "directed = (d_norm > 0) & jnp.isfinite(d_norm)",
        "directed = jnp.isfinite(d_norm)",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "directed = (d_norm > 0) & jnp.isfinite(d_norm)",
        "directed = d_norm > 0",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "ready = _unset(c) & directed & jnp.isfinite(anchor)",
        "ready = directed & jnp.isfinite(anchor)",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "return (c == 0) | (c == 1)",
        "return c == 0",
        "test_checkpoints.py",
    ),
    Mutant(
        "_transforms",
        "return jnp.where(jnp.isfinite(d_norm), ratio, jnp.nan)",
        "return ratio",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "lambda axes, before, u: before | jnp.any(u != 0, axis=axes.matrix),",
        "lambda axes, before, u: jnp.any(u != 0, axis=axes.matrix),",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "return _sharding.shard_like_axes(filled, leaf, axes.batch)",
        "return filled",
        "test_citizenship.py -k sharding_types_are_kept",
    ),
    Mutant(
        "_transforms",
        "return _sharding.shard_like(axes.from_matrices(q, like=whole), leaf)",
        "return axes.from_matrices(q, like=whole)",
        "test_transforms.py -k sharding_types",
    ),
    Mutant(
        "_optimizers",
        "lambda stages: optax.chain(stages.direction, stages.decay, stages.ratio),",
        "lambda stages: optax.chain(stages.direction, stages.ratio, stages.decay),",
        "test_recordings.py",
    ),
    Mutant(
        "_optimizers",
        "optax.trace(momentum, nesterov=nesterov, accumulator_dtype=mu_dtype),",
        "optax.trace(momentum, nesterov=True, accumulator_dtype=mu_dtype),",
        "test_optimizers.py::test_25_steps_against_float64_numpy",
    ),
    Mutant(
        "_precision",
        "return _cast_like(new_updates, updates), _cast_like(new_state, state)",
        "return _cast_like(new_updates, updates), new_state",
        "test_citizenship.py -k dtypes_never_change",
    ),
    Mutant(
        "_qk_clip",
        "key = jnp.min(grouped, axis=-1) ** (1 - jnp.asarray(alpha, gamma.dtype))",
        "key = jnp.max(grouped, axis=-1) ** (1 - jnp.asarray(alpha, gamma.dtype))",
        "test_qk_clip.py",
    ),
    Mutant(
        "_qk_clip",
        "moved = (factor * (w + u) - w).astype(update.dtype)",
        "moved = (factor * w + u - w).astype(update.dtype)",
        "test_qk_clip.py",
    ),
    Mutant(
        "ablations",
        "lambda at, direction, r: at.per_matrix(r) * direction,",
        "lambda at, direction, r: direction,",
        "test_recordings.py",
    ),
    Mutant(
        "ablations",
        "return leaf / np.sqrt(math.prod(at.matrix_shape(leaf)), dtype=leaf.dtype)",
        "return leaf / np.sqrt(max(at.matrix_shape(leaf)), dtype=leaf.dtype)",
        "test_ablations.py -k momentum_rms_denominator",
    ),
]


def break_line(path: pathlib.Path, mutant: Mutant) -> None:
    text = path.read_text()
    if text.count(mutant.line) != 1:
        raise SystemExit(f"{path.name} does not hold this line once: {mutant.line}")
    path.write_text(text.replace(mutant.line, mutant.broken))


def failing_test(tree: pathlib.Path, tests: str) -> str | None:
    """The first test that fails in the tree, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    arguments = [
        t if t[0] == "-" or "." not in t else f"tests/{t}" for t in tests.split()
    ]
    done = subprocess.run(
        [*command, *arguments], cwd=tree, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"The tests {tests} could not run:\n{done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].split(" - ")[0].removeprefix("FAILED tests/") if failed else None


def survives(number: int, mutant: Mutant) -> bool:
    """Prints what became of the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        break_line(tree / "orscale_jax" / f"{mutant.module}.py", mutant)
        caught = failing_test(tree, mutant.tests)
    print(f"{number:2}  {mutant.module}.py: {mutant.line}")
    print(f"    became: {mutant.broken}")
    print(f"    {f'caught by {caught}' if caught else 'SURVIVED ' + mutant.tests}")
    sys.stdout.flush()
    return caught is None


def main(numbers: list[int]) -> int:
    chosen = numbers or range(1, len(MUTANTS) + 1)
    survivors = [n for n in chosen if survives(n, MUTANTS[n - 1])]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught.", end=" ")
    print(f"Survivors: {survivors}" if survivors else "")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
