"""Caches of kohya-ss/sd-scripts: npz files next to the images.

`NAME_WWWWxHHHH_MODEL.npz`, or `NAME.npz` of SD and SDXL, has a latent; W and H are the original's size, never the bucket's.
SD3, FLUX and later models append `_{h}x{w}` to each key, and may have several sizes in a file: each becomes a sample.
`crop_ltrb` is what the trainer computed, not what it cropped, so it is not read. Nor are text caches, which do not tell of
which caption they are. Of several lines the trainer takes the first, or with `enable_wildcard` any. Two images of one name and
size share a file. Source: `strategy_base.py` and `strategy_*.py` of version 0.10.1.
"""

from __future__ import annotations

import re
import threading
import zipfile
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import as_tensor, read_npz
from bucketline.ingest.sources.source import open_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = re.compile(r"(?P<stem>.+)_(?P<width>\d{4,})x(?P<height>\d{4,})_(?P<model>sd|sdxl|sd3|flux|lumina|hi|anima)\.npz")
_TEXT_FILE = re.compile(r".+_(te_outputs|(sd3|flux|lumina|hi|anima)_te)\.npz")
_SEVERAL_SIZES = ("sd3", "flux", "lumina", "hi", "anima")
_KEY = re.compile(r"latents((_\d+x\d+)?)\.npy")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".jxl", ".tif", ".tiff", ".heic", ".gif")
_PLAIN = cache.Variant(scaling=cache.Scaling.NONE)
_VARIANTS = {
    "sd or sdxl": _PLAIN,  # `NAME.npz`, which does not tell the two apart
    "sd": _PLAIN,
    "sdxl": _PLAIN,
    "sd3": _PLAIN,
    "hi": _PLAIN,
    "flux": cache.Variant(),
    "lumina": cache.Variant(),
    "anima": cache.Variant(),
}


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    files = []  # folder, name, stem, model, and the names next to it
    for folder, names in cache.files_below(request.source):
        own = set(names)
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None:
                files.append((folder, name, match["stem"], match["model"], own))
            elif name.endswith(".npz") and not _TEXT_FILE.fullmatch(name):
                files.append((folder, name, name.removesuffix(".npz"), "sd or sdxl", own))
    num_files = Counter((folder, stem, model) for folder, _, stem, model, _ in files)
    entries = []
    for folder, name, stem, model, own in files:
        images = [one for end in _IMAGES for one in (stem + end, stem + end.upper()) if one in own]
        is_shared = len(images) > num_files[folder, stem, model]
        sizes = _sizes(request.source, folder + name) if model in _SEVERAL_SIZES else [""]
        entries += [
            cache.CacheEntry(
                id=folder + (images[0] if len(images) == 1 else stem),
                suffix="" if len(sizes) == 1 else f"/{size.removeprefix('_')}",
                path=folder + name,
                variant=model,
                at=(size,),
                captioned=f"{folder}{stem}.",
                problem=f"{' and '.join(images)} share it; rename one, and cache both again" if is_shared else None,
            )
            for size in sizes
        ]
    times = Counter((entry.id + entry.suffix, entry.variant) for entry in entries)
    return cache.FoundEntries(  # two caches of one image, of other sizes of the original, keep their file names
        entries=[
            entry
            if times[entry.id + entry.suffix, entry.variant] == 1
            else replace(entry, id=entry.path.removesuffix(".npz") + str(entry.at[0]), suffix="")
            for entry in entries
        ]
    )


def _sizes(source: Path, path: str) -> list[str]:
    """Return what the keys of a file's latents end in; one, found or not, if it cannot be read."""
    try:
        with open_file(f"{source}/{path}", source) as file, zipfile.ZipFile(file) as members:
            found = [match[1] for name in members.namelist() if (match := _KEY.fullmatch(name))]
    except (RejectedError, OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        found = []
    return sorted(found) or [""]


_ONE_HEADER = threading.Lock()
"""numpy parses an array's header by `ast`, in which two threads at once can raise a SystemError (python/cpython#106905)."""


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    arrays, size = read_npz(source, entry.path), str(entry.at[0])
    flipped = f"latents_flipped{size}"
    with _ONE_HEADER:
        width, height = _original(arrays, size, entry)
        return cache.Cached(
            latent=cache.squeezed(as_tensor(arrays, f"latents{size}")),
            flipped=None if flipped not in arrays else cache.squeezed(as_tensor(arrays, flipped), "flipped latent"),
            geometry=cache.Geometry(original=(height, width)),
            left_out=("alpha_mask",) if f"alpha_mask{size}" in arrays or "alpha_mask" in arrays else (),
        )


def _original(arrays: Mapping[str, Any], size: str, entry: cache.CacheEntry) -> tuple[int, int]:
    """Return the original's width and height, as the file has them, else as its name does."""
    for name in (f"original_size{size}", "original_size"):
        if name in arrays:
            return cache.pair(arrays[name].reshape(-1)[:3].tolist(), "original_size")
    match = _NAME.fullmatch(entry.path.rpartition("/")[2])
    if match is None:
        raise cache.damaged(f"it has no original_size, only {', '.join(sorted(arrays))[:200]}")
    return int(match["width"]), int(match["height"])


IMPORTER = cache.Importer(
    kind="kohya",
    found=_found,
    read=_read,
    variants=_VARIANTS,
    form=cache.FileForm.FIRST_LINE,
)
