"""Caches of ai-toolkit: safetensors files in `_latent_cache` next to the images, `NAME_HASH.safetensors`.

The metadata has the complete geometry but for the original's size, and the version of the latent space. A mirrored copy is
a file of its own. Text is in `_t_e_cache/NAME_HASH.safetensors`; its caption is only in the hash, the MD5 of JSON with the
caption, the model of the text encoders and a version: an edited caption has another file, and the old one stays. A caption
file is one caption; of its parts between commas some versions strip the white space, and others double that before a part.
The trigger word replaces `[trigger]` and `[name]`, and precedes a caption that lacks it; without one, these are removed.
Source: `dataloader_mixins.py`, `prompt_utils.py` of August 2026.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder, EmbeddedCaptions, FileForm
from bucketline.ingest.importers.reading.read_files import as_tensor, read_metadata, read_safetensors, values_by_role
from bucketline.ingest.importers.reading.text_layouts import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.ingest.importers.reading.caption_folder import Spelled


_LATENTS, _TEXTS = "_latent_cache/", "_t_e_cache/"
_SPACES = ("sd1", "sd2", "sdxl", "sd3", "flux", "flux1", "flux_kontext", "flex1", "flex2")  # models, as the digest calls them
_HASH_CHARS = len("_.safetensors") + 22
_FAMILIES = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux1": "flux"}
_PLACEHOLDERS = ("[name]", "[trigger]")
_CAUSES = (
    "the trainer's trigger_word (--trigger WORD names it), a caption edited since, its default_caption or replacements, "
    "words that are shuffled or drawn, control images"
)
_UNKNOWN = ("flux2", "ltx", "audio", "pixel")  # in the names of latent spaces that are packed, normalised or no latents at all


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, form=FileForm.WHOLE, spelled=_spelled)
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
    known, entries = EmbeddedCaptions(captions, texts), []
    for path, fields in found:
        if str(fields.get("latent_space_version", "")) != variant:
            continue
        folder = path[: path.rindex(_LATENTS)]
        image = folder + str(fields.get("filename", "")).replace("\\", "/").rpartition("/")[2]
        stem = image.rpartition(".")[0] or image
        paths = partial(_text_paths, stem, variant) if stem in with_text else _no_paths
        own, problem, text_path = known.of(image, paths)
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
    listing = cache.CacheListing(
        entries=[*entries, *damaged_files],
        variant=variant,
        scaling=cache.Scaling.AS_FED,
        family=_FAMILIES.get(variant) if any(entry.text_path for entry in entries) else None,
        has_crops=True,
        captions_from=captions.told,
        notes=["the cache does not have the originals' sizes: those that they were resized to are recorded"],
    )
    known.tell(listing, _CAUSES)
    return listing


def _spelled(text: str, trigger: str | None) -> Iterator[Spelled]:
    """Yield the captions that a text may have become, and their spellings, which tell only the digest."""
    tidy = ", ".join(part.strip() for part in text.split(",") if part.strip())
    spellings = [", ".join(own.split(",")) for own in (text, text.strip())] + [tidy, text, text.strip()]
    for change in (lambda own: _with_trigger(own, trigger or ""), lambda own: _with_trigger(own, ""), str):
        for spelling in spellings:
            is_same = "".join(spelling.split()) == "".join(text.split())
            yield change(text.strip() if is_same else spelling).strip(), change(spelling)


def _with_trigger(text: str, trigger: str) -> str:
    for placeholder in _PLACEHOLDERS:
        text = text.replace(placeholder, trigger)
    return text if trigger in text else f"{trigger} {text}"


def _no_paths(_caption: str) -> dict[str, bool]:
    return {}


def _text_paths(stem: str, variant: str, caption: str) -> dict[str, bool]:
    """Return the files of a caption's embedding by each model's encoders, and whether the model may be the latents'."""
    folder, _, name = stem.rpartition("/")
    start, found = f"{folder}/{_TEXTS}".lstrip("/") + name, {}
    for space in dict.fromkeys((*_SPACES, variant)):
        told = {"caption": caption, "text_embedding_space_version": space, "text_embedding_version": 1}
        digest = hashlib.md5(json.dumps(told, sort_keys=True).encode(), usedforsecurity=False).digest()
        path = f"{start}_{base64.urlsafe_b64encode(digest).decode('ascii').rstrip('=')}.safetensors"
        found[path] = _FAMILIES.get(space) in (None, _FAMILIES.get(variant))
    return found


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
