"""Copy tensors from a device to host memory through two pinned chunks: one is filled while a thread empties the other."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

CHUNK_BYTES = 128 << 20


class HostCopies:
    """Copies for a checkpoint. Pageable memory, which they end in, takes copies from a device at a fraction of its speed."""

    def __init__(self, *, is_pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunks = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        self._emptied: list[Future[torch.Tensor] | None] = [None, None]
        self._number = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="host-copy")

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy in host memory, which is complete once `finish` has returned."""
        source = tensor.contiguous().view(-1).view(torch.uint8)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        target = host.view(-1).view(torch.uint8)
        for begin in range(0, len(source), size := len(self._chunks[0])):
            if (emptied := self._emptied[self._number % 2]) is not None:
                emptied.result()
            part = source[begin : begin + size]
            chunk = self._chunks[self._number % 2][: len(part)].copy_(part, non_blocking=True)
            self._emptied[self._number % 2] = self._pool.submit(_empty, chunk, target[begin : begin + size], _copied(part))
            self._number += 1
        return host

    def finish(self) -> None:
        """Wait until every copy is complete."""
        self._pool.shutdown()
        for emptied in self._emptied:
            if emptied is not None:
                emptied.result()


def _copied(part: torch.Tensor) -> torch.cuda.Event | None:
    """Return the event of the copies so far, if they are from a GPU."""
    if not part.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(part.device))
    return event


def _empty(chunk: torch.Tensor, target: torch.Tensor, copied: torch.cuda.Event | None) -> torch.Tensor:
    if copied is not None:
        copied.synchronize()
    return target.copy_(chunk)
