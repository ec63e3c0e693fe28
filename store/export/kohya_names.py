"""The names by which sd-scripts finds caches: an image's path and its size as the file has it, `NAME_WWWWxHHHH_MODEL.npz`.

Latents of several sizes of an image are in one file. Ids of imported samples say which of an image's latents they are, by what
an importer adds to the image's path; that is taken off again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.format.hashing import text_bytes

if TYPE_CHECKING:
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.store import Store

_IMAGES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".jxl", ".tif", ".tiff", ".heic", ".gif"))
_ADDED = {  # by importers to the path of the image
    "diffusion-pipe": re.compile(r"/cache_[0-9.]+x\d+x\d+x\d+\Z"),
    "onetrainer": re.compile(r"/variation-\d+\Z"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KohyaName:
    """A sample's place in the cache."""

    stem: str  # of the image: its path without extension
    path: str  # of the file of its latent
    original_wh: tuple[int, int]
    is_first_of_file: bool
    is_first_of_image: bool  # so that its captions and their embedding are written with it


class KohyaNames:
    """Names samples one after the other."""

    def __init__(self, store: Store, family: str, images: Path | None) -> None:
        """`images`: folder of the images, whose sizes are read if the store does not know them."""
        rules = store.manifest.rules.get("import")
        self._store, self._family, self._images = store, family, images
        self._kind = str(rules.get("kind")) if isinstance(rules, dict) else ""
        self._of: dict[str, str] = {}  # image by stem
        self._ids: dict[tuple[str, str], str] = {}  # by path and end of keys
        self._paths: set[str] = set()

    def name(self, record: SampleRecord, key_end: str) -> KohyaName:
        """Return a sample's place; `key_end` is what its keys in the file end in."""
        image = self._image(record, key_end)
        stem = self._stem(image, record)
        width, height = self._size(image, stem, record)
        path = f"{stem}_{width:04d}x{height:04d}_{self._family}.npz"
        is_first_of_image = stem not in self._of
        other = self._ids.setdefault((path, key_end), record.id)
        if (own := self._of.setdefault(stem, image)) != image or other != record.id:
            other = own if own != image else other
            raise StoreError(f"samples {record.id!r:.200} and {other!r:.200} have one name in kohya's caches; leave one out")
        is_first_of_file = path not in self._paths
        self._paths.add(path)
        return KohyaName(
            stem=stem,
            path=path,
            original_wh=(width, height),
            is_first_of_file=is_first_of_file,
            is_first_of_image=is_first_of_image,
        )

    def _image(self, record: SampleRecord, key_end: str) -> str:
        """Return the id without what an importer has added to it."""
        image = record.id
        if self._kind == "kohya":
            size = key_end.removeprefix("_")
            height, width = record.original_size
            image = image.removesuffix(f"/{size}") if size else image
            of_file = f"_{width:04d}x{height:04d}_{self._family}"
            return image.removesuffix(of_file + key_end)
        if self._kind == "ai-toolkit" and image.endswith(("/flip_x", "/flip_y")):
            raise StoreError(
                f"sample {image!r:.200} is of the mirrored image, for which kohya's caches have no name; leave it out"
            )
        return _ADDED[self._kind].sub("", image) if self._kind in _ADDED else image

    def _stem(self, image: str, record: SampleRecord) -> str:
        path = PurePosixPath(image)
        has_extension = not self._kind or path.suffix.lower() in _IMAGES  # of imported samples, ids may have none
        stem = str(path.with_suffix("") if has_extension else path) if path.name else ""
        parts = stem.split("/")
        is_safe = stem.isprintable() and "\\" not in stem and not {"", ".", ".."} & set(parts)
        if not is_safe or path.is_absolute() or max(len(text_bytes(part)) for part in parts) > 200:
            raise StoreError(f"sample {record.id!r:.200} cannot be a file's name, as kohya's caches are called; leave it out")
        return stem

    def _size(self, image: str, stem: str, record: SampleRecord) -> tuple[int, int]:
        """Return the width and height of a sample's image."""
        height, width = record.original_size
        if height and width:
            return width, height
        if self._images is None:
            raise StoreError(
                f"sample {record.id!r:.200}: the size of its image is unknown, and kohya's scripts look for a cache by it; "
                "--images FOLDER reads it from the images"
            )
        names = [image, *(stem + extension for known in sorted(_IMAGES) for extension in (known, known.upper()))]
        path = next((path for name in names if (path := self._images / name).is_file()), None)
        if path is None:
            raise StoreError(f"sample {record.id!r:.200}: its image is not in {self._images}; name the folder of the images")
        return _size_of_image(path)


def _size_of_image(path: Path) -> tuple[int, int]:
    """Return an image's width and height as its file has them, as sd-scripts does: not turned upright."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise StoreError(f"{path} cannot be read as an image ({error!s:.100}); restore it") from error
