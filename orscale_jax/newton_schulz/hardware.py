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


# What large products and transfers reach. The peaks are 459 TFLOP/s in bfloat16, 90 GB/s
# each way over each of a v5p's links, 6.25 GB/s to other slices (Austin et al., *How to
# Scale Your Model*, 2025, "TPUs"); 989 TFLOP/s and 450 GB/s each way over NVLink
# (NVIDIA's data sheet of the H100 SXM), 400 Gbit/s of InfiniBand for each GPU of a DGX
# H100 (its user guide). The rates are about two thirds of these, but half of
# InfiniBand's, which gradients need as well, and all of the 6.25 GB/s. Latencies of GPUs
# are of the order of those in NCCL's tuning table; those of TPUs are chosen: messages in
# a slice travel at once, so that only groups of thousands of chips feel them. Virtual
# devices have none: small matrices are planned there as large ones on accelerators.
TPU_V5P = Hardware(3e14, fast=Link(1.5e11, 2e-9), slow=Link(6.25e9, 2e-5))
H100 = Hardware(6e14, fast=Link(3e11, 2e-6), slow=Link(2.5e10, 5e-6))
VIRTUAL = Hardware(3e14, fast=Link(1.5e11, 0.0), slow=Link(6.25e9, 0.0))
