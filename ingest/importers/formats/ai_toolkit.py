"""Caches of ai-toolkit: safetensors files in `_latent_cache` next to the images, `NAME_HASH.safetensors`.

The metadata has the complete geometry but for the original's size, and the version of the latent space. A mirrored copy is
a file of its own. Text is in `_t_e_cache/NAME_HASH.safetensors`; its caption is only in the hash, the MD5 of JSON with the
caption, the model of the text encoders and a version: an edited caption has another file, and the old one stays. Source:
`dataloader_mixins.py`, `prompt_utils.py` of August 2026.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.read_files import as_tensor, read_metadata, read_safetensors, values_by_role
from bucketline.ingest.importers.reading.text_layouts import text_of

if TYPE_CHECKING:
    from pathlib import Path


_LATENTS, _TEXTS = "_latent_cache/", "_t_e_cache/"
_SPACES = ("sd1", "sd2", "sdxl", "sd3", "flux", "flux1", "flux_kontext", "flex1", "flex2")  # models, as the digest calls them
_HASH_CHARS = len("_.safetensors") + 22
_FAMILIES = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux1": "flux"}
_UNKNOWN = ("flux2", "ltx", "audio", "pixel")  # in the names of latent spaces that are packed, normalised or no latents at all


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request)
    found: list[tuple[str, dict[str, Any]]] = []
    damaged_files: list[cache.CacheEntry] = []
    texts: set[str] = set()
    with_text: set[str] = set()  # images' paths without extension
    for folder, names in cache.files_below(request.source):
        for name in (name for name in names if name.endswith(".safetensors")):
            if folder.endswith(_LATENTS):
                try:
                    found.append((folder + name, _parsed(read_metadata(request.source, folder + name))))
                except RejectedError as error:
                    damaged_files.append(
                        cache.CacheEntry(id=folder + name, path=folder + name, captions=(), problem=error.detail)
                    )
            elif folder.endswith(_TEXTS):
                texts.add(folder + name)
                with_text.add(folder.removesuffix(_TEXTS) + name[:-_HASH_CHARS])
    spaces = Counter(str(fields.get("latent_space_version", "")) for _, fields in found)
    variant = cache.chosen_variant(spaces, request, "ai-toolkit", unknown=_UNKNOWN)
    entries, edited = [], 0
    for path, fields in found:
        if str(fields.get("latent_space_version", "")) != variant:
            continue
        folder = path[: path.rindex(_LATENTS)]
        image = folder + str(fields.get("filename", "")).replace("\\", "/").rpartition("/")[2]
        own, problem = captions.of(image)
        text_path = _text_path(image, own or (), texts)
        edited += bool(own) and text_path is None and image.rpartition(".")[0] in with_text
        flips = [name for name in ("flip_x", "flip_y") if fields.get(name)]
        entries.append(
            cache.CacheEntry(
                id="/".join([image, *flips]),
                path=path,
                at=tuple(_numbers(fields)),
                text_path=text_path,
                captions=own,
                caption_problem=problem,
            )
        )
    family = _FAMILIES.get(variant) if any(entry.text_path for entry in entries) else None
    notes = ["the cache does not have the originals' sizes: those that they were resized to are recorded"]
    if edited and family is not None:
        has = counted(edited, "caption") + (" has" if edited == 1 else " have")
        notes.append(f"{has} no embedding in the cache, which has that of another caption of the image: edited after caching")
    return cache.CacheListing(
        entries=[*entries, *damaged_files],
        variant=variant,
        scaling=cache.Scaling.AS_FED,
        family=family,
        has_crops=True,
        captions_from=captions.told,
        notes=notes,
    )


def _text_path(image: str, captions: tuple[str, ...], texts: set[str]) -> str | None:
    """Return which of `texts` has the embedding of an image's first caption, by the digest of what is embedded."""
    if not captions:
        return None
    folder, _, name = image.rpartition("/")
    stem = f"{folder}/{_TEXTS}".lstrip("/") + (name.rpartition(".")[0] or name)
    # the trainer puts one ", " between the parts of a caption
    tidy = ", ".join(part.strip() for part in captions[0].split(",") if part.strip())
    for caption in dict.fromkeys((captions[0], tidy)):
        for space in _SPACES:
            told = {"caption": caption, "text_embedding_space_version": space, "text_embedding_version": 1}
            digest = hashlib.md5(json.dumps(told, sort_keys=True).encode(), usedforsecurity=False).digest()
            path = f"{stem}_{base64.urlsafe_b64encode(digest).decode('ascii').rstrip('=')}.safetensors"
            if path in texts:
                return path
    return None


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


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    tensors, _ = read_safetensors(source, entry.path)
    if len(entry.at) != 4:
        raise cache.damaged("its metadata lacks the size that it was resized to, or the crop")
    return cache.Cached(
        latent=cache.squeezed(as_tensor(tensors, "latent")),
        geometry=cache.Geometry(resized=cache.pair(entry.at[:2], "scaled size"), crop=cache.pair(entry.at[2:], "crop")),
        texts=_texts(source, entry, variant),
        columns=values_by_role(tensors, {"first_frame_latent": "control/first_frame"}),
        leaves_out="audio_latent" if "audio_latent" in tensors else None,
    )


def _texts(source: Path, entry: cache.CacheEntry, variant: str) -> tuple[cache.Text, ...]:
    if entry.text_path is None or not entry.captions or variant not in _FAMILIES:
        return ()
    tensors, _ = read_safetensors(source, entry.text_path)
    return (text_of(entry.captions[0], as_tensor(tensors, "text_embed"), tensors.get("pooled_embed")),)


IMPORTER = cache.Importer(
    kind="ai-toolkit", is_here=cache.has_file(r".+\.safetensors", f".*{_LATENTS}"), listed=_listed, read=_read
)
