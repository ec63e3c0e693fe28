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
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import SourceError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder, EmbeddedCaptions
from bucketline.ingest.importers.reading.read_files import read_torch
from bucketline.ingest.importers.reading.text_layouts import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.ingest.importers.reading.caption_folder import Spelled


_METADATA = re.compile(r"aspect_ratio_bucket_metadata_.+\.json")
_TEXT = re.compile(r"[0-9a-f]{32}-(?P<model>[A-Za-z0-9_.-]+)\.pt")
# Models whose latents are stored as the model is fed, and the text families whose layout theirs have.
_MODELS: dict[str, str | None] = {
    "sd1x": "sd",
    "sd2x": "sd",
    "sdxl": "sdxl",
    "kolors": None,
    "sd3": "sd3",
    "flux": "flux",
    "pixart_sigma": "pixart_sigma",
    "auraflow": None,
    "chroma": None,
    "lumina2": None,
    "sana": None,
    "qwen_image": None,
    "wan": None,
}
_CAUSES = (
    "an instance prompt before each caption (--trigger PROMPT names it), a caption edited since, captions that are elsewhere "
    "(--captions FOLDER has them as text files), caption_shuffle, a caption filter"
)
_FIELDS = ("original_size", "target_size", "intermediary_size")


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    metadata: dict[str, dict[str, Any]] = {}
    latents: dict[str, list[str]] = {}  # folders by name
    texts: dict[str, str] = {}  # path by name
    models: Counter[str] = Counter()
    for folder, names in cache.files_below(request.source):
        for name in names:
            if _METADATA.fullmatch(name):
                metadata |= _images(request.source / folder / name)
            elif (match := _TEXT.fullmatch(name)) is not None:
                texts[name] = folder + name
                models[match["model"]] += 1
            elif name.endswith(".pt"):
                latents.setdefault(name, []).append(folder)
    if not metadata:
        raise SourceError(
            f"{request.source} has no aspect_ratio_bucket_metadata_*.json, which has the images' sizes; name the "
            "folder that has both these files and the cache"
        )
    model = _model(models, request)
    captions = CaptionFolder(request, spelled=_spelled)
    known = EmbeddedCaptions(captions, {name for name in texts if name.endswith(f"-{model}.pt")})
    entries, ids = [], cache.ids_of_paths(list(metadata))
    files = {path: _file(path, latents) for path in metadata}
    sharing: dict[str | None, list[str]] = {}  # ids by file
    for path, (found, _) in files.items():
        sharing.setdefault(found, []).append(ids[path])
    for path, fields in metadata.items():
        found, why = files[path]
        if found is not None and len(shared := sharing[found]) > 1:
            why = f"{' and '.join(shared[:5])} share it; rename the others, and cache them again"
        own, problem, text = known.of(
            ids[path], lambda caption: {_text_name(caption, model): True}, [_stem(path).replace("_", " ")]
        )
        entries.append(
            cache.CacheEntry(
                id=ids[path],
                image=path,
                path=found or "",
                at=tuple(_numbers(fields)),
                text_path=None if text is None else texts[text],
                captions=own,
                problem=why,
                caption_problem=problem,
            )
        )
    listing = cache.CacheListing(
        entries=entries,
        variant=model,
        scaling=cache.Scaling.AS_FED,
        family=_MODELS[model] if any(entry.text_path for entry in entries) else None,
        has_crops=True,
        captions_from=captions.told,
    )
    known.tell(listing, _CAUSES)
    return listing


def _spelled(text: str, trigger: str | None) -> Iterator[Spelled]:
    """Yield the captions that a text may have become, and their spellings, which tell only the digest."""
    for start in dict.fromkeys((f"{trigger} " if trigger else "", "")):
        for own in (text.strip(), text, text.strip().replace("\n", "\r\n")):
            yield (start + text.strip()).strip(), start + own
            yield (start + text.strip()).strip(), (start + own).strip()


def _stem(image: str) -> str:
    return os.path.splitext(os.path.basename(image))[0]  # noqa: PTH119, PTH122 - as the trainer cuts it


def _images(path: Path) -> dict[str, dict[str, Any]]:
    found = cache.read_json(path)
    if not isinstance(found, dict) or not all(isinstance(fields, dict) for fields in found.values()):
        raise SourceError(f"{path} does not map images to their sizes; make the cache again, or restore the file")
    return found


