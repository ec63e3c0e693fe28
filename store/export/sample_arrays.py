"""A sample's arrays from its file, as other trainers take them: latents unscaled or as a model is fed, embeddings of a caption.

Letters: C latent channels, h and w the latent's height and width, T tokens, D width of a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.format.block import DTYPES, FLIPPED, LATENT, LENGTH_BYTES, METADATA, POOLED, TOKENS, LatentKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.store.read.store import Store

_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleArrays:
    """The arrays of a sample that trainers take."""

    latent: NDArray[np.float32]  # [C, h, w], unscaled
    flipped: NDArray[np.float32] | None  # [C, h, w]
    tokens: NDArray[np.float32] | None  # [T, D], of the first caption
    pooled: NDArray[np.float32] | None  # [D']


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreForm:
    """Properties that all samples of a store share, for an export to a trainer's format."""

    family: str  # of its text encoders; empty if it is not known
    channels: int
    flip: bool
    token_width: int | None  # None: no token embeddings that a trainer takes
    pooled_width: int | None
    shift: NDArray[np.float64]  # [C or 1, 1, 1]
    scale: NDArray[np.float64]  # [C or 1, 1, 1]

    def fed(self, latent: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a latent as a model is fed, in float32."""
        scaled: NDArray[np.float32] = ((latent - self.shift) * self.scale).astype(np.float32)
        return scaled

    def arrays(self, data: bytes) -> SampleArrays:
        """Return the arrays in a sample's file; of moments, the means."""
        found = _tensors(data)
        return SampleArrays(
            latent=_floats(*found[LATENT])[: self.channels],
            flipped=_floats(*found[FLIPPED])[: self.channels] if self.flip else None,
            tokens=None if self.token_width is None else _floats(*found[f"caption.0.{TOKENS}"]),
            pooled=None if self.pooled_width is None else _floats(*found[f"caption.0.{POOLED}"]),
        )


def form_of(store: Store) -> StoreForm:
    """Return what a store's samples have in common."""
    manifest = store.manifest
    vae, text = (found if isinstance(found := manifest.encoders.get(name), dict) else {} for name in ("vae", "text_encoder"))
    latents = {bucket.name: bucket.columns.get(LATENT) for bucket in manifest.buckets}
    other = [
        name for name, column in latents.items() if column is None or len(column.shape) != 3 or column.dtype not in _FLOATS
    ]
    if store.ragged:
        raise StoreError(
            f"{store.path} cannot be exported to a trainer's format: it has ragged columns ({', '.join(store.ragged)}); "
            "use --format safetensors"
        )
    scaling, std = vae.get("scaling_factor"), vae.get("latents_std")
    if other or not isinstance(scaling, int | float):
        what = f"bucket {other[0]} has no latents of images" if other else "it does not record its VAE's scaling_factor"
        raise StoreError(f"{store.path} cannot be exported to a trainer's format: {what}; use --format safetensors")
    fixed, tokens = store.text.delivered.fixed, store.text.delivered.tokens
    widths = {
        column.name: column.shape[0] for column in (*tokens, *fixed) if column.dtype in _FLOATS and len(column.shape) == 1
    }
    stored = next((column.shape[0] for column in latents.values() if column is not None), 0)
    return StoreForm(
        family=str(text.get("family") or ""),
        channels=stored // 2 if vae.get("latents") == LatentKind.MOMENTS.value else stored,
        flip=FLIPPED in _columns_of_all(store),
        token_width=widths.get(TOKENS),
        pooled_width=widths.get(POOLED),
        shift=_each(vae.get("latents_mean") or vae.get("shift_factor") or 0.0),
        scale=float(scaling) / _each(std or 1.0),
    )


def columns_beside(store: Store) -> tuple[str, ...]:
    """Return the roles of the columns that are next to the latents, such as masks."""
    there = {*store.manifest.columns, *(store.added.keys() & _columns_of_all(store))}
    return tuple(sorted(there - {LATENT, FLIPPED}))


def _columns_of_all(store: Store) -> set[str]:
    """Return the columns that all rows have, added ones too."""
    names = [{column.name for column in bucket.columns} for bucket in store.buckets()]
    return set.intersection(*names) if names else set()


def _each(values: Any) -> NDArray[np.float64]:  # noqa: ANN401 - a number or a list of them
    return np.array(values, dtype=np.float64).reshape(-1, 1, 1)


def _tensors(data: bytes) -> dict[str, tuple[memoryview, str, Sequence[int]]]:
    """Return bytes, dtype and shape of each tensor in a sample's file, which has been written just now."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header, values = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length]), memoryview(data)[LENGTH_BYTES + length :]
    return {
        name: (values[slice(*entry["data_offsets"])], entry["dtype"], entry["shape"])
        for name, entry in header.items()
        if name != METADATA
    }


def _floats(values: memoryview, dtype: str, shape: Sequence[int]) -> NDArray[np.float32]:
    array = np.frombuffer(values, dtype=DTYPES[dtype]).reshape(shape)
    if dtype == "BF16":  # the upper half of a float32
        widened: NDArray[np.float32] = (array.astype("<u4") << 16).view("<f4")
        return widened
    return array.astype(np.float32)
