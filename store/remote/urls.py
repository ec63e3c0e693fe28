"""A store's place: a path or a URL, and the options that reach it. Nothing is requested here."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import urllib.parse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from bucketline.command_line import default_cache
from bucketline.errors import UsageError
from bucketline.files.paths import has_password, redacted, without_userinfo
from bucketline.option_value import DECIDES_NOTHING, RESUME_FREE, ByteSize, as_option, check_fields, expect, parse_values
from bucketline.options import Arg, Repeated

Kind = Literal["s3", "gcs", "azure", "http", "file", "memory"]
SCHEMES: dict[str, Kind] = {
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "http": "http",
    "https": "http",
    "file": "file",
    "memory": "memory",
}
DEADLINE_S = 60.0
KNOWN = "s3://, gs://, az://, https:// (read only), file://"
NEAR = {"gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az", "wasb": "az", "s3a": "s3", "s3n": "s3"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_AUTHORITY = re.compile(r"[^:]*://[^/?#]*")
_NOT_IN_HOST = re.compile(r"""[\s'"`<>\\^{|}\x00-\x1f\x7f]""")
_ONE_SLASH = re.compile(r"(s3|gs|az|https?|file|memory):/(?!/)(.*)", re.IGNORECASE | re.DOTALL)
_SECRET = re.compile(r"secret|password|token|bearer|credential|(access|account|master|storage|customer)_key|^sas|proxy_url")


def _deadline_s() -> float:
    text = os.environ.get("BUCKETLINE_DEADLINE")
    try:
        seconds = float(text) if text else DEADLINE_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"BUCKETLINE_DEADLINE is {text!r}, expected seconds above 0")
    return seconds


