"""The command line: python -m examples.pretrain."""

import argparse
import sys
from collections.abc import Sequence

import jax
import tyro
from rich.console import Console

from examples.pretrain import compile_only, report
from examples.pretrain.compilation_cache import failing_in_one_message
from examples.pretrain.config import Config
from examples.pretrain.configs import find_config
from examples.pretrain.errors import RunError, UsageError, writing
from examples.pretrain.meshes import make_mesh
from examples.pretrain.optimizers import find_optimizer
from examples.pretrain.processes import (
    is_first,
    join_cluster,
    leaving_in_time,
    others_are_gone,
)
from examples.pretrain.rundir import claim
from examples.pretrain.stop import Stopped, StopSignal
from examples.pretrain.tasks import make_task, read_data
from examples.pretrain.train import Run, check, train
from examples.pretrain.unused import refuse_unused

PROG = "python -m examples.pretrain"


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """What to do, and the configuration: a recipe's, with the options that are given.

    Raises:
      UsageError: If an option is impossible.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default="demo")
    first.add_argument("--distributed", action="store_true")
    first.add_argument("--compile-only", action="store_true")
    first.add_argument("--topology")
    chosen, others = first.parse_known_args(arguments)
    default = find_config(chosen.recipe)
    config = tyro.cli(
        Config,
        args=others,
        prog=f"{PROG} [--recipe NAME] [--distributed | --compile-only --topology NAME]",
        default=default,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
    )
    for name in config.optimizer:
        find_optimizer(name)
    refuse_unused(config, default)
    if chosen.compile_only != (chosen.topology is not None):
        raise UsageError("--compile-only and --topology NAME need each other: pass both.")
    if chosen.compile_only and chosen.distributed:
        raise UsageError("--compile-only needs no other process: drop --distributed.")
    return chosen, config


def run(config: Config, console: Console) -> None:
    """Trains what is not finished, then reports on everything in the folder."""
    task, data = make_task(config), read_data(config)
    mesh = make_mesh(config.mesh)
    check(config, task, data, mesh)
    console.print(data.description, highlight=False)
    claimed = claim(config, data)
    with (
        writing(config.out),
        failing_in_one_message(console),
        claimed,
        StopSignal() as stop,
    ):
        for name in config.optimizer:
            train(name, Run(config, task, data, mesh, stop, console))
            stop.check(f"Stopped after {name}")
        if is_first():
            report.write(config.out, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    again = "The same command carries on from the last checkpoint."
    try:
        chosen, config = parse(sys.argv[1:] if arguments is None else arguments)
        if chosen.compile_only:
            compile_only.run(config, chosen.topology)
            return 0
        if chosen.distributed:
            join_cluster()
        run(config, Console(quiet=not is_first()))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        print(again, file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if not others_are_gone(error):
            raise
        print(f"error: another process has gone: {error}", file=sys.stderr)
        print(again, file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"{stopped}. The same command carries on from here.", file=sys.stderr)
        return 128 + stopped.signum
    except KeyboardInterrupt:
        print(f"Stopped. {again}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    with leaving_in_time():
        sys.exit(main())
