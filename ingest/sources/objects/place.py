"""The place of a source in object storage, its objects' sizes and times of change, and errors of reading it."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

from bucketline.errors import SourceError, StoreError, UsageError
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sources.source import Stamp
from bucketline.store.folder import DeniedError, ListedFile, MissingObjectError
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import NEAR, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.ingest.sources.options import SourceOptions
    from bucketline.store.remote.urls import RemoteOptions

_SCHEMES = ("s3", "gs", "az", "memory", *NEAR)
_SECOND_NS = 1_000_000_000


def is_object_url(text: str) -> bool:
    """Return True if a source is the URL of something in object storage."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    return match is not None and match[1].lower() in _SCHEMES


def folder_at(url: str, options: SourceOptions) -> ObjectFolder:
    """Return the folder at a URL; the same object for the same place, since it holds connections."""
    return _folder_at(url, options.remote())


@lru_cache(maxsize=64)
def _folder_at(url: str, options: RemoteOptions) -> ObjectFolder:
    return ObjectFolder.open(url, options)


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of an object's folder and its name there.

    >>> split_url("s3://bucket/photos/some.csv")
    ('s3://bucket/photos', 'some.csv')
    """
    folder, _, name = url.rstrip("/").rpartition("/")
    if not name or not re.search(r"://[^/]", folder):
        raise UsageError(f"{url} names a bucket, not a file in it")
    return folder, name


def stamp_of(entry: ListedFile) -> Stamp:
    """Return an object's size and time of change, with the digest of its ETag as the fraction of a second.

    Times of change have whole seconds in some kinds of storage; an ETag differs if an object was replaced within one.
    """
    seconds = int(entry.modified_s)
    if entry.e_tag is None:
        return Stamp(num_bytes=entry.num_bytes, mtime_ns=round(entry.modified_s * 1e6) * 1000)
    fraction = xxhash.xxh3_64_intdigest(entry.e_tag.strip('"').encode()) % _SECOND_NS
    return Stamp(num_bytes=entry.num_bytes, mtime_ns=seconds * _SECOND_NS + fraction)


@contextmanager
def of_source(what: str) -> Iterator[None]:
    """Turn a StoreError of this block into a SourceError: the listing would be incomplete, or the storage is out of reach."""
    try:
        yield
    except StoreError as error:
        raise SourceError(f"{what}: {error}") from error


@contextmanager
def of_one_image() -> Iterator[None]:
    """Reject one image if its object is missing or denied; another error, such as a network's, ends the run."""
    try:
        yield
    except (MissingObjectError, DeniedError) as error:
        raise RejectedError(Reason.UNREADABLE, str(error)) from error
    except StoreError as error:
        raise SourceError(f"{error}; what was packed is kept") from error


def refuse_overlapping_urls(source: str, store: str) -> None:
    """Check that the URLs of a source and a store are disjoint."""
    one, other = parse_url(source), parse_url(store)
    if (one.kind, one.host) != (other.kind, other.host):
        return
    first, second = f"{one.path}/".lstrip("/"), f"{other.path}/".lstrip("/")
    if first.startswith(second) or second.startswith(first):
        raise UsageError(
            f"the source {source} and the store {store} are the same place, or one is inside the other; "
            "choose a store outside the folder of images"
        )
