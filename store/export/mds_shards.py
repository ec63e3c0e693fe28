"""Export as MDS, the format of MosaicML Streaming: a folder for each bucket, with `index.json` and shards.

The columns are those of mosaicml/diffusion: `latents_512` of a square bucket, `latents_HEIGHTxWIDTH` of another, in F16 and as
the model is fed; the same with `/flipped` after the name of the mirrored image, if the store has it; `caption_latents`, F16. Of
other columns there are `mask`, U8 of `mask_shape`, and `control/NAME`, as the latents are; both are empty for samples that lack
them. A folder for each bucket, since a batch of a stream has one shape.
Source: `streaming/base/format/mds/`, `precompute_latents.py`.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from bucketline.errors import StoreError
from bucketline.store.export.sample_arrays import CONTROL, MASK, form_of, mask_shape, num_values, size_of
from bucketline.store.format.columns import FLIPPED_SUFFIX, LATENT
from bucketline.store.format.hashing import text_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.iter_samples import Listed
    from bucketline.store.read.store import Store

_MAX_SHARD_BYTES = (1 << 32) - 1  # offsets are U32
_INTEGERS = ("caption_tokens", "height", "original_height", "original_width", "width")
_TEXTS = ("caption", "key", "latents_shape")
_MASK_SHAPE = "mask_shape"


class MdsForm:
    """A store's samples in the form of MDS."""

    def __init__(self, store: Store, shard_bytes: int, columns: Sequence[str] | None = None) -> None:
        """Read what the samples have in common; `shard_bytes` is the most that a shard has, unless one sample has more.

        `columns` are roles to write next to the latents, None for all.

        Raises:
            StoreError: if they are not images' latents, or a column is neither a mask nor a control image's latent.
        """

        def why_not(bucket: str, role: str) -> str | None:
            column, latent = store.bucket(bucket).column(role), store.bucket(bucket).column(LATENT)
            if role == MASK:
                is_own = column.dtype == "U8" and column.shape in (size_of(bucket), latent.shape[1:])
            else:
                is_own = role.startswith(CONTROL) and (column.dtype, column.shape) == (latent.dtype, latent.shape)
            if is_own:
                return None
            found = f"in {bucket} it is {column.dtype} of {'x'.join(map(str, column.shape))}"
            return f"{found}, and MDS takes masks, U8 of the image's or the latent's size, and control/NAME like the latents"

        self.form, self._store = form_of(store, "MDS", columns, holds=why_not), store
        self.shard_bytes = min(shard_bytes, _MAX_SHARD_BYTES)

    def columns(self, bucket: str) -> dict[str, tuple[str, int | None]]:
        """Return the encoding and the length, None if it varies, of each column of a bucket, sorted by name as MDS has them."""
        found: dict[str, tuple[str, int | None]] = dict.fromkeys(_TEXTS, ("str", None))
        found |= dict.fromkeys(_INTEGERS, ("int", 8))
        found[latents_name(bucket)] = ("bytes", None)
        if self.form.flip:
            found[latents_name(bucket) + FLIPPED_SUFFIX] = ("bytes", None)
        if self.form.token_width is not None:
            found["caption_latents"] = ("bytes", None)
        if self.form.pooled_width is not None:
            found["caption_pooled"] = ("bytes", None)
        found |= dict.fromkeys(self.form.side, ("bytes", None))
        if MASK in self.form.side:
            found[_MASK_SHAPE] = ("str", None)
        return dict(sorted(found.items()))

    def num_bytes(self, listed: Listed, num_tokens: Sequence[int]) -> int:
        """Return the length of a sample in its shard, without reading values."""
        record, own = listed.record, self.form.side_of(self._store, listed)
        shape = self.form.latent_shape(self._store, record)
        lengths = [2 * num_values(shape)] * (2 if self.form.flip else 1)
        lengths += [len(_shape_text(shape)), len(text_bytes(record.id)), len(_caption(record))]
        if self.form.token_width is not None:
            lengths.append(2 * num_tokens[0] * self.form.token_width)
        if self.form.pooled_width is not None:
            lengths.append(2 * self.form.pooled_width)
        lengths += [2 * num_values(shape) if role in own else 0 for role in self.form.side if role != MASK]
        if MASK in self.form.side:
            mask = mask_shape(self._store, record.bucket) if MASK in own else ()
            lengths += [num_values(mask), len(_shape_text(mask))] if mask else [0, 0]
        return sum(lengths) + 4 * len(lengths) + 8 * len(_INTEGERS)

    def sample(self, record: SampleRecord, data: bytes) -> bytes:
        """Return a sample as its shard has it, from its safetensors file.

        Raises:
            StoreError: if a latent or an embedding is beyond F16, or its id is not UTF-8.
        """
        arrays, shape = self.form.arrays(record, data), self.form.latent_shape(self._store, record)
        height, width = record.original_size
        numbers = {"original_height": height, "original_width": width, "height": record.crop[2], "width": record.crop[3]}
        numbers["caption_tokens"] = 0 if arrays.tokens is None else len(arrays.tokens)
        values: dict[str, bytes] = {name: struct.pack("<q", number) for name, number in numbers.items()}
        values |= {"key": text_bytes(record.id), "caption": _caption(record), "latents_shape": _shape_text(shape)}
        for name, array in (
            (latents_name(record.bucket), self.form.fed(arrays.latent)),
            (latents_name(record.bucket) + FLIPPED_SUFFIX, None if arrays.flipped is None else self.form.fed(arrays.flipped)),
            ("caption_latents", arrays.tokens),
            ("caption_pooled", arrays.pooled),
            *((role, self.form.fed(control)) for role, control in arrays.controls.items()),
        ):
            if array is None:
                continue
            half = array.astype("<f2")
            if not bool((abs(half) < float("inf")).all()):
                raise StoreError(f"sample {record.id!r:.200}: its {name} is beyond the range of F16, which MDS caches have")
            values[name] = half.tobytes()
        if arrays.mask is not None:
            values |= {MASK: arrays.mask.tobytes(), _MASK_SHAPE: _shape_text(arrays.mask.shape)}
        columns = self.columns(record.bucket)
        values = dict.fromkeys(columns, b"") | values
        lengths = b"".join(struct.pack("<I", len(values[name])) for name, (_, size) in columns.items() if size is None)
        return lengths + b"".join(values[name] for name in columns)

    def description(self, bucket: str) -> dict[str, Any]:
        """Return the description of a bucket's shards, as each shard and the index have it."""
        columns = self.columns(bucket)
        return {
            "column_encodings": [kind for kind, _ in columns.values()],
            "column_names": list(columns),
            "column_sizes": [size for _, size in columns.values()],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": self.shard_bytes,
        }


