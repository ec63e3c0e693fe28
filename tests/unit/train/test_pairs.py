"""Training on edit pairs with masks: against a loop over rows, resumed, drawn; and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from bucketline.errors import ModelError, UsageError
from bucketline.loader.batch import as_fields
from bucketline.train import images
from bucketline.train.compile import example_batches, tokens_of_images
from bucketline.train.config import MaskLoss
from bucketline.train.memory import largest_batch
from bucketline.train.run import Run, train
from bucketline.train.step import train_step
from tests.conftest import once
from tests.kit import untouched
from tests.unit.families.forms import CHANNELS
from tests.unit.train.pair_runs import LENGTH, PX, Pairs, write_pairs
from tests.unit.train.tiny_run import ALONE, train_in_two_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.images import DrawingBatch
    from bucketline.train.step import Training

KLEIN, KONTEXT = "flux2 klein", "flux_kontext"


@pytest.fixture(scope="module", params=[KLEIN, KONTEXT])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    with once(tmp_path_factory, f"pairs of {request.param}") as (folder, is_first):
        if is_first:
            assert write_pairs(folder, request.param) == Pairs(model=folder / "model", store=folder / "pairs.store")
        return Pairs(model=folder / "model", store=folder / "pairs.store")


def rows_of(batch: Batch) -> Iterator[Batch]:
    for row in range(len(batch.weight)):
        yield dataclasses.replace(batch, **as_fields({name: one[row : row + 1] for name, one in batch.by_name().items()}))


def alone(training: Training, row: Batch, divisor: float) -> Tensor:
    """Return what a row adds to the sum of `--mask-loss batch:0.1`, by a call of the model for this row alone."""
    noised = training.prep.for_training(row)
    prediction = training.family.predict(training.bare_model, noised.noisy, noised.timesteps, row)
    assert row.mask is not None
    return ((prediction - noised.target) ** 2 * row.mask.clamp(min=0.1)).mean() / divisor


def test_steps_have_the_loss_and_gradient_of_a_loop_over_rows(pairs: Pairs, tmp_path: Path) -> None:
    asked = pairs.config(tmp_path / "run", mask_loss="batch:0.1", clip_norm=None, accumulation=2)
    tmp_path.joinpath("run").mkdir()
    counts = set()
    run = Run(asked, ALONE)
    try:
        batches, training = run.loader.forever(), run.training
        for step in range(6):
            own = [next(batches), next(batches)]
            counts.add(len(own[0].references))
            area = torch.cat([one.mask for one in own if one.mask is not None]).clamp(min=0.1).mean()
            rows = [row for batch in own for row in rows_of(batch)]
            loss = torch.stack([alone(training, row, float(area) * len(rows)) for row in rows]).sum()
            gradients = torch.autograd.grad(loss, training.trained)
            outcome = train_step(training, iter(own), step)
            assert float(outcome.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
            assert float(outcome.grad_norm) == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)
    finally:
        run.close()
    assert counts == set(range(1 + most_references(run)[1]))


def most_references(run: Run) -> tuple[str, int]:
    """Return the training bucket with most of them, and their number."""
    counts = {one.name: sum(size > 0 for size in [*one.axes.values()][2::2]) for one in run.loader.rows.buckets("train")}
    return max(counts.items(), key=lambda one: one[1])


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_resume_is_equal_to_the_bit(pairs: Pairs, tmp_path: Path, lora_rank: int | None) -> None:
    asked = pairs.config(tmp_path / "whole", mask_loss="sample", lora_rank=lora_rank, caption_dropout=0.3, validate_every=3)
    train_in_two_parts(asked, 3)


def test_a_resume_with_another_loss_under_masks_is_told(pairs: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = pairs.config(tmp_path / "run", mask_loss="sample", max_steps=1)
    train(asked, ALONE)
    train(dataclasses.replace(asked, mask_loss=MaskLoss(name="batch", floor=0.1), max_steps=2, resume=True), ALONE)
    assert "--mask-loss was sample before and is now batch:0.1" in caplog.text


def test_images_are_drawn_from_stored_references_which_the_sheet_shows_above_them(
    pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[DrawingBatch] = []
    draw = images.draw_latents

    def noting(training: Any, vae: Any, one: DrawingBatch) -> Tensor:
        drawn.append(one)
        return draw(training, vae, one)

    monkeypatch.setattr(images, "draw_latents", noting)
    asked = pairs.config(tmp_path / "run", max_steps=1, num_images=3, image_guidance=2.0)
    train(asked, ALONE)
    for one in drawn:
        assert one.batch.references
        if one.negative is not None:
            for reference, other in zip(one.batch.references, one.negative.references, strict=True):
                assert torch.equal(reference, other)
    entries = json.loads((asked.output_dir / "images.json").read_bytes())
    assert len(entries) == 3
    most = max(len(one.batch.references) for one in drawn[-2:])
    with (
        Image.open(asked.output_dir / "images.png") as sheet,
        Image.open(asked.output_dir / "images" / "step-00000001" / "01.png") as image,
    ):
        assert image.size == (8 * PX, 8 * PX)
        assert sheet.height > (most + 2) * 8 * PX


def test_other_references_draw_other_images(pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Tensor, Tensor]] = []
    draw = images.draw_latents

    def noting(training: Any, vae: Any, one: DrawingBatch) -> Tensor:
        columns = {role: own * 3 if role.startswith("reference") else own for role, own in one.batch.columns.items()}
        latents = draw(training, vae, one)
        found.append(
            (latents, draw(training, vae, dataclasses.replace(one, batch=dataclasses.replace(one.batch, columns=columns))))
        )
        return latents

    monkeypatch.setattr(images, "draw_latents", noting)
    train(pairs.config(tmp_path / "run", max_steps=1, num_images=1, image_guidance=1.0), ALONE)
    assert found
    assert all(not torch.equal(one, other) for one, other in found)


def test_examples_have_the_references_and_masks_of_each_bucket_and_the_largest_is_with_them(
    pairs: Pairs, tmp_path: Path
) -> None:
    tmp_path.joinpath("run").mkdir()
    run = Run(pairs.config(tmp_path / "run"), ALONE)
    try:
        every = list(run.loader.rows.buckets())
        for name, batch in example_batches(ALONE, run.loader, every).items():
            sides = [int(side) for side in name.partition("/")[2].split("x")]
            wanted = [(h // PX, w // PX) for h, w in zip(sides[2::2], sides[3::2], strict=True) if h]
            assert [tuple(one.shape) for one in batch.references] == [(2, CHANNELS, *size) for size in wanted]
            assert batch.mask is not None
            assert batch.mask.shape == batch.latents[:, 0].shape
        assert largest_batch(ALONE, run.loader).bucket == most_references(run)[0]
        assert largest_batch(ALONE, run.loader).tokens.shape[1] == LENGTH
    finally:
        run.close()


@pytest.mark.parametrize("num_seen", [3, 9])
def test_an_example_has_tokens_for_all_images_of_its_bucket(num_seen: int) -> None:
    tokens, mask = torch.ones(2, 6, 4), torch.arange(6).expand(2, -1) < 2
    found = tokens_of_images(tokens, mask, num_seen)
    assert found["image_tokens"].sum(1).tolist() == found["token_mask"].sum(1).tolist() == [num_seen] * 2
    assert {one.shape[:2] for one in found.values()} == {(2, max(6, num_seen))}
    assert mask.sum() == 4


def named(pipeline: str) -> Callable[[Pairs], object]:
    def rename(one: Pairs) -> None:
        index = one.model / "model_index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": pipeline}), encoding="utf-8")

    return rename


NINE = {("train", (8, 8), *[(8, 8)] * count): 2 for count in (2, 9)}


@pytest.mark.parametrize(
    ("form", "written", "change", "options", "message"),
    [
        (
            KONTEXT,
            {},
            named("FluxPipeline"),
            {},
            "the number of references in train/.* is 1, expected 0, since a model of FluxPipeline takes no",
        ),
        (KLEIN, {"rows": NINE}, None, {}, "the number of references in .* is 9, expected 0 to 8"),
        (
            KLEIN,
            {"optional": True},
            None,
            {},
            r"pairs.store: its manifest has columns.mask.optional true, expected false: of a row without it, zeros",
        ),
        (
            KLEIN,
            {"masks": False},
            None,
            {"mask_loss": "batch"},
            r"--mask-loss is batch, and \S+pairs.store has no masks: leave it out",
        ),
    ],
)
def test_what_does_not_suit_is_refused_before_anything_is_written(
    tmp_path: Path,
    form: str,
    written: dict[str, Any],
    change: Callable[[Pairs], object] | None,
    options: dict[str, Any],
    message: str,
) -> None:
    made = write_pairs(tmp_path, form, **written)
    if change is not None:
        change(made)
    with untouched(tmp_path), pytest.raises((ModelError, UsageError), match=message):
        train(made.config(tmp_path / "run", **options), ALONE)
