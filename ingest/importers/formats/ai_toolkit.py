"""Caches of ai-toolkit: safetensors files in `_latent_cache` next to the images, `NAME_HASH.safetensors`.

The metadata has the complete geometry but for the original's size, and the version of the latent space. A mirrored copy is
a file of its own. Text is in `_t_e_cache/NAME_HASH.safetensors`; its caption is only in the hash. Source:
`dataloader_mixins.py`, `prompt_utils.py` of August 2026.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.read_files import as_tensor, read_metadata, read_safetensors
from bucketline.ingest.importers.reading.text_layouts import tokens_of
from bucketline.store.format.columns import POOLED

if TYPE_CHECKING:
    from pathlib import Path


_LATENTS, _TEXTS = "_latent_cache/", "_t_e_cache/"
_NAME = re.compile(r"(?P<stem>.+)_[A-Za-z0-9_-]{22,24}=*\.safetensors")
_FAMILIES = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux1": "flux"}
_UNKNOWN = ("flux2", "ltx", "audio", "pixel")  # in the names of latent spaces that are packed, normalised or no latents at all


def _is_here(source: Path) -> bool:
    return any(
        folder.endswith(_LATENTS) and any(name.endswith(".safetensors") for name in names)
        for folder, names in cache.files_below(source)
    )


def _listed(request: cache.ListRequest) -> cache.Listing:
    captions = CaptionFolder(request)
    found: list[tuple[str, dict[str, Any]]] = []
    damaged_files: list[cache.Entry] = []
    texts: dict[str, list[str]] = {}  # by the image's path without extension
    for folder, names in cache.files_below(request.source):
        for name in (name for name in names if name.endswith(".safetensors")):
            if folder.endswith(_LATENTS):
                try:
                    found.append((folder + name, _parsed(read_metadata(request.source, folder + name))))
                except RejectedError as error:
                    damaged_files.append(cache.Entry(id=folder + name, path=folder + name, captions=(), problem=error.detail))
            elif folder.endswith(_TEXTS) and (match := _NAME.fullmatch(name)):
                texts.setdefault(folder.removesuffix(_TEXTS) + match["stem"], []).append(folder + name)
    variant = cache.chosen_variant(
        Counter(str(fields.get("latent_space_version", "")) for _, fields in found), request, "ai-toolkit"
    )
    if any(word in variant.lower() for word in _UNKNOWN):
        raise cache.refuse_variant("ai-toolkit", variant, "how they are scaled is unknown")
    entries = []
    for path, fields in found:
        if str(fields.get("latent_space_version", "")) != variant:
            continue
        folder = path[: path.rindex(_LATENTS)]
        image = folder + str(fields.get("filename", "")).replace("\\", "/").rpartition("/")[2]
        own, problem = captions.of(image)
        of = texts.get(image.rpartition(".")[0], [])
        flips = [name for name in ("flip_x", "flip_y") if fields.get(name)]
        entries.append(
            cache.Entry(
                id="/".join([image, *flips]),
                path=path,
                at=tuple(_numbers(fields)),
                text_path=of[0] if len(of) == 1 and own else None,
                captions=own,
                caption_problem=problem,
            )
        )
    return cache.Listing(
        entries=[*entries, *damaged_files],
        variant=variant,
        scaling=cache.Scaling.AS_FED,
        family=_FAMILIES.get(variant) if any(entry.text_path for entry in entries) else None,
        has_crops=True,
        captions_from=captions.told,
        notes=["the cache does not have the originals' sizes: those that they were resized to are recorded"],
    )


def _parsed(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the metadata's values, each of which may be JSON."""
    found: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    if not found.get("filename"):
        raise cache.damaged(f"its metadata has no filename, only {', '.join(sorted(metadata))[:200] or 'nothing'}")
    return found


def _numbers(fields: dict[str, Any]) -> list[int]:
    names = ("scale_to_height", "scale_to_width", "crop_y", "crop_x")
    try:
        return [int(fields[name]) for name in names]
    except (KeyError, TypeError, ValueError):
        return []


def _read(source: Path, entry: cache.Entry, variant: str) -> cache.Cached:
    tensors, _ = read_safetensors(source, entry.path)
    if len(entry.at) != 4:
        raise cache.damaged("its metadata lacks the size that it was resized to, or the crop")
    first = (
        {} if "first_frame_latent" not in tensors else {"control/first_frame": cache.squeezed(tensors["first_frame_latent"])}
    )
    return cache.Cached(
        latent=cache.squeezed(as_tensor(tensors, "latent")),
        geometry=cache.Geometry(resized=cache.pair(entry.at[:2], "scaled size"), crop=cache.pair(entry.at[2:], "crop")),
        texts=_texts(source, entry, variant),
        columns=first,
        leaves_out="audio_latent" if "audio_latent" in tensors else None,
    )


def _texts(source: Path, entry: cache.Entry, variant: str) -> tuple[cache.Text, ...]:
    if entry.text_path is None or not entry.captions or variant not in _FAMILIES:
        return ()
    tensors, _ = read_safetensors(source, entry.text_path)
    fixed = {POOLED: tensors["pooled_embed"].float().reshape(-1)} if "pooled_embed" in tensors else {}
    return (cache.Text(caption=entry.captions[0], tokens=tokens_of(as_tensor(tensors, "text_embed").float()), fixed=fixed),)


IMPORTER = cache.Importer(kind="ai-toolkit", is_here=_is_here, listed=_listed, read=_read)
