"""A folder as a source: every image once, each with its own captions, and what belongs to none named."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from bucketline.errors import SourceError
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.folder import list_folder
from bucketline.ingest.sources.hf_dataset import DatasetSource
from bucketline.ingest.sources.source import SourceItem, Stamp
from bucketline.store.format.schema import MAX_MTIME_NS
from tests.commands import call
from tests.models import pack, write_files, write_images
from tests.unit.ingest.sources.kit import captions


def table(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_images_are_found_in_all_folders_in_order_of_their_ids(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.png": "", "a/z.JPG": "", "a/b/c.webp": "", "a.tiff": "", "notes.md": "", "a/b/model.bin": ""})
    assert [item.id for item in list_folder(tmp_path).items] == ["a.tiff", "a/b/c.webp", "a/z.JPG", "b.png"]


def test_a_caption_file_has_one_caption_a_line_without_blanks(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"a.png": "", "a.txt": "\ufeff  first  \n\n\t\nsecond\r\nthird", "b.png": "", "b.txt": "\n \n", "c.png": ""}
    )
    assert captions(list_folder(tmp_path)) == {"a.png": ("first", "second", "third"), "b.png": (), "c.png": ()}
    assert list_folder(tmp_path).orphans == []


def test_two_images_of_one_name_share_a_caption_file_and_are_two_samples(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": "", "a.jpg": "", "a.txt": "both"})
    assert captions(list_folder(tmp_path)) == {"a.jpg": ("both",), "a.png": ("both",)}


def test_a_caption_without_an_image_is_named_and_not_counted(tmp_path: Path) -> None:
    rows = table({"file_name": "a.png"}, {"file_name": "gone.png"})
    write_files(tmp_path, {"a.png": "", "lost.txt": "x", "b/also.txt": "x", "metadata.jsonl": rows})
    listing = list_folder(tmp_path)
    assert [item.id for item in listing.items] == ["a.png"]
    assert listing.orphans == ["b/also.txt", "gone.png (in metadata.jsonl)", "lost.txt"]


def test_a_table_gives_captions_as_text_or_as_a_list_and_wins_over_files(tmp_path: Path) -> None:
    rows = table(
        {"file_name": "a.png", "text": " one "},
        {"file_name": "b.png", "text": ["two", "", " three "], "other": 5},
        {"file_name": "c.png"},
        {"file_name": "d/e.png", "text": ""},
        {"file_name": "./f.png", "text": "dotted"},
    )
    names = dict.fromkeys(["a.png", "b.png", "c.png", "d/e.png", "f.png", "g.png"], "")
    write_files(tmp_path, {**names, "metadata.jsonl": rows + "\n\n", "a.txt": "loses", "g.txt": "stays"})
    listing = list_folder(tmp_path)
    assert listing.orphans == []
    found = [("one",), ("two", "three"), (), (), ("dotted",), ("stays",)]
    assert captions(listing) == dict(zip(names, found, strict=True))


def test_a_table_in_a_folder_names_files_from_there(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": "", "b/a.png": "", "b/metadata.jsonl": table({"file_name": "a.png", "text": "inner"})})
    assert captions(list_folder(tmp_path)) == {"a.png": (), "b/a.png": ("inner",)}


NO_ROWS = (
    "nonsense",
    "{",
    "[]",
    "5",
    "null",
    '{"text": "x"}',
    '{"file_name": 5}',
    '{"file_name": null, "text": ""}',
    "[" * 99_999,
)


@pytest.mark.parametrize(
    "line", [*NO_ROWS, *(f'{{"file_name": "a.png", "text": {text}}}' for text in ("5", "[5]", '{"en": "x"}'))]
)
def test_a_line_that_is_no_row_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    good = table({"file_name": "a.png", "text": "x"})
    write_files(tmp_path, {"a.png": "", "b/metadata.jsonl": f"{good}\n{line}\n", "b/a.png": ""})
    with pytest.raises(SourceError, match=r"b/metadata.jsonl, line 3: .*file_name"):
        list_folder(tmp_path)


def test_a_table_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": ""})
    (tmp_path / "metadata.jsonl").write_bytes(b'{"file_name": "a.png", "text": "caf\xe9"}')
    with pytest.raises(SourceError, match=r"metadata.jsonl is not UTF-8"):
        list_folder(tmp_path)


def test_a_caption_file_that_is_not_utf_8_is_noted_at_its_image_alone(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": "", "b.png": "", "b.txt": "fine"})
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert captions(list_folder(tmp_path)) == {"a.png": "a.txt is not UTF-8 (byte 3); save it as UTF-8", "b.png": ("fine",)}


def test_a_json_file_may_be_a_list_of_captions_and_another_list_is_noted_at_its_image(tmp_path: Path) -> None:
    texts = {"a": '["one", " ", "two"]', "b": '"only"', "c": '[{"box": [1, 2]}]', "d": "[5]", "e": "5", "f": "[]", "g": "null"}
    write_files(tmp_path, {**{f"{name}.json": text for name, text in texts.items()}, **{f"{name}.png": "" for name in texts}})
    write_files(tmp_path, {"h.png": "", "h.txt": "text first", "h.json": "[5]"})
    items = {item.id[0]: item for item in list_folder(tmp_path).items}
    assert [items[name].captions for name in "abcdefgh"] == [("one", "two"), ("only",), (), (), (), (), (), ("text first",)]
    assert [name for name, item in items.items() if item.caption_error] == ["c", "d", "e"]
    assert str(items["c"].caption_error).startswith("c.json is a list, expected an object, a string or a list of strings; move")


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"a.png": "", ".b.png": "", "._c.png": "", ".git/d.png": "", ".hidden.txt": "x", "e/.thumbs/f.png": ""}
    )
    listing = list_folder(tmp_path)
    assert [item.id for item in listing.items] == ["a.png"]
    assert listing.orphans == []


def test_names_of_any_kind_are_ids(tmp_path: Path) -> None:
    names = ["a b.png", "ü.png", "日本.jpg", "new\nline.png", "quote'\".png", "a.b.c.png"]
    write_files(tmp_path, {**dict.fromkeys(names, ""), "a.b.c.txt": "x"})
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(b"")
    assert captions(list_folder(tmp_path)) == {
        **dict.fromkeys(sorted([*names, os.fsdecode(b"\xff.png")]), ()),
        "a.b.c.png": ("x",),
    }


def test_a_folder_without_an_image_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": "x", "b/c.svg": ""})
    with pytest.raises(SourceError, match=r"has no images, nor do its subfolders; expected .*\.png"):
        list_folder(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "a.png"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, {"a.png": ""})
    with pytest.raises(SourceError, match=f"{name} is not a folder; expected a folder of images"):
        list_folder(tmp_path / name)


def test_a_folder_that_cannot_be_read_is_an_error_not_a_smaller_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a.png": "", "closed/b.png": ""})
    scandir = os.scandir

    def closed(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(SourceError, match=r"closed cannot be read: Permission denied; the count of images would be wrong"):
        list_folder(tmp_path)


def test_a_source_that_holds_a_training_run_is_refused_naming_it(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"a.png": "", "runs/a/status.json": '{"state": "done", "step": 7, "reason": null}', "runs/a/loss.png": ""}
    )
    with pytest.raises(SourceError, match=r"/runs/a has a training run \(status\.json\).* move it out of the source"):
        list_folder(tmp_path)
    with pytest.raises(SourceError, match="has a training run"):
        list_folder(tmp_path / "runs" / "a")


@pytest.mark.parametrize("text", ['{"state": "done"}', '{"status": "ok", "step": 1}', "[]", "no json", "\x00", "[" * 99_999])
def test_another_status_file_beside_the_images_is_no_run(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, {"a.png": "", "status.json": text})
    assert [item.id for item in list_folder(tmp_path).items] == ["a.png"]


# Images dated before 1970, after 2262, or at no time at all: packed as any other, and unchanged the next time.


YEAR_2300_NS = 10_413_792_000 * 10**9
DATES_NS = [-(2**70), -1, 0, 1, MAX_MTIME_NS, MAX_MTIME_NS + 1, 2**64 - 1, 2**64, 2**90]


@pytest.mark.parametrize("mtime_ns", DATES_NS)
def test_a_stamp_holds_what_the_stores_field_holds(mtime_ns: int) -> None:
    assert Stamp(num_bytes=1, mtime_ns=mtime_ns).mtime_ns == min(max(0, mtime_ns), MAX_MTIME_NS)


@pytest.mark.parametrize("place", ["photos", "photos/t.csv", "a.tar"])
@pytest.mark.parametrize("mtime_ns", [YEAR_2300_NS, -(10**18)])
def test_a_source_that_is_dated_after_2262_or_before_1970_is_listed_and_read(place: str, mtime_ns: int, tmp_path: Path) -> None:
    """A file system that cannot hold such a date holds the nearest one it can, which is as good here."""
    write_images(tmp_path / "photos", 2)
    (tmp_path / "photos" / "t.csv").write_text("file_name,text\na/000.png,a cat\n", encoding="ascii")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "photos" / "a" / "000.png", "0.png")
    for path in tmp_path.rglob("*"):
        os.utime(path, ns=(0, mtime_ns))
    own = tmp_path / (place if place == "a.tar" else "photos/a/000.png")
    expected = min(max(0, own.stat().st_mtime_ns), MAX_MTIME_NS)
    source = open_source(str(tmp_path / place))
    for item in source.in_turn(source.listing().items):
        assert source.stamp(item).mtime_ns == source.read(item)[1].mtime_ns == expected


def test_a_saved_datasets_date_is_kept_within_the_stores_field(tmp_path: Path) -> None:
    item = SourceItem(id="a", captions=(), at=(0, 0, 10, YEAR_2300_NS))
    assert DatasetSource(path=tmp_path).stamp(item).mtime_ns == MAX_MTIME_NS


def test_images_of_any_date_are_packed_and_are_unchanged_the_next_time(source: Path, tmp_path: Path, model: Path) -> None:
    for n, path in enumerate(sorted(source.rglob("*.png"))):
        os.utime(path, ns=(0, (YEAR_2300_NS, -(10**18), 10**18)[n % 3]))
    assert pack(source, tmp_path / "s", model).json["packed"] == 14
    assert pack(source, tmp_path / "s", model).json["unchanged"] == 14
    assert call("store", "verify", tmp_path / "s").code == 0
