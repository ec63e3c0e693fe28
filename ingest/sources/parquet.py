"""Parquet files with embedded images, and tables that name image files, as sources."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import (
    Path,
    PurePosixPath,
)
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.captions.files import CaptionNames, refuse_unmet, unusable
from bucketline.ingest.sources.captions.table import (
    FILE_NAME,
    SPLIT,
    as_split,
    column_chunks,
    folder_paths,
    inside_folder,
    opened_parquet,
    read_rows,
    why_too_large,
)
from bucketline.ingest.sources.hf_dataset import VAL, SplitRow, Splits, add_rows, image_column, split_in_path, split_of_image
from bucketline.ingest.sources.source import (
    Listing,
    LocalFileSource,
    Source,
    SourceItem,
    SourceOptions,
    Stamp,
    note_place,
    refuse_too_large,
)
from bucketline.store.format.schema import storable_mtime_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bucketline.ingest.sources.captions.table import TableRow


_MAX_GROUP_BYTES = 2 << 30  # of the images in a row group, uncompressed
_BATCH = 16  # rows whose images are in memory together
_ROWS = 1000


def has_images(path: Path) -> bool:
    """Return True if a Parquet file has images, and names no files; False also if it cannot be read, or without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(path)
            return FILE_NAME not in schema.names and bool(_image_columns(schema))
        except (OSError, pa.ArrowException, UnicodeDecodeError):
            return False
    except ImportError:
        return False


def _image_columns(schema: Any) -> list[str]:  # noqa: ANN401 - a pyarrow.Schema
    import pyarrow as pa

    def has_bytes(kind: Any) -> bool:  # noqa: ANN401 - a type of pyarrow
        names = [kind.field(n).name for n in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        own = kind.field("bytes").type if {"bytes", "path"} <= {*names} else None
        return own is not None and (pa.types.is_binary(own) or pa.types.is_large_binary(own))

    return [column.name for column in schema if has_bytes(column.type)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource(Source):
    """The rows of Parquet files; a sample's id is `SPLIT/NAME`, without `SPLIT/` if it is in none.

    NAME is the image's path in the file if it has a unique one, else `FILE/ROW`. An item's `at` is its file, row group, row in
    the group, mean bytes of the group's images, and the file's mtime.
    """

    root: Path  # the folder of the source
    files: tuple[Path, ...]  # in it or below
    options: SourceOptions = field(default_factory=SourceOptions)

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return self.files

    def listing(self) -> Listing:
        """List every row, without reading the images."""
        listing, tried, splits = Listing(), CaptionNames.of(self.options), Splits(self.options.dataset_splits)
        add_rows(listing, splits, [row for number in range(len(self.files)) for row in self._rows(number, tried, listing)])
        splits.finish(str(self.files[0] if len(self.files) == 1 else self.root), str(self.root), listing.notes)
        if not listing.items:
            raise SourceError(f"{self.files[0]}: its {len(self.files)} files have no rows to pack")
        refuse_unmet(self.options, listing.captions_from)
        return listing

    def _rows(self, number: int, tried: CaptionNames, listing: Listing) -> list[SplitRow]:
        path, found = self.files[number], list[SplitRow]()
        inside = path.relative_to(self.root).as_posix()
        split = split_in_path(inside)
        with self._opened(number) as (file, column):
            there = file.schema_arrow.names
            text = tried.column_in(there, str(path), listing.notes)
            more = [one for one in there if one in (text, SPLIT)]
            wanted = [f"{column}.path", *more]
            if why := why_too_large(file, path, wanted):
                raise SourceError(f"{path}: {why}")
            mtime_ns = storable_mtime_ns(path.stat().st_mtime_ns)
            for group, chunk in column_chunks(file, path, {f"{column}.bytes"}):
                size = chunk.total_uncompressed_size
                if size > _MAX_GROUP_BYTES:
                    raise SourceError(
                        f"{path}: the images of a row group have {size} bytes, at most {_MAX_GROUP_BYTES} are read; "
                        "write it with smaller row groups"
                    )
                mean, first = size // max(1, file.metadata.row_group(group).num_rows), len(found)
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=wanted, use_threads=False):
                    own = batch.column(column).field("path").to_pylist()
                    nothing = [None] * len(own)
                    texts = nothing if text is None else batch.column(text).to_pylist()
                    splits = batch.column(SPLIT).to_pylist() if SPLIT in more else nothing
                    for name, value, cell in zip(own, texts, splits, strict=True):
                        row = len(found)
                        found.append(
                            SplitRow(
                                split=as_split(cell) or split,
                                path=inside,
                                name=name,
                                number=f"{path.stem}/{row:08d}",
                                column=text,
                                caption=value,
                                place=f"{path}, row {row}",
                                at=(number, group, row - first, mean, mtime_ns),
                            )
                        )
        return found

    @contextmanager
    def _opened(self, number: int) -> Iterator[tuple[Any, str]]:
        path = self.files[number]
        with opened_parquet(path, str(path)) as file:
            yield file, image_column(str(path), _image_columns(file.schema_arrow), file.schema_arrow.names)

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        """Return the items with their bytes: each row group is read once, a few rows at a time."""
        for (number, group), wanted in itertools.groupby(items, key=lambda item: item.at[:2]):
            yield from self._read(number, group, {item.at[2]: item for item in wanted})

    def _read(self, number: int, group: int, wanted: dict[int, SourceItem]) -> Iterator[SourceItem]:
        if storable_mtime_ns(self.files[number].stat().st_mtime_ns) != next(iter(wanted.values())).at[4]:
            raise SourceError(f"{self.files[number]} has changed since it was listed; rerun the command")
        row = 0
        with self._opened(number) as (file, column):
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=[f"{column}.bytes"], use_threads=False):
                data = batch.column(column).field("bytes")
                for at in range(len(data)):
                    if (item := wanted.pop(row, None)) is not None:
                        yield replace(item, held=data[at].as_py() or b"")
                    row += 1
                if not wanted:
                    return

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[3], mtime_ns=item.at[4])

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        if item.held is None:
            (item,) = self._read(item.at[0], item.at[1], {item.at[2]: item})
        data = item.held or b""
        refuse_too_large(len(data))
        if not data:
            raise RejectedError(
                Reason.UNREADABLE, "the file has no bytes of it, only a path; write it with the images embedded"
            )
        return data, self.stamp(item)


