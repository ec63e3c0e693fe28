"""The device that a loader delivers to."""

from __future__ import annotations

import torch

from bucketline.command_line import counted
from bucketline.errors import UsageError


def device_of(device: torch.device | str | int | None) -> torch.device:
    """Return the device of a loader's batches: the CPU for None, a CUDA device for its number."""
    expected = "expected cpu, cuda, cuda:N, N or None"
    if device is None:
        return torch.device("cpu")
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise UsageError(f"device is {device!r:.80}, {expected}")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise UsageError(f"device is {device!r:.80}, {expected}") from error
    if found.type not in ("cpu", "cuda") or (found.index or 0) < 0:
        raise UsageError(f"device is {device!r:.80}, {expected}")
    if found.type == "cuda" and (found.index or 0) >= (num_gpus := torch.cuda.device_count()):
        raise UsageError(f"device is {found}, and this process sees {counted(num_gpus, 'GPU')}, {expected}; see nvidia-smi")
    return found
