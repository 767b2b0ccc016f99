"""The command line: python -m examples.pretrain."""

import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from examples.pretrain import report
from examples.pretrain.config import Config, UsageError
from examples.pretrain.data import read_corpus
from examples.pretrain.interrupt import Stopped, StopSignal
from examples.pretrain.rundir import claim
from examples.pretrain.train import train_arm


def run(config: Config, console: Console) -> None:
    """Trains the arms that are not finished, then reports on all."""
    corpus = read_corpus(config)
    console.print(
        f"{corpus.train.tokens:,} {corpus.unit}s to train on, "
        f"{corpus.val.tokens:,} to validate on, from {corpus.train.name}",
        highlight=False,
    )
    with claim(config, corpus), StopSignal() as stop:
        for name in config.arms:
            train_arm(name, config, corpus, stop, console)
            stop.check(f"Stopped after {name}")
        report.write(config.out, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    try:
        config = tyro.cli(Config, args=arguments, prog="python -m examples.pretrain")
        run(config, Console())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{stopped}. The same command carries on from here.", file=sys.stderr)
        return 128 + stopped.signum
    except KeyboardInterrupt:
        print(
            "Stopped. The same command starts from the last checkpoint.", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
