"""The command of :mod:`examples.benchmarks.gpu_session`."""

import argparse
import pathlib
import sys

import jax

from examples.benchmarks import gpu_session
from examples.benchmarks.gpu_session import correctness, session, speed, training

STAGES: dict[str, session.Stage] = {
    "correctness": correctness.groups,
    "steps": speed.steps,
    "training": training.training,
    "recipe": speed.recipe,
    "symmetric_kernel": speed.symmetric_kernel,
    "pretraining": training.pretraining,
}
FOLDER = pathlib.Path("runs/gpu_session")


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if a case failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.benchmarks.gpu_session",
        description=gpu_session.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = [name for name in STAGES if name != "pretraining"]
    stage = "all without it but pretraining, which takes a session for itself"
    add("--stage", nargs="+", choices=STAGES, default=names, help=stage)
    out = "folder of the tables (%(default)s)"
    add("--out", type=pathlib.Path, default=FOLDER, help=out)
    seconds = "of the session, after which it starts no new case (%(default)s)"
    add("--seconds", type=float, default=540.0, help=seconds)
    add("--tiny", action="store_true", help="everything in miniature, on any device")
    options = parser.parse_args(arguments)
    platform = jax.devices()[0].platform
    if platform != "gpu" and not options.tiny:
        print(
            f"error: JAX's first device is a {platform}, not a GPU: install jax[cuda12] "
            "or jax[cuda13] where there is a GPU, or pass --tiny.",
            file=sys.stderr,
        )
        return 2
    stages = {name: STAGES[name] for name in options.stage}
    left, failed = session.run(stages, options.out, options.seconds, options.tiny)
    if left:
        print(f"No time was left for {len(left)} cases; run the same command again:")
        print("\n".join(f"  {case}" for case in left))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
