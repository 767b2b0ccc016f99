"""The rates by which plans are compared: one table, a row for each platform.

Links are those of one chip, in one direction. Rates are what large transfers and products
reach; latencies are what each message of a collective adds.

========  ==========  ===================  ==================  ======================
platform  products    fast links           slow links          stands for
========  ==========  ===================  ==================  ======================
``tpu``   300 TFLOP/s 150 GB/s, 0.002 µs   6.25 GB/s, 20 µs    v5p: ICI in a slice,
                                                               the data-center
                                                               network between slices
``gpu``   600 TFLOP/s 300 GB/s, 2 µs       25 GB/s, 5 µs       H100: NVLink in a node,
                                                               InfiniBand NDR between
``cpu``   as ``tpu``  as ``tpu``, 0 µs     as ``tpu``, 0 µs    virtual devices
========  ==========  ===================  ==================  ======================

Sources of the peaks: 459 TFLOP/s in bfloat16, 90 GB/s each way over each of a v5p's
links, 6.25 GB/s to other slices (Austin et al., *How to Scale Your Model*, 2025, "TPUs");
989 TFLOP/s, 450 GB/s each way (NVIDIA's data sheet of the H100 SXM), 400 Gbit/s of
InfiniBand for each GPU of a DGX H100 (its user guide). The rates are about two thirds of
these peaks, but half of InfiniBand's, which gradients need as well, and all of the 6.25
GB/s. Latencies of GPUs are of the order of those in NCCL's tuning table; those of TPUs
are chosen, not measured: messages in a slice travel at once, so that only groups of
thousands of chips feel them. Virtual devices have none, so that small matrices are
planned there as large ones are on accelerators.

Nothing here imports JAX.
"""

from typing import NamedTuple


class Link(NamedTuple):
    """Links of one kind.

    Attributes:
      bytes_per_second: The bytes that a chip sends in a second.
      seconds_per_message: The time that a message adds to that.
    """

    bytes_per_second: float
    seconds_per_message: float


class Hardware(NamedTuple):
    """The rates of one chip.

    Attributes:
      flops_per_second: The FLOPs of matrix products in a second.
      fast: The links inside a slice or a node.
      slow: The links between slices or nodes.
    """

    flops_per_second: float
    fast: Link
    slow: Link


TPU_V5P = Hardware(3e14, fast=Link(1.5e11, 2e-9), slow=Link(6.25e9, 2e-5))
H100 = Hardware(6e14, fast=Link(3e11, 2e-6), slow=Link(2.5e10, 5e-6))
VIRTUAL = Hardware(3e14, fast=Link(1.5e11, 0.0), slow=Link(6.25e9, 0.0))
