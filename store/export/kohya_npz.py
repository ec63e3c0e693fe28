"""Export as the cache of kohya's scripts: npz files named after the images, to be copied next to them.

Of each sample `NAME_WWWWxHHHH_MODEL.npz` with its latent, and its mask if it has one, several sizes of an image together; of
each image `NAME.txt` with its captions, and if the model has a text cache, the embedding of the first. Source:
`strategy_base.py`, `strategy_sd.py`, `strategy_sdxl.py`, `strategy_sd3.py`, `strategy_flux.py` of sd-scripts 0.10.1.
"""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.export.kohya_names import KohyaNames
from bucketline.store.export.sample_arrays import MASK, form_of, mask_shape, num_values, size_of
from bucketline.store.format.hashing import text_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.export.kohya_names import KohyaName
    from bucketline.store.export.sample_arrays import SampleArrays
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.iter_samples import Listed
    from bucketline.store.read.store import Store

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # numpy dtype and shape by key

MODELS = ("sd", "sdxl", "sd3", "flux")
CLIP_TOKENS = 77  # before the T5's in SD3's
_SIZED = ("sd3", "flux")  # models whose keys end in the latent's size
_SUFFIX = {"sdxl": "_te_outputs", "sd3": "_sd3_te", "flux": "_flux_te"}
_MEMBER_BYTES, _END_BYTES = 30 + 46, 22  # of a zip archive: the two headers of a member, without its name twice, and the end


class KohyaForm:
    """A store's samples in the form of these files."""

    def __init__(self, store: Store, columns: Sequence[str] | None = None, images: Path | None = None) -> None:
        """Read what the samples have in common; `columns` are roles to write next to the latents, None for all.

        `images`: folder of the images, whose sizes are read if the store does not know them.

        Raises:
            StoreError: if the store is not of one of the models, or one of its columns has no place in these files.
        """

        def why_not(bucket: str, role: str) -> str | None:
            if role != MASK:
                return "kohya's caches have no place for it, only for a mask"
            column = store.bucket(bucket).column(MASK)
            if (column.dtype, column.shape) == ("U8", size_of(bucket)):
                return None
            shape = "x".join(map(str, column.shape))
            return f"in {bucket} it is {column.dtype} of {shape}, and kohya's are U8 of the image's size"

        self.form, self._store = form_of(store, "kohya's caches", columns, holds=why_not), store
        if self.form.family not in MODELS:
            raise StoreError(
                f"{store.path} has the text family {self.form.family or 'none'!r}; kohya's caches are written for "
                f"{', '.join(MODELS)}: use --format safetensors"
            )
        self._names = KohyaNames(store, self.form.family, images)
        self.num_files = 0  # of the samples so far

    def num_bytes(self, listed: Listed, num_tokens: Sequence[int]) -> int:
        """Return the bytes that a sample adds, from its first caption's token count, without reading values.

        Raises:
            StoreError: as `KohyaNames.name`.
        """
        record, has_mask = listed.record, MASK in self.form.side_of(self._store, listed)
        name = self._name(record)
        total = _npz_bytes(self._latent_shapes(record, has_mask=has_mask)) - (0 if name.is_first_of_file else _END_BYTES)
        if not name.is_first_of_image:
            return total
        return (
            total
            + len(_caption_lines(record))
            + (_npz_bytes(self._text_shapes(num_tokens[0])) if self._has_text(record) else 0)
        )

    def write(self, folder: Path, record: SampleRecord, data: bytes) -> int:
        """Write a sample's files from its safetensors file, and return the bytes that were added.

        Raises:
            StoreError: as `KohyaNames.name`.
        """
        name, arrays = self._name(record), self.form.arrays(record, data)
        path = folder / name.path
        path.parent.mkdir(parents=True, exist_ok=True)
        before = 0 if name.is_first_of_file else path.stat().st_size
        with zipfile.ZipFile(path, "w" if name.is_first_of_file else "a", zipfile.ZIP_STORED) as archive:
            _add(archive, self._latents(record, arrays, name.original_wh))
        total = path.stat().st_size - before
        others: dict[str, bytes] = {}
        if name.is_first_of_image and record.captions:
            others[f"{name.stem}.txt"] = _caption_lines(record)
        if name.is_first_of_image and self._has_text(record):
            others[f"{name.stem}{_SUFFIX[self.form.family]}.npz"] = _npz(self._texts(arrays))
        for own, content in others.items():
            (folder / own).write_bytes(content)
            total += len(content)
        return total

    def _name(self, record: SampleRecord) -> KohyaName:
        name = self._names.name(record, self._key_end(record))
        self.num_files += name.is_first_of_file
        if name.is_first_of_image:
            self.num_files += bool(record.captions) + self._has_text(record)
        return name

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
        _, height, width = self.form.latent_shape(self._store, record)
        return f"_{height}x{width}" if self.form.family in _SIZED else ""

    def _latent_shapes(self, record: SampleRecord, *, has_mask: bool) -> Shapes:
        shape, end = self.form.latent_shape(self._store, record), self._key_end(record)
        flipped: Shapes = {f"latents_flipped{end}": ("<f4", shape)} if self.form.flip else {}
        size: Shapes = {f"original_size{end}": ("<i8", (2,)), f"crop_ltrb{end}": ("<i8", (4,))}
        mask: Shapes = {f"alpha_mask{end}": ("<f4", mask_shape(self._store, record.bucket))} if has_mask else {}
        return {f"latents{end}": ("<f4", shape), **size, **flipped, **mask}

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

    def _text_shapes(self, num_tokens: int) -> Shapes:
        width, pooled = self.form.token_width or 0, self.form.pooled_width or 0
        if self.form.family == "sdxl":
            return {
                "hidden_state1": ("<f4", (num_tokens, width - pooled)),
                "hidden_state2": ("<f4", (num_tokens, pooled)),
                "pool2": ("<f4", (pooled,)),
            }
        if self.form.family == "sd3":
            clips, t5 = min(CLIP_TOKENS, num_tokens), max(0, num_tokens - CLIP_TOKENS)
            seen: Shapes = {f"clip_{name}_attn_mask": ("<i8", (clips,)) for name in ("l", "g")}
            seen |= {"t5_attn_mask": ("<i8", (t5,)), "apply_lg_attn_mask": ("|b1", ()), "apply_t5_attn_mask": ("|b1", ())}
            return {"lg_out": ("<f4", (clips, width)), "t5_out": ("<f4", (t5, width)), "lg_pooled": ("<f4", (pooled,)), **seen}
        return {
            "l_pooled": ("<f4", (pooled,)),
            "t5_out": ("<f4", (num_tokens, width)),
            "txt_ids": ("<f4", (num_tokens, 3)),
            "t5_attn_mask": ("<i8", (num_tokens,)),
            "apply_t5_attn_mask": ("|b1", ()),
        }


