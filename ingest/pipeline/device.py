"""Device of the encoders, and number of CPU cores per process."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    import torch


def refuse_no_cuda(name: str) -> None:
    """Check the device that `--device` names, as far as that is known without importing torch: by its build, and the driver."""
    if not name.startswith("cuda"):
        return
    build = importlib.metadata.version("torch").partition("+")[2]
    try:
        if build != "cpu" and not build.startswith("rocm"):
            ctypes.CDLL("libcuda.so.1")
    except OSError:
        build = "cpu"
    if build == "cpu":
        raise _no_cuda(name)


def _no_cuda(name: str) -> UsageError:
    return UsageError(f"--device {name}: this machine has no CUDA device that torch can use")


def chosen_device(name: str, local_rank: int) -> torch.device:
    """Return the device that `--device` names; for `auto`, this rank's CUDA device if there is one, else the CPU.

    More ranks than GPUs share them.
    """
    import torch

    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r} is not a device; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise _no_cuda(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UsageError(f"--device {name}: this machine has {count} CUDA devices, expected cuda:0 to cuda:{count - 1}")
    return device


def share_of_cores(local_world_size: int) -> int:
    """Return the number of cores per process, if `local_world_size` processes share the available cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)
