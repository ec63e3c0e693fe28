"""A store's folder in object storage: the same behaviour in memory, in a local folder and on an S3 server."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bucketline.errors import StoreError, UsageError
from bucketline.files.redact import redacted
from bucketline.store.folder import ExistsError, MissingObjectError
from bucketline.store.remote import objects
from bucketline.store.remote.objects import ObjectFolder, RemoteOptions, is_url
from bucketline.store.remote.urls import parse_url, refuse_misspelt
from tests.commands import call
from tests.object_storage import SECRET, S3Bucket, in_memory


@pytest.fixture(params=["memory", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectFolder:
    if request.param == "memory":
        return in_memory()
    if request.param == "file":
        return ObjectFolder.open(f"file://{tmp_path}/not%20yet/a.store")
    bucket: S3Bucket = request.getfixturevalue("s3")
    return bucket.folder("some where/a.store")


def test_large_objects_are_written_in_parts_from_a_file_or_from_pieces(
    folder: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    changes: list[Callable[[], object]] = [
        lambda: folder.write("x", b""),
        lambda: folder.create("x", b""),
        lambda: folder.remove(["x"]),
    ]
    for change in changes:
        with pytest.raises(StoreError, match="web servers are read only"):
            change()
    with pytest.raises(StoreError, match="cannot be listed"):
        list(folder.names())


def test_a_forked_child_is_refused_rather_than_left_waiting(tmp_path: Path) -> None:
    folder = ObjectFolder.open(f"file://{tmp_path}/a.store")
    folder.write("x", b"1")
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            folder.read("x")
        except StoreError as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    with os.fdopen(reads, "rb") as said:
        assert b"was forked from" in said.read()


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
    with pytest.raises(UsageError) as raised:
        ObjectFolder.open(url)
    assert message in str(raised.value)
    assert "hidden" not in str(raised.value)


PASSWORDS = (
    *("https:/me:hidden@host/a", "HTTPS:/me:hidden@host/a", "https:///me:hidden@host/a", "s4:/me:hidden@host/a"),
    *("https://me:hid/hidden@host/a", "https://me:hid?hidden@host/a", "https://me:hid#hidden@host/a"),
    *("https://me:hidden/x@host/a", "https://me:hidden?x@host/a", "https://me:hidden#x@host/a", "https://me:hidden/host/a"),
    *(
        "https:me:hidden@host/a",
        "//me:hidden@host/a",
        "me:hidden@host/a",
        "https//me:hidden@host/a",
        "https;//me:hidden@host/a",
    ),
    *(
        "https ://me:hidden@host/a",
        "https:\\\\me:hidden@host/a",
        "https://me:hidden\uff20host/a",
        "https://me:hidden@host:port/a",
    ),
    *(
        "https://me:hidden@[::1/a",
        "https://me:hid hidden@host/a",
        "https://me:hid'hidden@host/a",
        'https://me:hid"hidden@host/a',
    ),
    *("https://me:hid\thidden@host/a", "https://me:hi::hidden@host/a", "https://me:hidden@", "https://:hidden@host/a?q"),
    *("s3://me:hidden@bucket/a", "https/me:hidden@host/a", "https://me:hidden@host/../a"),
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
        *(
            "/data/a:b@c/x.png",
            "photos/a:b@2x.png",
            "photos@2x.png",
            "https://host:80/a@b/c.tar",
            "https://[::1]:80/a",
            "a:b/c",
        ),
        *("s3://bucket/a@b", "C:x", "https://[::1]/a@b", "file:///data/me@home/a", "memory://a"),
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
    with pytest.raises(UsageError) as raised:
        RemoteOptions(**options)  # type: ignore[arg-type]
    assert message in str(raised.value)
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


class _Recorder(BaseHTTPRequestHandler):
    """Notes conditions of writes, which it refuses: another writer's object is there."""

    conditions: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        names = ("if-none-match", "x-goog-if-generation-match")
        self.conditions.extend(f"{name}: {self.headers[name]}" for name in names if name in self.headers)
        self._answer(412, b"")

    def do_GET(self) -> None:
        self._answer(200, b"theirs")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("url", "condition"),
    [
        ("s3://bucket/a.store", "if-none-match: *"),
        ("az://container/a.store", "if-none-match: *"),
        ("gs://bucket/a.store", "x-goog-if-generation-match: 0"),
    ],
)
def test_each_kind_of_storage_is_sent_its_condition(url: str, condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _Recorder.conditions.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Recorder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
            monkeypatch.setenv(name, "example")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
        try:
            folder = ObjectFolder.open(url, RemoteOptions(endpoint=endpoint, deadline_s=10))
            with pytest.raises(ExistsError):
                folder.create("generations/1.json", b"ours")
        finally:
            server.shutdown()
            thread.join()
    assert _Recorder.conditions == [condition]
