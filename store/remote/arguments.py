"""The options of every command that takes a store's URL."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from bucketline.command_line import parse_bytes
from bucketline.errors import UsageError
from bucketline.option_types import check_fields, expect
from bucketline.store.remote.urls import RemoteOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectArguments:
    """How a store in object storage is reached. A local store needs none of it."""

    SECTION = "storage: how to reach object storage, and what to cache"

    endpoint: str | None = None
    """Address of an S3-compatible server, such as https://minio.example.com:9000; None: that of the URL's kind."""
    store_option: tuple[str, ...] = ()
    """KEY=VALUE for the client of object storage, such as region=eu-central-1; may be repeated. Secrets: by the environment."""
    deadline: float = 60.0
    """Seconds until object storage that does not answer is an error."""

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            UsageError: if one is invalid.
        """
        check_fields(self, ObjectArguments, self._named)
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise UsageError(f"{self._named('deadline')} is {self.deadline}, expected seconds above 0")
        self.remote()

    def remote(self) -> RemoteOptions:
        """Return the options as a store takes them.

        Raises:
            UsageError: if one is invalid.
        """
        return RemoteOptions(endpoint=self.endpoint, options=tuple(self.store_option), deadline_s=self.deadline)

    @staticmethod
    def _named(field: str) -> str:
        """Return how messages call a field: as an option of a command."""
        return "--" + field.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteArguments(ObjectArguments):
    """How a store in object storage is reached, and where it is cached."""

    SECTION = "storage: how to reach object storage, and what to cache"

    cache: str | None = None
    """Folder that caches stores in object storage; None: BUCKETLINE_CACHE, or bucketline in the user's cache directory."""
    cache_bytes: str | None = None
    """Size of the cache, all of its stores together, such as 500GiB; None: 80 % of the disk's free space."""

    def remote(self) -> RemoteOptions:
        """Return the options as a store takes them.

        Raises:
            UsageError: if one is invalid.
        """
        expect(self._named("cache"), self.cache, str | Path | None, "a folder, as str or Path, or None")
        return replace(
            ObjectArguments.remote(self),  # `super()` does not work in a dataclass with slots
            cache=None if self.cache is None else Path(self.cache),
            cache_bytes=None if self.cache_bytes is None else parse_bytes(str(self.cache_bytes), self._named("cache_bytes")),
        )
