"""The object storage client of one store, by the kind of its URL."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bucketline.errors import StoreError, UsageError
from bucketline.forks import ForkSafeLock

if TYPE_CHECKING:
    from obstore.store import MemoryStore, ObjectStore

    from bucketline.store.remote.urls import Address, RemoteOptions

WRITE_TIMEOUT_S = 600.0  # of one part, on a slow line that others share
_memory: dict[str, MemoryStore] = {}
_memory_lock = ForkSafeLock()
_users: list[int] = []  # the process that first made a client, or in whose memory it was


def connect(address: Address, secret_url: str, options: RemoteOptions, *, is_writing: bool) -> ObjectStore:
    """Return a client for a store's folder. Nothing is requested.

    `secret_url`: of a web server, with the user and password that it expects. `is_writing` allows a request more time.
    """
    from obstore import store as kinds
    from obstore.exceptions import BaseError

    if address.kind == "memory":
        return memory_store(f"{address.host}/{address.path}")
    try:
        if address.kind == "file":
            if not is_writing and not os.path.isdir(address.path):  # noqa: PTH112 - a Path would drop what is not UTF-8
                raise FileNotFoundError(address.path)
            return kinds.LocalStore(address.path, mkdir=is_writing)
        common = {"client_options": _client_options(address, options, is_writing=is_writing), "retry_config": _retry(options)}
        if address.kind == "http":
            return kinds.HTTPStore(secret_url, **common)
        config: Any = options.client_options()
        if options.endpoint is not None:
            config["base_url" if address.kind == "gcs" else "endpoint"] = options.endpoint
        kind: Any = {"s3": kinds.S3Store, "gcs": kinds.GCSStore, "azure": kinds.AzureStore}[address.kind]
        store: ObjectStore = kind(address.host, prefix=address.path or None, config=config, **common)
    except (BaseError, ValueError, TypeError) as error:
        why = str(error).partition("\n\nDebug source")[0]
        raise UsageError(f"cannot use {address.url}: {why:.300}") from None
    return store


def refuse_forked(url: str) -> None:
    """Note that this process is going to use a client."""
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        raise StoreError(
            f"cannot reach {url}: process {os.getpid()} was forked from {_users[0]}, which had reached object storage before; "
            "start it by spawn or forkserver, or let it read through the loader's service"
        )


def memory_store(name: str) -> MemoryStore:
    """Return this process's store of a name in memory."""
    from obstore.store import MemoryStore

    with _memory_lock:
        return _memory.setdefault(name, MemoryStore())


def _client_options(address: Address, options: RemoteOptions, *, is_writing: bool) -> Any:  # noqa: ANN401 - a TypedDict
    wait_s = options.deadline_s / 2  # the request that begins just before retrying ends may take as long again
    place = address.url if address.kind == "http" else options.endpoint
    return {
        # A slow link takes its time, as long as something comes; whoever reads lines keeps in flight what it brings in time.
        "timeout": timedelta(seconds=max(WRITE_TIMEOUT_S, wait_s) if is_writing else options.deadline_s),
        "read_timeout": timedelta(seconds=max(WRITE_TIMEOUT_S, wait_s) if is_writing else wait_s / 2),
        "connect_timeout": timedelta(seconds=min(5.0, wait_s)),
        # Without an endpoint it is that of the URL's kind, by https, unless the environment names another.
        "allow_http": not (place or "").startswith("https://"),
    }


def _retry(options: RemoteOptions) -> Any:  # noqa: ANN401 - a TypedDict
    wait_s = options.deadline_s / 2
    backoff = {
        "init_backoff": timedelta(seconds=min(0.1, wait_s / 4)),
        "max_backoff": timedelta(seconds=min(5.0, wait_s / 4)),
        "base": 2,
    }
    return {"max_retries": 10, "retry_timeout": timedelta(seconds=wait_s), "backoff": backoff}
