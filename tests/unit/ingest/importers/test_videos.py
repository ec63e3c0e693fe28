"""FastVideo's videos: latents of frames, height and width, delivered by the loader; damaged, mixed and wrongly scaled ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bucketline.store import Store
from tests.commands import call
from tests.unit.ingest.importers.delivered import delivered
from tests.unit.ingest.importers.fastvideo_writer import row, table
from tests.unit.ingest.importers.known import run_import
from tests.unit.ingest.importers.writers import WRITERS, musubi_video

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.unit.ingest.importers.known import Known

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


def rows_of(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(f"clip-{n}", f"a cat jumps {n}", {"vae_latent": latent_of(n)}, **changes) for n in range(count)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    table(tmp_path / "cache" / "worker_0" / "data_chunk_0.parquet", rows_of(6)[:4])
    table(tmp_path / "cache" / "worker_1" / "data_chunk_0.parquet", rows_of(6)[4:])
    return tmp_path / "cache"


def test_the_loader_delivers_videos_by_frames_height_and_width(source: Path, tmp_path: Path) -> None:
    ran = run_import("auto", source, tmp_path / "s.store", None, *WAN).done()
    assert (ran.json["kind"], ran.json["imported"], ran.json["text"]) == ("fastvideo", 6, "none")
    assert ran.json["buckets"] == {"train/17x48x64": 2, "train/81x48x64": 2, "train/81x64x48": 2}
    found = delivered(tmp_path / "s.store")
    assert len(found) == 6
    for n in range(6):
        own = found[f"clip-{n}"]
        frames, height, width = SHAPES[n % 3]
        assert own.bucket == f"train/{1 + 4 * (frames - 1)}x{8 * height}x{8 * width}"
        np.testing.assert_array_equal(own.latent.numpy(), latent_of(n).astype("f2"))
    bucket = Store.open(tmp_path / "s.store").bucket("train/81x48x64")
    assert bucket.axes == {"frames": 81, "height_px": 48, "width_px": 64}
    assert call("store", "verify", tmp_path / "s.store").code == 0
    assert "a cat jumps 3" in call("store", "ls", tmp_path / "s.store", "--json").out
    again = run_import("fastvideo", source, tmp_path / "s.store", None, *WAN)
    assert (again.json["imported"], again.json["unchanged"]) == (0, 6)


def test_the_first_frame_is_stored_as_a_control_and_what_else_there_is_is_counted(tmp_path: Path) -> None:
    rows = []
    for n in range(4):
        tensors = {"vae_latent": latent_of(0), "clip_feature": np.ones((257, 1280), dtype="f2")}
        if n != 2:
            tensors["first_frame_latent"] = (latent_of(10 + n, of=SHAPES[0]) - MEAN) / STD
        rows.append(row(f"clip-{n}", "a cat", tensors))
    table(tmp_path / "cache" / "0.parquet", rows)
    ran = run_import("fastvideo", tmp_path / "cache", tmp_path / "s.store", None, *WAN).done()
    assert ran.json["columns"] == ["control/first_frame"]
    assert ran.json["left_out"] == {"a CLIP feature": 4}
    found = delivered(tmp_path / "s.store", "control/first_frame")
    assert "control/first_frame" not in found["clip-2"].columns
    for n in (0, 1, 3):
        first = found[f"clip-{n}"].columns["control/first_frame"].float().numpy()
        np.testing.assert_allclose(first, latent_of(10 + n, of=SHAPES[0]), rtol=2**-10, atol=2**-10)


def test_rows_that_are_damaged_or_mixed_are_rejected_by_name(tmp_path: Path) -> None:
    rows = rows_of(7)
    rows[1]["vae_latent_bytes"] = rows[1]["vae_latent_bytes"][:-4]
    rows[2]["vae_latent_dtype"] = "object"
    rows[3] |= row("clip-3", "", {"vae_latent": np.zeros((4, 5, 6, 8), dtype="f4")})
    rows[4] |= row("clip-4", "", {"vae_latent": np.full((16, 5, 6, 8), np.nan, dtype="f4")})
    rows[5]["vae_latent_bytes"], rows[5]["vae_latent_shape"] = b"", []
    rows[6]["id"] = "clip-0"  # as two parts of one video may be called
    path = table(tmp_path / "cache" / "0.parquet", rows)
    (tmp_path / "cache" / "cut.parquet").write_bytes(path.read_bytes()[:-100])
    ran = run_import("fastvideo", tmp_path / "cache", tmp_path / "s.store", None, *WAN, "--trust-scale").done()
    assert (ran.json["found"], ran.json["imported"], ran.json["rejected"]) == (8, 2, 6)
    details = {reject["id"]: reject["detail"] for reject in ran.json["rejects"]}
    assert "has 64508 bytes, expected float32 of the shape" in details["clip-1"]
    assert "of the dtype 'object'" in details["clip-2"]
    assert "it has 4 channels" in details["clip-3"]
    assert "NaN" in details["clip-4"]
    assert "empty" in details["clip-5"]
    assert "cut.parquet is damaged" in details["cut.parquet"]
    assert {*delivered(tmp_path / "s.store")} == {"clip-0", "clip-0 (0.parquet/3-0)"}


def test_videos_that_were_normalised_are_refused_with_both_numbers(tmp_path: Path) -> None:
    rows = [row(f"clip-{n}", "", {"vae_latent": (latent_of(n) - MEAN) / STD / 2}) for n in range(4)]
    table(tmp_path / "cache" / "0.parquet", rows)
    run_import("fastvideo", tmp_path / "cache", tmp_path / "s.store", None, *WAN).fails("times the VAE's")
    assert not (tmp_path / "s.store").exists()


def test_a_video_among_images_and_a_vae_of_images_are_told(tmp_path: Path) -> None:
    rows = [row(f"{n}", "", {"vae_latent": latent_of(n, of=(1, 6, 8))}, media_type="image") for n in range(3)]
    table(tmp_path / "cache" / "0.parquet", rows)
    images = run_import("fastvideo", tmp_path / "cache", tmp_path / "s.store", None, *WAN)
    assert images.json["buckets"] == {"train/48x64": 3}
    table(tmp_path / "cache" / "1.parquet", rows_of(1))
    mixed = run_import("fastvideo", tmp_path / "cache", tmp_path / "s.store", None, *WAN)
    assert (mixed.json["unchanged"], mixed.json["rejected"]) == (3, 1)
    assert "import videos into a store of their own" in mixed.json["rejects"][0]["detail"]
    refused = run_import("fastvideo", tmp_path / "cache", tmp_path / "o.store", None, "--vae", "flux", "--trust-scale")
    assert "of a video" in refused.json["rejects"][0]["detail"]


def test_musubis_videos_are_imported_as_well(tmp_path: Path) -> None:
    fed = (latent_of(0) - MEAN) / STD
    musubi_video(tmp_path / "cache", "clip", fed, "wan", caption="a cat jumps")
    run_import("musubi", tmp_path / "cache", tmp_path / "s.store", None, *WAN).done()
    (own,) = delivered(tmp_path / "s.store").values()
    assert own.bucket == "train/81x48x64"
    np.testing.assert_allclose(own.latent.float().numpy(), latent_of(0), rtol=2**-10, atol=2**-10)
    assert own.latent.dtype == torch.float16
    assert "a cat jumps" in call("store", "ls", tmp_path / "s.store", "--json").out


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
