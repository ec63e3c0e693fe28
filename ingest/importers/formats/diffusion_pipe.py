"""Caches of diffusion-pipe: an SQLite index and shards of `torch.save`d dictionaries, one folder per size.

`cache_{ar}x{w}x{h}x{frames}/latents/metadata.db` has `items(shard, shard_index)` and for each shard N a table
`shard_N(offset, size)` of places in `shard_N.bin`. A value has its latent, the image's path and its captions. The text
embeddings are stored by caption in folders of their own, and are not imported. Source: `utils/cache.py`, `utils/dataset.py` of
August 2026.
"""

from __future__ import annotations

import io
import re
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

from bucketline.ingest.importers.cache import CacheEntry, Importer, Variant
from bucketline.ingest.importers.reading import files_below
from bucketline.ingest.sources.objects import FileWindow
from bucketline.ingest.sources.source import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LATENTS = re.compile(r"(?P<model>.*/)?cache_[0-9.]+x\d+x\d+x\d+/latents/", re.DOTALL)
_MAX_VALUE_BYTES = 1 << 30


def _found(source: Path) -> Iterator[CacheEntry]:
    for folder, names in files_below(source):
        if (match := _LATENTS.fullmatch(folder)) is None or "metadata.db" not in names:
            continue
        model = (match["model"] or f"{source.resolve().name}/").rstrip("/").rpartition("/")[2]
        for path, at in _places(source, folder):
            image, captions, problem = _described(source, path, at)
            yield CacheEntry(
                id=f"{path}/{at[0]}", image=image, path=path, variant=model, at=at, captions=captions, problem=problem
            )


def _places(source: Path, folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the file, the offset and the length of each value that an index lists."""
    path = source / folder / "metadata.db"
    with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
        items = database.execute("SELECT shard, shard_index FROM items ORDER BY rowid").fetchall()
        places = {
            shard: database.execute(f"SELECT offset, size FROM shard_{shard} ORDER BY rowid").fetchall()  # noqa: S608 - an int
            for shard in {int(shard) for shard, _ in items}
        }
    for shard, index in items:
        offset, length = (int(value) for value in places[int(shard)][int(index)])
        if not (offset >= 0 and 0 < length <= _MAX_VALUE_BYTES):
            raise ValueError(f"a value of {length} bytes at {offset} in {path}")
        yield f"{folder}shard_{int(shard)}.bin", (offset, length)


def _described(source: Path, path: str, at: tuple[int, int]) -> tuple[str | None, tuple[str, ...], str | None]:
    """Return the path of a value's image, its captions, and what is wrong. Reads some KB of it, since tensors are left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(), FileWindow(open_file(f"{source}/{path}", source, sys.maxsize), *at) as window:
            # fake tensors have no values: `torch.load` skips theirs in the file
            found = torch.load(io.BufferedReader(window), map_location="cpu", weights_only=True)
        spec, captions = found["image_spec"], found["caption"]
        image = str(spec[-1]) if spec[0] is None else f"{spec[0]}/{spec[-1]}"
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not all(isinstance(text, str) for text in captions):
            raise TypeError(f"its caption is {captions!r:.80}, expected a list of texts")
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it
        return None, (), f"{path} is damaged at {at[0]} ({type(error).__name__}: {error!s:.150}); cache it again"
    return image, tuple(captions), None


IMPORTER = Importer(
    kind="diffusion-pipe",
    found=_found,
    names={"latent": "latents"},
    left_out=("mask", "control_latents"),
    variants={},
    other=Variant(),
    unknown=("flux2", "ltx", "cosmos", "hidream_o1"),
    captions_in="the cache",
)
