"""The command of :mod:`examples.benchmarks.gpu_session`."""

import argparse
import pathlib
import sys

import jax

from examples.benchmarks import gpu_session
from examples.benchmarks.gpu_session import (
    correctness,
    forms,
    losses,
    recipe,
    stage,
    steps,
    symmetric,
    training,
)

STAGES = {
    "correctness": correctness.STAGE,
    "steps": steps.STAGE,
    "forms": forms.STAGE,
    "symmetric": symmetric.STAGE,
    "training": training.STAGE,
    "losses": losses.STAGE,
    "recipe": recipe.STAGE,
}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if a case failed, 2 without a GPU."""
    options = _parser().parse_args(arguments)
    platform = jax.devices()[0].platform
    if platform != "gpu" and not options.tiny:
        print(
            f"error: JAX's first device is a {platform}, not a GPU: install jax[cuda12] "
            "or jax[cuda13] where there is a GPU, or pass --tiny.",
            file=sys.stderr,
        )
        return 2
    failed: list[str] = []
    for name in options.stage:
        outcome = stage.run(
            name, STAGES[name], options.out, options.seconds, options.tiny
        )
        failed += outcome.failed
        if outcome.left:
            print(f"{name}: no time was left for {len(outcome.left)} cases; run again:")
            print("\n".join(f"  {case}" for case in outcome.left), flush=True)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.benchmarks.gpu_session",
        description=gpu_session.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stage", nargs="+", choices=STAGES, default=[*STAGES], help="all without it"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("runs/gpu_session"),
        help="folder of the tables and figures (%(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=420.0,
        help="after which a stage starts no new case (%(default)s)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="everything in miniature, on any device"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
