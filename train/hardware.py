"""What a run asks of its machine: when a step was done, the memory's peak, graphs compiled, and a GPU's peak of FLOPs."""

from __future__ import annotations

import resource
import time

import torch

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets; the first name that a device's own name holds. Boards that
# draw less (PCIe, NVL) come before those whose name is a part of theirs.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H800", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("RTX 4090", 165e12),
)

Mark = float | torch.cuda.Event
"""A moment: of the host's clock, or of a CUDA device's own time, taken without waiting for it."""


def mark(device: torch.device) -> Mark:
    """Note this moment: on CUDA, when the device comes to it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Give the seconds between two moments of one kind; waits for a device that has not come to the second."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def peak_flops(device_name: str) -> float | None:
    """Give a GPU's dense bf16 peak in FLOP/s; None where its name is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    return next((peak for name, peak in PEAKS if name in device_name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Give the most memory that tensors have taken on a GPU so far; on CPU, that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def graphs_compiled() -> int:
    """Give how many graphs dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
