"""Export as the cache of kohya's scripts: npz files named after the images, to be copied next to them.

Of each sample `NAME_WWWWxHHHH_MODEL.npz` with its latent, and its mask if it has one, several sizes of an image together; of
each image `NAME.txt` with its captions, and if the model has a text cache, the embedding of the first. Source:
`strategy_base.py`, `strategy_sd.py`, `strategy_sdxl.py`, `strategy_sd3.py`, `strategy_flux.py` of sd-scripts 0.10.1.
"""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.export.exporter import Exporter
from bucketline.store.export.kohya_names import KohyaNames
from bucketline.store.export.sample_arrays import MASK, form_of, size_of
from bucketline.store.format.hashing import text_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.export.exporter import ExportedSample, ExportRequest
    from bucketline.store.export.sample_arrays import SampleArrays
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.store import Store

MODELS = ("sd", "sdxl", "sd3", "flux")
CLIP_TOKENS = 77  # before the T5's in SD3's
_SIZED = ("sd3", "flux")  # models whose keys end in the latent's size
_SUFFIX = {"sdxl": "_te_outputs", "sd3": "_sd3_te", "flux": "_flux_te"}


class KohyaExporter(Exporter):
    """Writes the folder."""

    options = frozenset({"columns", "images"})
    value_bytes = 4
    most_captions = 1

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
        self._checked = KohyaNames(store, self.form.family, request.images)

    def check(self, record: SampleRecord) -> None:
        """Check a sample's name; see `KohyaNames.name`."""
        self._checked.name(record, self._key_end(record))

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write each sample's files; see `Exporter`."""
        names = KohyaNames(self.store, self.form.family, self.request.images)
        for record, data in samples:
            name, arrays = names.name(record, self._key_end(record)), self.form.arrays(record, data)
            path = folder / name.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(path, "w" if name.is_first_of_file else "a", zipfile.ZIP_STORED) as archive:
                _add(archive, self._latents(record, arrays, name.original_wh))
            if name.is_first_of_image and record.captions:
                (folder / f"{name.stem}.txt").write_bytes(_caption_lines(record))
            if name.is_first_of_image and self._has_text(record):
                text = folder / f"{name.stem}{_SUFFIX[self.form.family]}.npz"
                with zipfile.ZipFile(text, "w", zipfile.ZIP_STORED) as archive:
                    _add(archive, self._texts(arrays))

    def _has_text(self, record: SampleRecord) -> bool:
        has_columns = self.form.token_width is not None and self.form.pooled_width is not None
        return bool(record.captions) and has_columns and self.form.family in _SUFFIX

    def _latents(self, record: SampleRecord, arrays: SampleArrays, original_wh: tuple[int, int]) -> dict[str, NDArray[Any]]:
        def own(latent: NDArray[np.float32]) -> NDArray[np.float32]:
            return self.form.fed(latent) if self.form.family == "flux" else latent

        top, left, height, width = record.crop
        if top < 0:  # unknown: that at the centre, which these scripts compute themselves
            top, left = (max(0, (whole - part) // 2) for whole, part in zip(record.resized, (height, width), strict=True))
        values: dict[str, NDArray[Any]] = {
            "latents": own(arrays.latent),
            "original_size": np.array(original_wh, dtype="<i8"),
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


def _caption_lines(record: SampleRecord) -> bytes:
    return b"".join(text_bytes(text.replace("\n", " ")) + b"\n" for text in record.captions)


def _add(archive: zipfile.ZipFile, arrays: dict[str, NDArray[Any]]) -> None:
    """Add arrays to an npz file, as numpy reads it: stored, without times."""
    for name, array in arrays.items():
        with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
            np.lib.format.write_array(member, array, allow_pickle=False)
