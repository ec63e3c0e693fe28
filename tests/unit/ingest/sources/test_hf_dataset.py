"""Datasets that Hugging Face's package saved on disk: the bytes as they were put in, under ids that stay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.hf_dataset import Splits
from bucketline.store import Store
from tests.commands import call
from tests.kit import edit_json
from tests.models import SMALL, in_file, png, write_images
from tests.unit.ingest.sources.kit import captions, contents, listing_of

TEXTS = datasets.Value("string")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def rows_of(images: list[Any], **columns: Any) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), **{name: kind for name, (kind, _) in columns.items()}})
    values = {"image": images, **{name: found for name, (_, found) in columns.items()}}
    return datasets.Dataset.from_dict(values, features=features)


def image(n: int, path: str | None = None) -> dict[str, Any]:
    return {"bytes": png(20 + n, 30, n), "path": path}


def test_images_keep_their_bytes_and_have_their_own_paths_or_rows_as_ids(tmp_path: Path) -> None:
    images = [image(0, "a.png"), image(1), image(2, "twice.png"), image(3, "twice.png")]
    rows_of(images, text=(TEXTS, ["one", None, " ", "four"])).save_to_disk(tmp_path / "d")
    assert contents(tmp_path / "d") == {
        "a.png": (("one",), png(20, 30, 0)),
        "00000001": ((), png(21, 30, 1)),
        "00000002": ((), png(22, 30, 2)),
        "00000003": (("four",), png(23, 30, 3)),
    }


def test_splits_stand_before_the_names_and_lists_are_several_captions(tmp_path: Path) -> None:
    several = (datasets.List(TEXTS), [["one", "two"], []])
    parts = {name: rows_of([image(0, "a.png"), image(1)], captions=several) for name in ("train", "extra")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    found = contents(tmp_path / "d")
    assert list(found) == ["train/a.png", "train/00000001", "extra/a.png", "extra/00000001"]
    assert [captions for captions, _ in found.values()] == [("one", "two"), ()] * 2


def test_a_selection_that_was_saved_gives_its_own_rows(tmp_path: Path) -> None:
    whole = rows_of([image(n, f"{n}.png") for n in range(6)], caption=(TEXTS, list("abcdef")))
    whole.select([4, 1, 5]).save_to_disk(tmp_path / "d")
    found = contents(tmp_path / "d")
    assert {name: captions for name, (captions, _) in found.items()} == {"4.png": ("e",), "1.png": ("b",), "5.png": ("f",)}
    assert found["5.png"][1] == png(25, 30, 5)


def test_a_row_without_an_image_is_a_reject_and_a_path_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "outside.png").write_bytes(png(20, 30))
    binary = {"bytes": datasets.Value("binary"), "path": TEXTS}  # saved as an Image, the file would be put in
    images = [None, {"bytes": None, "path": str(tmp_path / "outside.png")}]
    datasets.Dataset.from_dict({"image": images}, features=datasets.Features({"image": binary})).save_to_disk(tmp_path / "d")
    edit_json(tmp_path / "d" / "dataset_info.json", features={"image": {"_type": "Image"}})
    source = open_source(str(tmp_path / "d"))
    first, second = source.listing().items
    with pytest.raises(RejectedError, match="its image is null"):
        source.read(first)
    with pytest.raises(RejectedError, match="no bytes; save it with the images"):
        source.read(second)


def test_the_image_column_must_be_one_that_can_be_told(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"n": [1], "text": ["x"]}).save_to_disk(tmp_path / "none")
    with pytest.raises(SourceError, match=r"expected one column of images, or one named image; found none among n, text"):
        listing_of(tmp_path / "none")
    rows_of([image(0)]).rename_column("image", "left").add_column("text", ["x"]).save_to_disk(tmp_path / "one")
    assert [*captions(tmp_path / "one").values()] == [("x",)]


@pytest.mark.parametrize("kind", ["numbers", "damaged"])
def test_a_dataset_that_cannot_be_packed_is_named(kind: str, tmp_path: Path) -> None:
    rows_of([image(0)], text=(datasets.Value("int64"), [5])).save_to_disk(tmp_path / "d")
    if kind == "damaged":
        for path in (tmp_path / "d").glob("*.arrow"):
            path.write_bytes(b"nonsense")
    words = {"numbers": "row 0: text is a int", "damaged": "cannot be read as a dataset"}[kind]
    with pytest.raises(SourceError, match=words):
        listing_of(tmp_path / "d")


def test_without_datasets_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of([image(0)]).save_to_disk(tmp_path / "d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"install the extra datasets: pip install 'bucketline\[datasets\]'"):
        listing_of(tmp_path / "d")


def split_dataset(folder: Path, **sizes: int) -> Path:
    parts = {name: rows_of([image(n, f"{n}.png") for n in range(count)]) for name, count in sizes.items()}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return folder


def packed_splits(store: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for bucket in Store.open(store).buckets():
        for sample_id in bucket.sample_ids(np.arange(bucket.num_rows)):
            key = f"{sample_id.split('/')[0]} in {bucket.split}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def test_splits_go_where_they_belong_and_test_is_left_out_in_words(model: Path, tmp_path: Path) -> None:
    place = split_dataset(tmp_path / "d", train=5, validation=3, test=2)
    ran = call("ingest", "pack", place, tmp_path / "s", "--model", model, *SMALL).done()
    assert packed_splits(tmp_path / "s") == {"train in train": 5, "validation in val": 3}
    taken = 'dataset_splits = ["train=train", "validation=val", "test=val"] under [source] of a data set file (or =train)'
    for words in (
        "split train (5 images) becomes train",
        "split validation (3 images) becomes val",
        f"split test (2 images) is left out; to include it: {taken}",
    ):
        assert f"  note: {words}\n" in ran.out
    scanned = call("ingest", "scan", place, "--grid", "16x24,24x16", "--min-size-px", 8, "--json").json
    assert {name.partition("/")[0]: number for name, number in scanned["buckets"].items()} == {"train": 5, "val": 3}
    assert len(scanned["notes"]) == 5  # and that neither split has a column of captions


def test_a_sample_that_goes_to_another_split_is_packed_anew_there(model: Path, tmp_path: Path) -> None:
    place = split_dataset(tmp_path / "d", train=4, validation=3)
    for word, expected in (("validation=train", {"validation in train": 3}), ("validation", {"validation in val": 3})):
        file = in_file(tmp_path / "d.toml", place, dataset_splits=[word])
        ran = call("ingest", "pack", file, tmp_path / "s", "--model", model, *SMALL, "--json")
        assert (ran.code, ran.json["packed"], ran.json["unchanged"]) == (0, 3, 0)
        assert packed_splits(tmp_path / "s") == expected


def test_a_share_held_out_is_of_what_is_to_be_trained_on(model: Path, tmp_path: Path) -> None:
    place = split_dataset(tmp_path / "d", train=12, val=3)
    call("ingest", "pack", place, tmp_path / "s", "--model", model, *SMALL, "--val-fraction", 0.5).done()
    found = packed_splits(tmp_path / "s")
    assert found["val in val"] == 3
    assert "val in train" not in found
    assert found["train in train"] + found["train in val"] == 12
    assert found["train in val"] > 1


USUAL = ["train", "validation", "test"]


@pytest.mark.parametrize(
    ("asked", "names", "targets"),
    [
        ((), ["train", "test", "valid", "dev", "Validation", "val_2"], ["train", None, "val", "val", "val", "val"]),
        ((), ["train_1", "training", "images", "testimony", "value"], ["train"] * 5),
        ((), ["train", "test_small", "TEST", "validation-unmatched"], ["train", None, None, "val"]),
        (("train",), USUAL, ["train", None, None]),
        (("test",), USUAL, [None, None, "val"]),
        (("test=train", "validation"), USUAL, [None, "val", "train"]),
        (("validation=train",), USUAL, [None, "train", None]),
    ],
)
def test_a_splits_name_says_where_it_goes_unless_it_is_said(
    asked: tuple[str, ...], names: list[str], targets: list[str | None]
) -> None:
    splits = Splits(asked)
    assert [splits.take(name, "d") for name in names] == targets


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("unknown", 1, "has no split 'nowhere' (dataset_splits); it has train, test"),
        ("target", 1, "dataset_splits has 'train=test', expected a split's name, NAME=train or NAME=val"),
        ("only test", 1, 'has only the split test, which is left out by default: pack it by dataset_splits = ["test=val"]'),
        ("no splits", 1, "has no splits, but dataset_splits has 'train'"),
        ("folder", 1, "has no splits, but dataset_splits has 'train'"),
    ],
)
def test_splits_that_cannot_be_taken_are_refused_in_words(what: str, code: int, words: str, tmp_path: Path) -> None:
    place, asked = tmp_path / "d", {"unknown": "nowhere", "target": "train=test"}.get(what, "train")
    if what == "only test":
        split_dataset(place, test=2)
        asked = ""
    elif what == "no splits":
        rows_of([image(0)]).save_to_disk(place)
    elif what == "folder":
        write_images(place, 1)
    else:
        split_dataset(place, train=1, test=1)
    file = in_file(tmp_path / "d.toml", place, dataset_splits=[asked]) if asked else place
    ran = call("ingest", "scan", file).fails(words, code=code)
    assert ran.out == ""
