"""Export samples to files that other tools can read: completely or not at all.

The base class of the formats, and these by name: ours, and those of installed packages.
"""

from __future__ import annotations

import json
import tarfile
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from bucketline.errors import StoreError, UsageError
from bucketline.extensions import Extensions
from bucketline.files.atomic_write import refuse_existing, staged_folder
from bucketline.files.paths import Overlap, overlap
from bucketline.store.format.block import (
    DTYPES,
    FLIPPED,
    LATENT,
    LENGTH_BYTES,
    METADATA,
    POOLED,
    TOKENS,
    LatentKind,
    sample_digest,
    text_bytes,
)
from bucketline.store.read.samples import buckets_of, live_samples, record_as_json, sample_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.read.samples import Selection
    from bucketline.store.read.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """The samples to export, the format and the output."""

    output: Path
    format: str  # a name of `EXPORTERS`
    selection: Selection
    shard_bytes: int | None = None  # the most that a file of many samples has; None: the format's default


class ExportedSample(NamedTuple):
    """A sample whose checksums were verified."""

    record: SampleRecord
    data: bytes  # its safetensors file


class Exporter(ABC):
    """Writes samples in one format; an object for each export."""

    shard_bytes: ClassVar[int | None] = None  # the default; None of a format whose files have one sample each
    left_out: tuple[str, ...] = ()  # roles of columns that the format does not have

    def __init__(self, store: Store, request: ExportRequest) -> None:
        self.store, self.request = store, request

    def check(self, record: SampleRecord) -> None:  # noqa: B027 - most formats take every sample
        """Check a sample before anything is written; called in the order of `write`."""

    @abstractmethod
    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write samples to a folder, which is empty and gets its name once this returns."""


EXPORTERS: Extensions[type[Exporter]] = Extensions(
    "an exporter called",
    "bucketline.exporters",
    {
        "webdataset": "bucketline.store.export.exporter:TarExporter",
        "safetensors": "bucketline.store.export.exporter:FolderExporter",
        "kohya": "bucketline.store.export.kohya:KohyaExporter",
    },
    lambda found: isinstance(found, type) and issubclass(found, Exporter),
)


class FolderExporter(Exporter):
    """Writes a folder of safetensors files: one per sample, in one folder per bucket, indexed by `samples.jsonl`.

    Files are named by the digest of the sample id: an id never becomes a path.
    """

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        with (folder / "samples.jsonl").open("w", encoding="ascii") as lines:
            for record, data in samples:
                name = f"{record.bucket}/{sample_digest(record.id).hex()}.safetensors"
                (folder / record.bucket).mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
                lines.write(json.dumps({"file": name, **record_as_json(record)}) + "\n")


class TarExporter(Exporter):
    """Writes tars as of WebDataset, `000000.tar` and so on, with three members per sample.

    KEY.safetensors is the sample's file, KEY.json its record, KEY.txt its first caption. KEY is the digest of the sample id: an
    id never becomes a path. Tars are reproducible: they contain no times or owners.
    """

    shard_bytes = 1 << 30

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write each sample's members to the last tar if it still fits, else to a new one: that of a large sample is larger."""
        most = self.request.shard_bytes or self.shard_bytes
        tar: tarfile.TarFile | None = None
        number, taken = -1, 0  # of the last tar, and the bytes of its members
        with ExitStack() as last:
            for record, data in samples:
                as_json = json.dumps(record_as_json(record)).encode("ascii")
                text = text_bytes(record.captions[0] if record.captions else "")
                members = {"json": as_json, "safetensors": data, "txt": text}
                own = sum(tarfile.BLOCKSIZE + _rounded(len(member), tarfile.BLOCKSIZE) for member in members.values())
                ended = _rounded(taken + own + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)  # two zero blocks end a tar
                if tar is None or ended > most:
                    last.close()
                    number, taken = number + 1, 0
                    tar = last.enter_context(tarfile.open(folder / f"{number:06d}.tar", "w"))
                for ending, member in members.items():
                    info = tarfile.TarInfo(f"{sample_digest(record.id).hex()}.{ending}")
                    info.size = len(member)
                    tar.addfile(info, BytesIO(member))
                taken += own


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def open_export(store: Store, request: ExportRequest) -> Exporter:
    if how := overlap(request.output, store.path):
        where = "is the store itself" if how is Overlap.SAME else f"overlaps with the store {store.path}"
        raise UsageError(f"{request.output} {where}; choose a folder outside the store")
    refuse_existing(request.output)
    names = buckets_of(store, request.selection)
    if not any(store.bucket(name).num_rows for name in names):
        raise StoreError(f"{store.path} has no sample in that split and bucket; `store info` lists its buckets")
    return EXPORTERS[request.format](store, request)


def check_samples(exporter: Exporter, on_sample: Callable[[], None]) -> None:
    """Let an exporter check each sample without reading values; `on_sample` reports progress."""
    for listed in live_samples(exporter.store, exporter.request.selection):
        exporter.check(listed.record)
        on_sample()


def export(exporter: Exporter, on_sample: Callable[[], None]) -> tuple[int, int]:
    """Write the export, verifying every row and caption; return its files and bytes. `on_sample` reports progress."""
    store, request = exporter.store, exporter.request

    def samples() -> Iterator[ExportedSample]:
        for listed in live_samples(store, request.selection):
            yield ExportedSample(listed.record, sample_file(store, listed.shard, listed.record))
            on_sample()

    with staged_folder(request.output) as folder:
        exporter.write(samples(), folder)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


