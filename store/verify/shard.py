"""Check one shard: its file in one pass, digest and values from the same buffer; then make its sidecar again and compare.

The file is read in order, in segments (a block, or a piece of what is between blocks). Only an intact one is also opened
through LMDB, which follows pointers in the file.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import numpy as np

from bucketline.command_line import counted
from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import open_regular
from bucketline.store.format.block import (
    CAPTIONS,
    FLIPPED_SUFFIX,
    ID,
    LINE_BYTES,
    PRESENT_PREFIX,
    TOKENS,
    TOKENS_SCALE,
    EntriesOf,
    FileSums,
    bad_rows,
    decode_block,
    file_digest,
)
from bucketline.store.format.text import TEXT_GROUP, is_bucket, is_storable, read_text_block
from bucketline.store.shard.meta import LINE_CHECKSUM, decode_meta
from bucketline.store.shard.reader import SealedShard, captions_cut
from bucketline.store.shard.sidecar import read_exactly
from bucketline.store.write.column import COLUMN_FIELDS, ids_by_row
from bucketline.store.write.seal import ShardContents, read_contents
from bucketline.typed_json import encode, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import FileEntry, ShardEntry
    from bucketline.store.format.text import TextBlock
    from bucketline.store.read.store import Store


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


def mismatch(name: object, num_bytes: int, digest: str | None, expected: FileEntry, says: str) -> str | None:
    """Return how a file differs from its entry, None if it does not; `digest` is None if its length already differs."""
    if digest is None:
        return f"{name} has {num_bytes} bytes, {says} says {expected.num_bytes}"
    return None if digest == expected.digest else f"{name} has the digest {digest}, {says} says {expected.digest}"


class Faults:
    """The faults of one shard: first of complete files, then by bucket, block and row."""

    def __init__(self, shard: str | None) -> None:
        self._shard = shard
        self._of_files: list[Fault] = []
        self._inside: list[Fault] = []

    @property
    def found(self) -> tuple[Fault, ...]:
        return (*self._of_files, *sorted(self._inside, key=_place))

    @property
    def has_any_inside(self) -> bool:
        return bool(self._inside)

    def of_file(self, error: str) -> None:
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
    """One block's entry in the sidecar."""

    group: str
    block: int
    offset: int
    length: int
    first_row: int
    rows: int


@dataclass(slots=True, kw_only=True)
class _Damage:
    """A damaged caption, or another group's entry; `number` is that in the shard, None of a block that cannot be read."""

    error: str
    place: BlockPlace
    number: int | None
    rows: int = 0  # that use it
    samples: list[str] = field(default_factory=list)  # ids of these rows, if known

    def used_by(self, numbers: Mapping[str, NDArray[np.int32]]) -> list[int]:
        """Return the rows of a block that use it, given the captions or entries of its rows, `[K, V]` by group."""
        own = numbers[self.place.group]
        first, count = (self.place.first_row, self.place.rows) if self.number is None else (self.number, 1)
        rows: list[int] = np.flatnonzero(((own >= first) & (own < first + count)).any(axis=1)).tolist()
        return rows

    def fault(self, faults: Faults) -> None:
        """Add it to the faults, with the number of the samples that use it."""
        verb, group = "uses" if self.rows == 1 else "use", self.place.group
        what = "it" if self.number is not None else "its captions" if group == TEXT_GROUP else "its entries"
        error = f"{self.error}; {counted(self.rows, 'sample')} {verb} {what}"
        faults.add(error, group, self.place.block, self.number, samples=tuple(self.samples))


MAX_BLOCK_BYTES = 64 << 20  # maximum that verify holds in memory; a block is about 1 MiB, or one row
SEGMENT_BYTES = 1 << 20  # read size outside of blocks
_TELL_BYTES = 4 << 20  # progress is reported in steps of this size
_BAD_ENTRY = "the entry's bytes do not match their checksum"
_BAD_CAPTION = "the caption's bytes do not match their checksum"
_STRANGE_CAPTION = "the caption's quantised tokens, or their scales, are beyond what can be stored"
_OTHER_CAPTION = "the entry is not that of the caption of this number"


