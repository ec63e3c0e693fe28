"""Where a store is, as commands take it: a path, or a URL in object storage, with the options that reach it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.command_line import parse_bytes
from bucketline.errors import UsageError
from bucketline.files.redact import redacted
from bucketline.store.remote.urls import RemoteOptions, is_url, parse_url, refuse_misspelt

if TYPE_CHECKING:
    from bucketline.store.read.store import Store
    from bucketline.store.remote.objects import ObjectFolder


def store_place(text: str) -> Path | str:
    """Return a store's place as a user typed it: a path, or a URL as text.

    Raises:
        UsageError: if it is a URL that cannot be a store's: a scheme that is not known, one slash, a query.
    """
    refuse_misspelt(text)
    return text if is_url(text) else Path(text)


def local_place(text: str) -> Path:
    """Return a path that a user typed for a command that needs the store on a disk.

    Raises:
        UsageError: if it is a URL.
    """
    if is_url(text):
        raise UsageError(
            f"{redacted(text)} is a URL, and this needs a store on a disk: `store pull` it, then `store push` it back"
        )
    refuse_misspelt(text)
    return Path(text)


def _place(metavar: str) -> tyro.constructors.PrimitiveConstructorSpec[Path | str]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: store_place(args[0]),
        is_instance=lambda value: isinstance(value, Path | str),
        str_from_instance=lambda value: [str(value)],
    )


LocalStore = Annotated[
    Path,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="STORE",
        instance_from_str=lambda args: local_place(args[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]
StorePlace = Annotated[Path | str, _place("STORE")]
OutPlace = Annotated[Path | str, _place("OUT")]
StoreUrl = Annotated[Path | str, _place("URL")]


@dataclass(frozen=True, kw_only=True)
class RemoteArguments:
    """Options that reach a store in object storage."""

    endpoint: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Of a store's URL: the S3-compatible server. Default: the provider's, or what AWS_ENDPOINT_URL says."""
    store_option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Of a store's URL: option of the client, such as region=eu-central-1 or skip_signature=true. Repeatable."""

    @property
    def remote(self) -> RemoteOptions:
        """The options as a store takes them."""
        return RemoteOptions(endpoint=self.endpoint, options=self.store_option)

    def objects(self, url: Path | str) -> ObjectFolder:
        """Return the folder at a URL.

        Raises:
            UsageError: if it is a path.
        """
        from bucketline.store.remote.objects import ObjectFolder

        parse_url(str(url))
        return ObjectFolder.open(str(url), self.remote)


@dataclass(frozen=True, kw_only=True)
class ReadingArguments(RemoteArguments):
    """Options that reach a store in object storage, and say where to keep what is read of it."""

    cache: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Of a store's URL: keep what is read in this folder. Default: BUCKETLINE_CACHE, or bucketline in the user's cache."""
    cache_bytes: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Of a store's URL: how much that folder may hold, such as 500GiB. Default: what the disk has room for."""

    @property
    def remote(self) -> RemoteOptions:
        limit = None if self.cache_bytes is None else parse_bytes(self.cache_bytes, "--cache-bytes")
        return RemoteOptions(endpoint=self.endpoint, options=self.store_option, cache=self.cache, cache_bytes=limit)

    def open_store(self, place: Path | str) -> Store:
        """Return the store at a path or URL, at its newest generation; raises what `Store.open` does."""
        from bucketline.store.read.store import Store

        return Store.open(place, remote=self.remote) if is_url(place) else Store.open(place)


def shown(place: Path | str) -> str:
    """Return a store's place for messages: a URL without user and password."""
    return redacted(place) if isinstance(place, str) else str(place)
