"""Throughput and how much of the hardware's peak it is."""

import dataclasses

import jax

from examples.pretrain.operation.peaks import peak_flops
from examples.pretrain.task import Task


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What some steps have come to.

    Attributes:
      items_per_second: Tokens or images, over all devices.
      item: Which of the two.
      utilization: Model FLOPs per second as a share of the peak (MFU); None where the
        model's FLOPs or the device's peak are not known.
    """

    items_per_second: float
    item: str
    utilization: float | None

    def __str__(self) -> str:
        text = f"{self.items_per_second:,.0f} {self.item}/s"
        if self.utilization is None:
            return text
        return f"{text}  {self.utilization:.1%} MFU"


def throughput(task: Task, examples: int, seconds: float) -> Throughput:
    """The throughput of examples that took so long."""
    utilization = None
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is not None and task.flops_per_example is not None:
        achieved = task.flops_per_example * examples / seconds
        utilization = achieved / (peak * jax.device_count())
    items = examples * task.items_per_example / seconds
    return Throughput(items, task.item, utilization)
