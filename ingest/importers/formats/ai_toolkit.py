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
from typing import TYPE_CHECKING, Any

from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import as_tensor, names_in, read_metadata, read_safetensors, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LATENTS, _TEXTS = "_latent_cache/", "_t_e_cache/"
_SPACES = ("sd1", "sd2", "sdxl", "sd3", "flux", "flux1", "flux_kontext", "flex1", "flex2")  # models, as the digest calls them
_FAMILIES = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux1": "flux"}
_SIZES = {"scaled size": ("scale_to_height", "scale_to_width"), "crop": ("crop_y", "crop_x")}


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    entries, texts = list[cache.CacheEntry](), dict[str, str]()
    for folder, names in cache.files_below(request.source):
        paths = [folder + name for name in names if name.endswith(".safetensors")]
        if folder.endswith(_LATENTS):
            entries += [_entry(request.source, folder.removesuffix(_LATENTS), path) for path in paths]
        elif folder.endswith(_TEXTS):
            texts |= dict(zip(paths, paths, strict=True))
    entries.sort(key=lambda entry: entry.variant is None)  # those that are damaged last
    notes = ["the cache does not have the originals' sizes: those that they were resized to are recorded"]
    return cache.FoundEntries(entries=entries, texts=texts, notes=notes)


def _entry(source: Path, folder: str, path: str) -> cache.CacheEntry:
    try:
        fields = _parsed(read_metadata(source, path))
    except RejectedError as error:
        return cache.CacheEntry(id=path, path=path, variant=None, problem=error.detail)
    return cache.CacheEntry(
        id=folder + str(fields["filename"]).replace("\\", "/").rpartition("/")[2],
        suffix="".join(f"/{name}" for name in ("flip_x", "flip_y") if fields.get(name)),
        path=path,
        variant=str(fields.get("latent_space_version", "")),
        facts=fields,
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


def _spelled(text: str, trigger: str | None) -> Iterator[cache.Spelled]:
    """Yield the captions that a text may have become, and their spellings, which tell only the digest."""
    tidy = ", ".join(part.strip() for part in text.split(",") if part.strip())
    spellings = [", ".join(own.split(",")) for own in (text, text.strip())] + [tidy, text, text.strip()]
    for change in (lambda own: _with_trigger(own, trigger or ""), lambda own: _with_trigger(own, ""), str):
        for spelling in spellings:
            is_same = "".join(spelling.split()) == "".join(text.split())
            yield change(text.strip() if is_same else spelling).strip(), change(spelling)


def _with_trigger(text: str, trigger: str) -> str:
    for placeholder in ("[name]", "[trigger]"):
        text = text.replace(placeholder, trigger)
    return text if trigger in text else f"{trigger} {text}"


def _embedded(entry: cache.CacheEntry, variant: str, caption: str) -> dict[str, bool]:
    """Return the files of a caption's embedding by each model's encoders, and whether the model may be the latents'."""
    if entry.variant is None:
        return {}
    folder, _, name = entry.id.rpartition("/")
    start, found = f"{folder}/{_TEXTS}".lstrip("/") + (name.rpartition(".")[0] or name), {}
    for space in dict.fromkeys((*_SPACES, variant)):
        told = {"caption": caption, "text_embedding_space_version": space, "text_embedding_version": 1}
        digest = hashlib.md5(json.dumps(told, sort_keys=True).encode(), usedforsecurity=False).digest()
        path = f"{start}_{base64.urlsafe_b64encode(digest).decode('ascii').rstrip('=')}.safetensors"
        found[path] = _FAMILIES.get(space) in (None, _FAMILIES.get(variant))
    return found


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    tensors, _ = read_safetensors(source, entry.path)
    resized, crop = (cache.pair([entry.facts.get(name) for name in names], what) for what, names in _SIZES.items())
    texts: tuple[cache.Text, ...] = ()
    if entry.text_path is not None and entry.captions and variant in _FAMILIES:
        found, _ = read_safetensors(source, entry.text_path)
        texts = (text_of(entry.captions[0], as_tensor(found, "text_embed"), found.get("pooled_embed")),)
    return cache.Cached(
        latent=cache.squeezed(as_tensor(tensors, "latent")),
        geometry=cache.Geometry(resized=resized, crop=crop),
        texts=texts,
        left_out=names_in(tensors, "first_frame_latent", "audio_latent"),
    )


IMPORTER = cache.Importer(
    kind="ai-toolkit",
    found=_found,
    read=_read,
    variants={space: cache.Variant(family=family) for space, family in _FAMILIES.items()},
    other=cache.Variant(),
    unknown=("flux2", "ltx", "audio", "pixel"),  # in the names of latent spaces that are packed, normalised or no latents
    has_crops=True,
    form=cache.FileForm.WHOLE,
    spelled=_spelled,
    embedded=_embedded,
    causes="the trainer's trigger_word (--trigger WORD names it), a caption edited since, its default_caption or "
    "replacements, words that are shuffled or drawn, control images",
)
