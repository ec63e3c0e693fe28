"""Splits: what is trained on, held out and left out, in every kind of source, and what is said of it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bucketline.errors import SourceError
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.hf_dataset import Splits, split_in_folders, split_in_path
from bucketline.ingest.sources.source import SourceOptions
from bucketline.store.remote.objects import ObjectFolder
from tests.commands import call
from tests.models import SMALL, in_file, png, write_files
from tests.unit.ingest.sources.kit import listing_of, write_members

COUNTS = {"train": 4, "validation": 2, "test": 3}


def pictures(split: str) -> dict[str, bytes]:
    return {f"{n}.png": png(20, 30, 10 * len(split) + n) for n in range(COUNTS[split])}


def write_parquet(path: Path, split: str, columns: dict[str, list[Any]] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{"bytes": data, "path": None} for data in pictures(split).values()]
    pq.write_table(pa.table({"image": rows, **(columns or {})}), path)


def write_tar(path: Path, split: str) -> None:
    write_members(path, pictures(split).items())


def write_folder(path: Path, split: str) -> None:
    write_files(path, pictures(split))


def write_table(folder: Path, table: str) -> None:
    images = {f"{split} {name}": (data, split) for split in COUNTS for name, data in pictures(split).items()}
    rows = "".join(json.dumps({"file_name": name, "text": "x", "split": split}) + "\n" for name, (_, split) in images.items())
    write_files(folder, {table: rows, **{name: data for name, (data, _) in images.items()}})


def each(write: Callable[[Path, str], None], name: str) -> Callable[[Path], None]:
    """Return what writes each split under this name, in which SPLIT is the split's."""

    def write_all(folder: Path) -> None:
        for split in COUNTS:
            write(folder / name.replace("SPLIT", split), split)

    return write_all


def as_saved(folder: Path) -> None:
    images = {split: [{"bytes": data, "path": None} for data in pictures(split).values()] for split in COUNTS}
    features = datasets.Features({"image": datasets.Image()})
    parts = {f"my_{split}": datasets.Dataset.from_dict({"image": own}, features=features) for split, own in images.items()}
    datasets.DatasetDict(parts).save_to_disk(folder)


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "parquet in folders": each(write_parquet, "default/SPLIT/0000.parquet"),
    "parquet in folders of a part": each(write_parquet, "default/partial-SPLIT/0000.parquet"),
    "parquet by its name": each(write_parquet, "data/SPLIT.parquet"),
    "parquet with a hash": each(write_parquet, "data/SPLIT-00000-of-00001-9c49eeff30aacaa8.parquet"),
    "parquet with a number": each(write_parquet, "SPLIT_0.parquet"),
    "parquet with a word before": each(write_parquet, "photos-SPLIT.parquet"),
    "tars in folders": each(write_tar, "SPLIT/part-SPLIT.tar"),
    "tars by their names": each(write_tar, "photos-SPLIT-0001.tar"),
    "a tar with folders": lambda folder: write_members(
        folder / "all.tar",
        [(f"{split}/{name}", data) for split in COUNTS for name, data in pictures(split).items()],
    ),
    "folders of images": each(write_folder, "photos/SPLIT"),
    "a saved dataset": as_saved,
    "a table in a folder": lambda folder: write_table(folder, "metadata.jsonl"),
}


def held_out_and_trained(source: str, *asked: str) -> tuple[int, int, list[str]]:
    """Return how many images are trained on and held out, with the notes."""
    listing = open_source(source, SourceOptions(dataset_splits=asked)).listing()
    held_out = sum(item.held_out for item in listing.items)
    return len(listing.items) - held_out, held_out, listing.notes


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_rows_are_trained_on_validation_held_out_test_left_out_and_each_counted(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    LAYOUTS[layout](folder)
    trained, held_out, notes = held_out_and_trained(str(folder))
    assert (trained, held_out) == (4, 2)
    found = " ".join(notes)
    assert "train (4 images) becomes train" in found
    assert "validation (2 images) becomes val" in found
    assert "test (3 images) is left out; to include it: dataset_splits = [" in found


def test_a_column_says_the_split_of_each_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "photos" / "all.parquet", "train", {"split": ["train", "Train", "test", "val"]})
    source = open_source(str(tmp_path / "photos"))
    assert [(item.id, item.held_out) for item in source.listing().items] == [
        ("train/all/00000000", False),
        ("Train/all/00000001", False),
        ("val/all/00000003", True),
    ]
    (tmp_path / "table").mkdir()
    write_table(tmp_path / "table", "some.jsonl")
    assert held_out_and_trained(str(tmp_path / "table" / "some.jsonl"))[:2] == (4, 2)
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": png(20, 30), "path": None}] * 3, "split": ["test", "train", "val"]},
        features=datasets.Features({"image": datasets.Image(), "split": datasets.Value("string")}),
    )
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "saved")
    assert held_out_and_trained(str(tmp_path / "saved"))[:2] == (1, 1)


