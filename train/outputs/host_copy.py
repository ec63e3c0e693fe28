"""Copy tensors to host memory in a thread, while training continues up to its next update of them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

CHUNK_BYTES = 128 << 20


class HostCopies:
    """Copies for checkpoints, in host memory that every save uses again: as many bytes as a save copies.

    From a GPU, a second stream fills one of two pinned chunks while the thread empties the other: pageable memory, which the
    copies are in, takes them at a fraction of the speed. Copying does not hold Python's lock.
    """

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Nothing is allocated before the first copies."""
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._buffers: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="host-copy")
        self._reserving: Future[None] | None = None
        self._under_way: Future[None] | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to make the memory for copies of such tensors; new memory is slow to write for the first time."""
        self._reserving = self._pool.submit(self._make, {name: (one.shape, one.dtype) for name, one in tensors.items()})

    def start(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy these tensors, overwriting the earlier copies by the same names.

        Return the copies, contiguous, which are complete when `wait` has returned. The tensors must not change before.
        """
        self.wait()
        if self._reserving is not None:
            self._reserving.result()
        for name, tensor in tensors.items():
            own = self._buffers.get(name)
            if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        pairs = [(tensor.detach(), self._buffers[name]) for name, tensor in tensors.items()]
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        done = None if device is None else torch.cuda.current_stream(device).record_event()
        self._under_way = self._pool.submit(self._copy, pairs, device, done)
        return {name: self._buffers[name] for name in tensors}

    def wait(self) -> None:
        """Wait until every copy is complete; any thread may.

        Raises:
            RuntimeError: if one could not be made.
        """
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        """Wait for the thread and end it."""
        self._pool.shutdown()

    def _make(self, shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        for name, (shape, dtype) in shapes.items():
            self._buffers[name] = torch.empty(shape, dtype=dtype).zero_()

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], device: torch.device | None, done: torch.cuda.Event | None) -> None:
        for source, target in pairs:
            if not source.is_cuda:
                target.copy_(source)
        if done is None:
            return
        with torch.cuda.device(device):  # pinning memory would begin to use the first one otherwise
            if not self._chunks:
                self._chunks = [torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(done)
            with torch.cuda.stream(stream):
                copy_through(self._chunks, [(source, target) for source, target in pairs if source.is_cuda])


def copy_through(chunks: list[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its host tensor in parts of a chunk's size, on the current stream; return when all are there."""
    filled: list[tuple[Tensor, Tensor, torch.cuda.Event | None] | None] = [None] * len(chunks)
    number = 0
    for source, target in pairs:
        # channels_last weights are turned on the device, one at a time
        given, taken = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (source, target))
        for begin in range(0, len(given), size := len(chunks[0])):
            turn = number % len(chunks)
            _empty(filled[turn])
            part = given[begin : begin + size]
            chunk = chunks[turn][: len(part)].copy_(part, non_blocking=True)
            filled[turn] = chunk, taken[begin : begin + size], _recorded(part)
            number += 1
    for turn in range(number, number + len(chunks)):
        _empty(filled[turn % len(chunks)])


def _recorded(part: Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(part.device).record_event() if part.is_cuda else None


def _empty(filled: tuple[Tensor, Tensor, torch.cuda.Event | None] | None) -> None:
    if filled is None:
        return
    chunk, target, copied = filled
    if copied is not None:
        copied.synchronize()
    target.copy_(chunk)
