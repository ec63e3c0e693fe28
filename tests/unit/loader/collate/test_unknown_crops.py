"""Rows whose crop is unknown, as imported ones may be: delivered as unknown, mirrored or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import LatentColumn, Store, StoreWriter, new_record

BUCKET, SIZES = "train/64x96", ((128, 192), (0, 0), (80, 96))


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_an_unknown_crop_stays_unknown(tmp_path: Path, flip: float) -> None:
    latent = np.zeros((4, 8, 12), dtype="f2")
    columns = [LatentColumn(channels=4), LatentColumn(channels=4, name="latent_flipped")]
    with StoreWriter(
        tmp_path / "s", columns=columns, encoders={"vae": {"scaling_factor": 1.0, "latent_channels": 4}}
    ) as writer:
        for number, original in enumerate(SIZES):
            record = new_record(f"{number}.png", BUCKET)
            unknown = replace(record, original_size=original, crop=(-1, -1, 64, 96), crop_in_source=(-1, -1, -1, -1))
            writer.add_record(unknown, {"latent": latent, "latent_flipped": latent}, {})
        known = replace(new_record("known.png", BUCKET), original_size=(64, 100), resized=(64, 100), crop=(0, 1, 64, 96))
        writer.add_record(known, {"latent": latent, "latent_flipped": latent}, {})
    with Loader(Store.open(tmp_path / "s"), LoaderConfig(batch_size=4, epochs=1, flip=flip)) as loader:
        (batch,) = list(loader)
    crops = dict(zip(map(tuple, batch.original_size.tolist()), batch.crop.tolist(), strict=True))
    assert [crops[size] for size in SIZES] == [[-1, -1]] * 3
    assert crops[64, 100] == [0, 3 if flip else 1]
