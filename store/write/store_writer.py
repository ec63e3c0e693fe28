"""Write a store from numpy arrays: lock it, create it or continue it, add rows to its shards, commit, publish."""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.files.paths import redacted
from bucketline.option_value import expect, expect_int, unlike
from bucketline.store.format.block import (
    FLIPPED_SUFFIX,
    IMAGE_AXES,
    SEEN_EMPTY,
    SEEN_IMAGES,
    TARGET,
    TOKENS,
    Column,
    EntriesOf,
    caption_digest,
    sample_digest,
)
from bucketline.store.format.manifest import COPY_PREFIX, SHARD_NAME, pending_path, refuse_difference, shard_paths
from bucketline.store.format.schema import ColumnRole, Schema, bucket_entry, text_entry
from bucketline.store.format.text import TEXT_GROUP, TextSpec
from bucketline.store.remote.urls import is_url
from bucketline.store.write.publish import LocalTarget, unlisted
from bucketline.store.write.row_form import Axis, RaggedGroup, RowColumn, RowForm, new_record
from bucketline.store.write.shard_writer import ShardWriter
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.format.text import Entry
    from bucketline.store.read.store import Store
    from bucketline.store.write.publish import StoreTarget
    from bucketline.store.write.row_form import Arrays
    from bucketline.typed_json import Json


# ----------------------------------------------------------------------------------------------------------------- part writer
# Add rows to a store's shards: check them, begin a new shard when one is full, commit on request.

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
        self.withdrawn = frozenset(() if manifest is None else manifest.withdrawn)  # ids that `store drop` withdrew
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
        """Return True if the generation that this writer knows has the sample, or withdrew it, or it was added here since.

        A part knows the newest generation of when it was made. One index lookup per shard.
        """
        digest = sample_digest(sample_id)
        if digest in self._added or sample_id in self.withdrawn:
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
        if type(captions) is not dict:
            expected = "a mapping from each caption to its arrays, {'a cat': {'tokens': tokens}}"
            expect(f"{item}: captions", captions, Mapping, expected)
        values = form.values(item, columns)
        bucket = split if "/" in split else form.bucket(item, split, values)
        self._add(item, new_record(sample_id, bucket, tuple(captions), form.axes), values, captions, ragged)

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
                embedding; or if the id was added before, or is withdrawn. Nothing is added then, and the writer can continue.
            StoreError: if the disk is full, the store is not writable, or the record has a value that the index cannot hold.
        """
        item = _item(record.id)
        self._add(item, record, self._form.values(item, columns), captions, ragged)

    def _add(
        self,
        item: str,
        record: SampleRecord,
        values: Mapping[str, NDArray[Any]],
        captions: Mapping[str, Arrays],
        ragged: Mapping[str, Any],
    ) -> None:
        form, digest = self._form, sample_digest(record.id)
        if record.id in self.withdrawn:
            raise UsageError(f"{item} is withdrawn (`store drop`): leave it out, or call take_back of the StoreWriter first")
        spec = self._spec(record.bucket)
        if record.split != spec.bucket.partition("/")[0]:
            raise UsageError(f"{item} has the split {record.split!r}, expected that of its bucket, {record.bucket}; change one")
        entries = form.row_entries(item, ragged)
        with self._turn:
            if digest in self._added:
                raise UsageError(f"{item} was added before; ids must be unique: give this one another id, or leave it out")
            shard = self._shard_with_room()
            digests, new = self._captions(item, shard, record.captions, captions, digest)
            try:
                latents = form.with_presence(spec, values)
                shard.add(spec=spec, latents=latents, record=record, captions=digests, entries=entries, new=new)
            except ValueError as error:
                raise UsageError(f"{item}: {error}; convert it, or write to a store whose columns it fits") from error
            self._added.add(digest)

    def _captions(
        self, item: str, shard: ShardWriter, texts: Sequence[str], captions: Mapping[str, Arrays], sample: bytes
    ) -> tuple[list[bytes], list[dict[str, Entry]]]:
        """Return the digests of a row's captions, and those that a shard does not have yet, as entries by group."""
        digests, new = [], {}
        for text in texts:
            if not isinstance(text, str):
                raise unlike(f"{item}: a caption", text, "a str")
            if text not in captions:
                raise UsageError(f"{item} has the caption {text!r:.80} without an embedding; give one for each caption")
            digests.append(digest := self._form.schema.caption_digest(text, sample))
            if digest not in new and not shard.has_caption(digest):
                new[digest] = self._form.caption(item, text, captions[text], digest)
        return digests or [self._form.empty[TEXT_GROUP].digest], list(new.values())

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
            is_known = self._known is not None and name in self._known.known_shards  # maybe retired, and collected
            if not is_known and not any(path.exists() for path in (paths.lmdb, paths.meta, pending_path(self.path, name))):
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


