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
        "_axes",
        "return fn(leaf, axis=self.matrix)",
        "return fn(leaf, axis=self.matrix[-1:])[..., 0]",
        "test_optimizers.py::test_25_steps_against_float64_numpy",
    ),
    Mutant(
        "_axes",
        "x = leaf.transpose(self.batch + self.rows + self.columns)",
        "x = leaf.transpose(self.rows + self.batch + self.columns)",
        "test_transforms.py",
    ),
    Mutant(
        "_polar",
        "polynomial = rounded(b * factor.astype(square.dtype) + c * square)",
        "polynomial = rounded(b * factor.astype(square.dtype) - c * square)",
        "test_polar.py",
    ),
    Mutant(
        "_polar",
        "i = jnp.minimum(i, len(table) - 1)",
        "i = jnp.minimum(i, len(table) - 2)",
        "test_polar.py",
    ),
    Mutant(
        "_preconditioning",
        "scaled = x / jnp.where(largest == 0, 1, largest)",
        "scaled = x / 1",
        "test_polar.py",
    ),
    Mutant(
        "_preconditioning",
        "return scaled / jnp.sqrt(jnp.where(square == 0, 1, square))",
        "return scaled / jnp.sqrt(square)",
        "test_polar.py",
    ),
    Mutant(
        "_preconditioning",
        "jnp.where(overflows, if_large, else_)",
        "else_",
        "test_preconditioning.py -k one_pass",
    ),
    Mutant(
        "_preconditioning",
        "sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)",
        "sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True) / 2",
        "test_preconditioning.py",
    ),
    Mutant(
        "_preconditioning",
        "return Start(arithmetic.round(scaled), scale * gram * scale.mT)",
        "return Start(arithmetic.round(scaled), scale * gram)",
        "test_preconditioning.py",
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
        "return math.sqrt(max(m, n))",
        "return math.sqrt(min(m, n))",
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
        "lambda axes, before, u: before | _any_nonzero(axes, u).astype(before.dtype),",
        "lambda axes, before, u: _any_nonzero(axes, u).astype(before.dtype),",
        "test_transforms.py",
    ),
    Mutant(
        "_transforms",
        "filled = _sharding.shard_as(filled, leaf, axes.batch_sharding(leaf))",
        "pass",
        "test_citizenship.py -k sharding_types_are_kept",
    ),
    Mutant(
        "_transforms",
        "return _sharding.shard_like(joined, leaf)",
        "return joined",
        "test_transforms.py -k sharding_types",
    ),
    Mutant(
        "_optimizers",
        "lambda stages: optax.chain(stages.coupled, stages.ratio)",
        "lambda stages: optax.chain(stages.direction, stages.ratio, stages.decay)",
        "test_recordings.py",
    ),
    Mutant(
        "_algorithm",
        "given.momentum, nesterov=given.nesterov, accumulator_dtype=given.mu_dtype",
        "given.momentum, nesterov=True, accumulator_dtype=given.mu_dtype",
        "test_optimizers.py::test_25_steps_against_float64_numpy",
    ),
    Mutant(
        "_precision",
        "return _cast(new_updates, promoted, place), _cast(new_state, state, state)",
        "return _cast(new_updates, promoted, place), new_state",
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
        "lambda at, direction, r: per_matrix(at, r, direction) * direction,",
        "lambda at, direction, r: direction,",
        "test_recordings.py",
    ),
    Mutant(
        "ablations",
        "return math.sqrt(m * n)",
        "return math.sqrt(m)",
        "test_ablations.py -k momentum_rms_denominator",
    ),
    Mutant(
        "_axes",
        "return sum(axis < self.axis for axis in self.whole.batch)",
        "return len(self.whole.batch)",
        "test_matrix.py",
    ),
    Mutant(
        "_axes",
        "tuple(axis + (axis >= self.axis) for axis in axes)",
        "tuple(axis + (axis > self.axis) for axis in axes)",
        "test_matrix.py",
    ),
    Mutant(
        "_axes",
        "return m, n // length * size",
        "return m, n",
        "test_matrix.py",
    ),
    Mutant(
        "_stacking",
        "found[i] = q if q.shape == matrices[i].shape else q.mT",
        "found[i] = q.reshape(matrices[i].shape)",
        "test_stacking.py",
    ),
    Mutant(
        "_stacking",
        "batch = tuple(_sharding.spec(x)[:-2])",
        "batch = ()",
        "test_stacking.py",
    ),
    Mutant(
        "_gram",
        "polynomial = scale * z + a * polynomial + times((yield z), v)",
        "polynomial = scale * z + a * polynomial + times(v, (yield z))",
        "test_gram.py -k from_the_left",
    ),
    Mutant(
        "_gram",
        "times((yield z), v)",
        "symmetric((yield z), v)",
        "test_gram.py -k blocks_save",
    ),
    Mutant(
        "_gram",
        "gram = a * half + symmetric((yield half), (yield z))",
        "gram = a * half + times((yield half), (yield z))",
        "test_gram.py -k blocks_save",
    ),
    Mutant(
        "_gram",
        "half = a * gram + symmetric(factor, (yield z))",
        "half = b * gram + symmetric(factor, (yield z))",
        "test_gram.py -k parity_in_float64",
    ),
    Mutant(
        "_gram",
        "j - i <= _MAX_STEPS",
        "j - i <= 99",
        "test_gram.py test_polar.py",
    ),
    Mutant(
        "_gram",
        "return flops(m, n, steps=2, restarts=0) < flops(m, n, steps=2, restarts=1)",
        "return flops(m, n, steps=2, restarts=0) > flops(m, n, steps=2, restarts=1)",
        "test_gram.py -k pays",
    ),
    Mutant(
        "_rules",
        "if e.search(name)",
        "if e.fullmatch(name)",
        "test_rules.py",
    ),
    Mutant(
        "_module_types",
        "return None  # Depthwise.",
        "pass",
        "test_flax.py",
    ),
    Mutant(
        "_algorithm",
        "mask = mask(tree) if jax.tree.leaves(tree) else tree",
        "mask = mask(tree)",
        "test_citizenship.py -k look_for",
    ),
    Mutant(
        "_placement",
        "sent = array.transposed if transposed else array",
        "sent = array",
        "test_placement.py",
    ),
    Mutant(
        "_placement",
        "return m < n or (m == n and (by_rows or not self.turns))",
        "return m < n or (m == n and by_rows)",
        "test_mesh.py -k aol",
    ),
    Mutant(
        "_placement",
        "kinds = _kinds([array.over(sizes) for array in arrays], sizes)",
        "kinds = _kinds(arrays, sizes)",
        "test_mesh.py -k axis_of_one_device",
    ),
    Mutant(
        "_placement",
        "length = math.ceil(kind.matrices / stacks / kind.owners) * kind.owners",
        "length = math.ceil(kind.matrices / stacks)",
        "test_placement.py",
    ),
    Mutant(
        "_placement",
        "size % devices(axes, sizes) == 0",
        "size > 0 and axes is not None",
        "test_placement.py -k every_sharer",
    ),
    Mutant(
        "_placement",
        "kind if rest in merged else full",
        "full",
        "test_placement.py -k nothing_better",
    ),
    Mutant(
        "_precision",
        'return self._symmetric("...ik,...kj->...ij", x, y, (-2, -1))',
        'return self._symmetric("...ik,...jk->...ij", x, y, (-2, -2))',
        "test_gram.py -k product_itself",
    ),
    Mutant(
        "_precision",
        "*(block.mT for block in above)",
        "*above",
        "test_gram.py -k by_blocks",
    ),
    Mutant(
        "_precision",
        "return self.columns.max(largest) if self.columns else largest",
        "return largest",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_precision",
        "self.columns.sum_matrices(product, self.round) if self.columns else product",
        "product",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_journeys",
        "first += sum(way.leg.places for way in run)",
        "first += sum(way.leg.matrices for way in run)",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_mesh",
        "if mesh.empty:  # Of arrays that are nowhere yet JAX has the devices alone.",
        "if False:",
        "test_mesh.py -k not_placed",
    ),
    Mutant(
        "_columns",
        "return jnp.where(jax.lax.axis_index(self.axes) < self.members, found, x)",
        "return found",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_placement",
        "ordered = sorted(legs, key=lambda leg: (-leg.sharers, leg))",
        "ordered = sorted(legs, key=lambda leg: (leg.sharers, leg))",
        "test_placement.py",
    ),
    Mutant(
        "_layouts",
        "order = (*batch, n, m) if turned else (*batch, m, n)",
        "order = (*batch, m, n)",
        "test_layouts.py",
    ),
    Mutant(
        "_journeys",
        "start = jax.lax.axis_index(journey.copies) * share",
        "start = 0 * share",
        "test_mesh.py -k one_device",
    ),
    Mutant(
        "_journeys",
        "whole = pieces.transpose(self.order)",
        "whole = pieces.transpose(sorted(self.order))",
        "test_mesh.py -k one_device",
    ),
    Mutant(
        "_mesh",
        "return jnp.asarray(np.frombuffer(digest, np.uint32))",
        "return jnp.zeros(8, jnp.uint32)",
        "test_mesh.py -k told_apart",
    ),
    Mutant(
        "_engine",
        "return x.astype(platform.dtype) if as_wide and narrower else x",
        "return x",
        "test_mesh.py -k bfloat16",
    ),
    Mutant(
        "_precision",
        "return _sharding.shard_like(cast, jnp.asarray(placed))",
        "return cast",
        "test_mesh.py -k narrow",
    ),
    Mutant(
        "_precision",
        "place = updates if params is None else params",
        "place = updates",
        "test_mesh.py -k narrow",
    ),
    Mutant(
        "_engine",
        "placed = map(_sharding.shard_as, factors, matrices, specs)",
        "placed = factors",
        "test_mesh.py -k narrow",
    ),
    Mutant(
        "_algorithm",
        "updates, cuda=apart, rocm=apart, default=lambda updates: updates",
        "updates, default=lambda updates: updates",
        "test_optimizers.py -k in_place",
    ),
    Mutant(
        "_axes",
        "return root, jnp.where(x == 0, 0, change / (2 * jnp.where(x == 0, 1, root)))",
        "return root, change / (2 * root)",
        "test_transforms.py test_inputs.py -k differentiated",
    ),
    Mutant(
        "_transforms",
        "jnp.where(c.astype(jnp.float32) == 1, next_to_one, c)",
        "jnp.where(c == 1, 1 - jnp.finfo(c.dtype).epsneg, c)",
        "test_transforms.py -k set_once",
    ),
    Mutant(
        "_transforms",
        "return fn(axes, *map(jnp.asarray, leaves))",
        "return fn(axes, *leaves)",
        "test_transforms.py -k of_numpy",
    ),
    Mutant(
        "_algorithm",
        "return value.item() if scalar else value",
        "return value",
        "test_inputs.py -k numpy_scalars",
    ),
    Mutant(
        "_sharding",
        "traced = isinstance(leaf, jax.core.Tracer)",
        "traced = True",
        "test_mesh.py -k without_the_mesh",
    ),
    Mutant(
        "_mesh",
        "with jax.sharding.use_abstract_mesh(mesh):",
        "if True:",
        "test_mesh.py -k without_the_mesh",
    ),
    Mutant(
        "_named_shardings",
        "if any(None in axes for axes in found):",
        "if False:",
        "test_named_shardings.py",
    ),
    Mutant(
        "_precision",
        "found = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))",
        "found = jnp.result_type(update)",
        "test_citizenship.py -k dtypes_never_change",
    ),
    Mutant(
        "_boxes",
        "return node.replace(value=array, names=of_axes(names))",
        "return node.replace(value=array)",
        "test_boxes.py",
    ),
    Mutant(
        "_mesh",
        "sizes = {name: size for name, size in mesh.shape.items() if name not in apart}",
        "sizes = mesh.shape",
        "test_param_shardings.py -k population",
    ),
    Mutant(
        "_param_shardings",
        "if size % math.prod(mesh.shape[name] for name in names):",
        "if False:",
        "test_param_shardings.py -k bad_param",
    ),
    Mutant(
        "_convert",
        "return whole * (mu + 1) / (mu * whole + last)",
        "return 1.0",
        "test_convert.py -k young",
    ),
    Mutant(
        "_decay",
        "return decayed, state._replace(count=optax.safe_increment(state.count))",
        "return decayed, state",
        "test_optimizers.py -k take_optax",
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
