"""Caches of musubi-tuner: `NAME_WWWWxHHHH_ARCH.safetensors` in a folder of their own; W and H are the original's size.

Keys are `latents_FxHxW_DTYPE`. `NAME_ARCH_te.safetensors` has the caption as `caption1` in its metadata, and text embeddings,
which are not imported. Names have no folder, so that of two images with one name only one is cached. Source: `cache_io.py`,
`architectures.py` of version 0.3.4.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import CacheEntry, Importer, Scaling, Variant
from bucketline.ingest.importers.reading import files_below, read_metadata, read_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ARCH = r"hv|wan|fp|fk|f2d|f2k4b|f2k9b|qi|qie|qil|k5|hv15|zi|ho1|i4|kr2"
_IMAGE = re.compile(rf"(?P<stem>.+)_(?P<width>\d{{4,}})x(?P<height>\d{{4,}})_(?P<arch>{_ARCH})\.safetensors", re.DOTALL)
_LATENT = re.compile(r"latents_(?:(?P<column>control|image|clean)\w*?_)?(?:\d+x)?\d+x\d+_[a-z0-9_]+")


def _found(source: Path) -> Iterator[CacheEntry]:
    for folder, names in files_below(source):
        own = set(names)
        for match in filter(None, map(_IMAGE.fullmatch, names)):
            stem, text, problem = folder + match["stem"], f"{match['stem']}_{match['arch']}_te.safetensors", None
            try:
                caption = read_metadata(source, folder + text).get("caption1", "") if text in own else ""
            except RejectedError as error:
                caption, problem = "", error.detail
            yield CacheEntry(
                id=stem,
                path=folder + match[0],
                variant=match["arch"],
                facts={"original": (match["height"], match["width"])},
                captioned=stem,
                captions=(caption,) if caption else (),
                problem=problem,
            )


def _read(source: Path, entry: CacheEntry) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in read_values(source, entry.path).items():
        if match := _LATENT.fullmatch(name):
            found["latent" if match["column"] is None else f"{match['column']} latents"] = value
    return found


IMPORTER = Importer(
    kind="musubi",
    found=_found,
    read=_read,
    left_out=("control latents", "image latents", "clean latents"),
    variants={
        "hv": Variant(scaling=Scaling.NONE),
        "zi": Variant(scaling=Scaling.NONE, latents="mode"),
        **dict.fromkeys(("fk", "k5"), Variant()),
        **dict.fromkeys(("wan", "qi", "qie", "kr2"), Variant(latents="mode")),
        **dict.fromkeys(("f2d", "f2k4b", "f2k9b"), Variant(scaling=Scaling.PACKED, latents="mode")),
    },
    captions_in="caption1 of the text caches",
)
