"""Caches of NeMo Automodel: `metadata.json`, `metadata_shard_K.json`, and a `.pt` dictionary per image.

The metadata has absolute paths of the machine that cached; a file is found by the end of its path. Latents are stored as the
model is fed; sizes are width first, the crop is left and top. Source: `preprocessing_multiprocess.py`, `processors/` of 0.5.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.errors import SourceError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.read_files import as_tensor, loaded_dict, read_whole
from bucketline.ingest.importers.reading.text_layouts import text_of

if TYPE_CHECKING:
    from pathlib import Path


_METADATA = "metadata.json"
_FAMILIES = {
    "flux": "flux",
    "qwen_image": None,
    "qwen": None,
}  # by what `model_type` begins with; of others, scales are unknown


def _is_here(source: Path) -> bool:
    found = cache.read_json(source / _METADATA) if (source / _METADATA).is_file() else None
    return isinstance(found, dict) and "shards" in found and "model_type" in found


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    source = request.source
    captions = CaptionFolder(request, "the cache")
    whole = cache.read_json(source / _METADATA)
    if not isinstance(whole, dict) or not isinstance(whole.get("shards"), list):
        raise SourceError(f"{source / _METADATA} does not list shards; name the folder that NeMo's preprocessing wrote")
    model = str(whole.get("model_type", ""))
    known = next((name for name in _FAMILIES if model.startswith(name)), None)
    if known is None:
        raise cache.refuse_variant("NeMo Automodel", model, f"only those of images are known: {', '.join(_FAMILIES)}")
    items = [item for name in whole["shards"] for item in _items(source, str(name))]
    if (total := whole.get("total_items")) != len(items):
        raise SourceError(f"{source / _METADATA} says {total!r:.40} items, its shards list {len(items)}; cache it again")
    entries = []
    ids = cache.ids_of_paths([item["image_path"] for item in items])
    for item in items:
        sample_id = ids[item["image_path"]]
        own, problem = captions.of(sample_id)
        path = _relocated(source, item["cache_file"])
        entries.append(
            cache.CacheEntry(
                id=sample_id,
                image=item["image_path"],
                path=path or item["cache_file"].rpartition("/")[2],
                captions=own,
                problem=None if path else f"{item['cache_file']} is not below {source}",
                caption_problem=problem,
            )
        )
    return cache.CacheListing(
        entries=entries,
        variant=model,
        scaling=cache.Scaling.AS_FED,
        family=_FAMILIES[known],
        has_crops=True,
        captions_from=captions.told,
        vae=str(whole.get("model_name", "")) or None,
    )


def _items(source: Path, name: str) -> list[dict[str, str]]:
    path = source / name.rpartition("/")[2]
    found = cache.read_json(path)
    if not isinstance(found, list):
        raise SourceError(f"{path} is not a list of samples; cache it again")
    for item in found:
        fields = [item.get(key) for key in ("cache_file", "image_path")] if isinstance(item, dict) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise SourceError(f"{path} has a sample without cache_file and image_path; only caches of images are imported")
    return found


def _relocated(source: Path, path: str) -> str | None:
    """Return the path from the source of a file that another machine wrote: by its folder and name, or its name."""
    parts = path.replace("\\", "/").split("/")
    for number in (2, 1):
        own = "/".join(parts[-number:])
        if (source / own).is_file():
            return own
    return None


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    found = loaded_dict(read_whole(source, entry.path), entry.path)
    width, height = cache.pair(found.get("original_resolution"), "original_resolution")
    left, top = cache.pair(found.get("crop_offset"), "crop_offset")
    caption = str(found.get("prompt") or "")
    texts: tuple[cache.Text, ...] = ()
    if caption and variant.startswith("flux") and isinstance(pooled := found.get("pooled_prompt_embeds"), torch.Tensor):
        texts = (text_of(caption, as_tensor(found, "prompt_embeds"), pooled),)
    return cache.Cached(
        latent=cache.squeezed(as_tensor(found, "latent")),
        geometry=cache.Geometry(original=(height, width), crop=(top, left)),
        captions=(caption,) if caption else (),
        texts=texts,
    )


IMPORTER = cache.Importer(kind="nemo", is_here=_is_here, listed=_listed, read=_read)
