"""Caches of SimpleTuner: a `.pt` per image, and JSON files with the images' sizes and crops.

`aspect_ratio_bucket_metadata_ID.json` maps image paths to sizes, width first, and the crop's top and left. A latent's file is
`NAME.pt` or `SHA256(NAME).pt`, below a folder like the image's; it holds a tensor, possibly gzipped. A caption's embedding is
`MD5(caption)-MODEL.pt`. A caption file has one per line, or is one with `disable_multiline_split`; without such files, an image
may be captioned by its name. The instance prompt may precede each. Source: `caching/vae.py`, `metadata/backends/`,
`prompts.py`, `text_embeds.py` of version 4.8.0.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import SourceError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import as_tensor, read_torch, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_METADATA = re.compile(r"aspect_ratio_bucket_metadata_.+\.json")
_TEXT = re.compile(r"[0-9a-f]{32}-(?P<model>[A-Za-z0-9_.-]+)\.pt")
_FAMILIES = {"sd1x": "sd", "sd2x": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "pixart_sigma": "pixart_sigma"}
_OTHERS = ("kolors", "auraflow", "chroma", "lumina2", "sana", "qwen_image", "wan")  # whose latents are as the model is fed
_FIELDS = ("original_size", "target_size", "intermediary_size", "crop_coordinates")


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    metadata: dict[str, dict[str, Any]] = {}
    latents: dict[str, list[str]] = {}  # folders by name
    texts: dict[str, str] = {}  # path by name
    for folder, names in cache.files_below(request.source):
        for name in names:
            if _METADATA.fullmatch(name):
                metadata |= cache.read_json(request.source / folder / name)
            elif _TEXT.fullmatch(name):
                texts[name] = folder + name
            elif name.endswith(".pt"):
                latents.setdefault(name, []).append(folder)
    if not metadata:
        raise SourceError(
            f"{request.source} has no aspect_ratio_bucket_metadata_*.json, which has the images' sizes; name the "
            "folder that has both these files and the cache"
        )
    models = Counter(match["model"] for name in texts if (match := _TEXT.fullmatch(name)))
    if request.variant is None and len(models) != 1:
        there = ", ".join(sorted(models)) or "none, since it has no text embeddings"
        known = ", ".join((*_FAMILIES, *_OTHERS))
        raise SourceError(f"{request.source} does not say its model ({there}); name it by --variant, one of {known}")
    model, entries = request.variant or next(iter(models)), []
    for image, fields in metadata.items():
        path, problem = _file(image, latents)
        entries.append(
            cache.CacheEntry(
                image=image,
                path=path,
                variant=model,
                facts=fields,
                uncaptioned=(_stem(image).replace("_", " "),),
                problem=problem,
            )
        )
    own = {name: path for name, path in texts.items() if name.endswith(f"-{model}.pt")}
    return cache.FoundEntries(entries=entries, texts=own)


def _stem(image: str) -> str:
    return os.path.splitext(os.path.basename(image))[0]  # noqa: PTH119, PTH122 - as the trainer cuts it


def _file(image: str, latents: dict[str, list[str]]) -> tuple[str, str | None]:
    stem = _stem(image)
    for name in (f"{hashlib.sha256(stem.encode('utf-8', 'surrogatepass')).hexdigest()}.pt", f"{stem}.pt"):
        folders = latents.get(name, [])
        if len(folders) > 1:  # of images of one name in several folders: the one whose path ends as the image's
            parts = os.path.dirname(image).split("/")  # noqa: PTH120 - likewise
            shared = [_shared_end(folder.rstrip("/").split("/"), parts) for folder in folders]
            if shared.count(max(shared)) > 1:
                return "", f"{len(folders)} files are called {name}; name the folder of one cache"
            folders = [folders[shared.index(max(shared))]]
        if folders:
            return folders[0] + name, None
    return "", "it has no latent in the cache; let the trainer finish caching"


def _shared_end(one: list[str], other: list[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))))


def _spelled(text: str, trigger: str | None) -> Iterator[cache.Spelled]:
    """Yield the captions that a text may have become, and their spellings, which tell only the digest."""
    for start in dict.fromkeys((f"{trigger} " if trigger else "", "")):
        for own in (text.strip(), text, text.strip().replace("\n", "\r\n")):
            yield (start + text.strip()).strip(), start + own
            yield (start + text.strip()).strip(), (start + own).strip()


def _embedded(_entry: cache.CacheEntry, model: str, caption: str) -> dict[str, bool]:
    return {f"{hashlib.md5(caption.encode(), usedforsecurity=False).hexdigest()}-{model}.pt": True}


def _read(source: Path, entry: cache.CacheEntry, model: str) -> cache.Cached:
    (width, height), (target_w, target_h), (scaled_w, scaled_h), crop = (
        cache.pair(entry.facts[name], name) for name in _FIELDS
    )
    found = read_torch(source, entry.path)
    latent = found.get("latents") if isinstance(found, dict) else found
    if not isinstance(latent, torch.Tensor):
        raise cache.damaged(f"it holds a {type(latent).__name__}, expected a tensor")
    latent = cache.squeezed(latent)
    high, wide = latent.shape[-2:]
    if target_w * high != target_h * wide:
        raise cache.damaged(f"its latent is {high} x {wide}, its metadata has {target_h}x{target_w} px; cache it again")
    return cache.Cached(
        latent=latent,
        geometry=cache.Geometry(original=(height, width), resized=(scaled_h, scaled_w), crop=crop),
        texts=_texts(source, entry, model),
    )


def _texts(source: Path, entry: cache.CacheEntry, model: str) -> tuple[cache.Text, ...]:
    if entry.text_path is None or not entry.captions:
        return ()
    found = read_torch(source, entry.text_path)
    tokens, has_pooled = as_tensor(found, "prompt_embeds"), _FAMILIES.get(model) in ("sdxl", "sd3", "flux")
    return (text_of(entry.captions[0], tokens, as_tensor(found, "pooled_prompt_embeds") if has_pooled else None),)


IMPORTER = cache.Importer(
    kind="simpletuner",
    found=_found,
    read=_read,
    variants={name: cache.Variant(family=_FAMILIES.get(name)) for name in (*_FAMILIES, *_OTHERS)},
    has_crops=True,
    spelled=_spelled,
    embedded=_embedded,
    causes="an instance prompt before each caption (--trigger PROMPT names it), a caption edited since, captions that are "
    "elsewhere (--captions FOLDER has them as text files), caption_shuffle, a caption filter",
)
