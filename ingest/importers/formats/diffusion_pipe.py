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
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import as_tensor, loaded_dict, names_in, open_of_any_size, read_part
from bucketline.ingest.sources.objects import FileWindow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DB = "metadata.db"
_LATENTS = re.compile(r"(?P<model>.*/)?cache_[0-9.]+x\d+x\d+x\d+/latents/")
_MAX_VALUE_BYTES = 1 << 30


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    source, entries, models, unlisted = request.source, list[cache.CacheEntry](), list[str](), list[str]()
    for folder, names in cache.files_below(source):
        if (match := _LATENTS.fullmatch(folder)) is None or _DB not in names:
            continue
        models.append((match["model"] or f"{source.resolve().name}/").rstrip("/").rpartition("/")[2])
        if request.variant in (None, models[-1]):
            own = [*_entries(source, folder, models[-1])]
            listed, entries = {entry.path for entry in own}, entries + own
            # a run that is interrupted has written shards, and not committed the index
            shards = (folder + name for name in names if re.fullmatch(r"shard_.*\.bin", name) and folder + name not in listed)
            unlisted += [path for path in shards if (source / path).stat().st_size]
    notes = ["text embeddings are not imported; the captions, which the cache has, can be encoded again"]
    if unlisted:
        what = f"{unlisted[0]}{f' and {len(unlisted) - 1} more' if len(unlisted) > 1 else ''} is not in its index"
        notes.append(f"{what}: caching was interrupted; let the trainer finish it, and import again")
    return cache.FoundEntries(entries=entries, notes=notes, variants=models)


def _entries(source: Path, folder: str, model: str) -> Iterator[cache.CacheEntry]:
    path = source / folder / _DB
    with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
        items = database.execute("SELECT shard, shard_index FROM items ORDER BY rowid").fetchall()
        places = {
            shard: database.execute(f"SELECT offset, size FROM shard_{shard} ORDER BY rowid").fetchall()  # noqa: S608 - an int
            for shard in {int(shard) for shard, _ in items}
        }
    mtimes = {shard: (path.parent / f"shard_{shard}.bin").stat().st_mtime_ns for shard in places}
    for number, (shard, index) in enumerate(items):
        offset, length = (int(value) for value in places[int(shard)][int(index)])
        if not (offset >= 0 and 0 < length <= _MAX_VALUE_BYTES):
            raise ValueError(f"a value of {length} bytes at {offset} in {path}")
        name = f"{folder}shard_{int(shard)}.bin"
        yield cache.CacheEntry(
            id=f"{folder}{number}",
            image=_image(source, name, offset, length),
            again=f"/{folder.split('/')[-3]}",  # of several resolutions
            path=name,
            variant=model,
            at=(offset, length),
            stamp=(length, mtimes[int(shard)]),
        )


def _image(source: Path, shard: str, offset: int, length: int) -> str | None:
    """Return the path of a value's image, None if it is damaged. Reads some KB of it, since tensors are left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(), FileWindow(open_of_any_size(source, shard), offset, length) as window:
            # fake tensors have no values: `torch.load` skips theirs in the file
            spec = torch.load(io.BufferedReader(window), map_location="cpu", weights_only=True)["image_spec"]
        return str(spec[-1]) if spec[0] is None else f"{spec[0]}/{spec[-1]}"
    except Exception:  # noqa: BLE001 - whatever is wrong with it, reading it completely will say so
        return None


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
        left_out=names_in(found, "mask", "control_latents"),
    )


IMPORTER = cache.Importer(
    kind="diffusion-pipe",
    found=_found,
    read=_read,
    variants={},
    other=cache.Variant(),
    unknown=("flux2", "ltx", "cosmos", "hidream_o1"),
    captions_in="the cache",
    form=cache.FileForm.WHOLE,
)