class ShardCheck:
    """Checks one shard of a store's generation; `blocks` and `rows` count what was read."""

    bad_row = "the row's bytes do not match their checksum"

    def __init__(self, store: Store, entry: ShardEntry, on_bytes: Callable[[int], None]) -> None:
        """Open nothing yet. `on_bytes` reports progress and is called with 0 in between; if it raises, the check ends."""
        self._store, self._on_bytes = store, on_bytes
        self._specs = store.manifest.specs
        self._shard = SealedShard(
            store.path, entry, dropped=store.dropped
        )  # a separate reader, so that its maps are freed with it
        self._faults = Faults(entry.name)
        self.blocks = self.rows = 0
        self._read_bytes = self._told_bytes = 0
        self._damage: list[_Damage] = []  # of captions and entries
        self._uses: list[tuple[BlockPlace, dict[str, NDArray[np.int32]], list[int]]] = []  # by rows' blocks; and bad rows
        self._has_meta = False  # whether the sidecar is intact

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    def run(self) -> None:
        entry, paths = self._shard.entry, self._shard.paths
        self._has_meta = self._sidecar(paths.meta, entry.meta)
        with self._faults.guard():
            sums = self._file()
            self._tell(entry.lmdb.num_bytes)  # also if the file ends early
            if sums is not None:
                self._describe(sums)
        for use in self._uses if self._damage else ():
            self._note_users(*use)
        for damage in self._damage:
            damage.fault(self._faults)

    def _tell(self, read_bytes: int) -> None:
        self._on_bytes(read_bytes - self._told_bytes)
        self._told_bytes = read_bytes

    def _sidecar(self, path: Path, expected: FileEntry) -> bool:
        try:
            size = path.stat().st_size
            digest = file_digest(path)[1] if size == expected.num_bytes else None
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}")
            return False
        return self._is_intact(path, size, digest, expected)

    def _is_intact(self, path: Path, num_bytes: int, digest: str | None, expected: FileEntry) -> bool:
        """Add a fault if a file differs from its entry. Return whether it does not."""
        if fault := mismatch(path.name, num_bytes, digest, expected, "the manifest"):
            self._faults.of_file(fault)
        return fault is None

    def _file(self) -> FileSums | None:
        """Read the shard's file. Return its checksums if it is intact."""
        path, expected = self._shard.paths.lmdb, self._shard.entry.lmdb
        try:
            fd = open_regular(path)
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}")
            return None
        try:
            file_bytes = os.fstat(fd).st_size
            sums = self._read(fd, min(file_bytes, expected.num_bytes))
        except (StoreError, OSError) as error:
            self._faults.of_file(str(error))
            return None
        finally:
            os.close(fd)
        whole = sums.digest if file_bytes == expected.num_bytes else None
        is_named = self._faults.has_any_inside or self._damage  # more exactly than by lines
        if self._has_meta and file_bytes >= expected.num_bytes and (whole == expected.digest or not is_named):
            with self._faults.guard():
                self._compare_lines(sums.finish())
        return sums if self._is_intact(path, file_bytes, whole, expected) else None

    def _read(self, fd: int, num_bytes: int) -> FileSums:
        """Read the file and check its blocks, where the sidecar locates them. Return its checksums."""
        sums = FileSums()
        places = block_places(self._shard, num_bytes, self._faults) if self._has_meta else iter(())
        for place, segment in segments(self._shard.paths.lmdb, fd, num_bytes, places):
            sums.update(segment)
            if place is not None:
                self._block(place, segment)
            self._read_bytes += len(segment)
            self._tell(self._read_bytes if self._read_bytes - self._told_bytes >= _TELL_BYTES else self._told_bytes)
        return sums

    def _compare_lines(self, found: list[int]) -> None:
        """Compare the lines that were read with their checksums in the sidecar."""
        meta, name = self._shard.meta, self._shard.paths.lmdb.name
        num_lines = len(found)
        stored = meta.column(LINE_CHECKSUM)
        if stored.dtype != "<u8" or stored.shape != (num_lines,) or meta.about("line_bytes") != LINE_BYTES:
            self._faults.of_file(
                f"{self._shard.paths.meta.name} does not have the checksums of the {num_lines} lines of {name}"
            )
            return
        for number, (own, expected) in enumerate(zip(found, stored.tolist(), strict=True)):
            if own != expected:
                begin = number * LINE_BYTES
                self._faults.of_file(f"{name}: bytes {begin} to {begin + LINE_BYTES} do not match the checksum of their line")

    def _block(self, place: BlockPlace, data: memoryview) -> None:
        """Check a block's bytes: its header, its checksums, and values that no writer stores."""
        self.blocks += 1
        item = f"shard {self._shard.name}, block {place.block} of {place.group}"
        if is_bucket(place.group):
            with self._faults.guard(place.group, place.block):
                self._row_block(place, data, item)
            return
        unread = Faults(None)
        with unread.guard():
            self._entry_block(place, data, item)
        self._damage += [_Damage(error=fault.error, place=place, number=None) for fault in unread.found]

    def _entry_block(self, place: BlockPlace, data: memoryview, item: str) -> None:
        block = read_text_block(self._store.groups[place.group], data, item)
        self._is_expected(place, block.first_row, len(block))
        found = dict.fromkeys(block.bad(), _BAD_CAPTION if place.group == TEXT_GROUP else _BAD_ENTRY)
        if block.spec.is_quantised:
            found = {**dict.fromkeys(strange_captions(block), _STRANGE_CAPTION), **found}
        self._damage += [_Damage(error=found[n], place=place, number=place.first_row + n) for n in sorted(found)]

    def _row_block(self, place: BlockPlace, data: memoryview, item: str) -> None:
        spec = self._specs[place.group]
        first_row, columns = decode_block(spec, data, item)
        self._is_expected(place, first_row, len(columns[ID]))
        self.rows += len(columns[ID])
        bad = bad_rows(spec, columns)
        found = [(k, self.bad_row) for k in bad]
        if not self._shard.entry.is_of_column:
            numbers, beyond = self._numbers(columns)
            found += [(k, error) for k, error in (*beyond, *strange_rows(columns)) if k not in bad]
            self._uses.append((place, numbers, bad))
        names = self._names(place, [k for k, _ in found])
        for k, error in found:
            self._faults.add(error, place.group, place.block, first_row + k, names.get(first_row + k))

    def _numbers(self, columns: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[np.int32]], list[tuple[int, str]]]:
        """Return which captions and ragged entries a block's rows use, `[K, V]`, and of which rows the shard lacks one."""
        sizes = {group: entry.rows for group, entry in self._shard.entry.groups.items()}
        captions, beyond = columns[CAPTIONS].copy(), list[tuple[int, str]]()
        numbers: dict[str, NDArray[np.int32]] = {}
        has = sizes[TEXT_GROUP]
        wrong = np.flatnonzero(((captions < -1) | (captions >= has)).any(axis=1)).tolist()
        beyond += [(k, f"the row has the captions {captions[k].tolist()}, the shard has {has}") for k in wrong]
        for group, spec in self._store.groups.items():
            if spec.of is EntriesOf.CAPTIONS:
                numbers[group] = captions
                continue
            own, has = columns[group].copy(), sizes.get(group, 0)
            wrong = np.flatnonzero((own < (-1 if spec.optional else 0)) | (own >= has)).tolist()
            beyond += [(k, f"the row has {spec.label} {int(own[k])}, the shard has {has}") for k in wrong]
            numbers[group] = own[:, None]
        return numbers, beyond

    def _note_users(self, place: BlockPlace, numbers: Mapping[str, NDArray[np.int32]], bad: list[int]) -> None:
        """Record the live rows that use a damaged caption or entry."""
        skipped = set(bad)
        with suppress(StoreError):  # a damaged list of dropped rows is reported elsewhere
            skipped |= set((self._shard.dropped_rows(place.group).astype(np.int64) - place.first_row).tolist())
        for damage in self._damage:
            rows = [k for k in damage.used_by(numbers) if k not in skipped]
            damage.rows += len(rows)
            damage.samples += self._names(place, rows).values()

    def _is_expected(self, place: BlockPlace, first_row: int, rows: int) -> None:
        if (first_row, rows) != (place.first_row, place.rows):
            raise CorruptError(
                f"the block says first row and rows are {(first_row, rows)}, the sidecar says {(place.first_row, place.rows)}"
            )

    def _names(self, place: BlockPlace, rows: list[int]) -> dict[int, str]:
        """Return the sample ids, as far as they are readable, by row in the shard; `rows` are numbered within the block."""
        return self._shard.names_of(place.group, [place.first_row + k for k in rows])

    def _describe(self, sums: FileSums) -> None:
        """Make the sidecar again from the intact file, and compare it, and the manifest's entry with what it says."""
        contents = ShardContents(name=self._shard.entry.name, report=self._faults.add)
        read_contents(self._shard.paths.lmdb, contents, sums, lambda: self._on_bytes(0))
        again = contents.meta(sums)
        texts = contents.digests(TEXT_GROUP)
        for group in (spec.group for spec in self._store.groups.values() if spec.of is EntriesOf.CAPTIONS):
            own = contents.digests(group)
            for n in np.flatnonzero((own[: len(texts)] != texts[: len(own)]).any(axis=1)).tolist():
                self._faults.add(_OTHER_CAPTION, group, row=n)
        if self._has_meta and self._compare_meta(again):
            self._compare_entry(decode_meta(again, self._shard.paths.meta, self._shard.name).entry)

    def withdrawn(self) -> None:
        """Add a fault for each live row whose id is withdrawn; call it after `run`."""
        with self._faults.guard():
            at = self._shard.positions(self._store.withdrawn_keys)
            live = self._shard.live_entries()
            for position in at[at >= 0].tolist():
                if live[position]:
                    found = self._shard.index_entry(position)
                    self._faults.add("its id is withdrawn, and the row is live; `store drop` it", found.bucket, row=found.row)

    def _compare_meta(self, again: bytes) -> bool:
        """Add a fault if the sidecar is not what the shard's file gives. Return whether it is."""
        path = self._shard.paths.meta
        is_same = path.read_bytes() == again
        if not is_same:
            self._faults.of_file(f"{path.name} is not what the shard's file gives; `store repair` makes it again")
        return is_same

    def _compare_entry(self, again: ShardEntry) -> None:
        """Compare the manifest's entry with what the shard's file gives, and the list of dropped rows."""
        entry, record_bytes, cut = self._shard.entry, self._shard.entry.record_bytes, self._shard.entry.cut
        if again.samples == entry.samples:
            with self._faults.guard():  # one for each shard with dropped rows if the list is damaged
                live = self._shard.index[self._shard.live_entries()]
                record_bytes, cut = int(live["record_bytes"].sum(dtype=np.int64)), captions_cut(entry, live)
        dropped = {name: group.dropped for name, group in entry.groups.items()}
        groups = {name: group._replace(dropped=dropped.get(name, 0)) for name, group in again.groups.items()}
        again = replace(again, groups=groups, record_bytes=record_bytes, added=entry.added, cut=cut)
        if difference := first_difference(encode(again), encode(entry), ""):
            self._faults.add("{} is {}, the manifest says {}".format(*difference))


