"""Sources in object storage: ids, captions, rejects and account are those of the same files on a disk."""

from __future__ import annotations

import io
import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import SourceError, StoreError, UsageError
from bucketline.ingest.sources import objects as object_file
from bucketline.ingest.sources.dataset_file import open_source, source_as_json, source_from_json
from bucketline.ingest.sources.object_place import stamp_of
from bucketline.ingest.sources.objects import FileWindow, ObjectFolderSource, refuse_overlapping_urls
from bucketline.ingest.sources.source import SourceOptions
from bucketline.store import Store
from bucketline.store.folder import ListedFile
from bucketline.store.remote.objects import ObjectFolder
from tests.commands import call
from tests.kit import everything
from tests.models import SMALL, pack, png, write_images
from tests.object_storage import SECRET, S3Bucket
from tests.unit.ingest.sources.kit import TABLES, write_members, write_table

SAME = (
    *("found", "packed", "unchanged", "rejected", "without_caption", "captions_from", "notes", "captions_without_image"),
    *("rejected_by_reason", "passed_over", "not_in_source", "pruned_ids", "dropped_ids", "payload_bytes"),
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with all that a listing tells apart."""
    folder = tmp_path / "photos"
    write_images(folder, 10)
    (folder / "a" / "000.json").write_text(json.dumps({"caption": ["from json", "and another"]}))
    (folder / "b" / "005.caption").write_text("not used, since there is a .txt")
    (folder / "b" / "cafe\u0301.png").write_bytes(png(24, 30))
    (folder / "b" / "caf\u00e9.TXT").write_text("a normal form")
    (folder / "b" / "alone.txt").write_text("no image")
    (folder / "damaged.png").write_bytes(b"nothing")
    (folder / "big.png").write_bytes(png(30, 34))
    (folder / "big.txt").write_bytes(b"a" * ((1 << 20) + 1))
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.png").write_bytes(b"hidden")
    (folder / "c").mkdir()
    (folder / "c" / "1.png").write_bytes(png(24, 32))
    (folder / "c" / "1.txt").write_text("the table wins")
    (folder / "c" / "metadata.csv").write_text("file_name,text\n1.png,from a table\n")
    return folder


def sent(folder: Path, objects: ObjectFolder) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            objects.write(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """An empty folder in object storage; commands reach it by the environment."""
    if request.param == "memory":
        return ObjectFolder.open(f"memory://{uuid.uuid4().hex}/photos")
    bucket: S3Bucket = request.getfixturevalue("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return bucket.folder("photos")


def rows(store: Path) -> dict[str, list[Any]]:
    """Return all that a store has, but for when the files were written."""
    found = everything(Store.open(store))
    return {
        name: [replace(held, record=replace(held.record, source_mtime_ns=0)) for held in own] for name, own in found.items()
    }


def is_same(source: object, local: object, tmp_path: Path, model: Path, *more: object) -> dict[str, Any]:
    done, here = pack(source, tmp_path / "remote.store", model, *more), pack(local, tmp_path / "local.store", model, *more)
    assert (done.code, done.err.replace(str(source), str(local))) == (here.code, here.err)
    assert {name: done.json[name] for name in SAME} == {name: here.json[name] for name in SAME}
    assert rows(tmp_path / "remote.store") == rows(tmp_path / "local.store")
    for name in ("rejects.jsonl", "without_caption.jsonl"):
        assert (tmp_path / "remote.store" / name).read_bytes() == (tmp_path / "local.store" / name).read_bytes()
    assert SECRET not in done.out + done.err
    account: dict[str, Any] = done.json
    return account


def test_a_folder_is_the_same_as_on_a_disk(objects: ObjectFolder, photos: Path, tmp_path: Path, model: Path) -> None:
    sent(photos, objects)
    first = is_same(objects.url, photos, tmp_path, model)
    assert (first["packed"], first["rejected"]) == (12, 2)
    again = is_same(objects.url, photos, tmp_path, model)
    assert (again["packed"], again["unchanged"]) == (0, 12)
    # a caption, an image of the same size and another one change, and one goes
    for place, data in (("a/002.txt", b"another"), ("c/1.png", png(24, 32, seed=9)), ("b/new.png", png(24, 30, seed=5))):
        objects.write(place, data)
        (photos / place).write_bytes(data)
    objects.remove(["b/001.png", "b/001.txt"])
    for name in ("b/001.png", "b/001.txt"):
        (photos / name).unlink()
    changed = is_same(objects.url, photos, tmp_path, model, "--prune=1")
    assert (changed["packed"], changed["latents_kept"], changed["pruned_ids"]) == (3, 1, ["b/001.png"])
    scans = [call("ingest", "scan", place, *SMALL, "--json").json for place in (objects.url, photos)]
    assert {**scans[0], "seconds": 0} == {**scans[1], "seconds": 0}
    dry = pack(objects.url, tmp_path / "remote.store", model, "--dry-run").json
    assert (dry["unchanged"], dry["new"]) == (12, 0)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_the_same_as_on_a_disk(photos: Path, tmp_path: Path, model: Path, kind: str) -> None:
    rows_of_table = [*((f"a/00{n}.png", f"number {n}") for n in (0, 2, 4)), ("gone.png", "not there")]
    path = write_table(photos / f"some.{kind}", rows_of_table)
    objects = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/photos")
    sent(photos, objects)
    place = f"{objects.url}/some.{kind}"
    done, here = (pack(where, tmp_path / f"{n}.store", model) for n, where in enumerate((place, path)))
    assert (done.json["packed"], done.json["rejected_by_reason"]) == (3, here.json["rejected_by_reason"])
    assert rows(tmp_path / "0.store") == rows(tmp_path / "1.store")
    assert pack(place, tmp_path / "0.store", model).json["unchanged"] == 3


def test_tars_are_the_same_as_on_a_disk(
    objects: ObjectFolder, photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketline.ingest.sources import tar

    monkeypatch.setattr(tar, "STREAM_PART_BYTES", 1 << 12)  # several parts
    tars = tmp_path / "tars"
    for n, folder in enumerate("ab"):
        members = [(path.name, path.read_bytes()) for path in sorted((photos / folder).iterdir())]
        write_members(tars / f"{n:03d}.tar", members)
    sent(tars, objects)
    pattern = "{000..001}.tar"
    account = is_same(f"{objects.url}/{pattern}", f"{tars}/{pattern}", tmp_path, model)
    assert account["packed"] == 11
    assert is_same(f"{objects.url}/{pattern}", f"{tars}/{pattern}", tmp_path, model)["unchanged"] == 11


def test_other_ranks_get_the_same_source() -> None:
    options = SourceOptions(endpoint="http://127.0.0.1:1", store_option=("region=x",))
    for url in ("s3://bucket/photos", "s3://bucket/photos/some.csv", "s3://bucket/tars/{0..3}.tar"):
        source = open_source(url, options)
        assert source_from_json(json.loads(json.dumps(source_as_json(source)))) == source


def test_an_object_that_is_replaced_within_a_second_has_another_stamp() -> None:
    one = ListedFile("a.png", 9, 1_600_000_000.0, '"an etag"')
    assert stamp_of(one) == stamp_of(replace(one, modified_s=1_600_000_000.123, e_tag="an etag"))  # as a header has it
    assert stamp_of(one) != stamp_of(replace(one, e_tag='"another"'))
    assert stamp_of(replace(one, e_tag=None)).mtime_ns == 1_600_000_000_000_000_000


def test_storage_out_of_reach_ends_the_run_and_rejects_nothing(
    photos: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/photos")
    sent(photos, objects)
    fetch = ObjectFolder.fetch

    def failing(self: ObjectFolder, name: str, *more: Any) -> Any:
        if name.endswith("006.png"):
            raise StoreError(f"cannot read {self.place(name)}: timed out")
        return fetch(self, name, *more)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "fetch", failing)
        done = pack(objects.url, tmp_path / "s", model)
    assert (done.code, "timed out" in done.err, "what was packed is kept" in done.err) == (1, True, True)
    assert pack(objects.url, tmp_path / "s", model).json["rejected"] == 2


def test_an_object_is_read_in_parts_as_a_file() -> None:
    objects, data = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/x"), bytes(range(256)) * 40
    objects.write("a", data)
    for ahead in (0, 3):
        with object_file.ObjectFile(objects, "a", len(data), part_bytes=1000, parts_ahead=ahead) as raw:
            file = io.BufferedReader(raw, 300)
            assert file.read() == data
            for at, count in ((5000, 3000), (10, 5), (len(data) - 3, 10), (len(data), 1), (999, 2)):
                file.seek(at)
                assert file.read(count) == data[at : at + count]
            assert file.seek(-4, io.SEEK_END) == len(data) - 4


def test_a_table_may_have_urls_and_backslashes(objects: ObjectFolder) -> None:
    names = [f"{objects.url}/a/0.png", "a\\1.png"]
    objects.write("metadata.jsonl", "".join(json.dumps({"file_name": name, "text": "x"}) + "\n" for name in names).encode())
    for name in ("a/0.png", "a/1.png"):
        objects.write(name, png(20, 20))
    for place in (objects.url, f"{objects.url}/metadata.jsonl"):
        listing = open_source(place).listing()
        assert [(item.id, item.captions) for item in listing.items] == [("a/0.png", ("x",)), ("a/1.png", ("x",))]


def test_what_cannot_be_is_refused(photos: Path, tmp_path: Path, model: Path) -> None:
    empty = f"memory://{uuid.uuid4().hex}/photos"
    for place, said in (
        (empty, "has no images; there is nothing below it"),
        (f"{empty}/*.tar", "none of 0 objects"),
        (f"{empty}/000.tar", "is missing"),
        (f"{empty}/a.csv", "is missing"),
    ):
        with pytest.raises(SourceError, match=said):
            open_source(place).listing()
    for place, said in (("s3a://bucket/photos", "did you mean s3://"), ("s3:/bucket/photos", "one slash")):
        with pytest.raises(UsageError, match=said):
            open_source(place)
    for secret in ("s3://me:hidden@bucket/{0..1}.tar", "s3://bucket/a.tar?sig=hidden", "s3://me:hidden@bucket/*.tar"):
        with pytest.raises(UsageError) as refused:
            open_source(secret).listing()
        assert "hidden" not in str(refused.value)
    objects = ObjectFolder.open(empty)
    objects.write("run/status.json", json.dumps({"state": "over", "step": 1, "reason": ""}).encode())
    objects.write("run/image.png", png(20, 20))
    with pytest.raises(SourceError, match="has a training run"):
        ObjectFolderSource(url=empty).listing()
    for store in ("s3://bucket/photos", "s3://bucket/photos/a.store", "s3://bucket"):
        with pytest.raises(UsageError, match="one is inside the other"):
            refuse_overlapping_urls("s3://bucket/photos", store)
    refuse_overlapping_urls("s3://bucket/photos", "s3://bucket/photos.store")
    call("ingest", "pack", empty, f"{empty}/a.store", "--model", model, *SMALL).fails("one is inside the other", code=2)


def test_a_window_reads_and_seeks_like_the_bytes_of_its_range(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    inner = io.BytesIO(bytes(range(10, 60)))
    with FileWindow((tmp_path / "f").open("rb"), 10, 50) as window:
        for to, whence, num_bytes in ((0, 0, 7), (5, 1, 10), (-3, 2, 9), (50, 0, 4), (80, 0, 4), (49, 0, 0), (49, 0, 1)):
            assert window.seek(to, whence) == inner.seek(to, whence)
            assert window.read(num_bytes) == inner.read(num_bytes)
            assert window.tell() == inner.tell()


def test_no_position_before_the_window(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    with (
        FileWindow((tmp_path / "f").open("rb"), 5, 5) as window,
        pytest.raises(ValueError, match=r"^-1 is not a position in a file$"),
    ):
        window.seek(-1)
