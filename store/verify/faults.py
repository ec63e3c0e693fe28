"""The faults that `store verify` reports, each with its location."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Fields are None if it is not in a bucket, a block or a row."""

    shard: str | None = None
    bucket: str | None = None
    block: int | None = None
    row: int | None = None
    sample: str | None = None
    error: str
    samples: tuple[str, ...] = ()  # for captions and text blocks: ids of the samples that use them, if known


def mismatch(name: object, num_bytes: int, digest: str | None, expected: FileEntry | DroppedEntry, says: str) -> str | None:
    """Return how a file differs from its entry, None if it does not; `digest` is None if its length already differs."""
    if digest is None:
        return f"{name} has {num_bytes} bytes, {says} says {expected.num_bytes}"
    return None if digest == expected.digest else f"{name} has the digest {digest}, {says} says {expected.digest}"


class Faults:
    """The faults of one shard: first of complete files, then by bucket, block and row."""

    def __init__(self, shard: str | None) -> None:
        """Start empty."""
        self._shard = shard
        self._of_files: list[Fault] = []
        self._inside: list[Fault] = []

    @property
    def found(self) -> tuple[Fault, ...]:
        return (*self._of_files, *sorted(self._inside, key=_place))

    @property
    def has_any_inside(self) -> bool:
        """True if there is a fault inside a file."""
        return bool(self._inside)

    def of_file(self, error: str) -> None:
        """Add a fault of a complete file."""
        self._of_files.append(Fault(shard=self._shard, error=error))

    def add(
        self,
        error: str,
        group: str | None = None,
        block: int | None = None,
        row: int | None = None,
        sample: str | None = None,
        samples: tuple[str, ...] = (),
    ) -> None:
        """Add a fault inside a file."""
        fault = Fault(shard=self._shard, bucket=group, block=block, row=row, sample=sample, error=error, samples=samples)
        self._inside.append(fault)

    @contextmanager
    def guard(self, group: str | None = None, block: int | None = None) -> Iterator[None]:
        """Convert errors in this block to a fault."""
        try:
            yield
        except (StoreError, lmdb.Error, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
            self.add(str(error) or type(error).__name__, group, block)


def _place(fault: Fault) -> tuple[str, int, int]:
    return fault.bucket or "", -1 if fault.block is None else fault.block, -1 if fault.row is None else fault.row
