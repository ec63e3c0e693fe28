"""Retry in halves when a batch does not fit into GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from bucketline.allocator import is_out_of_memory
from bucketline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

T = TypeVar("T")
R = TypeVar("R")


class OomRetry(Generic[T, R]):
    """Calls an encoder with as many items as fit into GPU memory.

    If memory runs out, the batch is halved and retried. The size that fitted is remembered for items of the same kind (such
    as an image size), so that the failure does not recur in every batch.
    """

    def __init__(self, encode: Callable[[Sequence[T]], Sequence[R]], what: str) -> None:
        """`encode` returns one result per item, in order; `what` names an item in messages."""
        self._encode, self._what = encode, what
        self._limits: dict[Hashable, int] = {}

    def __call__(self, items: Sequence[T], kind: Hashable = None) -> list[R]:
        """Encode items in order."""
        results: list[R] = []
        while len(results) < len(items):
            size = self._limits.get(kind, len(items))
            part = items[len(results) : len(results) + size]
            try:
                results.extend(self._encode(part))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(part) == 1:
                    item = self._what if kind is None else f"{self._what} of {kind}"
                    raise ModelError(
                        f"not enough GPU memory to encode one {item}: "
                        f"{error!s:.200}; free some, use a smaller --grid or --encode-dtype bf16, or choose another --device"
                    ) from error
                self._limits[kind] = (len(part) + 1) // 2
            else:
                continue
            # outside the handler: inside it, the exception still holds the failed call's tensors
            torch.cuda.empty_cache()
        return results
