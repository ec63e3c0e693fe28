"""Check one shard in one pass: its digest and its blocks from the same buffer, then LMDB's own view of it.

The file is read in order, in segments (a block, or a piece of what is between blocks). Only a shard whose files are all intact
is also opened through LMDB, which follows pointers in the file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from bucketline.errors import CorruptError, StoreError
from bucketline.files.regular_file import open_regular
from bucketline.forks import cached_property
from bucketline.store.format.block import CAPTIONS, ID, bad_rows, decode_block
from bucketline.store.format.columns import RAGGED_PREFIX, EntriesOf
from bucketline.store.format.hashing import DIGEST_BYTES, LINE_BYTES, LineSums, caption_digest, file_digest
from bucketline.store.format.text_block import DIGEST, TEXT_GROUP, is_bucket, read_text_block
from bucketline.store.shard.reader import KEY, SealedShard, keys_of
from bucketline.store.shard.row_locator import LINE_CHECKSUM
from bucketline.store.verify.caption_users import CaptionUsers
from bucketline.store.verify.extents import BlockPlace, BlockPlaces, find_places
from bucketline.store.verify.faults import Fault, Faults, mismatch
from bucketline.store.verify.lmdb_contents import ShardWalk
from bucketline.store.verify.values import strange_captions, strange_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.read.store import Store

SEGMENT_BYTES = 1 << 20  # read size outside of blocks
_TELL_BYTES = 4 << 20  # progress is reported in steps of this size
_BAD_ROW = "the row's bytes do not match their checksum"
_BAD_ENTRY = "the entry's bytes do not match their checksum"
_BAD_CAPTION = "the caption's bytes do not match their checksum"
_STRANGE_CAPTION = "the caption's quantised tokens, or their scales, are beyond what can be stored"


class ShardCheck:
    """Checks one shard of a store's generation; `blocks` and `rows` count what was read."""

    def __init__(self, store: Store, entry: ShardEntry, on_bytes: Callable[[int], None]) -> None:
        """Open nothing yet. `on_bytes` reports progress and is called with 0 in between; if it raises, the check ends."""
        self._store, self._on_bytes = store, on_bytes
        self._specs, self._has_lines = store.manifest.specs, entry.line_checksums
        self._shard = SealedShard(store.path, entry)  # a separate reader, so that its maps are freed with it
        self._faults = Faults(entry.name)
        self.blocks = self.rows = 0
        self._read_bytes = self._told_bytes = 0
        self._has_index = False  # whether the index is intact
        groups = [group for group in entry.groups if not is_bucket(group)]
        self._tokens, self._max_tokens, self._entries = (dict.fromkeys(groups, 0) for _ in range(3))  # as read, by group
        self._users = CaptionUsers()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    def run(self) -> None:
        """Run the check."""
        entry, paths = self._shard.entry, self._shard.paths
        has_extents = self._sidecar(paths.extents, entry.extents)
        self._has_index = self._sidecar(paths.index, entry.index)
        has_dropped = entry.dropped is None or self._sidecar(paths.dropped(entry.dropped.generation), entry.dropped)
        with self._faults.guard():
            sound = self._file()
            self._tell(entry.lmdb.num_bytes)  # also if the file ends early
            if sound and has_extents and self._has_index and has_dropped:
                self._walk()
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

    def _file(self) -> bool:
        """Read the shard's file. Return whether it is intact."""
        path, expected = self._shard.paths.lmdb, self._shard.entry.lmdb
        try:
            fd = open_regular(path)
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}")
            return False
        try:
            file_bytes = os.fstat(fd).st_size
            places = self._places(min(file_bytes, expected.num_bytes))
            digest: str | None = self._read(fd, min(file_bytes, expected.num_bytes), places)
        except OSError as error:
            self._faults.of_file(f"{path.name} cannot be read: {error.strerror}; the medium may be failing")
            return False
        finally:
            os.close(fd)
        return self._is_intact(path, file_bytes, digest if file_bytes == expected.num_bytes else None, expected)

    def _places(self, file_bytes: int) -> BlockPlaces:
        found = BlockPlaces([], np.empty((0, 6), dtype=np.int64))
        with self._faults.guard():  # which swallows errors that it reports
            found = find_places(self._store, self._specs, self._shard, file_bytes, self._faults)
        return found  # noqa: RET504

    def _read(self, fd: int, num_bytes: int, places: BlockPlaces) -> str:
        state, lines = xxhash.xxh3_128(), LineSums()
        for place, segment in _segments(fd, num_bytes, places):
            state.update(segment)
            if self._has_lines:
                lines.update(segment)
            if place is not None:
                self.block(place, segment)
            self._read_bytes += len(segment)
            self._tell(self._read_bytes if self._read_bytes - self._told_bytes >= _TELL_BYTES else self._told_bytes)
        is_named = self._faults.has_any_inside or self._users.has_any  # more exactly than by lines
        if self._has_lines and num_bytes == self._shard.entry.lmdb.num_bytes and not is_named:
            with self._faults.guard():
                self._lines(lines.finish())
        return state.hexdigest()

    def _lines(self, found: list[int]) -> None:
        """Compare the lines that were read with their checksums in the extents."""
        extents, name = self._shard.extents, self._shard.paths.lmdb.name
        num_lines = -(-self._shard.entry.lmdb.num_bytes // LINE_BYTES)
        stored = extents.column(LINE_CHECKSUM)
        if stored.dtype != "<u8" or stored.shape != (num_lines,) or extents.metadata.get("line_bytes") != LINE_BYTES:
            self._faults.of_file(f"{extents.path.name} does not have the checksums of the {num_lines} lines of {name}")
            return
        for number, (own, expected) in enumerate(zip(found, extents.slice(LINE_CHECKSUM, 0, num_lines).tolist(), strict=False)):
            if own != expected:
                begin = number * LINE_BYTES
                self._faults.of_file(f"{name}: bytes {begin} to {begin + LINE_BYTES} do not match the checksum of their line")

    def block(self, place: BlockPlace, data: memoryview) -> None:
        """Check a block's bytes: its header, its rows, and that the index lists them."""
        self.blocks += 1
        item = f"shard {self._shard.name}, block {place.block} of {place.group}"
        if not is_bucket(place.group):
            unread = Faults(None)
            with unread.guard():
                self._entry_block(place, data, item)
            for fault in unread.found:
                self._users.add(fault.error, place, None)
            return
        with self._faults.guard(place.group, place.block):
            self.rows += place.rows
            self._row_block(place, data, item)

    def _entry_block(self, place: BlockPlace, data: memoryview, item: str) -> None:
        block = read_text_block(self._store.spec_of(place.group), data, item)
        self._is_expected(place, block.first_row, len(block))
        self._tokens[place.group] += int(block.starts[-1])
        longest = int((block.starts[1:] - block.starts[:-1]).max())
        self._max_tokens[place.group] = max(self._max_tokens[place.group], longest)
        self._entries[place.group] += len(block)
        bad = block.bad()
        for n in bad:
            self._users.add(_BAD_CAPTION if place.group == TEXT_GROUP else _BAD_ENTRY, place, place.first_row + n)
        if place.group == TEXT_GROUP:
            if self._store.text.is_quantised:
                for n in strange_captions(block):
                    if n not in bad:
                        self._users.add(_STRANGE_CAPTION, place, place.first_row + n)
            self._captions(place, block.columns[DIGEST], bad)
        elif self._store.ragged[place.group.removeprefix(RAGGED_PREFIX)].of is EntriesOf.CAPTIONS and self._has_index:
            keys = np.frombuffer(block.columns[DIGEST], dtype=KEY)
            own = keys_of(self._digests[place.first_row : place.first_row + len(keys)])
            for n in sorted(set(np.flatnonzero(own != keys).tolist()) - set(bad)):
                error = "the entry is not that of the caption of this number"
                self._faults.add(error, place.group, place.block, place.first_row + n)

    @cached_property
    def _digests(self) -> NDArray[np.uint8]:
        """Return the captions' digests by their numbers, `[N, 16]`, from the index."""
        index, num_captions = self._shard.index, self._shard.entry.groups[TEXT_GROUP].rows
        digests = np.zeros((num_captions, DIGEST_BYTES), dtype=np.uint8)
        digests[index.slice("caption_row", 0, num_captions)] = self._shard.caption_digests()
        return digests

    def _captions(self, place: BlockPlace, digests: memoryview, bad: list[int]) -> None:
        """Compare a text block's digests with the index."""
        if place.first_row == 0 and 0 not in bad and bytes(digests[:DIGEST_BYTES]) != caption_digest(""):
            self._faults.add("the shard's first caption is not the empty one", TEXT_GROUP, place.block, 0)
        if self._has_index:
            self._are_listed(place, np.frombuffer(digests, dtype=KEY), bad)

    def _are_listed(self, place: BlockPlace, keys: NDArray[np.bytes_], bad: list[int]) -> None:
        """Compare captions with the index."""
        index = self._shard.index
        stored = keys_of(self._shard.caption_digests())
        at = np.minimum(np.searchsorted(stored, keys), len(stored) - 1)
        wrong = (stored[at] != keys) | (index.take("caption_row", at) != place.first_row + np.arange(len(keys)))
        for n in sorted(set(np.flatnonzero(wrong).tolist()) - set(bad)):
            self._faults.add("the index does not lead to this caption", TEXT_GROUP, place.block, place.first_row + n)

    def _row_block(self, place: BlockPlace, data: memoryview, item: str) -> None:
        spec = self._specs[place.group]
        first_row, columns = decode_block(spec, data, item)
        self._is_expected(place, first_row, len(columns[ID]))
        bad = bad_rows(spec, columns)
        names = self._names(place, bad)
        for k in bad:
            self._faults.add(_BAD_ROW, place.group, place.block, first_row + k, names.get(first_row + k))
        captions = columns[CAPTIONS]
        num_captions = self._shard.entry.groups[TEXT_GROUP].rows
        beyond = ((captions < -1) | (captions >= num_captions)).any(axis=1)
        for k in sorted(set(np.flatnonzero(beyond).tolist()) - set(bad)):
            error = f"the row has the captions {captions[k].tolist()}, the shard has {num_captions}"
            self._faults.add(error, place.group, place.block, first_row + k, self._names(place, [k]).get(first_row + k))
        numbers = self._numbers(place, columns, bad)
        for k, error in strange_rows(columns):
            if k not in bad:
                name = self._names(place, [k]).get(first_row + k)
                self._faults.add(error, place.group, place.block, first_row + k, name)
        if self._has_index:
            self._are_indexed(place, keys_of(columns[ID]), bad)
        self._note_users(place, numbers, bad)

    def _numbers(self, place: BlockPlace, columns: Mapping[str, NDArray[Any]], bad: list[int]) -> dict[str, NDArray[np.int32]]:
        """Return which captions, and which entries of each ragged group, the rows use, `[K, V]`; check those of rows."""
        numbers = {TEXT_GROUP: columns[CAPTIONS]}
        for name, ragged in self._store.ragged.items():
            group = RAGGED_PREFIX + name
            if ragged.of is EntriesOf.CAPTIONS:
                numbers[group] = columns[CAPTIONS]
                continue
            own, rows = columns[group], self._shard.entry.groups[group].rows if group in self._shard.entry.groups else 0
            beyond = (own < (-1 if ragged.optional else 0)) | (own >= rows)
            for k in sorted(set(np.flatnonzero(beyond).tolist()) - set(bad)):
                error = f"the row has entry {int(own[k])} of {name}, the shard has {rows}"
                self._faults.add(error, place.group, place.block, place.first_row + k)
            numbers[group] = own[:, None]
        return numbers

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

    def _are_indexed(self, place: BlockPlace, ids: NDArray[np.bytes_], bad: list[int]) -> None:
        """Compare rows with the index: each sample's digest must lead to its row."""
        index = self._shard.index
        at = self._shard.positions(ids)
        known = np.maximum(at, 0)
        here = index.metadata["groups"].index(place.group)
        astray = (index.take("row", known) != place.first_row + np.arange(len(ids))) | (index.take("bucket", known) != here)
        for k in sorted(set(np.flatnonzero((at < 0) | astray).tolist()) - set(bad)):
            digest = ids[k].ljust(DIGEST_BYTES, b"\0").hex()
            error = f"the index has no entry for the row's sample, whose id has the digest {digest}"
            if at[k] >= 0:
                error = f"the index leads to another row from the row's sample, whose id has the digest {digest}"
            self._faults.add(error, place.group, place.block, place.first_row + k)

    def _is_expected(self, place: BlockPlace, first_row: int, rows: int) -> None:
        if (first_row, rows) != (place.first_row, place.rows):
            raise CorruptError(
                f"the block says first row and rows are {(first_row, rows)}, the extents say {(place.first_row, place.rows)}"
            )

    def _names(self, place: BlockPlace, rows: list[int]) -> dict[int, str]:
        """Return the sample ids, as far as they are readable, by row in the shard; `rows` are numbered within the block."""
        return self._shard.names_of(place.group, [place.first_row + k for k in rows])

    def _walk(self) -> None:
        """Compare LMDB's view with the sidecars, and the manifest's numbers with what was read."""
        walk = ShardWalk(self._shard, self._faults, self._on_bytes)
        walk.run()
        self._dropped_rows()
        entry, text = self._shard.entry, self._store.text
        for name, totals in entry.ragged.items():
            group = RAGGED_PREFIX + name
            own, said = (self._tokens[group], self._max_tokens[group]), (totals.tokens, totals.max_tokens)
            if self._entries[group] == entry.groups[group].rows and own != said:
                error = f"tokens and max_tokens are {own}, the manifest says {said}"
                self._faults.add(error, group)
        if self._entries[TEXT_GROUP] == entry.groups[TEXT_GROUP].rows:
            caption_bytes = self._tokens[TEXT_GROUP] * text.token_bytes + self._entries[TEXT_GROUP] * text.fixed_bytes
            for name, found, stored in (
                ("caption_bytes", caption_bytes, entry.caption_bytes),
                ("max_tokens", self._max_tokens[TEXT_GROUP], entry.max_tokens),
                ("record_bytes", walk.record_bytes, entry.record_bytes),
                ("samples", walk.records, entry.samples),
            ):
                if found != stored:
                    self._faults.add(f"{name} is {found}, the manifest says {stored}")

    def _dropped_rows(self) -> None:
        for group, entry in self._shard.entry.groups.items():
            rows = self._shard.dropped_rows(group)
            if len(rows) and (bool((rows[1:] <= rows[:-1]).any()) or int(rows[-1]) >= entry.rows):
                self._faults.add("the list of its dropped rows is not in order, or names rows that do not exist", group)


def _segments(fd: int, num_bytes: int, places: BlockPlaces) -> Iterator[tuple[BlockPlace | None, memoryview]]:
    """Read a file in order and yield its segments: complete blocks, and the bytes between them in pieces.

    A segment's bytes are valid only until the next one.
    """
    buffer = memoryview(bytearray(SEGMENT_BYTES))
    at = 0
    if num_bytes:  # a pipe has length 0 and does not support fadvise
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def between(end: int) -> Iterator[tuple[BlockPlace | None, memoryview]]:
        nonlocal at
        while at < end:
            yield None, _fill(fd, at, buffer[: min(SEGMENT_BYTES, end - at)])
            at += min(SEGMENT_BYTES, end - at)

    for place in places:
        yield from between(place.offset)
        if place.length > len(buffer):
            buffer = memoryview(bytearray(place.length))
        yield place, _fill(fd, at, buffer[: place.length])
        at += place.length
    yield from between(num_bytes)


def _fill(fd: int, offset: int, out: memoryview) -> memoryview:
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            raise CorruptError(f"the file ended at byte {offset + done} while it was read")
        done += count
    return out
