"""Caches of OneTrainer: `image/GROUP/variation-V/I.pt` and `aggregate.pt`, a list that has the images' paths.

A group is a folder of the user's, called by a hash of its settings, so that after a change of these an image is in two, and
the newest has it. A variation is one pass with its own random crop. Latents are the VAE's mean, unscaled. The text cache has
neither caption nor path: only counting pairs it with the images, so it is not imported. Source: `DiskCache.py` of mgds,
`DataLoaderText2ImageMixin.py` of OneTrainer, both of August 2026.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import as_tensor, loaded_dict, names_in, read_torch, read_whole

if TYPE_CHECKING:
    from pathlib import Path

_VARIATION = re.compile(r"(?P<group>(.*/)?[0-9a-f]{64})/variation-(?P<number>\d+)/")
_AGGREGATE = "aggregate.pt"


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    found: list[tuple[str, cache.CacheEntry]] = []  # of a group
    groups: dict[str, set[str]] = {}  # by image
    made_ns: dict[str, int] = {}  # by group
    notes = []
    for folder, names in cache.files_below(request.source):
        match = _VARIATION.fullmatch(folder)
        if match is None or _AGGREGATE not in names:
            continue
        images = _images(request.source, folder)
        if images is None:
            notes.append(f"{folder} has no image paths: a text cache, which cannot be paired with images, is not imported")
            continue
        group, variation = match["group"], int(match["number"])
        made_ns[group] = max(made_ns.get(group, 0), (request.source / folder / _AGGREGATE).stat().st_mtime_ns)
        for number, image in enumerate(images):
            groups.setdefault(image, set()).add(group)
            suffix = f"/variation-{variation}" if variation else ""
            entry = cache.CacheEntry(image=image, suffix=suffix, path=f"{folder}{number}.pt", captions=())
            found.append((group, entry))
    if several := sum(len(own) > 1 for own in groups.values()):
        are = "is" if several == 1 else "are"
        notes.append(f"{counted(several, 'image')} {are} in several groups: the newest has its latent")
    found.sort(key=lambda one: -made_ns[one[0]])  # stable: the first of an id is imported
    return cache.FoundEntries(entries=[entry for _, entry in found], notes=notes)


def _images(source: Path, folder: str) -> list[str] | None:
    """Return the images of a variation in order; None if it is one of text."""
    found: Any = read_torch(source, folder + _AGGREGATE)
    if not any(one.keys() & {"crop_resolution", "image_path"} for one in found):
        return None
    return [str(one["image_path"]) for one in found]


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    found = loaded_dict(read_whole(source, entry.path), entry.path)
    latent = cache.squeezed(as_tensor(found, "latent_image"))
    original, crop = (
        cache.pair(found[name], name) if name in found else None for name in ("original_resolution", "crop_offset")
    )
    geometry = cache.Geometry(original=original, crop=crop)
    return cache.Cached(latent=latent, geometry=geometry, left_out=names_in(found, "latent_mask", "latent_conditioning_image"))


IMPORTER = cache.Importer(
    kind="onetrainer",
    found=_found,
    read=_read,
    variants={"": cache.Variant(scaling=cache.Scaling.NONE, latents="mode")},
    has_crops=True,
    captions_in="nowhere, since the cache has none (--captions)",
)
