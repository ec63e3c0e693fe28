"""Moving a filled slab to a CUDA device: on a side stream, with events, never a global synchronise."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class CudaCopier:
    """Copies pinned slabs to a device, and lets each slab go once its copy is done.

    `copy` is called by the thread that fills, one call at a time; `receive` by the thread that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def copy(self, slab: Tensor, num_bytes: int, let_go: Callable[[], None]) -> tuple[Tensor, torch.cuda.Event]:
        """Start copying the first `num_bytes` of a pinned slab; give the device's bytes and the event that ends the copy.

        `let_go` is called by a later `copy`, or by `finish`, once the slab may be written again.
        """
        self._let_go()
        with torch.cuda.stream(self._stream):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            flat.copy_(slab[:num_bytes], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._in_flight.append((event, let_go))
        return flat, event

    def receive(self, flat: Tensor, event: torch.cuda.Event) -> Tensor:
        """Make the current stream wait for the copy, and tell the allocator that this stream uses the memory."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        flat.record_stream(stream)
        return flat

    def finish(self) -> None:
        """Wait for the copies under way: what they read may be taken away after this."""
        while self._in_flight:
            event, let_go = self._in_flight.popleft()
            event.synchronize()
            let_go()

    def _let_go(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()[1]()
