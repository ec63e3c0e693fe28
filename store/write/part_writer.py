"""Add rows to a store's shards: check them, begin a new shard when one is full, commit on request.

Shape letters: C latent channels, h and w the latent's height and width, T tokens of a caption.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import UsageError
from bucketline.store.format.block import BlockSpec, Column, fixed_columns
from bucketline.store.format.columns import LATENT, TOKENS, TOKENS_SCALE
from bucketline.store.format.hashing import DIGEST_BYTES, caption_digest, sample_digest
from bucketline.store.format.layout import pending_path, shard_paths
from bucketline.store.format.manifest import BUCKET_NAME
from bucketline.store.format.quantised_text import quantised_caption
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.text_block import TextSpec, make_caption
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.format.text_block import Caption

    Arrays = Mapping[str, NDArray[Any]]  # column name → values

SHARD_BYTES = 2 << 30
_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}  # all ones: infinite, or not a number


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentColumn:
    """A column with one latent per row, `[C, h, w]`: h and w are the bucket's height and width in px, over `downscale`."""

    channels: int
    downscale: int = 8
    dtype: str = "F16"  # a safetensors name; BF16 arrays are given as their bits, uint16
    name: str = LATENT

    def in_bucket(self, bucket: str) -> Column:
        """Return the column as a bucket has it.

        Raises:
            UsageError: if it is not the name of a bucket, or the bucket's size is not a multiple of `downscale`.
        """
        match = BUCKET_NAME.fullmatch(bucket)
        if match is None:
            raise UsageError(f"{bucket!r} is not a bucket; expected train or val, and height x width in px, as 'train/512x768'")
        height, width = int(match[2]), int(match[3])
        if height % self.downscale or width % self.downscale:
            raise UsageError(f"bucket {bucket}: expected a height and a width that are multiples of {self.downscale} px")
        shape = (self.channels, height // self.downscale, width // self.downscale)
        return Column(name=self.name, dtype=self.dtype, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """The columns of a store's rows and captions."""

    columns: tuple[LatentColumn, ...]
    text: TextSpec
    empty_caption: Caption
    max_captions: int

    def spec(self, bucket: str) -> BlockSpec:
        own = (column.in_bucket(bucket) for column in self.columns)
        return BlockSpec(bucket=bucket, columns=(*fixed_columns(self.max_captions), *own))


def new_record(sample_id: str, bucket: str, captions: tuple[str, ...] = ()) -> SampleRecord:
    """Return the record of an image of exactly its bucket's size, of unknown origin; `dataclasses.replace` changes the rest.

    >>> record = new_record("a.png", "val/64x96")
    >>> record.split, record.original_size, record.crop
    ('val', (64, 96), (0, 0, 64, 96))

    Raises:
        UsageError: if `bucket` is not the name of one.
    """
    height, width = LatentColumn(channels=1, downscale=1).in_bucket(bucket).shape[1:]
    return SampleRecord(
        id=sample_id,
        bucket=bucket,
        row=0,
        split=bucket.partition("/")[0],
        source=sample_id,
        source_bytes=0,
        source_mtime_ns=0,
        content=bytes(DIGEST_BYTES),
        original_size=(height, width),
        resized=(height, width),
        crop=(0, 0, height, width),
        crop_in_source=(0, 0, height, width),
        captions=captions,
        caption_rows=(),
    )


class PartWriter:
    """Writes shards of its own, for a `StoreWriter` to publish. `StoreWriter.part` makes it; it can be pickled before use.

    Leaving its `with` block seals the last shard. After an error, what was committed stays pending for the next writer of the
    store, and what was not is lost. Use it from one thread.
    """

    def __init__(self, path: Path, form: RowForm, shard_names: str, shard_bytes: int) -> None:
        self.path = path
        self.sealed: list[str] = []  # names of sealed shards, for `StoreWriter.publish`
        self._form = form
        self._shard_names = shard_names
        self._shard_bytes = shard_bytes
        self._num_named = 0
        self._begun: list[str] = []  # names of shards, sealed or not
        self._added: set[bytes] = set()  # digests of ids
        self._specs: dict[str, BlockSpec] = {}
        self._shard: ShardWriter | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.seal()
        else:
            self.close()

    def add(self, sample_id: str, bucket: str, columns: Arrays, captions: Mapping[str, Arrays] = MappingProxyType({})) -> None:
        """Add a sample whose image has exactly its bucket's size. The arrays are copied; `commit` makes the row durable.

        `bucket` is `SPLIT/HEIGHTxWIDTH` in px, `columns` has `[C, h, w]` for each latent column. `captions` maps each caption
        to its embedding, `[T, …]` for each token column; without any, the row has the empty caption. A caption that the
        current shard has already is not stored again; those beyond the store's `max_captions` are kept in the record only.

        Raises:
            UsageError: as `add_record`.
            StoreError: as `add_record`.
        """
        self.add_record(new_record(sample_id, bucket, tuple(captions)), columns, captions)

    def add_record(self, record: SampleRecord, columns: Arrays, captions: Mapping[str, Arrays]) -> None:
        """Add a sample with a record of its own: original size, crop, source. Its `row` and `caption_rows` are set here.

        Raises:
            UsageError: if the columns are not the bucket's in name, dtype or shape, or not finite; if a caption has no
                embedding; or if the id was added before. Nothing is added then, and the writer can continue.
            StoreError: if the disk is full, the store is not writable, or the record has a value that the index cannot hold.
        """
        item, digest = f"sample {record.id!r:.200}", sample_digest(record.id)
        if digest in self._added:
            raise UsageError(f"{item} was added before; ids must be unique: give this one another id, or leave it out")
        spec = self._spec(record.bucket)
        if record.split != spec.bucket.partition("/")[0]:
            raise UsageError(f"{item} has the split {record.split!r}, expected that of its bucket, {record.bucket}; change one")
        rows = _checked(item, [column.in_bucket(spec.bucket) for column in self._form.columns], columns)
        shard = self._shard_with_room()
        for text in record.captions:
            if not shard.has_caption(caption_digest(text)):
                if text not in captions:
                    raise UsageError(f"{item} has the caption {text!r:.80} without an embedding; give one for each caption")
                shard.add_caption(checked_caption(self._form.text, text, captions[text], item))
        try:
            digests = [caption_digest(text) for text in record.captions or ("",)]
            shard.add(spec=spec, latents=rows, record=record, captions=digests)
        except ValueError as error:
            raise UsageError(f"{item}: {error}; convert it, or write to a store whose columns it fits") from error
        self._added.add(digest)

    def commit(self) -> None:
        """Write all added rows durably: they survive `kill -9` and a power failure from here on.

        Raises:
            StoreError: if the disk is full or the store is not writable; rows of earlier commits are kept.
        """
        if self._shard is not None:
            self._shard.commit()

    def seal(self) -> None:
        """Commit and seal the current shard; the next row begins another.

        Raises:
            StoreError: if the disk is full; what was committed stays pending.
        """
        shard, self._shard = self._shard, None
        if shard is not None and shard.seal():
            self.sealed.append(shard.name)

    def close(self) -> None:
        """Abandon the current shard: what was committed stays pending for the next writer, the rest is discarded."""
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
            form, name = self._form, self._new_name()
            self._begun.append(name)
            self._shard = ShardWriter(self.path, name, form.text, form.empty_caption, self._shard_bytes)
        return self._shard

    def _new_name(self) -> str:
        while True:
            name = self._shard_names.format(self._num_named)
            self._num_named += 1
            paths = shard_paths(self.path, name)
            if not any(path.exists() for path in (paths.lmdb, paths.extents, paths.index, pending_path(self.path, name))):
                return name


def checked_caption(spec: TextSpec, text: str, values: Arrays, item: str) -> Caption:
    """Return a caption's embedding, checked against the store's text columns.

    Where these are quantised, `tokens` may be given as `[T, D]` F16 or F32 without scale and error, and is quantised here.

    Raises:
        UsageError: if a column is missing, of another dtype or shape, or not finite; the message names `item` and the caption.
    """
    item = f"{item}, caption {text!r:.80}"
    is_whole = spec.is_quantised and TOKENS_SCALE not in values
    given = spec.delivered if is_whole else spec
    own = _checked(item, (*given.tokens, *given.fixed), values)
    try:
        if is_whole:
            own |= _quantised(spec, own[TOKENS])
        tokens, fixed = ({column.name: own[column.name] for column in columns} for columns in (spec.tokens, spec.fixed))
        return make_caption(spec, caption_digest(text), tokens, fixed)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{item}: {error}; convert it, or write to a store whose text columns it fits") from error


def _quantised(spec: TextSpec, tokens: NDArray[Any]) -> dict[str, NDArray[Any]]:
    if tokens.dtype not in (np.float16, np.float32) or tokens.shape[1:] != spec.tokens[0].shape or tokens.ndim != 2:
        raise ValueError(
            f"tokens to be quantised are F16 or F32 [T, {spec.tokens[0].shape[0]}], got {tokens.dtype} {list(tokens.shape)}"
        )
    columns, error = quantised_caption(tokens.astype(np.float32), spec.tokens[0].dtype)
    return {**columns, **error}


def _checked(item: str, columns: Sequence[Column], values: Arrays) -> dict[str, NDArray[Any]]:
    """Return the values of exactly these columns as finite arrays; their shapes are compared where they are stored."""
    expected = sorted(column.name for column in columns)
    if sorted(values) != expected:
        raise UsageError(f"{item} has the columns {sorted(values)}, expected {expected}; give each of them, and no other")
    try:
        arrays = {column.name: np.asarray(values[column.name]) for column in columns}
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{item}: a column is not an array ({error}); give numpy arrays, and BF16 as its bits, uint16"
        ) from error
    for column in columns:
        if not _is_finite(arrays[column.name], column):
            raise UsageError(
                f"{item}: column {column.name!r} is NaN or infinite, or beyond the range of {column.dtype}; "
                "leave the sample out, or store a wider dtype"
            )
    return arrays


def _is_finite(values: NDArray[Any], column: Column) -> bool:
    """Return False if a value is NaN or infinite. 16-bit floats are compared as integers, which is several times faster."""
    if values.dtype != column.numpy_dtype:
        return True  # not what is stored: refused for its dtype
    if column.dtype in _EXPONENTS:
        exponent = np.uint16(_EXPONENTS[column.dtype])
        return not bool(((values.view("<u2") & exponent) == exponent).any())
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