@dataclass(slots=True, kw_only=True)
class _Stream:
    """Shards of one bucket so far."""

    description: dict[str, Any]
    head_bytes: int  # of a shard's description
    shards: list[tuple[int, int]] = field(default_factory=list)  # samples, and bytes of these
    full_bytes: int = 0  # of all shards but the last, and of their entries in the index

    @property
    def num_bytes(self) -> int:
        """Length of all shards and of the index."""
        return self.full_bytes + self._bytes_of_last + len(_index([])) - 2  # a comma and a space before each but the first

    @property
    def _bytes_of_last(self) -> int:
        number = len(self.shards) - 1
        return self.shard_bytes(number) + len(_as_json(self.entry(number))) + 2

    def shard_bytes(self, number: int) -> int:
        """Return the length of a shard."""
        samples, taken = self.shards[number]
        return 4 * (samples + 2) + self.head_bytes + taken

    def entry(self, number: int) -> dict[str, Any]:
        """Return a shard's entry in the index."""
        raw = {"basename": shard_name(number), "bytes": self.shard_bytes(number), "hashes": {}}
        return {**self.description, "raw_data": raw, "samples": self.shards[number][0], "version": 2, "zip_data": None}

    def add(self, num_bytes: int, most: int) -> bool:
        """Count a sample; return True if it begins a shard."""
        if self.shards and self.shard_bytes(len(self.shards) - 1) + 4 + num_bytes <= most:
            samples, taken = self.shards[-1]
            self.shards[-1] = samples + 1, taken + num_bytes
            return False
        if self.shards:
            self.full_bytes += self._bytes_of_last
        self.shards.append((1, num_bytes))
        return True