# --------------------------------------------------------------------------------------------------------------- sample arrays
# A sample's arrays from its file, as other trainers take them: latents unscaled or as a model is fed, embeddings of a caption.
#
# Letters: C latent channels, h and w the latent's height and width, T tokens, D width of a token.

_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleArrays:
    """The arrays of a sample that trainers take."""

    latent: NDArray[np.float32]  # [C, h, w], unscaled
    flipped: NDArray[np.float32] | None  # [C, h, w]
    tokens: NDArray[np.float32] | None  # [T, D], of the first caption
    pooled: NDArray[np.float32] | None  # [D']


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreForm:
    """Properties that all samples of a store share, for an export to a trainer's format."""

    family: str  # of its text encoders; empty if it is not known
    channels: int
    flip: bool
    token_width: int | None  # None: no token embeddings that a trainer takes
    pooled_width: int | None
    shift: NDArray[np.float64]  # [C or 1, 1, 1]
    scale: NDArray[np.float64]  # [C or 1, 1, 1]

    def fed(self, latent: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a latent as a model is fed, in float32."""
        scaled: NDArray[np.float32] = ((latent - self.shift) * self.scale).astype(np.float32)
        return scaled

    def arrays(self, data: bytes) -> SampleArrays:
        """Return the arrays in a sample's file; of moments, the means."""
        found = _tensors(data)
        return SampleArrays(
            latent=_floats(*found[LATENT])[: self.channels],
            flipped=_floats(*found[FLIPPED])[: self.channels] if self.flip else None,
            tokens=None if self.token_width is None else _floats(*found[f"caption.0.{TOKENS}"]),
            pooled=None if self.pooled_width is None else _floats(*found[f"caption.0.{POOLED}"]),
        )


def form_of(store: Store) -> StoreForm:
    """Return what a store's samples have in common."""
    manifest = store.manifest
    vae, text = (found if isinstance(found := manifest.encoders.get(name), dict) else {} for name in ("vae", "text_encoder"))
    latents = {bucket.name: bucket.columns.get(LATENT) for bucket in manifest.buckets}
    other = [
        name for name, column in latents.items() if column is None or len(column.shape) != 3 or column.dtype not in _FLOATS
    ]
    if store.ragged:
        raise StoreError(
            f"{store.path} cannot be exported to a trainer's format: it has ragged columns ({', '.join(store.ragged)}); "
            "use --format safetensors"
        )
    scaling, std = vae.get("scaling_factor"), vae.get("latents_std")
    if other or not isinstance(scaling, int | float):
        what = f"bucket {other[0]} has no latents of images" if other else "it does not record its VAE's scaling_factor"
        raise StoreError(f"{store.path} cannot be exported to a trainer's format: {what}; use --format safetensors")
    fixed, tokens = store.text.delivered.fixed, store.text.delivered.tokens
    widths = {
        column.name: column.shape[0] for column in (*tokens, *fixed) if column.dtype in _FLOATS and len(column.shape) == 1
    }
    stored = next((column.shape[0] for column in latents.values() if column is not None), 0)
    return StoreForm(
        family=str(text.get("family") or ""),
        channels=stored // 2 if vae.get("latents") == LatentKind.MOMENTS.value else stored,
        flip=FLIPPED in _columns_of_all(store),
        token_width=widths.get(TOKENS),
        pooled_width=widths.get(POOLED),
        shift=_each(vae.get("latents_mean") or vae.get("shift_factor") or 0.0),
        scale=float(scaling) / _each(std or 1.0),
    )


def columns_beside(store: Store) -> tuple[str, ...]:
    """Return the roles of the columns that are next to the latents, such as masks."""
    there = {*store.manifest.columns, *(store.added.keys() & _columns_of_all(store))}
    return tuple(sorted(there - {LATENT, FLIPPED}))


def _columns_of_all(store: Store) -> set[str]:
    """Return the columns that all rows have, added ones too."""
    names = [{column.name for column in bucket.columns} for bucket in store.buckets()]
    return set.intersection(*names) if names else set()


def _each(values: Any) -> NDArray[np.float64]:  # noqa: ANN401 - a number or a list of them
    return np.array(values, dtype=np.float64).reshape(-1, 1, 1)


def _tensors(data: bytes) -> dict[str, tuple[memoryview, str, Sequence[int]]]:
    """Return bytes, dtype and shape of each tensor in a sample's file, which has been written just now."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header, values = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length]), memoryview(data)[LENGTH_BYTES + length :]
    return {
        name: (values[slice(*entry["data_offsets"])], entry["dtype"], entry["shape"])
        for name, entry in header.items()
        if name != METADATA
    }


def _floats(values: memoryview, dtype: str, shape: Sequence[int]) -> NDArray[np.float32]:
    array = np.frombuffer(values, dtype=DTYPES[dtype]).reshape(shape)
    if dtype == "BF16":  # the upper half of a float32
        widened: NDArray[np.float32] = (array.astype("<u4") << 16).view("<f4")
        return widened
    return array.astype(np.float32)
