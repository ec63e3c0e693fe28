"""A run as a whole pipeline, of each family: diffusers opens the folder, and draws what the run has drawn."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from bucketline.train.export import export_model
from bucketline.train.images import call_of, guidance_of, prompt_batches
from bucketline.train.noise import FlowSchedule
from tests.commands import call
from tests.family_models import FORMS, open_pipeline
from tests.unit.families.test_outputs import run, trainer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.train.images import DrawingBatch
    from bucketline.train.run import Run
    from tests.unit.families.packed import Packed


class Recorded:
    """A pipeline whose last call's images are kept."""

    def __init__(self, pipeline: Any) -> None:
        vars(self).update(pipeline=pipeline, images=None)

    def __call__(self, **given: Any) -> None:
        vars(self)["images"] = self.pipeline(**given).images

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.pipeline, name, value)


def drawn_by(pipeline: Any, trainer: Run, one: DrawingBatch) -> np.ndarray:
    """Return the images, [B, H, W, 3] uint8, that a pipeline draws of a batch's embeddings and noise."""
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    pipeline.check_inputs = lambda *_args, **_more: None  # of sizes for a VAE that divides by 8
    pipeline.set_progress_bar_config(disable=True)
    if isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
        assert isinstance(trainer.training.prep.schedule, FlowSchedule)
    elif isinstance(trainer.training.prep.schedule, FlowSchedule):  # the sampler of a run's images, as docs/training.md has it
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(trainer.training.prep.schedule.config)
    else:
        options: dict[str, Any] = {"timestep_spacing": "trailing", "set_alpha_to_one": True, "clip_sample": False}
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, **options)
    given, batches = call_of(trainer.training, pipeline.vae, one)
    recorded = Recorded(pipeline)
    trainer.training.family.draw(recorded, {**given, "output_type": "np"}, *batches)
    return np.asarray(recorded.images * 255).round().astype(np.uint8)[..., :3]  # without the opacity


def most_apart(images: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
    """Return the largest difference between a value of an image and of its other one."""
    return max(int(np.abs(one.astype(int) - other.astype(int)).max()) for one, other in zip(images, others, strict=True))


MODULAR = [name for name, form in FORMS.items() if "Modular" in form.pipeline]


@pytest.mark.parametrize("form", MODULAR, indirect=True)
def test_the_card_of_a_modular_pipeline_says_how_it_is_opened(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_of(packed, tmp_path / "run") as trainer:
        run(trainer)
    export_model(tmp_path / "run", tmp_path / "pipeline", last=True, dtype="BF16", pipeline=True)
    _, _, example = (tmp_path / "pipeline" / "README.md").read_text(encoding="utf-8").partition("```python\n")
    monkeypatch.chdir(tmp_path / "pipeline")
    found: dict[str, Any] = {}
    exec(example.partition("```")[0], found)
    assert type(found["pipeline"]).__name__ == packed.family.pipelines[0]
    assert found["pipeline"].transformer.dtype is torch.bfloat16


def test_diffusers_opens_a_run_as_a_pipeline_and_draws_its_images(packed: Packed, tmp_path: Path) -> None:
    copied = replace(packed, store=shutil.copytree(packed.store, tmp_path / "store"))
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog of the house\n", encoding="utf-8")
    call("ingest", "prompts", tmp_path / "prompts.txt", copied.store, "--model", packed.model).done()
    prompts_file = str(tmp_path / "prompts.safetensors")
    steps = {"num_images": 2, "image_prompts": (prompts_file,), "image_steps": 2, "learning_rate": 1e-1}
    with trainer_of(copied, tmp_path / "run", **steps) as trainer:
        run(trainer)
        export_model(tmp_path / "run", tmp_path / "pipeline", last=True, dtype="F32", pipeline=True)
        pipeline = open_pipeline(tmp_path / "pipeline", packed.form)
        assert type(pipeline) is type(open_pipeline(packed.model, packed.form))
        family, prompts = trainer.training.family, trainer._prompts
        guidance, device = guidance_of(trainer.training), trainer.loader.device
        batches = prompt_batches(prompts, 1, guidance, device, family)  # as they are mostly drawn
        before = open_pipeline(packed.model, packed.form)
        found, untrained = [], []
        for one in batches:
            found += list(drawn_by(pipeline, trainer, one))
            untrained += list(drawn_by(before, trainer, one))
    own = [np.asarray(Image.open(tmp_path / "run" / "images" / "step-00000002" / f"{n:02}.png")) for n in (1, 2)]
    assert [image.shape for image in found] == [image.shape for image in own]
    assert most_apart(found, own) <= 1  # where halves are rounded
    assert most_apart(untrained, own) > 1