class MdsPlan:
    """Assigns samples to shards and counts their sizes."""

    def __init__(self, form: MdsForm) -> None:
        self.num_samples = 0
        self._form = form
        self._streams: dict[str, _Stream] = {}

    @property
    def num_files(self) -> int:
        return sum(len(stream.shards) + 1 for stream in self._streams.values())

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values())

    def add(self, record: SampleRecord, file_bytes: int) -> None:
        """Count a sample that takes `file_bytes` bytes of a shard."""
        self.takes_new_shard(record.bucket, file_bytes)

    def takes_new_shard(self, bucket: str, num_bytes: int) -> bool:
        """Count a sample; return True if it begins a shard."""
        self.num_samples += 1
        if bucket not in self._streams:
            described = self._form.description(bucket)
            self._streams[bucket] = _Stream(description=described, head_bytes=len(_as_json(described)))
        return self._streams[bucket].add(num_bytes, self._form.shard_bytes)

    def head(self, bucket: str, lengths: Sequence[int]) -> bytes:
        """Return what comes before the samples of a shard, from their lengths."""
        described = _as_json(self._streams[bucket].description)
        offsets = [4 * (len(lengths) + 2) + len(described)]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        return struct.pack(f"<{len(lengths) + 2}I", len(lengths), *offsets) + described

    def index(self, bucket: str) -> bytes:
        """Return the content of a bucket's `index.json`."""
        return _index([self._streams[bucket].entry(number) for number in range(len(self._streams[bucket].shards))])

    @property
    def buckets(self) -> list[str]:
        return list(self._streams)

    def num_shards(self, bucket: str) -> int:
        """Return the number of a bucket's shards so far."""
        return len(self._streams[bucket].shards)


class MdsWriter:
    """Writes the folders. A shard's samples are written to a file of their own until their number is known."""

    def __init__(self, folder: Path, store: Store, shard_bytes: int, columns: Sequence[str] | None) -> None:
        self._folder, self._form = folder, MdsForm(store, shard_bytes, columns)
        self.plan = MdsPlan(self._form)
        self._open: dict[str, tuple[BinaryIO, list[int]]] = {}  # of each bucket's last shard: its samples, and their lengths

    def add(self, record: SampleRecord, data: bytes) -> None:
        """Write a sample.

        Raises:
            StoreError: as `MdsForm.sample`.
        """
        sample, bucket = self._form.sample(record, data), record.bucket
        if self.plan.takes_new_shard(bucket, len(sample)):
            number = self.plan.num_shards(bucket) - 1
            if bucket in self._open:
                self._finish(bucket, number - 1)
            (self._folder / bucket).mkdir(parents=True, exist_ok=True)
            self._open[bucket] = (self._samples_path(bucket).open("w+b"), [])
        file, lengths = self._open[bucket]
        file.write(sample)
        lengths.append(len(sample))

    def _samples_path(self, bucket: str) -> Path:
        return self._folder / bucket / "samples.tmp"

    def _finish(self, bucket: str, number: int) -> None:
        file, lengths = self._open.pop(bucket)
        with file, (self._folder / bucket / shard_name(number)).open("wb") as shard:
            shard.write(self.plan.head(bucket, lengths))
            file.seek(0)
            shutil.copyfileobj(file, shard, 1 << 20)
        self._samples_path(bucket).unlink()

    def __enter__(self) -> MdsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            for file, _ in self._open.values():
                file.close()
            return
        for bucket in self.plan.buckets:
            self._finish(bucket, self.plan.num_shards(bucket) - 1)
            (self._folder / bucket / "index.json").write_bytes(self.plan.index(bucket))


def latents_name(bucket: str) -> str:
    """Return the column of a bucket's latents.

    >>> latents_name("train/512x512"), latents_name("val/512x768")
    ('latents_512', 'latents_512x768')
    """
    height, _, width = bucket.rpartition("/")[2].partition("x")
    return f"latents_{height}" if height == width else f"latents_{height}x{width}"


def shard_name(number: int) -> str:
    """Return a shard's file name."""
    return f"shard.{number:05d}.mds"


def _caption(record: SampleRecord) -> bytes:
    return text_bytes(record.captions[0]) if record.captions else b""


def _shape_text(shape: tuple[int, ...]) -> bytes:
    return "x".join(map(str, shape)).encode("ascii")


def _index(entries: list[dict[str, Any]]) -> bytes:
    return _as_json({"shards": entries, "version": 2})


def _as_json(value: Any) -> bytes:  # noqa: ANN401 - JSON
    return json.dumps(value, sort_keys=True).encode("ascii")
