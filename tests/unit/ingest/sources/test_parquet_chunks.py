"""A table of some kB whose one value is larger than memory is refused by its metadata, before it is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bucketline.ingest.sources.parquet_chunks import MAX_CHUNK_BYTES, why_too_large
from tests.commands import call, spawn
from tests.models import png

_SCAN = """
import sys
from bucketline.ingest.cli import main
from tests.process_memory import in_memory

code = main(["scan", sys.argv[1]])
print("peak", in_memory("VmHWM"))
sys.exit(code)
"""

_DAMAGED = """
import io, struct, sys
import pyarrow.parquet as pq
from bucketline.ingest.sources.parquet_chunks import why_too_large

whole, refused = open(sys.argv[1], "rb").read(), 0
(length,) = struct.unpack("<I", whole[-8:-4])
for at in range(len(whole) - 8 - length, len(whole) - 8):
    for value in (0, 2, 25, 255):
        file = io.BytesIO(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            why_too_large(pq.ParquetFile(file), file, {"file_name", "text"})
        except Exception:
            refused += 1
print("refused", refused)
"""


def table(folder: Path, text: pa.Array) -> Path:
    folder.mkdir()
    (folder / "a.png").write_bytes(png(80, 90))
    path = folder / "metadata.parquet"
    pq.write_table(pa.table({"file_name": ["a.png"] * len(text), "text": text}), path, compression="zstd")
    return path


@pytest.mark.slow
def test_one_value_of_half_a_gigabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = table(tmp_path / "images", pa.array(["a" * (2 * MAX_CHUNK_BYTES)]))
    assert path.stat().st_size < 100_000
    usual = spawn([sys.executable, "-c", _SCAN, tmp_path / "none"])
    ran = spawn([sys.executable, "-c", _SCAN, tmp_path / "images"]).fails("metadata.parquet: its column text has 53687")
    peak, other = (int(one.out.split()[-1]) for one in (ran, usual))
    assert peak < other + MAX_CHUNK_BYTES


def test_many_captions_of_a_usual_length_are_read(tmp_path: Path) -> None:
    path = table(tmp_path / "images", pa.array(["a cat"]))
    assert why_too_large(pq.ParquetFile(path), path, {"text"}) is None
    assert call("ingest", "scan", tmp_path / "images").code == 0


@pytest.mark.slow
def test_a_list_of_captions_is_counted_too(tmp_path: Path) -> None:
    path = table(tmp_path / "images", pa.array([["b" * (MAX_CHUNK_BYTES + 1)]]))
    why = why_too_large(pq.ParquetFile(path), path, {"text"})
    assert why is not None
    assert "its column text has" in why


def test_a_damaged_description_of_a_column_is_an_error_and_does_not_end_the_process(tmp_path: Path) -> None:
    path = table(tmp_path / "images", pa.array([["a cat"]]))
    ran = spawn([sys.executable, "-c", _DAMAGED, path])
    assert ran.code == 0, ran.err
    assert int(ran.out.split()[-1]) > 100
