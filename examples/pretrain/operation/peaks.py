"""Peak FLOPs per second of accelerators."""

# Of dense products in bfloat16, FLOP/s of a device, as the makers state them. The first
# part of the name that fits counts.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The peak of a device by its name, if it is in the table."""
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)