def test_a_column_may_number_or_list_its_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", "train", {"split": [0, 1, 1, 1]})
    assert "split 1 (3 images) becomes train" in held_out_and_trained(str(tmp_path / "a.parquet"))[2]
    write_parquet(tmp_path / "b.parquet", "train", {"split": [["train"], ["val"], ["test"], None]})
    assert held_out_and_trained(str(tmp_path / "b.parquet"))[:2] == (2, 1)


@pytest.mark.parametrize("word", ["{}", "test {}", "val {}"])
def test_a_column_with_a_word_for_each_row_is_told_in_a_few_lines(word: str) -> None:
    splits, notes, count = Splits(()), list[str](), 20_000
    splits.take("train", "0.png")
    for n in range(count):
        splits.take(word.format(f"s{n}"), f"{n}.png")
    splits.finish("t.jsonl", ".", notes)
    assert len(notes) < 30
    assert sum(int(found) for note in notes for found in re.findall(r"\((\d+) image", note)) == count + 1


def test_a_tar_or_table_that_is_called_a_split_has_only_that_one_and_others_those_of_their_folders(tmp_path: Path) -> None:
    members = {f"{split}/{name}": data for split in COUNTS for name, data in pictures(split).items()}
    write_members(tmp_path / "photos-00000-of-00004.tar", members.items())
    assert held_out_and_trained(str(tmp_path / "photos-00000-of-00004.tar"))[:2] == (4, 2)
    for name, found in {"val.jsonl": (0, 9), "train-a.jsonl": (9, 0), "b-00000-of-00001.jsonl": (4, 2)}.items():
        (tmp_path / name).write_text("".join(json.dumps({"file_name": image}) + "\n" for image in members), encoding="utf-8")
        assert held_out_and_trained(str(tmp_path / name))[:2] == found


@pytest.mark.parametrize("kind", ["parquet", "tar", "jsonl", "saved"])
def test_a_source_of_only_a_test_split_is_refused_with_what_packs_it(kind: str, tmp_path: Path) -> None:
    place = tmp_path / f"my_test_0.{kind}"
    if kind == "parquet":
        write_parquet(place, "test")
    elif kind == "tar":
        write_tar(place, "test")
    elif kind == "jsonl":
        place.write_text('{"file_name": "a.png", "text": "x"}\n', encoding="utf-8")
    else:
        features = datasets.Features({"image": datasets.Image()})
        values = {"image": [{"bytes": png(20, 30), "path": None}]}
        datasets.Dataset.from_dict(values, features=features, split="test").save_to_disk(place)
    with pytest.raises(SourceError, match=r'only the split test, .* pack it by dataset_splits = \["test=val"\]'):
        listing_of(place)
    assert held_out_and_trained(str(place), "test=train")[0] > 0


def test_folders_of_images_are_the_same_in_object_storage(tmp_path: Path) -> None:
    objects = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/photos")
    for split in COUNTS:
        write_folder(tmp_path / "photos" / split, split)
        for name, data in pictures(split).items():
            objects.write(f"{split}/{name}", data)
    assert held_out_and_trained(objects.url) == held_out_and_trained(str(tmp_path / "photos"))


def test_tars_that_a_pattern_names_have_the_splits_of_their_folders(tmp_path: Path) -> None:
    each(write_tar, "SPLIT/0.tar")(tmp_path)
    objects = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/tars")
    for split in COUNTS:
        objects.write(f"{split}-0.tar", (tmp_path / split / "0.tar").read_bytes())
    assert held_out_and_trained(f"{tmp_path}/{{test,train}}/0.tar")[:2] == (4, 0)
    assert held_out_and_trained(f"{objects.url}/*.tar")[:2] == (4, 2)


