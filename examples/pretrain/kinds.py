"""The kinds of runs: a dense decoder or Moonlight on text, a vision model on images."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from examples.pretrain.config import Config
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.moonlight.config import MoonlightConfig
from examples.pretrain.moonlight.task import MixtureTask
from examples.pretrain.recipe import DecoderRecipe, ImageRecipe, MixtureRecipe
from examples.pretrain.task import Data, Task
from examples.pretrain.tasks.decoder import DecoderTask
from examples.pretrain.tasks.images import ImageTask, read_images
from examples.pretrain.tasks.text import read_text
from examples.vision.davidnet import DavidNetConfig


class Kind(NamedTuple):
    """What goes together.

    Attributes:
      model: The class of the model's sizes.
      recipe: The class of the recipe.
      task: Makes the model of a run and its loss.
      read: Reads what it is trained and validated on.
    """

    label: str
    model: type
    recipe: type
    task: Callable[[Config], Task]
    read: Callable[[Config], Data]


_DENSE = Kind("Decoder", DenseConfig, DecoderRecipe, DecoderTask, read_text)
_MOONLIGHT = Kind(
    "Mixture of experts", MoonlightConfig, MixtureRecipe, MixtureTask, read_text
)
_VISION = Kind("DavidNet", DavidNetConfig, ImageRecipe, ImageTask, read_images)
_BY_MODEL = {kind.model: kind for kind in (_DENSE, _MOONLIGHT, _VISION)}


def make_task(config: Config) -> Task:
    """The model of a run and its loss."""
    return _BY_MODEL[type(config.model)].task(config)


def read_data(config: Config) -> Data:
    """What the model is trained and validated on.

    Raises:
      UsageError: If files are missing, corrupt, or too few for a batch.
    """
    return _BY_MODEL[type(config.model)].read(config)


def recorded_kind(facts: Mapping[str, Any]) -> Kind:
    """The kind of run that a `config.json` describes, by what only its model has."""
    if "model.widths" in facts:
        return _VISION
    return _MOONLIGHT if "model.experts" in facts else _DENSE
