"""PyTorch's set-up: allocators of the CPU and the GPU, and the kernels for attention."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    import torch


T = TypeVar("T")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # named M_… in glibc
_KEPT_BYTES = 1 << 30
_LIBRARIES_SAY = ("CUDA out of memory", "CUDA error: out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
_FIRST_WITH_EXACT_PINNING = (2, 13)  # other versions refuse a setting that they do not know


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation, instead of returning it to the kernel and page-faulting it in again.

    Every layer allocates and frees a convolution output of about 10 MiB; with glibc's default thresholds each one is a new
    mapping. Does nothing with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def free_memory(device: torch.device) -> None:
    """Return what objects that are gone have left to the system or the device: a model's weights, before another is loaded."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def set_up_torch(environment: MutableMapping[str, str], torch_version: str) -> None:
    """Set up torch's allocators for a GPU, unless the user has. Call this before torch first looks for a GPU.

    Segments of GPU memory are extended instead of adding others: buckets of many sizes would leave gaps that none of the others
    fits into. Pinned buffers are as large as requested if torch, of `torch_version`, can do so: by default, it rounds them up
    to a power of two.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        return
    settings = ["expandable_segments:True"]
    if tuple(map(int, torch_version.split(".")[:2])) >= _FIRST_WITH_EXACT_PINNING:
        settings.append("pinned_max_round_threshold_mb:1")
    environment["PYTORCH_ALLOC_CONF"] = ",".join(settings)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch, or a library of CUDA that it calls, found no more device memory."""
    from torch import OutOfMemoryError  # here, since this module is imported before torch looks for a GPU

    return isinstance(error, OutOfMemoryError) or any(said in str(error) for said in _LIBRARIES_SAY)


class NoRoom(Exception):  # noqa: N818 - a result: nothing is wrong with the caller
    """Device memory has ended, in the words of torch or of a library of CUDA."""


def attempt(make: Callable[[], T]) -> T | NoRoom:
    """Return what `make` returns, or that device memory has ended: then it has left no tensor."""
    try:
        return make()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = NoRoom(str(error))  # the traceback of the error itself would keep the tensors of the failed call alive
    import torch

    torch.cuda.empty_cache()
    return found


# ------------------------------------------------------------------------------------------------------------------- attention
# The choice of PyTorch's kernels for attention.


def avoid_cudnn_attention() -> None:
    """Let this process compute attention by PyTorch's flash and memory-efficient kernels, not by cuDNN's.

    cuDNN's are PyTorch's first choice on Hopper and later. On an H200 with torch 2.11 and cuDNN 9.19 their backward pass fails
    for a Flux of 1,029 tokens ("mha_graph.execute … is_good()", an illegal memory access): `make gpu CHECKS=fp8`. Others report
    gradients of NaN if there is a mask and the length is 64 beyond a multiple of 128, also with torch 2.13 (pytorch's issue
    196678), and wrong outputs on Blackwell if there are fewer than eight key heads (its issue 193893). Nothing changes
    without a GPU.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