# ---------------------------------------------------------------------------------------------------------------- store writer

_COLUMN = "RowColumn(role='target', dtype='F16', shape=(128, 'length'))"


def check_description(
    path: object, columns: object, encoders: object, text: object, empty_caption: object, ragged: object
) -> None:
    """Check the arguments of a store's writer."""
    expect("a store's place", path, str | Path, "a path, as str or Path")
    _expect_all("columns", columns, RowColumn, f"a list of RowColumn, such as [{_COLUMN}]")
    if not columns:
        raise UsageError(f"columns is {columns!r}, expected one or more, such as [{_COLUMN}]")
    expect("encoders", encoders, Mapping, "a mapping, such as {'vae': {'scaling_factor': 0.18215}}")
    if not isinstance(text, TextSpec):
        _expect_all("text", text, Column, "a list of Column, such as [Column(name='tokens', dtype='F16', shape=(768,))]")
    expect(
        "empty_caption",
        empty_caption,
        Mapping | None,
        "a mapping from each text column to its array, such as {'tokens': tokens}",
    )
    expect("ragged", ragged, Mapping, "a mapping from names to RaggedGroup")
    for name, group in dict(ragged).items():  # type: ignore[call-overload]
        expect(f"ragged group {name!r:.80}", group, RaggedGroup, "a RaggedGroup: RaggedGroup(columns=[Column(…)])")


def _expect_all(item: str, values: object, kind: type, expected: str) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise unlike(item, values, expected)
    for value in values:
        expect(f"an item of {item}", value, kind, expected)


def description_as_json(item: str, values: Mapping[str, Any]) -> dict[str, Json]:
    """Return a mapping's values as JSON."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = encode(value)
        except TypeError as error:
            raise UsageError(
                f"{item}[{name!r:.80}] is {value!r:.100}: {error}, expected numbers, texts, lists and mappings: give those "
                "that describe it"
            ) from error
    return found


def roles_of(columns: Sequence[RowColumn], encoders: Collection[str]) -> dict[str, ColumnRole]:
    """Return the manifest's entries of a store's columns; none if they are images' latents."""
    by_role = {column.role: column for column in columns}
    if len(by_role) != len(columns):
        raise UsageError(f"the columns' roles are {[column.role for column in columns]}; expected each of them once")
    if not any(column.axes for column in columns):
        raise UsageError("no column has an axis, by which rows are put into buckets; name one, as shape=(128, 'length')")
    for column in columns:
        if column.role.endswith(FLIPPED_SUFFIX):
            base = by_role.get(column.role.removesuffix(FLIPPED_SUFFIX))
            if base is None or replace(base, role=column.role, encoder=column.encoder) != column:
                raise UsageError(
                    f"column {column.role!r} has no counterpart that is like itself, but for the mirror image; add the column "
                    f"{column.role.removesuffix(FLIPPED_SUFFIX)!r} with its dtype and shape"
                )
    if all(_is_plain_latent(column, encoders) for column in columns) and TARGET in by_role:
        return {}
    return {column.name: ColumnRole(role=column.role, encoder=column.encoder, optional=column.optional) for column in columns}


