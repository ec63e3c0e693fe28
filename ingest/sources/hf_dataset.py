"""A dataset saved on disk by Hugging Face `datasets` as a source; images are read as stored bytes, not decoded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path  # noqa: TC003 - decoded by its annotation
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sources.captions.caption_text import CaptionNames
from bucketline.ingest.sources.captions.metadata_table import SPLIT, as_split
from bucketline.ingest.sources.local_files import refuse_too_large
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.source import Listing, Source, SourceBytes, SourceItem, Stamp
from bucketline.ingest.sources.splits import SplitRow, Splits, add_rows, image_column

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKS = ("dataset_dict.json", "dataset_info.json")  # written by `save_to_disk`; the folder of a split also has state.json
_ROWS = 1000  # rows per batch


def is_saved_dataset(folder: Path) -> bool:
    """Return True if `save_to_disk` wrote this folder."""
    return (folder / MARKS[0]).is_file() or ((folder / MARKS[1]).is_file() and (folder / "state.json").is_file())


@dataclass(frozen=True, kw_only=True)
class DatasetSource(Source):
    """The rows of a saved dataset, split by split; a sample's id is `SPLIT/NAME`.

    NAME is the image's path in the dataset if it has a unique one, else its row number. Ids of rows in no split have no
    `SPLIT/`. An item's `at` is its split, row, size, and the dataset's mtime.
    """

    path: Path
    options: SourceOptions = field(default_factory=SourceOptions)

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return (self.path,)

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        """The rows of each split by name; the name of a dataset that is not a split is empty."""
        try:
            import datasets
        except ImportError as error:
            raise SourceError(
                f"{self.path} is a dataset saved on disk; reading it needs datasets; "
                "install the extra datasets: pip install 'bucketline[datasets]'"
            ) from error
        try:
            loaded = datasets.load_from_disk(str(self.path))
        except Exception as error:
            raise SourceError(f"{self.path} cannot be read as a dataset saved on disk: {error}") from error
        is_split = isinstance(loaded, datasets.DatasetDict)
        return {str(name): rows for name, rows in loaded.items()} if is_split else {str(loaded.split or ""): loaded}

    @cached_property
    def _splits(self) -> list[tuple[str, Any, str]]:
        """For each split with rows to pack: its name, its rows with undecoded images, and the name of the image column."""
        loaded = self._loaded
        import datasets  # installed, since loading has imported it

        found, splits = [], Splits(self.options.dataset_splits)
        for split, rows in loaded.items():
            if splits.target(split) is None and SPLIT not in rows.column_names:
                continue
            images = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
            column = image_column(self._place(split), images, rows.column_names)
            found.append((split, rows.cast_column(column, datasets.Image(decode=False)), column))
        return found

    def _place(self, split: str) -> str:
        return f"{self.path}, split {split}" if split else str(self.path)

    def listing(self) -> Listing:
        """List every row."""
        listing, tried, splits = Listing(), CaptionNames.of(self.options), Splits(self.options.dataset_splits)
        found: list[SplitRow] = []
        for number, (split, rows, column) in enumerate(self._splits):
            place, mtime_ns = self._place(split), _newest_ns(rows)
            text = tried.column_in(rows.column_names, place, listing.notes)
            names, sizes = _names_and_sizes(rows, column)
            found += (
                SplitRow(
                    split=as_split(cell) or split,
                    path=place,
                    name=own,
                    number=f"{row:08d}",
                    column=text,
                    caption=value,
                    place=f"{place}, row {row}",
                    at=(number, row, size, mtime_ns),
                )
                for row, (own, size, value, cell) in enumerate(
                    zip(names, sizes, _values(rows, text), _values(rows, SPLIT), strict=True)
                )
            )
        add_rows(listing, splits, found)
        listed = {split for split, _, _ in self._splits}
        for split, rows in self._loaded.items():
            if split not in listed:
                splits.take(split, split, rows.num_rows)
        splits.finish(str(self.path), str(self.path), listing.notes)
        if not listing.items:
            raise SourceError(f"{self.path} is a dataset without rows")
        return listing

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
                Reason.UNREADABLE,
                f"the dataset holds the path {value['path']!r} and no bytes; save it with the images embedded",
            )
        return SourceBytes(data=value["bytes"], stamp=stamp)


def _newest_ns(rows: Any) -> int:  # noqa: ANN401
    return max((os.stat(file["filename"]).st_mtime_ns for file in rows.cache_files), default=0)  # noqa: PTH116


def _names_and_sizes(rows: Any, column: str) -> tuple[list[str | None], list[int]]:  # noqa: ANN401
    """Return the paths and sizes in bytes of the images in the dataset, without reading the images."""
    import pyarrow.compute as pc

    names: list[str | None] = []
    sizes: list[int] = []
    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        images = part[column]
        names += pc.struct_field(images, "path").to_pylist()
        sizes += [size or 0 for size in pc.binary_length(pc.struct_field(images, "bytes")).to_pylist()]
    return names, sizes


def _values(rows: Any, column: str | None) -> Iterator[object]:  # noqa: ANN401
    """Yield the values of a column, None for each row if there is no such column."""
    if column not in rows.column_names:
        yield from [None] * rows.num_rows
        return
    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        yield from part[column].to_pylist()
