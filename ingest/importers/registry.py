"""The formats that `ingest import` knows, and how to recognise one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.changes import BY_A_FILE
from bucketline.ingest.importers.formats import (
    ai_toolkit,
    diffusion_pipe,
    fastvideo,
    kohya,
    mds,
    musubi,
    nemo,
    onetrainer,
    simpletuner,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.importers.cache import CacheListing, Importer, ListRequest

_MODULES = (kohya, musubi, simpletuner, onetrainer, ai_toolkit, diffusion_pipe, mds, nemo, fastvideo)
IMPORTERS: dict[str, Importer] = {one.IMPORTER.kind: one.IMPORTER for one in _MODULES}


def importer_of(kind: str, source: Path) -> Importer:
    """Return the importer of a kind; of `auto`, that of the only format that the source has.

    Raises:
        SourceError: if the source is not a folder, or no format or several are recognised.
    """
    if not source.is_dir():
        raise SourceError(f"{source} is not a folder; expected the folder of a cache")
    if kind != "auto":
        return IMPORTERS[kind]
    found = [name for name, importer in IMPORTERS.items() if _is_here(importer, source)]
    if len(found) != 1:
        what = (
            f"{source} looks like the caches of {' and '.join(found)}"
            if found
            else f"{source} is not a cache of a known format"
        )
        raise SourceError(f"{what}; name the KIND, one of {', '.join(IMPORTERS)}")
    return IMPORTERS[found[0]]


def _is_here(importer: Importer, source: Path) -> bool:
    try:
        return importer.is_here(source)
    except (SourceError, *BY_A_FILE):  # a JSON file that is damaged, or of something else
        return False


def listed(importer: Importer, request: ListRequest) -> CacheListing:
    """Return a cache's entries.

    Raises:
        SourceError: if the files that describe the cache do not hold what the trainer writes.
    """
    try:
        return importer.listed(request)
    except (RejectedError, *BY_A_FILE) as error:
        raise SourceError(
            f"{request.source}: the files that list this cache of {importer.kind} are not as the trainer writes them "
            f"({type(error).__name__}: {error!s:.150}); cache it again, or restore them"
        ) from error
