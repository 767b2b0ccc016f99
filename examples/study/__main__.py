"""Do the runs of the study: docs/study_protocol.md.

    python -m examples.study

Runs that the tables hold are not done again: the same command carries on. Every core has
a process of its own.
"""

import tyro
from rich.console import Console

from examples.pretrain.errors import UsageError
from examples.study.runner import Options, run

if __name__ == "__main__":
    try:
        run(tyro.cli(Options, description=__doc__), Console())
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
