"""Devices, links and clusters: peak rates from data sheets, and the fractions of them that programs reach.

Every peak rate has its source next to it. `Efficiency` holds the fractions: one set for each kind of device, the same
for all models and layouts on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from samestep.errors import UserError, closest
from samestep.limits import MOST_RANKS, check_whole

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of peak rates that a kind of device reaches, and fixed times. `accuracy` measures their errors."""

    matmul: float  # of peak FLOPs per second, in a large matrix product without a partly filled wave
    bandwidth: float  # of peak memory bandwidth, in a pass over large tensors
    kernel_seconds: float  # from the end of one kernel to full speed of the next
    launch_seconds: float  # the host's time to launch one operator, in Python and in C++
    collective_seconds: float  # until all ranks have entered a collective and its kernel runs
    link: float  # of a link's peak rate, as a collective's bus bandwidth
    low_precision_matmul: float = 0.0  # as `matmul`, of the peak rate of fp8 and fp4
    sources: Mapping[str, str] = field(hash=False)  # source of each number above, by name


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one CPU core of a machine that was measured."""

    name: str
    kind: str  # devices of a kind share an Efficiency: a100, hopper, blackwell
    flops: Mapping[str, float] = field(hash=False)  # dense FLOPs per second, by precision
    memory: float  # bytes
    bandwidth: float  # bytes per second of its memory
    processors: int  # streaming multiprocessors, over which tiles of a matrix product are distributed
    watts: float
    efficiency: Efficiency
    source: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a link from one device to the others that it reaches."""

    name: str
    rate: float  # bytes per second and device
    latency: float  # seconds per hop of a collective
    source: str


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal devices, with a link inside each node and one between nodes, whose fat tree may be tapered."""

    device: Device
    devices: int
    node_size: int
    inside: Link
    between: Link
    pod_nodes: int = 0  # nodes in one pod of the fat tree, which has the full rate; 0: all
    taper: float = 1.0  # rate between pods as a fraction of that inside one

    def __post_init__(self) -> None:
        check_whole("--devices", self.devices, most=MOST_RANKS)
        if self.devices > self.node_size and self.devices % self.node_size:
            below = self.devices // self.node_size * self.node_size
            raise UserError(
                f"--devices is {self.devices}, no product of nodes and {self.node_size} devices a node; "
                f"use {below} or {below + self.node_size}, or give --node-size"
            )

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.node_size)

    def resized(self, devices: int) -> "ClusterSpec":
        return replace(self, devices=devices)


_MAMF = "stas00/ml-engineering, compute/accelerator, table of maximum achievable matmul FLOPS"
_SUSTAINED = "the rest is lost to clocks under the power limit, as rows of whole trainings have it"
_PASSES = "large copies reach 85 to 90 % of the promise; passes of a training less, with casts, odd strides and masks"
_HOST = "eager PyTorch issues an operator, with autograd's part and its Python, in 10 to 25 µs"
_MEETING = (
    "ranks reach a collective at different times, and its kernel starts 20 to 60 µs later (nccl-tests, small sizes)"
)

_A100 = Efficiency(
    matmul=0.80,
    bandwidth=0.72,
    kernel_seconds=4e-6,
    launch_seconds=18e-6,
    collective_seconds=150e-6,
    link=0.75,
    sources={
        "matmul": f"at most 0.859, 267.9 of 312 TFLOP/s ({_MAMF}); {_SUSTAINED}",
        "bandwidth": _PASSES,
        "kernel_seconds": "start, fill and drain of a kernel",
        "launch_seconds": _HOST,
        "collective_seconds": _MEETING,
        "link": "205 to 230 of 300 GB/s bus bandwidth: NVIDIA/nccl-tests issues 149 and 178",
    },
)
_HOPPER = Efficiency(
    matmul=0.71,
    bandwidth=0.75,
    kernel_seconds=4e-6,
    launch_seconds=12e-6,
    collective_seconds=50e-6,
    link=0.82,
    low_precision_matmul=0.60,
    sources={
        "matmul": f"at most 0.801, 792.1 of 989 TFLOP/s ({_MAMF}); {_SUSTAINED}",
        "bandwidth": _PASSES,
        "kernel_seconds": "start, fill and drain of a kernel",
        "launch_seconds": _HOST,
        "collective_seconds": _MEETING,
        "link": "370 of 450 GB/s: NVIDIA/nccl-tests issue 212",
        "low_precision_matmul": "includes the casts and scales of each product",
    },
)
_BLACKWELL = replace(
    _HOPPER,
    matmul=0.69,
    low_precision_matmul=0.55,
    sources={
        **_HOPPER.sources,
        "matmul": f"at most 0.776, 1745 of 2250 TFLOP/s ({_MAMF}); {_SUSTAINED}",
        "link": "taken over from the generation before",
    },
)

_A100_SHEET = "NVIDIA A100 data sheet (2021)"
_H100_SHEET = "NVIDIA H100 data sheet (2023)"
_H200_SHEET = "NVIDIA H200 data sheet (2024)"
_B200_SHEET = "NVIDIA DGX B200 data sheet (2024), an eighth"
_B300_SHEET = "NVIDIA DGX B300 data sheet (2025), an eighth"
_GB200_SHEET = "NVIDIA GB200 NVL72 data sheet (2024), a 72nd"
_GB300_SHEET = "NVIDIA GB300 NVL72 data sheet (2025), a 72nd"

_A100_FLOPS = {"fp32": 156e12, "bf16": 312e12, "fp16": 312e12}
_HOPPER_FLOPS = {"fp32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12}
_B200_FLOPS = {"fp32": 1.125e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15}
_B300_FLOPS = {"fp32": 1.125e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15, "fp4": 13.5e15}
_GB200_FLOPS = {"fp32": 1.25e15, "bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15, "fp4": 10e15}
_GB300_FLOPS = {"fp32": 1.25e15, "bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15, "fp4": 15e15}

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100-40gb", kind="a100", flops=_A100_FLOPS, memory=40 * 2**30, bandwidth=1.555e12,
            processors=108, watts=400, efficiency=_A100, source=_A100_SHEET,
        ),
        Device(
            name="a100-80gb", kind="a100", flops=_A100_FLOPS, memory=80 * 2**30, bandwidth=2.039e12,
            processors=108, watts=400, efficiency=_A100, source=_A100_SHEET,
        ),
        Device(
            name="h100", kind="hopper", flops=_HOPPER_FLOPS, memory=80 * 2**30, bandwidth=3.35e12,
            processors=132, watts=700, efficiency=_HOPPER, source=_H100_SHEET,
        ),
        Device(
            name="h200", kind="hopper", flops=_HOPPER_FLOPS, memory=141e9, bandwidth=4.8e12,
            processors=132, watts=700, efficiency=_HOPPER, source=_H200_SHEET,
        ),
        Device(
            name="b200", kind="blackwell", flops=_B200_FLOPS, memory=180e9, bandwidth=8e12,
            processors=148, watts=1000, efficiency=_BLACKWELL, source=_B200_SHEET,
        ),
        Device(
            name="b300",
            kind="blackwell",
            flops=_B300_FLOPS,
            memory=270e9,
            bandwidth=8e12,
            processors=148,
            watts=1100,
            efficiency=_BLACKWELL,
            source=_B300_SHEET,
        ),
        Device(
            name="gb200", kind="blackwell", flops=_GB200_FLOPS, memory=186e9, bandwidth=8e12,
            processors=148, watts=1200, efficiency=_BLACKWELL, source=_GB200_SHEET,
        ),
        Device(
            name="gb300", kind="blackwell", flops=_GB300_FLOPS, memory=279e9, bandwidth=8e12,
            processors=148, watts=1400, efficiency=_BLACKWELL, source=_GB300_SHEET,
        ),
    )
}  # fmt: skip

# Other names of the same devices in published tables.
_ALIASES = {
    "a100": "a100-80gb",
    "a100-sxm-80gb": "a100-80gb",
    "a100-sxm-40gb": "a100-40gb",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "h100-sxm-80gb": "h100",
    "h200-sxm": "h200",
}

_NCCL_LATENCY = 4e-6  # per hop inside a node; NCCL's tuning table (src/graph/tuning.cc) has 3 to 5 µs
_NET_LATENCY = 15e-6  # per hop over the network, with switch and both adapters; the same table: 14 to 18 µs

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(name="nvlink3", rate=300e9, latency=_NCCL_LATENCY, source=f"{_A100_SHEET}: 600 GB/s both ways"),
        Link(name="nvlink4", rate=450e9, latency=_NCCL_LATENCY, source=f"{_H100_SHEET}: 900 GB/s both ways"),
        Link(name="nvlink5", rate=900e9, latency=_NCCL_LATENCY, source=f"{_B200_SHEET}: 1.8 TB/s both ways"),
        Link(name="pcie4", rate=32e9, latency=6e-6, source="PCI Express 4.0 x16"),
        Link(name="pcie5", rate=64e9, latency=6e-6, source="PCI Express 5.0 x16"),
        Link(name="hdr", rate=25e9, latency=_NET_LATENCY, source="InfiniBand HDR: 200 Gbit/s a device"),
        Link(name="ndr", rate=50e9, latency=_NET_LATENCY, source="InfiniBand NDR: 400 Gbit/s a device"),
        Link(name="xdr", rate=100e9, latency=_NET_LATENCY, source="InfiniBand XDR: 800 Gbit/s a device"),
        Link(name="ethernet-10", rate=1.25e9, latency=50e-6, source="10 Gbit/s a device"),
        Link(name="ethernet-100", rate=12.5e9, latency=30e-6, source="100 Gbit/s a device"),
        Link(name="ethernet-200", rate=25e9, latency=20e-6, source="RoCE: 200 Gbit/s a device"),
        Link(name="ethernet-400", rate=50e9, latency=20e-6, source="RoCE: 400 Gbit/s a device"),
    )
}

_RACK = 72  # devices in the NVLink domain of an NVL72


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """One device's share of its host: the link to the host's memory, and the memory's bandwidth."""

    link: str  # name of the link between the device and the host's memory
    bandwidth: float  # bytes per second of the host's memory, divided by the number of its devices
    source: str


