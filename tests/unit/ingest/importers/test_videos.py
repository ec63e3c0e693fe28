"""Videos: latents of frames, height and width, delivered by the loader; mixed with images, and wrongly scaled ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.hashing import sample_digest
from tests.commands import call
from tests.unit.ingest.importers.known import Known, run_import
from tests.unit.ingest.importers.writers import WRITERS, musubi_video

SHAPES = ((21, 6, 8), (21, 8, 6), (5, 6, 8))  # latent frames, height and width
WAN_MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
WAN_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
WAN_STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
WAN_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)
MEAN, STD = (np.array(values, dtype="f4").reshape(16, 1, 1, 1) for values in (WAN_MEAN, WAN_STD))
WAN = ("--vae", "wan")


def latent_of(number: int, *, of: tuple[int, ...] | None = None) -> NDArray[np.float32]:
    """Return a latent with the statistics of Wan's VAE, `[16, F, h, w]`."""
    shape = of or SHAPES[number % 3]
    drawn = np.random.default_rng(number).standard_normal((16, *shape)).astype("f4")
    latent: NDArray[np.float32] = drawn * STD + MEAN
    return latent


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A row of a batch."""

    bucket: str
    latent: torch.Tensor
    tokens: torch.Tensor  # [T, D]


def delivered(path: Path) -> dict[str, Delivered]:
    """Return every row as a loader delivers it."""
    store, found = Store.open(path), {}
    ids = {sample_digest(name): name for bucket in store.buckets() for name in bucket.sample_ids(np.arange(bucket.num_rows))}
    with Loader(store, LoaderConfig(split="train", batch_size=1, epochs=1, window=0, remainder="partial")) as loader:
        for batch in loader:
            found[ids[batch.ids[0].numpy().tobytes()]] = Delivered(
                bucket=batch.bucket, latent=batch.latents[0].clone(), tokens=batch.tokens[0][batch.token_mask[0]].clone()
            )
    return found


def written(folder: Path, count: int, of: tuple[int, ...] | None = None, scale: float = 1.0) -> Path:
    for n in range(count):
        fed = (latent_of(n, of=of) - MEAN) / STD * np.float32(scale)
        musubi_video(folder, f"clip{n}", fed, "wan", caption=f"a cat jumps {n}")
    return folder


def test_the_loader_delivers_videos_by_frames_height_and_width(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 6)
    ran = run_import("musubi", source, tmp_path / "s.store", None, *WAN).done()
    assert (ran.json["kind"], ran.json["imported"], ran.json["text"]) == ("musubi", 6, "none")
    assert ran.json["buckets"] == {"train/17x48x64": 2, "train/81x48x64": 2, "train/81x64x48": 2}
    found = delivered(tmp_path / "s.store")
    assert len(found) == 6
    for name, own in found.items():
        n = int(name.removeprefix("clip").partition("_")[0])
        frames, height, width = SHAPES[n % 3]
        assert own.bucket == f"train/{1 + 4 * (frames - 1)}x{8 * height}x{8 * width}"
        np.testing.assert_allclose(own.latent.float().numpy(), latent_of(n), rtol=2**-10, atol=2**-10)
        assert own.latent.dtype == torch.float16
    bucket = Store.open(tmp_path / "s.store").bucket("train/81x48x64")
    assert bucket.axes == {"frames": 81, "height_px": 48, "width_px": 64}
    assert call("store", "verify", tmp_path / "s.store").code == 0
    assert "a cat jumps 3" in call("store", "ls", tmp_path / "s.store", "--json").out
    again = run_import("musubi", source, tmp_path / "s.store", None, *WAN)
    assert (again.json["imported"], again.json["unchanged"]) == (0, 6)


def test_videos_that_were_normalised_are_refused_with_both_numbers(tmp_path: Path) -> None:
    run_import("musubi", written(tmp_path / "cache", 4, scale=0.4), tmp_path / "s.store", None, *WAN).fails("times the VAE's")
    assert not (tmp_path / "s.store").exists()


def test_a_video_among_images_and_a_vae_of_images_are_told(tmp_path: Path) -> None:
    source = written(tmp_path / "cache", 3, of=(1, 6, 8))
    images = run_import("musubi", source, tmp_path / "s.store", None, *WAN)
    assert images.json["buckets"] == {"train/48x64": 3}
    musubi_video(source, "video", (latent_of(0) - MEAN) / STD, "wan", caption="")
    mixed = run_import("musubi", source, tmp_path / "s.store", None, *WAN)
    assert (mixed.json["unchanged"], mixed.json["rejected"]) == (3, 1)
    assert "import videos into a store of their own" in mixed.json["rejects"][0]["detail"]
    refused = run_import("musubi", source, tmp_path / "o.store", None, "--vae", "flux", "--trust-scale")
    assert "of a video" in refused.json["rejects"][0]["detail"]


@pytest.mark.parametrize("kind", ["simpletuner", "ai-toolkit", "diffusion-pipe"])
def test_other_trainers_videos_too(kind: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    shapes = [(5, *(side // 8 for side in sample.bucket_hw)) for sample in own.samples]
    latents = [latent_of(n, of=shape) for n, shape in enumerate(shapes)]
    fed = [replace(sample, latent=(one - MEAN) / STD) for sample, one in zip(own.samples, latents, strict=True)]
    source = WRITERS[kind][0](tmp_path / "cache", replace(own, family="wan", samples=tuple(fed), scale=1.0, shift=0.0))
    ran = run_import(kind, source, tmp_path / "s.store", None, *WAN)
    assert (ran.code, ran.json["imported"], ran.json["rejected"]) == (0, 6, 0), ran.err
    found = delivered(tmp_path / "s.store")
    for sample, latent in zip(own.samples, latents, strict=True):
        height, width = sample.bucket_hw
        assert found[sample.id].bucket == f"train/17x{height}x{width}"
        np.testing.assert_allclose(found[sample.id].latent.float().numpy(), latent, rtol=2**-9, atol=2**-9)
