"""Captions that a family's pipeline or model does not take, or not to their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

from bucketline.errors import UsageError
from bucketline.families.registry import family_named
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text.registry import load_caption_encoder
from bucketline.ingest.encoders.text_columns import TextSettings
from tests.commands import call
from tests.family_models import open_pipeline, write_pipeline
from tests.models import png
from tests.unit.families.oracle import one_step

CPU = torch.device("cpu")
IMAGE = "a red <|image_pad|> cat"


@pytest.fixture(scope="module")
def qwenimage21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("qwenimage21") / "model", "qwenimage21")


def encoder_of(folder: Path, **settings: Any) -> Any:
    return load_caption_encoder(open_model(str(folder)), CPU, TextSettings(stored_dtype="F32", **settings))


def test_a_token_that_stands_for_an_image_is_refused_in_a_caption_as_by_the_pipeline(qwenimage21: Path) -> None:
    captions = ("a red cat", IMAGE, "a <|video_pad|>")
    whole, *refused = encoder_of(qwenimage21).encode(captions)
    assert whole.refusal is None
    assert torch.equal(whole.tokens, encoder_of(qwenimage21).encode(["a red cat"])[0].tokens)
    pipeline = open_pipeline(qwenimage21, "qwenimage21")
    for caption, found in zip(captions[1:], refused, strict=True):
        assert "which stands for an image to QwenImage21Pipeline; remove it" in found.refusal
        with pytest.raises(ValueError, match="tokens in the text but no"):
            one_step(pipeline, [caption], height=64, width=96, true_cfg_scale=1.0)


def test_a_caption_is_refused_where_nothing_cuts_it_and_the_model_has_no_positions_for_it(qwenimage21: Path) -> None:
    encoder = encoder_of(qwenimage21)
    short, long = encoder.encode(["cat " * 4000, "cat " * 4096])
    assert short.refusal is None
    assert not short.is_truncated
    assert "tokens, and QwenImage21Pipeline takes up to 4096, uncut; shorten it" in long.refusal
    assert not long.cuts


def test_the_longest_caption_leaves_the_image_the_last_position_that_is_right() -> None:
    family = family_named("qwenimage21")
    assert family is not None
    last = family.parts[0].most_tokens
    assert last is not None
    (turns,) = QwenImage21Rope(10000, [2]).freqs  # of the first position's angle, 1
    is_right = [torch.allclose(turns[place], torch.polar(*torch.tensor([1.0, place]))) for place in (last, last + 1)]
    assert is_right == [True, False]


# With the chat around it; HiDream's pipeline gives its CLIPs 218 positions.
HIDREAM_CUTS = {"text_encoder": 218, "text_encoder_2": 218, "text_encoder_3": 512, "text_encoder_4": 512}


@pytest.mark.parametrize(
    ("family", "most", "cuts"), [("qwenimage", 1024, {"text_encoder": 1024 + 34}), ("hidream_image", 512, HIDREAM_CUTS)]
)
def test_no_more_tokens_are_kept_than_the_pipeline_would_give(
    family: str, most: int, cuts: dict[str, int], tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    with pytest.raises(UsageError, match=f"--max-tokens is {most + 1}, expected {most} or fewer"):
        encoder_of(folder, max_tokens=most + 1)
    encoder = encoder_of(folder, max_tokens=most)
    (found,) = encoder.encode(["cat " * 2 * most])
    assert len(found.tokens) == encoder.max_tokens == most
    assert {cut.encoder: cut.limit for cut in found.cuts} == cuts


@pytest.mark.parametrize("family", ["sd3", "flux", "chroma", "lumina2"])
def test_no_more_tokens_are_taken_than_the_pipelines_call_takes(family: str, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    pipeline = open_pipeline(folder, family)
    with pytest.raises(ValueError, match="`max_sequence_length` cannot be greater than 512"):
        one_step(pipeline, ["a red cat"], height=16, width=16, max_sequence_length=513)
    with pytest.raises(UsageError, match="--max-tokens is 513, expected 512 or fewer"):
        encoder_of(folder, max_tokens=513)
    scanned = call("ingest", "scan", tmp_path, "--model", folder, "--max-tokens", 513)
    assert (scanned.code, "expected 512 or fewer" in scanned.err) == (2, True), scanned.err


def test_scan_and_pack_reject_an_image_by_its_refused_caption(qwenimage21: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for n, caption in enumerate(("a cat", IMAGE)):
        (images / f"{n}.png").write_bytes(png(64, 96, seed=n))
        (images / f"{n}.txt").write_text(caption, encoding="utf-8")
    asked = ("--model", qwenimage21, "--grid", "64x96", "--min-size-px", 8, "--json")
    ran = call("ingest", "pack", images, tmp_path / "s", *asked).done()
    report = call("ingest", "scan", images, *asked).json
    assert ran.json["packed"] == 1
    assert ran.json["rejected_by_reason"] == report["rejected_by_reason"] == {"caption that the model does not take": 1}
    assert "has <|image_pad|>" in report["rejects"][0]["detail"]
