"""Copying a filled buffer to a CUDA device on a side stream, with events and without a global synchronise."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class CudaCopier:
    """Copies pinned buffers to a device and releases each buffer once its copy is done.

    The filling thread calls `copy`, one call at a time; the training thread calls `receive`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def copy(self, buffer: Tensor, num_bytes: int, let_go: Callable[[], None]) -> tuple[Tensor, torch.cuda.Event]:
        """Start copying the first `num_bytes` of a pinned buffer; return the device's bytes and the event that ends the copy.

        A later `copy` or `finish` calls `let_go` once the buffer may be overwritten.
        """
        self._let_go()
        # The thread's current device is 0: leaving the stream alone would make a context on it, half a GB for each rank.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            flat.copy_(buffer[:num_bytes], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._in_flight.append((event, let_go))
        return flat, event

    def receive(self, flat: Tensor, event: torch.cuda.Event) -> Tensor:
        """Make the current stream wait for the copy, and record with the allocator that this stream uses the memory."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        flat.record_stream(stream)
        return flat

    def finish(self) -> None:
        """Wait for the copies in flight. Their sources may be freed afterwards."""
        while self._in_flight:
            event, let_go = self._in_flight.popleft()
            event.synchronize()
            let_go()

    def _let_go(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()[1]()
