"""Export as the cache of kohya's scripts: npz files named after the images, to be copied next to them.

Of each sample `NAME_WWWWxHHHH_MODEL.npz` with its latent, `NAME.txt` with its captions, and if the model has a text cache, the
embedding of the first. Source:
`strategy_base.py`, `strategy_sd.py`, `strategy_sdxl.py`, `strategy_sd3.py`, `strategy_flux.py` of sd-scripts 0.10.1.
"""

from __future__ import annotations

import zipfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.export.exporter import Exporter, columns_beside, form_of
from bucketline.store.format.block import text_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.export.exporter import ExportedSample, ExportRequest, SampleArrays
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.read.store import Store

MODELS = ("sd", "sdxl", "sd3", "flux")
CLIP_TOKENS = 77  # before the T5's in SD3's
_SIZED = ("sd3", "flux")  # models whose keys end in the latent's size
_SUFFIX = {"sdxl": "_te_outputs", "sd3": "_sd3_te", "flux": "_flux_te"}


class KohyaExporter(Exporter):
    """Writes the folder."""

    def __init__(self, store: Store, request: ExportRequest) -> None:
        super().__init__(store, request)
        if store.manifest.rules.get("import"):
            raise StoreError(
                f"{store.path} was made by `ingest import`, so its ids are not the images' paths, which kohya's caches are "
                "named after; use --format safetensors"
            )
        self.form = form_of(store)
        self.left_out = columns_beside(store)
        if self.form.family not in MODELS:
            raise StoreError(
                f"{store.path} has the text family {self.form.family or 'none'!r}; kohya's caches are written for "
                f"{', '.join(MODELS)}: use --format safetensors"
            )
        self._ids: dict[str, str] = {}  # by path of the image without extension

    def check(self, record: SampleRecord) -> None:
        """Check that a sample can have a name, which no other has."""
        if not all(record.original_size):
            raise StoreError(
                f"sample {record.id!r:.200}: the size of its image is unknown, and kohya's scripts look for a cache by it; "
                "leave it out"
            )
        stem = _stem(record)
        is_safe = stem.isprintable() and "\\" not in stem and not {"", ".", ".."} & set(stem.split("/"))
        if not is_safe or max(len(text_bytes(part)) for part in stem.split("/")) > 200:
            raise StoreError(f"sample {record.id!r:.200} cannot be a file's name, as kohya's caches are called; leave it out")
        if (other := self._ids.setdefault(stem, record.id)) != record.id:
            raise StoreError(f"samples {record.id!r:.200} and {other!r:.200} have one name in kohya's caches; leave one out")

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        for record, data in samples:
            height, width = record.original_size
            arrays, stem = self.form.arrays(data), _stem(record)
            path = folder / f"{stem}_{width:04d}x{height:04d}_{self.form.family}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_npz(path, self._latents(record, arrays))
            if record.captions:
                lines = (text.replace("\n", " ") + "\n" for text in record.captions)
                (folder / f"{stem}.txt").write_bytes(text_bytes("".join(lines)))
            has_columns = self.form.token_width is not None and self.form.pooled_width is not None
            if record.captions and has_columns and self.form.family in _SUFFIX:
                _write_npz(folder / f"{stem}{_SUFFIX[self.form.family]}.npz", self._texts(arrays))

    def _latents(self, record: SampleRecord, arrays: SampleArrays) -> dict[str, NDArray[Any]]:
        def own(latent: NDArray[np.float32]) -> NDArray[np.float32]:
            return self.form.fed(latent) if self.form.family == "flux" else latent

        top, left, height, width = record.crop
        values: dict[str, NDArray[Any]] = {
            "latents": own(arrays.latent),
            "original_size": np.array(record.original_size[::-1], dtype="<i8"),
            "crop_ltrb": np.array([left, top, left + width, top + height], dtype="<i8"),
        }
        if arrays.flipped is not None:
            values["latents_flipped"] = own(arrays.flipped)
        _, height, width = arrays.latent.shape
        end = f"_{height}x{width}" if self.form.family in _SIZED else ""
        return {key + end: value for key, value in values.items()}

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


def _stem(record: SampleRecord) -> str:
    """Return the path of a sample's image without extension."""
    path = PurePosixPath(record.id)
    return str(path.with_suffix("")) if path.name else ""


def _write_npz(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays as numpy reads them: stored, without times."""
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