HOSTS: Mapping[str, HostShare] = {
    "a100": HostShare(
        link="pcie4", bandwidth=409.6e9 / 8, source="DGX A100: 2 AMD 7742, 8 channels of DDR4-3200 each, 8 devices"
    ),
    "hopper": HostShare(
        link="pcie5", bandwidth=614.4e9 / 8, source="DGX H100: 2 Intel 8480C, 8 channels of DDR5-4800 each, 8 devices"
    ),
    "blackwell": HostShare(
        link="pcie5", bandwidth=716.8e9 / 8, source="DGX B200: 2 Intel 8570, 8 channels of DDR5-5600 each, 8 devices"
    ),
}  # by kind of device
HOST_EFFICIENCY = 0.8  # of both peak rates, in large copies and passes (as for device memory: 75 to 90 %)

# The usual nodes of each device: devices per node, the link inside, the link between nodes.
_USUAL_NODES: Mapping[str, tuple[int, str, str]] = {
    "a100-40gb": (8, "nvlink3", "hdr"),
    "a100-80gb": (8, "nvlink3", "hdr"),
    "h100": (8, "nvlink4", "ndr"),
    "h200": (8, "nvlink4", "ndr"),
    "b200": (8, "nvlink5", "ndr"),
    "b300": (8, "nvlink5", "xdr"),
    "gb200": (72, "nvlink5", "ndr"),
    "gb300": (72, "nvlink5", "xdr"),
}


