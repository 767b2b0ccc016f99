"""The commit that is tested."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[1]


def commit_number() -> int:
    """The hash of HEAD: what `.ci/run` picks of the dearer checks follows from it."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return int(done.stdout, 16)
