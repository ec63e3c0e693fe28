"""Caption tables in Hugging Face's ImageFolder convention: `metadata.jsonl`, `.csv` or `.parquet`; Parquet in bounded memory.

Each row has `file_name`, an image's path relative to the table's folder, and its caption in `text` or another column of
`CaptionNames`. Several captions are a list, or in a CSV the lines of one cell.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.files.paths import why_unread
from bucketline.ingest.sources.captions.files import CAPTION_COLUMNS, CaptionNames, as_texts, name_key, stripped
from bucketline.ingest.sources.partner_names import NO_PARTNERS, Cells, PartnerRules
from bucketline.ingest.sources.source import note_place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


# -------------------------------------------------------------------------------------------------------------- parquet chunks
# Open Parquet files, and bound the memory that reading a column takes before it is read: a few kB can hold gigabytes.

MAX_CHUNK_BYTES = 256 << 20  # of a column in a row group, uncompressed, or
MAX_MEAN_BYTES = 1 << 10  # of a value on average: a million captions of 300 bytes are usual


@contextmanager
def opened_parquet(path: Path, shown: str) -> Iterator[Any]:
    """Open a Parquet file as a `pyarrow.parquet.ParquetFile`; `shown` names it in errors, those of the block included."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SourceError(
            f"{shown}: reading it needs pyarrow; install the extra tables: pip install 'bucketline[tables]'"
        ) from error
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, RuntimeError) as error:  # the last of Parquet itself
        raise SourceError(f"{shown} cannot be read: {error!s:.200}") from error


def why_too_large(file: Any, source: Any, columns: Collection[str]) -> str | None:  # noqa: ANN401 - pyarrow has no types
    """Return why these columns of a file cannot be read; None if they can.

    Args:
        file: a `pyarrow.parquet.ParquetFile`.
        source: what it was opened from.
        columns: names of columns of texts or small values, lists of these included; `image.path` is a field of a struct.
    """
    for _, chunk in column_chunks(file, source, columns):
        name, size = chunk.path_in_schema.partition(".")[0], chunk.total_uncompressed_size
        if size > max(MAX_CHUNK_BYTES, MAX_MEAN_BYTES * chunk.num_values):
            return (
                f"its column {name:.80} has {size} bytes in the {chunk.num_values} values of a row group; at most "
                f"{MAX_CHUNK_BYTES}, or {MAX_MEAN_BYTES} a value, are read. Shorten the longest, or use smaller row groups"
            )
    return None


def column_chunks(file: Any, source: Any, columns: Collection[str]) -> Iterator[tuple[int, Any]]:  # noqa: ANN401 - as above
    """Yield the number of each row group with the description of each of these columns in it, as `why_too_large` takes them."""
    import pyarrow.parquet as pq

    metadata = file.metadata
    paths = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
    numbers = [n for n, path in enumerate(paths) if path in columns or path.partition(".")[0] in columns]
    # `column` below ends the process if a description is damaged. A reader of no rows needs the same descriptions, but
    # raises an error, and it reads nothing.
    checks = pq.ParquetFile(source, metadata=metadata, pre_buffer=False).reader
    for group in range(metadata.num_row_groups):
        list(checks.iter_batches(0, row_groups=[group], column_indices=numbers, use_threads=False))
        for number in numbers:
            yield group, metadata.row_group(group).column(number)


# -------------------------------------------------------------------------------------------------------------- metadata table

FILE_NAME = "file_name"
FILE_NAMES = (FILE_NAME, "image_path", "image")  # that is musubi's, and that DiffSynth's
SPLIT = "split"
_BATCH = 1024  # rows of a Parquet file together; values that it holds once become as many copies


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of a table."""

    table: str  # file name of the table
    place: str  # such as `metadata.csv, line 3`
    file_name: str  # as written in the table
    captions: tuple[str, ...] | None  # None if the table has no caption column
    column: str | None  # the column of the captions
    split: str  # as the column `split` has it; empty if it names none
    cells: Cells | None = None  # as written in the table


def read_rows(
    path: Path, name: str, names: CaptionNames, notes: list[str], partners: PartnerRules = NO_PARTNERS
) -> Iterator[TableRow]:
    """Yield a table's rows. `name` is used in error messages; a note about a table without captions is added to `notes`."""
    if not path.is_file():  # a pipe would block, and a device never ends
        raise SourceError(f"{name} does not exist, or is not a file; expected a table")
    columns: dict[str, None] = {}  # of all rows, in order
    row = None
    for row in _READERS[path.suffix.lower()](path, name, names, partners, columns):
        yield row
    if row is not None:
        names.column_in([column for column in columns if column != FILE_NAME], name, notes)
        partners.reference_columns(columns, name)
        partners.mask_column(columns, name)
    names.note_lines(notes)


