"""Chips and links by their data sheets, and a device's chip by its name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU's data sheet; bytes, bytes a second, dense operations a second, all decimal.

    names    CUDA's names for it
    flops    in bfloat16, without sparsity
    nvlink   to other GPUs of its node, in one direction
    pcie     to the host's memory, in one direction
    """

    name: str
    names: tuple[str, ...]
    memory: float
    bandwidth: float
    flops: float
    nvlink: float
    pcie: float

    def describe(self) -> str:
        """The numbers in words."""
        return (
            f"{self.name}: {self.memory / 1e9:.0f} GB, {self.bandwidth / 1e12:g} TB/s, {self.flops / 1e12:.0f} TFLOP/s"
        )


PCIE_5 = 64e9  # 16 lanes
CHIPS = {
    "h100": Chip(
        name="H100",
        names=("NVIDIA H100 80GB HBM3",),
        memory=80e9,
        bandwidth=3.35e12,
        flops=989e12,
        nvlink=450e9,
        pcie=PCIE_5,
    ),
    "h200": Chip(
        name="H200",
        names=("NVIDIA H200",),
        memory=141e9,
        bandwidth=4.8e12,
        flops=989e12,
        nvlink=450e9,
        pcie=PCIE_5,
    ),
}
"""The SXM modules. Cards of the same generation with other memories and clocks (PCIe, NVL) are not among them."""

LINKS = {"100 Gb/s NIC": 12.5e9, "400 Gb/s NIC": 50e9}
"""Bytes a second between nodes, beside each chip's own links."""


def chip_of(device_name: str) -> Chip | None:
    """The chip that CUDA calls by this name, `None` for one whose data sheet is not here."""
    return next((chip for chip in CHIPS.values() if device_name in chip.names), None)
