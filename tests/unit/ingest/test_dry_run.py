"""`ingest pack --dry-run` foretells what the same pack does, and writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bucketline.ingest.encoders import text_model, vae
from bucketline.ingest.pipeline import image_reader
from bucketline.store import Store
from tests.commands import Ran, call
from tests.kit import tree
from tests.models import SMALL, png


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *more)


def foretold(source: Path, store: Path, model: Path, *more: object) -> dict[str, Any]:
    """Return the report of a dry run, which loads no encoder and leaves everything as it was."""
    before = tree(source.parent)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vae, "load_vae", lambda *_: pytest.fail("a VAE was loaded"))
        patched.setattr(text_model, "load_text_part", lambda *_: pytest.fail("a tokenizer was loaded"))
        ran = pack(source, store, model, *more, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    assert ran.out.count("\n") == 1
    assert tree(source.parent) == before
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_a_store_that_does_not_exist_is_not_made(source: Path, tmp_path: Path, model: Path) -> None:
    report = foretold(source, tmp_path / "s", model)
    assert (report["found"], report["new"], report["unchanged"], report["rejected"]) == (14, 14, 0, 0)
    assert not (tmp_path / "s").exists()
    packed = pack(source, tmp_path / "s", model, "--json").json
    assert packed["packed"] == 14
    assert report["buckets"] == {bucket.name: bucket.num_rows for bucket in Store.open(tmp_path / "s").buckets()}


def test_every_kind_of_change_is_counted_as_the_pack_then_does_it(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    images = sorted(source.rglob("*.png"))
    images[0].unlink()
    images[1].write_bytes(b"no image")
    images[2].write_bytes(png(20, 30, 70))  # changed
    os.utime(images[3], ns=(1, 1))  # touched
    images[4].with_suffix(".txt").write_text("another\n", encoding="ascii")
    (source / "new.png").write_bytes(png(30, 20, 71))
    (source / "bad.png").write_bytes(b"")
    report = foretold(source, tmp_path / "s", model, "--prune")
    names = ("found", "new", "changed", "moved", "recaptioned", "unchanged", "rejected", "dropped", "pruned")
    assert [report[name] for name in names] == [15, 1, 1, 0, 2, 9, 2, 1, 1]
    assert report["buckets"] == {"train/16x24": 1, "train/24x16": 1}
    packed = pack(source, tmp_path / "s", model, "--prune", "--json").json
    same = ("found", "unchanged", "rejected", "rejected_by_reason", "dropped_ids", "pruned_ids")
    assert {name: packed[name] for name in same} == {name: report[name] for name in same}
    assert packed["packed"] == report["new"] + report["changed"] + report["recaptioned"]
    assert packed["latents_kept"] == report["recaptioned"]
    assert foretold(source, tmp_path / "s", model)["unchanged"] == 13


def test_other_captions_and_a_pruning_beyond_the_limit_are_foretold(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    report = foretold(source, tmp_path / "s", model, "--caption-template", "ohwx", "--recaption")
    assert (report["recaptioned"], report["buckets"]) == (14, {})
    for path in sorted(source.rglob("*.png"))[1:]:
        path.rename(tmp_path / f"{path.parent.name}-{path.name}")
    report = foretold(source, tmp_path / "s", model, "--prune")
    assert (report["pruned"], report["not_pruned_beyond_limit"], report["not_in_source"]) == (0, 13, 13)
    ran = pack(source, tmp_path / "s", model, "--prune", "--dry-run")
    assert "not pruned: 13 of 14 samples would be dropped, --prune allows" in ran.out
    assert "from the file headers only" in ran.out


def test_each_source_of_a_data_set_file_is_foretold(tmp_path: Path, model: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png(20, 30))
    (tmp_path / "in" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}\n', encoding="ascii")
    data = tmp_path / "data.toml"
    data.write_text('[[source]]\npath = "in"\n', encoding="ascii")
    assert call("ingest", "pack", data, tmp_path / "d", "--model", model, *SMALL).code == 0
    before = tree(tmp_path)
    ran = call("ingest", "pack", data, tmp_path / "d", "--model", model, *SMALL, "--dry-run").done()
    assert f"in x 1: {tmp_path / 'in'}\ndry run, nothing is written: 1 image found = 0 new" in ran.out
    ran = call("ingest", "pack", data, tmp_path / "d", "--model", model, *SMALL, "--dry-run", "--json")
    assert json.loads(ran.out)["sources"]["in"]["unchanged"] == 1
    assert tree(tmp_path) == before


def test_an_image_that_moves_to_the_other_split_is_to_be_encoded_again(
    packed_once: tuple[Path, Path], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_reader, "split_of", lambda *_: "val")  # as for a saved dataset whose image is now in validation
    report = foretold(*packed_once, model)
    assert (report["moved"], report["new"], report["buckets"]) == (1, 0, {"val/16x24": 1})


@pytest.mark.parametrize(
    "option", ["--flip", "--latents=sample", "--dtype=BF16", "--encode-dtype=BF16", "--caption-template=x"]
)
def test_options_that_the_pack_would_refuse_are_refused(option: str, packed_once: tuple[Path, Path], model: Path) -> None:
    before = tree(packed_once[1])
    ran = pack(*packed_once, model, option, "--dry-run", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "was made with other options than this run has" in ran.err
    assert option.partition("=")[0] in ran.err
    assert tree(packed_once[1]) == before


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("packed")
    (folder / "in").mkdir()
    (folder / "in" / "a.png").write_bytes(png(20, 30))
    assert pack(folder / "in", folder / "s", model).code == 0
    return folder / "in", folder / "s"
