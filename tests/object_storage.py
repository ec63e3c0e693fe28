"""Object storage for the tests: moto's S3 server on the loopback interface, and folders in memory."""

from __future__ import annotations

import logging
import os
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.verify.verify import verify

SECRET = "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY"  # must appear nowhere
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


@dataclass(frozen=True, kw_only=True)
class S3Bucket:
    """A bucket on the test's server, and the environment that a command needs to reach it."""

    endpoint: str
    bucket: str

    @property
    def options(self) -> RemoteOptions:
        return RemoteOptions(endpoint=self.endpoint, deadline_s=10)

    @property
    def arguments(self) -> list[str]:
        return ["--endpoint", self.endpoint]

    def url(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"

    def folder(self, path: str) -> ObjectFolder:
        return ObjectFolder.open(self.url(path), self.options)


class _Atomic:
    """The server's application, one write at a time: by itself it looks for an object, then writes it, in several threads."""

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._application(environ, start_response)
        with self._lock:
            return self._application(environ, start_response)


@contextmanager
def s3_on_loopback() -> Iterator[str]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Atomic(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def new_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """Make a bucket, and set the environment's credentials to values that are worth nothing."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")).close()
    return S3Bucket(endpoint=endpoint, bucket=bucket)


def in_memory() -> ObjectFolder:
    return ObjectFolder.open(f"memory://{uuid.uuid4().hex}/a.store")


def pushed(store: Path, name: str) -> str:
    """Push a store to a folder of that name next to it, and return the URL."""
    target = store.parent / "buckets" / name
    target.mkdir(parents=True, exist_ok=True)
    push(store, ObjectFolder.open(f"file://{target}"))
    return f"file://{target}"


def pulled(place: ObjectFolder, path: Path) -> Store:
    pull(place, path)
    store = Store.open(path)
    assert not verify(store, lambda _: None, 1).corrupt
    return store
