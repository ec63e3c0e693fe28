"""Parquet files with embedded images, and tables that name image files, as sources."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import (
    Path,
    PurePosixPath,
)
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError, UsageError
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
from bucketline.ingest.sources.object_place import list_place
from bucketline.ingest.sources.partner_names import REFERENCE, Cells, FilePartners, MaskForm, Partner
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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bucketline.ingest.sources.captions.table import TableRow
    from bucketline.ingest.sources.partner_names import Found


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


def _leaf(file: Any, column: str, field: str) -> str:  # noqa: ANN401 - a pyarrow.parquet.ParquetFile
    """Return the path in the file of a field of a column of images, or of lists of them; empty if it has none."""
    schema = file.metadata.schema
    paths = (schema.column(n).path for n in range(file.metadata.num_columns))
    return next((path for path in paths if path.startswith(f"{column}.") and path.endswith(f".{field}")), "")


def _held(cell: Any, number: int) -> bytes:  # noqa: ANN401 - a scalar of pyarrow
    """Return the bytes of an image in a cell, or of image `number` - 1 in the cell's list."""
    value = cell.as_py()
    return ((value[number - 1] if number else value) or {}).get("bytes") or b""


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
        self.options.partner_rules.refuse_other_than_columns("Parquet with images")
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
            references, mask = self._partner_columns(file)
            self.options.partner_rules.note_unused(there, references, listing.notes)
            paths = {one: _leaf(file, one, "path") for one in (*references, *((mask,) if mask else ()))}
            wanted = [f"{column}.path", *more, *paths.values()]
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
                    cells = [batch.column(one).to_pylist() for one in paths]
                    for name, value, cell, *beside in zip(own, texts, splits, *cells, strict=True):
                        row = len(found)
                        at = (number, group, row - first, mean, mtime_ns)
                        partners, error = self._partners(
                            f"{path.name}, row {row}", tuple(paths), beside, at, has_mask=bool(mask)
                        )
                        found.append(
                            SplitRow(
                                split=as_split(cell) or split,
                                path=inside,
                                name=name,
                                number=f"{path.stem}/{row:08d}",
                                column=text,
                                caption=value,
                                place=f"{path}, row {row}",
                                at=at,
                                partners=partners,
                                partner_error=error,
                            )
                        )
        return found

    @contextmanager
    def _opened(self, number: int) -> Iterator[tuple[Any, str]]:
        path = self.files[number]
        with opened_parquet(path, str(path)) as file:
            references, mask = self._partner_columns(file)
            images = [one for one in _image_columns(file.schema_arrow) if one not in (*references, mask)]
            yield file, image_column(str(path), images, file.schema_arrow.names)

    def _partner_columns(self, file: Any) -> tuple[tuple[str, ...], str | None]:  # noqa: ANN401 - a pyarrow.parquet.ParquetFile
        """Return the columns of references and that of masks; those of usual names only if they have images."""
        rules, there = self.options.partner_rules, file.schema_arrow.names
        with_images = there if rules.columns else [one for one in there if _leaf(file, one, "bytes")]
        references, mask = rules.reference_columns(with_images), rules.mask_column(there)
        for name in (*references, *rules.columns, *((rules.mask_at,) if rules.mask is MaskForm.COLUMN else ())):
            if not any(_leaf(file, one, "bytes") for one in there if one.startswith(name)):
                raise SourceError(f"it has no column {name!r} of images; it has {', '.join(there)}")
        return references, mask

    def _partners(
        self, place: str, columns: tuple[str, ...], cells: list[object], at: tuple[int, ...], *, has_mask: bool
    ) -> Found:
        """Return the partners of a row, whose `at` is its own, then the number of the column, and that in a list plus 1."""

        def partner(column: int, n: int) -> Partner:
            own = f"{place}, {columns[column]}{'' if n < 0 else f'[{n}]'}"
            return Partner(kind=REFERENCE, name=own, at=(*at[:3], 0, at[4], column, n + 1))

        references = cells[:-1] if has_mask else cells
        return self.options.partner_rules.found_in(references, cells[-1] if has_mask else None, partner)

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        """Return the items with their bytes: each row group is read once, a few rows at a time."""
        for (number, group), wanted in itertools.groupby(items, key=lambda item: item.at[:2]):
            yield from self._read(number, group, {item.at[2]: item for item in wanted})

    def _read(self, number: int, group: int, wanted: dict[int, SourceItem]) -> Iterator[SourceItem]:
        if storable_mtime_ns(self.files[number].stat().st_mtime_ns) != next(iter(wanted.values())).at[4]:
            raise SourceError(f"{self.files[number]} has changed since it was listed; rerun the command")
        row = 0
        with self._opened(number) as (file, column):
            columns, beside = [f"{column}.bytes"], tuple[str, ...]()
            if any(item.partners for item in wanted.values()):
                references, mask = self._partner_columns(file)
                beside = (*references, *((mask,) if mask else ()))
                columns += [_leaf(file, one, "bytes") for one in beside]
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=columns, use_threads=False):
                data, others = batch.column(column).field("bytes"), [batch.column(one) for one in beside]
                for at in range(len(data)):
                    if (item := wanted.pop(row, None)) is not None:
                        partners = tuple(replace(one, held=_held(others[one.at[5]][at], one.at[6])) for one in item.partners)
                        yield replace(item, held=data[at].as_py() or b"", partners=partners)
                    row += 1
                if not wanted:
                    return

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[3], mtime_ns=item.at[4])

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        data = item.held or b""
        if item.held is None and len(item.at) > 5:  # of a partner
            own = replace(item, at=item.at[:5], partners=(Partner(kind=REFERENCE, name=item.id, at=item.at),))
            (row,) = self._read(item.at[0], item.at[1], {item.at[2]: own})
            data = row.partners[0].held or b""
        elif item.held is None:
            (row,) = self._read(item.at[0], item.at[1], {item.at[2]: item})
            data = row.held or b""
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
        rows = read_rows(self.path, self.path.name, CaptionNames.of(self.options), listing.notes, self.options.partner_rules)
        return listing_of_rows(rows, inside.id_of, str(self.path), self.options, listing)