class ColumnCheck(ShardCheck):
    """Checks the values of an added column of one shard's rows."""

    def __init__(self, store: Store, entry: ShardEntry, column: str, on_bytes: Callable[[int], None]) -> None:
        """Open nothing yet; `on_bytes` as in `ShardCheck`."""
        super().__init__(store, entry.column_shard(column), on_bytes)
        self._specs = store.manifest.added_specs[column]
        self._column, self._owner = column, SealedShard(store.path, entry, dropped=store.dropped)
        self._faults = Faults(entry.name)
        self.bad_row = f"the bytes of the row's {column} do not match their checksum"

    def _names(self, place: BlockPlace, rows: list[int]) -> dict[int, str]:
        return self._owner.names_of(place.group, [place.first_row + k for k in rows])

    def _describe(self, sums: FileSums) -> None:
        """Make the sidecar again from the intact file, and compare the rows' ids with the shard's."""
        paths, entry = self._shard.paths, self._shard.entry
        contents = ShardContents(name=entry.name, report=self._faults.add)
        read_contents(paths.lmdb, contents, sums, lambda: self._on_bytes(0))
        if self._has_meta:
            about = {name: self._shard.meta.about(name) for name in COLUMN_FIELDS}
            self._compare_meta(contents.meta(sums, about))
        for bucket in entry.groups:
            with self._faults.guard(bucket):
                wrong = (contents.digests(bucket, ID) != ids_by_row(self._owner, bucket)).any(axis=1)
                for row in np.flatnonzero(wrong).tolist():
                    self._faults.add(f"the {self._column} in the row's place is another sample's", bucket, row=row)


