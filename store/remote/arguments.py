"""The options of every command that takes a store's URL."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from bucketline.errors import UsageError
from bucketline.option_types import DECIDES_NOTHING, RESUME_FREE, check_fields, expect
from bucketline.option_value import ByteSize, as_option, parse_values
from bucketline.options import Arg, Repeated
from bucketline.store.remote.urls import RemoteOptions

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
