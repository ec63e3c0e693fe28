"""The faults that `store verify` reports, each with its location, and the samples that use a damaged caption or entry."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import numpy as np

from bucketline.command_line import counted
from bucketline.errors import StoreError
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry

    Numbers = Mapping[str, NDArray[np.int32]]


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


class BlockPlace(NamedTuple):
    """One block's entry in the extents."""

    group: str
    block: int
    offset: int
    length: int
    first_row: int
    rows: int


@dataclass(slots=True, kw_only=True)
class _Damage:
    error: str
    place: BlockPlace
    caption: int | None  # or another group's entry; None if none of the block's are readable
    rows: int = 0  # that use it
    samples: list[str] = field(default_factory=list)  # ids of these rows, if known


class CaptionUsers:
    """Collects damaged captions and ragged entries, then the rows that use them, and reports both at the end.

    A shard's blocks of these precede its buckets' blocks in key order. A block's numbers say what its rows use: for each group
    the captions, or entries, of its rows, `[K, V]`.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._found: list[_Damage] = []

    @property
    def has_any(self) -> bool:
        """True if a caption or an entry is damaged."""
        return bool(self._found)

    def add(self, error: str, place: BlockPlace, caption: int | None) -> None:
        """Add a damaged caption, or entry, by its number in the shard, or a complete block of them (None)."""
        self._found.append(_Damage(error=error, place=place, caption=caption))

    def rows(self, numbers: Numbers) -> list[int]:
        """Return the indices of rows that use a damaged caption or entry, given their numbers."""
        found = {k for damage in self._found for k in np.flatnonzero(_uses(numbers, damage)).tolist()}
        return sorted(found)

    def note(self, numbers: Numbers, names: Sequence[str | None]) -> None:
        """Add rows as users, given their numbers and their sample ids, None if unknown."""
        for damage in self._found:
            for k in np.flatnonzero(_uses(numbers, damage)).tolist():
                damage.rows += 1
                if (name := names[k]) is not None:
                    damage.samples.append(name)

    def report(self, faults: Faults) -> None:
        """Add a fault for each damaged caption and entry."""
        for damage in self._found:
            verb, group = "uses" if damage.rows == 1 else "use", damage.place.group
            what = "it" if damage.caption is not None else "its captions" if group == TEXT_GROUP else "its entries"
            error = f"{damage.error}; {counted(damage.rows, 'sample')} {verb} {what}"
            faults.add(error, group, damage.place.block, damage.caption, samples=tuple(damage.samples))


def _uses(numbers: Numbers, damage: _Damage) -> NDArray[np.bool_]:
    captions = numbers[damage.place.group]
    first, count = (damage.place.first_row, damage.place.rows) if damage.caption is None else (damage.caption, 1)
    found: NDArray[np.bool_] = np.any((captions >= first) & (captions < first + count), axis=1)
    return found
