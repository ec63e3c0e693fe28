"""Caches of SimpleTuner: a `.pt` per image, and JSON files with the images' sizes and crops.

`aspect_ratio_bucket_metadata_ID.json` maps image paths to sizes, width first, and the crop's top and left. A latent's file is
`NAME.pt` or `SHA256(NAME).pt`, below a folder like the image's; it holds a tensor, possibly gzipped. The model is in the names
of text embeddings, `MD5(caption)-MODEL.pt`, which are not imported. A caption file has a caption per line, and the instance
prompt may precede each. Source: `caching/vae.py`, `metadata/backends/`, `prompts.py`, `text_embeds.py` of version 4.8.0.
"""

from __future__ import annotations

import hashlib
import re
from itertools import takewhile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError
from bucketline.ingest.importers.cache import CacheEntry, Importer, Variant
from bucketline.ingest.importers.reading import files_below, read_json, read_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_METADATA = re.compile(r"aspect_ratio_bucket_metadata_.+\.json")
_FIRST = ("sd1x", "sd2x", "sdxl", "sd3", "flux", "pixart_sigma", "kolors")
_LATER = ("auraflow", "chroma", "lumina2", "sana", "qwen_image", "wan")
_TEXT = re.compile(r"[0-9a-f]{32}-(?P<model>[A-Za-z0-9_.-]+)\.pt")


def _found(source: Path) -> Iterator[CacheEntry]:
    images: dict[str, dict[str, Any]] = {}
    latents: dict[str, list[PurePosixPath]] = {}  # folders by name
    models = set[str]()
    for folder, names in files_below(source):
        for name in names:
            if _METADATA.fullmatch(name):
                images |= read_json(source / folder / name)
            elif match := _TEXT.fullmatch(name):
                models.add(match["model"])
            elif name.endswith(".pt"):
                latents.setdefault(name, []).append(PurePosixPath(folder))
    if not images:
        what = f"{source} has no aspect_ratio_bucket_metadata_*.json, which has the images' sizes"
        raise SourceError(f"{what}; name the folder that has both these files and the cache")
    files = {image: _files(image, latents) for image in images}
    sharing: dict[str, list[str]] = {}  # images by file
    for image, paths in files.items():
        sharing.setdefault("".join(paths[:1]), []).append(image)
    for image, paths in files.items():
        path, problem = "".join(paths[:1]), None
        if len(paths) != 1:
            problem = (
                f"{len(paths)} files may be its latent ({', '.join(paths[:3])}), expected one; name the folder of one cache"
            )
        elif len(others := sharing[path]) > 1:
            problem = f"{' and '.join(others[:5])} share it, which is of one of them; rename the others, and cache them again"
        model = next(iter(models)) if len(models) == 1 else None
        yield CacheEntry(image=image, path=path, variant=model, facts=images[image], problem=problem)


def _files(image: str, latents: Mapping[str, list[PurePosixPath]]) -> list[str]:
    """Return the files that may be an image's latent: of several of one name, those whose folders end most like the image's."""
    stem, parts = PurePosixPath(image).stem, PurePosixPath(image).parts[-2::-1]
    names = f"{hashlib.sha256(stem.encode('utf-8', 'surrogatepass')).hexdigest()}.pt", f"{stem}.pt"
    name = next((name for name in names if name in latents), stem)
    pairs = {folder: zip(folder.parts[::-1], parts, strict=False) for folder in latents.get(name, ())}
    shared = {folder: len([*takewhile(lambda pair: pair[0] == pair[1], own)]) for folder, own in pairs.items()}
    return [str(folder / name) for folder, length in shared.items() if length == max(shared.values())]


def _read(source: Path, entry: CacheEntry) -> dict[str, Any]:
    found, facts = read_values(source, entry.path), entry.facts
    sizes = {"original": facts["original_size"][::-1], "resized": facts["intermediary_size"][::-1]}
    return {"latent": found.get("latents"), **found, **sizes}


IMPORTER = Importer(
    kind="simpletuner",
    found=_found,
    read=_read,
    names={"crop": "crop_coordinates"},
    variants={model: Variant() for models in (_FIRST, _LATER) for model in models},
    has_crops=True,
)
