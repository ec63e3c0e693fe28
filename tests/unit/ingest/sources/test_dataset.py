"""Datasets that Hugging Face's package saved on disk: the bytes as they were put in, under ids that stay."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import datasets
import pytest

from bucketline.errors import SourceError
from bucketline.ingest.rejects import RejectedError
from bucketline.ingest.sources.choose import open_source
from tests.building import edit_json
from tests.models import png

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.sources.source import Source

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


def contents(source: Source) -> dict[str, tuple[tuple[str, ...], bytes]]:
    """Read everything, in several threads, through what another rank would be sent."""
    sent, listing = pickle.loads(pickle.dumps((source, source.listing())))
    with ThreadPoolExecutor(4) as pool:
        items = list(sent.in_turn(listing.items))
        read = list(pool.map(sent.read, items))
    for item, found in zip(items, read, strict=True):
        assert sent.stamp(item) == found.stamp
        assert found.stamp.num_bytes == len(found.data)
    return {item.id: (item.captions, found.data) for item, found in zip(items, read, strict=True)}


def test_pictures_keep_their_bytes_and_have_their_own_paths_or_rows_as_ids(tmp_path: Path) -> None:
    images = [image(0, "a.png"), image(1), image(2, "twice.png"), image(3, "twice.png")]
    rows_of(images, text=(TEXTS, ["one", None, " ", "four"])).save_to_disk(tmp_path / "d")
    assert contents(open_source(str(tmp_path / "d"))) == {
        "a.png": (("one",), png(20, 30, 0)),
        "00000001": ((), png(21, 30, 1)),
        "00000002": ((), png(22, 30, 2)),
        "00000003": (("four",), png(23, 30, 3)),
    }


def test_splits_stand_before_the_names_and_lists_are_several_captions(tmp_path: Path) -> None:
    several = (datasets.List(TEXTS), [["one", "two"], []])
    parts = {name: rows_of([image(0, "a.png"), image(1)], captions=several) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    found = contents(open_source(str(tmp_path / "d")))
    assert list(found) == ["train/a.png", "train/00000001", "test/a.png", "test/00000001"]
    assert [captions for captions, _ in found.values()] == [("one", "two"), ()] * 2


def test_a_selection_that_was_saved_gives_its_own_rows(tmp_path: Path) -> None:
    whole = rows_of([image(n, f"{n}.png") for n in range(6)], caption=(TEXTS, list("abcdef")))
    whole.select([4, 1, 5]).save_to_disk(tmp_path / "d")
    found = contents(open_source(str(tmp_path / "d")))
    assert {name: captions for name, (captions, _) in found.items()} == {"4.png": ("e",), "1.png": ("b",), "5.png": ("f",)}
    assert found["5.png"][1] == png(25, 30, 5)


def test_a_row_without_a_picture_is_a_reject_and_a_path_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "outside.png").write_bytes(png(20, 30))
    binary = {"bytes": datasets.Value("binary"), "path": TEXTS}  # saved as an Image, the file would be put in
    images = [None, {"bytes": None, "path": str(tmp_path / "outside.png")}]
    datasets.Dataset.from_dict({"image": images}, features=datasets.Features({"image": binary})).save_to_disk(tmp_path / "d")
    edit_json(tmp_path / "d" / "dataset_info.json", features={"image": {"_type": "Image"}})
    source = open_source(str(tmp_path / "d"))
    first, second = source.listing().items
    with pytest.raises(RejectedError, match="its image is null"):
        source.read(first)
    with pytest.raises(RejectedError, match="no bytes; save it with its pictures"):
        source.read(second)


def test_the_picture_column_must_be_one_that_can_be_told(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"n": [1], "text": ["x"]}).save_to_disk(tmp_path / "none")
    with pytest.raises(SourceError, match=r"expected one column of pictures, or one named image; found none among n, text"):
        open_source(str(tmp_path / "none")).listing()
    rows_of([image(0)]).rename_column("image", "left").add_column("text", ["x"]).save_to_disk(tmp_path / "one")
    assert [item.captions for item in open_source(str(tmp_path / "one")).listing().items] == [("x",)]


@pytest.mark.parametrize("kind", ["numbers", "damaged"])
def test_a_dataset_that_cannot_be_packed_is_named(kind: str, tmp_path: Path) -> None:
    rows_of([image(0)], text=(datasets.Value("int64"), [5])).save_to_disk(tmp_path / "d")
    if kind == "damaged":
        for path in (tmp_path / "d").glob("*.arrow"):
            path.write_bytes(b"nonsense")
    words = {"numbers": "row 0: text is a int", "damaged": "cannot be read as a dataset"}[kind]
    with pytest.raises(SourceError, match=words):
        open_source(str(tmp_path / "d")).listing()


def test_without_datasets_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of([image(0)]).save_to_disk(tmp_path / "d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"install bucketline with its extra: bucketline\[datasets\]"):
        open_source(str(tmp_path / "d")).listing()
