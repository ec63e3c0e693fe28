"""Images that cannot be read for a moment: a disk that is unmounted, permissions, an input/output error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bucketline.ingest.images import decode as decode_module
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.sources import local_files
from bucketline.store import Store
from tests.commands import Ran, call
from tests.models import SMALL, png


def pack(source: Path, store: Path, model: Path, *more: object, json: bool = True) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *(["--json"] if json else []), *more)


def num_live(store: Path) -> int:
    return sum(bucket.num_rows for bucket in Store.open(store).buckets())


def put_out_of_reach(path: Path) -> None:
    """Leave the name and take the file: what is below an unmounted disk is listed where its links are, and cannot be opened."""
    path.unlink()
    path.symlink_to(path.parent / "gone" / path.name)


@pytest.mark.parametrize("limit", [("--max-rejects", "0"), ("--max-rejects", "0", "--prune"), ("--prune",), ()])
def test_images_that_cannot_be_read_lose_no_sample(limit: tuple[str, ...], source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).json["packed"] == 14
    for path in sorted(source.rglob("*.png")):
        put_out_of_reach(path)
    ran = pack(source, tmp_path / "s", model, *limit)
    assert ran.code == 1
    assert num_live(tmp_path / "s") == 14
    report = ran.json
    assert report["found"] == report["rejected"] == report["kept_unreadable"] == 14
    assert report["rejected_by_reason"] == {"unreadable file": 14}
    assert (report["dropped"], report["pruned"], report["not_in_source"]) == (0, 0, 0)
    assert len(report["kept_unreadable_ids"]) == 10
    said = pack(source, tmp_path / "s", model, *limit, json=False)
    assert "cannot be read now, but kept in the store: 14 samples\n    a/000.png\n" in said.out


def test_what_is_unreadable_stays_and_what_is_damaged_goes_and_the_summary_names_both(
    source: Path, tmp_path: Path, model: Path
) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    put_out_of_reach(source / "a" / "000.png")
    (source / "b" / "001.png").write_bytes(b"broken")
    report = pack(source, tmp_path / "s", model).json
    assert report["found"] == report["packed"] + report["unchanged"] + report["rejected"] == 14
    assert (report["dropped"], report["dropped_ids"]) == (1, ["b/001.png"])
    assert (report["kept_unreadable"], report["kept_unreadable_ids"]) == (1, ["a/000.png"])
    assert num_live(tmp_path / "s") == 13
    said = pack(source, tmp_path / "t", model, json=False).out
    assert "kept in the store" not in said  # a store that never had it keeps nothing of it


def test_beyond_the_limit_of_rejects_nothing_is_dropped(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    for number in (0, 2, 4):
        (source / "a" / f"00{number}.png").write_bytes(b"broken")
    ran = pack(source, tmp_path / "s", model, "--max-rejects", "2")
    assert (ran.code, ran.json["dropped"], ran.json["kept_beyond_limit"]) == (1, 0, 3)
    assert "--max-rejects allows 2; the other images are packed, and no sample was dropped" in ran.err
    assert num_live(tmp_path / "s") == 14
    ran = pack(source, tmp_path / "s", model, "--max-rejects", "3", json=False).done()
    assert "dropped, because rejected now: 3 samples\n    a/000.png\n" in ran.out
    assert num_live(tmp_path / "s") == 11


def test_captions_that_cannot_be_read_keep_the_sample(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    put_out_of_reach(source / "b" / "001.txt")
    (source / "b" / "003.txt").write_bytes(b"\xff\xff")
    report = pack(source, tmp_path / "s", model).json
    assert report["rejected_by_reason"] == {"unreadable caption": 2}
    assert (report["kept_unreadable_ids"], report["dropped_ids"]) == (["b/001.png"], ["b/003.png"])


def test_an_empty_mount_point_loses_no_sample(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    for path in (source / "b").iterdir():
        path.unlink()
    report = pack(source, tmp_path / "s", model, "--prune").json  # the disk at b/ is unmounted
    assert (report["pruned"], report["not_in_source"]) == (0, 7)
    said = pack(source, tmp_path / "s", model, "--prune", json=False)
    assert f"not pruned: {source / 'b'} is empty, like the mount point of an unmounted disk; remove the folder if" in said.out
    assert num_live(tmp_path / "s") == 14
    for path in (source / "a").iterdir():
        path.unlink()
    ran = pack(source, tmp_path / "s", model, "--prune")
    assert (ran.code, num_live(tmp_path / "s")) == (1, 14)
    assert "has no images" in ran.err
    (source / "b").rmdir()
    (source / "a" / "new.png").write_bytes(png(20, 30))
    assert pack(source, tmp_path / "s", model, "--prune").json["pruned"] == 0  # no folder is in doubt, but that is all of it
    assert pack(source, tmp_path / "s", model, "--prune=1.0").json["pruned"] == 14


def test_a_file_that_shrinks_while_it_is_read_is_unreadable_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(bytes(100))
    monkeypatch.setattr(local_files, "refuse_too_large", lambda *_: os.truncate(tmp_path / "a.png", 50))
    with pytest.raises(RejectedError, match="unreadable file: it has 50 of 100 bytes") as caught:
        local_files.read_file(tmp_path / "a.png")
    assert caught.value.is_passing


def test_an_image_for_which_there_is_no_memory_at_the_moment_keeps_its_sample(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    (source / "a" / "000.png").write_bytes((source / "a" / "002.png").read_bytes())

    def short(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decode_module, "_decode", short)
    report = pack(source, tmp_path / "s", model).json
    assert (report["rejected_by_reason"], report["dropped"], report["kept_unreadable"]) == ({"too large": 1}, 0, 1)
    assert num_live(tmp_path / "s") == 14
