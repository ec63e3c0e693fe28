"""The device that a loader delivers to."""

from __future__ import annotations

import torch

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.option_types import unlike


def device_of(given: torch.device | str | int | None) -> torch.device:
    """Return the device that is meant: the CPU for None, and a GPU for a number.

    Raises:
        UsageError: if there is no such device, or batches cannot be delivered to it.
    """
    expected = "'cpu', 'cuda', 'cuda:1', 1 or a torch.device"
    if given is None:
        return torch.device("cpu")
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise unlike("device", given, expected) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"device is {device}, expected cpu or cuda; deliver to cpu and copy the batch: batch.to({str(device)!r})"
        )
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise UsageError(
            f"device is {device}, and this process sees {counted(num_gpus, 'GPU')}, expected one of these, or cpu; see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return device