def _model(models: Counter[str], request: cache.ListRequest) -> str:
    """Return the model's name: that of the text embeddings, or what the user says."""
    model = request.variant
    if model is None:
        if len(models) != 1:
            there = ", ".join(sorted(models)) or "none, since it has no text embeddings"
            raise SourceError(
                f"{request.source} does not say its model ({there}); name it by --variant, one of {', '.join(_MODELS)}"
            )
        model = next(iter(models))
    if model not in _MODELS:
        raise cache.refuse_variant("SimpleTuner", model, f"how they are scaled is unknown; known are {', '.join(_MODELS)}")
    return model


def _file(image: str, latents: dict[str, list[str]]) -> tuple[str | None, str | None]:
    """Return the path of an image's latent, or why there is none."""
    stem = _stem(image)
    for name in (f"{hashlib.sha256(stem.encode('utf-8', 'surrogatepass')).hexdigest()}.pt", f"{stem}.pt"):
        folders = latents.get(name, [])
        if len(folders) > 1:  # of images of one name in several folders: the one whose path ends as the image's
            parts = os.path.dirname(image).split("/")  # noqa: PTH120 - likewise
            shared = [_shared_end(folder.rstrip("/").split("/"), parts) for folder in folders]
            if shared.count(max(shared)) > 1:
                return None, f"{len(folders)} files are called {name}; name the folder of one cache"
            folders = [folders[shared.index(max(shared))]]
        if folders:
            return folders[0] + name, None
    return None, "it has no latent in the cache; let the trainer finish caching"


def _shared_end(one: list[str], other: list[str]) -> int:
    number = 0
    while number < min(len(one), len(other)) and one[-1 - number] == other[-1 - number]:
        number += 1
    return number


def _text_name(caption: str, model: str) -> str:
    return f"{hashlib.md5(caption.encode(), usedforsecurity=False).hexdigest()}-{model}.pt"


def _numbers(fields: dict[str, Any]) -> list[int]:
    """Return the sizes and the crop in an image's metadata as 8 numbers; none if they are not what they should be."""
    try:
        sizes = [cache.pair(fields[name], name) for name in _FIELDS]
        return [number for size in (*sizes, cache.pair(fields["crop_coordinates"], "crop_coordinates")) for number in size]
    except Exception:  # noqa: BLE001 - whatever the JSON holds instead
        return []


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    if len(entry.at) != 8:
        raise cache.damaged(f"its metadata lacks {', '.join(_FIELDS)} or crop_coordinates, or has something else there")
    width, height, target_w, target_h, scaled_w, scaled_h, top, left = (int(number) for number in entry.at)
    found = read_torch(source, entry.path)
    latent = cache.squeezed(_latent(found))
    high, wide = latent.shape[-2:]
    if target_w * high != target_h * wide:
        raise cache.damaged(f"its latent is {high} x {wide}, its metadata has {target_h}x{target_w} px; cache it again")
    return cache.Cached(
        latent=latent,
        geometry=cache.Geometry(original=(height, width), resized=(scaled_h, scaled_w), crop=(top, left)),
        texts=_texts(source, entry, variant),
    )


def _latent(found: Any) -> torch.Tensor:  # noqa: ANN401 - what the file holds
    if isinstance(found, dict):
        found = found.get("latents")
    if not isinstance(found, torch.Tensor):
        raise cache.damaged(f"it holds a {type(found).__name__}, expected a tensor")
    return found


def _texts(source: Path, entry: cache.CacheEntry, model: str) -> tuple[cache.Text, ...]:
    if entry.text_path is None or not entry.captions:
        return ()
    found = read_torch(source, entry.text_path)
    tokens = found.get("prompt_embeds") if isinstance(found, dict) else None
    if not isinstance(tokens, torch.Tensor):
        raise cache.damaged(f"{entry.text_path} has no prompt_embeds")
    pooled = found.get("pooled_prompt_embeds") if _MODELS[model] in ("sdxl", "sd3", "flux") else tokens
    if not isinstance(pooled, torch.Tensor):
        raise cache.damaged(f"{entry.text_path} has no pooled_prompt_embeds")
    return (text_of(entry.captions[0], tokens, None if pooled is tokens else pooled),)


IMPORTER = cache.Importer(kind="simpletuner", is_here=cache.has_file(_METADATA), listed=_listed, read=_read)