def block_places(shard: SealedShard, file_bytes: int, faults: Faults) -> Iterator[BlockPlace]:
    """Yield the blocks that can be read, in file order; `file_bytes` is the length of the shard's file."""
    groups, tables = sorted(shard.entry.groups), []
    for number, group in enumerate(groups):
        with faults.guard(group):
            own = shard.entry.groups[group]
            places = [
                shard.meta.column(name)[own.first_block : own.first_block + own.blocks]
                for name in ("offset", "length", "first_row", "rows")
            ]
            tables.append(np.stack([np.full_like(places[0], number), np.arange(own.blocks, dtype="<u8"), *places], axis=1))
    end = 0
    table = np.concatenate(tables) if tables else np.empty((0, 6), dtype=np.uint64)
    for numbers in table[np.argsort(table[:, 2], kind="stable")]:
        at, block, offset, length, first_row, rows = numbers.tolist()
        if end <= offset < offset + length <= file_bytes and (length <= MAX_BLOCK_BYTES or rows == 1):
            yield BlockPlace(groups[at], block, offset, length, first_row, rows)
            end = offset + length
        else:
            error = (
                f"the sidecar places the block at bytes {offset} to {offset + length}, which is beyond the file, inside "
                f"another block, or an impossible length for {rows} rows"
            )
            faults.add(error, groups[at], block)


