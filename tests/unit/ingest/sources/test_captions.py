"""Captions under any usual name are found, whatever the case and the Unicode normal form; what has none is said."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from bucketline.errors import UsageError
from bucketline.ingest.sources.captions.files import MAX_CAPTIONS_BYTES, CaptionRules
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.source import Listing, SourceItem, SourceOptions
from tests.commands import call
from tests.models import SMALL, png
from tests.unit.ingest.sources.kit import TABLES, captions, listing_of, write_members, write_table

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def make(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        data = png(20, 30, len(name)) if not text and not name.endswith(("txt", "TXT")) else text.encode()
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("image", "text"), [("IMG.JPG", "IMG.TXT"), ("a.png", "a.Txt"), ("a.PNG", "a.CAPTION")])
def test_a_caption_file_is_found_whatever_the_case_of_its_extension(image: str, text: str, tmp_path: Path) -> None:
    listing = listing_of(make(tmp_path, {image: "", text: "a cat"}))
    assert captions(listing) == {image: ("a cat",)}
    assert listing.orphans == []


@pytest.mark.parametrize(("one", "other"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
@pytest.mark.parametrize("by", ["file", "table", "tar"])
def test_names_that_differ_in_their_unicode_normal_form_alone_are_one(one: str, other: str, by: str, tmp_path: Path) -> None:
    if by == "tar":
        place = write_members(tmp_path / "s.tar", [(f"{one}.png", png(20, 30)), (f"{other}.txt", b"a cat")])
        sample_id = f"s/{one}.png"
    else:
        row = json.dumps({"file_name": f"{other}.PNG", "text": "a cat"})
        files = {f"{other}.txt": "a cat"} if by == "file" else {"metadata.jsonl": row}
        place, sample_id = make(tmp_path, {f"{one}.png": "", **files}), f"{one}.png"
    listing = listing_of(place)
    assert captions(listing) == {sample_id: ("a cat",)}
    assert listing.orphans == []


def test_an_images_own_name_wins_over_one_that_differs_in_its_normal_form(tmp_path: Path) -> None:
    make(tmp_path, {f"{name}.png": "" for name in (COMPOSED, DECOMPOSED)})
    make(tmp_path, {f"{COMPOSED}.txt": "one", f"{DECOMPOSED}.txt": "other"})
    assert captions(tmp_path) == {f"{COMPOSED}.png": ("one",), f"{DECOMPOSED}.png": ("other",)}


BOTH = "a.TXT and a.txt are both caption files of this image; keep one"


@pytest.mark.parametrize("kind", ["files", "rows", "members"])
def test_of_two_captions_that_may_both_be_meant_both_are_named_and_neither_is_taken(kind: str, tmp_path: Path) -> None:
    if kind == "files":
        make(tmp_path, {"a.png": "", "a.txt": "one", "a.TXT": "two", "b.png": "", "b.txt": "fine"})
        assert captions(tmp_path) == {"a.png": BOTH, "b.png": ("fine",)}
    elif kind == "rows":
        rows = "".join(json.dumps({"file_name": name, "text": "x"}) + "\n" for name in ("a.jpg", "a.Jpg"))
        make(tmp_path, {"a.JPG": "", "metadata.jsonl": rows})
        words = "metadata.jsonl, line 1 and metadata.jsonl, line 2 both name this image; keep one row"
        assert captions(tmp_path) == {"a.JPG": words}
    else:
        write_members(tmp_path / "s.tar", [("a.png", png(20, 30)), ("a.txt", b"one"), ("a.TXT", b"two")])
        assert captions(tmp_path / "s.tar") == {"s/a.png": BOTH}


def test_every_usual_kind_of_caption_file_is_read_and_it_is_said_which(tmp_path: Path) -> None:
    files = {"a.txt": "one", "b.caption": "two", "c.json": '{"prompt": ["three", "and"]}', "d.json": '{"other": 5}'}
    listing = listing_of(make(tmp_path, {**dict.fromkeys(("a.png", "b.png", "c.png", "d.png"), ""), **files}))
    assert captions(listing) == {"a.png": ("one",), "b.png": ("two",), "c.png": ("three", "and"), "d.png": ()}
    assert listing.captions_from == {"NAME.txt": 1, "NAME.caption": 1, "NAME.json": 1}


def test_a_caption_file_that_gives_way_to_another_is_counted_in_words(tmp_path: Path) -> None:
    files = {"a.txt": "tags", "a.caption": "words", "a.json": "not even JSON", "b.txt": "  \n", "b.caption": "words"}
    listing = listing_of(make(tmp_path, {"a.png": "", "b.png": "", **files}))
    assert captions(listing) == {"a.png": ("tags",), "b.png": ("words",)}
    (note,) = listing.notes
    assert note == (
        "the .caption files of 1 image are not used, because there are other captions; --captions-from .caption uses only these"
    )


@pytest.mark.parametrize("column", ["caption", "prompt", "captions", "text"])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("is_source", [True, False])
def test_a_tables_captions_are_found_under_any_usual_column(column: str, kind: str, tmp_path: Path, *, is_source: bool) -> None:
    make(tmp_path, {"a.png": "", "b.png": ""})
    table = write_table(tmp_path / f"metadata.{kind}", [("a.png", "one"), ("b.png", "two")], column)
    listing = listing_of(table if is_source else tmp_path)
    assert captions(listing) == {"a.png": ("one",), "b.png": ("two",)}
    assert listing.captions_from == {f"metadata.{kind}, {column}": 2}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_without_a_column_of_captions_leaves_the_files_their_captions_and_says_so(kind: str, tmp_path: Path) -> None:
    make(tmp_path, {"a.png": "", "a.txt": "from the file"})
    write_table(tmp_path / f"metadata.{kind}", [("a.png", "one")], "description")
    listing = listing_of(tmp_path)
    assert captions(listing) == {"a.png": ("from the file",)}
    (note,) = listing.notes
    assert note.startswith(f"metadata.{kind} has no captions: it has no column text, ")
    assert "description" in note.partition(";")[0]


def scan(*args: object) -> Any:
    return call("ingest", "scan", *args, "--grid", "16x24", "--min-size-px", 8, "--json")


@pytest.mark.parametrize("kind", [*TABLES, "dataset", "json", "tar"])
def test_another_column_can_be_named(kind: str, tmp_path: Path) -> None:
    place = make(tmp_path / "photos", {"a.png": ""})
    text = json.dumps({"text": "other", "description": "one"})
    if kind == "dataset":
        features = datasets.Features({"image": datasets.Image(), "description": datasets.Value("string")})
        rows = {"image": [{"bytes": png(20, 30), "path": "a.png"}], "description": ["one"]}
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(place := tmp_path / "d")
    elif kind == "json":
        make(place, {"a.json": text, "a.txt": "other"})
    elif kind == "tar":
        members = [("a.png", png(20, 30)), ("a.txt", b"other"), ("a.json", text.encode())]
        place = write_members(tmp_path / "s.tar", members)
    else:
        write_table(place / f"metadata.{kind}", [("a.png", "one")], "description")
    source = open_source(str(place), SourceOptions(captions_from=("description",)))
    assert [item.captions for item in source.listing().items] == [("one",)]
    scan(place, "--captions-from", "nowhere").fails("nowhere", "--captions-from")


def test_another_extension_can_be_named_with_its_dot(tmp_path: Path) -> None:
    make(tmp_path, {"a.png": "", "a.txt": "other", "a.tags": "one", "lost.tags": "x", "also.txt": "x"})
    for extension in (".tags", ".TAGS"):
        listing = open_source(str(tmp_path), SourceOptions(captions_from=(extension,))).listing()
        assert captions(listing) == {"a.png": ("one",)}
        assert listing.orphans == ["lost.tags"]
    ran = scan(tmp_path, "--captions-from", ".nowhere")
    assert (ran.code, ran.err) == (
        1,
        "error: --captions-from .nowhere: no image has a caption in a file of this extension\n",
    )
    assert scan(tmp_path, "--captions-from", ".").code == 2


def test_images_without_a_caption_are_listed_in_a_file_and_by_a_scan(model: Path, tmp_path: Path) -> None:
    files = {"a.png": "", "a.txt": "a cat", "b.png": "", "new\nline.png": "", "bad.png": "no image"}
    make(tmp_path / "photos", files)
    asked = ("ingest", "pack", tmp_path / "photos", tmp_path / "s", "--model", model, *SMALL)
    for ran in (call(*asked), call(*asked)):  # also where nothing is packed
        assert ran.code == 0, ran.err
        assert "captions from NAME.txt (1)" in ran.out
        lines = (tmp_path / "s" / "without_caption.jsonl").read_text(encoding="ascii").splitlines()
        assert [json.loads(line) for line in lines] == [{"id": "b.png"}, {"id": "new\nline.png"}]
    assert scan(tmp_path / "photos").json["without_caption_ids"] == ["b.png", "new\nline.png"]
    shown = call("ingest", "scan", tmp_path / "photos", "--grid", "16x24", "--min-size-px", 8).out
    assert "  2 images without a caption: b.png, new\\nline.png; --json names all\n" in shown
    assert call("store", "verify", tmp_path / "s").code == 0


PARAGRAPHS = "a cat\n\n a tabby of the house\r\nred\n"


@pytest.mark.parametrize("kind", ["folder", "csv", "table", "tar"])
def test_the_lines_of_a_text_are_captions_which_is_said_or_one_caption(kind: str, tmp_path: Path) -> None:
    place, name = make(tmp_path / "in", {"a.png": "", "b.png": "", "b.txt": "one"}), "a.txt"
    if kind == "tar":
        place = write_members(tmp_path / "t.tar", [("a.png", png(20, 30)), ("a.txt", PARAGRAPHS.encode())])
    elif kind == "folder":
        (place / "a.txt").write_bytes(PARAGRAPHS.encode())
    else:
        table = "metadata.csv" if kind == "csv" else "t.csv"
        (place / table).write_bytes(f'file_name,text\na.png,"{PARAGRAPHS}"\n'.encode())
        place, name = (place, f"{table}, line 6") if kind == "csv" else (place / table, f"{table}, line 6")
    listing = listing_of(place)
    sample_id = listing.items[0].id
    assert captions(listing)[sample_id] == ("a cat", "a tabby of the house", "red")
    said = "1 caption has several lines: each line is a caption of its own, and training draws one at each step"
    shown = f"({name}: 'a cat' | 'a tabby of the house' | …)"
    assert listing.notes[-1] == f"{said} {shown}; --caption-per file makes one caption of all lines"
    listing = open_source(str(place), SourceOptions(caption_per="file")).listing()
    assert captions(listing)[sample_id] == ("a cat a tabby of the house red",)
    assert not [note for note in listing.notes if "several lines" in note]


def test_a_store_keeps_what_a_caption_is(model: Path, tmp_path: Path) -> None:
    make(tmp_path / "in", {"a.png": "", "a.txt": "a cat\nred"})
    (tmp_path / "d.toml").write_text('[source]\npath = "in"\ncaption_per = "file"\n', encoding="ascii")

    def packed(source: str, *more: object) -> Any:
        return call("ingest", "pack", tmp_path / source, tmp_path / "s", "--model", model, *SMALL, "--json", *more)

    assert packed("d.toml").json["packed"] == 1
    (row,) = map(json.loads, call("store", "ls", tmp_path / "s", "--json").out.splitlines())
    assert row["captions"] == ["a cat red"]
    assert packed("in").json["unchanged"] == 1
    packed("in", "--caption-per", "line").fails("--caption-per file, this run has --caption-per line", "--recaption")
    assert packed("in", "--caption-per", "line", "--recaption").json["latents_kept"] == 1
    assert packed("in").json["unchanged"] == 1


# Captions made of those of the source: the trigger word, templates, and tags in several orders.


TAGS = tuple(f"tag {n}" for n in range(9))


def stored(*captions: str, of: str = "a.png", **rules: Any) -> tuple[str, ...]:
    return CaptionRules(**rules).stored(of, captions)


def test_the_trigger_word_comes_before_every_caption_and_templates_each_make_one() -> None:
    assert stored("a cat", "a pet", trigger_word="ohwx") == ("ohwx, a cat", "ohwx, a pet")
    assert stored(trigger_word="ohwx") == ("ohwx",)
    assert stored("a cat", trigger_word="ohwx, ", templates=("{caption}, film", "of {caption} ({{1}})")) == (
        "ohwx, a cat, film",
        "ohwx, of a cat ({1})",
    )
    assert stored(templates=("a photo of {caption}",)) == ()
    assert stored("a {cat}", templates=("the {caption}",)) == ("the a {cat}",)


def test_tags_are_stored_in_several_orders_with_the_first_ones_in_place() -> None:
    variants = stored(", ".join(TAGS), shuffle_tags=6, keep_tokens=2)
    assert len(set(variants)) == 6
    for variant in variants:
        tags = variant.split(", ")
        assert tags[:2] == list(TAGS[:2])
        assert tags[2:] != list(TAGS[2:])
        assert sorted(tags) == sorted(TAGS)
    assert stored(" a ,,b, ", keep_tokens=2, shuffle_tags=3) == ("a, b",)
    assert set(stored("a, b, c", keep_tokens=1, shuffle_tags=5)) == {"a, b, c", "a, c, b"}
    assert stored("x, x, x", shuffle_tags=4) == ("x, x, x",)
    assert stored("a cat", " , ", shuffle_tags=4) == ("a cat", " , ")


def test_orders_depend_on_the_id_and_the_seed_alone_and_more_of_them_change_none() -> None:
    caption = ", ".join(TAGS)
    three, six = (stored(caption, shuffle_tags=count) for count in (3, 6))
    assert six[:3] == three
    assert three == (  # of every version, on every machine: another order would have every store encode its text again
        "tag 2, tag 3, tag 8, tag 4, tag 7, tag 5, tag 0, tag 6, tag 1",
        "tag 3, tag 8, tag 1, tag 4, tag 0, tag 2, tag 6, tag 5, tag 7",
        "tag 4, tag 2, tag 6, tag 3, tag 8, tag 1, tag 5, tag 7, tag 0",
    )
    assert not {*three} & {*stored(caption, shuffle_tags=3, shuffle_seed=1)}
    assert not {*three} & {*stored(caption, shuffle_tags=3, of="b.png")}
    first, second = stored(caption, caption.upper(), shuffle_tags=1)
    assert first.upper() != second


def test_every_tag_comes_to_every_place_equally_often() -> None:
    counts = [[0] * 4 for _ in range(4)]
    for n in range(4000):
        (variant,) = stored("0, 1, 2, 3", shuffle_tags=1, of=f"{n}.png")
        for place, tag in enumerate(variant.split(", ")):
            counts[place][int(tag)] += 1
    assert all(880 < count < 1120 for row in counts for count in row)  # 1000 expected; four standard deviations are 110


def test_what_is_cut_at_max_captions_are_the_last_orders_and_no_caption_of_the_source() -> None:
    variants = stored("a, b, c", "the whole scene", shuffle_tags=3, templates=("{caption}", "film, {caption}"))
    assert variants[2:4] == ("the whole scene", "film, the whole scene")
    assert len(variants) == 8


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"templates": ("a photo", "b")}, "'a photo' and 'b' have no {caption}, the place of the source's caption; only one"),
        ({"templates": ("{caption} by {artist}",)}, "has the field {artist}; the only one is {caption}"),
        ({"templates": ("{caption} {}",)}, "has the field {}; the only one is {caption}"),
        ({"templates": ("{caption!r}",)}, "has the field {caption!r}; the only one is {caption}"),
        ({"templates": ("{caption:>9}",)}, "has the field {caption:>9}; the only one is {caption}"),
        ({"templates": ("{caption.x}",)}, "has the field {caption.x}; the only one is {caption}"),
        ({"templates": ("{caption",)}, "--caption-template '{caption': expected '}' before end of string"),
        ({"templates": ("{caption} }",)}, "a brace that is text is written twice: {{ or }}"),
        ({"templates": (" ",)}, "--caption-template is ' ', expected a word"),
        ({"templates": ("\udcff",)}, "--caption-template is '\\udcff', expected text in UTF-8"),
        ({"templates": ("\udcff {caption}",)}, "expected text in UTF-8"),
        ({"tags": "-1"}, "--shuffle-tags is '-1', expected ORDERS[:KEEP[:SEED]], such as 4 or 4:1"),
        ({"tags": "1:-1"}, "--shuffle-tags is '1:-1'"),
        ({"tags": "1:2:3:4"}, "--shuffle-tags is '1:2:3:4'"),
        ({"tags": "many"}, "--shuffle-tags is 'many'"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        CaptionRules.parse(rules.get("templates", ()), rules.get("tags"))


def test_the_options_that_made_rules_make_them_again() -> None:
    for rules in (
        CaptionRules(),
        CaptionRules(trigger_word="oh{x}", templates=("{caption} {{1}}", "the {caption}")),
        CaptionRules(shuffle_tags=4, shuffle_seed=7),
        CaptionRules(trigger_word="a", shuffle_tags=4, keep_tokens=1, shuffle_seed=2),
    ):
        options: Any = rules.as_json()
        assert CaptionRules.parse(options["caption_template"], options["shuffle_tags"]) == rules


def test_a_listing_notes_images_without_captions_and_leaves_unreadable_ones_alone() -> None:
    items = [
        SourceItem(id="a.png", captions=("a cat",)),
        SourceItem(id="b.png", captions=()),
        SourceItem(id="c.png", captions=(), caption_error="c.txt is not UTF-8 (byte 0); save it as UTF-8"),
        SourceItem(id="d.png", captions=("x" * (MAX_CAPTIONS_BYTES // 2),)),
    ]
    rules = CaptionRules(trigger_word="ohwx", templates=("{caption}", "the {caption}"))
    listing = rules.applied(Listing(items=list(items)))
    assert [item.captions for item in listing.items[:3]] == [("ohwx, a cat", "ohwx, the a cat"), ("ohwx",), ()]
    assert listing.items[2] == items[2]
    assert "1048592 bytes" in (listing.items[3].caption_error or "")
    assert listing.notes == ["1 image without a caption has only the trigger word"]
    assert CaptionRules().applied(Listing(items=list(items))).items == items
