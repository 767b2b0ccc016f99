"""What a plan costs each device: operations, bytes and messages. JAX is not imported."""

from typing import NamedTuple

from orscale_jax.distributed.hardware import VIRTUAL, Hardware
from orscale_jax.newton_schulz.restarts import is_cheaper


class Traffic(NamedTuple):
    """What each device sends over the links of a mesh.

    Attributes:
      fast_bytes: The bytes over fast links, inside a slice.
      slow_bytes: The bytes over slow links, to other slices.
      fast_messages: The number of messages over fast links.
      slow_messages: The number of messages over slow links.
    """

    fast_bytes: int = 0
    slow_bytes: int = 0
    fast_messages: int = 0
    slow_messages: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes over links of both kinds."""
        return self.fast_bytes + self.slow_bytes

    def plus(self, other: "Traffic") -> "Traffic":
        """The traffic of both."""
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> "Traffic":
        """The traffic of ``count`` such exchanges."""
        return Traffic(*(count * entry for entry in self))


def all_to_all(nbytes: int, slices: int, devices: int) -> Traffic:
    """Send ``nbytes`` in equal parts to the devices of some slices.

    First to one device in every other slice, for all devices there; these pass it on.

    Args:
      nbytes: The bytes of each device, of which its own part stays.
      slices: The number of slices.
      devices: The number of devices in each of them.
    """
    return Traffic(
        fast_bytes=nbytes * (devices - 1) // devices,
        slow_bytes=nbytes * (slices - 1) // slices,
        fast_messages=devices - 1,
        slow_messages=slices - 1,
    )


def all_gather(nbytes: int, slices: int, devices: int) -> Traffic:
    """Receive ``nbytes`` from each of the devices of some slices.

    First from one device in every other slice, then all of it from the others here.
    """
    return Traffic(
        fast_bytes=nbytes * slices * (devices - 1),
        slow_bytes=nbytes * (slices - 1),
        fast_messages=devices - 1,
        slow_messages=slices - 1,
    )


def all_reduce(added: int, gathered: int, devices: int, *, slow: bool) -> Traffic:
    """Add arrays of all devices in parts, and gather the sums, around a ring.

    Args:
      added: The bytes of an array whose parts are added.
      gathered: The bytes of the array of sums.
      devices: The number of devices.
      slow: Whether a link of the ring is slow: all bytes pass over every link.
    """
    nbytes = (added + gathered) * (devices - 1) // devices
    messages = 2 * (devices - 1)
    return Traffic(0, nbytes, 0, messages) if slow else Traffic(nbytes, 0, messages, 0)


class CostModel(NamedTuple):
    """The costs by which plans are compared.

    Attributes:
      hardware: The rates of one chip.
      steps: The number of Newton–Schulz steps.
      gram_segments: The number of times that the Gram form computes a Gram matrix of X,
        where that form is cheaper; None for the plain iteration.
    """

    hardware: Hardware = VIRTUAL
    steps: int = 5
    gram_segments: int | None = None

    def segments(self, m: int, n: int) -> int:
        """How often the Gram matrix of an m×n matrix is computed from it."""
        if self.gram_segments is None or not is_cheaper(m, n):
            return self.steps
        return self.gram_segments

    def cost(self, flops: int, traffic: Traffic) -> int:
        """The FLOPs of the time that operations and traffic take, one after another.

        Integers, so that all processes find the same plan.
        """
        rate, fast, slow = self.hardware
        each = (
            rate / fast.bytes_per_second,
            rate / slow.bytes_per_second,
            rate * fast.seconds_per_message,
            rate * slow.seconds_per_message,
        )
        return flops + sum(
            count * round(flops_of_each)
            for count, flops_of_each in zip(traffic, each, strict=True)
        )

    def seconds(self, cost: int) -> float:
        """The time of a cost."""
        return cost / self.hardware.flops_per_second
