"""A run as a whole pipeline, of each family: diffusers opens the folder, and draws what the run has drawn."""

from __future__ import annotations

import contextlib
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from peft import PeftModel
from PIL import Image

from bucketline.errors import UsageError
from bucketline.families.family import StoreFacts
from bucketline.families.flux2 import Flux2
from bucketline.families.ideogram4 import Ideogram4
from bucketline.families.packing import shifted
from bucketline.families.registry import family_of_pipeline
from bucketline.loader.batch import as_fields
from bucketline.train.config import TrainConfig
from bucketline.train.export import export_model
from bucketline.train.images import call_of, guidance_of, prompt_batches
from bucketline.train.noise import FlowSchedule
from bucketline.train.parallel import StopRequest
from tests.commands import call
from tests.family_models import FORMS, open_pipeline
from tests.kit import edit_json
from tests.unit.families.forms import Packed
from tests.unit.families.oracle import one_step
from tests.unit.train.tiny_run import ALONE, built

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bucketline.loader import Batch
    from bucketline.train.images import DrawingBatch
    from bucketline.train.run import Run, TrainSummary
    from tests.unit.train.packed_families import Packed as PackedFamily


# Checkpoints and exports of each family as diffusers opens them: the trainer's model to the bit.


@contextlib.contextmanager
def trainer_of(packed: Packed | PackedFamily, output: Path, **changes: Any) -> Iterator[Run]:
    asked: dict[str, Any] = {"store": (packed.store,), "model": packed.model, "output_dir": output, "batch_size": "2"}
    asked |= {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-2, "num_images": 0, "ema": "off", **changes}
    with contextlib.closing(built(TrainConfig(**asked))) as trainer:
        yield trainer


def run(trainer: Run) -> TrainSummary:
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


def test_adapters_in_the_pipeline_predict_what_the_trainers_model_predicts(packed: Packed, tmp_path: Path) -> None:
    """By the pipeline's `load_lora_weights`, or by PEFT for the families whose pipeline has none of its model."""
    more: dict[str, Any] = {"recompute": 1.0, "caption_dropout": 0.5}
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


# test whole pipelines


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
    elif isinstance(trainer.training.prep.schedule, FlowSchedule):  # the sampler of a run's images, as docs/export.md has it
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(trainer.training.prep.schedule.config)
    else:
        options: dict[str, Any] = {"timestep_spacing": "trailing", "set_alpha_to_one": True, "clip_sample": False}
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, **options)
    given, batches = call_of(trainer.training, pipeline.vae, one)
    recorded = Recorded(pipeline)
    trainer.training.family.draw(recorded, {**given, "output_type": "np"}, *batches)
    return np.asarray(recorded.images * 255).round().astype(np.uint8)[..., :3]  # without the opacity


