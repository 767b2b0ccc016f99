"""The dearest kernels and the largest arrays of a training step, by a model of an H100.

    python -m examples.benchmarks.roofline --recipe 125m-adamw --batch-size 32 \
        --seq-len 1024 --clip None        # compiled ahead of time, of `examples.pretrain`
    python -m examples.benchmarks.roofline hlo/*.txt              # texts that are there

Nothing is timed. :mod:`examples.benchmarks.hlo_cost` has the model, and says what is
counted. Causal attention counts as if it were not: cuDNN computes half of that, at about
half of the rate. Kernels that are alike are one row, and so are the results of one type.
"""

import collections
import pathlib
import sys
from collections.abc import Sequence

import jax

from examples.benchmarks import hlo_cost
from examples.benchmarks.ahead_of_time import SCOPES, find_target, line, trained
from examples.benchmarks.hlo import parse, runs
from examples.pretrain.errors import exit_code_of
from examples.pretrain.operation.peaks import peak_flops
from examples.pretrain.recipes import parse as parse_recipe
from examples.pretrain.tasks import make_task

ROWS, CARD = 10, "H100"


def report(text: str, flops: float | None = None) -> str:
    """Tables in Markdown; with the model's FLOPs also the share of the card's peak."""
    found = list(hlo_cost.kernels(text, SCOPES))
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernel in found:
        seconds[kernel.scope or "other"] += kernel.times * kernel.seconds
    total = sum(seconds.values())
    parts = ", ".join(f"{name} {1e3 * part:.2f}" for name, part in seconds.items())
    nbytes = sum(kernel.times * kernel.nbytes for kernel in found)
    lines = [
        f"{1e3 * total:.2f} ms ({parts}): {sum(k.times for k in found):,} kernels, "
        f"{sum(k.times * k.flops for k in found) / 1e12:.2f} TFLOP, {nbytes / 1e9:.1f} GB"
    ]
    if flops is not None:
        lines[0] += f"; {flops / total / (peak_flops(CARD) or 1):.1%} of the peak"
    alike: dict[hlo_cost.Kernel, int] = collections.Counter()
    for kernel in found:
        alike[kernel._replace(times=1)] += kernel.times
    dearest = sorted(alike, key=lambda k: -alike[k] * k.seconds)[:ROWS]
    lines += ["", line(["ms", "launches", "MB each", "GFLOP each", "result", "traced"])]
    lines += [line(["--:"] * 4 + ["---"] * 2)]
    lines += [
        line([f"{1e3 * alike[k] * k.seconds:.2f}", f"{alike[k]}", f"{k.nbytes / 1e6:.1f}",
              f"{k.flops / 1e9:.1f}", k.result, k.traced])
        for k in dearest
    ]  # fmt: skip
    program, entry = parse(text)
    sizes: collections.Counter[tuple[int, str]] = collections.Counter()
    for instruction, _, place in runs(program, entry):
        if not place.fused and instruction.opcode not in hlo_cost.NO_KERNELS:
            for dtype, shape in instruction.arrays:
                nbytes = instruction._replace(
                    type=f"{dtype}[{','.join(map(str, shape))}]"
                ).nbytes
                sizes[nbytes, f"{dtype}{list(shape)}"] += 1
    lines += [
        "",
        line(["MB", "array", "kernels that name it"]),
        line(["--:", "---", "--:"]),
    ]
    lines += [
        line([f"{nbytes / 1e6:.1f}", name, f"{count}"])
        for (nbytes, name), count in sorted(sizes.items(), reverse=True)[:ROWS]
    ]
    return "\n".join(lines)


def compiled_reports(arguments: Sequence[str]) -> None:
    """Prints the tables of a configuration's step with each of its optimizers."""
    jax.config.update("jax_platforms", "cpu")  # No GPU is looked for.
    config = parse_recipe(arguments, "python -m examples.benchmarks.roofline")
    flops = make_task(config).flops_per_example
    if flops is not None:
        flops *= config.recipe.batch_size
    for name in config.optimizer:
        found = trained(config, name, find_target("h100:1"))
        temporaries = found.memory.temp_size_in_bytes / 2**30
        print(f"{name}: temporaries {temporaries:.2f} GiB; {report(found.text, flops)}\n")


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if not arguments or arguments[0].startswith("--"):
        return exit_code_of(lambda: compiled_reports(arguments))
    for path in arguments:
        print(f"{path}: {report(pathlib.Path(path).read_text())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
