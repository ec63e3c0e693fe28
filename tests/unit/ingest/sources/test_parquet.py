"""Parquet files with embedded images, folders of them, and files whose metadata are damaged or claim gigabytes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions.table import MAX_CHUNK_BYTES, why_too_large
from bucketline.ingest.sources.dataset_file import open_source, source_as_json, source_from_json
from bucketline.ingest.sources.parquet import ParquetSource
from bucketline.ingest.sources.tar import TarSource
from bucketline.store import Store
from tests.commands import call, spawn
from tests.kit import by_id
from tests.models import SMALL, in_file, png, write_images
from tests.unit.ingest.test_rules import write_tars

# reads a file once for each byte of its footer that is another one, each STEP-th value; ends with how many were refused
_DAMAGED = """
import sys
from pathlib import Path

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions.table import why_too_large
from bucketline.ingest.sources.parquet import ParquetSource, has_images

path, what, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
whole, refused = path.read_bytes(), 0
length = int.from_bytes(whole[-8:-4], "little")


def look():
    if what == "table":
        import pyarrow.parquet as pq

        why_too_large(pq.ParquetFile(path), path, {"file_name", "text"})
    elif has_images(path):
        source = ParquetSource(root=path.parent, files=(path,))
        list(source.in_turn(source.listing().items))
    else:
        raise SourceError("has no images")


footer = range(len(whole) - 8 - length, len(whole) - 8)
for n, (at, value) in enumerate((at, value) for at in footer for value in (0, 2, 25, 255)):
    if n % step == 0:
        path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            look()
        except SourceError if what == "images" else Exception:
            refused += 1
