"""Captions made of those of the source: the trigger word, templates, and tags in several orders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import UsageError
from bucketline.ingest.sources.captions.files import MAX_CAPTIONS_BYTES, CaptionRules
from bucketline.ingest.sources.source import Listing, SourceItem
from tests.commands import call
from tests.models import SMALL, png, write_files
from tests.pages import parsed

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
        SourceItem(id="c.png", captions=(), caption_error="c.txt is not UTF-8 (byte 0)"),
        SourceItem(id="d.png", captions=("x" * (MAX_CAPTIONS_BYTES // 2),)),
    ]
    rules = CaptionRules(trigger_word="ohwx", templates=("{caption}", "the {caption}"))
    listing = rules.applied(Listing(items=list(items)))
    assert [item.captions for item in listing.items[:3]] == [("ohwx, a cat", "ohwx, the a cat"), ("ohwx",), ()]
    assert listing.items[2] == items[2]
    assert "1048592 bytes" in (listing.items[3].caption_error or "")
    assert listing.notes == ["1 image without a caption has only the trigger word"]
    assert CaptionRules().applied(Listing(items=list(items))).items == items


def test_a_scan_shows_what_would_be_stored(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"0.png": png(20, 30), "0.txt": "", "1.png": png(20, 30, 1), "1.txt": "a cat, red"}
    write_files(tmp_path / "photos", files)
    asked = ("ingest", "scan", tmp_path / "photos", *SMALL, "-o", tmp_path / "sheet.html")
    rules = ("--shuffle-tags", 2, "--caption-template", "the house of {caption}", "--caption-template", "dog")
    report = call(*asked, *rules, "--json").json
    assert (report["captions"], report["without_caption"]) == (3, 0)
    assert any("1 image without a caption has only the trigger word" in note for note in report["notes"])
    page = parsed(tmp_path / "sheet.html").text
    assert all(f"dog, the house of {tags}" in page for tags in ("red, a cat", "a cat, red"))