def listing_of_rows(
    rows: Iterable[TableRow], id_of: Callable[[str, str], str], table: str, options: SourceOptions, listing: Listing
) -> Listing:
    """Add the images that the rows of a table name to `listing`, sorted by id; return it.

    `id_of` returns the path inside the source of a file, by the place of its row and its name there. `table`: its path or URL.
    """
    seen: dict[str, str] = {}
    splits, cells = Splits(options.dataset_splits), dict[str, Cells]()
    folder, _, name = table.rpartition("/")
    for row in rows:
        sample_id = id_of(row.place, row.file_name)
        if row.cells is not None:
            cells[sample_id] = row.cells.at(partial(id_of, row.place))
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
    _add_partners(listing, cells, table, options)
    return listing


def _add_partners(listing: Listing, cells: Mapping[str, Cells], table: str, options: SourceOptions) -> None:
    """Add to the images of a table what its rows name, `cells`, or what folders have."""
    rules = options.partner_rules
    if rules.pattern is not None or rules.mask is MaskForm.SUFFIX:
        raise UsageError(f"{table} is a table, next to whose images no others are looked for; name a folder, or column:NAME")
    if not cells and not rules.places:
        return
    partners = FilePartners(rules, lambda place: list_place(place, options))
    partners.take([item.id for item in listing.items], lambda _: (), cells)
    for n, item in enumerate(listing.items):
        found, error = partners.of(item.id, cells.get(item.id), lambda _: ())
        listing.items[n] = replace(item, partners=found, partner_error=error)
    listing.notes += partners.notes()


def inside_id(place: str, file_name: str, folders: Sequence[str], is_there: Callable[[str], bool]) -> str:
    r"""Return the path of a row's image relative to the table's folder, `folders`, with `/` in the place of `\`.

    A name with `\` stays as it is if `is_there` says that there is such a file. `place` is the row's, in errors.
    """
    name = file_name if is_there(file_name) else file_name.replace("\\", "/")
    sample_id = os.path.normpath(inside_folder(name, folders) or name)
    if PurePosixPath(sample_id).is_absolute() or sample_id.split("/", 1)[0] in ("..", "."):
        raise SourceError(f"{place}: {file_name!r} leads out of the table's folder; expected a path inside it")
    return sample_id


class _Inside:
    """Converts a table's file names to ids, and refuses those that lead out of its folder."""

    def __init__(self, folder: Path, *, follow_links: bool) -> None:
        self._folder, self._follows = folder, follow_links
        self._folders = folder_paths(folder)
        self._real = os.path.realpath(folder)
        self._seen: dict[str, str] = {}  # real path by folder

    def id_of(self, place: str, file_name: str) -> str:
        """Return the path relative to the table's folder."""
        sample_id = inside_id(
            place, file_name, self._folders, lambda name: "\\" in name and os.path.lexists(self._folder / name)
        )
        if self._follows:
            return sample_id
        path = self._folder / sample_id
        parent = str(path.parent)
        if parent not in self._seen:
            self._seen[parent] = os.path.realpath(parent)
        real = os.path.realpath(path) if path.is_symlink() else f"{self._seen[parent]}/{path.name}"
        if not real.startswith(self._real.rstrip("/") + "/"):
            raise SourceError(
                f"{place}: {file_name!r} leads out of the table's folder, by a link to {real}; "
                "expected a file inside it, or --follow-links"
            )
        return sample_id