print("refused", refused)
"""

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path: Path, images: list[bytes | None], *, names: list[str | None] | None = None, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = names or [None] * len(images)
    values = [{"bytes": data, "path": name} for data, name in zip(images, names, strict=True)]
    pq.write_table(pa.table({"image": pa.array(values, IMAGE), **columns}), path, row_group_size=3)
    return path


def pictures(count: int, first: int = 0) -> list[bytes | None]:
    return [png(16 + n % 9, 24, first + n) for n in range(count)]


def test_a_file_packs_what_a_folder_of_its_images_packs(tmp_path: Path, model: Path) -> None:
    images, texts = pictures(10), [f"a cat {n}" for n in range(10)]
    names: list[str | None] = [f"{n:02d}.png" for n in range(10)]
    file = write(tmp_path / "some.parquet", images, names=names, text=texts)
    (tmp_path / "photos").mkdir()
    for name, data, text in zip(names, images, texts, strict=True):
        assert name is not None
        assert data is not None
        (tmp_path / "photos" / name).write_bytes(data)
        (tmp_path / "photos" / name).with_suffix(".txt").write_text(text, encoding="utf-8")
    for place, store in ((file, "a"), (tmp_path / "photos", "b")):
        call("ingest", "pack", place, tmp_path / store, "--model", model, *SMALL).done()
    one, two = (by_id(Store.open(tmp_path / store)) for store in "ab")
    assert one.keys() == two.keys() == {*names}
    for name, held in one.items():
        assert held.columns["latent"] == two[name].columns["latent"]
        assert held.record.captions == two[name].record.captions
    again = call("ingest", "pack", file, tmp_path / "a", "--model", model, "--json").done().json
    assert (again["packed"], again["unchanged"]) == (0, 10)
    os.utime(file, ns=(1, 1))  # written again with the same images
    again = call("ingest", "pack", file, tmp_path / "a", "--model", model, "--json").done().json
    assert (again["packed"], again["latents_kept"]) == (10, 10)
    again = call("ingest", "pack", file, tmp_path / "a", "--model", model, "--check", "content", "--json").done().json
    assert (again["packed"], again["unchanged"]) == (0, 10)
    assert call("ingest", "scan", file, "--json", *SMALL).json["found"] == 10


def test_a_folder_as_on_the_hub_has_its_splits(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "hub"
    for part in range(2):
        write(folder / "data" / f"train-0000{part}-of-00002.parquet", pictures(4, 10 * part), caption=[["x", "y"]] * 4)
    write(folder / "data" / "validation-00000-of-00001.parquet", pictures(3, 50), caption=[["z"]] * 3)
    write(folder / "data" / "test-00000-of-00001.parquet", pictures(2, 70), caption=[["z"]] * 2)
    (folder / "README.md").write_text("a data set", encoding="utf-8")
    ran = call("ingest", "pack", folder, tmp_path / "s", "--model", model, *SMALL).done()
    found = by_id(Store.open(tmp_path / "s"))
    assert sorted(found) == [
        *(f"train/train-0000{part}-of-00002/{row:08d}" for part in range(2) for row in range(4)),
        *(f"validation/validation-00000-of-00001/{row:08d}" for row in range(3)),
    ]
    assert all(held.record.bucket.startswith("val/") == name.startswith("validation") for name, held in found.items())
    assert found["train/train-00000-of-00002/00000000"].record.captions == ("x", "y")
    assert 'split test (2 images) is left out; to include it: dataset_splits = ["train=train", ' in ran.out
    file = in_file(tmp_path / "d.toml", folder, dataset_splits=["test=train"])
    call("ingest", "pack", file, tmp_path / "t", "--model", model, *SMALL).done()
    assert {name.split("/")[0] for name in by_id(Store.open(tmp_path / "t"))} == {"test"}


def test_rows_without_bytes_are_rejected_and_a_changed_file_ends_the_run(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path / "a.parquet", [*pictures(3), None, b"no image"])
    ran = call("ingest", "pack", file, tmp_path / "s", "--model", model, *SMALL, "--json").json
    assert (ran["packed"], ran["rejected_by_reason"]) == (3, {"not an image": 1, "unreadable file": 1})
    source = open_source(str(file))
    assert isinstance(source, ParquetSource)
    assert source_from_json(source_as_json(source)) == source
    items = source.listing().items
    assert source.read(items[2]).data == pictures(3)[2]
    write(file, pictures(5))
    os.utime(file, ns=(2, 2))
    with pytest.raises(SourceError, match="has changed since it was listed"):
        source.read(items[0])


def test_what_is_no_file_of_images_is_refused_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "words.parquet")
    with pytest.raises(SourceError, match=r"words.parquet has the columns words; expected file_name"):
        open_source(str(tmp_path / "words.parquet")).listing()
    write(tmp_path / "two.parquet", pictures(1), other=pa.array([{"bytes": b"", "path": ""}], IMAGE))
    assert len(open_source(str(tmp_path / "two.parquet")).listing().items) == 1
    file = write(tmp_path / "cut" / "some.parquet", pictures(9))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SourceError, match="has no images"):
        open_source(str(tmp_path / "cut")).listing()


def test_a_folder_of_tars_is_a_source_of_tars(tmp_path: Path, model: Path) -> None:
    write_images(tmp_path / "photos", 6)
    pattern = write_tars(tmp_path / "photos", tmp_path / "tars")
    (tmp_path / "tars" / "000000_stats.json").write_text("{}", encoding="utf-8")
    source, same = open_source(str(tmp_path / "tars")), open_source(str(pattern))
    assert isinstance(source, TarSource)
    assert source == same
    call("ingest", "pack", tmp_path / "tars", tmp_path / "s", "--model", model, *SMALL).done()
    assert len(by_id(Store.open(tmp_path / "s"))) == 6
    shutil.move(tmp_path / "photos", tmp_path / "tars" / "photos")
    assert len(open_source(str(tmp_path / "tars")).listing().items) == 6
    shutil.rmtree(tmp_path / "tars" / "photos")
    write(tmp_path / "tars" / "more" / "some.parquet", pictures(2))
    with pytest.raises(SourceError, match=r"has no image files, but tars \(.*\) and Parquet files with images"):
        open_source(str(tmp_path / "tars"))


_SCAN = """
import sys
from bucketline.ingest.cli import main
from tests.process_memory import in_memory

code = main(["scan", sys.argv[1]])
print("peak", in_memory("VmHWM"))
sys.exit(code)
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


@pytest.mark.parametrize("what", ["images", "table"])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_footer_is_an_error_and_does_not_end_the_process(what: str, step: int, tmp_path: Path) -> None:
    if what == "images":
        path = write(tmp_path / "some.parquet", [b"an image", b"another"], names=["a", "b"], text=["x", "y"], score=[0.5, 1.0])
    else:
        path = table(tmp_path / "images", pa.array([["a cat"]]))
    ran = spawn([sys.executable, "-c", _DAMAGED, path, what, step]).done()
    assert int(ran.out.split()[-1]) > 100 / step
