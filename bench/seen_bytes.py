"""Bytes a sample of Qwen-Image-Edit-Plus, with its images' states stored once a sample and once a caption.

`python -m bucketline.bench.seen_bytes` writes two small stores in the published shapes and measures them. Times nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.families.qwenimage_edit_plus import QwenImageEditPlus
from bucketline.store import Column, LatentColumn, RaggedGroup, ReferenceColumn, StoreWriter
from bucketline.store.format.block import IS_IMAGE, SEEN_EMPTY, SEEN_IMAGES, TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_SAMPLES = 2
_SIDE_PX = 1024  # of the target and the references
_PIXELS = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 12845056}  # as published
_WIDTH, _CHANNELS = 3584, 16  # of a Qwen2.5-VL's token; of the VAE's latent
_CHAT_TOKENS = 5  # of the chat after the caption
_CAPTION_TOKENS = 100 + _CHAT_TOKENS
_TEXT = Column(name=TOKENS, dtype="F16", shape=(_WIDTH,))


def bytes_a_sample(num_references: int, num_captions: int) -> dict[str, int]:
    """Write a store of each kind, and return the bytes of its shards by sample: `shared`, `by caption`."""
    family = QwenImageEditPlus.references
    assert family is not None
    seen = QwenImageEditPlus.seen_tokens(_PIXELS, [family.size(_SIDE_PX, _SIDE_PX, family.text_area_px)] * num_references)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "shared": _written(Path(folder) / "shared", num_references, num_captions, seen, is_shared=True),
            "by caption": _written(Path(folder) / "whole", num_references, num_captions, seen, is_shared=False),
        }


def _written(place: Path, num_references: int, num_captions: int, seen: int, *, is_shared: bool) -> int:
    """Return a sample's bytes in a store where `seen` tokens of the images are stored by themselves, or before each caption."""
    rng = np.random.default_rng(0)
    before = 0 if is_shared else seen

    def tokens(number: int) -> dict[str, NDArray[np.float16]]:
        return {TOKENS: rng.random((number, _WIDTH), np.float32).astype("f2")}

    groups = {SEEN_IMAGES: (Column(name=IS_IMAGE, dtype="U8", shape=()), _TEXT), SEEN_EMPTY: (_TEXT,)}
    if not is_shared:
        groups = {"empty": (_TEXT,)}
    columns = (LatentColumn(channels=_CHANNELS), *(ReferenceColumn(n, channels=_CHANNELS) for n in range(num_references)))
    writer = StoreWriter(
        place,
        columns=columns,
        encoders={"vae": {}, "text_encoder": {}},
        text=(_TEXT,),
        empty_caption=tokens(0),
        ragged={
            name: RaggedGroup(columns=own, of="rows", stored_once=True, encoder="text_encoder") for name, own in groups.items()
        },
        max_captions=num_captions,
    )
    side = _SIDE_PX // 8
    with writer:
        for n in range(_SAMPLES):
            latents = {column.name: rng.random((_CHANNELS, side, side), np.float32).astype("f2") for column in columns}
            captions = {f"caption {n} {m}": tokens(before + _CAPTION_TOKENS) for m in range(num_captions)}
            entries: Mapping[str, Mapping[str, NDArray[np.generic]]] = (
                {SEEN_IMAGES: {**tokens(seen), IS_IMAGE: np.ones(seen, "u1")}, SEEN_EMPTY: tokens(_CHAT_TOKENS)}
                if is_shared
                else {"empty": tokens(seen + _CHAT_TOKENS)}
            )
            writer.add(f"{n}", f"train/{'x'.join([str(_SIDE_PX)] * len(columns) * 2)}", latents, captions, ragged=entries)
    return sum(file.stat().st_size for file in (place / "shards").iterdir()) // _SAMPLES


def main() -> int:
    """Print a table."""
    for num_references, num_captions in ((1, 1), (1, 8), (3, 1), (3, 8)):
        shared, whole = (own / 2**20 for own in bytes_a_sample(num_references, num_captions).values())
        print(
            f"references {num_references}, captions {num_captions}: {shared:5.1f} MiB a sample with the images' states once, "
            f"{whole:5.1f} MiB with each caption"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
