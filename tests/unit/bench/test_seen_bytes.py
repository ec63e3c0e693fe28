"""The bytes that the docs name for a sample of Qwen-Image-Edit-Plus with references, once a sample and with each caption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.families.qwenimage_edit_plus import QwenImageEditPlus
from bucketline.store import Column, LatentColumn, RaggedGroup, ReferenceColumn, StoreWriter
from bucketline.store.format.block import IS_IMAGE, SEEN_EMPTY, SEEN_IMAGES, TOKENS

SIDE_PX, REFERENCES, CAPTIONS = 1024, 3, 8
PIXELS = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 12845056}  # as published
WIDTH, CHANNELS = 3584, 16  # of a Qwen2.5-VL's token; of the VAE's latent
CHAT_TOKENS, CAPTION_TOKENS = 5, 105  # of the chat after a caption; of both
TEXT = Column(name=TOKENS, dtype="F16", shape=(WIDTH,))


def written(place: Path, seen: int, *, is_shared: bool) -> int:
    """Write a sample with `seen` tokens of the images by themselves, or before each caption; return the shard's bytes."""
    rng = np.random.default_rng(0)
    columns = (LatentColumn(channels=CHANNELS), *(ReferenceColumn(n, channels=CHANNELS) for n in range(REFERENCES)))

    def tokens(number: int) -> dict[str, Any]:
        return {TOKENS: rng.random((number, WIDTH), np.float32).astype("f2")}

    groups: dict[str, Any] = {"empty": (TEXT,)}
    entries: dict[str, Any] = {"empty": tokens(seen + CHAT_TOKENS)}
    if is_shared:
        groups = {SEEN_IMAGES: (Column(name=IS_IMAGE, dtype="U8", shape=()), TEXT), SEEN_EMPTY: (TEXT,)}
        entries = {SEEN_IMAGES: {**tokens(seen), IS_IMAGE: np.ones(seen, "u1")}, SEEN_EMPTY: tokens(CHAT_TOKENS)}
    of_rows = {"of": "rows", "stored_once": True, "encoder": "text_encoder"}
    with StoreWriter(
        place,
        columns=columns,
        encoders={"vae": {}, "text_encoder": {}},
        text=(TEXT,),
        empty_caption=tokens(0),
        ragged={name: RaggedGroup(columns=own, **of_rows) for name, own in groups.items()},  # type: ignore[arg-type]
        max_captions=CAPTIONS,
    ) as writer:
        shape = (CHANNELS, SIDE_PX // 8, SIDE_PX // 8)
        latents = {column.name: rng.random(shape, np.float32).astype("f2") for column in columns}
        captions = {f"caption {n}": tokens(CAPTION_TOKENS + (0 if is_shared else seen)) for n in range(CAPTIONS)}
        writer.add("0", f"train/{'x'.join([str(SIDE_PX)] * len(columns) * 2)}", latents, captions, ragged=entries)
    return sum(file.stat().st_size for file in (place / "shards").iterdir())


def test_a_sample_of_three_references_and_eight_captions_has_its_images_states_once(tmp_path: Path) -> None:
    family = QwenImageEditPlus.references
    assert family is not None
    seen = QwenImageEditPlus.seen_tokens(PIXELS, [family.size(SIDE_PX, SIDE_PX, family.text_area_px)] * REFERENCES)
    shared, whole = (written(tmp_path / str(is_shared), seen, is_shared=is_shared) for is_shared in (True, False))
    latents, images, caption, chat = 4 * 16 * 128 * 128 * 2, 3 * (196 + 7) * 3584 * 2, 105 * 3584 * 2, 5 * 3584 * 2
    for expected, found in (
        (latents + images + chat + 8 * caption, shared),
        (latents + images + chat + 8 * (images + caption), whole),
    ):
        assert expected <= found < 1.02 * expected
    assert (shared / 2**20, whole / 2**20) == pytest.approx((12.0, 45.3), abs=0.1), "as docs/models.md says"
