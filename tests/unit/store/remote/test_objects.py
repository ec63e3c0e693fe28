"""A folder in object storage, its generations and options: the same in memory, in a local folder and on an S3 server."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.files.paths import redacted
from bucketline.ingest.commands.pack import Pack
from bucketline.loader.config import LoaderConfig
from bucketline.options import parse_options
from bucketline.store import Store
from bucketline.store.commands.change import Drop
from bucketline.store.commands.look import Info
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.manifest import Manifest, dump_manifest, sealed
from bucketline.store.remote import objects
from bucketline.store.remote.generations import (
    commit,
    complete_first,
    find_newest,
    listed_generations,
    newest_generation,
    read_generation,
    refuse_without_put_if_absent,
)
from bucketline.store.remote.objects import ObjectFolder, is_url
from bucketline.store.remote.urls import RemoteOptions, parse_url, refuse_misspelt
from tests.commands import call
from tests.fault.apart import How, apart
from tests.object_storage import SECRET, S3Bucket, in_memory


@pytest.fixture(params=["memory", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectFolder:
    if request.param == "memory":
        return in_memory()
    if request.param == "file":
        return ObjectFolder.open(f"file://{tmp_path}/not%20yet/a.store")
    bucket: S3Bucket = request.getfixturevalue("s3")
    return bucket.folder("some where/a.store")


def test_large_objects_are_written_in_parts(folder: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)  # the least that S3 takes
    assert folder.size("shards/a.lmdb") is None
    large = os.urandom(33 << 20)
    (tmp_path / "large").write_bytes(large)
    folder.write("shards/a.lmdb", tmp_path / "large")
    folder.write("shards/b.lmdb", iter([large[: 9 << 20], large[9 << 20 : 10 << 20], large[10 << 20 :]]), len(large))
    assert folder.read("shards/a.lmdb") == folder.read("shards/b.lmdb") == large
    assert bytes(folder.read_range("shards/a.lmdb", 5, 1 << 20)) == large[5 : 1 << 20]
    assert folder.size("shards/a.lmdb") == len(large)


def test_what_raises_while_it_is_sent_leaves_nothing(folder: ObjectFolder) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(9 << 20)
        raise StoreError("the digest differs")

    with pytest.raises(StoreError, match="the digest differs"):
        folder.write("shards/a.lmdb", parts())
    assert list(folder.names()) == []


def test_a_store_that_does_not_answer_is_an_error_within_the_deadline() -> None:
    folder = ObjectFolder.open("s3://photos/a.store", RemoteOptions(endpoint="http://127.0.0.1:9", deadline_s=0.2))
    with pytest.raises(StoreError, match=r"cannot read s3://photos/a\.store/manifest\.json: ") as raised:
        folder.read("manifest.json")
    assert "Debug" not in str(raised.value)


def test_a_bucket_that_is_not_there_is_named(s3: S3Bucket) -> None:
    folder = ObjectFolder.open("s3://no-such-bucket/a.store", s3.options)
    with pytest.raises(MissingObjectError, match="there is no bucket no-such-bucket; create it"):
        folder.read("manifest.json")
    with pytest.raises(MissingObjectError, match="there is no bucket no-such-bucket"):
        folder.write("manifest.json", b"{}")


def test_a_token_file_with_a_line_break_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client panics: a `BaseException` that `except Exception` does not catch."""
    (tmp_path / "token").write_text("Bearer abc\n", encoding="ascii")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/keys")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    folder = ObjectFolder.open("s3://bucket/a.store", RemoteOptions(endpoint="http://127.0.0.1:9", deadline_s=5.0))
    with pytest.raises(StoreError, match=r"cannot read s3://bucket/a\.store/manifest\.json: .*token files are one line"):
        folder.read("manifest.json")


def test_secrets_are_in_no_message_and_no_pickle(s3: S3Bucket) -> None:
    folder = ObjectFolder.open("http://me:hidden@127.0.0.1:9/a.store", RemoteOptions(deadline_s=0.2))
    assert folder.url == "http://127.0.0.1:9/a.store"
    with pytest.raises(StoreError, match="Connection refused") as raised:
        folder.read("manifest.json")
    assert "hidden" not in f"{raised.value!r}{raised.value}{folder!r}{folder.options!r}"
    assert b"hidden" not in pickle.dumps(folder)
    other = s3.folder("a.store")
    other.write("x", b"1")
    assert SECRET.encode() not in pickle.dumps(other)
    assert pickle.loads(pickle.dumps(other)).read("x") == b"1"


