"""A data set file packed, planned and trained on: repeats and captions as it says, and only what changed is packed again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.loader.mixture import parse_stores
from bucketline.store import Store
from bucketline.store.format.manifest import MIXTURE, read_mixture
from tests.commands import Ran, call, forked_ranks
from tests.fault.same_store import compare
from tests.kit import by_id
from tests.models import SMALL, write_images

ONCE_AND_THREE_TIMES = """
[[source]]
path = "photos"

[[source]]
path = "dogs"
repeats = 3
caption = "a photo of sks dog"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", 6)
    write_images(tmp_path / "dogs", 4, captions=False)
    (tmp_path / "data.toml").write_text(ONCE_AND_THREE_TIMES, encoding="utf-8")
    return tmp_path


def pack(folder: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", folder / "data.toml", folder / "data", "--model", model, *SMALL, *more)


def captions_of(path: Path) -> set[str]:
    return {caption for held in by_id(Store.open(path)).values() for caption in held.record.captions}


def test_a_pass_reads_each_source_as_often_as_the_file_says(folder: Path, model: Path) -> None:
    report = pack(folder, model, "--json").done().json
    assert report["repeats"] == {"photos": 1, "dogs": 3}
    assert [report["sources"][name]["packed"] for name in ("photos", "dogs")] == [6, 4]
    assert captions_of(folder / "data" / "dogs.store") == {"a photo of sks dog"}
    plan = call("loader", "plan", folder / "data", "--batch-size", 1, "--list", "--json").done().json
    assert [(store["path"], store["repeats"]) for store in plan["stores"]] == [
        (str(folder / "data" / "photos.store"), 1),
        (str(folder / "data" / "dogs.store"), 3),
    ]
    read = Counter(name for batch in plan["batches"] for ids in batch["ranks"] for name in ids)
    both, photos = ("a/000.png", "b/001.png", "a/002.png", "b/003.png"), ("a/004.png", "b/005.png")
    assert read == {**dict.fromkeys(both, 1 + 3), **dict.fromkeys(photos, 1)}


def test_packing_again_packs_nothing_and_new_repeats_need_no_encoding(folder: Path, model: Path) -> None:
    pack(folder, model).done()
    before = (folder / "data" / MIXTURE).read_bytes()
    again = pack(folder, model, "--json").done().json
    assert [(one["packed"], one["unchanged"]) for one in again["sources"].values()] == [(0, 6), (0, 4)]
    assert (folder / "data" / MIXTURE).read_bytes() == before
    (folder / "data.toml").write_text(ONCE_AND_THREE_TIMES.replace("= 3", "= 5"), encoding="utf-8")
    changed = pack(folder, model, "--json").done().json
    assert [one["packed"] for one in changed["sources"].values()] == [0, 0]
    assert [one.repeats for one in parse_stores([folder / "data"])] == [1, 5]
    assert [one.repeats for one in parse_stores([f"{folder / 'data'}:2"])] == [2, 10]


def test_the_rules_that_each_store_keeps_are_printed_before_it_is_packed(folder: Path, model: Path) -> None:
    pack(folder, model, "--flip").done()
    ran = call("ingest", "pack", folder / "data.toml", folder / "data", "--model", model).done()
    lines = ran.out.splitlines()
    for name, repeats in (("photos", 1), ("dogs", 3)):
        (at,) = [n for n, line in enumerate(lines) if line.startswith(f"{name}: from the store: ")]
        assert {"--grid 16x24,24x16", "--flip", "--min-size-px 8"} <= {*lines[at].partition("store: ")[2].split(", ")}
        assert lines[at + 1].startswith(f"{name} x {repeats}: ")


def test_a_source_that_was_removed_from_the_file_is_no_longer_read_and_its_store_is_named(folder: Path, model: Path) -> None:
    pack(folder, model).done()
    (folder / "data.toml").write_text('[[source]]\npath = "dogs"\n', encoding="utf-8")
    ran = pack(folder, model).done()
    assert f"photos.store belongs to no source of {folder / 'data.toml'}; it is kept, and not read" in ran.out
    assert [Path(one.path).name for one in parse_stores([folder / "data"])] == ["dogs.store"]
    assert captions_of(folder / "data" / "dogs.store") == set(), "the file no longer gives them a caption"


def test_all_images_of_a_source_can_be_held_out(folder: Path, model: Path) -> None:
    (folder / "data.toml").write_text(ONCE_AND_THREE_TIMES + 'split = "val"\n', encoding="utf-8")
    pack(folder, model).done()
    splits = [{bucket.split for bucket in Store.open(one.path).buckets()} for one in parse_stores([folder / "data"])]
    assert splits == [{"train"}, {"val"}]


def test_the_folder_is_shown_verified_and_reported_store_by_store(folder: Path, model: Path) -> None:
    pack(folder, model).done()
    data = folder / "data"
    names = ["photos.store", "dogs.store"]
    shown = call("store", "info", data, "--json").done().json["stores"]
    assert {name: shown[name]["samples"] for name in names} == {"photos.store": 6, "dogs.store": 4}
    told = call("store", "info", data)
    assert [line for line in told.out.splitlines() if line[:-1] in names] == [f"{name}:" for name in names]
    assert call("store", "verify", data).out.count("0 faults") == 2
    assert call("store", "report", data, "-o", folder / "page.html").code == 0
    assert all((folder / f"page-{name}.html").exists() for name in names)
    (shard,) = (data / "dogs.store" / "shards").glob("*.lmdb")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size - 5000)
        file.write(bytes(5000))
    bad = call("store", "verify", data, "--json")
    assert bad.code == 1
    assert [name for name, found in bad.json["stores"].items() if found["corrupt"]] == ["dogs.store"]


