"""Caches of kohya-ss/musubi-tuner: a safetensors file per image, `NAME_WWWWxHHHH_ARCH.safetensors`, in a folder of their own.

Keys are `latents_FxHxW_DTYPE`; the metadata has the original's size, not the crop. Text is in `NAME_ARCH_te.safetensors`, with
its caption as `caption1`. Names have no folder, so that of two images with one name only one is cached. Source: `cache_io.py`,
`architectures.py` of version 0.3.4.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import read_safetensors, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_ARCH = r"hv|wan|fp|fk|f2d|f2k4b|f2k9b|qi|qie|qil|k5|hv15|zi|ho1|i4|kr2"
_IMAGE = re.compile(rf"(?P<stem>.+)_(?P<width>\d{{4,}})x(?P<height>\d{{4,}})_(?P<arch>{_ARCH})\.safetensors")
_LATENT = re.compile(r"latents_(?:(?P<column>control(?:_\d+)?|image|clean\w*?)_)?(?:\d+x)?\d+x\d+_[a-z0-9_]+")
_FLUX2 = cache.Variant(scaling=cache.Scaling.PACKED, latents="mode")
_VARIANTS = {
    "hv": cache.Variant(scaling=cache.Scaling.NONE),
    "zi": cache.Variant(scaling=cache.Scaling.NONE, latents="mode"),
    "fk": cache.Variant(family="flux"),
    "wan": cache.Variant(latents="mode"),
    "qi": cache.Variant(latents="mode"),
    "qie": cache.Variant(latents="mode"),
    "f2d": _FLUX2,
    "f2k4b": _FLUX2,
    "f2k9b": _FLUX2,
    "kr2": cache.Variant(latents="mode"),
    "k5": cache.Variant(),
    "qil": cache.Variant(why_not="its layers have no place in the import"),
    "fp": cache.Variant(why_not="FramePack's are of videos"),
}


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    entries = []
    for folder, names in cache.files_below(request.source):
        own = set(names)
        for name in names:
            if (match := _IMAGE.fullmatch(name)) is None:
                continue
            stem = match["stem"]
            text = f"{stem}_{match['arch']}_te.safetensors"
            entries.append(
                cache.CacheEntry(
                    id=folder + stem,
                    path=folder + name,
                    variant=match["arch"],
                    text_path=folder + text if text in own else None,
                    captioned=f"{folder}{stem}.",
                    captions=None if text in own else (),
                )
            )
    return cache.FoundEntries(entries=entries)


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    tensors, metadata = read_safetensors(source, entry.path)
    columns: dict[str, list[str]] = {}
    for name in tensors:
        if match := _LATENT.fullmatch(name):
            columns.setdefault(match["column"] or "", []).append(name)
    names = columns.pop("", [])
    if len(names) != 1:
        raise cache.damaged(f"it has {len(names)} latents, only {', '.join(sorted(tensors))[:200] or 'nothing'}; expected one")
    width, height = cache.pair((metadata["width"], metadata["height"]), "width and height")
    captions: tuple[str, ...] | None = None
    texts: tuple[cache.Text, ...] = ()
    if entry.text_path is not None:
        found, told = read_safetensors(source, entry.text_path)
        caption = told.get("caption1", "")
        captions, texts = (caption,) if caption else (), _texts(found, caption, variant)
    return cache.Cached(
        latent=cache.squeezed(tensors[names[0]]),
        geometry=cache.Geometry(original=(height, width)),
        captions=captions,
        texts=texts,
        left_out=tuple(f"{column} latents" for column in sorted(columns)),
    )


def _texts(tensors: Mapping[str, Tensor], caption: str, arch: str) -> tuple[cache.Text, ...]:
    def own(content: str) -> Tensor:
        for name, value in tensors.items():
            if re.fullmatch(rf"{content}_(float|bfloat|fp|bf)\w*", name):
                return value.float()
        raise cache.damaged(f"its text cache has no {content}, only {', '.join(sorted(tensors))[:200]}")

    return (text_of(caption, own("t5_vec"), own("clip_l_pooler")),) if caption and arch == "fk" else ()


IMPORTER = cache.Importer(
    kind="musubi",
    found=_found,
    read=_read,
    variants=_VARIANTS,
    captions_in="caption1 of the text caches",
    form=cache.FileForm.WHOLE,
)
