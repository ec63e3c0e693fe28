"""A store's folder in object storage: S3, GCS, Azure, a web server (read only), a local folder, or memory (for tests); retries.

The client is not fork-safe: its threads are gone in a forked child, where a request would wait for ever and is refused instead.
Credentials come from the environment or the machine's metadata; a web server's user and password in a URL are kept out of
messages and pickles.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from bucketline.errors import BucketlineError, CorruptError, StoreError, UsageError
from bucketline.files.paths import redacted_within
from bucketline.forks import ForkSafeLock
from bucketline.store.folder import (
    MAX_READ_BYTES,
    DeniedError,
    ExistsError,
    ListedFile,
    MissingObjectError,
    NoRangesError,
    refuse_name,
)
from bucketline.store.remote.urls import Kind, RemoteOptions, is_url, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from obstore import GetResult, ObjectMeta
    from obstore.store import MemoryStore, ObjectStore

    from bucketline.store.remote.urls import Address


__all__ = ["ObjectFolder", "RemoteOptions", "is_url"]

WRITE_TIMEOUT_S = 600.0  # of one part, on a slow line that others share
PART_BYTES = 8 << 20
MAX_PARTS = 9_000  # S3 allows 10,000
PARTS_IN_FLIGHT = 4
MAX_LISTED = 1_000_000  # objects in a store's folder; one with 100,000 shards has half as many
_CHUNK_BYTES = 4 << 20  # of an answer, between two looks at how much has come; by 1 MiB a line takes 1.6 times the time
_LOOK_UPS = 16  # at a time, of objects that cannot be listed
MAX_MESSAGE = 300  # characters of what the client says
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist|NoSuchContainer")
_NO_RANGES = re.compile(r"Range request not supported|non-partial response when range requested", re.IGNORECASE)
_BODY = re.compile(r":\s*<(?:\?xml|!doctype|html|error).*", re.IGNORECASE | re.DOTALL)
_REASON = re.compile(r"<(Code|Message)>([^<]*)</\1>")
_CAUSE = re.compile(
    r'(?:message|error): "([^"]*)"|InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)'
    r"|(TooManyRedirects|TimedOut|IncompleteBody)"
)
_GONE = re.compile(r"non-2xx status code: 410\b")
_CREDENTIALS: dict[Kind, str] = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role; for a public bucket, skip_signature=true",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the machine's identity",
    "http": "user and password in the URL, if the server expects them",
    "file": "the folder's permissions",
    "memory": "nothing",
}
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
            if user := urlsplit(secret_url).netloc.rpartition("@")[0]:
                name, _, password = user.partition(":")
                both = f"{unquote(name)}:{unquote(password)}"
                common["client_options"]["default_headers"] = {"authorization": f"Basic {b64encode(both.encode()).decode()}"}
            return kinds.HTTPStore(address.url, **common)
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
        "allow_http": not (place or "").lower().startswith("https://"),
    }


def _retry(options: RemoteOptions) -> Any:  # noqa: ANN401 - a TypedDict
    wait_s = options.deadline_s / 2
    backoff = {
        "init_backoff": timedelta(seconds=min(0.1, wait_s / 4)),
        "max_backoff": timedelta(seconds=min(5.0, wait_s / 4)),
        "base": 2,
    }
    return {"max_retries": 10, "retry_timeout": timedelta(seconds=wait_s), "backoff": backoff}


def _entry(meta: ObjectMeta) -> ListedFile:
    return ListedFile(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp(), meta["e_tag"])


def _joined(chunks: Iterable[bytes | memoryview]) -> bytes:
    """Return the bytes of an answer; each chunk is freed once it is copied."""
    whole = BytesIO()
    for chunk in chunks:
        whole.write(chunk)
    return whole.getvalue()  # not another copy


class ObjectFolder:
    """A store's folder in object storage. Names are relative to it, such as `shards/a.lmdb`. Safe for several threads.

    Every method raises a StoreError that names the object, what was found and what to do: MissingObjectError if the object or
    the bucket is not there, DeniedError if the credentials do not allow the request.
    """

    url: str  # without user and password, for messages
    identity: str  # URL and endpoint: names the store's folder in the cache
    options: RemoteOptions

    def __init__(self, url: str, options: RemoteOptions | None = None) -> None:
        self._address = parse_url(url)
        self._secret_url = url.rstrip("/")
        self.url = self._address.url
        self.options = options or RemoteOptions()
        self.identity = f"{self.url} {self.options.endpoint or ''}"
        self._lock = ForkSafeLock()
        self._clients: dict[bool, ObjectStore] = {}

    @classmethod
    def open(cls, url: str, options: RemoteOptions | None = None) -> ObjectFolder:
        """Return the folder at a URL. Nothing is requested yet."""
        folder = cls(url, options)
        if folder.kind != "file":
            folder._client()
        return folder

    def __repr__(self) -> str:
        return f"ObjectFolder({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL without user and password."""
        return type(self), (self.url, self.options)

    @property
    def kind(self) -> Kind:
        return self._address.kind

    @property
    def deadline_s(self) -> float:
        return self.options.deadline_s

    @property
    def is_far(self) -> bool:
        """True if a network answers, which may answer otherwise the next time."""
        return self.kind not in ("file", "memory")

    @property
    def is_read_only(self) -> bool:
        return self.kind == "http"

    def place(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str, most_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return a whole object. A CorruptError if it is longer than `most_bytes`, before more than that is read."""
        with self._explaining("read", name):
            return _joined(self._bounded(name, self._get(name), most_bytes))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` up to, not including, `end`; fewer if the object ends first.

        The caller compares the length. The range must not be empty and must begin within the object.
        """
        return self.fetch_range(name, begin, end)[0]

    def _get(self, name: str, span: tuple[int, int] | None = None) -> GetResult:
        import obstore

        return obstore.get(self._client(), name, options=None if span is None else {"range": span})

    def _bounded(self, name: str, found: GetResult, most_bytes: int, *, is_part: bool = False) -> Iterator[bytes | memoryview]:
        """Yield the bytes of an answer, whatever its header says of their number, and no more than `most_bytes`."""
        stated, count = found.meta["size"], 0
        if not is_part and stated > most_bytes:
            raise CorruptError(f"{self.place(name)} has {stated} bytes, at most {most_bytes} are accepted")
        for chunk in found.stream(min_chunk_size=min(_CHUNK_BYTES, max(1, most_bytes))):
            count += len(chunk)
            if count > most_bytes:
                raise CorruptError(f"{self.place(name)}: more than the {most_bytes} bytes came that were requested")
            yield chunk

    def pieces(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, as `read_range` returns them, in pieces, each valid until the next is requested."""
        with self._explaining("read", name):
            for chunk in self._bounded(name, self._get(name, (begin, end)), end - begin, is_part=True):
                yield memoryview(chunk).cast("B")

    def fetch(self, name: str, check: Callable[[ListedFile], None] = lambda _: None) -> tuple[bytes, ListedFile]:
        """Return a whole object, and what it is; `check` may raise before it is read."""
        with self._explaining("read", name):
            found = self._get(name)
            entry = _entry(found.meta)
            check(entry)
            return _joined(self._bounded(name, found, entry.num_bytes)), entry

    def fetch_range(self, name: str, begin: int, end: int) -> tuple[bytes, ListedFile]:
        """Return the bytes from `begin` up to, not including, `end`, and what the object is; see `read_range`."""
        with self._explaining("read", name):
            found = self._get(name, (begin, end))
            return _joined(self._bounded(name, found, end - begin, is_part=True)), _entry(found.meta)

    def download(self, name: str, path: Path) -> None:
        """Write an object to a new file."""
        with self._explaining("read", name), path.open("xb") as file:
            found = self._get(name)
            for part in self._bounded(name, found, found.meta["size"]):
                file.write(memoryview(part))

    def look_up(self, name: str) -> ListedFile | None:
        import obstore

        try:
            with self._explaining("look up", name):
                return _entry(obstore.head(self._client(), name))
        except MissingObjectError:
            return None

    def size(self, name: str) -> int | None:
        """Return an object's length in bytes; None if it is not there."""
        entry = self.look_up(name)
        return None if entry is None else entry.num_bytes

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the lengths of some objects in bytes; None of those that are not there: by listing their subfolders.

        What a list does not show is looked up: it may be older than an object, and of a web server there is none.
        """
        folders = set[str]() if self.is_read_only else {name.rpartition("/")[0] for name in names}
        there: dict[str, int | None] = {file.name: file.num_bytes for folder in folders for file in self.names(folder)}
        lacking = [name for name in names if name not in there]
        with ThreadPoolExecutor(_LOOK_UPS) as pool:
            there.update(zip(lacking, pool.map(self.size, lacking), strict=True))
        return [there[name] for name in names]

    def names(self, prefix: str = "", *, is_bounded: bool = True) -> Iterator[ListedFile]:
        """Yield the objects in a subfolder (`shards`) and below, in no particular order; a StoreError if there are too many."""
        import obstore

        if self.kind == "http":
            raise StoreError(
                f"{self.url} is on a web server, whose folders cannot be listed; use the store's own URL, such as s3://"
            )
        prefix = prefix.strip("/")
        with self._explaining("list", prefix):
            try:
                client = self._client()
            except FileNotFoundError:  # a local folder that nobody has made yet
                return
            count, begun = 0, set[str]()
            for chunk in obstore.list(client, prefix or None):
                count += len(chunk)
                first = str(chunk[0]["path"])
                if is_bounded and first in begun:
                    raise StoreError(
                        f"{self.place(prefix)}: the server lists {first} again and again; check the server, then try again"
                    )
                begun.add(first)
                if is_bounded and count > MAX_LISTED:
                    raise StoreError(
                        f"{self.place(prefix)} has more than {MAX_LISTED} objects; no store has so many: check the URL, and "
                        "move what else is there elsewhere"
                    )
                for found in chunk:
                    yield _entry(found)

    def write(self, name: str, source: Path | bytes | Iterable[bytes], num_bytes: int | None = None) -> None:
        """Write an object, replacing one that is there. It is visible once complete, or not at all.

        Args:
            name: the object's name.
            source: a file, bytes, or an iterable of parts. If it raises, nothing becomes visible and the error passes.
            num_bytes: length of an iterable's bytes together; needed if they may exceed 70 GiB.
        """
        import obstore

        self.refuse_read_only(name)
        if not isinstance(source, bytes):
            num_bytes = source.stat().st_size if isinstance(source, Path) else num_bytes
            if num_bytes is not None and num_bytes <= PART_BYTES:
                source = source.read_bytes() if isinstance(source, Path) else b"".join(source)
        part = max(PART_BYTES, -(-(num_bytes or 0) // MAX_PARTS))
        is_single = isinstance(source, bytes) and len(source) <= part
        with self._explaining("write", name):
            client = self._client(is_writing=True)
            obstore.put(client, name, source, use_multipart=not is_single, chunk_size=part, max_concurrency=PARTS_IN_FLIGHT)

    def create(self, name: str, data: bytes) -> None:
        """Write an object if there is none of this name (put-if-absent).

        Of several writers that create one name at the same time, one succeeds. An object that holds exactly `data` counts as
        created: the client may have repeated a request that had succeeded without an answer.
        """
        if self.is_put_if_absent(name, data):
            return
        with suppress(CorruptError):  # it is longer
            if self.read(name, len(data)) == data:
                return
        raise ExistsError(f"{self.place(name)} exists and has other content; rerun the command")

    def is_put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object if there is none of this name; return False if there is one, whatever it holds."""
        import obstore

        self.refuse_read_only(name)
        with self._explaining("create", name):
            try:
                obstore.put(self._client(is_writing=True), name, data, mode="create", use_multipart=False)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        import obstore

        for name in names:
            self.refuse_read_only(name)
            try:
                with self._explaining("remove", name):
                    obstore.delete(self._client(is_writing=True), name)
            except MissingObjectError:
                pass

    def refuse_read_only(self, name: str = "") -> None:
        """Check that something can be written there at all."""
        if self.is_read_only:
            raise StoreError(
                f"cannot write {self.place(name)}: web servers are read only; use the store's own URL, such as s3://"
            )
        if self.kind == "file":
            folder = self._address.path
            for part in name.split("/")[:-1]:
                folder = f"{folder}/{part}"
                if os.path.islink(folder):  # noqa: PTH114 - a Path would drop what is not UTF-8
                    raise StoreError(
                        f"{folder} is a link; a store is changed only where its folders are its own: replace the link by the "
                        "folder, or move all of the store and link to it"
                    )

    def _client(self, *, is_writing: bool = False) -> ObjectStore:
        """Return the client; there are two, since sending a large part may take longer than a reader would wait."""
        refuse_forked(self.url)
        client = self._clients.get(is_writing)
        if client is None:
            with self._lock:
                client = self._clients.get(is_writing)
                if client is None:
                    client = connect(self._address, self._secret_url, self.options, is_writing=is_writing)
                    self._clients[is_writing] = client
        return client

    @contextmanager
    def _explaining(self, verb: str, name: str) -> Iterator[None]:
        """Turn the client's errors into ours. Its own messages quote requests and answers at length."""
        if name:
            refuse_name(name, self.url)
        try:
            yield
        except BucketlineError:
            raise
        except FileNotFoundError as error:
            if self.kind not in ("file", "memory") and _NO_BUCKET.search(str(error)):
                why = f"there is no bucket {self._address.host}; create it, or correct the URL"
                raise MissingObjectError(f"cannot {verb} {self.place(name)}: {why}") from None
            raise MissingObjectError(f"{self.place(name)} is missing; check the URL") from None
        except BaseException as error:
            kind = type(error)
            if kind.__name__ == "PanicException":  # of the client's own code, by a key with a line break; not an Exception
                raise StoreError(
                    f"cannot {verb} {self.place(name)}: the client cannot make the request ({self._brief(error)}); check that "
                    f"keys, tokens and token files are one line ({_CREDENTIALS[self.kind]})"
                ) from None
            if not kind.__module__.startswith("obstore"):  # of an iterable's own
                raise
            if _GONE.search(str(error)):
                raise MissingObjectError(f"{self.place(name)} is missing (410 Gone); check the URL") from None
            if _NO_RANGES.search(str(error)):
                raise NoRangesError(
                    f"{self.url} cannot be read: a request of some bytes of {name} is answered with all of it. A store is read "
                    "by ranges (`Range: bytes=…`): use a web server that honours them, or `store pull` it from the original"
                ) from None
            if kind.__name__ in _DENIED:
                raise DeniedError(
                    f"cannot {verb} {self.place(name)}: access denied ({self._brief(error)}); check the credentials: "
                    f"{_CREDENTIALS[self.kind]}"
                ) from None
            raise StoreError(
                f"cannot {verb} {self.place(name)}: {self._brief(error)}; check the address, the credentials "
                f"({_CREDENTIALS[self.kind]}) and the network, then rerun the command"
            ) from None

    def _brief(self, error: BaseException) -> str:
        text, _, source = str(error).partition("\n\nDebug source")
        said = " ".join(value for _, value in _REASON.findall(text))
        text = _BODY.sub(f": {said}" if said else "", text)
        text = re.sub(r"^Generic \w+ error: ", "", " ".join(text.split())).removesuffix(":")
        if causes := [*_CAUSE.finditer(source)]:
            text += f" ({causes[-1][causes[-1].lastindex or 0]})"
        return redacted_within(text, self._secret_url)[:MAX_MESSAGE]


# --------------------------------------------------------------------------------------------------------------------- retries
# Requests that are made again, and which failures may pass.

Answer = TypeVar("Answer")
MAX_WRONG = 3  # answers that are wrong, or say that an object is missing, before that is believed


def is_wrong(error: BaseException) -> bool:
    """Return whether an answer came that is another one than expected; the next ones will hardly be different."""
    return isinstance(error, CorruptError | MissingObjectError | NoRangesError)


def asked_again(
    request: Callable[[], Answer],
    deadline_s: float,
    *,
    most_wrong: int | None = MAX_WRONG,
    is_over: threading.Event | None = None,
) -> Answer:
    """Return what a function returns that requests an object; call it again after failures that may pass.

    After half of the deadline no new try begins, since the last one may take as long. `most_wrong`: see `MAX_WRONG`; None: only
    the deadline counts for these too. What is denied is never requested again, and nothing once `is_over` is set.
    """
    end, tries, wrong = time.monotonic() + deadline_s / 2, 0, 0
    is_over = is_over or threading.Event()
    while True:
        try:
            return request()
        except DeniedError:
            raise
        except StoreError as error:
            tries, wrong = tries + 1, wrong + is_wrong(error)
            pause = pause_after(tries)
            if is_over.is_set() or wrong == most_wrong or time.monotonic() + pause > end:
                raise
            is_over.wait(pause)


FIRST_S, LONGEST_S = 0.1, 5.0
LONGEST_TRIES = 32  # a pause is no longer than so many tries, if these are long


def pause_after(tries: int, took_s: float = 0.0) -> float:
    """Return the seconds to wait after so many tries: exponential backoff with full jitter.

    `took_s`: of the last try, if others that try at the same time made it fail: they take as long.
    """
    first_s, longest_s = max(FIRST_S, took_s), max(LONGEST_S, LONGEST_TRIES * took_s)
    return random.uniform(0.0, min(longest_s, first_s * 2.0 ** min(tries, 16)))  # noqa: S311 - nothing secret


Found = TypeVar("Found")
IN_TIME = 15 / 16  # of a deadline: what is given up then has reached the caller before the deadline has passed


def within(deadline_s: float, place: str, call: Callable[[], Found]) -> Found:
    """Return what a function returns that requests objects at `place`; its thread is left to itself after the deadline."""
    found: list[Found] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run, name="bucketline-open", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failed:
        raise failed[0]
    if not found:
        raise StoreError(f"{place} has not answered within {deadline_s:g} s; check the address and the network, then try again")
    return found[0]
