"""What is trained on what: a language model on text, or a vision model on images."""

from collections.abc import Callable

from examples.pretrain.config import Config
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.models.moonlight_config import MoonlightConfig
from examples.pretrain.task import Data, Task
from examples.pretrain.tasks.decoder import DecoderTask
from examples.pretrain.tasks.images import ImageTask, read_images
from examples.pretrain.tasks.mixture import MixtureTask
from examples.pretrain.tasks.text import read_text
from examples.vision.davidnet import DavidNetConfig

_TASKS: dict[type, Callable[[Config], Task]] = {
    DenseConfig: DecoderTask,
    MoonlightConfig: MixtureTask,
    DavidNetConfig: ImageTask,
}


def make_task(config: Config) -> Task:
    """The model of a run and its loss."""
    return _TASKS[type(config.model)](config)


def read_data(config: Config) -> Data:
    """What the model is trained and validated on.

    Raises:
      UsageError: If files are missing, corrupt, or too few for a batch.
    """
    images = isinstance(config.model, DavidNetConfig)
    return read_images(config) if images else read_text(config)
