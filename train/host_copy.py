"""Copy tensors to host memory in a thread, while training continues up to its next update of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

CHUNK_BYTES = 128 << 20


class HostCopies:
    """Copies for checkpoints, in host memory that every save uses again: as many bytes as a save copies.

    From a GPU, a second stream fills one of two pinned chunks while the thread empties the other: pageable memory, which the
    copies are in, takes them at a fraction of the speed. Copying does not hold Python's lock.
    """

    def __init__(self) -> None:
        """Nothing is allocated before the first copies."""
        self._chunks: list[Tensor] = []
        self._memory: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="host-copy")

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to make the memory for copies of such tensors; new memory is slow to write for the first time."""
        on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        self._pool.submit(lambda: [self._host(name, tensor) for name, tensor in on_meta.items()])

    def start(self, tensors: Mapping[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Begin to copy these tensors, overwriting the earlier copies by the same names.

        The result has the copies, contiguous. The tensors must not change before it is there.
        """
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        done = None if device is None else torch.cuda.current_stream(device).record_event()
        return self._pool.submit(self._copy, tensors, device, done)

    def close(self) -> None:
        """Wait for the thread and end it."""
        self._pool.shutdown()

    def _host(self, name: str, like: Tensor) -> Tensor:
        own = self._memory.get(name)
        if own is None or (own.shape, own.dtype) != (like.shape, like.dtype):
            own = self._memory[name] = torch.empty(like.shape, dtype=like.dtype).zero_()
        return own

    def _copy(
        self, tensors: Mapping[str, Tensor], device: torch.device | None, done: torch.cuda.Event | None
    ) -> dict[str, Tensor]:
        copies = {name: self._host(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if not tensor.is_cuda:
                copies[name].copy_(tensor)
        if done is not None:
            with torch.cuda.device(device):  # pinning memory would begin to use the first one otherwise
                if not self._chunks:
                    self._chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(done)
                with torch.cuda.stream(stream):
                    copy_through(self._chunks, [(tensor, copies[name]) for name, tensor in tensors.items() if tensor.is_cuda])
        return copies


Give = Callable[["Tensor", "Tensor", "Tensor"], object]
"""Called with a part of a source, of its target, and the chunk with the copy of the source's, of one shape and dtype each."""


def copy_through(
    chunks: Sequence[Tensor], pairs: Iterable[tuple[Tensor, Tensor]], give: Give = lambda _, target, chunk: target.copy_(chunk)
) -> None:
    """Copy each source to chunks, in parts of a chunk's size, on the current stream, and `give` each to its target's part.

    A part on a GPU reaches a chunk in host memory while the host gives the one before. Return when all are given.
    """
    filled: deque[tuple[Tensor, Tensor, Tensor, torch.cuda.Event | None]] = deque()

    def empty() -> None:
        part, place, chunk, copied = filled.popleft()
        if copied is not None:
            copied.synchronize()
        give(part, place, chunk)

    turns = cycle(chunks)
    for source, target in pairs:
        # channels_last weights are turned on the device, one at a time
        count = len(chunks[0]) // source.element_size()
        parts, places = (torch.split(one.contiguous().view(-1), count) for one in (source, target))
        for part, place in zip(parts, places, strict=True):
            if len(filled) == len(chunks):
                empty()
            chunk = next(turns)[: part.nbytes].view(part.dtype).copy_(part, non_blocking=True)
            waits = part.is_cuda and not chunk.is_cuda
            copied = torch.cuda.current_stream(part.device).record_event() if waits else None
            filled.append((part, place, chunk, copied))
    while filled:
        empty()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a tensor's values as one dimension, which shares its memory; its values are next to each other, in any layout."""
    return tensor.as_strided((tensor.numel(),), (1,))
