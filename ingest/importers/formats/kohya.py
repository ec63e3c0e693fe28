"""Caches of kohya-ss/sd-scripts: npz files next to the images.

`NAME_WWWWxHHHH_MODEL.npz`, or `NAME.npz` of SD and SDXL, has a latent; W and H are the original's size, never the bucket's.
SD3, FLUX and later models append `_{h}x{w}` to each key, and may have several sizes in a file: each becomes a sample.
`crop_ltrb` is what the trainer computed, not what it cropped, so it is not read. Text caches do not tell of which caption they
are. Of several lines the trainer takes the first, or with `enable_wildcard` any. Two images of one name and size share a file.
Source: `strategy_base.py` and `strategy_*.py` of version 0.10.1.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any

from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import CacheEntry, Importer, Scaling, Variant
from bucketline.ingest.importers.reading import damaged, files_below, read_npz
from bucketline.ingest.sources.source import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME = re.compile(
    r"(?P<stem>.+?)(_(?P<width>\d{4,})x(?P<height>\d{4,})_(?P<model>sd|sdxl|sd3|flux|lumina|hi|anima))?\.npz", re.DOTALL
)
_TEXT_FILE = re.compile(r".+_(te_outputs|(sd3|flux|lumina|hi|anima)_te)\.npz", re.DOTALL)
_SEVERAL_SIZES = ("sd3", "flux", "lumina", "hi", "anima")
_KEY = re.compile(r"latents((_\d+x\d+)?)\.npy")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".jxl", ".tif", ".tiff", ".heic", ".gif")
_READ = ("latents", "latents_flipped", "original_size")
_UNNAMED = "sd or sdxl"  # `NAME.npz` does not tell the two apart


def _found(source: Path) -> Iterator[CacheEntry]:
    for folder, names in files_below(source):
        files = [match for name in names if (match := _NAME.fullmatch(name)) and not _TEXT_FILE.fullmatch(name)]
        num_files, own = Counter((match["stem"], match["model"]) for match in files), set(names)
        for match in files:
            stem, model = match["stem"], match["model"] or _UNNAMED
            images = [one for end in _IMAGES for one in (stem + end, stem + end.upper()) if one in own]
            is_shared = len(images) > num_files[stem, match["model"]]
            sizes = _sizes(source, folder + match[0]) if model in _SEVERAL_SIZES else [""]
            for size in sizes:
                yield CacheEntry(
                    id=folder + (images[0] if len(images) == 1 else stem),
                    suffix="" if len(sizes) == 1 else f"/{size.removeprefix('_')}",
                    path=folder + match[0],
                    variant=model,
                    facts={"size": size, "original": match["height"] and (match["height"], match["width"])},
                    captioned=folder + stem,
                    problem=f"{' and '.join(images)} share it; rename one, and cache both again" if is_shared else None,
                )


def _sizes(source: Path, path: str) -> list[str]:
    """Return what the keys of a file's latents end in; one, found or not, if it cannot be read."""
    try:
        with open_file(f"{source}/{path}", source) as file, zipfile.ZipFile(file) as members:
            return sorted(match[1] for name in members.namelist() if (match := _KEY.fullmatch(name))) or [""]
    except (RejectedError, OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return [""]


def _read(source: Path, entry: CacheEntry) -> dict[str, Any]:
    size, original = entry.facts["size"], entry.facts["original"]
    wanted = _READ[: 3 if original is None else 2]
    arrays = read_npz(source, entry.path, lambda name: name.removesuffix(size) in wanted and name.endswith(size))
    found = {name: arrays[name + size] for name in wanted if name + size in arrays}
    if original is None:
        if "original_size" not in found:
            raise damaged(f"it has no original_size, only {', '.join(sorted(arrays))[:200]}")
        original = found["original_size"].reshape(-1)[1::-1].tolist()
    is_masked = f"alpha_mask{size}" in arrays or "alpha_mask" in arrays
    return {**found, "original": original, "alpha_mask": is_masked or None}


IMPORTER = Importer(
    kind="kohya",
    found=_found,
    read=_read,
    names={"latent": "latents", "flipped": "latents_flipped"},
    left_out=("alpha_mask",),
    variants={
        **dict.fromkeys((_UNNAMED, "sd", "sdxl", "sd3", "hi"), Variant(scaling=Scaling.NONE)),
        **dict.fromkeys(("flux", "lumina", "anima"), Variant()),
    },
    file_has="a caption in line 1",
)
