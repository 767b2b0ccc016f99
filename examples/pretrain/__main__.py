"""The command line: python -m examples.pretrain."""

import argparse
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from examples.pretrain.config import Config
from examples.pretrain.configs import parse
from examples.pretrain.errors import AGAIN, RunError, UsageError
from examples.pretrain.kinds import make_task, read_data
from examples.pretrain.meshes import make_mesh
from examples.pretrain.operation.processes import (
    is_first,
    join_cluster,
    leaving_in_time,
    others_are_gone,
)
from examples.pretrain.operation.run import run
from examples.pretrain.operation.stop import Stopped

PROG = "python -m examples.pretrain [--recipe NAME] [--distributed]"


def train(config: Config) -> None:
    """Trains and reports as the configuration says."""
    task, data, mesh = make_task(config), read_data(config), make_mesh(config.mesh)
    run(config, task, data, mesh, Console(quiet=not is_first()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--distributed", action="store_true")
    chosen, options = first.parse_known_args(arguments)
    try:
        if "" in options:
            raise UsageError("an argument is empty, as that of an unset variable is.")
        config = parse(options, PROG)
        if chosen.distributed:
            join_cluster()
        train(config)
    except UsageError as error:
        return _failed(f"error: {error}", code=2)
    except (RunError, OSError) as error:
        return _failed(f"error: {error}", code=1)
    except jax.errors.JaxRuntimeError as error:
        if not others_are_gone(error):
            raise
        return _failed(f"error: another process has gone: {error}\n{AGAIN}", code=1)
    except Stopped as stopped:
        again = "The same command carries on from here."
        return _failed(f"{stopped}. {again}", code=128 + stopped.signum)
    except KeyboardInterrupt:
        return _failed(f"Stopped. {AGAIN}", code=130)
    return 0


def _failed(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    with leaving_in_time():
        sys.exit(main())
