"""The command line: python -m examples.pretrain."""

import argparse
import sys
from collections.abc import Sequence

from examples.pretrain.errors import AGAIN, UsageError, exit_code_of
from examples.pretrain.meshes import make_mesh
from examples.pretrain.operation.processes import (
    Stopped,
    is_first,
    join_cluster,
    leaving_in_time,
    others_are_gone,
)
from examples.pretrain.operation.run import run
from examples.pretrain.output import Output
from examples.pretrain.recipes import parse
from examples.pretrain.tasks import make_task, read_data

PROG = "python -m examples.pretrain [--recipe NAME] [--distributed]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--distributed", action="store_true")
    chosen, options = first.parse_known_args(arguments)

    def train() -> None:
        if "" in options:
            raise UsageError("an argument is empty, as that of an unset variable is.")
        config = parse(options, PROG)
        if chosen.distributed:
            join_cluster()
        task, data, mesh = make_task(config), read_data(config), make_mesh(config.mesh)
        run(config, task, data, mesh, Output(quiet=not is_first()))

    try:
        return exit_code_of(train)
    except Stopped as stopped:
        message = f"{stopped}. Rerun the same command to resume from here."
        code = 128 + stopped.signum
    except KeyboardInterrupt:
        message, code = f"Stopped. {AGAIN}", 130
    except Exception as error:
        if not others_are_gone(error):
            raise
        message, code = f"error: another process has gone: {error}\n{AGAIN}", 1
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    with leaving_in_time():
        sys.exit(main())