def test_a_web_server_is_read_only() -> None:
    folder = ObjectFolder.open("https://example.org/a.store")
    assert folder.is_read_only
    changes: tuple[Callable[[], object], ...] = (
        *(lambda: folder.write("x", b""), lambda: folder.create("x", b"")),
        lambda: folder.remove(["x"]),
    )
    for change in changes:
        with pytest.raises(StoreError, match="web servers are read only"):
            change()
    with pytest.raises(StoreError, match="cannot be listed"):
        list(folder.names())


def test_a_forked_child_is_refused_rather_than_left_waiting(tmp_path: Path) -> None:
    folder = ObjectFolder.open(f"file://{tmp_path}/a.store")
    folder.write("x", b"1")
    ended = apart(lambda: len(folder.read("x")))
    assert (ended.how, "was forked from" in ended.said) == (How.REFUSED, True), ended.said


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/a.store", "s4:// is not a kind of store that Bucketline knows"),
        ("gcs://bucket/a.store", "did you mean gs://?"),
        ("s3a://bucket/a.store", "did you mean s3://?"),
        ("s3:///a.store", "names no bucket"),
        ("https:///a.store", "names no host"),
        ("file://host/a.store", "is not the URL of a folder on this machine"),
        ("s3://me:hidden@bucket/a.store", "has a user or password; set credentials in the environment"),
        ("https://host/a.store?token=hidden", "has a query"),
        ("s3://bucket/../a.store", "has . or .. in its path"),
        ("https://host:port/a.store", "is not a URL"),
    ],
)
def test_a_url_that_cannot_be_a_stores_is_refused_in_words(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        ObjectFolder.open(url)
    assert "hidden" not in str(raised.value)


PASSWORDS = (
    *("https:/me:hidden@host/a", "HTTPS:/me:hidden@host/a", "https:///me:hidden@host/a", "s4:/me:hidden@host/a"),
    *("https://me:hid/hidden@host/a", "https://me:hid?hidden@host/a", "https://me:hid#hidden@host/a"),
    *("https://me:hidden/x@host/a", "https://me:hidden?x@host/a", "https://me:hidden#x@host/a", "https://me:hidden/host/a"),
    *("https:me:hidden@host/a", "//me:hidden@host/a", "me:hidden@host/a", "https//me:hidden@host/a"),
    *("https;//me:hidden@host/a", "https ://me:hidden@host/a", "https:\\\\me:hidden@host/a", "https://me:hidden\uff20host/a"),
    *("https://me:hidden@host:port/a", "https://me:hidden@[::1/a", "https://me:hid hidden@host/a"),
    *("https://me:hid'hidden@host/a", 'https://me:hid"hidden@host/a', "https://me:hid\thidden@host/a"),
    *("https://me:hi::hidden@host/a", "https://me:hidden@", "https://:hidden@host/a?q", "s3://me:hidden@bucket/a"),
    *("https/me:hidden@host/a", "https://me:hidden@host/../a"),
)


@pytest.mark.parametrize("url", PASSWORDS)
def test_no_form_of_a_url_prints_its_password(url: str) -> None:
    ran = call("store", "info", url, "--deadline", 0.1)
    assert ran.code in (1, 2)
    assert ran.err.startswith("error: ")
    assert "hidden" not in ran.err + ran.out
    assert "hidden" not in redacted(url)


@pytest.mark.parametrize(
    "text",
    [
        *("/data/a:b@c/x.png", "photos/a:b@2x.png", "photos@2x.png", "https://host:80/a@b/c.tar", "https://[::1]:80/a"),
        *("a:b/c", "s3://bucket/a@b", "C:x", "https://[::1]/a@b", "file:///data/me@home/a", "memory://a"),
    ],
)
def test_what_has_no_password_is_shown_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": ("region",)}, "is not KEY=VALUE"),
        ({"options": ("aws_secret_access_key=hidden",)}, "is a secret"),
        ({"options": ("Access_Key_Id=hidden",)}, "is a secret"),
        ({"options": ("sas_token=hidden",)}, "is a secret"),
        ({"endpoint": "localhost:9000"}, "is not a URL such as"),
        ({"endpoint": "http://me:hidden@localhost:9000"}, "has a user or password"),
        ({"deadline_s": 0.0}, "expected more than 0"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        RemoteOptions(**options)  # type: ignore[arg-type]
    assert "hidden" not in str(raised.value)


def test_an_option_that_the_client_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot use s3://bucket/a\.store: .*nonsense"):
        ObjectFolder.open("s3://bucket/a.store", RemoteOptions(options=("nonsense=1",)))


def test_paths_and_urls_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_url("gs://bucket/a.store")
    assert is_url("s4://bucket")
    for path in ("photos.store", "/data/s3:/photos", "a:b", "", tmp_path):
        assert not is_url(path)
    with pytest.raises(UsageError, match="one slash after the scheme; write s3://bucket/a"):
        refuse_misspelt("s3:/bucket/a")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    refuse_misspelt("s3:/bucket")
    refuse_misspelt("photos.store")
    address = parse_url("file:///data/my%20photos.store/")
    assert (address.kind, address.path) == ("file", "/data/my photos.store")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({}, {"url": "s3://bucket/a.store//"}, True),
        ({}, {"deadline_s": 5.0, "options": ("skip_signature=true",)}, True),
        ({}, {"url": "s3://bucket/b.store"}, False),
        ({}, {"endpoint": "http://127.0.0.1:9000"}, False),
        ({"url": "http://host/a"}, {"url": "https://host/a"}, False),
        ({"url": "http://me:hidden@host/a"}, {"url": "http://host/a"}, True),
    ],
)
def test_equal_places_have_equal_identities(one: dict[str, Any], other: dict[str, Any], *, is_same: bool) -> None:
    def identity(url: str = "s3://bucket/a.store", **options: Any) -> str:
        return ObjectFolder(url, RemoteOptions(**options)).identity

    assert (identity(**one) == identity(**other)) is is_same
    assert "hidden" not in identity(**one)


