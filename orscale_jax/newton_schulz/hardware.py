"""The rates of chips, by which plans for a mesh are compared. Imports no JAX."""

from typing import NamedTuple


class Link(NamedTuple):
    """What a chip sends over links of one kind, in one direction."""

    bytes_per_second: float
    seconds_per_message: float


class Hardware(NamedTuple):
    """The rates of one chip: products, links inside a slice or node, and between them."""

    flops_per_second: float
    fast: Link
    slow: Link


# What large products and transfers reach: two thirds of the peaks in data sheets, half of
# InfiniBand's, which gradients need as well. Plans hardly differ within a factor of two.
# Only thousands of TPUs feel the latency inside a slice, where messages travel at once.
# Virtual devices have none: small matrices are planned there as large ones elsewhere.
TPU_V5P = Hardware(3e14, fast=Link(1.5e11, 2e-9), slow=Link(6.25e9, 2e-5))
H100 = Hardware(6e14, fast=Link(3e11, 2e-6), slow=Link(2.5e10, 5e-6))
VIRTUAL = Hardware(3e14, fast=Link(1.5e11, 0.0), slow=Link(6.25e9, 0.0))
