"""A data set file: what it says is read strictly, and every mistake is named with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bucketline.errors import SourceError, UsageError
from bucketline.ingest.sources.dataset_file import DatasetFile, is_dataset_file, read_dataset_file
from bucketline.ingest.sources.folder import list_folder
from bucketline.ingest.sources.options import SourceOptions
from bucketline.typed_json import decode, encode
from tests.commands import ROOT
from tests.models import write_images

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, text: str, options: SourceOptions | None = None) -> DatasetFile:
    (folder / "data.toml").write_text(text, encoding="utf-8")
    return read_dataset_file(folder / "data.toml", options or SourceOptions())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("photos", "cats", "photos/inner", "kohya/10_sks dog", "kohya/2_barns", "kohya/1_reg", "kohya/others"):
        write_images(tmp_path / name, 1)
    return tmp_path


def test_every_field_is_read_and_paths_are_relative_to_the_file(folder: Path) -> None:
    file = read(
        folder,
        """
        [[source]]
        path = "photos"
        name = "mine"
        repeats = 10
        split = "val"
        caption = "a photo"
        caption_column = "words"
        caption_extension = ".cap"
        """,
    )
    (entry,) = file.sources
    assert (entry.path, entry.store_name, entry.repeats) == (str(folder / "photos"), "mine.store", 10)
    given = SourceOptions(caption_column="text", follow_links=True)
    assert entry.options(given) == SourceOptions(
        default_caption="a photo", caption_column="words", caption_extension=".cap", follow_links=True
    )
    assert entry.val_fraction(0.1) == 1.0
    assert decode(DatasetFile, encode(file)) == file


def test_what_an_entry_leaves_out_is_as_on_the_command_line(folder: Path) -> None:
    (one, two) = read(folder, '[[source]]\npath = "cats"\n[[source]]\npath = "kohya/2_barns"\nsplit = "train"').sources
    assert (one.store_name, one.repeats, one.val_fraction(0.1), two.val_fraction(0.1)) == ("cats.store", 1, 0.1, 0.0)
    assert one.options(SourceOptions(caption_column="text")) == SourceOptions(caption_column="text")


def test_folders_of_kohyas_naming_become_sources_with_their_repeats(folder: Path) -> None:
    file = read(folder, '[[source]]\npath = "kohya"\nkohya_folders = true')
    assert [(e.name, e.repeats, e.caption) for e in file.sources] == [("10_sks dog", 10, "sks dog"), ("2_barns", 2, "barns")]
    (regularization, others) = file.notes
    assert "1_reg is left out: " in regularization
    assert regularization.endswith("pack them into a store of their own, and train with --store-weight")
    assert "others is left out" in others
    captioned = read(folder, '[[source]]\npath = "kohya"\nkohya_folders = true\ncaption = "a dog"')
    assert {entry.caption for entry in captioned.sources} == {"a dog"}


def test_a_folder_of_kohyas_naming_that_is_packed_as_it_is_says_so(folder: Path) -> None:
    repeats, regularization = list_folder(folder / "kohya").notes
    assert "10_sks dog, 2_barns: no repeats" in repeats
    assert "kohya_folders = true" in repeats
    assert regularization.startswith("1_reg: packed as ordinary training images; ")
    assert regularization.endswith("pack them into a store of their own, and train with --store-weight")
    assert list_folder(folder / "photos").notes == []


BAD = {
    "no TOML": ("[[source]\n", r"data.toml is not TOML: .*line 1"),
    "no source": ("", r"data.toml: source is missing, expected tables that begin with \[\[source\]\]"),
    "one table": ('[source]\npath = "photos"', r"source is one table, expected tables that begin with \[\[source\]\]"),
    "not tables": ('source = ["photos"]', r"source\[0\] is 'photos', expected tables"),
    "another key": ('seed = 1\n[[source]]\npath = "photos"', "data.toml: unknown key 'seed'"),
    "kohya's file": ("[general]\nenable_bucket = true", r"unknown key 'general' \(as in a file for kohya's trainers\)"),
    "kohya's field": ('[[source]]\nimage_dir = "photos"', r"source\[0\] has an unknown field 'image_dir': it is `path` here"),
    "kohya's regularization": (
        '[[source]]\npath = "photos"\nis_reg = true',
        "'is_reg': pack regularization images into",
    ),
    "another field": (
        '[[source]]\npath = "photos"\ncolour = 1',
        r"unknown field 'colour': expected path, name, repeats, split",
    ),
    "no path": ("[[source]]\nrepeats = 2", r"data.toml: source\[0\] lacks the field 'path'"),
    "an empty path": ('[[source]]\npath = ""', r"source\[0\]: path is an empty text"),
    "a text for a number": ('[[source]]\npath = "photos"\nrepeats = "3"', r"source\[0\].repeats is '3', expected int"),
    "a date for a number": ('[[source]]\npath = "photos"\nrepeats = 2020-01-01', r"source\[0\].repeats is datetime.date"),
    "a true for a number": ('[[source]]\npath = "photos"\nrepeats = true', r"source\[0\].repeats is True, expected int"),
    "no repeats": ('[[source]]\npath = "photos"\nrepeats = 0', r"source\[0\]: repeats is 0, expected 1 to"),
    "another split": ('[[source]]\npath = "photos"\nsplit = "test"', "split is 'test', expected 'train' or 'val'"),
    "a name with a slash": ('[[source]]\npath = "photos"\nname = "a/b"', "name is 'a/b', expected"),
    "an empty caption": ('[[source]]\npath = "photos"\ncaption = " "', r"source\[0\]: .*caption"),
    "an extension of none": ('[[source]]\npath = "photos"\ncaption_extension = "/"', r"source\[0\]: .*extension"),
    "no name": ('[[source]]\npath = "*.tar"', r"source\[0\].path .*\*.tar' gives its store no name; add one"),
    "a stream without a name": ('[[source]]\npath = "https://host/a.tar"', r"gives its store no name; add one"),
    "nothing there": ('[[source]]\npath = "photo"', r"data.toml, source photo: .* \(did you mean 'photos'\?\)"),
    "one name twice": ('[[source]]\npath = "photos"\n[[source]]\npath = "x/../photos"', "would both become photos.store"),
    "one folder twice": ('[[source]]\npath = "photos"\n[[source]]\npath = "photos"\nname = "b"', "would be packed twice"),
    "a folder in another": ('[[source]]\npath = "photos/inner"\n[[source]]\npath = "photos"', "would be packed twice"),
    "repeats twice": (
        '[[source]]\npath = "kohya"\nkohya_folders = true\nrepeats = 3',
        "takes repeats and names from the folders",
    ),
    "no folder of the naming": ('[[source]]\npath = "photos"\nkohya_folders = true', "has no folder named such as 10_dog"),
    "nothing there to expand": ('[[source]]\npath = "photo"\nkohya_folders = true', r"photo cannot be listed"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_is_named_with_its_place_on_one_line(folder: Path, kind: str) -> None:
    text, message = BAD[kind]
    with pytest.raises(SourceError, match=message) as raised:
        read(folder, text)
    assert "data.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_option_that_suits_no_source_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"data.toml, source cats: --split test"):
        read(folder, '[[source]]\npath = "cats"', SourceOptions(split=("test",)))


def test_the_example_and_the_page_on_packing_are_read_as_they_stand(folder: Path) -> None:
    for name in ("my dog", "held out"):
        write_images(folder / name, 1)
    (folder / "tars").mkdir()
    (folder / "tars" / "000.tar").write_bytes(bytes(10240))
    example = (ROOT / "examples" / "dataset.toml").read_text(encoding="utf-8").replace("{000..012}", "*")
    names = [(entry.name, entry.repeats) for entry in read(folder, example).sources]
    expected = [("photos", 1), ("my dog", 10), ("scans", 1), ("held out", 1), ("10_sks dog", 10), ("2_barns", 2)]
    assert names == expected
    page = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
    shown = page.partition("```toml\n")[2].partition("```")[0]
    assert [(entry.name, entry.repeats, entry.caption) for entry in read(folder, shown).sources] == [
        ("photos", 1, None),
        ("my dog", 3, "a photo of sks dog"),
    ]


def test_a_missing_file_and_one_of_other_bytes_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected a data set file"):
        read_dataset_file(tmp_path / "none.toml", SourceOptions())
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(SourceError, match="not UTF-8"):
        read_dataset_file(tmp_path / "latin.toml", SourceOptions())


def test_only_a_file_of_this_suffix_is_one(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert is_dataset_file("data.toml")
    assert is_dataset_file("DATA.TOML")
    assert not is_dataset_file(str(tmp_path / "folder.toml"))
    assert not is_dataset_file("https://host/data.toml")
    assert not is_dataset_file("photos")
