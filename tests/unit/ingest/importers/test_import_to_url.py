"""`ingest import KIND SOURCE URL`: shards are made in a folder, sent as they are sealed, and committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bucketline.store import Store
from bucketline.store.change import commit as commit_module
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from bucketline.store.transfer import files
from bucketline.store.verify.verify import verify_folder
from tests import object_storage
from tests.commands import Ran, call
from tests.kit import everything
from tests.unit.ingest.importers.known import Known, run_import
from tests.unit.ingest.importers.writers import kohya


@pytest.fixture
def own(known: Callable[[str], Known]) -> Known:
    return known("sdxl")


@pytest.fixture
def source(own: Known, tmp_path: Path) -> Path:
    return kohya(tmp_path / "cache", own)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "bucketline"))
    return object_storage.in_memory()


def to_url(source: Path, place: ObjectFolder, own: Known, *more: object) -> Ran:
    return call("ingest", "import", "kohya", source, place.url, "--model", own.model, "--json", *more)


def sent(place: ObjectFolder) -> set[str]:
    return {file.name for file in place.names("shards") if file.name.endswith(".lmdb")}


def test_an_import_into_a_url_is_the_same_as_on_a_disk(own: Known, source: Path, place: ObjectFolder, tmp_path: Path) -> None:
    min(source.rglob("*_sdxl.npz")).write_bytes(b"damaged")
    dry = to_url(source, place, own, "--dry-run")
    assert (dry.code, dry.json["imported"], dry.json["rejected"]) == (0, 5, 1), dry.err
    assert newest_generation_or_none(place) is None
    done = to_url(source, place, own).done()
    here = run_import("kohya", source, tmp_path / "here.store", own)
    same = ("found", "imported", "unchanged", "rejected", "generation", "buckets")
    assert {name: done.json[name] for name in same} == {name: here.json[name] for name in same}
    pull(place, tmp_path / "pulled.store")
    pulled, local = Store.open(tmp_path / "pulled.store"), Store.open(tmp_path / "here.store")
    assert everything(pulled) == everything(local)
    assert place.read("rejects.jsonl") == (tmp_path / "here.store" / "rejects.jsonl").read_bytes()
    assert to_url(source, place, own, "--dry-run").json["disk_bytes"] == done.json["disk_bytes"]
    again = to_url(source, place, own).json
    assert (again["imported"], again["unchanged"], again["rejected"], again["generation"]) == (0, 5, 1, 1)
    (work,) = (tmp_path / "bucketline-pack").iterdir()
    assert not list((work / "shards").iterdir())  # what was committed has left
    assert not verify_folder(place, lambda _: None, 1).corrupt


def newest_generation_or_none(place: ObjectFolder) -> int | None:
    return None if place.size("manifest.json") is None else newest_generation(place).generation


def test_an_interrupted_import_is_continued_and_sends_nothing_again(
    own: Known, source: Path, place: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # it ends after its shards were sent, before the commit
        patched.setattr(commit_module, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            to_url(source, place, own)
    uploaded = sent(place)
    assert len(uploaded) == 1
    assert newest_generation_or_none(place) is None
    with monkeypatch.context() as patched:
        patched.setattr(files.Uploader, "_parts", lambda *_: 1 / 0)
        again = to_url(source, place, own)
    assert again.code == 0, again.err
    assert (again.json["imported"], again.json["unchanged"], again.json["generation"] > 0) == (0, 6, True)
    assert sent(place) == uploaded
    assert newest_generation(place).samples == 6


def test_the_next_import_adds_what_is_new(own: Known, source: Path, place: ObjectFolder, tmp_path: Path) -> None:
    later = source / "cats"
    later.rename(tmp_path / "cats")
    assert to_url(source, place, own).json["imported"] == 3
    (tmp_path / "cats").rename(later)
    done = to_url(source, place, own, "--work", tmp_path / "another machine").json
    assert (done["imported"], done["unchanged"], done["generation"]) == (3, 3, 2)
    assert newest_generation(place).samples == 6
    call("ingest", "import", "kohya", source, tmp_path / "s.store", "--work", tmp_path / "w", "--vae", "sdxl").fails(code=2)
