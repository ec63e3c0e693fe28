"""Check one shard: its file in one pass, digest and values from the same buffer; then describe it again and compare.

The file is read in order, in segments (a block, or a piece of what is between blocks). Only an intact one is also opened
through LMDB, which follows pointers in the file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from bucketline.errors import CorruptError, StoreError
from bucketline.files.regular_file import open_regular
from bucketline.store.format.block import CAPTIONS, ID, bad_rows, decode_block
from bucketline.store.format.columns import RAGGED_PREFIX, EntriesOf
from bucketline.store.format.hashing import LINE_BYTES, LineSums, file_digest
from bucketline.store.format.text_block import TEXT_GROUP, is_bucket, read_text_block
from bucketline.store.shard.reader import INDEX_FORMAT, SealedShard
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM
from bucketline.store.shard.sidecar import PagedFile
from bucketline.store.verify.caption_users import CaptionUsers
from bucketline.store.verify.description import compare_sidecar
from bucketline.store.verify.extents import BlockPlace, block_places, segments
from bucketline.store.verify.faults import Fault, Faults, mismatch
from bucketline.store.verify.values import strange_captions, strange_rows
from bucketline.store.write.describe import entry_of_extents
from bucketline.store.write.shard_contents import ShardContents, read_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.read.store import Store

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
        self._shard = SealedShard(store.path, entry)  # a separate reader, so that its maps are freed with it
        self._faults = Faults(entry.name)
        self.blocks = self.rows = 0
        self._read_bytes = self._told_bytes = 0
        self._users = CaptionUsers()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    def run(self) -> None:
        """Run the check."""
        entry, paths = self._shard.entry, self._shard.paths
        sidecars: dict[Path, FileEntry | DroppedEntry] = {paths.extents: entry.extents}
        if not entry.is_of_column:
            sidecars[paths.index] = entry.index
        if entry.dropped is not None:
            sidecars[paths.dropped(entry.dropped.generation)] = entry.dropped
        damaged = {path for path, expected in sidecars.items() if not self._sidecar(path, expected)}
        with self._faults.guard():
            lines = self._file()
            self._tell(entry.lmdb.num_bytes)  # also if the file ends early
            if lines is not None:
                self._describe(damaged, lines)
        self._users.report(self._faults)

    def _tell(self, read_bytes: int) -> None:
        self._on_bytes(read_bytes - self._told_bytes)
        self._told_bytes = read_bytes

    def _sidecar(self, path: Path, expected: FileEntry | DroppedEntry) -> bool:
        try:
            size = path.stat().st_size
            digest = file_digest(path)[1] if size == expected.num_bytes else None
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}")
            return False
        return self._is_intact(path, size, digest, expected)

    def _is_intact(self, path: Path, num_bytes: int, digest: str | None, expected: FileEntry | DroppedEntry) -> bool:
        """Add a fault if a file differs from its entry. Return whether it does not."""
        if fault := mismatch(path.name, num_bytes, digest, expected, "the manifest"):
            self._faults.of_file(fault)
        return fault is None

    def _file(self) -> list[int] | None:
        """Read the shard's file. Return the checksums of its lines if it is intact."""
        path, expected = self._shard.paths.lmdb, self._shard.entry.lmdb
        try:
            fd = open_regular(path)
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}")
            return None
        try:
            file_bytes = os.fstat(fd).st_size
            digest, lines = self._read(fd, min(file_bytes, expected.num_bytes))
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}; the medium may be failing")
            return None
        finally:
            os.close(fd)
        whole = digest if file_bytes == expected.num_bytes else None
        is_named = self._faults.has_any_inside or self._users.has_any  # more exactly than by lines
        if file_bytes >= expected.num_bytes and (whole == expected.digest or not is_named):
            with self._faults.guard():
                self._compare_lines(lines)
        return lines if self._is_intact(path, file_bytes, whole, expected) else None

    def _read(self, fd: int, num_bytes: int) -> tuple[str, list[int]]:
        """Read the file and check its blocks. Return its digest and the checksums of its lines."""
        state, lines = xxhash.xxh3_128(), LineSums()
        for place, segment in segments(fd, num_bytes, block_places(self._shard, num_bytes, self._faults)):
            state.update(segment)
            lines.update(segment)
            if place is not None:
                self._block(place, segment)
            self._read_bytes += len(segment)
            self._tell(self._read_bytes if self._read_bytes - self._told_bytes >= _TELL_BYTES else self._told_bytes)
        return state.hexdigest(), lines.finish()

    def _compare_lines(self, found: list[int]) -> None:
        """Compare the lines that were read with their checksums in the extents."""
        extents, name = self._shard.extents, self._shard.paths.lmdb.name
        num_lines = len(found)
        stored = extents.column(LINE_CHECKSUM)
        if stored.dtype != "<u8" or stored.shape != (num_lines,) or extents.metadata.get("line_bytes") != LINE_BYTES:
            self._faults.of_file(
                f"{self._shard.paths.extents.name} does not have the checksums of the {num_lines} lines of {name}"
            )
            return
        for number, (own, expected) in enumerate(zip(found, extents.slice(LINE_CHECKSUM, 0, num_lines).tolist(), strict=True)):
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
        for fault in unread.found:
            self._users.add(fault.error, place, None)

    def _entry_block(self, place: BlockPlace, data: memoryview, item: str) -> None:
        block = read_text_block(self._store.groups[place.group], data, item)
        self._is_expected(place, block.first_row, len(block))
        found = dict.fromkeys(block.bad(), _BAD_CAPTION if place.group == TEXT_GROUP else _BAD_ENTRY)
        if block.spec.is_quantised:
            found = {**dict.fromkeys(strange_captions(block), _STRANGE_CAPTION), **found}
        for n in sorted(found):
            self._users.add(found[n], place, place.first_row + n)

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
            self._note_users(place, numbers, bad)
        names = self._names(place, [k for k, _ in found])
        for k, error in found:
            self._faults.add(error, place.group, place.block, first_row + k, names.get(first_row + k))

    def _numbers(self, columns: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[np.int32]], list[tuple[int, str]]]:
        """Return which captions and ragged entries a block's rows use, `[K, V]`, and of which rows the shard lacks one."""
        sizes = {group: entry.rows for group, entry in self._shard.entry.groups.items()}
        captions, beyond = columns[CAPTIONS], list[tuple[int, str]]()
        numbers: dict[str, NDArray[np.int32]] = {}
        has = sizes[TEXT_GROUP]
        wrong = np.flatnonzero(((captions < -1) | (captions >= has)).any(axis=1)).tolist()
        beyond += [(k, f"the row has the captions {captions[k].tolist()}, the shard has {has}") for k in wrong]
        for group, spec in self._store.groups.items():
            if spec.of is EntriesOf.CAPTIONS:
                numbers[group] = captions
                continue
            own, has = columns[group], sizes.get(group, 0)
            wrong = np.flatnonzero((own < (-1 if spec.optional else 0)) | (own >= has)).tolist()
            beyond += [(k, f"the row has {spec.label} {int(own[k])}, the shard has {has}") for k in wrong]
            numbers[group] = own[:, None]
        return numbers, beyond

    def _note_users(self, place: BlockPlace, numbers: Mapping[str, NDArray[np.int32]], bad: list[int]) -> None:
        """Record the live rows that use a damaged caption or entry."""
        users = set(self._users.rows(numbers)) - set(bad)
        if not users:
            return
        with suppress(StoreError):  # a damaged list of dropped rows is reported elsewhere
            users -= set((self._shard.dropped_rows(place.group).astype(np.int64) - place.first_row).tolist())
        rows = sorted(users)
        names = self._names(place, rows)
        self._users.note({group: own[rows] for group, own in numbers.items()}, [names.get(place.first_row + k) for k in rows])

    def _is_expected(self, place: BlockPlace, first_row: int, rows: int) -> None:
        if (first_row, rows) != (place.first_row, place.rows):
            raise CorruptError(
                f"the block says first row and rows are {(first_row, rows)}, the extents say {(place.first_row, place.rows)}"
            )

    def _names(self, place: BlockPlace, rows: list[int]) -> dict[int, str]:
        """Return the sample ids, as far as they are readable, by row in the shard; `rows` are numbered within the block."""
        return self._shard.names_of(place.group, [place.first_row + k for k in rows])

    def _describe(self, damaged: set[Path], lines: list[int]) -> None:
        """Describe the intact file again, and compare the sidecars that are not damaged, and the manifest's entry."""
        entry, paths = self._shard.entry, self._shard.paths
        contents = ShardContents(name=entry.name, report=self._faults.add)
        read_contents(paths.lmdb, contents, lines, lambda: self._on_bytes(0))
        extents = PagedFile.over(paths.extents, memoryview(contents.extents(lines)), EXTENTS_FORMAT)
        if paths.extents not in damaged:
            compare_sidecar(self._shard, entry.extents, extents, self._faults)
        found = {group: {**place, "dropped": 0} for group, place in extents.metadata["groups"].items()}
        for group in sorted(found.keys() | entry.groups.keys()):
            listed = entry.groups.get(group)
            for name in ("rows", "blocks", "first_block"):
                own, said = found.get(group, {}).get(name, 0), 0 if listed is None else getattr(listed, name)
                self._expect(name, own, said, group)
        self._expect("shard_id", contents.shard_id.hex(), entry.shard_id)
        self._compare_rows(contents, extents, damaged)

    def _expect(self, name: str, found: object, listed: object, group: str | None = None) -> None:
        if found != listed:
            self._faults.add(f"{name} is {found}, the manifest says {listed}", group)

    def _compare_rows(self, contents: ShardContents, extents: PagedFile, damaged: set[Path]) -> None:
        """Compare what belongs to rows and their captions: the index, the totals, the list of dropped rows."""
        entry, paths = self._shard.entry, self._shard.paths
        index = PagedFile.over(paths.index, memoryview(contents.index()), INDEX_FORMAT)
        if paths.index not in damaged:
            compare_sidecar(self._shard, entry.index, index, self._faults)
        texts = contents.digests(TEXT_GROUP)
        for group in (spec.group for spec in self._store.groups.values() if spec.of is EntriesOf.CAPTIONS):
            own = contents.digests(group)
            self._expect("rows", len(own), len(texts), group)
            for n in np.flatnonzero((own[: len(texts)] != texts[: len(own)]).any(axis=1)).tolist():
                self._faults.add(_OTHER_CAPTION, group, row=n)
        again = entry_of_extents(entry.name, [entry.lmdb, entry.extents, entry.index], extents, self._store.manifest)
        for field in ("samples", "caption_bytes", "max_tokens", "text_error"):
            self._expect(field, getattr(again, field), getattr(entry, field))
        for name, totals in again.ragged.items():
            self._expect("tokens", totals, entry.ragged.get(name), RAGGED_PREFIX + name)
        if entry.dropped is None or paths.dropped(entry.dropped.generation) not in damaged:
            self._shard.index = index  # whose rows are the file's
            live = index.column("record_bytes")[self._shard.live_entries()]
            self._expect("record_bytes", int(live.sum(dtype=np.int64)), entry.record_bytes)
            for group, listed in entry.groups.items():
                rows = self._shard.dropped_rows(group)
                if len(rows) and (bool((rows[1:] <= rows[:-1]).any()) or int(rows[-1]) >= listed.rows):
                    self._faults.add("the list of its dropped rows is not in order, or names rows that do not exist", group)
