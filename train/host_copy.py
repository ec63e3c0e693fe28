"""Copy tensors to host memory, whole, through pinned chunks if they are on a GPU."""

from __future__ import annotations

from collections import deque
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from bucketline.train.parallel import whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

CHUNK_BYTES = 128 << 20


class HostMemory:
    """Memory for copies of tensors; by the same name, the next copies take the same, since new memory is slow to fill.

    A GPU fills one of two pinned chunks while the host empties the other: pageable memory, which the copies are in, takes them
    at a fraction of the speed.
    """

    def __init__(self) -> None:
        """Nothing is allocated before the first copies."""
        self._chunks: list[Tensor] = []
        self._memory: dict[tuple[str, str], Tensor] = {}

    def reserve(self, like: Mapping[tuple[str, str], tuple[torch.Size, torch.dtype]]) -> None:
        """Make the memory for copies of tensors of such shapes and dtypes, by the name of the copies and the tensor's."""
        for (name, key), (shape, dtype) in like.items():
            self._of(name, key, shape, dtype).zero_()  # which has the system provide it

    def _of(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        own = self._memory.get((name, key))
        if own is None or (own.shape, own.dtype) != (shape, dtype):
            own = self._memory[name, key] = torch.empty(shape, dtype=dtype)
        return own

    def copies(self, name: str, tensors: Iterable[tuple[str, Tensor]], *, keeps: bool = True) -> dict[str, Tensor]:
        """Return whole tensors, contiguous, which overwrite the former copies of this name; nothing if this rank `keeps` none.

        Shards are gathered a tensor at a time, so every rank that has some must call this with the same tensors.
        """
        found: dict[str, Tensor] = {}

        def from_device() -> Iterator[tuple[Tensor, Tensor]]:
            for key, tensor in tensors:
                full = whole(tensor.detach())
                if not keeps:
                    continue
                own = found[key] = self._of(name, key, full.shape, full.dtype)
                if full.is_cuda:
                    yield full, own
                else:
                    own.copy_(full)

        if keeps and not self._chunks and torch.cuda.is_available():
            self._chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copy_through(self._chunks, from_device())
        return found


def copy_through(chunks: Sequence[Tensor], pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target in host memory, in parts of a chunk's size, each through one of the chunks.

    A part on a GPU reaches a chunk while the host empties the one before. Return when all are copied.
    """
    filled: deque[tuple[Tensor, Tensor, torch.cuda.Event | None]] = deque()

    def empty() -> None:
        place, chunk, copied = filled.popleft()
        if copied is not None:
            copied.synchronize()
        place.copy_(chunk)

    turns = cycle(chunks)
    for source, target in pairs:
        # channels_last weights are turned on the device, one at a time
        count = len(chunks[0]) // source.element_size()
        parts, places = (torch.split(one.contiguous().view(-1), count) for one in (source, target))
        for part, place in zip(parts, places, strict=True):
            if len(filled) == len(chunks):
                empty()
            chunk = next(turns)[: part.nbytes].view(part.dtype).copy_(part, non_blocking=True)
            copied = torch.cuda.current_stream(part.device).record_event() if part.is_cuda else None
            filled.append((place, chunk, copied))
    while filled:
        empty()
