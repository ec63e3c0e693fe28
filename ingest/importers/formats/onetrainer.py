"""Caches of OneTrainer: `image/GROUP/variation-V/I.pt` and `aggregate.pt`, a list that has the images' paths.

A group is a folder of the user's, called by a hash of its settings, so that after a change of these an image is in two, and
the newest has it. A variation is one pass with its own random crop. Latents are the VAE's mean, unscaled. The text cache has
neither caption nor path: only counting pairs it with the images, so it is not imported. Source: `DiskCache.py` of mgds,
`DataLoaderText2ImageMixin.py` of OneTrainer, both of August 2026.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.read_files import as_tensor, loaded_dict, read_torch, read_whole, values_by_role

if TYPE_CHECKING:
    from pathlib import Path


_VARIATION = re.compile(r"(?P<group>(.*/)?[0-9a-f]{64})/variation-(?P<number>\d+)/")
_NEWER = re.compile(r"[0-9a-f]{12}_[^_/]+_\d+\.pt")
_AGGREGATE = "aggregate.pt"
_COLUMNS = {"latent_mask": "mask", "latent_conditioning_image": "control/conditioning"}


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, "nowhere, since the cache has none (--captions)")
    found: list[tuple[str, int, int, str]] = []  # folder, variation, number, image
    groups: dict[str, set[str]] = {}  # by image
    made_ns: Counter[str] = Counter()  # by group
    notes = []
    for folder, names in cache.files_below(request.source):
        if any(_NEWER.fullmatch(name) for name in names):
            raise SourceError(
                f"{request.source / folder} is a cache of a newer OneTrainer, with files called by a hash and the resolution; "
                "only caches with variation-N/I.pt and aggregate.pt are known"
            )
        match = _VARIATION.fullmatch(folder)
        if match is None or _AGGREGATE not in names:
            continue
        images = _images(request.source, folder)
        if images is None:
            notes.append(f"{folder} has no image paths: a text cache, which cannot be paired with images, is not imported")
            continue
        found += [(folder, int(match["number"]), number, image) for number, image in enumerate(images)]
        made_ns[match["group"]] = max(made_ns[match["group"]], (request.source / folder / _AGGREGATE).stat().st_mtime_ns)
        for image in images:
            groups.setdefault(image, set()).add(match["group"])
    if several := sum(len(own) > 1 for own in groups.values()):
        notes.append(
            f"{counted(several, 'image')} {'is' if several == 1 else 'are'} in several groups: the newest has its latent"
        )
    found.sort(key=lambda one: -made_ns[one[0].rpartition("/variation-")[0]])  # stable: the first of an id is imported
    if not found:
        raise SourceError(f"{request.source} has no latents in OneTrainer's format; name the folder of its cache")
    ids = cache.ids_of_paths(sorted({image for *_, image in found}))
    entries = []
    for folder, variation, number, image in found:
        own, problem = captions.of(ids[image], in_cache=())
        entries.append(
            cache.CacheEntry(
                id=ids[image] if variation == 0 else f"{ids[image]}/variation-{variation}",
                image=image,
                path=f"{folder}{number}.pt",
                captions=own,
                caption_problem=problem,
            )
        )
    return cache.CacheListing(
        entries=entries,
        variant="",
        scaling=cache.Scaling.NONE,
        latents="mode",
        has_crops=True,
        captions_from=captions.told,
        notes=notes,
    )


def _images(source: Path, folder: str) -> list[str] | None:
    """Return the images of a variation in order; None if it is one of text.

    Raises:
        SourceError: if the list is damaged, without which nothing says which file is of which image.
    """
    try:
        found: Any = read_torch(source, folder + _AGGREGATE)
    except RejectedError as error:
        raise SourceError(f"{source / folder / _AGGREGATE}: {error.detail}; cache this group again") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise SourceError(f"{source / folder / _AGGREGATE} is not a list of samples; cache this group again")
    paths = [one.get("image_path") for one in found]
    if not any("crop_resolution" in one or path is not None for one, path in zip(found, paths, strict=True)):
        return None
    if not all(isinstance(path, str) for path in paths):
        raise SourceError(f"{source / folder / _AGGREGATE} lacks the image_path of some samples; cache this group again")
    return [str(path) for path in paths]


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    found = loaded_dict(read_whole(source, entry.path), entry.path)
    latent = cache.squeezed(as_tensor(found, "latent_image"))
    original, crop = (
        None if name not in found else cache.pair(found[name], name) for name in ("original_resolution", "crop_offset")
    )
    return cache.Cached(
        latent=latent,
        geometry=cache.Geometry(original=original, crop=crop),
        columns=values_by_role(found, _COLUMNS),
    )


IMPORTER = cache.Importer(kind="onetrainer", is_here=cache.has_file(_AGGREGATE, _VARIATION), listed=_listed, read=_read)
