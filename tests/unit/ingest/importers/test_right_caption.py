"""The embedding of the caption as it is now, the newest cache of an image, and what is said about the rest."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.unit.ingest.importers.known import assert_as_packed, assert_same_bits, read_store, run_import
from tests.unit.ingest.importers.writers import FORMS, ai_toolkit, kohya, onetrainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.ingest.importers.known import Known


def test_ai_toolkits_embedding_of_an_edited_caption_is_not_taken(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source, first = ai_toolkit(tmp_path / "cache", own), own.samples[0]
    (source / first.id).with_suffix(".txt").write_text("a green house\n", encoding="utf-8")
    ran = run_import("ai-toolkit", source, tmp_path / "s.store", own).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    (reject,) = ran.json["rejects"]
    assert reject["id"] == first.id
    assert "has no embedding of its caption 'a green house'" in reject["detail"]
    assert any("1 caption has no embedding in the cache" in note for note in ran.json["notes"])


def test_of_two_embeddings_of_an_image_ai_toolkits_digest_tells_the_captions(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    own = known("sdxl")
    source = ai_toolkit(tmp_path / "cache", own)
    texts = {path.name.partition("_")[0]: path for path in source.rglob("_t_e_cache/*")}
    for path in texts.values():  # as caption dropout leaves them: another's name, and another's values
        other = {name: value + 1 for name, value in load_file(path).items()}
        save_file(other, path.with_name(f"{path.name.partition('_')[0]}_{'A' * 22}.safetensors"))
    ran = run_import("ai-toolkit", source, tmp_path / "s.store", own).done()
    assert (ran.json["imported"], ran.json["text"]) == (6, "source")
    stored = {sample.id: sample for sample in read_store(tmp_path / "s.store")}
    for sample in own.samples:
        assert_same_bits(stored[sample.id].tokens, sample.tokens, "F16")


def test_a_caption_that_is_newer_than_kohyas_text_cache_is_encoded_again(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source, (first, second, *_) = kohya(tmp_path / "cache", own), own.samples
    for path in source.rglob("*.txt"):
        os.utime(path, ns=(10**18, 10**18))
    other = next(sample for sample in own.samples if sample.caption != first.caption)
    (source / first.id).with_suffix(".txt").write_text(f"{other.caption}\n", encoding="utf-8")
    for path in ((source / one.id).with_suffix(".txt") for one in (first, second)):
        os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    ran = run_import("kohya", source, tmp_path / "s.store", own).done()
    assert (ran.json["imported"], ran.json["text"]) == (6, "source")
    assert any("2 text caches older than the caption file" in note for note in ran.json["notes"])
    edited = replace(first, caption=other.caption, tokens=other.tokens, pooled=other.pooled)
    expected = tuple(edited if sample is first else sample for sample in own.samples)
    assert_as_packed(tmp_path / "s.store", replace(own, samples=expected), FORMS["kohya"])
    assert run_import("kohya", source, tmp_path / "s.store", own).json["unchanged"] == 6


@pytest.mark.parametrize("newest", [0, 1])
def test_of_two_groups_of_onetrainers_the_newest_has_the_image(
    newest: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    own = known("sd")
    source = onetrainer(tmp_path / "cache", own)
    (group,) = (source / "image").iterdir()
    halved = replace(own, samples=tuple(replace(sample, latent=sample.latent / np.float32(2)) for sample in own.samples))
    (other,) = (onetrainer(tmp_path / "other", halved) / "image").iterdir()
    names = sorted(("a" * 64, "b" * 64), reverse=newest == 1)
    group = group.rename(source / "image" / names[0])
    other = other.rename(source / "image" / names[1])
    for folder, at in ((group, 2), (other, 1)):
        os.utime(folder / "variation-0" / "aggregate.pt", ns=(at * 10**18, at * 10**18))
    ran = run_import("onetrainer", source, tmp_path / "s.store", own, "--captions", own.images).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (6, 6)
    assert any("6 images are in several groups" in note for note in ran.json["notes"])
    assert all(other.name in reject["id"] for reject in ran.json["rejects"])
    assert_as_packed(tmp_path / "s.store", own, FORMS["onetrainer"], crops="source")
