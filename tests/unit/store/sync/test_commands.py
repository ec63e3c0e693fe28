"""The store's commands on URLs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bucketline.store import Store
from tests.commands import call
from tests.object_storage import SECRET, S3Bucket

ID = "first/train/64x64/3.png"


@pytest.fixture
def url(store: Store, s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The store of two shards, pushed."""
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    shutil.copytree(store.path, tmp_path / "own.store")
    url = s3.url("photos.store")
    assert call("store", "push", tmp_path / "own.store", url).code == 0
    return url


def test_a_store_is_read_by_its_url(url: str, tmp_path: Path) -> None:
    own = tmp_path / "own.store"
    for command in (["info"], ["ls"], ["ls", "--json"], ["ls", "--match", "*/val/*"], ["verify"]):
        here, there = (call("store", command[0], place, *command[1:]) for place in (own, url))
        assert (there.code, there.err) == (0, "")
        if command != ["info"]:  # which says how much it is on the disk
            assert there.out == here.out
    report = call("store", "info", url, "--json").json
    assert (report["samples"], report["lost_shards"]) == (53, [])
    assert report["disk_bytes"] > sum(shard.lmdb.num_bytes for shard in Store.open(own).manifest.shards)
    for place, name in ((own, "here"), (url, "there")):
        assert call("store", "get", place, ID, "-o", tmp_path / f"{name}.safetensors").code == 0
        assert call("store", "export", place, tmp_path / name, "--format", "safetensors", "--split", "val").code == 0
    assert (tmp_path / "here.safetensors").read_bytes() == (tmp_path / "there.safetensors").read_bytes()
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")} for name in ("here", "there")]
    assert files[0] == files[1]
    assert len(files[0]) == 6


def test_a_store_is_changed_by_its_url(url: str, tmp_path: Path) -> None:
    done = call("store", "drop", url, ID)
    assert (done.code, done.out, done.err) == (0, f"{url}: 1 sample dropped, 52 stay; generation 3\n", "")
    assert call("store", "get", url, ID, "-o", tmp_path / "x").code == 1
    done = call("store", "compact", url).done()
    assert f"`store compact {url} --gc` removes them later" in done.out
    listed = call("store", "restore", url)
    assert [line.partition(",")[0] for line in listed.out.splitlines()] == [
        "generation 4: 52 samples",
        "generation 3: 52 samples",
        "generation 2: 53 samples",
    ]
    assert call("store", "restore", url, "2").out == f"{url}: generation 2 restored, 53 samples (there were 52); generation 5\n"
    assert call("store", "compact", url, "--gc", "--older-than", "0s", "--json").json["collected"]["generations"] == [
        2,
        3,
        4,
        5,
    ]


def test_what_is_lost_or_damaged_shows(url: str, s3: S3Bucket) -> None:
    objects = s3.folder("photos.store")
    objects.write("shards/g1.lmdb", objects.read("shards/g1.lmdb")[:-1])
    call("store", "info", url).fails("lost: shard g1 (14 samples): g1.lmdb has ", f"`store repair {url}`")
    faults = call("store", "verify", url, "--json")
    assert faults.code == 1
    assert [fault["shard"] for fault in faults.json["corrupt"]] == ["g1"]
    repaired = call("store", "repair", url).done()
    assert f"{url}: 14 samples dropped, 39 stay; generation 3" in repaired.out
    assert call("store", "verify", url).code == 1  # the older generation still lists it
    assert call("store", "compact", url, "--gc", "--older-than", "0s").code == 0
    assert call("store", "verify", url).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "s3:/bucket/a.store"], "one slash after the scheme; write s3://bucket/a.store"),
        (["ls", "gcs://bucket/a.store"], "did you mean gs://?"),
        (["drop", "https://me:hidden@host/a.store?key=hidden", "a"], "has a query"),
        (["info", "s3://bucket/a.store", "--store-option", "aws_secret_access_key=hidden"], "is a secret"),
        (["info", "s3://bucket/a.store", "--endpoint", "localhost"], "is not a URL such as"),
        (["info", "s3://bucket/a.store", "--cache-bytes", "many"], "--cache-bytes is 'many'"),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_words(arguments: list[str], message: str) -> None:
    done = call("store", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "hidden" not in done.err.replace("secret_access_key", "")


def test_a_web_server_cannot_be_written(tmp_path: Path, store: Store) -> None:
    done = call("store", "push", store.path, "http://me:hidden@127.0.0.1:9/a.store")
    assert done.code == 1
    assert "hidden" not in done.err + done.out


def test_nothing_that_a_command_writes_has_a_secret(url: str, tmp_path: Path) -> None:
    done = [call("store", "info", url, "--json"), call("store", "ls", url), call("store", "verify", url)]
    assert not any(SECRET in ran.out + ran.err for ran in done)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes()


def test_a_store_on_a_web_server_is_read(store: Store, tmp_path: Path) -> None:
    from bucketline.bench.fixtures.range_server import RangeServer

    assert (
        call("store", "push", shutil.copytree(store.path, tmp_path / "own.store"), f"file://{tmp_path}/www/a.store").code == 0
    )
    with RangeServer(tmp_path / "www") as server:
        url = f"{server.url}/a.store"
        info = call("store", "info", url, "--cache", tmp_path / "cache", "--json")
        assert (info.json["samples"], info.json["lost_shards"]) == (53, [])
        assert call("store", "verify", url).code == 0
        done = call("store", "pull", url.replace("://", "://me:hidden@"), tmp_path / "pulled.store")
        assert (done.code, done.err) == (0, "")
        assert "hidden" not in done.out
        (tmp_path / "www" / "a.store" / "shards" / "g1.index").unlink()
        assert "g1.index is missing" in call("store", "info", url, "--cache", tmp_path / "cache").err
