"""Checkpoints and exports of each family as diffusers opens them: the trainer's model to the bit."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from peft import PeftModel

from bucketline.errors import UsageError
from bucketline.families.registry import family_of_pipeline
from bucketline.loader.batch import as_fields
from bucketline.train.config import TrainConfig
from bucketline.train.export import export_model
from bucketline.train.parallel import StopRequest
from tests.family_models import FORMS, open_pipeline
from tests.unit.train.tiny_run import ALONE, built

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.loader import Batch
    from bucketline.train.run import Run, TrainSummary
    from tests.unit.families.packed import Packed
    from tests.unit.train.packed_families import Packed as PackedFamily


@contextlib.contextmanager
def trainer_of(packed: Packed | PackedFamily, output: Path, **changes: Any) -> Iterator[Run]:
    """Yield a trainer whose batches have both captions."""
    asked: dict[str, Any] = {"store": (packed.store,), "model": packed.model, "output_dir": output, "batch": "2"}
    asked |= {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-2, "num_images": 0, "ema": "off", **changes}
    with contextlib.closing(built(TrainConfig(**asked))) as trainer:
        yield trainer


def run(trainer: Run) -> TrainSummary:
    """Train to the end."""
    trainer.config.output_dir.mkdir(exist_ok=True)
    with contextlib.closing(StopRequest(ALONE)) as stop:
        return trainer.train(stop)


@torch.no_grad()
def predicted(trainer: Run, batch: Batch, model: Any) -> torch.Tensor:
    """Return a model's prediction for each row by itself, as images are mostly drawn."""
    found = []
    for row, length in enumerate(batch.token_mask.sum(dim=1).tolist()):
        one = replace(batch, **as_fields({name: tensor[row : row + 1] for name, tensor in batch.by_name().items()}))
        one = replace(one, tokens=one.tokens[:, :length], token_mask=one.token_mask[:, :length])
        noised = trainer.training.prep.for_training(one)
        found.append(trainer.training.family.predict(model.eval(), noised.noisy, noised.timesteps, noised.conditions(one)))
    return torch.cat(found)


def test_the_model_that_diffusers_opens_has_the_trainers_weights(packed: Packed, tmp_path: Path) -> None:
    with trainer_of(packed, tmp_path / "run") as trainer:
        before = {name: tensor.clone() for name, tensor in trainer.training.model.state_dict().items()}
        summary = run(trainer)
        batch, model = next(trainer.loader.forever()), cast("Any", trainer.training.bare_model)
        own = model.state_dict()
        export_model(tmp_path / "run", tmp_path / "export", last=True, dtype="F32")
        for folder in (summary.checkpoint, tmp_path / "export"):
            opened, told = type(model).from_pretrained(folder / packed.family.folder, output_loading_info=True)
            assert not any(told.values()), told
            found = opened.state_dict()
            assert found.keys() == own.keys()
            assert [name for name, tensor in own.items() if not torch.equal(tensor, found[name])] == []
            assert {**opened.config, "_name_or_path": ""} == {**model.config, "_name_or_path": ""}
            assert torch.equal(predicted(trainer, batch, opened), predicted(trainer, batch, model))
        assert any(not torch.equal(tensor, before[name]) for name, tensor in own.items())


GUIDED_BY_ANOTHER = [
    name for name, form in FORMS.items() if not getattr(family_of_pipeline(form.pipeline), "is_guidable", True)
]


@pytest.mark.parametrize("form", GUIDED_BY_ANOTHER, indirect=True)
def test_guidance_of_images_by_a_model_that_is_not_trained_is_refused(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"image_guidance is 3\.0, and \w+Pipeline guides by a second model"):
        trainer_of(packed, tmp_path, image_guidance=3.0).__enter__()
    with trainer_of(packed, tmp_path, image_guidance=1.0) as trainer:
        assert trainer.training.family.image_guidance == 1.0


@pytest.mark.parametrize("form", ["sd", *GUIDED_BY_ANOTHER], indirect=True)
def test_an_empty_caption_that_is_no_negative_prompt_is_said(
    packed: Packed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer_of(packed, tmp_path / "run", caption_dropout=0.1):
        pass
    said = "--caption-dropout is 0.1, and Ideogram4Pipeline guides by a second model" in caplog.text
    assert said is (packed.form in GUIDED_BY_ANOTHER)


ADAPTERS = [
    pytest.param({"recompute": 1.0, "caption_dropout": 0.5}, id="LoRA"),
    pytest.param({"dora": True, "lora_dropout": 0.5}, id="DoRA", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("more", ADAPTERS)
def test_adapters_in_the_pipeline_predict_what_the_trainers_model_predicts(
    packed: Packed, tmp_path: Path, more: dict[str, Any]
) -> None:
    """By the pipeline's `load_lora_weights`, or by PEFT for the families whose pipeline has none of its model."""
    with trainer_of(packed, tmp_path / "run", lora_rank=2, lora_alpha=6.0, lora_targets="all", **more) as trainer:
        checkpoint = run(trainer).checkpoint
        export_model(tmp_path / "run", tmp_path / "export", last=True, dtype="F32")
        batch = next(trainer.loader.forever())
        wanted = predicted(trainer, batch, trainer.training.bare_model)
        for folder in (checkpoint / "lora", tmp_path / "export"):
            pipeline = open_pipeline(packed.model, packed.form)
            plain = getattr(pipeline, packed.family.folder)
            without = predicted(trainer, batch, plain)
            if packed.family.has_lora_loader:
                pipeline.load_lora_weights(str(folder))
                adapted = getattr(pipeline, packed.family.folder)
            else:
                assert trainer.training.family.lora_pipeline is None
                adapted = PeftModel.from_pretrained(plain, str(folder)).base_model.model
            assert torch.equal(predicted(trainer, batch, adapted), wanted)
            assert not torch.equal(without, wanted)
