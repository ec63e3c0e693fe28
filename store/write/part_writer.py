"""Add rows to a store's shards: check them, begin a new shard when one is full, commit on request."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError
from bucketline.option_types import expect
from bucketline.store.format.hashing import caption_digest, sample_digest
from bucketline.store.format.layout import pending_path, shard_paths
from bucketline.store.write.publish import LocalTarget
from bucketline.store.write.row_form import new_record
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.format.text_block import Entry
    from bucketline.store.read.store import Store
    from bucketline.store.write.publish import StoreTarget
    from bucketline.store.write.row_form import Arrays, RowForm

SHARD_BYTES = 2 << 30


class PartWriter:
    """Writes shards of its own, for a `StoreWriter` to publish. `StoreWriter.part` makes it; it can be pickled before use.

    Leaving its `with` block seals the last shard, which the store's writer then publishes. After an error, what was committed
    stays pending for the next writer of the store, and what was not is lost. Any thread of the process that uses it first may
    use it, one at a time; a process that is forked from it then is refused.
    """

    def __init__(self, path: Path, form: RowForm, shard_names: str, shard_bytes: int, manifest: Manifest | None = None) -> None:
        """Write nothing yet. `manifest` is the generation that the part knows of its store; None if the folder is not one."""
        self.path = path
        self.sealed: list[str] = []  # names of the shards that this object has sealed
        self._known = manifest
        self._target: StoreTarget = LocalTarget(path)
        self._published: Store | None = None  # opened by the first question
        self._form = form
        self._shard_names = shard_names
        self._shard_bytes = shard_bytes
        self._num_named = 0
        self._added: set[bytes] = set()  # digests of ids
        self._specs: dict[str, BlockSpec] = {}
        self._shard: ShardWriter | None = None
        self._turn = OneAtATime(path)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.seal()
        else:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_published": None}  # the other process opens it by itself

    def __contains__(self, sample_id: str) -> bool:
        """Return True if the generation that this writer knows has the sample, or it was added here since.

        A part knows the newest generation of when it was made. One index lookup per shard.
        """
        digest = sample_digest(sample_id)
        if digest in self._added:
            return True
        if self._published is None and self._known is not None:
            self._published = self._target.open(self._known)
        return self._published is not None and any(shard.find(digest) for shard in reversed(self._published.shards))

    def add(
        self,
        sample_id: str,
        split: str,
        columns: Arrays,
        captions: Mapping[str, Arrays] = MappingProxyType({}),
        ragged: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add a sample whose image, if it has one, has exactly its bucket's size. `commit` makes the row durable.

        `split` is `train` or `val`; the bucket follows from the arrays' shapes. The bucket's name is taken as well, such as
        `train/512x768`, and the shapes are compared with it. `columns` has an array per column, by role; they are copied.
        Torch tensors are taken too, and what numpy lacks (BF16, F8) also as its bits in unsigned integers. `captions` maps each
        caption to its embedding, `[T, …]` for each token column; without any, the row has the empty caption. A caption that the
        current shard has already is not stored again: its first embedding stays. Those beyond the store's `max_captions` are
        kept in the record only.
        `ragged` has the row's entry of each ragged group of rows: an array for each column by name, or one array if there is
        only one column. Those of captions are in the caption's own mapping, by the name of the group.

        Raises:
            UsageError: as `add_record`.
            StoreError: as `add_record`.
        """
        form, item = self._form, _item(sample_id)
        expect(f"{item}: split", split, str, "'train', 'val', or a bucket's name")
        expect(
            f"{item}: captions", captions, Mapping, "a mapping from each caption to its arrays, {'a cat': {'tokens': tokens}}"
        )
        values = form.values(item, columns)
        bucket = split if "/" in split else form.bucket(item, split, values)
        self._add(new_record(sample_id, bucket, tuple(captions), form.axes), values, captions, ragged)

    def add_record(
        self,
        record: SampleRecord,
        columns: Arrays,
        captions: Mapping[str, Arrays],
        ragged: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Add a sample with a record of its own: original size, crop, source. Its `row` and `caption_rows` are set here.

        Raises:
            UsageError: if the columns are not the bucket's in name, dtype or shape, or not finite; if a caption has no
                embedding; or if the id was added before. Nothing is added then, and the writer can continue.
            StoreError: if the disk is full, the store is not writable, or the record has a value that the index cannot hold.
        """
        values = self._form.values(_item(record.id), columns)
        self._add(record, values, captions, ragged)

    def _add(
        self,
        record: SampleRecord,
        values: Mapping[str, NDArray[Any]],
        captions: Mapping[str, Arrays],
        ragged: Mapping[str, Any],
    ) -> None:
        item, digest = _item(record.id), sample_digest(record.id)
        spec = self._spec(record.bucket)
        if record.split != spec.bucket.partition("/")[0]:
            raise UsageError(f"{item} has the split {record.split!r}, expected that of its bucket, {record.bucket}; change one")
        entries = self._form.row_entries(item, ragged)
        with self._turn:
            if digest in self._added:
                raise UsageError(f"{item} was added before; ids must be unique: give this one another id, or leave it out")
            shard = self._shard_with_room()
            new = self._new_captions(item, shard, record.captions, captions)
            try:
                digests = [caption_digest(text) for text in record.captions or ("",)]
                latents = self._form.with_presence(spec, values)
                shard.add(spec=spec, latents=latents, record=record, captions=digests, entries=entries, new=new)
            except ValueError as error:
                raise UsageError(f"{item}: {error}; convert it, or write to a store whose columns it fits") from error
            self._added.add(digest)

    def _new_captions(
        self, item: str, shard: ShardWriter, texts: Sequence[str], captions: Mapping[str, Arrays]
    ) -> list[dict[str, Entry]]:
        """Return those of a row's captions that a shard does not have yet, as entries by group."""
        new = {}
        for text in texts:
            expect(f"{item}: a caption", text, str, "a str")
            if text not in captions:
                raise UsageError(f"{item} has the caption {text!r:.80} without an embedding; give one for each caption")
            digest = caption_digest(text)
            if digest not in new and not shard.has_caption(digest):
                new[digest] = self._form.caption(item, text, captions[text])
        return list(new.values())

    def commit(self) -> None:
        """Write all added rows durably: they survive `kill -9` and a power failure from here on.

        Raises:
            StoreError: if the disk is full or the store is not writable; rows of earlier commits are kept.
        """
        with self._turn:
            if self._shard is not None:
                self._shard.commit()

    def seal(self) -> None:
        """Commit and seal the current shard; the next row begins another.

        Raises:
            StoreError: if the disk is full; what was committed stays pending.
        """
        with self._turn:
            shard, self._shard = self._shard, None
            if shard is not None and shard.seal():
                self.sealed.append(shard.name)

    def close(self) -> None:
        """Abandon the current shard: what was committed stays pending for the next writer, the rest is discarded."""
        if self._turn.is_inherited:  # the file and its lock are another process's
            return
        with self._turn:
            if self._shard is not None:
                self._shard.close()
                self._shard = None

    def _spec(self, bucket: str) -> BlockSpec:
        if bucket not in self._specs:
            self._specs[bucket] = self._form.spec(bucket)
        return self._specs[bucket]

    def _shard_with_room(self) -> ShardWriter:
        if self._shard is not None and self._shard.is_full:
            self.seal()
        if self._shard is None:
            form = self._form
            self._shard = ShardWriter(self.path, self._new_name(), form.schema.groups, form.empty, self._shard_bytes)
        return self._shard

    def _new_name(self) -> str:
        while True:
            name = self._shard_names.format(self._num_named)
            self._num_named += 1
            paths = shard_paths(self.path, name)
            if not any(path.exists() for path in (paths.lmdb, paths.extents, paths.index, pending_path(self.path, name))):
                return name


def _item(sample_id: str) -> str:
    return f"sample {sample_id!r:.200}"


class OneAtATime:
    """A lock for the threads of the process that uses it first; a thread may take it again. Unpickled, it is a new one.

    A child that is forked after that is refused: it has a copy of what the writer holds in memory, and the files and locks are
    its parent's.
    """

    def __init__(self, item: Path) -> None:
        """Take nothing yet; `item` is what is written."""
        self._item = item
        self._lock = threading.RLock()
        self._pid: int | None = None

    def __reduce__(self) -> tuple[type[OneAtATime], tuple[Path]]:
        return OneAtATime, (self._item,)

    @property
    def is_inherited(self) -> bool:
        """True if this process was forked from the one that uses it."""
        return self._pid not in (None, os.getpid())

    def __enter__(self) -> None:
        if self.is_inherited:
            raise UsageError(
                f"process {self._pid} writes {self._item}, and process {os.getpid()} was forked from it: what this one adds "
                "would be lost; make a writer for each process by `StoreWriter.part`, before it is used"
            )
        self._lock.acquire()
        self._pid = os.getpid()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
