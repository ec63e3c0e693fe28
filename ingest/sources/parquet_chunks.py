"""Open Parquet files, and bound the memory that reading a column takes before it is read: a few kB can hold gigabytes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

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
