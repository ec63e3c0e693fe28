"""The rules of a store as options of `ingest pack`, from what manifests record."""

from __future__ import annotations

import ast

import pytest

from bucketline.families.registry import FAMILIES
from bucketline.pack_options import FIELDS, FIXED_LENGTH, as_arguments, pack_options
from bucketline.typed_json import Json
from tests.commands import ROOT

SD3: dict[str, Json] = {
    "family": "sd3",
    "max_tokens": 77 + 256,
    "stored_dtype": "I8",
    "parts": {"text_encoder": {"dtype": "BF16", "max_tokens": 77}, "text_encoder_2": None},
}
DTYPE = ["--dtype", "fp16"]


def test_no_crop_limit_is_recorded_as_null() -> None:
    made: dict[str, Json] = {"rules": {"grid": "16x24", "crop": "center", "max_crop": None}}
    assert pack_options(made) == {"--grid": "16x24", "--crop": "center", "--max-crop": 1}
    assert pack_options({"rules": {"grid": "16x24", "max_crop": 0.0}})["--max-crop"] == 0.0


@pytest.mark.parametrize(
    ("encoders", "options"),
    [
        ({"text_encoder": SD3}, ["--dtype", "int8", "--encode-dtype", "bf16", "--max-tokens", "256"]),
        ({"text_encoder": {"family": "sdxl", "max_tokens": 77}}, []),
        ({"text_encoder": {"family": "transformers", "max_tokens": 9}}, ["--text", "plain", "--max-tokens", "9"]),
        (
            {"vae": {"stored_dtype": "F16", "dtype": "F32"}, "text_encoder": {"family": "flux", "stored_dtype": "I8"}},
            ["--dtype", "fp16", "--text-dtype", "int8", "--encode-dtype", "fp32"],
        ),
        ({"vae": {"stored_dtype": "F16"}, "text_encoder": {"family": "flux", "stored_dtype": "F16"}}, DTYPE),
        (
            {"vae": {"stored_dtype": "F16"}, "text_encoder": {"family": "class_labels", "stored_dtype": "I64"}},
            ["--dtype", "fp16"],
        ),
    ],
)
def test_what_the_encoders_record_gives_the_options_that_made_it(encoders: dict[str, Json], options: list[str]) -> None:
    assert as_arguments(pack_options({"encoders": encoders})) == options


def test_rules_of_captions_that_do_nothing_are_left_out_and_zeros_of_other_options_are_not() -> None:
    captions: dict[str, Json] = {"trigger_word": "dog", "templates": [], "shuffle_tags": 0, "keep_tokens": 0}
    made: dict[str, Json] = {"rules": {"split": {"val_fraction": 0.0}, "flip": False, "captions": captions}}
    assert as_arguments(pack_options(made)) == ["--val-fraction", "0.0", "--caption-template", "dog"]
    captions["templates"] = ["{caption}", "a {caption}"]
    assert as_arguments(pack_options({"rules": {"captions": captions}}))[2:] == [
        *("--caption-template", "{caption}"),
        *("--caption-template", "a {caption}"),
    ]


def test_families_without_an_open_length_take_none_again() -> None:
    """With it, a second pack and `ingest prompts` of their stores would be refused."""
    of_ours = {one.name for one in FAMILIES if one.__module__.startswith("bucketline.")}
    assert of_ours & {one.name for one in FAMILIES if not any(part.is_open for part in one.parts)} == FIXED_LENGTH


def test_the_format_names_no_option_that_sets_a_rule() -> None:
    """A manifest keeps rules as JSON, whatever option set them."""
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in sorted((ROOT / "store" / "format").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FIELDS
    ]
    assert not named
