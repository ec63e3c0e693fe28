"""Places in object storage: the folder at a URL, the stamp of an object, and what its errors mean for a source."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

from bucketline.errors import SourceError, StoreError, UsageError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.partner_names import images_below, is_image_file
from bucketline.ingest.sources.source import SourceOptions, Stamp
from bucketline.store.folder import DeniedError, ListedFile, MissingObjectError
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import NEAR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def names_below(url: str, options: SourceOptions) -> dict[str, tuple[int, ...]]:
    """Return the names of the images below a URL, each with its size and time of change."""
    with of_source(url):
        entries = [one for one in folder_at(url, options).names(is_bounded=False) if not is_hidden(one.name)]
    stamps = {one.name: stamp_of(one) for one in entries if is_image_file(one.name)}
    if not stamps:
        raise SourceError(f"{url}, for references or masks, has no images; check the URL")
    return {name: (stamp.num_bytes, stamp.mtime_ns) for name, stamp in stamps.items()}


def list_place(place: str, options: SourceOptions) -> Mapping[str, tuple[int, ...]]:
    """List the images of a folder with references or masks, on a disk or in object storage, with the `at` of each."""
    if "://" not in place:
        return images_below(place)
    return names_below(place, options)


def is_hidden(name: str) -> bool:
    """Return whether an object is hidden, as a file on a disk would be, or only marks a folder."""
    return name.endswith("/") or any(part.startswith(".") for part in name.split("/"))
