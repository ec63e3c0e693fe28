"""Export as the cache of kohya's scripts: npz files named after the images, to be copied next to them.

Of each sample `NAME_WWWWxHHHH_MODEL.npz` with its latent, and its mask if it has one, several sizes of an image together; of
each image `NAME.txt` with its captions, and if the model has a text cache, the embedding of the first. Source:
`strategy_base.py`, `strategy_sd.py`, `strategy_sdxl.py`, `strategy_sd3.py`, `strategy_flux.py` of sd-scripts 0.10.1.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.export.exporter import Exporter
from bucketline.store.export.sample_arrays import MASK, form_of, size_of
from bucketline.store.format.hashing import text_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from bucketline.store.export.exporter import ExportedSample, ExportRequest
    from bucketline.store.export.sample_arrays import SampleArrays
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.store import Store

_IMAGES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".jxl", ".tif", ".tiff", ".heic", ".gif"))
_ADDED = {  # by importers to the path of the image
    "diffusion-pipe": re.compile(r"/cache_[0-9.]+x\d+x\d+x\d+\Z"),
    "onetrainer": re.compile(r"/variation-\d+\Z"),
}


class KohyaNames:
    """Names samples one after the other."""

    def __init__(self, store: Store, family: str) -> None:
        rules = store.manifest.rules.get("import")
        self._store, self._family = store, family
        self._kind = str(rules.get("kind")) if isinstance(rules, dict) else ""
        self._of: dict[str, str] = {}  # image by stem
        self._ids: dict[tuple[str, str], str] = {}  # by path and end of keys
        self._paths: set[str] = set()

    def name(self, record: SampleRecord, key_end: str) -> tuple[str, str, bool, bool]:
        """Return a sample's place: its image's path without extension, and its file's; and if it is the first of each.

        `key_end` is what its keys in the file end in. With the first of an image, its captions are written.
        """
        image = self._image(record, key_end)
        stem = self._stem(image, record)
        height, width = record.original_size
        if not (height and width):
            raise StoreError(
                f"sample {record.id!r:.200}: the size of its image is unknown, and kohya's scripts look for a cache by it; "
                "leave it out"
            )
        path = f"{stem}_{width:04d}x{height:04d}_{self._family}.npz"
        is_first_of_image = stem not in self._of
        other = self._ids.setdefault((path, key_end), record.id)
        if (own := self._of.setdefault(stem, image)) != image or other != record.id:
            other = own if own != image else other
            raise StoreError(f"samples {record.id!r:.200} and {other!r:.200} have one name in kohya's caches; leave one out")
        is_first_of_file = path not in self._paths
        self._paths.add(path)
        return stem, path, is_first_of_image, is_first_of_file

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


MODELS = ("sd", "sdxl", "sd3", "flux")
CLIP_TOKENS = 77  # before the T5's in SD3's
_SIZED = ("sd3", "flux")  # models whose keys end in the latent's size
_SUFFIX = {"sdxl": "_te_outputs", "sd3": "_sd3_te", "flux": "_flux_te"}


class KohyaExporter(Exporter):
    """Writes the folder."""

    options = frozenset({"columns"})

    def __init__(self, store: Store, request: ExportRequest) -> None:
        """Read what the samples have in common."""
        super().__init__(store, request)

        def why_not(bucket: str, role: str) -> str | None:
            if role != MASK:
                return "kohya's caches have no place for it, only for a mask"
            column = store.bucket(bucket).column(MASK)
            if (column.dtype, column.shape) == ("U8", size_of(bucket)):
                return None
            shape = "x".join(map(str, column.shape))
            return f"in {bucket} it is {column.dtype} of {shape}, and kohya's are U8 of the image's size"

        self.form = form_of(store, "kohya's caches", request.columns, holds=why_not)
        if self.form.family not in MODELS:
            raise StoreError(
                f"{store.path} has the text family {self.form.family or 'none'!r}; kohya's caches are written for "
                f"{', '.join(MODELS)}: use --format safetensors"
            )
        self._checked = KohyaNames(store, self.form.family)

    def check(self, record: SampleRecord) -> None:
        """Check a sample's name; see `KohyaNames.name`."""
        self._checked.name(record, self._key_end(record))

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        names = KohyaNames(self.store, self.form.family)
        for record, data in samples:
            stem, name, is_first_of_image, is_first_of_file = names.name(record, self._key_end(record))
            arrays, path = self.form.arrays(record, data), folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(path, "w" if is_first_of_file else "a", zipfile.ZIP_STORED) as archive:
                _add(archive, self._latents(record, arrays))
            if is_first_of_image and record.captions:
                lines = (text.replace("\n", " ") + "\n" for text in record.captions)
                (folder / f"{stem}.txt").write_bytes(text_bytes("".join(lines)))
            if is_first_of_image and self._has_text(record):
                with zipfile.ZipFile(folder / f"{stem}{_SUFFIX[self.form.family]}.npz", "w", zipfile.ZIP_STORED) as archive:
                    _add(archive, self._texts(arrays))

    def _has_text(self, record: SampleRecord) -> bool:
        has_columns = self.form.token_width is not None and self.form.pooled_width is not None
        return bool(record.captions) and has_columns and self.form.family in _SUFFIX

    def _latents(self, record: SampleRecord, arrays: SampleArrays) -> dict[str, NDArray[Any]]:
        def own(latent: NDArray[np.float32]) -> NDArray[np.float32]:
            return self.form.fed(latent) if self.form.family == "flux" else latent

        top, left, height, width = record.crop
        if top < 0:  # unknown: that at the centre, which these scripts compute themselves
            top, left = (max(0, (whole - part) // 2) for whole, part in zip(record.resized, (height, width), strict=True))
        values: dict[str, NDArray[Any]] = {
            "latents": own(arrays.latent),
            "original_size": np.array(record.original_size[::-1], dtype="<i8"),
            "crop_ltrb": np.array([left, top, left + width, top + height], dtype="<i8"),
        }
        if arrays.flipped is not None:
            values["latents_flipped"] = own(arrays.flipped)
        if arrays.mask is not None:
            values["alpha_mask"] = arrays.mask.astype("<f4") / np.float32(255.0)
        end = self._key_end(record)
        return {key + end: value for key, value in values.items()}

    def _key_end(self, record: SampleRecord) -> str:
        _, height, width = self.form.latent_shape(self.store, record)
        return f"_{height}x{width}" if self.form.family in _SIZED else ""

    def _texts(self, arrays: SampleArrays) -> dict[str, NDArray[Any]]:
        tokens, pooled = arrays.tokens, arrays.pooled
        assert tokens is not None
        assert pooled is not None
        first = tokens.shape[1] - len(pooled)  # the second CLIP's tokens are as wide as the pooled embedding, which is its own
        not_applied = np.zeros((), dtype="?")
        if self.form.family == "sdxl":
            return {"hidden_state1": tokens[:, :first], "hidden_state2": tokens[:, first:], "pool2": pooled}
        if self.form.family == "sd3":
            clips, t5 = tokens[:CLIP_TOKENS], tokens[CLIP_TOKENS:]
            seen = {f"clip_{name}_attn_mask": np.ones(len(clips), dtype="<i8") for name in ("l", "g")}
            seen["t5_attn_mask"] = np.ones(len(t5), dtype="<i8")
            applied = {"apply_lg_attn_mask": not_applied, "apply_t5_attn_mask": not_applied}
            return {"lg_out": clips, "t5_out": t5, "lg_pooled": pooled, **seen, **applied}
        ids, mask = np.zeros((len(tokens), 3), dtype="<f4"), np.ones(len(tokens), dtype="<i8")
        applied = {"apply_t5_attn_mask": not_applied}
        return {"l_pooled": pooled, "t5_out": tokens, "txt_ids": ids, "t5_attn_mask": mask, **applied}


def _add(archive: zipfile.ZipFile, arrays: dict[str, NDArray[Any]]) -> None:
    """Add arrays to an npz file, as numpy reads it: stored, without times."""
    for name, array in arrays.items():
        with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
            np.lib.format.write_array(member, array, allow_pickle=False)
