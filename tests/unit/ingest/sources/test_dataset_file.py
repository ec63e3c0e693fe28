"""A data set file: what it says is read strictly, and every mistake is named with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bucketline.errors import BucketlineError, SourceError, UsageError
from bucketline.ingest.commands.pack import Pack
from bucketline.ingest.commands.scan import Scan
from bucketline.ingest.images.crop import Crop
from bucketline.ingest.rules import Phases
from bucketline.ingest.sources.dataset_file import DatasetFile, is_dataset_file, read_dataset_file
from bucketline.ingest.sources.folder import list_folder
from bucketline.ingest.sources.source import SourceOptions
from bucketline.options import options_of, parse_options
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
        captions_from = [".cap", "words"]
        caption_template = "ohwx"
        shuffle_tags = 3
        """,
    )
    (entry,) = file.sources
    assert (entry.path, entry.store_name, entry.repeats) == (str(folder / "photos"), "mine.store", 10)
    given = SourceOptions(captions_from=("text",), follow_links=True)
    own = entry.options(given)
    assert own == SourceOptions(caption="a photo", captions_from=(".cap", "words"), follow_links=True)
    assert (own.caption_column, own.caption_extension) == ("words", ".cap")
    rules = {"caption_template": ("ohwx",), "shuffle_tags": "3", "val_fraction": "1:folder"}
    assert entry.overrides("0.1:folder").items() >= rules.items()
    assert decode(DatasetFile, encode(file)) == file


def test_what_an_entry_leaves_out_is_as_on_the_command_line(folder: Path) -> None:
    (one, two) = read(folder, '[[source]]\npath = "cats"\n[[source]]\npath = "kohya/2_barns"\nsplit = "train"').sources
    assert (one.store_name, one.repeats) == ("cats.store", 1)
    assert (one.overrides("0.1"), two.overrides("0.1")) == ({}, {"val_fraction": "0"})
    assert one.options(SourceOptions(captions_from=("text",))) == SourceOptions(captions_from=("text",))


