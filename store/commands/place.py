"""Where a store is, as commands take it: a path, or a URL in object storage, with the options that reach it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.store.remote.urls import RemoteOptions, is_url, parse_url, refuse_misspelt

if TYPE_CHECKING:
    from bucketline.store.remote.objects import ObjectFolder


def store_place(text: str) -> Path | str:
    """Return a store's place as a user typed it: a path, or a URL as text.

    Raises:
        UsageError: if it is a URL that cannot be a store's: a scheme that is not known, one slash, a query.
    """
    refuse_misspelt(text)
    return text if is_url(text) else Path(text)


def _spec(metavar: str) -> tyro.constructors.PrimitiveConstructorSpec[Path | str]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: store_place(args[0]),
        is_instance=lambda value: isinstance(value, Path | str),
        str_from_instance=lambda value: [str(value)],
    )


StorePlace = Annotated[Path | str, _spec("STORE")]
StoreUrl = Annotated[Path | str, _spec("URL")]


@dataclass(frozen=True, kw_only=True)
class RemoteArguments:
    """Options that reach a store in object storage."""

    endpoint: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Server of an S3-compatible store. Default: the provider's, or what AWS_ENDPOINT_URL says."""
    store_option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Option of the object storage client, such as region=eu-central-1 or skip_signature=true. Repeatable."""

    @property
    def remote(self) -> RemoteOptions:
        """The options as the store takes them."""
        return RemoteOptions(endpoint=self.endpoint, options=self.store_option)

    def folder(self, url: Path | str) -> ObjectFolder:
        """Return the folder at a URL.

        Raises:
            UsageError: if it is a path.
        """
        from bucketline.store.remote.objects import ObjectFolder

        parse_url(str(url))
        return ObjectFolder.open(str(url), self.remote)
