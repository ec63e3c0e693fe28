"""Tables of captions after Hugging Face's image-folder convention: `metadata.jsonl`, `.csv` or `.parquet`.

Each row has `file_name`, an image's path from the table's folder, and `text`, its caption. A list in `text` is several
captions; in a CSV, where there are no lists, several captions are lines of one cell.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions import as_texts, lines_of, stripped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

FILE_NAME, TEXT = "file_name", "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of a table."""

    place: str  # such as `metadata.csv, line 3`
    file_name: str  # as it stands there
    captions: tuple[str, ...]


def read_rows(path: Path, name: str) -> Iterator[TableRow]:
    """Give a table's rows; `name` is what its errors call it.

    Raises:
        SourceError: where it cannot be read or a row is not what it should be; the row is named.
    """
    if not path.is_file():  # a pipe would be waited for, a device read without end
        raise SourceError(f"{name} is not there, or is not a file; expected a table")
    return _READERS[path.suffix.lower()](path, name)


def _jsonl(path: Path, name: str) -> Iterator[TableRow]:
    # not `splitlines`, which also breaks where JSON does not: at U+2028, form feeds and others
    for number, line in enumerate(_text(path, name).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
            yield _row(place, row[FILE_NAME], row.get(TEXT, []))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(
                f'{place}: expected an object like {{"file_name": "a.png", "text": "…"}}, got {line[:80]!r}'
            ) from error


def _csv(path: Path, name: str) -> Iterator[TableRow]:
    rows = csv.reader(io.StringIO(_text(path, name), newline=""), strict=True)
    try:
        header = next(rows, [])
        _refuse_without_file_name(name, header)
        for cells in rows:
            place = f"{name}, line {rows.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise SourceError(
                    f"{place}: {len(cells)} cells, the header has {len(header)}; a text with a comma must stand in quotes"
                )
            row = dict(zip(header, cells, strict=True))
            yield _row(place, row[FILE_NAME], list(lines_of(row.get(TEXT, ""))))
    except csv.Error as error:
        raise SourceError(f"{name}, line {rows.line_num}: {error}; expected comma-separated values") from error


def _parquet(path: Path, name: str) -> Iterator[TableRow]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SourceError(f"{name}: reading it needs pyarrow; install bucketline with its extra: bucketline[tables]") from error
    try:
        with pq.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            _refuse_without_file_name(name, names)
            number = 0
            for batch in file.iter_batches(columns=[column for column in (FILE_NAME, TEXT) if column in names]):
                for row in batch.to_pylist():
                    yield _row(f"{name}, row {number}", row[FILE_NAME], row.get(TEXT))
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name} cannot be read: {error}") from error


def _row(place: str, file_name: object, text: object) -> TableRow:
    texts = as_texts(text)
    if not isinstance(file_name, str) or not file_name or texts is None:
        raise SourceError(f"{place}: file_name must be a string, and text a string or a list of strings")
    if "\0" in file_name:
        raise SourceError(f"{place}: file_name {file_name!r} holds a NUL, which no file's name does")
    return TableRow(place=place, file_name=file_name, captions=stripped(texts))


def _text(path: Path, name: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{name} cannot be read: {error}") from error


def _refuse_without_file_name(name: str, columns: list[str]) -> None:
    if FILE_NAME not in columns:
        raise SourceError(
            f"{name} has the columns {', '.join(columns) or 'none'}; expected {FILE_NAME}, and {TEXT} for captions"
        )


_READERS: Mapping[str, Callable[[Path, str], Iterator[TableRow]]] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
TABLE_SUFFIXES = frozenset(_READERS)
