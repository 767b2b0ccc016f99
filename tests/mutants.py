"""Break the numeric code, one expression at a time: every mutant must be caught.

    python -m tests.mutants               # all of them
    python -m tests.mutants 3 7           # some
    python -m tests.mutants --sample 12   # those whose turn it is today

A mutant is a copy of the tree with one expression replaced; it is caught if the tests
named beside it fail. `make mutants` runs all, `.ci/run` a sample.
"""

import argparse
import ast
import collections
import datetime
import functools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("orscale_jax", "tests", "examples", "pyproject.toml")
AT_ONCE = 2  # Mutants, each in a process of its own.


class Mutant(NamedTuple):
    """Code in a function, what it becomes, and the tests that must notice.

    Attributes:
      function: The function or class around the code, in any module.
      code: An expression or a statement that occurs in it once, in any formatting.
      broken: The code that replaces it.
      tests: Arguments of pytest; files by the ends of their paths.
    """

    function: str
    code: str
    broken: str
    tests: str


MUTANTS = [
    Mutant(
        "with_float32_squares",
        "nu.astype(jnp.float32) if nu.dtype == jnp.float16 else nu",
        "nu",
        "test_inputs.py::test_small_gradients_in_float16",
    ),
    Mutant(
        "_entries",
        "array = jnp.array(value, compute_dtype(leaf))",
        "array = jnp.asarray(value, compute_dtype(leaf))",
        "test_learning_rate_multipliers.py::test_a_donated_state_deletes_no_array_of_the_user",
    ),
    Mutant(
        "_compiled_or_traced",
        "_compiled if known and not tracing else _on_any_platform",
        "_on_any_platform",
        "test_citizenship.py::test_a_second_step_outside_of_jit_compiles_nothing",
    ),
    Mutant(
        "full",
        "isinstance(like, jax.core.Tracer)",
        "False",
        "test_citizenship.py::test_steps_of_every_device_inside_shard_map",
    ),
    Mutant(
        "_statistics",
        "jnp.pad(x, (0, longest - x.size), constant_values=jnp.inf)",
        "jnp.pad(x, (0, longest - x.size))",
        "test_summarize.py::test_optimizers_of_several_kinds_in_one_partition",
    ),
    Mutant(
        "_direction_not_finite",
        "~lacking",
        "True",
        "test_summarize.py::test_optimizers_of_several_kinds_in_one_partition",
    ),
    Mutant(
        "reduce",
        "return fn(leaf, axis=self.matrix)",
        "return fn(leaf, axis=self.matrix[-1:])[..., 0]",
        "test_family.py -k hyperball",
    ),
    Mutant(
        "to_matrices",
        "x = leaf.transpose(self.batch + self.rows + self.columns)",
        "x = leaf.transpose(self.rows + self.batch + self.columns)",
        "test_stages.py",
    ),
    Mutant(
        "_total",
        "self.kind.keys_and_values * (of_keys or heads)",
        "self.kind.keys_and_values * heads",
        "parameters/test_per_head.py",
    ),
    Mutant(
        "_grouped",
        "size = self.shape[axis] // heads * group",
        "size = self.shape[axis] // heads",
        "parameters/test_per_head.py::test_each_head_is_a_matrix",
    ),
    Mutant(
        "_check_blocks",
        "not own.ends <= blocks.ends",
        "not own.ends & blocks.ends",
        "parameters/test_per_head.py",
    ),
    Mutant(
        "step",
        "polynomial = rounded(b * factor.astype(square.dtype) + c * square)",
        "polynomial = rounded(b * factor.astype(square.dtype) - c * square)",
        "test_polar.py",
    ),
    Mutant(
        "_require_all_rows",
        "int(jax.device_get(steps)) < rows",
        "int(jax.device_get(steps)) < rows - 2",
        "test_polar.py -k deepseek",
    ),
    Mutant(
        "row",
        "i = jnp.minimum(i, len(table) - 1)",
        "i = jnp.minimum(i, len(table) - 2)",
        "test_polar.py",
    ),
    Mutant(
        "normalize",
        "scaled = x / jnp.where(largest == 0, 1, largest)",
        "scaled = x / 1",
        "test_polar.py",
    ),
    Mutant(
        "_root",
        "return jnp.sqrt(jnp.where(square == 0, 1, square))",
        "return jnp.sqrt(square)",
        "test_polar.py",
    ),
    Mutant(
        "chosen",
        "jnp.where(overflows, if_large, else_)",
        "else_",
        "test_preconditioning.py -k one_pass",
    ),
    Mutant(
        "_aol",
        "sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)",
        "sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True) / 2",
        "test_preconditioning.py",
    ),
    Mutant(
        "_aol",
        "return Start(arithmetic.round(scaled), scale * gram * scale.mT)",
        "return Start(arithmetic.round(scaled), scale * gram)",
        "test_preconditioning.py",
    ),
    Mutant(
        "step",
        "factor = rounded(gram)",
        "factor = gram",
        "test_polar.py test_stability.py",
    ),
    Mutant(
        "_polar_express",
        "table[0] = polar_express.divide_argument(table[0], safety)",
        "pass",
        "test_polar_express.py",
    ),
    Mutant(
        "_cushioned_quintic",
        "row = row * 2 / (evaluate(row, lower) + evaluate(row, upper))",
        "row = row * 1",
        "test_polar_express.py",
    ),
    Mutant(
        "polar_express_coefficients",
        "step < steps",
        "step <= steps",
        "test_polar_express.py",
    ),
    Mutant(
        "_anchored",
        "anchor = norms.weight / (jnp.where(directed, norms.anchor, 1) + eps)",
        "anchor = norms.weight / jnp.where(directed, norms.anchor, 1)",
        "test_stages.py",
    ),
    Mutant(
        "_trust_ratio",
        "ratio = jnp.where(neutral, 1, norms.weight / (c * d + eps))",
        "ratio = jnp.where(neutral, 1, norms.weight / (c * (d + eps)))",
        "test_stages.py",
    ),
    Mutant(
        "_directed",
        "return norms.moving & (norms.direction > 0) & jnp.isfinite(norms.direction)",
        "return norms.moving & jnp.isfinite(norms.direction)",
        "test_stages.py",
    ),
    Mutant(
        "_directed",
        "return norms.moving & (norms.direction > 0) & jnp.isfinite(norms.direction)",
        "return norms.moving & (norms.direction > 0)",
        "test_stages.py",
    ),
    Mutant(
        "_anchored",
        "ready = _unset(c) & directed & jnp.isfinite(anchor)",
        "ready = directed & jnp.isfinite(anchor)",
        "test_stages.py",
    ),
    Mutant(
        "_unset",
        "return (c == 0) | (c == 1)",
        "return c == 0",
        "test_checkpoints.py",
    ),
    Mutant(
        "_trust_ratio",
        "return jnp.where(jnp.isfinite(norms.direction), ratio, jnp.nan)",
        "return ratio",
        "test_stages.py",
    ),
    Mutant(
        "update",
        "lambda _, before, now: before | now.astype(before.dtype)",
        "lambda _, before, now: now.astype(before.dtype)",
        "test_stages.py",
    ),
    Mutant(
        "_directed",
        "return norms.moving & (norms.direction > 0) & jnp.isfinite(norms.direction)",
        "return (norms.direction > 0) & jnp.isfinite(norms.direction)",
        "test_anchoring.py -k paths",
    ),
    Mutant(
        "_trust_ratio",
        "norms.weight == 0",
        "norms.weight < 0",
        "test_anchoring.py -k zero",
    ),
    Mutant(
        "anchor_weight_norm",
        "is_first | unset if calibrates else is_first",
        "is_first",
        "test_anchoring.py -k reset",
    ),
    Mutant(
        "by_largest_direction",
        "jnp.where(is_new, 0, known.directions)",
        "known.directions",
        "test_anchoring.py -k reset",
    ),
    Mutant(
        "make",
        "typed_sharding.shard_as("
        "fn(axes, leaf, *others), leaf, axes.batch_sharding(leaf))",
        "fn(axes, leaf, *others)",
        "test_citizenship.py -k sharding_types_are_kept",
    ),
    Mutant(
        "_joined",
        "return typed_sharding.shard_like(joined, leaf)",
        "return joined",
        "test_stages.py -k sharding_types",
    ),
    Mutant(
        "_orscale",
        "optax.chain(stages.coupled, stages.ratio)",
        "optax.chain(stages.direction, stages.ratio, stages.decay)",
        "test_recordings.py",
    ),
    Mutant(
        "_algorithm_1",
        "h.nesterov",
        "True",
        "test_optimizers.py::test_25_steps_against_float64_numpy",
    ),
    Mutant(
        "update",
        "new, new_state = _cast(new, promoted, place), _cast(new_state, old, old)",
        "new = _cast(new, promoted, place)",
        "test_properties.py -k dtypes_never_change",
    ),
    Mutant(
        "_factors",
        "jnp.min(grouped, axis=-1)",
        "jnp.max(grouped, axis=-1)",
        "test_qk_clip.py",
    ),
    Mutant(
        "rescale",
        "moved = (factor * (w + u) - w).astype(update.dtype)",
        "moved = (factor * w + u - w).astype(update.dtype)",
        "test_qk_clip.py",
    ),
    Mutant(
        "around",
        "measured = rescaled(params), rescaled(updates)",
        "measured = None",
        "test_recordings.py",
    ),
    Mutant(
        "over_root_of_size",
        "jnp.sqrt(size)",
        "size",
        "test_ablations.py -k momentum_rms_denominator",
    ),
    Mutant(
        "place",
        "return sum(axis < self.axis for axis in self.whole.batch)",
        "return len(self.whole.batch)",
        "test_dimension_numbers.py",
    ),
    Mutant(
        "within",
        "tuple(axis + (axis >= self.axis) for axis in axes)",
        "tuple(axis + (axis > self.axis) for axis in axes)",
        "test_dimension_numbers.py",
    ),
    Mutant(
        "_block_shape",
        "return m, n // length * size",
        "return m, n",
        "test_dimension_numbers.py",
    ),
    Mutant(
        "unstack",
        "x if x.shape == like[i].shape else x.mT",
        "x.reshape(like[i].shape)",
        "test_stacks.py",
    ),
    Mutant(
        "of",
        "batch = tuple(typed_sharding.spec(x)[:-2])",
        "batch = ()",
        "test_stacks.py",
    ),
    Mutant(
        "_segment",
        "polynomial = scale * z + a * polynomial + times((yield z), v)",
        "polynomial = scale * z + a * polynomial + times(v, (yield z))",
        "test_gram.py -k from_the_left",
    ),
    Mutant(
        "_segment",
        "times((yield z), v)",
        "symmetric((yield z), v)",
        "test_gram.py -k strips_save",
    ),
    Mutant(
        "_segment",
        "gram = a * half + symmetric((yield half), (yield z))",
        "gram = a * half + times((yield half), (yield z))",
        "test_gram.py -k strips_save",
    ),
    Mutant(
        "_segment",
        "half = a * gram + symmetric(factor, (yield z))",
        "half = b * gram + symmetric(factor, (yield z))",
        "test_gram.py -k parity_in_float64",
    ),
    Mutant(
        "stable",
        "j - i <= _MAX_STEPS",
        "j - i <= 99",
        "test_gram.py test_polar.py",
    ),
    Mutant(
        "is_cheaper",
        "return flops(m, n, steps=2, restarts=0) < flops(m, n, steps=2, restarts=1)",
        "return flops(m, n, steps=2, restarts=0) > flops(m, n, steps=2, restarts=1)",
        "test_gram.py -k cheaper",
    ),
    Mutant(
        "_decisions",
        "e.search(name)",
        "e.fullmatch(name)",
        "test_path_rules.py",
    ),
    Mutant(
        "locate",
        "isinstance(declared, GroupedWeight) and own[declared.inputs] == 1",
        "False",
        "test_flax.py",
    ),
    Mutant(
        "resolve_mask",
        "mask = mask(tree) if jax.tree.leaves(tree) else tree",
        "mask = mask(tree)",
        "test_citizenship.py -k look_for",
    ),
    Mutant(
        "_group_alike",
        "sent = array.transposed if transposed else array",
        "sent = array",
        "test_planner.py",
    ),
    Mutant(
        "is_wide",
        "self.may_transpose and (by_columns_alone or out_of_order)",
        "by_columns_alone or out_of_order",
        "test_mesh.py -k aol",
    ),
    Mutant(
        "plan_buckets",
        "[array.over(mesh) for array in arrays]",
        "arrays",
        "test_mesh.py -k axis_of_one_device",
    ),
    Mutant(
        "_split",
        "per_device * bucket.group_size",
        "math.ceil(bucket.matrices / stacks)",
        "test_planner.py",
    ),
    Mutant(
        "_fits",
        "size % count_devices(axes, mesh.factors) == 0",
        "size > 0 and axes is not None",
        "test_planner.py -k divide_every_shard",
    ),
    Mutant(
        "plan_buckets",
        "each.whole if (each.remainder,) in staying else each.even",
        "each.even",
        "test_planner.py -k nothing_improves",
    ),
    Mutant(
        "product",
        "x.ndim - 3 - axis",
        "x.ndim - 1",
        "test_gram.py -k product_itself",
    ),
    Mutant(
        "symmetric",
        "block.mT",
        "block",
        "test_gram.py -k by_strips",
    ),
    Mutant(
        "largest",
        "return self.columns.max(largest) if self.columns else largest",
        "return largest",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "gram",
        "self.columns.sum_matrices(product, self.round) if self.columns else product",
        "product",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_is_before",
        "first += sum(packing.layout.slots for packing in run)",
        "first += sum(packing.layout.matrices for packing in run)",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_if_active",
        "jnp.where(axis_index(self.group) < self.active, reduced, x)",
        "reduced",
        "test_shared_matrices.py -k one_device",
    ),
    Mutant(
        "_in_shape",
        "ordered = sorted(layouts, key=lambda layout: (-layout.column_shards, layout))",
        "ordered = sorted(layouts, key=lambda layout: (layout.column_shards, layout))",
        "test_planner.py",
    ),
    Mutant(
        "parameter_layout",
        "(*batch, n, m) if swapped else (*batch, m, n)",
        "(*batch, m, n)",
        "test_platforms.py",
    ),
    Mutant(
        "_send",
        "start = axis_index(group) * share",
        "start = 0 * share",
        "test_mesh.py -k one_device",
    ),
    Mutant(
        "join",
        "self.order",
        "sorted(self.order)",
        "test_mesh.py -k one_device",
    ),
    Mutant(
        "_fingerprint",
        "return jnp.asarray(np.frombuffer(digest, np.uint32))",
        "return jnp.zeros(8, jnp.uint32)",
        "test_mesh.py -k told_apart",
    ),
    Mutant(
        "packed_dtype",
        "self.dtype if self.dtype.itemsize < dtype.itemsize else dtype",
        "dtype",
        "test_mesh.py -k bfloat16",
    ),
    Mutant(
        "packed_dtype",
        "return packed if has_range else dtype",
        "return packed",
        "test_float16.py -k stacked_and_sent",
    ),
    Mutant(
        "scale",
        "return 2.0**7 if jnp.finfo(self.dtype).maxexp <= 16 else 1.0",
        "return 1.0",
        "test_float16.py -k digits",
    ),
    Mutant(
        "_of_scaled",
        "(arithmetic.scale**power for power in (1, 3, 5))",
        "(arithmetic.scale**power for power in (1, 1, 1))",
        "test_float16.py -k overflows",
    ),
    Mutant(
        "cast",
        "return typed_sharding.shard_like(cast, jnp.asarray(placed))",
        "return cast",
        "test_mesh.py -k narrow",
    ),
    Mutant(
        "update",
        "place = bare if weights is None else weights",
        "place = bare",
        "test_mesh.py -k narrow",
    ),
    Mutant(
        "_on_platform",
        "map(typed_sharding.shard_as, qs, xs, of_factors)",
        "qs",
        "test_mesh.py -k narrow",
    ),
    Mutant(
        "_",
        "return root, jnp.where(x == 0, 0, change / (2 * jnp.where(x == 0, 1, root)))",
        "return root, change / (2 * root)",
        "test_stages.py test_inputs.py -k differentiated",
    ),
    Mutant(
        "not_one",
        "jnp.where(c.astype(jnp.float32) == 1, next_to_one, c)",
        "jnp.where(c == 1, 1 - jnp.finfo(c.dtype).epsneg, c)",
        "test_stages.py -k set_once",
    ),
    Mutant(
        "_as_jax",
        "return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf",
        "return leaf",
        "test_stages.py -k of_numpy",
    ),
    Mutant(
        "as_python_scalar",
        "return value.item() if scalar else value",
        "return value",
        "test_inputs.py -k numpy_scalars",
    ),
    Mutant(
        "_mesh",
        "traced = isinstance(leaf, jax.core.Tracer)",
        "traced = True",
        "test_mesh.py -k without_the_mesh",
    ),
    Mutant(
        "_is_for_export",
        "bool(ctx.module_context.lowering_parameters.for_export)",
        "False",
        "test_lowering.py -k layouts",
    ),
    Mutant(
        "_on_devices",
        "mesh.size == count",
        "True",
        "test_lowering.py -k given_mesh",
    ),
    Mutant(
        "on_unknown_shards",
        "jax.sharding.use_abstract_mesh(mesh)",
        "jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())",
        "test_mesh.py -k without_the_mesh",
    ),
    Mutant(
        "named",
        "any(None in axes for axes in axes_of_arrays)",
        "False",
        "test_named_shardings.py",
    ),
    Mutant(
        "_promoted",
        "dtype = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))",
        "dtype = jnp.result_type(update)",
        "test_properties.py -k dtypes_never_change",
    ),
    Mutant(
        "box_like",
        "return node.replace(value=array, names=of_axes(names))",
        "return node.replace(value=array)",
        "test_boxes.py",
    ),
    Mutant(
        "_repeated",
        "name in mesh.slow or not free",
        "False",
        "test_slow_links.py -k stay_in_their_slice",
    ),
    Mutant(
        "_crosses_slices",
        "neighbours % self.column_shards > 0",
        "False",
        "test_slow_links.py -k column_shards",
    ),
    Mutant(
        "axis_index",
        "index * group.lengths[i] + places[i]",
        "index + places[i]",
        "test_slow_links.py -k change_no_number",
    ),
    Mutant(
        "all_gather",
        "_gathered(x, fast, axis=1, tiled=False)",
        "_gathered(x, fast, axis=0, tiled=False)",
        "test_slow_links.py -k planted",
    ),
    Mutant(
        "on_shards",
        "name not in mapped",
        "True",
        "test_param_shardings.py -k population",
    ),
    Mutant(
        "_misfit",
        "size % math.prod(mesh.shape[name] for name in names)",
        "False",
        "test_param_shardings.py -k bad_param",
    ),
    Mutant(
        "_of_nesterov",
        "return whole * (mu + 1) / (mu * whole + last)",
        "return 1.0",
        "test_convert.py -k young",
    ),
    Mutant(
        "update",
        "return decayed, state._replace(count=optax.safe_increment(state.count))",
        "return decayed, state",
        "test_optimizers.py -k take_optax",
    ),
    Mutant(
        "square_of_norm",
        "self.square(m, n) * min(m, n)",
        "self.square(m, n) * max(m, n)",
        "test_optimizers.py -k full_rank",
    ),
    Mutant(
        "without_rms",
        "math.sqrt(self.square(m, n))",
        "math.sqrt(self.square(n, m))",
        "test_stages.py -k scale",
    ),
    Mutant(
        "by_largest_direction",
        "jnp.minimum(first, not_one(largest))",
        "not_one(largest)",
        "test_family.py -k largest",
    ),
    Mutant(
        "by_largest_direction",
        "count.astype(norms.direction.dtype) < constants.anchor_steps",
        "count.astype(norms.direction.dtype) <= constants.anchor_steps",
        "test_family.py -k largest",
    ),
    Mutant(
        "_full_rank_norm",
        "return jnp.sqrt(decayed + square * jnp.asarray(shapes, dtype))",
        "return jnp.sqrt(square * jnp.asarray(shapes, dtype))",
        "test_family.py -k schedule_count",
    ),
    Mutant(
        "neurons",
        "MatrixAxes(tuple(sorted(self.batch + self.columns)), self.rows, ())",
        "MatrixAxes(tuple(sorted(self.batch + self.rows)), (), self.columns)",
        "test_family.py -k output_axes",
    ),
    Mutant(
        "average",
        "decay * before + (1 - decay) * now.astype(before.dtype)",
        "now.astype(before.dtype)",
        "test_family.py -k normuon",
    ),
    Mutant(
        "_full_rank",
        "min(m, n) / max(m, 1)",
        "min(m, n) / max(n, 1)",
        "test_family.py -k normuon",
    ),
    Mutant(
        "normalize",
        "each.reduce(jnp.sum, jnp.square(x)) + jnp.asarray(eps, dtype)",
        "axes.reduce(jnp.sum, jnp.square(x)) + jnp.asarray(eps, dtype)",
        "test_family.py -k muon_plus",
    ),
    Mutant(
        "_normalize",
        "jnp.where(largest == 0, 1, largest)",
        "1 + 0 * largest",
        "test_family.py -k scales_of_gradients",
    ),
    Mutant(
        "_divide",
        "jnp.where(square == 0, 1, square)",
        "square",
        "test_family.py -k scales_of_gradients",
    ),
    Mutant(
        "_divide",
        "jnp.square(by)",
        "jnp.square(x)",
        "test_family.py::test_25_steps_against_float64_numpy[aurora]",
    ),
    Mutant(
        "_rectangular",
        "operator.ne",
        "operator.lt",
        "test_family.py::test_25_steps_against_float64_numpy[aurora]",
    ),
    Mutant(
        "_divide",
        "jnp.where(chosen, broadcast(vectors, power, x), 1)",
        "broadcast(vectors, power, x)",
        "test_family.py::test_25_steps_against_float64_numpy[aurora]",
    ),
    Mutant(
        "_divide",
        "operator.lt",
        "operator.gt",
        "test_family.py::test_25_steps_against_float64_numpy[aurora]",
    ),
    Mutant(
        "_change",
        "(norm - moved) / moved",
        "0 * moved",
        "test_family.py -k 1000_steps",
    ),
    Mutant(
        "_change",
        "still | (found == 0)",
        "found == 0",
        "test_family.py -k to_the_bit",
    ),
    Mutant(
        "_counts",
        "typed_sharding.shard_like(moving, c).astype(bool)",
        "c > 0",
        "test_family.py -k only_measured",
    ),
    Mutant(
        "_pooled",
        "jnp.sum(jnp.where(count, jnp.log(jnp.where(count, ratio, 1)), 0))",
        "jnp.mean(jnp.where(count, jnp.log(jnp.where(count, ratio, 1)), 0))",
        "test_family.py -k mean_is_over",
    ),
    Mutant(
        "_add_where_signs_agree",
        "jnp.sign(update) * jnp.sign(decayed) >= 0",
        "jnp.sign(update) * jnp.sign(decayed) > 0",
        "test_family.py -k signs",
    ),
    Mutant(
        "anchor_weight_norm",
        "before.weight_norm == 0",
        "before.weight_norm >= 0",
        "test_read.py",
    ),
    Mutant(
        "anchor_weight_norm",
        "unset | jnp.isinf(before.calibration)",
        "before.calibration >= 0",
        "test_read.py -k before_the_norms",
    ),
    Mutant(
        "trust_ratio_stage",
        "norms = own if measured is None else norms_of(*measured)",
        "norms = own = own if measured is None else norms_of(*measured)",
        "test_read.py -k what_the_weights",
    ),
    Mutant(
        "_of_matrices",
        "jnp.asarray(eta, ratio.dtype) * ratio * at['direction_norm']",
        "jnp.asarray(eta, ratio.dtype) * at['direction_norm']",
        "test_read.py -k saved_weights",
    ),
    Mutant(
        "_of_matrices",
        "jnp.where(moved == 0, 1, at['weight_norm'])",
        "jnp.where(moved == 0, 1, weight_norm)",
        "test_read.py -k saved_weights",
    ),
    Mutant("_of_matrices", "ratio >= r_max", "ratio > r_max", "test_read.py -k bound"),
    Mutant(
        "_at",
        "jnp.asarray(count) - 1",
        "jnp.asarray(count)",
        "test_learning_rates.py",
    ),
    Mutant(
        "summarize",
        "vector(known)",
        "jnp.stack([jnp.mean(array) for array in known])",
        "test_summarize.py",
    ),
    Mutant(
        "_cut",
        "file.read().rfind(b'\\n') + 1",
        "len(file.read())",
        "test_history.py",
    ),
    Mutant(
        "_null_share",
        "values <= floor * values[..., :1]",
        "values <= floor",
        "readouts/test_measure.py",
    ),
    Mutant(
        "find_problems",
        "found.mean() >= check.least_share",
        "found.mean() > 0",
        "test_problems.py",
    ),
    Mutant(
        "kappas",
        "found.kappa_layer - added",
        "found.kappa_layer",
        "test_verdict.py",
    ),
    Mutant(
        "curvature",
        "_times(min, smoothness, params, weight_dimension_numbers)",
        "_times(max, smoothness, params, weight_dimension_numbers)",
        "test_estimate.py",
    ),
    Mutant(
        "_move",
        "jnp.abs(new) < _SMALLEST",
        "jnp.abs(new) < 0",
        "test_bfloat16_weights.py::test_one_update_is_that_of_float32_weights",
    ),
    Mutant(
        "_update_to",
        "jnp.where(_bits(new) == _bits(old), np.float32(-0.0), new - old)",
        "new - old",
        "test_bfloat16_weights.py::test_special_numbers",
    ),
    Mutant(
        "_update_to",
        "_float32(_bits(master) & _UPPER)",
        "_float32(_bits(master))",
        "test_bfloat16_weights.py::test_one_update_is_that_of_float32_weights",
    ),
    Mutant(
        "_joined",
        "_upper(param) | low_bits",
        "_upper(param)",
        "test_bfloat16_weights.py::test_small_updates_are_lost_without_it_and_not_with_it",
    ),
    Mutant(
        "step",
        "out = grad + momentum * m if nesterov else m",
        "out = m",
        "test_momentum.py::test_steps_against_float64_numpy",
    ),
    Mutant(
        "encode_pieces",
        "jnp.where(jnp.isfinite(scales), scales, jnp.nan)",
        "scales",
        "test_int8_blocks.py::test_what_is_not_finite_makes_its_block_nan_and_no_other",
    ),
    Mutant(
        "block_axis",
        "[axis for axis in axes.whole.matrix if axis != axes.axis]",
        "list(axes.whole.matrix)",
        "test_int8_blocks.py::test_no_block_has_entries_of_two_matrices",
    ),
    Mutant(
        "_spec_of_scales",
        "spec[other] = (*typed_sharding.names(spec[other]), *moved)",
        "pass",
        "test_int8_on_meshes.py::test_codes_and_scales_are_those_of_one_device",
    ),
    Mutant(
        "_of_blocks",
        "return largest_magnitude(blocks, axis + 1)",
        "return blocks[(slice(None),) * (axis + 1) + (0,)]",
        "test_int8_on_meshes.py::test_codes_and_scales_are_those_of_one_device",
    ),
    Mutant(
        "rate_multipliers",
        "_by_path(given, tree)",
        "_by_path(unbox(given), tree)",
        "parameters/test_rate_multipliers.py -k first_match",
    ),
    Mutant(
        "_first_batch_axes",
        "axis != i",
        "False",
        "parameters/test_rate_multipliers.py -k axes_of_matrices",
    ),
    Mutant(
        "multiplied_for_matrices",
        "factor * step",
        "step",
        "test_learning_rate_multipliers.py -k own_rate",
    ),
    Mutant(
        "_times",
        "(*typed_sharding.spec(step)[: np.ndim(value)], *(None,) * rest)",
        "typed_sharding.spec(step)",
        "test_learning_rate_multipliers.py -k on_a_mesh",
    ),
    Mutant(
        "_multiplied",
        "rate * multipliers[path] if path in multipliers else rate",
        "rate",
        "test_learning_rate_multipliers.py -k relative_steps",
    ),
    Mutant(
        "largest_magnitude",
        "jax.lax.platform_dependent(x, cpu=among_bits, default=largest)",
        "largest(x)",
        "test_inputs.py::test_no_shape_hides_a_first_gradient_of_nan",
    ),
    Mutant(
        "counts_steps",
        'place[-1] == "count" and (not beside or not _MOMENTS.isdisjoint(beside))',
        'place[-1] == "count"',
        "test_convert.py -k moments_keep_their_age",
    ),
    Mutant(
        "_count",
        "return age",
        "return self._step()",
        "test_convert.py -k count_of_their_own",
    ),
    Mutant(
        "_statistics",
        "jnp.isinf(values)",
        "values != values",
        "test_read.py -k starts_from_zero",
    ),
    Mutant(
        "_at_one_bound",
        "(at != 0) & (other == 0)",
        "at != 0",
        "test_problems.py",
    ),
]


