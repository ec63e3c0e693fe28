"""A device without room for images: the run continues, and ends as done."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import AutoencoderKL

from bucketline.train.evaluation import drawing
from bucketline.train.trainer import train
from tests.unit.train.tiny_run import ALONE, config, losses

if TYPE_CHECKING:
    from pathlib import Path


def no_room(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")


@pytest.mark.parametrize("what", ["_decode", pytest.param("draw_latents", marks=pytest.mark.slow)])
def test_a_run_without_room_for_images_is_done_without_them(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = config(folder, output_dir=folder / "plain", num_images=2, images_every=2, max_steps=4)
    train(plain, ALONE)
    monkeypatch.setattr(drawing, what, no_room)
    asked = config(folder, num_images=2, images_every=2, max_steps=4)
    summary = train(asked, ALONE)
    assert [path.name for path in summary.images] == ["loss.png"]
    assert json.loads((asked.output_dir / "status.json").read_bytes())["state"] == "done"
    assert capsys.readouterr().err.count("no images: not enough device memory for") == 2
    assert losses(asked.output_dir) == losses(plain.output_dir)


def test_images_that_do_not_fit_whole_are_decoded_in_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AutoencoderKL.decode

    def only_tiles(vae: AutoencoderKL, *args: object, **options: object) -> object:
        if not vae.use_tiling:
            no_room()
        return real(vae, *args, **options)

    monkeypatch.setattr(AutoencoderKL, "decode", only_tiles)
    summary = train(config(folder, num_images=2, max_steps=1), ALONE)
    assert [path.name for path in summary.images] == ["loss.png", "images.png"]
