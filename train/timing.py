"""What a step costs: points in time on the device, which nothing waits for until they are read, and compiled graphs."""

from __future__ import annotations

import time

import torch
from torch._dynamo.utils import counters

Mark = float | torch.cuda.Event
"""A point in time: the host's clock, or a CUDA event, recorded without a sync."""


def mark(device: torch.device) -> Mark:
    """Record the current time; on CUDA, the time at which the device reaches this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks of the same kind; wait until the device has reached the second."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def graphs_compiled() -> int:
    """Return the number of graphs that dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