class Place(NamedTuple):
    """Where code stands in a file; lines count from 1, columns in bytes."""

    path: pathlib.Path
    node: ast.AST


@functools.lru_cache(maxsize=AT_ONCE)
def named(tree: pathlib.Path) -> dict[str, list[Place]]:
    """The functions and classes of the package, by name."""
    found = collections.defaultdict(list)
    for path in sorted((tree / "orscale_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name].append(Place(path, node))
    return found


def places(tree: pathlib.Path, mutant: Mutant) -> list[Place]:
    """All places in the package at which the mutant's code occurs."""
    wanted = ast.dump(parsed(mutant.code))
    return [
        Place(path, node)
        for path, outer in named(tree)[mutant.function]
        for node in ast.walk(outer)
        if ast.dump(node) == wanted
    ]


def parsed(code: str) -> ast.AST:
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        return ast.parse(code).body[0]


def the_place(tree: pathlib.Path, mutant: Mutant) -> Place:
    """The one place of the mutant's code.

    Raises:
      LookupError: If it stands nowhere, or in several places.
    """
    found = places(tree, mutant)
    if len(found) != 1:
        where = [f"{path.relative_to(tree)}:{node.lineno}" for path, node in found]
        raise LookupError(
            f"{mutant.code!r} stands in {mutant.function} {len(found)} times, not once: "
            f"{', '.join(where) or 'nowhere'}"
        )
    return found[0]


def break_code(tree: pathlib.Path, mutant: Mutant) -> pathlib.Path:
    """Break a copy's code in its one place; return the file, relative to the tree."""
    path, node = the_place(tree, mutant)
    lines = path.read_bytes().splitlines(keepends=True)
    before = (
        b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    )
    after = lines[node.end_lineno - 1][node.end_col_offset :]
    after += b"".join(lines[node.end_lineno :])
    path.write_bytes(before + mutant.broken.encode() + after)
    return path.relative_to(tree)


def failing_test(tree: pathlib.Path, tests: str) -> str | None:
    """The first test that fails in the tree, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    arguments = [located(argument) for argument in tests.split()]
    done = subprocess.run(
        [*command, *arguments], cwd=tree, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"The tests {tests} could not run:\n{done.stdout}{done.stderr}")
    if not done.returncode:
        return None
    found = re.search(
        r"^(?:FAILED|ERROR) tests/(.*?)(?: - |$)", done.stdout, re.MULTILINE
    )
    return found[1] if found else "pytest"


def located(argument: str) -> str:
    """A file, with the test in it if there is one, by its path; else the argument."""
    name, *test = argument.split("::")
    if not name.endswith(".py"):
        return argument
    found = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob(name)]
    if len(found) != 1:
        raise LookupError(f"{name} names {len(found)} files, not one: {found}")
    return "::".join([*found, *test])


def survives(number: int) -> bool:
    """Whether the tests miss a mutant; print the outcome."""
    mutant = MUTANTS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        broken = break_code(tree, mutant)
        caught = failing_test(tree, mutant.tests)
    print(
        f"{number:3}  {broken}, {mutant.function}: {mutant.code}\n"
        f"     became: {mutant.broken}\n"
        f"     {f'caught by {caught}' if caught else 'SURVIVED ' + mutant.tests}",
        flush=True,
    )
    return caught is None


def whose_turn_it_is(size: int, day: datetime.date) -> list[int]:
    """The numbers of a day's mutants; those of the next day follow, so that all come."""
    start = day.toordinal() * size
    return [(start + i) % len(MUTANTS) + 1 for i in range(min(size, len(MUTANTS)))]


def chosen(arguments: Sequence[str]) -> Iterable[int]:
    """The numbers of the mutants that the command line asks for."""
    parser = argparse.ArgumentParser("python -m tests.mutants")
    parser.add_argument("numbers", type=int, nargs="*", help="which of them")
    parser.add_argument("--sample", type=int, metavar="N", help="N, others each day")
    given = parser.parse_args(arguments)
    if given.sample is None:
        return given.numbers or range(1, len(MUTANTS) + 1)
    day = datetime.date.today()
    numbers = whose_turn_it_is(given.sample, day)
    print(f"Mutants of {day}: {' '.join(map(str, numbers))}", flush=True)
    return numbers


def main(arguments: Sequence[str]) -> int:
    numbers = list(chosen(arguments))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        survived = list(pool.map(survives, numbers))
    survivors = [n for n, missed in zip(numbers, survived, strict=True) if missed]
    print(f"{len(numbers) - len(survivors)} of {len(numbers)} mutants caught.", end=" ")
    print(f"Survivors: {survivors}" if survivors else "")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