def most_apart(images: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
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


# A flow's noise by size in training against that at which its pipeline draws.


STEPS = 50
OWN_SPACING = {
    **dict.fromkeys(("sd3", "sd3 without T5", "prx", "prx dc", "auraflow"), 0.05),  # the last step is shifted twice
    "qwenimage": 0.02,  # the last step is moved to 0.02
    "hidream_image": 0.003,  # solvers with steps from a table of 1000
    "sana": 0.001,
}
"""The distance of a step from one of equal shares, for pipelines whose scheduler spaces steps in its own way."""


def furthest(packed: Packed, output: Path) -> float:
    """Return the largest difference between the noise of the pipeline's steps and that of training at as large shares."""
    with trainer_of(packed, output) as trainer:
        schedule, pipeline = trainer.training.prep.schedule, open_pipeline(packed.model, packed.form)
        _, *size = trainer.training.family.store.latent_sizes[0]
        height, width = FORMS[packed.form].size
        asked = {**FORMS[packed.form].call, "num_inference_steps": STEPS}
        one_step(pipeline, ["a red cat"], height=height, width=width, **asked)
        drawn = pipeline.scheduler.sigmas[:STEPS].flip(0).float()
        assert isinstance(schedule, FlowSchedule)
        indices = torch.arange(1, STEPS + 1) * (schedule.num_timesteps // STEPS) - 1
        return float((schedule.at(indices, *size).noise.flatten() - drawn).abs().max())


FLOWS = [name for name in FORMS if name not in ("sd", "sdxl", "pixart_alpha", "pixart_sigma")]


@pytest.mark.parametrize("form", FLOWS, indirect=True)
def test_the_noise_of_training_is_that_of_the_pipelines_own_steps(packed: Packed, tmp_path: Path) -> None:
    assert furthest(packed, tmp_path / "run") <= OWN_SPACING.get(packed.form, 1e-5)


@pytest.mark.parametrize("form", ["krea2"], indirect=True)
def test_a_distilled_krea_2_has_the_one_shift_of_its_pipeline(packed: Packed, tmp_path: Path) -> None:
    distilled = replace(packed, model=shutil.copytree(packed.model, tmp_path / "model"))
    edit_json(distilled.model / "model_index.json", is_distilled=True)
    assert furthest(distilled, tmp_path / "run") <= 1e-5


@pytest.mark.parametrize("form", ["flux2", "krea2", "ideogram4"], indirect=True)
def test_a_scheduler_of_one_shift_is_read_as_the_pipeline_reads_it(packed: Packed, tmp_path: Path) -> None:
    """Such as that of a pipeline that was exported from a run with a shift."""
    exported = replace(packed, model=shutil.copytree(packed.model, tmp_path / "model"))
    edit_json(exported.model / "model_index.json", is_distilled=True)
    edit_json(exported.model / "scheduler" / "scheduler_config.json", shift=2.0, use_dynamic_shifting=False)
    assert furthest(exported, tmp_path / "run") <= 1e-5


@pytest.mark.parametrize("side", [16, 64, 128, 132, 256])
def test_flux_2_is_shifted_by_its_pipelines_formula_below_and_above_its_bend(side: int) -> None:
    levels = Flux2({}, StoreFacts(latent_channels=4, text={})).noise_levels({})
    shares = torch.arange(1, 1001) / 1000
    wanted = shifted(shares, math.exp(compute_empirical_mu(side * side // 4, STEPS)))
    torch.testing.assert_close(levels(shares, side, side), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("px_per_latent", [8, 16])
def test_ideograms_noise_is_a_normal_distributions_of_a_mean_by_pixels(px_per_latent: int) -> None:
    """As its training script draws it: sigmoid of half the log of pixels ÷ 512², and 1.5 times a normal number."""
    facts = StoreFacts(latent_channels=4, text={}, px_per_latent=px_per_latent)
    levels = Ideogram4({}, facts).noise_levels({})
    drawn = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = torch.special.ndtr(drawn)  # as likely as each other
    mean = 0.5 * torch.tensor((128 * px_per_latent) * (64 * px_per_latent) / 512**2).log()
    torch.testing.assert_close(levels(shares, 128, 64), (mean + 1.5 * drawn).sigmoid(), rtol=0, atol=6e-4)
    ends = levels(torch.tensor([1e-9, 1.0]), 128, 64)
    assert ends.tolist() == pytest.approx([5.5e-4, 1 - 1.23e-4], rel=1e-2)


@pytest.mark.parametrize("form", ["flux", "flux2", "ideogram4"], indirect=True)
def test_a_shift_that_is_given_takes_the_place_of_a_familys_noise_levels(packed: Packed, tmp_path: Path) -> None:
    with trainer_of(packed, tmp_path / "run", shift=2.0) as trainer:
        schedule = trainer.training.prep.schedule
        found = schedule.at(torch.tensor([249, 999]), 16, 16)
        torch.testing.assert_close(found.noise.flatten(), torch.tensor([0.4, 1.0]))
