"""Tables as captions of a folder, and as sources of their own: each row once, and none that leads out of its folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.sources.captions.table import MAX_CHUNK_BYTES, why_too_large
from bucketline.ingest.sources.dataset_file import open_source, source_as_json, source_from_json
from bucketline.ingest.sources.parquet import ParquetSource
from bucketline.ingest.sources.tar import TarSource
from bucketline.store import Store
from tests.commands import call, spawn
from tests.kit import by_id
from tests.models import SMALL, png, write_files, write_images
from tests.unit.ingest.sources.kit import TABLES, captions, listing_of, write_table
from tests.unit.ingest.test_rules import write_tars

Rows = list[tuple[str, Any]]


ROWS: Rows = [("b.png", "one, with a comma"), ("c/a.png", ["two", "three"]), ("d.png", None), ("./e.png", " ä \n")]
CAPTIONS = {"b.png": ("one, with a comma",), "c/a.png": ("two", "three"), "d.png": (), "e.png": ("ä",)}


def images(folder: Path, names: Sequence[str]) -> None:
    write_files(folder, {name: png(20, 30, n) for n, name in enumerate(names)})


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_gives_a_folder_the_same_captions(kind: str, tmp_path: Path) -> None:
    images(tmp_path, list(CAPTIONS))
    write_table(tmp_path / f"metadata.{kind}", [*ROWS, ("gone.png", "x")])
    assert captions(tmp_path) == CAPTIONS
    assert listing_of(tmp_path).orphans == [f"gone.png (in metadata.{kind})"]


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_a_source_of_what_it_names_and_of_nothing_else(kind: str, tmp_path: Path) -> None:
    images(tmp_path, [*CAPTIONS, "not named.png"])
    (tmp_path / "b.txt").write_text("not the table's", encoding="ascii")
    write_table(tmp_path / f"some.{kind}", ROWS)
    source = open_source(str(tmp_path / f"some.{kind}"))
    assert captions(source.listing()) == CAPTIONS
    for item in source.in_turn(source.listing().items):
        data, stamp = source.read(item)
        assert data == (tmp_path / item.id).read_bytes()
        assert stamp == source.stamp(item)
        assert (stamp.num_bytes, stamp.mtime_ns) == (len(data), (tmp_path / item.id).stat().st_mtime_ns)


@pytest.mark.parametrize("kind", TABLES)
def test_an_image_that_two_rows_name_is_an_error_that_names_both_rows(kind: str, tmp_path: Path) -> None:
    images(tmp_path, ["a.png", "b.png"])
    write_table(tmp_path / f"metadata.{kind}", [("a.png", "x"), ("b.png", "y"), ("./a.png", "z")])
    for source in (tmp_path, tmp_path / f"metadata.{kind}"):
        with pytest.raises(
            SourceError, match=r"'a.png': one at metadata.*(line|row) \d, one at metadata.*(line|row) \d; ids must"
        ):
            listing_of(source)


def test_two_tables_of_one_folder_that_name_the_same_image_are_named_both(tmp_path: Path) -> None:
    images(tmp_path, ["a.png"])
    for kind in ("csv", "jsonl"):
        write_table(tmp_path / f"metadata.{kind}", [("a.png", "x")])
    with pytest.raises(SourceError, match=r"one at metadata.csv, line 2, one at metadata.jsonl, line 1"):
        listing_of(tmp_path)


WRITTEN: dict[str, Callable[[Path, str], str]] = {
    "backslashes": lambda _, name: name.replace("/", "\\"),
    "a dot and backslashes": lambda _, name: ".\\" + name.replace("/", "\\"),
    "absolute paths": lambda folder, name: str(folder / name),
    "absolute paths without links": lambda folder, name: str((folder / name).resolve()),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("how", WRITTEN)
def test_names_as_windows_writes_them_and_absolute_ones_inside_the_folder_are_read(how: str, kind: str, tmp_path: Path) -> None:
    images(tmp_path / "real", ["sub/a.png", "sub/deep/b.png"])
    folder = tmp_path / "way"
    folder.symlink_to("real")
    rows: Rows = [(WRITTEN[how](folder, name), name) for name in ("sub/a.png", "sub/deep/b.png")]
    write_table(folder / f"metadata.{kind}", rows)
    for source in (folder, folder / f"metadata.{kind}"):
        listing = listing_of(source)
        assert captions(listing) == {name: (name,) for name in ("sub/a.png", "sub/deep/b.png")}
        assert listing.orphans == []
    (folder / f"metadata.{kind}").replace(folder / "sub" / f"metadata.{kind}")
    if how.startswith("absolute"):  # also in a table of a subfolder
        assert captions(folder)["sub/a.png"] == ("sub/a.png",)


def test_an_image_whose_name_has_a_backslash_keeps_it(tmp_path: Path) -> None:
    images(tmp_path, ["a\\b.png"])
    write_table(tmp_path / "metadata.jsonl", [("a\\b.png", "x")])
    for source in (tmp_path, tmp_path / "metadata.jsonl"):
        assert captions(source) == {"a\\b.png": ("x",)}


@pytest.mark.parametrize("name", ["photos/a.png", "/elsewhere/a.png", "C:\\photos\\a.png", "a.jpg"])
def test_a_table_of_which_no_row_names_an_image_is_refused_with_a_name_of_each(name: str, tmp_path: Path) -> None:
    images(tmp_path, ["a.png", "b/c.png"])
    write_table(tmp_path / "metadata.jsonl", [("a.png", "x")])
    write_table(tmp_path / "b" / "metadata.jsonl", [(name, "x"), ("other.png", "x")])
    with pytest.raises(SourceError) as caught:
        listing_of(tmp_path)
    assert str(caught.value).startswith(
        f"b/metadata.jsonl: none of its 2 rows names an image: its first file_name is {name!r}, an image is 'b/c.png'; write "
    )


OUTSIDE = ("../secret.png", "a/../../secret.png", "/etc/passwd", "link.png", "folder/secret.png", ".", "..")


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_row_that_leads_out_of_the_tables_folder_is_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    inside = tmp_path / "photos"
    images(tmp_path, ["secret.png", "photos/a.png"])
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "folder").symlink_to(tmp_path)
    write_table(inside / f"t.{kind}", [("a.png", "x"), (name, "x")])
    with pytest.raises(SourceError, match=rf"t.{kind}, (line|row) \d: .*leads out of the table's folder") as caught:
        listing_of(inside / f"t.{kind}")
    assert repr(name) in str(caught.value)


def test_links_that_stay_inside_the_folder_are_followed(tmp_path: Path) -> None:
    images(tmp_path / "real", ["a/b.png"])
    (tmp_path / "real" / "to.png").symlink_to("a/b.png")
    (tmp_path / "real" / "c").symlink_to("a")
    (tmp_path / "way").symlink_to(tmp_path / "real")
    write_table(tmp_path / "real" / "t.csv", [("to.png", "x"), ("c/b.png", "x")])
    source = open_source(str(tmp_path / "way" / "t.csv"))
    assert [len(source.read(item)[0]) for item in source.listing().items] == [len(png(20, 30, 0))] * 2


def test_a_file_that_a_table_names_and_that_is_not_there_is_found_and_cannot_be_read(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", [("gone.png", "x")])
    source = open_source(str(tmp_path / "t.csv"))
    (item,) = source.listing().items
    for look in (source.stamp, source.read, source.opened):
        with pytest.raises(RejectedError, match="No such file"):
            look(item)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "file,text\na.png,x\n", "t.csv has the columns file, text; expected file_name"),
        ("t.csv", "", "t.csv has the columns none"),
        ("t.csv", "file_name,text\na.png,a red, red barn\n", "t.csv, line 2: 3 cells, the header has 2; .*quotes"),
        ("t.csv", 'file_name,text\na.png,"x\n', "t.csv, line 2: .*expected comma-separated"),
        ("t.csv", "file_name,text\n,x\n", "t.csv, line 2: file_name must be"),
        ("t.csv", "file_name,text\na\0.png,x\n", "NUL"),
        ("t.csv", "file_name,text\n", "t.csv names no image"),
        ("t.jsonl", '{"file_name": "a.png"}\nnonsense', "t.jsonl, line 2: expected an object"),
        ("t.parquet", "nonsense", "t.parquet cannot be read: "),
    ],
)
def test_a_table_that_is_not_what_it_should_be_is_named_with_its_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=words):
        listing_of(tmp_path / name)


def test_a_parquet_table_of_other_types_is_refused_with_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"file_name": ["a.png", "b.png"], "text": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"t.parquet, row 0: file_name must be a string, and text a string or a list"):
        listing_of(tmp_path / "t.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "t.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"t.parquet: reading it needs pyarrow; .*bucketline\[tables\]"):
        listing_of(tmp_path / "t.parquet")


def test_a_text_that_no_store_can_hold_is_noted_at_its_image(tmp_path: Path) -> None:
    write_table(tmp_path / "t.jsonl", [("a.png", "\ud83d"), ("b.png", "x" * (1 << 21)), ("c.png", "fine")])
    errors = [item.caption_error for item in listing_of(tmp_path / "t.jsonl").items]
    assert errors == [
        "its text in t.jsonl has a lone surrogate, half of a character",
        f"its text in t.jsonl has {1 << 21} bytes",
        None,
    ]


# Parquet files with embedded images, folders of them, and files whose metadata are damaged or claim gigabytes.


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


def test_rows_without_bytes_are_rejected_and_a_changed_file_ends_the_run(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path / "a.parquet", [*pictures(3), None, b"no image"])
    ran = call("ingest", "pack", file, tmp_path / "s", "--model", model, *SMALL, "--json").json
    assert (ran["packed"], ran["rejected_by_reason"]) == (3, {"not an image": 1, "unreadable file": 1})
    source = open_source(str(file))
    assert isinstance(source, ParquetSource)
    assert source_from_json(source_as_json(source)) == source
    items = source.listing().items
    assert source.read(items[2])[0] == pictures(3)[2]
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