def _jsonl(path: Path, name: str, names: CaptionNames, partners: PartnerRules, columns: dict[str, None]) -> Iterator[TableRow]:
    # not `splitlines`, which also splits where JSON does not: at U+2028, form feeds and others
    for number, line in enumerate(_text(path, name).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
            column = names.column_of([key for key, value in row.items() if value is not None]) or names.column_of(row)
            found = _row(path, place, row[_file_column(row) or FILE_NAME], row.get(column), column, row, partners)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(
                f'{place}: expected an object like {{"file_name": "a.png", "text": "…"}}, got {line[:80]!r}'
            ) from error
        columns |= dict.fromkeys(row)
        yield found


def _csv(path: Path, name: str, names: CaptionNames, partners: PartnerRules, columns: dict[str, None]) -> Iterator[TableRow]:
    rows = csv.reader(io.StringIO(_text(path, name), newline=""), strict=True)
    try:
        header = next(rows, [])
        file_column = _file_column_of(name, header)
        columns |= dict.fromkeys(header)
        column = names.column_of(header)
        for cells in rows:
            place = f"{name}, line {rows.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise SourceError(
                    f"{place}: {len(cells)} cells, the header has {len(header)}; a text with a comma must be in quotes"
                )
            row = dict(zip(header, cells, strict=True))
            text = None if column is None else list(names.split(place, row[column]))
            yield _row(path, place, row[file_column], text, column, row, partners)
    except csv.Error as error:
        raise SourceError(f"{name}, line {rows.line_num}: {error}; expected comma-separated values") from error


def _parquet(
    path: Path, name: str, names: CaptionNames, partners: PartnerRules, columns: dict[str, None]
) -> Iterator[TableRow]:
    with opened_parquet(path, name) as file:
        there = list(file.schema_arrow.names)
        file_column = _file_column_of(name, there)
        columns |= dict.fromkeys(there)
        column = names.column_of(there)
        wanted = (file_column, column, SPLIT, *partners.reference_columns(there, name), partners.mask_column(there, name))
        read, number = [one for one in there if one in wanted], 0
        if why := why_too_large(file, path, read):
            raise SourceError(f"{name}: {why}")
        for batch in file.iter_batches(columns=read, batch_size=_BATCH):
            for row in batch.to_pylist():
                yield _row(path, f"{name}, row {number}", row[file_column], row.get(column), column, row, partners)
                number += 1


def _row(
    path: Path,
    place: str,
    file_name: object,
    text: object,
    column: str | None,
    row: Mapping[str, object],
    partners: PartnerRules,
) -> TableRow:
    texts = as_texts(text)
    if not isinstance(file_name, str) or not file_name or texts is None:
        raise SourceError(f"{place}: file_name must be a string, and {column} a string or a list of strings")
    if "\0" in file_name:
        raise SourceError(f"{place}: file_name {file_name!r} has a NUL character, which no file name may have")
    captions = None if column is None else stripped(texts)
    return TableRow(
        table=path.name,
        place=place,
        file_name=file_name,
        captions=captions,
        column=column,
        split=as_split(row.get(SPLIT)),
        cells=_cells(place, row, partners),
    )


def _cells(place: str, row: Mapping[str, object], partners: PartnerRules) -> Cells | None:
    """Return the partners that a row names; None if its table has no columns of them."""
    columns, mask = _partner_columns(partners, tuple(row))
    if not columns and mask is None:
        return None
    names = list[str]()
    for column in columns:
        own = as_texts(row[column])
        if own is None:
            raise SourceError(f"{place}: {column} is a {type(row[column]).__name__}, expected a path or a list of paths")
        names += stripped(own)
    own = as_texts(row[mask]) if mask else []
    if own is None or len(own) > 1:
        raise SourceError(f"{place}: {mask} is {row[mask or '']!r:.80}, expected a path")
    return Cells(tuple(names) if columns else None, next(iter(stripped(own)), None))


def as_split(value: object) -> str:
    """Return the split that a cell of the column `split` names, a number as well; empty if it is empty."""
    return "" if value is None else str(value).strip()


