"""Caches of ai-toolkit: safetensors files in `_latent_cache` next to the images, `NAME_HASH.safetensors`.

The metadata has the complete geometry but for the original's size, and the version of the latent space. A mirrored copy is a
file of its own. A caption file is one caption; the trigger word replaces `[trigger]` and `[name]` in it, and precedes a caption
that lacks it; without one, these are removed. Text in `_t_e_cache` is called by a digest of its caption, and is not imported.
Source: `dataloader_mixins.py`, `prompt_utils.py` of August 2026.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import CacheEntry, Importer, Variant
from bucketline.ingest.importers.reading import files_below, read_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LATENTS = "_latent_cache/"


def _found(source: Path) -> Iterator[CacheEntry | str]:
    yield "the cache does not have the originals' sizes: those that they were resized to are recorded"
    for folder, names in files_below(source):
        for name in names:
            if folder.endswith(_LATENTS) and name.endswith(".safetensors"):
                yield _entry(source, folder.removesuffix(_LATENTS), folder + name)


def _entry(source: Path, folder: str, path: str) -> CacheEntry:
    try:
        fields = read_metadata(source, path)
    except RejectedError as error:
        return CacheEntry(id=path, path=path, variant=None, problem=error.detail)
    if not (name := fields.get("filename")):
        return CacheEntry(id=path, path=path, variant=None, problem=f"its metadata has no filename, only {', '.join(fields)}")
    return CacheEntry(
        id=folder + name.replace("\\", "/").rpartition("/")[2],
        suffix="".join(f"/{name}" for name in ("flip_x", "flip_y") if fields.get(name) == "true"),
        path=path,
        variant=fields.get("latent_space_version", ""),
        facts={
            "resized": (fields.get("scale_to_height"), fields.get("scale_to_width")),
            "crop": (fields.get("crop_y"), fields.get("crop_x")),
        },
    )


def _triggered(text: str, trigger: str | None) -> str:
    for placeholder in ("[name]", "[trigger]"):
        text = text.replace(placeholder, trigger or "")
    return text if trigger is None or trigger in text else f"{trigger} {text}"


IMPORTER = Importer(
    kind="ai-toolkit",
    found=_found,
    left_out=("first_frame_latent", "audio_latent"),
    variants={},
    other=Variant(),
    unknown=("flux2", "ltx", "audio", "pixel"),  # in the names of latent spaces that are packed, normalised or no latents
    has_crops=True,
    file_has="one caption",
    triggered=_triggered,
)