def _is_plain_latent(column: RowColumn, encoders: Collection[str]) -> bool:
    """Return whether a column is an image's latent, or its mirror image's, which `columns` does not list."""
    dimensions = column.dimensions
    names = tuple(axis.name if isinstance(axis, Axis) else "" for axis in dimensions)
    return (
        column.role in (TARGET, TARGET + FLIPPED_SUFFIX)
        and names == ("", *IMAGE_AXES)
        and not column.optional
        and (column.encoder is None or (column.encoder == "vae" and "vae" in encoders))
        and not column.dtype.startswith(("F8", "C"))
    )


MAX_CAPTIONS = 1 << 12  # of a sample
NO_TEXT = TextSpec(tokens=(Column(name=TOKENS, dtype="U8", shape=(1,)),))  # of a store whose one caption has no tokens


class StoreWriter(PartWriter):
    """Creates a store or continues one, and writes rows to it. Inside its `with` block it is the store's only writer.

        with StoreWriter("photos.store", encoders=…, columns=…, text=…, empty_caption=…) as writer:
            writer.add("cats/a.png", "train/512x512", {"latent": latent}, {"a cat": {"tokens": tokens}})
            writer.commit()

    Entering the block takes the store's lock and publishes what a killed writer had committed. Leaving it seals and publishes;
    after an error, what was committed stays for the next writer to publish, and what was not is lost. A sample replaces the
    one of the same id that was published before. Threads may share it, and wait for one another; `part` makes writers for other
    processes, and a child that is forked within the block is refused.
    """

    manifest: Manifest  # the newest generation

    def __init__(
        self,
        path: Path | str,
        *,
        columns: Sequence[RowColumn],
        encoders: Mapping[str, object] = MappingProxyType({}),
        text: Sequence[Column] | TextSpec = (),
        empty_caption: Arrays | None = None,
        rules: Mapping[str, object] | None = None,
        ragged: Mapping[str, RaggedGroup] = MappingProxyType({}),
        max_captions: int = 8,
        shard_bytes: int = SHARD_BYTES,
        shard_names: str | None = None,
    ) -> None:
        """Describe the store's contents, which are fixed when it is created; nothing is read or written yet.

        `columns` are those of a row, each with its role. `encoders` and `rules` say what made the columns, as JSON values that
        readers compare and show; a latent is stored unscaled, and `Batch.scaled` and the trainer scale it by
        `encoders["vae"]["scaling_factor"]`. `text` are the columns of a token, or a `TextSpec` if there are columns of a
        caption as well, and `empty_caption` is the
        embedding that stands for no caption; a store without captions has neither. `ragged` are groups of arrays whose length
        differs from caption to caption or from row to row, by name; the empty caption has an entry of each group of captions,
        in `empty_caption` as in any caption's mapping. `shard_names` is a pattern with a place for a number; by default it is
        drawn, so that no name is ever used twice.

        Raises:
            UsageError: if `path` is a URL, columns or ragged groups do not go together, the empty caption does not fit the text
                columns, `encoders` or `rules` have a value without a JSON form, or another argument is not of its type or out
                of range.
        """
        if is_url(path):
            raise UsageError(
                f"{redacted(str(path))} is a URL, and StoreWriter writes to a folder, expected a path: write_store writes to "
                "a URL, or `store push` sends a store when it is whole"
            )
        expect_int("max_captions", max_captions, f"an int, 1 to {MAX_CAPTIONS}")
        expect_int("shard_bytes", shard_bytes, "an int, such as 1 << 30")
        if not 1 <= max_captions <= MAX_CAPTIONS or shard_bytes < 1:
            raise UsageError(
                f"max_captions is {max_captions} and shard_bytes {shard_bytes}, expected 1 to {MAX_CAPTIONS}, and 1 or more"
            )
        check_description(path, columns, encoders, text, empty_caption, ragged)
        spec = text if isinstance(text, TextSpec) else TextSpec(tokens=tuple(text))
        of_captions = [name for name, group in ragged.items() if group.of == EntriesOf.CAPTIONS]
        if taken := {column.name for column in (*spec.tokens, *spec.fixed)} & set(of_captions):
            raise UsageError(f"{min(taken)!r} is the name of a text column and of a ragged group of captions; rename one")
        if not spec.tokens:
            if of_captions:
                raise UsageError(
                    f"there is a ragged group of captions, {of_captions[0]!r}, and no text column; give one as text"
                )
            spec, empty_caption = NO_TEXT, {NO_TEXT.tokens[0].name: np.zeros((0, 1), dtype="u1")}
        if empty_caption is None and {SEEN_IMAGES, SEEN_EMPTY} <= ragged.keys() and not spec.fixed:
            empty_caption = {c.name: np.zeros((0, *c.shape), dtype=c.numpy_dtype) for c in spec.tokens}
        if empty_caption is None:
            raise UsageError("there are text columns and no empty_caption; give the embedding that stands for no caption")
        try:
            self._schema = Schema(
                encoders=description_as_json("encoders", encoders),
                rules=description_as_json("rules", rules or {}),
                max_captions=max_captions,
                text=text_entry(spec),
                columns=roles_of(columns, encoders),
                ragged={name: group.entry(name) for name, group in ragged.items()},
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        form = RowForm(schema=self._schema, columns=tuple(columns), ragged=dict(ragged))
        form = replace(form, empty=form.caption(str(path), "", empty_caption, caption_digest("")))
        if self._schema.sees_images and (given := form.empty[TEXT_GROUP].num_tokens):
            raise UsageError(
                f"empty_caption has {given} tokens, expected none: if the text sees the images, the empty caption's are each "
                f"row's own, in the ragged group {SEEN_EMPTY!r}; leave empty_caption out"
            )
        super().__init__(Path(path), form, "", shard_bytes)
        self._wanted_names = shard_names and _checked_names(shard_names)
        self._parts: set[str] = set()  # what the names of their shards begin with
        self._held = ExitStack()

    @classmethod
    def to(cls, target: StoreTarget, **contents: Any) -> StoreWriter:  # noqa: ANN401
        """Return the writer of a store that may be in object storage, from the keyword arguments of `StoreWriter`.

        Enter `target.held()` before the writer.
        """
        writer = cls(target.path, **contents)
        writer._target = target
        return writer

    def __enter__(self) -> StoreWriter:
        """Lock the store, create it if there is none, and adopt what a killed writer had committed.

        Raises:
            LockedError: if another process writes to the store.
            FingerprintError: if the store was made with other encoders, rules or columns.
            StoreError: if the path is not a store and not empty, or cannot be written.
        """
        with ExitStack() as held:
            manifest = held.enter_context(self._target.writing(self._schema))
            for bucket in manifest.buckets:
                axes: list[Json] = [[axis.name for axis in bucket.axes], list(self._form.axes)]
                refuse_difference({"buckets": {bucket.name: {"axes": axes[0]}}}, {"buckets": {bucket.name: {"axes": axes[1]}}})
                stored, own = (encode(entry.columns) for entry in (bucket, bucket_entry(self._spec(bucket.name))))
                refuse_difference({"buckets": {bucket.name: stored}}, {"buckets": {bucket.name: own}})
            self._take_over(manifest)
            self._forget_added()
            self._turn = OneAtATime(self.path)
            with self._turn:  # from here on, forked children are refused
                self._shard_names = self._wanted_names or f"g{manifest.generation + 1:06d}-{secrets.token_hex(4)}-{{:04d}}"
            self._held = held.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._held:
                if error is None:
                    self.publish()
                    self._warn_of_open_parts()
                self.close()
        finally:
            self._shard_names = ""

    def __contains__(self, sample_id: str) -> bool:
        """Return True if the newest generation has the sample, or withdrew it, or it was added since.

        One index lookup per shard.

        Raises:
            UsageError: before the writer's `with` block.
        """
        if self._known is None:
            self._refuse_outside()
        return super().__contains__(sample_id)

    def publish(self, sealed: Iterable[str] = ()) -> Manifest:
        """Seal the current shard and publish a generation with all rows added so far; readers that open it now see them.

        What the parts of this writer have sealed, in whatever process, is published too; `sealed` names further shards, of
        parts that `part` did not make. The writer can continue. If nothing is new, nothing is written.

        Raises:
            StoreError: if the disk is full or a shard's files are missing; what was committed is kept for the next writer.
        """
        if isinstance(sealed, str | PartWriter):
            raise unlike("sealed", sealed, "names of shards, such as part.sealed; leave it out for parts of this writer")
        with self._turn:
            self._refuse_outside()
            self.seal()
            theirs = unlisted(self.path, self.manifest, tuple(self._parts))
            self._take_over(self._target.publish(self.manifest, {*self.sealed, *sealed, *theirs}))
            self._forget_added()
            return self.manifest

    def take_back(self, ids: Collection[str]) -> None:
        """Publish that ids which `store drop` withdrew no longer are, so that they can be added. Others change nothing.

        Parts that were made before do not know it.

        Raises:
            StoreError: as `publish`.
        """
        with self._turn:
            self._refuse_outside()
            self._take_over(self._target.publish(self.manifest, (), taken_back=ids))

    def part(self, name: str) -> PartWriter:
        """Return a writer for another process, with shards of its own; `name` is made of letters, digits, `-` and `_`.

        Send it there (it can be pickled) and add rows in its `with` block. When that has been left, `publish` here, or leaving
        this writer's block, publishes them. If that process is killed, the next StoreWriter of the store adopts what it had
        committed. The same id in two parts is not noticed: the part whose name sorts last wins.

        Raises:
            UsageError: if the name cannot be part of a shard's name.
        """
        with self._turn:
            self._refuse_outside()
            names = _checked_names(self._shard_names.replace("{", f"{name}-{{"))
            self._parts.add(names.partition("{")[0])
        part = PartWriter(self.path, self._form, names, self._shard_bytes, self.manifest)
        part._target = self._target
        return part

    def _shard_with_room(self) -> ShardWriter:
        self._refuse_outside()
        return super()._shard_with_room()

    def _refuse_outside(self) -> None:
        if not self._shard_names:
            raise UsageError(f"{self.path} is not being written; use its StoreWriter inside `with StoreWriter(…) as writer:`")

    def _warn_of_open_parts(self) -> None:
        """Name a shard that a part has begun and not sealed: the generation lacks its rows."""
        left = sorted(path.stem for path in (self.path / "pending").glob("*.lmdb") if path.stem.startswith(tuple(self._parts)))
        if left:
            warnings.warn(
                f"{self.path}: {counted(len(left), 'shard')} of its parts, the first is {left[0]}, has not been sealed, so "
                "its rows are not published; have every process leave `with part:` before the writer's block ends. The "
                "store's next StoreWriter publishes what was committed",
                stacklevel=3,
            )

    def _forget_added(self) -> None:
        self.sealed = []
        self._added.clear()

    def _take_over(self, manifest: Manifest) -> None:
        self.manifest = self._known = manifest
        self.withdrawn = frozenset(manifest.withdrawn)
        self._published = self._target.open(manifest)


def _checked_names(pattern: str) -> str:
    try:
        first, second = (pattern.format(number) for number in range(2))
    except (ValueError, LookupError):
        first = second = pattern
    if first == second or not SHARD_NAME.fullmatch(first) or first.startswith(COPY_PREFIX):
        raise UsageError(
            f"{pattern!r} is not a pattern of shards' names; expected letters, digits, - and _, as 'mine-{{:04d}}'"
        )
    return pattern