def device_of(name: str) -> Device:
    """Look up a device by name or alias. Raises UserError for an unknown name, with similar ones."""
    device = DEVICES.get(_ALIASES.get(name.lower(), name.lower()))
    if device is None:
        raise UserError(f'--gpu is "{name}"; {closest(name, [*DEVICES, *_ALIASES])}')
    return device


def cluster_of(
    gpu: str, devices: int, *, node_size: int | None = None, inside: str | None = None, between: str | None = None
) -> ClusterSpec:
    """A cluster of a known device, with its usual node size and links unless others are given.

    Raises UserError for an unknown device or link, and if the nodes can't have `devices` devices in total.
    """
    device = device_of(gpu)
    usual_size, usual_inside, usual_between = _USUAL_NODES[device.name]
    size = usual_size if node_size is None else node_size
    check_whole("--node-size", size, most=MOST_RANKS)
    if node_size is None and size == _RACK and devices > size and devices % size:
        # Racks of 72 are often used in part: 64 devices per rack if the number of devices is a multiple of that.
        size = next((part for part in (64, 32, 16, 8, 4) if part < size and devices % part == 0), size)
    return ClusterSpec(
        device=device,
        devices=devices,
        node_size=size,
        inside=link_of(inside or usual_inside),
        between=link_of(between or usual_between),
    )


def link_of(name: str) -> Link:
    """Look up a link by name. Raises UserError for an unknown name, with similar ones."""
    if name.lower() not in LINKS:
        raise UserError(f'link "{name}" is not known; {closest(name, LINKS)}')
    return LINKS[name.lower()]
