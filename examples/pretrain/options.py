"""Options of the recipe on a command line: which exclude or replace each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.optimizers import OPTIMIZERS, find_optimizer

# Each of them decides how many steps there are.
_LENGTHS = ("steps", "tokens", "epochs")


def replacing_steps(arguments: Sequence[str]) -> list[str]:
    """The arguments, so that tokens or epochs among them replace a recipe's steps."""
    given = _names(arguments)
    replaced = given & {"tokens", "epochs"} and "steps" not in given
    return [*arguments, *(["--steps", "None"] if replaced else [])]


def refuse_useless(arguments: Sequence[str], config: Config) -> None:
    """Refuses options of the recipe that nothing would read.

    Args:
      arguments: The command line.
      config: The run that it gives.

    Raises:
      UsageError: If more than one of --steps, --tokens and --epochs is given, or a
        hyperparameter that none of the optimizers takes.
    """
    values = {name: getattr(config.recipe, name, None) for name in _names(arguments)}
    given = {name: value for name, value in values.items() if value is not None}
    _refuse_two_lengths(given)
    _refuse_not_taken(given, config.optimizer)


def _refuse_two_lengths(given: Mapping[str, Any]) -> None:
    lengths = [_option(name, given[name]) for name in _LENGTHS if name in given]
    if len(lengths) > 1:
        raise UsageError(
            f"{' and '.join(lengths)}: each decides how many steps there are. Pass only "
            "one of them."
        )


def _refuse_not_taken(given: Mapping[str, Any], optimizers: Sequence[str]) -> None:
    taken = {n for o in optimizers for n in find_optimizer(o).hyperparameters}
    for name, value in given.items():
        takers = [o for o, entry in OPTIMIZERS.items() if name in entry.hyperparameters]
        if takers and name not in taken:
            raise UsageError(
                f"{_option(name, value)} would change nothing with --optimizer "
                f"{' '.join(optimizers)}. Leave it out, or choose an optimizer that "
                f"takes it, such as {takers[0]}."
            )


def _names(arguments: Sequence[str]) -> set[str]:
    """The options on a command line, as fields are called."""
    flags = (text.partition("=")[0] for text in arguments if text.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def _option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"
