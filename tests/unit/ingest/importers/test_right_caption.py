"""The embedding of the caption as it is now, the newest cache of an image, and what is said about the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.unit.ingest.importers.known import Known, assert_as_packed, assert_same_bits, captioned, read_store, run_import
from tests.unit.ingest.importers.writers import (
    FORMS,
    WRITERS,
    ai_toolkit,
    ai_toolkit_file,
    kohya,
    kohya_latent,
    musubi,
    onetrainer,
    simpletuner,
)


def test_ai_toolkits_embedding_of_an_edited_caption_is_not_taken(sdxl: Known, tmp_path: Path) -> None:
    source, first = ai_toolkit(tmp_path / "cache", sdxl), sdxl.samples[0]
    (source / first.id).with_suffix(".txt").write_text("a green house\n", encoding="utf-8")
    ran = run_import("ai-toolkit", source, tmp_path / "s.store", sdxl).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    (reject,) = ran.json["rejects"]
    assert reject["id"] == first.id
    assert "has no embedding of its caption 'a green house'" in reject["detail"]
    assert any("1 caption has no embedding in the cache, which has 1 of" in note for note in ran.json["notes"])
    assert any("likely causes: the trainer's trigger_word (--trigger" in note for note in ran.json["notes"])
    dry = run_import("ai-toolkit", source, tmp_path / "dry.store", sdxl, "--dry-run").done()
    assert dry.json["rejects"] == [reject]


def test_of_two_embeddings_of_an_image_ai_toolkits_digest_tells_the_captions(sdxl: Known, tmp_path: Path) -> None:
    source = ai_toolkit(tmp_path / "cache", sdxl)
    texts = {path.name.partition("_")[0]: path for path in source.rglob("_t_e_cache/*")}
    for path in texts.values():  # as caption dropout leaves them: another's name, and another's values
        other = {name: value + 1 for name, value in load_file(path).items()}
        save_file(other, path.with_name(f"{path.name.partition('_')[0]}_{'A' * 22}.safetensors"))
    ran = run_import("ai-toolkit", source, tmp_path / "s.store", sdxl).done()
    assert (ran.json["imported"], ran.json["text"]) == (6, "source")
    stored = {sample.id: sample for sample in read_store(tmp_path / "s.store")}
    for sample in sdxl.samples:
        assert_same_bits(stored[sample.id].tokens, sample.tokens, "F16")


def write_captions(source: Path, own: Known, change: Callable[[str], str]) -> None:
    for sample in own.samples:
        (source / sample.id).with_suffix(".txt").write_text(change(sample.caption), encoding="utf-8")


@pytest.mark.parametrize("kind", ["ai-toolkit", "simpletuner"])
def test_a_file_of_several_lines_that_was_embedded_as_one_caption_is_one(kind: str, sdxl: Known, tmp_path: Path) -> None:
    own = captioned(tmp_path, sdxl, "{}, at noon\n\nThe evening sun is low.".format)
    source = WRITERS[kind][0](tmp_path / "cache", own)
    write_captions(source, own, "{}\n".format)
    ran = run_import(kind, source, tmp_path / "s.store", own).done()
    assert ran.json["text"] == "source"
    assert "6 caption files with several lines are one caption each, as the trainer embedded it" in ran.json["notes"]
    assert_as_packed(tmp_path / "s.store", own, FORMS[kind], crops="source")
    assert run_import(kind, source, tmp_path / "s.store", own).json["unchanged"] == 6


def test_embeddings_of_another_model_are_refused(sdxl: Known, tmp_path: Path) -> None:
    other = replace(sdxl, samples=tuple(replace(one, tokens=-one.tokens) for one in sdxl.samples))
    source = simpletuner(tmp_path / "cache", other)
    run_import("simpletuner", source, tmp_path / "s.store", sdxl).fails("is not what the encoders of")
    assert not (tmp_path / "s.store").exists()
    run_import("simpletuner", source, tmp_path / "s.store", sdxl, "--text", "encode").done()
    assert_as_packed(tmp_path / "s.store", sdxl, FORMS["simpletuner"], crops="source")


def test_of_a_file_of_several_lines_the_one_that_was_embedded_is_taken(sdxl: Known, tmp_path: Path) -> None:
    source = simpletuner(tmp_path / "cache", sdxl)
    write_captions(source, sdxl, lambda caption: f"edited since\n{caption}\n")
    ran = run_import("simpletuner", source, tmp_path / "s.store", sdxl).done()
    assert ran.json["text"] == "source"
    assert_as_packed(tmp_path / "s.store", sdxl, FORMS["simpletuner"], crops="source")


@pytest.mark.parametrize(("kind", "in_file"), [("ai-toolkit", "[trigger] a"), ("ai-toolkit", "a"), ("simpletuner", "a")])
def test_the_trigger_word_is_in_the_captions_that_are_stored(kind: str, in_file: str, sdxl: Known, tmp_path: Path) -> None:
    own = captioned(tmp_path, sdxl, "ohwx a {}".format)
    source = WRITERS[kind][0](tmp_path / "cache", own)
    write_captions(source, own, lambda caption: caption.replace("ohwx a", in_file) + "\n")
    ran = run_import(kind, source, tmp_path / "s.store", own, "--trigger", "ohwx").done()
    assert ran.json["text"] == "source"
    assert_as_packed(tmp_path / "s.store", own, FORMS[kind], crops="source")
    run_import(kind, source, tmp_path / "s.store", own).fails("none of the cache's", "is of a caption that is here")


@pytest.mark.parametrize(("kind", "num_texts"), [("ai-toolkit", 6), ("simpletuner", 4)])
def test_a_cache_of_other_captions_is_refused_with_the_likely_causes_unless_text_is_encoded(
    kind: str, num_texts: int, sdxl: Known, tmp_path: Path
) -> None:
    source = WRITERS[kind][0](tmp_path / "cache", sdxl)
    write_captions(source, sdxl, "the {}\n".format)
    ran = run_import(kind, source, tmp_path / "s.store", sdxl)
    ran.fails(f"none of the cache's {num_texts} text embeddings is of a caption that is here", "note: likely causes: ")
    assert "none of the cache's" in ran.json["error"]
    assert any("(--trigger" in note and "--text encode" in note for note in ran.json["notes"])
    assert not (tmp_path / "s.store").exists()
    ran = run_import(kind, source, tmp_path / "s.store", sdxl, "--text", "encode").done()
    assert any("none of the cache's" in note for note in ran.json["notes"])
    assert {sample.caption for sample in read_store(tmp_path / "s.store")} == {f"the {one.caption}" for one in sdxl.samples}


def test_without_caption_files_the_cached_caption_may_be_the_trigger_word_or_the_name(sdxl: Known, tmp_path: Path) -> None:
    own = captioned(tmp_path, sdxl, lambda _: "ohwx")
    spelled = replace(own, samples=tuple(replace(sample, caption="ohwx ") for sample in own.samples))
    source = ai_toolkit(tmp_path / "cache", spelled)
    run_import("ai-toolkit", source, tmp_path / "s.store", own, "--trigger", "ohwx").done()
    assert_as_packed(tmp_path / "s.store", own, FORMS["ai-toolkit"], crops="source")
    named = replace(own, samples=tuple(replace(one, caption=one.stem.rpartition("/")[2]) for one in sdxl.samples))
    source = simpletuner(tmp_path / "named", named)
    run_import("simpletuner", source, tmp_path / "named.store", own, "--text", "none").done()
    assert {sample.caption for sample in read_store(tmp_path / "named.store")} == {one.caption for one in named.samples}


@pytest.mark.parametrize("spelling", ["a red cat,  in the sun\n", "a red cat,  in the sun", "a red cat, in the sun"])
def test_ai_toolkits_white_space_is_in_the_digest_and_not_in_the_caption(spelling: str, sdxl: Known, tmp_path: Path) -> None:
    own = captioned(tmp_path, sdxl, lambda _: "a red cat, in the sun")
    spelled = replace(own, samples=tuple(replace(sample, caption=spelling) for sample in own.samples))
    source = ai_toolkit(tmp_path / "cache", spelled)
    write_captions(source, own, "{}\n".format)
    assert run_import("ai-toolkit", source, tmp_path / "s.store", own).json["text"] == "source"
    assert_as_packed(tmp_path / "s.store", own, FORMS["ai-toolkit"], crops="source")


def test_embeddings_of_captions_that_no_sample_has_are_counted_but_for_dropped_ones(sdxl: Known, tmp_path: Path) -> None:
    source, first = ai_toolkit(tmp_path / "cache", sdxl), sdxl.samples[0]
    for caption in ("", "an older caption"):
        ai_toolkit_file(source, sdxl, replace(first, caption=caption), "sdxl")
    ran = run_import("ai-toolkit", source, tmp_path / "s.store", sdxl).done()
    assert "the cache has 1 text embedding of captions that are not here" in ran.json["notes"]
    source = simpletuner(tmp_path / "other", sdxl)
    (text, *_) = sorted((source / "cache" / "text").iterdir())
    for name in ("d41d8cd98f00b204e9800998ecf8427e-sdxl.pt", f"{'0' * 32}-sdxl.pt"):  # the first is of the empty caption
        text.with_name(name).write_bytes(text.read_bytes())
    ran = run_import("simpletuner", source, tmp_path / "t.store", sdxl).done()
    assert "the cache has 1 text embedding of captions that are not here" in ran.json["notes"]


def test_of_the_embeddings_of_two_models_ai_toolkits_latents_take_their_own(flux: Known, tmp_path: Path) -> None:
    source = ai_toolkit(tmp_path / "cache", flux)
    for sample in flux.samples:  # as of another model that was trained on the same folder
        other = replace(sample, tokens=np.ones((3, 5), dtype="f4"))
        ai_toolkit_file(source, flux, other, "sdxl").unlink()
    run_import("ai-toolkit", source, tmp_path / "s.store", flux).done()
    assert_as_packed(tmp_path / "s.store", flux, FORMS["ai-toolkit"], crops="source")


def test_sd_scripts_takes_the_first_line_with_its_prefix(sdxl: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", sdxl)
    write_captions(source, sdxl, "{}\nanother line\n".format)
    asked = ("--text", "none", "--trigger", "ohwx")
    ran = run_import("kohya", source, tmp_path / "s.store", sdxl, *asked).done()
    assert "6 caption files with several lines: the first is taken, as sd-scripts does" in ran.json["notes"]
    stored = {sample.id: sample.record.captions for sample in read_store(tmp_path / "s.store")}
    assert stored == {sample.id: (f"ohwx {sample.caption}",) for sample in sdxl.samples}


def test_a_trigger_word_is_refused_where_the_cache_has_its_captions(flux: Known, tmp_path: Path) -> None:
    run_import("musubi", musubi(tmp_path / "cache", flux), tmp_path / "s.store", flux, "--trigger", "ohwx").fails(
        "those of this cache are from caption1 of the text caches", code=2
    )


def test_two_images_of_kohyas_that_share_a_cache_file_are_rejected_with_both_names(sd: Known, tmp_path: Path) -> None:
    source, first = kohya(tmp_path / "cache", sd), sd.samples[0]
    (source / first.id).with_suffix(".jpg").write_bytes((source / first.id).read_bytes())
    ran = run_import("kohya", source, tmp_path / "s.store", sd).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    name = first.stem.rpartition("/")[2]
    assert f"{name}.png and {name}.jpg share it" in ran.json["rejects"][0]["detail"]
    larger = replace(first, record=replace(first.record, original_size=(80, 120)))
    kohya_latent(source, larger, "sd", first.latent)  # of the other image, by its size
    assert run_import("kohya", source, tmp_path / "t.store", sd).done().json["imported"] == 7


def test_two_images_of_simpletuners_that_share_a_cache_file_are_both_rejected(sdxl: Known, tmp_path: Path) -> None:
    source, first = simpletuner(tmp_path / "cache", sdxl), sdxl.samples[0]
    path = source / "aspect_ratio_bucket_metadata_my-data.json"
    images = json.loads(path.read_text(encoding="utf-8"))
    (name,) = (name for name in images if name.endswith(first.id))
    images[name.replace(".png", ".jpg")] = images[name] | {"crop_coordinates": [8, 8]}  # as of an image of another size
    path.write_text(json.dumps(images), encoding="utf-8")
    ran = run_import("simpletuner", source, tmp_path / "u.store", sdxl).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 2)
    assert all(f"{first.id} and {first.stem}.jpg share it" in reject["detail"] for reject in ran.json["rejects"])


@pytest.mark.parametrize("newest", [0, 1])
def test_of_two_groups_of_onetrainers_the_newest_has_the_image(newest: int, sd: Known, tmp_path: Path) -> None:
    source = onetrainer(tmp_path / "cache", sd)
    (group,) = (source / "image").iterdir()
    halved = replace(sd, samples=tuple(replace(sample, latent=sample.latent / np.float32(2)) for sample in sd.samples))
    (other,) = (onetrainer(tmp_path / "other", halved) / "image").iterdir()
    names = sorted(("a" * 64, "b" * 64), reverse=newest == 1)
    group = group.rename(source / "image" / names[0])
    other = other.rename(source / "image" / names[1])
    for folder, at in ((group, 2), (other, 1)):
        os.utime(folder / "variation-0" / "aggregate.pt", ns=(at * 10**18, at * 10**18))
    ran = run_import("onetrainer", source, tmp_path / "s.store", sd, "--captions", sd.images).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (6, 6)
    assert any("6 images are in several groups" in note for note in ran.json["notes"])
    assert all(other.name in reject["id"] for reject in ran.json["rejects"])
    assert_as_packed(tmp_path / "s.store", sd, FORMS["onetrainer"], crops="source")