def segments(
    path: Path, fd: int, num_bytes: int, places: Iterable[BlockPlace]
) -> Iterator[tuple[BlockPlace | None, memoryview]]:
    """Read a file in order and yield its segments: complete blocks, and the bytes between them in pieces.

    A segment's bytes are valid only until the next one.
    """
    buffer = memoryview(bytearray(SEGMENT_BYTES))
    at = 0
    if num_bytes:  # a pipe has length 0 and does not support fadvise
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def segment(length: int) -> memoryview:
        nonlocal at, buffer
        if length > len(buffer):
            buffer = memoryview(bytearray(length))
        read_exactly(path, fd, at, buffer[:length])
        at += length
        return buffer[:length]

    for place in places:
        while at < place.offset:
            yield None, segment(min(SEGMENT_BYTES, place.offset - at))
        yield place, segment(place.length)
    while at < num_bytes:
        yield None, segment(min(SEGMENT_BYTES, num_bytes - at))


def strange_rows(columns: Mapping[str, NDArray[Any]]) -> Iterator[tuple[int, str]]:
    """Yield rows of a block, `[K, …]` per column, that do not go with what they say is there, and what is wrong with each."""
    for name, present in columns.items():
        if not name.startswith(PRESENT_PREFIX):
            continue
        base = name.removeprefix(PRESENT_PREFIX)
        for k in np.flatnonzero(present > 1).tolist():
            yield k, f"the row's {name} is {int(present[k])}, expected 0 or 1"
        for k in np.flatnonzero(present == 0).tolist():
            if columns[base][k].tobytes().strip(b"\0"):
                yield k, f"the row's {name} is 0, and its {base} is not all zeros"
        if (mirror := columns.get(name + FLIPPED_SUFFIX)) is not None:
            for k in np.flatnonzero(present != mirror).tolist():
                yield k, f"the row's {name} is {int(present[k])}, and its {name}{FLIPPED_SUFFIX} {int(mirror[k])}"


def strange_captions(block: TextBlock) -> list[int]:
    """Return the captions of a block with quantised tokens whose tokens or scales are beyond what can be stored."""
    tokens = block.spec.tokens
    stored = {c.name: np.frombuffer(block.columns[c.name], dtype=c.numpy_dtype).reshape(-1, *c.shape) for c in tokens}
    wrong = np.flatnonzero(~is_storable(stored[TOKENS], stored[TOKENS_SCALE]))
    found: list[int] = np.unique(np.searchsorted(block.starts, wrong, side="right") - 1).tolist()
    return found
