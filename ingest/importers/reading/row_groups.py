"""Read rows of Parquet files whose values are large: a row group at a time, kept while its rows are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.ingest.importers.cache import damaged, odd_files_rejected
from bucketline.ingest.importers.reading.read_files import LastRead, open_of_any_size
from bucketline.ingest.sources.parquet_chunks import why_too_large

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_GROUP_BYTES = 8 << 30  # of a row group, uncompressed
KEPT_GROUPS = 2  # row groups; neighbouring rows are read by several threads at a time, so two may be in use


_groups: LastRead[Any] = LastRead(KEPT_GROUPS, lambda _: 1)


def read_row(source: Path, path: str, group: int, row: int, columns: Sequence[str]) -> dict[str, Any]:
    """Return a row's values of some columns by name, binary ones as buffers. Parquet has no smaller part than a row group.

    Raises:
        RejectedError: if the file cannot be read or is damaged.
    """
    table = _groups.part(source, path, group, lambda: _read(source, path, group, columns))
    if row >= table.num_rows:
        raise damaged(f"{path} has {table.num_rows} rows in group {group}")
    return {name: _value(table[name][row]) for name in table.column_names}


def _value(scalar: Any) -> Any:  # noqa: ANN401 - any column
    import pyarrow as pa

    return scalar.as_buffer() if pa.types.is_binary(scalar.type) or pa.types.is_large_binary(scalar.type) else scalar.as_py()


def _read(source: Path, path: str, group: int, columns: Sequence[str]) -> Any:  # noqa: ANN401 - pyarrow has no types
    import pyarrow.parquet as pq

    with open_of_any_size(source, path) as file, odd_files_rejected(path):
        whole = pq.ParquetFile(file)
        if (size := whole.metadata.row_group(group).total_byte_size) > MAX_GROUP_BYTES:
            raise ValueError(f"a row group of {size} bytes, at most {MAX_GROUP_BYTES} are read")
        there = [name for name in columns if name in whole.schema_arrow.names]
        return whole.read_row_group(group, columns=there, use_threads=False)


def listed_rows(source: Path, path: str, columns: Sequence[str]) -> list[tuple[int, int, dict[str, Any]]]:
    """Return row group, row in it and the values of some small columns, for each row of a file.

    Raises:
        RejectedError: if the file cannot be read, is damaged, or lacks the first of the columns.
    """
    import pyarrow.parquet as pq

    found: list[tuple[int, int, dict[str, Any]]] = []
    with open_of_any_size(source, path) as file, odd_files_rejected(path):
        whole = pq.ParquetFile(file)
        there = [name for name in columns if name in whole.schema_arrow.names]
        if columns[0] not in there:
            raise damaged(f"{path} has no column {columns[0]}, only {', '.join(whole.schema_arrow.names)[:200]}")
        if why := why_too_large(whole, file, there):
            raise damaged(f"{path}: {why}")
        for group in range(whole.num_row_groups):
            rows = whole.read_row_group(group, columns=there, use_threads=False).to_pylist()
            found += [(group, number, row) for number, row in enumerate(rows)]
    return found
