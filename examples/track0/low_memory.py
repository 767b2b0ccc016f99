"""What 24-bit weights and 8-bit moments cost in loss: docs/memory.md has the protocol.

``python -m examples.track0.low_memory`` trains what docs/data/low_memory/bits.csv lacks
(all of it takes half an hour), and prints the table.
"""

import dataclasses
from typing import Any

import numpy as np
from scipy import stats

from examples.track0.losses import Losses
from examples.track0.prose import write_prose
from examples.track0.runs import Program, Rates
from examples.track0.table import STORED, Difference
from examples.track0.workloads import WORKLOADS, shortened
from orscale_jax import keep_master_weights, orscale

SEEDS, STEPS = range(1200, 1212), 300
# Float32's best rates, and a sixteenth of them. The first word is the workload.
RUNS = {"code": Rates(0.016, 0.064), "prose": Rates(0.0113, 0.064)}
RUNS |= {"mixture": Rates(0.016, 0.0905), "code, low rates": Rates(0.001, 0.004)}
# The low bits of bfloat16 weights (0: weights are float32), and orscale's options.
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "float32": (0, {}),
    "32-bit weights": (16, {}),
    "24-bit weights": (8, {}),
    "8-bit AdamW": (0, {"adam_moments_dtype": "int8"}),
    "all of 8 bits": (8, {"adam_moments_dtype": "int8", "mu_dtype": "int8"}),
}


def program(name: str, bits: int, options: dict[str, Any]) -> Program:
    short = shortened(WORKLOADS[name.partition(",")[0]], STEPS, len(SEEDS))
    dtype = "bfloat16" if bits else "float32"
    recipe = dataclasses.replace(short.config.recipe, param_dtype=dtype)
    config = dataclasses.replace(short.config, recipe=recipe)

    def optimizer(
        learning_rate: Any, other_learning_rate: Any, weight_dimension_numbers: Any
    ) -> Any:
        rates = {"adam_learning_rate": other_learning_rate, **options}
        rates |= {"weight_dimension_numbers": weight_dimension_numbers}
        inner = orscale(learning_rate, **rates)
        return keep_master_weights(inner, bits) if bits else inner

    return Program(dataclasses.replace(short, config=config), optimizer)


def main() -> None:
    path = STORED.parent / "low_memory" / "bits.csv"
    losses = Losses(path, None if path.exists() else "examples.track0.low_memory")
    write_prose()
    for name, rates in RUNS.items():
        reference = np.zeros(())
        for variant, chosen in VARIANTS.items():
            keys = [(f"{name}: {variant}", rates, seed) for seed in SEEDS]
            if missing := [key for key in keys if key not in losses]:
                run = program(name, *chosen).run
                for key in missing:
                    losses.add(key, run(*key[1:]))
            found = np.array([losses[key].loss for key in keys])
            reference = found if variant == "float32" else reference
            error = float(stats.sem(found - reference))
            mean = Difference(float(np.mean(found - reference)), error, len(SEEDS) - 1)
            print(f"| {name} | {variant} | {found.mean():.4f} | {mean} |", flush=True)


if __name__ == "__main__":
    main()