@lru_cache(maxsize=64)
def _partner_columns(partners: PartnerRules, there: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    return partners.reference_columns(there), partners.mask_column(there)


def _text(path: Path, name: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name} {why_unread(error)}") from error


def _file_column(there: Collection[str]) -> str | None:
    return next((name for name in FILE_NAMES if name in there), None)


def _file_column_of(name: str, columns: list[str]) -> str:
    if (found := _file_column(columns)) is None:
        raise SourceError(
            f"{name} has the columns {', '.join(columns) or 'none'}; expected {FILE_NAME}, "
            f"and {CAPTION_COLUMNS[0]} for captions"
        )
    return found


_Reader = Callable[[Path, str, CaptionNames, PartnerRules, dict[str, None]], Iterator[TableRow]]
_READERS: Mapping[str, _Reader] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
TABLE_SUFFIXES = frozenset(_READERS)


@dataclass(slots=True, kw_only=True)
class TableRows:
    """The rows of all tables in a folder, by the image's path relative to the folder."""

    folders: Sequence[str]  # paths or URLs of the folder, with which a row may begin
    notes: list[str] = field(default_factory=list)
    _rows: dict[str, TableRow] = field(default_factory=dict)
    _loose: dict[str, list[str]] = field(default_factory=dict)  # names without an exact match, by key
    _used: set[str] = field(default_factory=set)
    _places: dict[str, str] = field(default_factory=dict)
    _tables: dict[str, list[str]] = field(default_factory=dict)  # names in the rows of each table
    _cells: dict[str, Cells] = field(default_factory=dict)

    @property
    def cells(self) -> Mapping[str, Cells]:
        """The partners that rows name by the path of their image, as paths in the source."""
        return self._cells

    def add(self, table: str, rows: Iterable[TableRow]) -> None:
        """Add a table's rows; file names are relative to the table's own folder, or absolute."""
        parent = PurePosixPath(table).parent
        for row in rows:
            image = os.path.normpath(self._inside(parent, row.file_name))
            note_place(self._places, image, row.place)
            self._rows[image] = row
            if row.cells is not None:
                self._cells[image] = row.cells.at(partial(self._inside, parent))
            self._tables.setdefault(table, []).append(image)

    def _inside(self, parent: PurePosixPath, name: str) -> str:
        return inside_folder(name, self.folders) or str(parent / name)

    def match(self, images: list[str]) -> None:
        """Set the images of the folder: a row with the exact path of an image matches only that image."""
        there = set(images)
        for name in self._rows:
            if name not in there:
                self._loose.setdefault(_key(name), []).append(name)

    def of(self, image: str) -> TableRow | str | None:
        """Return an image's row, or why it is ambiguous; None if it has none."""
        if not self._rows:
            return None
        names = [image] if image in self._rows else self._loose.get(_key(image), ())
        self._used.update(names)
        if len(names) > 1:
            return f"{' and '.join(self._places[name] for name in names)} both name this image; keep one row"
        return self._rows[names[0]] if names else None

    def refuse_unmatched(self, images: Sequence[str]) -> None:
        """Check that each table has a row that matched an image, after `of` has been called for all `images`."""
        for table, names in self._tables.items():
            if self._used.isdisjoint(names):
                beside = table.rpartition("/")[0]
                image = next((image for image in images if image.startswith(beside)), images[0])
                raise SourceError(
                    f"{table}: none of its {counted(len(names), 'row')} names an image: its first file_name is "
                    f"{self._rows[names[0]].file_name!r}, an image is {image!r}; write file_name as the path from the table's "
                    "folder to the image, or move the table out of the source"
                )

    def stray(self) -> list[str]:
        """Return the names of the rows without an image."""
        return [f"{name} (in {row.table})" for name, row in self._rows.items() if name not in self._used]


def folder_paths(folder: Path) -> tuple[str, ...]:
    """Return the absolute paths of a folder, without and with links resolved."""
    return tuple({os.path.abspath(folder): None, os.path.realpath(folder): None})  # noqa: PTH100 - without resolving


def inside_folder(name: str, folders: Sequence[str]) -> str | None:
    """Return the rest of a path or URL that begins with one of `folders`; None if it begins with none."""
    name = name.replace("\\", "/")
    begin = next((folder for folder in folders if name.startswith(f"{folder.rstrip('/')}/")), None)
    return None if begin is None else name[len(begin.rstrip("/")) :].lstrip("/")


def _key(name: str) -> str:
    if "\\" in name:
        name = os.path.normpath(name.replace("\\", "/"))
    stem, dot, extension = name_key(name).rpartition(".")
    return f"{stem}{dot}{extension.lower()}"
