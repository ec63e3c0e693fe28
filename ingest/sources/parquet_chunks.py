"""The memory that reading columns of a Parquet file takes, bounded before anything is read: a few kB can hold gigabytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_CHUNK_BYTES = 256 << 20  # of a column in a row group, uncompressed, or
MAX_MEAN_BYTES = 1 << 10  # of a value on average: a million captions of 300 bytes are usual


def why_too_large(file: Any, source: Any, columns: Collection[str]) -> str | None:  # noqa: ANN401 - pyarrow has no types
    """Return why these columns of a file cannot be read; None if they can.

    Args:
        file: a `pyarrow.parquet.ParquetFile`.
        source: what it was opened from.
        columns: names of columns of texts or small values, lists of these included.

    Raises:
        OSError: if the description of one of the columns is damaged.
    """
    import pyarrow.parquet as pq

    metadata = file.metadata
    numbers = [n for n in range(metadata.num_columns) if metadata.schema.column(n).path.partition(".")[0] in columns]
    # `column` below ends the process if a description is damaged. A reader of no rows needs the same descriptions, but
    # raises an error, and it reads nothing.
    checks = pq.ParquetFile(source, metadata=metadata, pre_buffer=False).reader
    for group in range(metadata.num_row_groups):
        list(checks.iter_batches(0, row_groups=[group], column_indices=numbers, use_threads=False))
        for number in numbers:
            chunk = metadata.row_group(group).column(number)
            name, size = chunk.path_in_schema.partition(".")[0], chunk.total_uncompressed_size
            if size > max(MAX_CHUNK_BYTES, MAX_MEAN_BYTES * chunk.num_values):
                return (
                    f"its column {name:.80} has {size} bytes in the {chunk.num_values} values of a row group; at most "
                    f"{MAX_CHUNK_BYTES}, or {MAX_MEAN_BYTES} a value, are read. Shorten the longest, or use smaller row groups"
                )
    return None