def test_options_of_the_file_hold_unless_the_command_line_gives_others(folder: Path) -> None:
    place = folder / "data.toml"
    place.write_text(
        """
        source = {path = "photos", captions_from = ".cap", caption = "a photo", split = "val"}
        rules = {grid = "sd15", val_fraction = 0.2, flip = true, crop = "Random", dtype = "bf16", background = "black"}
        encoding = {phases = "two", batch_size = 3, decode_threads = 2}
        """,
        encoding="utf-8",
    )
    asked = parse_options(Pack, [str(place), "s", "--model", "m", "--grid", "sdxl", "--captions-from", "words"], "pack")
    assert (asked.source, asked.grid, asked.captions_from) == (str(folder / "photos"), "sdxl", ("words",))
    assert (asked.caption, asked.val_fraction, asked.flip, asked.crop) == ("a photo", "1", True, Crop.RANDOM)
    assert (asked.background, asked.dtype, asked.phases) == ("black", "BF16", Phases.TWO)
    assert (asked.batch_size, asked.decode_threads) == (3, 2)
    assert asked.left_out >= {"text_dtype", "min_size_px"}
    assert not asked.left_out & {"grid", "val_fraction", "flip", "crop", "background"}
    scanned = parse_options(Scan, [str(place)], "scan")
    assert (scanned.source, scanned.grid, scanned.decode_threads) == (str(folder / "photos"), "sd15", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rules]\ncolour = 1", r"\[rules\] has an unknown option 'colour'"),
        ("[rules]\nbackgrund = 1", r"unknown option 'backgrund'; did you mean 'background'"),
        ("[rules]\ngrid = 5", r"rules.grid is 5, expected str"),
        ('[rules]\ndtype = "F8"', "rules.dtype is 'F8', expected one of F16, BF16, F32"),
        ('[rules]\ncrop = "left"', "rules.crop is 'left', expected one of center, random"),
        ("rules = 3", "rules is 3, expected a table"),
        ('[rules]\nbackground = "pink"', "data.toml: background 'pink' is not a colour"),
        ('[encoding]\nshard_size = "0"', "data.toml: --shard-size is '0', expected a number of bytes above 0"),
        ("[encoding]\nmaxsize = 8", r"\[encoding\] has an unknown option 'maxsize'; it is shard_size"),
        ('[source]\npath = "photos"\nrepeats = 2', r"source.repeats is for several sources, in tables .*\[\[source\]\]"),
        ('[source]\nsplit = "val"', "lacks the field 'path'"),
    ],
)
def test_a_wrong_option_of_the_file_is_named_with_its_table(folder: Path, text: str, message: str) -> None:
    (folder / "data.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BucketlineError, match=message):
        parse_options(Pack, [str(folder / "data.toml"), "s", "--model", "m"], "pack")


def test_what_only_a_file_sets_and_what_was_called_otherwise_is_answered_with_where_it_is() -> None:
    rules = r"--background is set in a data set file, not on the command line: background, in its \[rules\]"
    for option, words in (("--background=black", rules), ("--dataset-splits=a", r"dataset_splits, in its \[source\]")):
        with pytest.raises(UsageError, match=words):
            parse_options(Pack, ["photos", "s", "--model", "m", option], "pack")
    for command in (Pack, Scan):
        assert sum(not one.is_in_file for one in options_of(command)) <= 38


def test_folders_of_kohyas_naming_become_sources_with_their_repeats(folder: Path) -> None:
    file = read(folder, '[[source]]\npath = "kohya"\nkohya_folders = true')
    assert [(e.name, e.repeats, e.caption) for e in file.sources] == [("10_sks dog", 10, "sks dog"), ("2_barns", 2, "barns")]
    (regularization, others) = file.notes
    assert "1_reg is left out: " in regularization
    assert regularization.endswith("pack them into a store of their own, and train with a weight (--store NAME@0.5)")
    assert "others is left out" in others
    captioned = read(folder, '[[source]]\npath = "kohya"\nkohya_folders = true\ncaption = "a dog"')
    assert {entry.caption for entry in captioned.sources} == {"a dog"}


def test_a_folder_of_kohyas_naming_that_is_packed_as_it_is_says_so(folder: Path) -> None:
    repeats, regularization = list_folder(folder / "kohya").notes
    assert "10_sks dog, 2_barns: no repeats" in repeats
    assert "kohya_folders = true" in repeats
    assert regularization.startswith("1_reg: packed as ordinary training images; ")
    assert regularization.endswith("pack them into a store of their own, and train with a weight (--store NAME@0.5)")
    assert list_folder(folder / "photos").notes == []


PHOTOS = '[[source]]\npath = "photos"\n'
BAD = {
    "no TOML": ("[[source]\n", r"data.toml is not TOML: .*line 1"),
    "no source": ("", r"data.toml: source is missing, expected tables that begin with \[\[source\]\]"),
    "not tables": ('source = ["photos"]', r"source\[0\] is 'photos', expected tables"),
    "another key": ('seed = 1\n[[source]]\npath = "photos"', "data.toml: unknown key 'seed'"),
    "kohya's file": ("[general]\nenable_bucket = true", r"unknown key 'general' \(as in a file for kohya's trainers\)"),
    "kohya's field": ('[[source]]\nimage_dir = "photos"', r"source\[0\] has an unknown field 'image_dir': it is `path` here"),
    "kohya's regularization": (PHOTOS + "is_reg = true", "'is_reg': pack regularization images into"),
    "another field": (PHOTOS + "colour = 1", r"unknown field 'colour': expected path, name, repeats, split"),
    "no path": ("[[source]]\nrepeats = 2", r"data.toml: source\[0\] lacks the field 'path'"),
    "an empty path": ('[[source]]\npath = ""', r"source\[0\]: path is an empty text"),
    "a text for a number": (PHOTOS + 'repeats = "3"', r"source\[0\].repeats is '3', expected int"),
    "a date for a number": (PHOTOS + "repeats = 2020-01-01", r"source\[0\].repeats is datetime.date"),
    "a true for a number": (PHOTOS + "repeats = true", r"source\[0\].repeats is True, expected int"),
    "no repeats": (PHOTOS + "repeats = 0", r"source\[0\]: repeats is 0, expected 1 to"),
    "another split": (PHOTOS + 'split = "test"', "split is 'test', expected 'train' or 'val'"),
    "a name with a slash": (PHOTOS + 'name = "a/b"', "name is 'a/b', expected"),
    "an empty caption": (PHOTOS + 'caption = " "', r"source\[0\]: .*caption"),
    "an extension of none": (PHOTOS + 'captions_from = "./"', r"source\[0\]: .*extension"),
    "an earlier field": (PHOTOS + 'caption_column = "a"', "it is `captions_from`"),
    "a field of another trainer": (PHOTOS + 'control_directory = "a"', "it is `references` here"),
    "a mask without a name": (PHOTOS + 'mask = "column:"', r"source\[0\]: mask is 'column:', expected"),
    "a pattern without a stem": (PHOTOS + 'references = "same:_{n}"', r"source\[0\]: references is 'same:_{n}', expected"),
    "a pattern of another part": (PHOTOS + 'references = "same:{stem}_{m}"', "same:{stem}_{m}', expected"),
    "an area in no unit": (PHOTOS + "references_area = 1048576", r"source\[0\]: references_area is 1048576, expected"),
    "references of kohya's folders": (
        '[[source]]\npath = "kohya"\nkohya_folders = true\nreferences = "a"',
        "name a source for each",
    ),
    "two trigger words": (PHOTOS + 'caption_template = ["a", "b"]', "only one may be without it"),
    "no name": ('[[source]]\npath = "*.tar"', r"source\[0\].path .*\*.tar' gives its store no name; add one"),
    "nothing there": ('[[source]]\npath = "photo"', r"data.toml, source photo: .* \(did you mean 'photos'\?\)"),
    "one name twice": (PHOTOS + '[[source]]\npath = "x/../photos"', "would both become photos.store"),
    "one folder twice": (PHOTOS + '[[source]]\npath = "photos"\nname = "b"', "would be packed twice"),
    "a folder in another": ('[[source]]\npath = "photos/inner"\n[[source]]\npath = "photos"', "would be packed twice"),
    "repeats twice": (
        '[[source]]\npath = "kohya"\nkohya_folders = true\nrepeats = 3',
        "takes repeats and names from the folders",
    ),
    "no folder of the naming": (PHOTOS + "kohya_folders = true", "has no folder named such as 10_dog"),
    "nothing there to expand": ('[[source]]\npath = "photo"\nkohya_folders = true', r"photo cannot be listed"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_is_named_with_its_place_on_one_line(folder: Path, kind: str) -> None:
    text, message = BAD[kind]
    with pytest.raises(SourceError, match=message) as raised:
        read(folder, text)
    assert "data.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_example_and_the_page_on_packing_are_read_as_they_stand(folder: Path) -> None:
    for name in ("my dog", "after", "held out"):
        write_images(folder / name, 1)
    (folder / "tars").mkdir()
    (folder / "tars" / "000.tar").write_bytes(bytes(10240))
    example = (ROOT / "examples" / "dataset.toml").read_text(encoding="utf-8").replace("{000..012}", "*")
    names = [(entry.name, entry.repeats) for entry in read(folder, example).sources]
    expected = [("photos", 1), ("my dog", 10), ("after", 1), ("scans", 1), ("held out", 1), ("10_sks dog", 10), ("2_barns", 2)]
    assert names == expected
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    of_one, shown = (part.partition("```")[0] for part in page.split("```toml\n")[1:3])
    (folder / "one.toml").write_text(of_one, encoding="utf-8")
    asked = parse_options(Pack, [str(folder / "one.toml"), "s", "--model", "m"], "pack")
    assert (asked.source, asked.background, asked.phases) == (str(folder / "photos"), "black", Phases.TWO)
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
