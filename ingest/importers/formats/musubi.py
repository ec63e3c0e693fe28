"""Caches of kohya-ss/musubi-tuner: a safetensors file per image, `NAME_WWWWxHHHH_ARCH.safetensors`, in a folder of their own.

Keys are `latents_FxHxW_DTYPE`; the metadata has the original's size, not the crop. Text is in `NAME_ARCH_te.safetensors`, with
its caption as `caption1`. Names have no folder, so that of two images with one name only one is cached. Source: `cache_io.py`,
`architectures.py` of version 0.3.4.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder, FileForm
from bucketline.ingest.importers.reading.read_files import read_safetensors
from bucketline.ingest.importers.reading.text_layouts import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


_ARCH = r"hv|wan|fp|fk|f2d|f2k4b|f2k9b|qi|qie|qil|k5|hv15|zi|ho1|i4|kr2"
_IMAGE = re.compile(rf"(?P<stem>.+)_(?P<width>\d{{4,}})x(?P<height>\d{{4,}})_(?P<arch>{_ARCH})\.safetensors")
_VIDEO = re.compile(r"(?P<video>.+)_\d{5}-\d{3}(-\d+)?")  # the stem of a part of a video, with first frame and number of frames
_LATENT = re.compile(r"latents_(?:(?P<column>control(?:_\d+)?|image|clean\w*?)_)?(?:\d+x)?\d+x\d+_[a-z0-9_]+")
_SCALING = {
    "hv": cache.Scaling.NONE,
    "zi": cache.Scaling.NONE,
    "fk": cache.Scaling.AS_FED,
    "wan": cache.Scaling.AS_FED,
    "qi": cache.Scaling.AS_FED,
    "qie": cache.Scaling.AS_FED,
    "f2d": cache.Scaling.PACKED,
    "f2k4b": cache.Scaling.PACKED,
    "f2k9b": cache.Scaling.PACKED,
    "kr2": cache.Scaling.AS_FED,
    "k5": cache.Scaling.AS_FED,
}
_MODE = ("zi", "wan", "qi", "qie", "kr2", "f2d", "f2k4b", "f2k9b")  # of the posterior; the others store a sample
_WHY_NOT = {
    "qil": "its layers have no place in the import",
    "fp": "FramePack's are of videos",
}
_FAMILIES = {"fk": "flux", "wan": "transformers"}
_FLUX2_TEXT = (
    "Flux.2's embeddings are of several layers of its language model, which no text family here makes of the empty caption"
)


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, "caption1 of the text caches", form=FileForm.WHOLE)
    found = [
        (folder, name, match, set(names))
        for folder, names in cache.files_below(request.source)
        for name in names
        if (match := _IMAGE.fullmatch(name)) is not None
    ]
    arch = cache.chosen_variant(Counter(match["arch"] for _, _, match, _ in found), request, "musubi")
    if arch not in _SCALING:
        raise cache.refuse_variant("musubi", arch, _WHY_NOT.get(arch, "how they are scaled is unknown"))
    entries = []
    for folder, name, match, names in found:
        if match["arch"] != arch:
            continue
        sample_id, part = folder + match["stem"], _VIDEO.fullmatch(match["stem"])
        text = f"{part['video'] if part else match['stem']}_{arch}_te.safetensors"
        own, problem = captions.of(sample_id, stem=sample_id)
        text_path = folder + text if text in names else None
        entries.append(
            cache.CacheEntry(
                id=sample_id,
                path=folder + name,
                text_path=text_path,
                captions=() if own is None and text_path is None else own,
                caption_problem=problem,
            )
        )
    has_text = any(entry.text_path for entry in entries)
    return cache.CacheListing(
        entries=entries,
        variant=arch,
        scaling=_SCALING[arch],
        latents="mode" if arch in _MODE else "sample",
        family=_FAMILIES.get(arch) if has_text else None,
        text_refused=_FLUX2_TEXT if _SCALING[arch] is cache.Scaling.PACKED else None,
        captions_from=captions.told,
    )


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    tensors, metadata = read_safetensors(source, entry.path)
    columns: dict[str, list[str]] = {}
    for name in tensors:
        if match := _LATENT.fullmatch(name):
            columns.setdefault(match["column"] or "", []).append(name)
    names = columns.pop("", [])
    if len(names) != 1:
        raise cache.damaged(f"it has {len(names)} latents, only {', '.join(sorted(tensors))[:200] or 'nothing'}; expected one")
    if (arch := metadata.get("architecture")) is None or "width" not in metadata or "height" not in metadata:
        raise cache.damaged(f"its metadata has no architecture, width and height, only {', '.join(sorted(metadata))[:200]}")
    width, height = cache.pair((metadata["width"], metadata["height"]), "width and height")
    captions: tuple[str, ...] | None = None
    texts: tuple[cache.Text, ...] = ()
    if entry.text_path is not None:
        found, told = read_safetensors(source, entry.text_path)
        caption = told.get("caption1", "")
        captions, texts = (caption,) if caption else (), _texts(found, caption, variant)
    others = sorted(column for column in columns if not column.startswith("control"))
    controls = {_role(column): cache.squeezed(tensors[of[0]], of[0]) for column, of in columns.items() if column not in others}
    return cache.Cached(
        latent=cache.squeezed(tensors[names[0]]),
        geometry=cache.Geometry(original=(height, width)),
        captions=captions,
        texts=texts,
        columns=controls,
        leaves_out=f"{', '.join(others)} latents of {arch}" if others else None,
    )


def _role(column: str) -> str:
    """Return the role of a control image's latents: `control/image`, or of several `control/0` and so on."""
    return f"control/{column.removeprefix('control').removeprefix('_') or 'image'}"


def _texts(tensors: Mapping[str, Tensor], caption: str, arch: str) -> tuple[cache.Text, ...]:
    def own(*contents: str) -> Tensor:
        for name, value in tensors.items():
            if any(re.fullmatch(rf"{content}_(float|bfloat|fp|bf)\w*", name) for content in contents):
                return value.float()
        raise cache.damaged(f"its text cache has no {contents[0]}, only {', '.join(sorted(tensors))[:200]}")

    if not caption:
        return ()
    if arch == "fk":
        return (text_of(caption, own("t5_vec"), own("clip_l_pooler")),)
    if arch == "wan":
        return (text_of(caption, own("varlen_t5")),)
    return ()


IMPORTER = cache.Importer(kind="musubi", is_here=cache.has_file(_IMAGE), listed=_listed, read=_read)
