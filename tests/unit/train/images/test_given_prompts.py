"""Prompts that a run is given as texts or in a file: encoded once, as those of a store, which stays as it is."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import ModelError, UsageError
from bucketline.store import Store
from bucketline.store.prompt_file import decode_prompts
from bucketline.train.images.prompts import encode_given
from bucketline.train.run import train
from tests.commands import call
from tests.unit.train.tiny_run import ALONE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.train.packed_families import Packed


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["sd"], indirect=True)
def test_texts_and_a_file_are_encoded_once_as_by_ingest_prompts(packed: Packed, tmp_path: Path) -> None:
    store = Store.open(shutil.copytree(packed.store, tmp_path / "s.store"))
    lines = tmp_path / "lines.txt"
    lines.write_text("the house\na red cat\n", encoding="utf-8")
    given = ("a red cat", str(lines), "a  blue\ndog")
    asked = packed.config(tmp_path / "run", store=(store.path,), num_images=1, image_prompts=given, max_steps=1)
    train(asked, ALONE)
    drawn = json.loads((asked.output_dir / "images.json").read_bytes())
    assert [(one["id"], one["caption"]) for one in drawn] == [
        (f"{lines}/1", "the house"),
        (f"{lines}/2", "a red cat"),
        ("given text/2", "a blue dog"),
    ]
    call("ingest", "prompts", lines, store.path, "--model", packed.model).done()
    expected = decode_prompts(store.manifest, lines.with_suffix(".safetensors").read_bytes(), "expected")
    kept = asked.output_dir / "prompts"
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(before) == 4
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    lines.unlink()  # a resume needs neither the file nor text encoders
    found = encode_given(asked, store)
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    own = decode_prompts(store.manifest, found[str(lines)], "own")
    assert own.prompts == expected.prompts
    for text in ("the house", "a red cat", ""):
        of_run, of_set = own.embedding(text), expected.embedding(text)
        assert all(np.array_equal(of_run[name], of_set[name]) for name in of_set)
    lines.write_text("a blue dog\n", encoding="utf-8")
    again = encode_given(asked, store)
    assert [one.prompt for one in decode_prompts(store.manifest, again[str(lines)], "again").prompts] == ["a blue dog"]


@pytest.mark.parametrize("packed", ["sd"], indirect=True)
def test_prompts_that_cannot_be_encoded_end_the_run_with_the_reason(packed: Packed, tmp_path: Path) -> None:
    store = Store.open(packed.store)
    with pytest.raises(UsageError, match=r"--image-prompts none\.txt: there is no such file"):
        encode_given(packed.config(tmp_path, num_images=1, image_prompts=("none.txt",)), store)
    bare = shutil.copytree(packed.model, tmp_path / "model", ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*"))
    asked = packed.config(tmp_path, model=bare, num_images=1, image_prompts=("a red cat",))
    with pytest.raises(ModelError, match="model lacks the part tokenizer"):
        encode_given(asked, store)
