"""Sources that are written by hand, and what is found in them."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bucketline.ingest.sources.dataset_file import open_source, source_as_json, source_from_json
from bucketline.ingest.sources.source import Listing


def write_members(path: Path, members: Iterable[tuple[str, bytes]], **options: Any) -> Path:
    """Write a tar's members, of any name in any order, as no webdataset writer would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_600_000_000
            archive.addfile(info, io.BytesIO(data))
    return path


TABLES = ("jsonl", "csv", "parquet")


def write_table(path: Path, rows: Iterable[tuple[str, Any]], column: str = "text") -> Path:
    """Write a table of the kind that its suffix says: images with a text each, several, or none, next to another column."""
    if path.suffix == ".jsonl":
        lines = [json.dumps({"file_name": name, column: value}) for name, value in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    elif path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["other", "file_name", column])
        writer.writerows([5, name, value if isinstance(value, str) else "\n".join(value or [])] for name, value in rows)
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
    else:
        names, values = zip(*rows, strict=True)
        texts = pa.array([[value] if isinstance(value, str) else value for value in values], pa.list_(pa.string()))
        pq.write_table(pa.table({"file_name": names, column: texts, "n": range(len(names))}), path)
    return path


def listing_of(place: object) -> Listing:
    return open_source(str(place)).listing()


def captions(found: Listing | Path) -> dict[str, tuple[str, ...] | str]:
    """Return each item's captions, or why it has none, from a listing or of a place."""
    listing = found if isinstance(found, Listing) else listing_of(found)
    return {item.id: item.caption_error or item.captions for item in listing.items}


def contents(place: object) -> dict[str, tuple[tuple[str, ...], bytes]]:
    """Read everything, in several threads, through what another rank would be sent."""
    source = open_source(str(place))
    sent, listing = source_from_json(json.loads(json.dumps(source_as_json(source)))), source.listing()
    with ThreadPoolExecutor(4) as pool:
        items = list(sent.in_turn(listing.items))
        read = list(pool.map(sent.read, items))
    for item, found in zip(items, read, strict=True):
        assert sent.stamp(item) == found[1]
    return {item.id: (item.captions, found[0]) for item, found in zip(items, read, strict=True)}