def numbered(manifest: Manifest, generation: int) -> tuple[Manifest, bytes]:
    other = sealed(dataclasses.replace(manifest, generation=generation))
    return other, dump_manifest(other)


def test_readers_find_what_was_committed_whatever_the_hint_says(folder: ObjectFolder, store: Store) -> None:
    assert find_newest(folder) is None
    with pytest.raises(MissingObjectError, match=r"is not a store: it has no manifest\.json"):
        newest_generation(folder)
    third, data = numbered(store.manifest, 3)
    assert commit(folder, 3, data, is_first=True)
    assert not commit(folder, 3, numbered(store.manifest, 4)[1], is_first=True)
    fourth, after = numbered(store.manifest, 4)
    assert commit(folder, 4, after, is_first=False)
    fifth, last = numbered(store.manifest, 5)
    folder.create("generations/5.json", last)  # the writer died before it wrote the hint
    assert newest_generation(folder) == fifth
    folder.write("manifest.json", data)  # a slow writer's hint comes late
    assert newest_generation(folder) == fifth
    assert read_generation(folder, 4, fifth) == fourth
    assert read_generation(folder, 5, fifth) == fifth
    assert read_generation(folder, 3, fifth) == third
    with pytest.raises(StoreError, match="has no generation 2 any more"):
        read_generation(folder, 2, fifth)
    assert list(listed_generations(folder)) == [3, 4, 5]


def test_an_interrupted_first_commit_is_completed(store: Store) -> None:
    folder = in_memory()
    third, data = numbered(store.manifest, 3)
    folder.write("manifest.json", data)
    assert newest_generation(folder) == third
    complete_first(folder, newest_generation(folder))
    assert folder.read("generations/3.json") == data
    complete_first(folder, newest_generation(folder))
    folder.remove(["generations/3.json"])
    folder.write("generations/3.json", numbered(store.manifest, 2)[1])
    assert not commit(folder, 3, data, is_first=False)


def test_a_foreign_generation_is_an_error(store: Store) -> None:
    folder = in_memory()
    assert commit(folder, 1, numbered(store.manifest, 1)[1], is_first=True)
    folder.write("generations/2.json", numbered(dataclasses.replace(store.manifest, store_id="0" * 32), 2)[1])
    with pytest.raises(CorruptError, match="belongs to another store or generation"):
        newest_generation(folder)
    folder.write("generations/2.json", b"{}")
    with pytest.raises(CorruptError, match=r"generations/2\.json is damaged"):
        newest_generation(folder)


