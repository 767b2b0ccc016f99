"""Options of the recipe on a command line: which exclude or replace each other."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.optimizers import OPTIMIZERS, find_optimizer

# Each of them decides how many steps there are.
_LENGTHS = ("steps", "tokens", "epochs")
# What these options are where they do nothing.
_OFF = {"per_head": False, "router": "matrix", "qkv": "matrix", "measure_every": None}


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
      UsageError: If more than one of --steps, --tokens and --epochs is given, a
        hyperparameter that none of the optimizers takes, or an option for matrices or
        readings that there are not.
    """
    values = {name: getattr(config.recipe, name, None) for name in _names(arguments)}
    given = {name: value for name, value in values.items() if value is not None}
    _refuse_two_lengths(given)
    _refuse_not_taken(given, config.optimizer)
    _refuse_unused(_names(arguments), config)


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


def _refuse_unused(names: Set[str], config: Config) -> None:
    """Refuses what is for matrices, or for readings, where there are none."""
    entries = [find_optimizer(name) for name in config.optimizer]
    unread = not any(entry.readable for entry in entries)
    without = not any(entry.has_matrices for entry in entries)
    useless = {
        "per_head": without,
        "router": without,
        "qkv": without or not getattr(config.model, "fused_qkv", False),
        "measure_every": unread,
        "measure_batches": unread or config.measure_every is None,
    }
    for name in names & {name for name, is_useless in useless.items() if is_useless}:
        value = getattr(config.recipe, name, getattr(config, name, None))
        if value != _OFF.get(name):
            raise UsageError(
                f"{_option(name, value)} would change nothing with --optimizer "
                f"{' '.join(config.optimizer)} and the other options. Leave it out."
            )


def _names(arguments: Sequence[str]) -> set[str]:
    """The options on a command line, as fields are called."""
    flags = (text.partition("=")[0] for text in arguments if text.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def _option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"