# ----------------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource(LocalFileSource):
    """The images that a table names, in its folder or below. No other files are read."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    def listing(self) -> Listing:
        """Read the table. A named file that does not exist is listed, and rejected later."""
        inside = _Inside(self.folder, follow_links=self.options.follow_links)
        listing = Listing()
        rows = read_rows(self.path, self.path.name, CaptionNames.of(self.options), listing.notes)
        return listing_of_rows(rows, inside.id_of, str(self.path), Splits(self.options.dataset_splits), listing)


def listing_of_rows(
    rows: Iterable[TableRow], id_of: Callable[[TableRow], str], table: str, splits: Splits, listing: Listing
) -> Listing:
    """Add the images that the rows of a table name to `listing`, sorted by id; return it. `table`: its path or URL."""
    seen: dict[str, str] = {}
    folder, _, name = table.rpartition("/")
    for row in rows:
        sample_id = id_of(row)
        note_place(seen, sample_id, row.place)
        target = splits.take(row.split or split_of_image(name, sample_id), sample_id)
        if target is None:
            continue
        captions = row.captions or ()
        error = unusable(row.table, captions)
        if captions:
            listing.captions_from[f"{row.table}, {row.column}"] += 1
        listing.items.append(SourceItem(id=sample_id, captions=captions, caption_error=error, held_out=target == VAL))
    splits.finish(table, folder, listing.notes)
    if not listing.items:
        raise SourceError(f"{table} names no image; expected rows with file_name and text")
    listing.items.sort(key=lambda item: item.id)
    return listing


def inside_id(row: TableRow, folders: Sequence[str], is_there: Callable[[str], bool]) -> str:
    r"""Return the path of a row's image relative to the table's folder, `folders`, with `/` in the place of `\`.

    A name with `\` stays as it is if `is_there` says that there is such a file.
    """
    name = row.file_name if is_there(row.file_name) else row.file_name.replace("\\", "/")
    sample_id = os.path.normpath(inside_folder(name, folders) or name)
    if PurePosixPath(sample_id).is_absolute() or sample_id.split("/", 1)[0] in ("..", "."):
        raise SourceError(f"{row.place}: {row.file_name!r} leads out of the table's folder; expected a path inside it")
    return sample_id


class _Inside:
    """Converts a table's file names to ids, and refuses those that lead out of its folder."""

    def __init__(self, folder: Path, *, follow_links: bool) -> None:
        self._folder, self._follows = folder, follow_links
        self._folders = folder_paths(folder)
        self._real = os.path.realpath(folder)
        self._seen: dict[str, str] = {}  # real path by folder

    def id_of(self, row: TableRow) -> str:
        """Return the path relative to the table's folder."""
        sample_id = inside_id(row, self._folders, lambda name: "\\" in name and os.path.lexists(self._folder / name))
        if self._follows:
            return sample_id
        path = self._folder / sample_id
        parent = str(path.parent)
        if parent not in self._seen:
            self._seen[parent] = os.path.realpath(parent)
        real = os.path.realpath(path) if path.is_symlink() else f"{self._seen[parent]}/{path.name}"
        if not real.startswith(self._real.rstrip("/") + "/"):
            raise SourceError(
                f"{row.place}: {row.file_name!r} leads out of the table's folder, by a link to {real}; "
                "expected a file inside it, or --follow-links"
            )
        return sample_id
