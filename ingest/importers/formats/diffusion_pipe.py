"""Caches of diffusion-pipe: an SQLite index and shards of `torch.save`d dictionaries, one folder per size.

`cache_{ar}x{w}x{h}x{frames}/latents/metadata.db` has `items(shard, shard_index)` and for each shard N a table
`shard_N(offset, size)` of places in `shard_N.bin`. A value has its latent, the image's path and its captions. The text
embeddings are stored by caption in folders of their own; the captions are encoded again instead. Source: `utils/cache.py`,
`utils/dataset.py` of August 2026.
"""

from __future__ import annotations

import io
import re
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

from bucketline.errors import SourceError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder, FileForm
from bucketline.ingest.importers.reading.read_files import as_tensor, loaded_dict, open_of_any_size, read_part, values_by_role
from bucketline.ingest.sources.byte_window import FileWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


_DB = "metadata.db"
_LATENTS = re.compile(r"(?P<model>.*/)?cache_[0-9.]+x\d+x\d+x\d+/latents/")
_UNKNOWN = ("flux2", "ltx", "cosmos", "hidream_o1")
_COLUMNS = {"mask": "mask", "control_latents": "control/image"}
MAX_VALUE_BYTES = 1 << 30


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, "the cache", form=FileForm.WHOLE)
    found: list[tuple[str, str]] = []  # folder, model
    for folder, names in cache.files_below(request.source):
        if (match := _LATENTS.fullmatch(folder)) and _DB in names:
            found.append((folder, _model(request.source, match["model"] or "")))
    model = cache.chosen_variant(Counter(name for _, name in found), request, "diffusion-pipe", unknown=_UNKNOWN)
    folders = [folder for folder, own in found if own == model]
    places = [place for folder in folders for place in _places(request.source, folder)]
    images = list(_images(request.source, places))
    ids = cache.ids_of_paths([image for image in images if image is not None])
    entries: list[cache.CacheEntry] = []
    taken: Counter[str] = Counter()
    for place, image in zip(places, images, strict=True):
        sample_id = f"{place.folder}{place.number}" if image is None else ids[image]
        taken[sample_id] += 1
        own, problem = captions.of(sample_id)
        size = place.folder.split("/")[-3]
        entries.append(
            cache.CacheEntry(
                id=sample_id if taken[sample_id] == 1 else f"{sample_id}/{size}",  # of several resolutions
                image=image,
                path=place.shard,
                at=(place.offset, place.length),
                captions=own,
                caption_problem=problem,
                stamp=(place.length, place.mtime_ns),
            )
        )
    notes = ["text embeddings are not imported; the captions, which the cache has, can be encoded again"]
    if unlisted := sorted(_unlisted(request.source, folders, places)):
        notes.append(
            f"{unlisted[0]}{f' and {len(unlisted) - 1} more' if len(unlisted) > 1 else ''} is not in its index: caching was "
            "interrupted; let the trainer finish it, and import again"
        )
    return cache.CacheListing(
        entries=entries,
        variant=model,
        scaling=cache.Scaling.AS_FED,
        captions_from=captions.told,
        notes=notes,
    )


def _unlisted(source: Path, folders: Sequence[str], places: Sequence[_Place]) -> Iterator[str]:
    """Yield the shards that no index lists: a run that is interrupted has written them, and not committed the index."""
    listed = {place.shard for place in places}
    for folder in folders:
        for path in (source / folder).glob("shard_*.bin"):
            if (name := folder + path.name) not in listed and path.stat().st_size:
                yield name


def _model(source: Path, before: str) -> str:
    """Return the name of the folder of a model: the one in which the sizes' folders are."""
    parts = before.rstrip("/").split("/") if before else [source.resolve().name]
    return parts[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A value's place."""

    folder: str
    number: int
    shard: str
    offset: int
    length: int
    mtime_ns: int


def _places(source: Path, folder: str) -> Iterator[_Place]:
    """Yield the values of a folder, in order.

    Raises:
        SourceError: if its index is damaged, or a shard is missing.
    """
    path = source / folder / _DB
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
            items = database.execute("SELECT shard, shard_index FROM items ORDER BY rowid").fetchall()
            shards = {int(shard) for shard, _ in items}
            places = {
                shard: database.execute(f"SELECT offset, size FROM shard_{shard} ORDER BY rowid").fetchall()  # noqa: S608 - an int
                for shard in shards
            }
        mtimes = {shard: (path.parent / f"shard_{shard}.bin").stat().st_mtime_ns for shard in shards}
        for number, (shard, index) in enumerate(items):
            offset, length = (int(value) for value in places[int(shard)][int(index)])
            if not (offset >= 0 and 0 < length <= MAX_VALUE_BYTES):
                raise ValueError(f"a value of {length} bytes at {offset}")
            name = f"{folder}shard_{int(shard)}.bin"
            yield _Place(folder=folder, number=number, shard=name, offset=offset, length=length, mtime_ns=mtimes[int(shard)])
    except (sqlite3.Error, ValueError, TypeError, LookupError) as error:
        raise SourceError(f"{path} is damaged ({error!s:.100}); cache this dataset again") from error
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}; cache this dataset again") from error


def _images(source: Path, places: Sequence[_Place]) -> Iterator[str | None]:
    """Yield the path of each value's image, None if it is damaged. Reads some KB of each, since tensors are left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # whose tensors have no values: `torch.load` skips theirs in the file
        for place in places:
            try:
                with FileWindow(open_of_any_size(source, place.shard), place.offset, place.length) as window:
                    spec = torch.load(io.BufferedReader(window), map_location="cpu", weights_only=True)["image_spec"]
                yield str(spec[-1]) if spec[0] is None else f"{spec[0]}/{spec[-1]}"
            except Exception:  # noqa: BLE001 - whatever is wrong with it, reading it completely will say so
                yield None


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    offset, length = (int(number) for number in entry.at)
    found = loaded_dict(read_part(source, entry.path, offset, length), entry.path)
    captions = found.get("caption")
    captions = [captions] if isinstance(captions, str) else captions
    if not isinstance(captions, list) or not all(isinstance(text, str) for text in captions):
        raise cache.damaged(f"its caption is {captions!r:.80}, expected a list of texts")
    return cache.Cached(
        latent=cache.squeezed(as_tensor(found, "latents")),
        geometry=cache.Geometry(),
        captions=tuple(captions),
        columns=values_by_role(found, _COLUMNS),
    )


IMPORTER = cache.Importer(kind="diffusion-pipe", is_here=cache.has_file(_DB, _LATENTS), listed=_listed, read=_read)
