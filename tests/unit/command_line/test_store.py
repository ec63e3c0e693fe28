"""The output and exit codes of `store`, and of requests that cannot be: others script them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.store import Store
from tests.commands import BIN, call, spawn
from tests.kit import Held, by_id, untouched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_command_whose_stderr_is_no_terminal_writes_nothing_there(packed: tuple[Path, Path], tmp_path: Path) -> None:
    for asked in (
        ("verify", packed[1]),
        ("export", packed[1], tmp_path / "out", "--format", "safetensors"),
        ("compact", packed[1], "--dry-run"),
        ("merge", tmp_path / "all", packed[1]),
    ):
        ran = spawn([BIN / "store", *asked])
        assert (ran.code, ran.err) == (0, ""), asked


def test_info_prints_one_object_with_buckets_and_columns(packed: tuple[Path, Path]) -> None:
    report = call("store", "info", packed[1], "--json").json
    wanted = {"format_version", "generation", "samples", "payload_bytes", "disk_bytes", "shards", "encoders", "buckets"}
    assert wanted <= set(report)
    assert (report["format_version"], report["generation"], report["samples"], report["shards"]) == (1, 1, 14, 1)
    assert set(report["encoders"]) == {"vae", "text_encoder"}
    assert sum(bucket["rows"] for bucket in report["buckets"]) == 14
    for bucket in report["buckets"]:
        assert set(bucket) == {"name", "axes", "height_px", "width_px", "split", "rows", "columns"}
        assert bucket["name"] == f"{bucket['split']}/{bucket['height_px']}x{bucket['width_px']}"
        latent = bucket["columns"]["latent"]
        assert latent == {"dtype": "F16", "shape": [4, bucket["height_px"] // 2, bucket["width_px"] // 2]}
    assert {bucket["split"] for bucket in report["buckets"]} == {"train", "val"}


def test_info_for_people_names_every_bucket(packed: tuple[Path, Path]) -> None:
    ran = call("store", "info", packed[1]).done()
    assert "14 samples" in ran.out
    assert "train/16x24" in ran.out


def test_info_shows_the_options_that_a_pack_of_the_same_store_takes(packed: tuple[Path, Path], model: Path) -> None:
    rules = call("store", "info", packed[1], "--json").json["rules"]
    assert {"grid": "16x24,24x16", "crop": "center", "val_fraction": "0.2", "max_tokens": None}.items() <= rules.items()
    assert {"latents", "encode_dtype", "shuffle_tags"} <= rules.keys()
    (shown,) = [line for line in call("store", "info", packed[1]).out.splitlines() if line.startswith("rules: ")]
    assert "grid 16x24,24x16" in shown
    assert "max_tokens" not in shown


def rows_of(place: Path) -> dict[str, Held]:
    return by_id(Store.open(place))


def test_verify_prints_one_object_and_ends_with_zero_where_all_is_well(packed: tuple[Path, Path]) -> None:
    ran = call("store", "verify", packed[1], "--json").done()
    assert set(ran.json) == {"blocks", "rows", "corrupt", "strays"}
    assert (ran.json["rows"], ran.json["corrupt"]) == (14, [])
    assert "14 rows read, 0 faults" in call("store", "verify", packed[1]).out


def test_verify_ends_with_one_and_names_the_place_where_a_row_is_damaged(packed: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(packed[1], tmp_path / "s")
    store = Store.open(tmp_path / "s")
    bucket = store.buckets()[0]
    located = bucket.locate(np.array([1]))
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    data[int(located.offsets(bucket.spec, "latent")[0]) + 3] ^= 4
    path.write_bytes(data)
    ran = call("store", "verify", tmp_path / "s", "--json")
    assert ran.code == 1
    named = [fault for fault in ran.json["corrupt"] if fault["row"] is not None]
    assert [(f["shard"], f["bucket"], f["block"], f["row"], f["sample"]) for f in named] == [
        (store.shards[0].name, bucket.name, 0, 1, bucket.sample_ids(np.array([1]))[0])
    ]
    assert bucket.name in call("store", "verify", tmp_path / "s").out


def test_verify_ends_with_one_where_the_manifest_itself_is_what_is_wrong(packed: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(packed[1], tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"lanczos", b"bicubic"))
    ran = call("store", "verify", tmp_path / "s", "--json")
    assert ran.code == 1
    (fault,) = ran.json["corrupt"]
    assert (fault["shard"], fault["bucket"], fault["block"]) == (None, None, None)
    assert "edited by hand" in fault["error"]


def test_get_writes_a_file_that_safetensors_opens(packed: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file

    out = tmp_path / "sample.safetensors"
    ran = call("store", "get", packed[1], "a/002.png", "-o", out, "--json").done()
    assert (ran.json["id"], len(ran.json["captions"])) == ("a/002.png", 2)
    found = load_file(out)
    store = Store.open(packed[1])
    record = store.sample("a/002.png")[1]
    bucket = store.bucket(record.bucket)
    row = bucket.sample_ids(np.arange(bucket.num_rows)).index("a/002.png")
    assert np.array_equal(found["latent"], bucket.read(np.array([row]), "latent")[0])
    for n, caption_row in enumerate(record.caption_rows):
        assert np.array_equal(found[f"caption.{n}.tokens"], store.read_caption(0, caption_row)["tokens"])
    with safe_open(out, framework="numpy") as file:
        assert json.loads(file.metadata()["record"])["captions"] == list(record.captions)


BAD_REQUESTS: dict[str, tuple[Callable[[Path], list[object]], int, str]] = {
    "a store that is a file": (lambda s: ["info", s / "manifest.json"], 1, "is in the store"),
    "a file that exists": (lambda s: ["get", s, "a/000.png", "-o", s / "manifest.json"], 2, "manifest.json exists"),
    "a folder that does not": (lambda s: ["get", s, "a/000.png", "-o", s / "no" / "o"], 2, "no is not a folder; make it"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_and_changes_nothing(case: str, packed: tuple[Path, Path]) -> None:
    ask, code, words = BAD_REQUESTS[case]
    with untouched(packed[1].parent):
        call("store", *ask(packed[1])).fails(words, code=code)