def _store_options() -> tuple[str, ...]:
    text = os.environ.get("BUCKETLINE_STORE_OPTION", "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"BUCKETLINE_STORE_OPTION cannot be split into KEY=VALUE: {error}") from error


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How to reach a store in object storage, and where to keep what is read of it.

    What is left out is taken from BUCKETLINE_ENDPOINT, BUCKETLINE_STORE_OPTION (KEY=VALUE, separated by spaces, before
    `options`), BUCKETLINE_CACHE, BUCKETLINE_CACHE_BYTES and BUCKETLINE_DEADLINE (seconds).

    Raises:
        UsageError: if an option is not KEY=VALUE, or is a secret, which belongs in variables of its own.
    """

    endpoint: str | None = None  # of an S3-compatible server; None: that of the URL's kind, or what the environment says
    options: tuple[str, ...] = ()  # KEY=VALUE of the client: region=…, skip_signature=true, virtual_hosted_style_request=true
    cache: Path | None = None  # the cache's folder; None: the usual one
    cache_bytes: int | None = None  # of all stores in the cache together
    deadline_s: float = field(default_factory=_deadline_s)  # a store that does not answer is an error after this time

    def __post_init__(self) -> None:
        if self.endpoint is None:
            object.__setattr__(self, "endpoint", os.environ.get("BUCKETLINE_ENDPOINT") or None)
        if self.cache_bytes is None and (size := os.environ.get("BUCKETLINE_CACHE_BYTES")):
            object.__setattr__(self, "cache_bytes", ByteSize.parse(size, "BUCKETLINE_CACHE_BYTES").num_bytes)
        usual = _store_options()
        if usual and self.options[: len(usual)] != usual:  # a copy has them
            object.__setattr__(self, "options", (*usual, *self.options))
        for option in self.options:
            key, equals, _ = option.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"--store-option {redacted(key)!r:.80} is not KEY=VALUE, such as region=eu-central-1")
            if _SECRET.search(key.strip().lower()):
                raise UsageError(
                    f"--store-option {key.strip()} is a secret, and other users of this machine can read a command's options; "
                    "set it in the environment, such as AWS_SECRET_ACCESS_KEY"
                )
        if self.endpoint is not None:
            if not re.match(r"https?://[^/]", self.endpoint):
                raise UsageError(f"--endpoint {redacted(self.endpoint)} is not a URL such as https://storage.example.com:9000")
            if without_userinfo(self.endpoint) != self.endpoint:
                raise UsageError(f"--endpoint {redacted(self.endpoint)} has a user or password; set them in the environment")
        if not self.deadline_s > 0:
            raise UsageError(f"the deadline is {self.deadline_s} s, expected more than 0")

    def client_options(self) -> dict[str, str]:
        """Return the KEY=VALUE options as a dictionary, keys in lower case."""
        pairs = (option.partition("=") for option in self.options)
        return {key.strip().lower(): value for key, _, value in pairs}


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a store's URL."""

    kind: Kind
    url: str  # without user and password
    host: str  # the bucket, the container, or the host with its port
    path: str  # without slashes at its ends, but for file://, which begins with one


def is_url(text: object) -> bool:
    """Return True if a store's place is a URL rather than a path: `SCHEME://…`, known or not.

    >>> is_url("s3://bucket/photos.store"), is_url("photos.store"), is_url(Path("s3://bucket"))
    (True, False, False)
    """
    return isinstance(text, str) and _SCHEME.match(text) is not None


def refuse_misspelt(text: str) -> None:
    """Check a store's place as a user typed it."""
    match = _ONE_SLASH.match(text)
    if match and not Path(text).exists():
        shown = redacted(f"{match[1]}://{match[2]}")
        raise UsageError(f"{redacted(text)} has one slash after the scheme; write {shown}")
    if is_url(text):
        parse_url(text)
    elif has_password(text) and not Path(text).exists():
        raise UsageError(
            f"{redacted(text)} is neither a path nor a URL such as https://host/photos.store; begin it with its scheme"
        )


def working_name(url: str) -> str:
    """Return the name of the folder in which a store at a URL is packed into: its own name, and a digest of the whole URL.

    >>> working_name("s3://bucket/photos.store")
    'photos.store-142e11e31eed'
    """
    address = parse_url(url)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", address.path.rpartition("/")[2] or address.host)[:64]
    return f"{name}-{hashlib.blake2b(address.url.encode(), digest_size=6).hexdigest()}"


def working_folder(place: Path | str, work: Path | str | None) -> Path:
    """Return a store's folder; of one at a URL that in which its shards are made: `work`, or one next to the cache."""
    if isinstance(place, Path):
        return place
    cache = default_cache()
    return Path(work) if work else cache.with_name(f"{cache.name}-pack") / working_name(place)


def working_cache(work: Path | str | None) -> Path | None:
    """Return the cache for a store at a URL that is written: in the folder `work`; None for the usual one."""
    return Path(work) / "cache" if work else None


def parse_url(url: str) -> Address:
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    if not scheme:
        raise UsageError(f"{redacted(url)} is not a URL; expected something like s3://bucket/photos.store ({KNOWN})")
    if scheme not in SCHEMES:
        hint = f"; did you mean {NEAR[scheme]}://?" if scheme in NEAR else ""
        raise UsageError(f"{redacted(url)}: {scheme}:// is not a kind of store that Bucketline knows ({KNOWN}){hint}")
    kind = SCHEMES[scheme]
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as error:  # whose words may have the password
        why = "port" if "port" in str(error).lower() else "host"
        raise UsageError(f"{redacted(url)} is not a URL: its {why} cannot be one") from None
    if _NOT_IN_HOST.search(_AUTHORITY.match(url)[0]):  # type: ignore[index]  # it has a scheme
        raise UsageError(f"{redacted(url)} has a character before its path that a URL cannot have there; write it as %XX")
    if parts.query or parts.fragment:
        raise UsageError(f"{redacted(url)} has a query; a store's URL ends with its folder, and requests are signed")
    path = urllib.parse.unquote(parts.path)
    host = parts.netloc.rpartition("@")[2]
    if kind == "file":
        if host not in ("", "localhost") or not path.strip("/"):
            raise UsageError(f"{redacted(url)} is not the URL of a folder on this machine, such as file:///data/photos.store")
    elif not host:
        raise UsageError(f"{redacted(url)} names no {'host' if kind == 'http' else 'bucket'}")
    if kind != "http" and host != parts.netloc:
        raise UsageError(f"{redacted(url)} has a user or password; set credentials in the environment")
    if any(part in (".", "..") for part in path.split("/")):
        raise UsageError(f"{redacted(url)} has . or .. in its path; write the folder's own path")
    path = path.rstrip("/") if kind == "file" else path.strip("/")
    return Address(kind, without_userinfo(url).rstrip("/"), host, path)


# ------------------------------------------------------------------------------------------------------------------- arguments
# The options of every command that takes a store's URL.

_FREE = RESUME_FREE | DECIDES_NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectArguments:
    """How a store in object storage is reached. A local store needs none of it."""

    SECTION = "storage: how to reach object storage, and what to cache"

    endpoint: Annotated[str | None, Arg(metavar="URL")] = field(default=None, metadata=_FREE)
    """Address of an S3-compatible server, for s3:// URLs, such as https://minio.example.com:9000. Default:
    BUCKETLINE_ENDPOINT, or AWS_ENDPOINT_URL, or that of the URL's kind."""
    store_option: Annotated[Repeated[tuple[str, ...]], Arg(metavar="KEY=VALUE")] = field(default=(), metadata=_FREE)
    """Option of the client of object storage, such as region=eu-central-1 or skip_signature=true. Repeatable. Secrets: by
    the environment. Default: BUCKETLINE_STORE_OPTION, to which these are added."""
    deadline: Annotated[float | None, Arg(metavar="SECONDS")] = field(default=None, metadata=_FREE)
    """Time until object storage that does not answer is an error. Default: BUCKETLINE_DEADLINE, or 60."""

    def __post_init__(self) -> None:
        """Validate the options."""
        check_fields(self, ObjectArguments, self._named)
        parse_values(self, self._named)
        if self.deadline is not None and not (math.isfinite(self.deadline) and self.deadline > 0):
            raise UsageError(f"{self._named('deadline')} is {self.deadline}, expected seconds above 0")
        self.remote()

    def remote(self) -> RemoteOptions:
        """Return the options as a store takes them."""
        usual = RemoteOptions(endpoint=self.endpoint, options=tuple(self.store_option))
        return usual if self.deadline is None else replace(usual, deadline_s=self.deadline)

    @staticmethod
    def _named(field: str) -> str:
        """Return how messages call a field: as an option of a command."""
        return as_option(field)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteArguments(ObjectArguments):
    """How a store in object storage is reached, and where it is cached."""

    SECTION = "storage: how to reach object storage, and what to cache"

    cache: Annotated[str | None, Arg(metavar="FOLDER")] = field(default=None, metadata=_FREE)
    """Folder that keeps what is read of stores at URLs. Default: BUCKETLINE_CACHE, or bucketline in the user's cache."""
    cache_bytes: Annotated[str | None, Arg(metavar="SIZE")] = field(default=None, metadata=_FREE)
    """Most bytes that this folder keeps, of all stores together, such as 500GiB (of 2^30 bytes) or 500GB (of 10^9).
    Default: BUCKETLINE_CACHE_BYTES, or 80 % of the disk's free space."""

    def remote(self) -> RemoteOptions:
        """Return the options as a store takes them."""
        expect(self._named("cache"), self.cache, str | Path | None, "a folder, as str or Path, or None")
        size = None if self.cache_bytes is None else ByteSize.parse(str(self.cache_bytes), self._named("cache_bytes"))
        return replace(
            ObjectArguments.remote(self),  # `super()` does not work in a dataclass with slots
            cache=None if self.cache is None else Path(self.cache),
            cache_bytes=size and size.num_bytes,
        )