def test_a_data_set_file_says_where_splits_of_folders_go(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for split in COUNTS:
        write_folder(folder / split, split)
    (folder / "dog.png").write_bytes(png(20, 30, 99))
    assert held_out_and_trained(str(folder))[:2] == (5, 2)
    assert held_out_and_trained(str(folder), "train", "test=train")[:2] == (8, 0)
    assert held_out_and_trained(str(folder), "test")[:2] == (0, 3)
    with pytest.raises(SourceError, match=r"has no split 'dog' \(dataset_splits\); it has train, test, validation"):
        held_out_and_trained(str(folder), "dog")
    file = in_file(tmp_path / "d.toml", folder, dataset_splits=["train", "validation=train"])
    scanned = call("ingest", "scan", file, *SMALL, "--json").done().json
    assert {name.partition("/")[0]: number for name, number in scanned["buckets"].items()} == {"train": 7}
    assert any(note.startswith("split test (3 images) is left out") for note in scanned["notes"])
    assert "  note: split validation (2 images) becomes train\n" in call("ingest", "scan", file, *SMALL).done().out


def test_a_caption_of_an_image_that_is_left_out_is_neither_counted_nor_without_an_image(tmp_path: Path) -> None:
    for split, number in COUNTS.items():
        write_files(tmp_path / split, {**pictures(split), **{f"{n}.txt": "a cat" for n in range(number)}})
    listing = listing_of(tmp_path)
    assert (dict(listing.captions_from), listing.orphans) == ({"NAME.txt": 6}, [])


def test_names_that_only_mention_a_test_are_trained_on_and_said(tmp_path: Path) -> None:
    names = ("tests of drums/a.png", "crash test dummies/b.png", "c/test_1.png", "latest/contest.png", "val d'or/c.png")
    write_files(tmp_path, dict.fromkeys(names, png(20, 30)))
    trained, held_out, notes = held_out_and_trained(str(tmp_path))
    assert (trained, held_out) == (5, 0)
    first = "c/test_1.png, crash test dummies/b.png, val d'or/c.png"
    assert [note.partition(";")[0] for note in notes] == [
        f"3 images packed as training data although a name says test or validation: {first}"
    ]


def test_a_source_that_is_itself_called_test_is_packed_and_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "test", "test")
    trained, held_out, (note,) = held_out_and_trained(str(tmp_path / "test"))
    assert (trained, held_out) == (3, 0)
    assert note.startswith("the source's folder is called test, and its images are in no split, because splits are looked")


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("default/test/0000.parquet", "test"),
        ("val2017/train-0.tar", "val"),
        ("TESTING/a.png", "testing"),
        ("partial-train/0000.parquet", "train"),
        ("a/train-00000-of-00004.parquet", "train"),
        ("a/extra-00000-of-00004-0a1b2c.parquet", "extra"),
        ("a/test.parquet", "test"),
        ("dev.jsonl", "dev"),
        ("latest-contest.tar", ""),
        ("evaluated/tests.tar", ""),
        ("prüfung_test.tar.gz", "test"),
    ],
)
def test_a_split_is_a_folder_first_and_then_a_word_of_the_name(path: str, split: str) -> None:
    assert split_in_path(path) == split
    assert split_in_folders(path.rpartition("/")[0] + "/test.png") in (split, "")


FILES = {
    **{f"a/{n}.jpg": png(20, 20, n) for n in range(3)},
    **{f"a/{n}.txt": b"a cat" for n in range(3)},
    **{f"a/{n}-masklabel.png": png(20, 20) for n in range(3)},
    "a/0-masklabel.txt": b"of the mask",
    "a/1-condlabel.png": png(20, 20),
    "a/_controls/0.depth.jpg": png(20, 20),
    "_controls/0.line.jpg": png(20, 20),
    "b/alone-masklabel.png": png(20, 20),  # next to no image
    "b/my_controls/c.png": png(20, 20),
}
SAMPLES = ["a/0.jpg", "a/1.jpg", "a/2.jpg", "b/alone-masklabel.png", "b/my_controls/c.png"]
COUNTED = "NAME-masklabel (3 images), _controls/ (2 images), NAME-condlabel (1 image)"


def write_source(kind: str, folder: Path) -> str:
    if kind == "objects":
        objects = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/photos")
        for name, data in FILES.items():
            objects.write(name, data)
        return objects.url
    photos = write_files(folder / "photos", FILES)
    return str(photos if kind == "folder" else write_members(folder / "s.tar", FILES.items()))


@pytest.mark.parametrize("kind", ["folder", "tar", "objects"])
def test_side_files_are_left_out_and_counted_by_what_they_are_called(kind: str, tmp_path: Path) -> None:
    listing = open_source(write_source(kind, tmp_path)).listing()
    assert sorted(item.id.removeprefix("s/") for item in listing.items) == SAMPLES
    assert [note.partition(";")[0] for note in listing.notes] == [
        f"left out as masks and control images of other trainers: {COUNTED}"
    ]
    assert listing.captions_from.total() == 3


def test_scan_counts_them_and_a_table_that_names_one_packs_it(tmp_path: Path) -> None:
    source = write_source("folder", tmp_path)
    scanned = call("ingest", "scan", source, *SMALL).done().out
    assert f"  note: left out as masks and control images of other trainers: {COUNTED};" in scanned
    table = '{"file_name": "a/0-masklabel.png", "text": "a mask"}\n'
    (tmp_path / "photos" / "metadata.jsonl").write_text(table, encoding="utf-8")
    for place in (source, f"{source}/metadata.jsonl"):
        items = {item.id: item.captions for item in open_source(place).listing().items}
        assert items["a/0-masklabel.png"] == ("a mask",)


def test_a_folder_of_nothing_but_side_files_is_refused_and_its_own_name_does_not_count(tmp_path: Path) -> None:
    write_files(tmp_path, {f"_controls/{n}.depth.jpg": png(20, 20) for n in range(2)})
    with pytest.raises(SourceError, match=r"has no images to pack: left out as masks and .* _controls/ \(2 images\)"):
        listing_of(tmp_path)
    assert len(listing_of(tmp_path / "_controls").items) == 2
