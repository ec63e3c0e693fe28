"""The failure: `[16, 88, 136] != [16, 88, 144]` at a random step, because packing and training each computed the size.

Here a row enters a bucket only if the encoded tensor's own shape is the bucket's, and a loader reads shapes only
from the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.store import Store
from tests.commands import call
from tests.kit import empty_store, make_sample, open_writer, spec_of
from tests.models import SMALL, png


def test_every_batch_over_images_of_awkward_sizes_has_the_shape_of_its_bucket(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for n, (height, width) in enumerate(
        [(44, 68), (44, 72), (43, 67), (45, 69), (17, 25), (25, 17), (16, 24), (31, 31), (99, 64)]
    ):
        (photos / f"{n}.png").write_bytes(png(height, width, n))
    grid = "16x22,18x24,24x18,22x16,20x20"
    assert call("ingest", "pack", photos, tmp_path / "s", "--model", model, "--grid", grid, "--min-size-px", "8").code == 0
    store = Store.open(tmp_path / "s")
    assert len(store.buckets()) > 2
    with Loader(store, LoaderConfig(batch_size=2, epochs=3, remainder=Remainder.PARTIAL)) as loader:
        for batch in loader.forever():
            bucket = store.bucket(batch.bucket)
            assert batch.latents.shape == (2, 4, bucket.height_px // 2, bucket.width_px // 2)


def test_an_encoder_that_rounds_otherwise_is_refused_while_packing_not_at_a_random_step(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VaeEncoder.encode

    def rounded_up(self: VaeEncoder, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        latents, is_finite = encode(self, pixels, seeds)
        return torch.nn.functional.pad(latents, (0, latents.shape[-1] % 8 and 8 - latents.shape[-1] % 8)), is_finite

    monkeypatch.setattr(VaeEncoder, "encode", rounded_up)
    call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--json").fails(
        "does not fit its bucket", "F16 [4, 8, 12], got float16 [4, 8, 16]"
    )
    assert Store.open(tmp_path / "s").manifest.samples == 0


@pytest.mark.parametrize("shape", [(2, 8, 9), (2, 9, 8), (2, 8), (1, 2, 8, 8), (2, 64), (128,)])
def test_a_row_of_another_shape_never_enters_a_bucket(tmp_path: Path, shape: tuple[int, ...]) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    sample = make_sample("a.png", "train/64x64")
    with pytest.raises(ValueError, match=r"column 'latent' of bucket train/64x64 takes F16 \[2, 8, 8\], got float16"):
        writer.add(spec=spec_of(sample.bucket), latents={"latent": np.zeros(shape, "<f2")}, record=sample.record, captions=[])
    writer.close()
