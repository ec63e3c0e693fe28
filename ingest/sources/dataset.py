"""A dataset that Hugging Face's `datasets` saved on disk as a source: pictures as the bytes that it holds, not decoded."""

from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO

from bucketline.errors import SourceError
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.sources.captions import as_texts, stripped, unusable
from bucketline.ingest.sources.files import refuse_too_large
from bucketline.ingest.sources.source import Listing, SourceBytes, SourceItem, Stamp, note_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CAPTION_COLUMNS = ("text", "caption", "captions")
MARKS = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` leaves; a split's folder has state.json as well
_ROWS = 1000  # looked at together


def is_saved_dataset(folder: Path) -> bool:
    """Say whether `save_to_disk` wrote this folder."""
    return (folder / MARKS[0]).is_file() or ((folder / MARKS[1]).is_file() and (folder / "state.json").is_file())


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """The rows of a saved dataset, split after split; a sample's id is `SPLIT/NAME`.

    NAME is the picture's own path in the dataset where it has one that is its alone, else the number of its row. A dataset
    without splits has ids without `SPLIT/`. An item's `at` is its split, its row, its size and the dataset's time.
    """

    path: Path

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # the opened dataset stays behind

    @cached_property
    def _splits(self) -> list[tuple[str, Any, str]]:
        """Give each split's name, its rows with pictures as they are stored, and the picture's column.

        Raises:
            SourceError: where the dataset cannot be opened or has no picture column.
        """
        try:
            import datasets
        except ImportError as error:
            raise SourceError(
                f"{self.path} is a dataset saved on disk; reading it needs datasets; "
                "install bucketline with its extra: bucketline[datasets]"
            ) from error
        try:
            loaded = datasets.load_from_disk(str(self.path))
        except Exception as error:
            raise SourceError(f"{self.path} cannot be read as a dataset saved on disk: {error}") from error
        parts = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [("", loaded)]
        found = []
        for name, rows in parts:
            column = self._picture_column(name, rows, datasets.Image)
            found.append((str(name), rows.cast_column(column, datasets.Image(decode=False)), column))
        return found

    def _picture_column(self, split: str, rows: Any, kind: type) -> str:  # noqa: ANN401 - a datasets.Dataset
        columns = [name for name, feature in rows.features.items() if isinstance(feature, kind)]
        if "image" in columns or len(columns) == 1:
            return "image" if "image" in columns else columns[0]
        raise SourceError(
            f"{self.path}{f', split {split}' if split else ''}: expected one column of pictures, or one named image; "
            f"found {', '.join(columns) or 'none'} among {', '.join(rows.column_names)}"
        )

    def listing(self) -> Listing:
        """List every row.

        Raises:
            SourceError: where the dataset cannot be read, has no row, or its captions are no texts.
        """
        listing, seen = Listing(), dict[str, str]()
        for number, (name, rows, column) in enumerate(self._splits):
            text = next((caption for caption in CAPTION_COLUMNS if caption in rows.column_names), None)
            mtime_ns = _newest_ns(rows)
            names, sizes = _names_and_sizes(rows, column)
            counts = Counter(names)
            texts = _texts(rows, text) if text is not None else iter([None] * len(names))
            for row, (own, size, value) in enumerate(zip(names, sizes, texts, strict=True)):
                captions = as_texts(value)
                place = f"{self.path}, {f'split {name}, ' if name else ''}row {row}"
                if captions is None:
                    raise SourceError(f"{place}: {text} is a {type(value).__name__}, expected a string or a list of strings")
                shown = own if own and counts[own] == 1 else f"{row:08d}"
                sample_id = f"{name}/{shown}" if name else shown
                note_place(seen, sample_id, place)
                kept = stripped(captions)
                error = unusable(f"the column {text}", kept)
                at = (number, row, size, mtime_ns)
                listing.items.append(SourceItem(id=sample_id, captions=kept, caption_error=error, at=at))
        if not listing.items:
            raise SourceError(f"{self.path} is a dataset without rows")
        return listing

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        yield from items

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[2], mtime_ns=item.at[3])

    def read(self, item: SourceItem) -> SourceBytes:
        _, rows, column = self._splits[item.at[0]]
        stamp = self.stamp(item)
        refuse_too_large(stamp.num_bytes)
        value = rows[item.at[1]][column]
        if value is None:
            raise RejectedError(Reason.UNREADABLE, f"its {column} is null")
        if value["bytes"] is None:
            raise RejectedError(
                Reason.UNREADABLE, f"the dataset holds the path {value['path']!r} and no bytes; save it with its pictures in it"
            )
        return SourceBytes(data=value["bytes"], stamp=stamp)

    def opened(self, item: SourceItem) -> BinaryIO:
        return io.BytesIO(self.read(item).data)


def _newest_ns(rows: Any) -> int:  # noqa: ANN401
    return max((os.stat(file["filename"]).st_mtime_ns for file in rows.cache_files), default=0)  # noqa: PTH116


def _names_and_sizes(rows: Any, column: str) -> tuple[list[str | None], list[int]]:  # noqa: ANN401
    """Give the paths that pictures have in the dataset and their numbers of bytes, without touching the bytes."""
    import pyarrow.compute as pc

    names: list[str | None] = []
    sizes: list[int] = []
    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        pictures = part[column]
        names += pc.struct_field(pictures, "path").to_pylist()
        sizes += [size or 0 for size in pc.binary_length(pc.struct_field(pictures, "bytes")).to_pylist()]
    return names, sizes


def _texts(rows: Any, column: str) -> Iterator[object]:  # noqa: ANN401
    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        yield from part[column].to_pylist()