def test_a_scan_foretells_each_source(folder: Path) -> None:
    report = call("ingest", "scan", folder / "data.toml", "--grid", "16x16", "--min-size-px", 8, "--json").done().json
    assert report["repeats"] == {"photos": 1, "dogs": 3}
    assert [one["found"] for one in report["sources"].values()] == [6, 4]
    assert [one["without_caption"] for one in report["sources"].values()][1] == 0
    lines = call("ingest", "scan", folder / "data.toml", "--grid", "16x16", "--min-size-px", 8).out.splitlines()
    assert f"dogs x 3: {folder / 'dogs'}" in lines


def test_nothing_is_packed_if_any_source_is_missing(folder: Path, model: Path) -> None:
    (folder / "data.toml").write_text(ONCE_AND_THREE_TIMES + '[[source]]\npath = "cats"\n', encoding="utf-8")
    ran = pack(folder, model).fails("data.toml, source cats: ")
    assert ran.out == ""
    assert not (folder / "data").exists()


def test_a_source_without_one_good_image_leaves_the_folder_unreadable_as_one(folder: Path, model: Path) -> None:
    (folder / "bad").mkdir()
    (folder / "bad" / "a.png").write_bytes(b"no image")
    (folder / "data.toml").write_text(ONCE_AND_THREE_TIMES + '[[source]]\npath = "bad"\n', encoding="utf-8")
    pack(folder, model).fails("not one image of bad could be packed")
    assert read_mixture(folder / "data") is None
    assert call("loader", "plan", folder / "data", "--batch-size", 1).code == 1


def test_stores_are_made_neither_in_a_store_nor_in_a_source(folder: Path, model: Path) -> None:
    asked = ("--model", model, *SMALL)
    assert call("ingest", "pack", folder / "photos", folder / "data", *asked).code == 0
    assert "is a store; " in pack(folder, model).err
    call("ingest", "pack", folder / "data.toml", folder / "dogs" / "data", *asked).fails("inside the source", code=2)


def test_a_damaged_list_of_stores_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("{", "is damaged"),
        ('{"version": 2, "stores": []}', "version is 2, expected 1"),
        ('{"version": 1, "stores": []}', "names no store"),
        ('{"version": 1, "stores": [{"name": "../a.store", "repeats": 1}]}', "expected the name of a folder"),
        ('{"version": 1, "stores": [{"name": "a.store", "repeats": 0}]}', "repeats is 0, expected 1"),
    ):
        (tmp_path / MIXTURE).write_text(text, encoding="utf-8")
        with pytest.raises(StoreError, match=message):
            parse_stores([tmp_path])


@pytest.mark.slow
def test_two_ranks_pack_what_one_process_packs(folder: Path, model: Path) -> None:
    options = ("--model", model, *SMALL, "--json")
    forked_ranks(2, "ingest", "pack", folder / "data.toml", folder / "two", *options).done()
    pack(folder, model).done()
    assert json.loads((folder / "two" / MIXTURE).read_bytes()) == json.loads((folder / "data" / MIXTURE).read_bytes())
    for name, count in (("photos.store", 6), ("dogs.store", 4)):
        compared = compare(folder / "two" / name, folder / "data" / name)
        assert (compared.samples, compared.faults) == (count, [])