class KohyaPlan:
    """Size of the folder."""

    def __init__(self, form: KohyaForm) -> None:
        self.num_samples = self.num_bytes = 0
        self._form = form

    @property
    def num_files(self) -> int:
        return self._form.num_files

    def add(self, _record: SampleRecord, file_bytes: int) -> None:
        """Count a sample that adds `file_bytes` bytes."""
        self.num_samples += 1
        self.num_bytes += file_bytes


class KohyaWriter:
    """Writes the folder."""

    def __init__(self, folder: Path, form: KohyaForm) -> None:
        self._folder, self._form = folder, form
        self.plan = KohyaPlan(form)

    def add(self, record: SampleRecord, data: bytes) -> None:
        """Write a sample's files.

        Raises:
            StoreError: as `KohyaForm.write`.
        """
        self.plan.add(record, self._form.write(self._folder, record, data))

    def __enter__(self) -> KohyaWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing: every file is closed."""


def _caption_lines(record: SampleRecord) -> bytes:
    return b"".join(text_bytes(text.replace("\n", " ")) + b"\n" for text in record.captions)


def _npz(arrays: dict[str, NDArray[Any]]) -> bytes:
    """Return an npz file, as numpy reads it: stored, without times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, arrays)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, arrays: dict[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        archive.writestr(zipfile.ZipInfo(f"{name}.npy"), _npy_header(array.dtype.str, array.shape) + array.tobytes())


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _npz_bytes(shapes: Shapes) -> int:
    """Return the length of an npz file of arrays of these forms."""
    return _END_BYTES + sum(
        _MEMBER_BYTES
        + 2 * len(f"{name}.npy".encode())
        + len(_npy_header(dtype, shape))
        + np.dtype(dtype).itemsize * num_values(shape)
        for name, (dtype, shape) in shapes.items()
    )
