"""A device without room for images: said after the first step, and a run whose model is not sharded is done without them."""

from __future__ import annotations

import dataclasses
import json
import signal
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKL

from bucketline.errors import TrainError
from bucketline.loader import WeightedStore
from bucketline.store import Store
from bucketline.train import images
from bucketline.train.images import draw_images
from bucketline.train.parallel import tensors_of, whole
from bucketline.train.run import train
from bucketline.train.step import Training
from tests.unit.train.forked import fork_ranks
from tests.unit.train.test_parallel import sharded
from tests.unit.train.tiny_run import ALONE, config, losses, make_training

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.parallel import TrainRanks


def no_room(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")


@pytest.mark.parametrize("what", ["_decode", pytest.param("draw_latents", marks=pytest.mark.slow)])
def test_a_run_without_room_for_images_is_done_without_them(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = config(folder, output_dir=folder / "plain", num_images=2, max_steps=4)
    train(plain, ALONE)
    monkeypatch.setattr(images, what, no_room)
    asked = config(folder, num_images=2, max_steps=4)
    summary = train(asked, ALONE)
    assert [path.name for path in summary.images] == ["loss.png"]
    assert json.loads((asked.output_dir / "status.json").read_bytes())["state"] == "done"
    assert capsys.readouterr().err.count("no images: not enough device memory") == 2, "after the first step and at the end"
    assert losses(asked.output_dir) == losses(plain.output_dir)


def test_after_the_first_step_of_a_run_images_are_tried_in_two_steps_of_the_sampler(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    real = images.draw_latents

    def noting(training: Training, *args: object) -> object:
        tried.append(training.config.image_steps)
        return real(training, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(images, "draw_latents", noting)
    asked = config(folder, num_images=1, image_steps=3, max_steps=3)
    summary = train(asked, ALONE)
    assert tried == [2, 3]
    assert [path.name for path in summary.images] == ["loss.png", "images.png"]
    assert [path.name for path in (asked.output_dir / "images").iterdir()] == ["step-00000003"]


def test_images_that_do_not_fit_whole_are_decoded_in_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AutoencoderKL.decode

    def only_tiles(vae: AutoencoderKL, *args: object, **options: object) -> object:
        if not vae.use_tiling:
            no_room()
        return real(vae, *args, **options)

    monkeypatch.setattr(AutoencoderKL, "decode", only_tiles)
    summary = train(config(folder, num_images=2, max_steps=1), ALONE)
    assert [path.name for path in summary.images] == ["loss.png", "images.png"]


def test_a_sharded_model_is_drawn_with_by_all_ranks_and_one_that_lacks_memory_ends_the_others(folder: Path) -> None:
    asked = config(folder, num_images=2, image_guidance=1.0)

    def training_of(ranks: TrainRanks) -> Training:
        training = make_training(folder, loaded=sharded(folder / "model", ranks), is_bf16=True)
        for parameter in training.model.parameters():
            parameter.data.mul_(1.5)
        return dataclasses.replace(training, config=asked)

    def body(ranks: TrainRanks) -> None:
        signal.alarm(100)
        training = training_of(ranks)
        before = {name: whole(tensor).clone() for name, tensor in tensors_of(training.model).items()}
        shares = [WeightedStore(store=Store.open(path)) for path in asked.store]

        def drawn() -> bool:
            sheet = folder / "images.png"
            return draw_images(training, shares, (), sheet, steps_done=2, keeps=ranks.is_main)

        assert drawn() is ranks.is_main
        assert all(torch.equal(whole(tensor), before[name]) for name, tensor in tensors_of(training.model).items())
        if ranks.is_main:
            with pytest.raises(RuntimeError, match="gloo"):
                drawn()
            return
        with (
            mock.patch.object(images, "draw_latents", no_room),
            pytest.raises(TrainError, match="with --num-images 0") as told,
        ):
            drawn()
        assert "there is no checkpoint yet" in str(told.value)

    fork_ranks(folder, body)