def test_what_an_earlier_store_left_at_the_place_is_named(store: Store) -> None:
    folder = in_memory()
    folder.write("generations/1.json", numbered(dataclasses.replace(store.manifest, store_id="0" * 32), 1)[1])
    with pytest.raises(StoreError, match=r"generations/1\.json belongs to another store, or an earlier one at this place"):
        commit(folder, 1, numbered(store.manifest, 1)[1], is_first=True)
    assert folder.size("manifest.json") is None


def test_put_if_absent_is_probed_and_leaves_nothing(folder: ObjectFolder) -> None:
    refuse_without_put_if_absent(folder)
    assert list(folder.names()) == []


def test_an_answer_damaged_once_is_read_again(folder: ObjectFolder, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, data = numbered(store.manifest, 1)
    assert commit(folder, 1, data, is_first=True)
    read, bad = ObjectFolder.read, [data[:100], bytes(len(data))]

    def read_badly(own: ObjectFolder, name: str, *args: int) -> bytes:
        found = read(own, name, *args)
        return bad.pop() if bad else found

    monkeypatch.setattr(ObjectFolder, "read", read_badly)
    with pytest.raises(CorruptError, match=r"manifest\.json is damaged"):  # twice
        newest_generation(folder)
    bad.append(data[:100])
    assert newest_generation(folder) == manifest
    assert not bad


STORAGE = ("endpoint", "store_option", "deadline", "cache", "cache_bytes")
NAMES = {name: f"BUCKETLINE_{name.upper()}" for name in STORAGE}


def test_an_option_may_be_given_several_times_wherever_it_stands() -> None:
    asked = parse_options(Info, ["--store-option", "a=1", "s3://b/s", "--store_option=region=x y", "--json"], "info")
    assert (asked.store_option, asked.store, asked.json) == (("a=1", "region=x y"), "s3://b/s", True)
    dropped = parse_options(Drop, ["s3://b/s", "--store-option", "a=1", "--", "-id"], "drop")
    assert (dropped.store_option, dropped.ids) == (("a=1",), ("-id",))
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        parse_options(Info, ["s3://b/s", "--store-option", "region"], "info")
    with pytest.raises(UsageError, match="--store-option has no value"):
        parse_options(Info, ["s3://b/s", "--store-option"], "info")


def test_what_is_left_out_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    assert RemoteOptions() == RemoteOptions(deadline_s=60.0)
    monkeypatch.setenv(NAMES["endpoint"], "http://127.0.0.1:9000")
    monkeypatch.setenv(NAMES["store_option"], "region=eu-central-1 'skip_signature=true'")
    monkeypatch.setenv(NAMES["deadline"], "5")
    monkeypatch.setenv(NAMES["cache_bytes"], "2GiB")
    usual = RemoteOptions(
        endpoint="http://127.0.0.1:9000",
        options=("region=eu-central-1", "skip_signature=true"),
        deadline_s=5.0,
        cache_bytes=2 << 30,
    )
    pack = parse_options(Pack, ["photos", "s3://b/s", "--model", "m"], "pack")
    for found in (
        RemoteOptions(),
        parse_options(Info, ["s3://b/s"], "info").remote(),
        pack.remote(),
        LoaderConfig(batch_size=1).remote(),
    ):
        assert found == usual
    assert replace(usual, cache=Path("c")).options == usual.options  # once, also in a copy
    asked = "s3://b/s --endpoint http://other:1 --store-option region=x --deadline 7 --cache-bytes 1GiB"
    given = parse_options(Info, asked.split(), "info").remote()
    assert (given.endpoint, given.deadline_s, given.cache_bytes) == ("http://other:1", 7.0, 1 << 30)
    assert given.client_options() == {"region": "x", "skip_signature": "true"}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("deadline", "soon", "BUCKETLINE_DEADLINE is 'soon', expected seconds above 0"),
        ("deadline", "0", "BUCKETLINE_DEADLINE is '0'"),
        ("cache_bytes", "much", "BUCKETLINE_CACHE_BYTES is 'much', expected a number of bytes"),
        ("endpoint", "minio", "minio is not a URL such as"),
        ("store_option", "region", "is not KEY=VALUE"),
        ("store_option", "secret_key=x", "is a secret"),
        ("store_option", "a='", "BUCKETLINE_STORE_OPTION"),
    ],
)
def test_a_wrong_value_is_refused_with_its_variable(
    option: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMES[option], value)
    with pytest.raises(UsageError, match=words):
        RemoteOptions()
