"""A store of latents as Stable Diffusion's VAE spreads them, and the same with faults that a report must point out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.store import LatentColumn, SampleRecord, Store, new_record
from tests.kit import Form, Sample

SD = {"class": "AutoencoderKL", "latent_channels": 4, "scaling_factor": 0.18215, "shift_factor": 0.0, "latents": "mode"}
STD = 1 / 0.18215  # of the VAE's latents
ROWS = {"train/256x256": 40, "train/192x320": 30, "val/256x256": 32}
CONSTANT, DUPLICATES, NAN_ROW = 5, 10, 20
NAME = "train/192x320/{}.png"


def smooth(seed: int, height: int, width: int) -> NDArray[np.float32]:
    """Make a latent of neighbouring values that are alike, `[4, height, width]`, of the VAE's spread."""
    random = np.random.default_rng(seed)
    coarse = random.normal(size=(4, -(-height // 4), -(-width // 4))).repeat(4, axis=1).repeat(4, axis=2)
    values = (0.9 * coarse[:, :height, :width] + 0.43 * random.normal(size=(4, height, width))) * STD
    latent: NDArray[np.float32] = values.astype(np.float32)
    return latent


def cropped(record: SampleRecord, share: float) -> SampleRecord:
    height, width = record.original_size
    kept = round(height * (1 - share))
    return replace(record, crop_in_source=((height - kept) // 2, 0, kept, width))


def latent_of(bucket: str, n: int, faults: frozenset[str]) -> NDArray[np.float32]:
    height, width = (int(side) // 8 for side in bucket.partition("/")[2].split("x"))
    latent = smooth(1000 * sorted(ROWS).index(bucket) + n, height, width)
    if bucket != "train/192x320":
        return latent
    if "constant" in faults and n < CONSTANT:
        latent[:] = 0.3
    if "duplicates" in faults and CONSTANT < n <= CONSTANT + DUPLICATES:
        latent = smooth(7, height, width) + smooth(900 + n, height, width) * 0.03
    return latent


def write_store(path: Path, *faults: str, scaling_factor: float = 0.18215) -> Store:
    """Write a store with faults, such as `cut` captions; or as a pack, `encoded here`."""
    known = frozenset(faults)
    assert known <= {"constant", "duplicates", "nan", "crops", "scaled before", "encoded here", "cut"}
    own = {"scaling_factor": scaling_factor, "dtype": "float32" if "encoded here" in known else None}
    encoders: dict[str, Any] = {"vae": SD | own, "text_encoder": {"width": 5}}
    samples = []
    for bucket, rows in ROWS.items():
        for n in range(rows):
            captions = (f"a {('red', 'blue')[n % 2]} boat number {n} <b>& more</b>",)
            record = replace(new_record(f"{bucket}/{n}.png", bucket, captions), original_size=(400 + 10 * n, 500))
            record = cropped(record, 0.6 if "crops" in known and bucket == "train/192x320" else 0.1)
            if "cut" in known and n == 1:
                record = replace(record, cuts=(("text_encoder", 90, 77, "the rest"),))
            latent = latent_of(bucket, n, known) * (0.18215 if "scaled before" in known else 1.0)
            columns = {"target": latent.astype(np.float16)}
            samples.append(Sample(id=record.id, bucket=bucket, columns=columns, captions=captions, record=record))
    store = Form(columns=(LatentColumn(channels=4),), encoders=encoders).make_store(path, samples)
    if "nan" in known:
        break_value(store, "train/192x320", NAN_ROW)
    return store


def break_value(store: Store, bucket: str, row: int) -> None:
    """Overwrite a value of a latent with NaN, which no writer of ours would store."""
    located = store.bucket(bucket).locate(np.array([row]))
    at = int(located.offsets(store.bucket(bucket).spec, "latent")[0])
    shard = store.shards[int(located.shard[0])]
    with shard.paths.lmdb.open("r+b") as file:
        file.seek(at + 2 * 30)
        file.write(np.array([np.nan], dtype="<f2").tobytes())


@pytest.fixture(scope="session")
def store_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """Return a function that writes a store with faults, each combination once."""
    made: dict[Any, Store] = {}

    def store(*faults: str, scaling_factor: float = 0.18215) -> Store:
        key = (*sorted(faults), scaling_factor)
        if key not in made:
            made[key] = write_store(tmp_path_factory.mktemp("report") / "photos.store", *faults, scaling_factor=scaling_factor)
        return made[key]

    return store
