"""Caches of OneTrainer: `image/GROUP/variation-V/I.pt` and `aggregate.pt`, a list that has the images' paths.

A group is a folder of the user's, called by a hash of its settings, so that after a change of these an image is in two, and
the newest has it. A variation is one pass with its own random crop. Latents are the VAE's mean, unscaled. The text cache has
neither caption nor path: only counting pairs it with the images, so it is not imported. Source: `DiskCache.py` of mgds,
`DataLoaderText2ImageMixin.py` of OneTrainer, both of August 2026.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.ingest.importers.cache import CacheEntry, Importer, Scaling, Variant
from bucketline.ingest.importers.reading import files_below, read_torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_VARIATION = re.compile(r"(.*/)?[0-9a-f]{64}/variation-(\d+)/", re.DOTALL)
_AGGREGATE = "aggregate.pt"


def _found(source: Path) -> Iterator[CacheEntry | str]:
    newest: dict[tuple[str, str], tuple[int, CacheEntry]] = {}  # and when it was made; by image and suffix
    several = set[str]()
    for folder, names in files_below(source):
        match = _VARIATION.fullmatch(folder)
        if match is None or _AGGREGATE not in names:
            continue
        made_ns, suffix = (source / folder / _AGGREGATE).stat().st_mtime_ns, f"/variation-{match[2]}"
        for number, described in enumerate(read_torch(source, folder + _AGGREGATE)):
            if (image := described.get("image_path")) is None:  # of text
                continue
            key = str(image), suffix if int(match[2]) else ""
            entry = CacheEntry(image=key[0], suffix=key[1], path=f"{folder}{number}.pt", captions=())
            if key in newest:
                several.add(key[0])
            newest[key] = max(newest.get(key, (0, entry)), (made_ns, entry), key=lambda one: one[0])
    if several:
        yield f"{counted(len(several), 'image')} {'is' if len(several) == 1 else 'are'} in several groups: the newest is taken"
    yield from (entry for _, entry in newest.values())


IMPORTER = Importer(
    kind="onetrainer",
    found=_found,
    names={"latent": "latent_image", "original": "original_resolution", "crop": "crop_offset"},
    left_out=("latent_mask", "latent_conditioning_image"),
    variants={"": Variant(scaling=Scaling.NONE, latents="mode")},
    has_crops=True,
    captions_in="nowhere, since the cache has none (--captions)",
)
