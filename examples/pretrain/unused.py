"""Options that would change nothing."""

from collections.abc import Iterator

from examples.pretrain.config import Config, ModelConfig
from examples.pretrain.errors import UsageError
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.models.moonlight import MoonlightConfig
from examples.pretrain.optimizers import find_optimizer
from examples.vision.davidnet import DavidNetConfig

_LANGUAGE = (DenseConfig, MoonlightConfig)
# Options of a recipe that some models read.
_READ_BY: dict[str, tuple[type[ModelConfig], ...]] = {
    "seq_len": _LANGUAGE,
    "tokens": _LANGUAGE,
    "qkv": (DenseConfig,),
    "router": (MoonlightConfig,),
    "balance_rate": (MoonlightConfig,),
    "cutout": (DavidNetConfig,),
    "epochs": (DavidNetConfig,),
}
# And those that some optimizers take.
_TAKEN = "momentum r_min r_max adam_learning_rate adam_b1 adam_b2 weight_decay".split()


def refuse_unused(config: Config, default: Config) -> None:
    """Refuses an option that was given and that nothing reads.

    Raises:
      UsageError: If there is one in which `config` differs from `default`.
    """
    for name, why in _unused(config):
        value = getattr(config.recipe, name)
        if value != getattr(default.recipe, name):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {value} would change nothing: {why}.")


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    """The recipe's options that are not read, and why."""
    for name, models in _READ_BY.items():
        if not isinstance(config.model, models):
            yield name, "this model does not have it"
    steps = config.recipe.steps
    if steps is not None:
        for name in ("tokens", "epochs"):
            yield name, f"--steps {steps} decides. Add --steps None"
    taken = {name for optimizer in config.optimizer for name in _taken_by(optimizer)}
    for name in _TAKEN:
        if name not in taken:
            yield name, f"{', '.join(config.optimizer)} does not take it"


def _taken_by(name: str) -> set[str]:
    optimizer = find_optimizer(name)
    beside_matrices = {"adam_learning_rate"} if optimizer.has_matrices else set()
    return {*optimizer.given.values()} | beside_matrices
