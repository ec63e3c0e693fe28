"""Export as MDS, the format of MosaicML Streaming: a folder for each bucket, with `index.json` and shards.

The columns are those of mosaicml/diffusion: `latents_512` of a square bucket, `latents_HEIGHTxWIDTH` of another, in F16 and as
the model is fed; the same with `/flipped` after the name of the mirrored image, if the store has it; `caption_latents`, F16. A
folder for each bucket, since a batch of a stream has one shape.
Source: `streaming/base/format/mds/`, `precompute_latents.py`.
"""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from bucketline.errors import StoreError
from bucketline.store.export.exporter import Exporter, columns_beside, form_of
from bucketline.store.format.block import FLIPPED_SUFFIX, text_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.export.exporter import ExportedSample, ExportRequest
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.read.store import Store

_MAX_SHARD_BYTES = (1 << 32) - 1  # offsets are U32
_INTEGERS = ("caption_tokens", "height", "original_height", "original_width", "width")
_TEXTS = ("caption", "key", "latents_shape")


class MdsExporter(Exporter):
    """Writes a folder for each bucket."""

    shard_bytes = 64 << 20  # as of its own writer

    def __init__(self, store: Store, request: ExportRequest) -> None:
        super().__init__(store, request)
        self.form = form_of(store)
        self.left_out = columns_beside(store)

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        most = min(self.request.shard_bytes or self.shard_bytes, _MAX_SHARD_BYTES)
        with ExitStack() as files:
            streams: dict[str, _Stream] = {}
            for record, data in samples:
                if record.bucket not in streams:
                    stream = _Stream(folder / record.bucket, self.description(record.bucket, most), most)
                    streams[record.bucket] = files.enter_context(stream)
                streams[record.bucket].add(self.sample(record, data))

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
        return dict(sorted(found.items()))

    def sample(self, record: SampleRecord, data: bytes) -> bytes:
        arrays = self.form.arrays(data)
        height, width = record.original_size
        numbers = {"original_height": height, "original_width": width, "height": record.crop[2], "width": record.crop[3]}
        numbers["caption_tokens"] = 0 if arrays.tokens is None else len(arrays.tokens)
        values: dict[str, bytes] = {name: struct.pack("<q", number) for name, number in numbers.items()}
        values |= {
            "key": text_bytes(record.id),
            "caption": _caption(record),
            "latents_shape": "x".join(map(str, arrays.latent.shape)).encode("ascii"),
        }
        for name, array in (
            (latents_name(record.bucket), self.form.fed(arrays.latent)),
            (latents_name(record.bucket) + FLIPPED_SUFFIX, None if arrays.flipped is None else self.form.fed(arrays.flipped)),
            ("caption_latents", arrays.tokens),
            ("caption_pooled", arrays.pooled),
        ):
            if array is None:
                continue
            half = array.astype("<f2")
            if not bool((abs(half) < float("inf")).all()):
                raise StoreError(f"sample {record.id!r:.200}: its {name} is beyond the range of F16, which MDS caches have")
            values[name] = half.tobytes()
        columns = self.columns(record.bucket)
        values = dict.fromkeys(columns, b"") | values
        lengths = b"".join(struct.pack("<I", len(values[name])) for name, (_, size) in columns.items() if size is None)
        return lengths + b"".join(values[name] for name in columns)

    def description(self, bucket: str, shard_bytes: int) -> dict[str, Any]:
        """Return the description of a bucket's shards, as each shard and the index have it."""
        columns = self.columns(bucket)
        return {
            "column_encodings": [kind for kind, _ in columns.values()],
            "column_names": list(columns),
            "column_sizes": [size for _, size in columns.values()],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": shard_bytes,
        }


class _Stream:
    """One bucket's shards, and their index. A shard's samples are in a file of their own until their number is known."""

    def __init__(self, folder: Path, description: dict[str, Any], most: int) -> None:
        """`most`: bytes of a shard, unless one sample has more."""
        self._folder, self._description, self._most = folder, description, most
        self._described = _as_json(description)
        self._entries: list[dict[str, Any]] = []  # of the shards in the index
        self._lengths: list[int] = []  # of the last shard's samples
        folder.mkdir(parents=True)
        self._samples = (folder / "samples.tmp").open("w+b")

    def _head_bytes(self, num_samples: int) -> int:
        return 4 * (num_samples + 2) + len(self._described)

    def add(self, sample: bytes) -> None:
        if self._lengths and self._head_bytes(len(self._lengths) + 1) + self._samples.tell() + len(sample) > self._most:
            self._finish()
        self._samples.write(sample)
        self._lengths.append(len(sample))

    def _finish(self) -> None:
        count = len(self._lengths)
        offsets = list(accumulate(self._lengths, initial=self._head_bytes(count)))
        name = f"shard.{len(self._entries):05d}.mds"
        with (self._folder / name).open("wb") as shard:
            shard.write(struct.pack(f"<{count + 2}I", count, *offsets) + self._described)
            self._samples.seek(0)
            shutil.copyfileobj(self._samples, shard, 1 << 20)
        raw = {"basename": name, "bytes": offsets[-1], "hashes": {}}
        self._entries.append({**self._description, "raw_data": raw, "samples": count, "version": 2, "zip_data": None})
        self._lengths.clear()
        self._samples.seek(0)
        self._samples.truncate()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._samples:
            if error is None:
                self._finish()
                (self._folder / "index.json").write_bytes(_as_json({"shards": self._entries, "version": 2}))
                (self._folder / "samples.tmp").unlink()


def latents_name(bucket: str) -> str:
    """Return the column of a bucket's latents.

    >>> latents_name("train/512x512"), latents_name("val/512x768")
    ('latents_512', 'latents_512x768')
    """
    height, _, width = bucket.rpartition("/")[2].partition("x")
    return f"latents_{height}" if height == width else f"latents_{height}x{width}"


def _caption(record: SampleRecord) -> bytes:
    return text_bytes(record.captions[0]) if record.captions else b""


def _as_json(value: Any) -> bytes:  # noqa: ANN401 - JSON
    return json.dumps(value, sort_keys=True).encode("ascii")
