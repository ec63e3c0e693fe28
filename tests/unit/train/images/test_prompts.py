"""Prompts drawn along a run: the same noise each time, no text encoder, and as the family's pipeline draws."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import CorruptError, UsageError
from bucketline.families.dit import Dit
from bucketline.families.flux import Flux
from bucketline.families.sd3 import Sd3
from bucketline.families.stable_diffusion import StableDiffusion
from bucketline.store import Store
from bucketline.train.images import drawing, image_files
from bucketline.train.images.pipeline import draw_latents
from bucketline.train.images.prompts import encode_given, load_prompts, prompt_batches
from bucketline.train.load import facts_of
from bucketline.train.run import train
from tests.commands import call
from tests.kit import flip_bit
from tests.unit.train.images.test_no_room import no_room
from tests.unit.train.tiny_run import ALONE, PROMPTS, UNET, built, config, facts, losses, write_prompts

if TYPE_CHECKING:
    from bucketline.store.prompt_file import Prompt
    from bucketline.train.config import TrainConfig
    from bucketline.train.images.image_files import DrawnSample
    from bucketline.train.images.prompts import StoredPrompt
    from tests.unit.train.packed_families import Packed

CPU = torch.device("cpu")


def prompted(folder: Path, *prompts: Prompt, **changes: Any) -> TrainConfig:
    """Return the configuration of a run that draws prompts."""
    file = write_prompts(folder / "tiny.store", *(prompts or PROMPTS))
    return config(folder, **{"num_images": 1, "image_prompts": (file,), **changes})


def loaded(asked: TrainConfig) -> tuple[StoredPrompt, ...]:
    store = Store.open(asked.store[0])
    return load_prompts(encode_given(asked, store), store, StableDiffusion(UNET, facts_of(store, store.buckets())))


def test_grids_of_a_run_have_the_same_noise_and_leave_training_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, list[DrawnSample]] = {}
    write = image_files.write_images

    def noting(samples: list[DrawnSample], sheet: Path, folder: Path) -> None:
        grids[sheet.name] = samples
        write(samples, sheet, folder)

    monkeypatch.setattr(drawing, "write_images", noting)
    still = prompted(folder, max_steps=2, learning_rate=0.0, images_every=1)
    train(still, ALONE)
    name = still.image_prompts[0]
    assert list(grids) == ["step-00000001.png", "images.png"]
    first, last = grids.values()
    assert [(one.entry["id"], one.entry["caption"], one.generated.shape) for one in first] == [
        (f"{name}/1", "a red barn", (128 // 4, 128 // 4, 3)),
        (f"{name}/2", "snow", (128 // 4, 64 // 4, 3)),
        (f"{name}/3", "a red barn", (128 // 4, 128 // 4, 3)),
    ]
    assert (first[0].generated != first[2].generated).any()
    assert all((before.generated == now.generated).all() for before, now in zip(first, last, strict=True))
    written = json.loads((still.output_dir / "images" / "step-00000001.json").read_bytes())
    assert written[1] == {
        "id": f"{name}/2",
        "caption": "snow",
        "negative_prompt": "rain",
        "seed": 3,
        "height_px": 128,
        "width_px": 64,
        "guidance": 4.0,
    }
    plain = dataclasses.replace(still, output_dir=folder / "plain", num_images=0, image_prompts=())
    train(plain, ALONE)
    assert losses(plain.output_dir) == losses(still.output_dir)


def test_images_follow_seed_size_guidance_and_negative_prompt_of_each(folder: Path) -> None:
    asked = prompted(folder, image_guidance=2.0)
    run = built(asked)
    run.close()
    vae = drawing.drawing_vae(asked, Store.open(asked.store[0]))
    assert vae is not None
    first, second = prompt_batches(loaded(asked), 2, 2.0, CPU, run.training.family)
    assert [[str(one["id"])[-1:] for one in own.entries] for own in (first, second)] == [["1", "3"], ["2"]]
    assert (first.guidance, second.guidance, second.noise.shape) == (2.0, 4.0, (1, 2, 16, 8))
    assert first.negative is not None
    assert second.negative is not None
    assert torch.equal(first.batch.tokens[0], first.batch.tokens[1])
    assert not torch.equal(first.noise[0], first.noise[1])
    assert second.batch.target_size.tolist() == second.batch.original_size.tolist() == [[128, 64]]
    assert [one.batch.token_mask.sum().item() for one in (first, second)] == [8, 2]

    def draw(one: Any, **changes: Any) -> torch.Tensor:
        return draw_latents(run.training, vae, dataclasses.replace(one, **changes))

    plain = draw(second, negative=None)
    assert torch.equal(draw(second), draw(second))
    torch.testing.assert_close(draw(second, guidance=1.0), plain)
    assert not torch.allclose(draw(second), plain, atol=1e-4)
    assert not torch.allclose(draw(second), draw(second, guidance=2.0), atol=1e-4)
    told = Flux({"guidance_embeds": True}, facts())
    assert all(one.negative is None for one in prompt_batches(loaded(asked), 2, 2.0, CPU, told))


def test_the_prompts_of_all_files_are_drawn_each_once(folder: Path) -> None:
    asked = prompted(folder)
    other = write_prompts(
        folder / "tiny.store", PROMPTS[2], dataclasses.replace(PROMPTS[0], prompt="two boats"), name="other.safetensors"
    )
    both = dataclasses.replace(asked, image_prompts=(*asked.image_prompts, other))
    assert [one.prompt.prompt for one in loaded(both)] == ["a red barn", "snow", "a red barn", "two boats"]
    assert loaded(dataclasses.replace(both, image_prompts=())) == ()
    flip_bit(Path(other), 8 * 700)
    changed = dataclasses.replace(both, output_dir=folder / "again")
    with pytest.raises(CorruptError, match=r"other\.safetensors"):
        loaded(changed)


def test_a_size_that_the_model_cannot_draw_is_refused_before_the_first_step(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"prompts\.safetensors, prompt 1: its size is 128x100 px, expected multiples of 8 px"):
        train(prompted(folder, dataclasses.replace(PROMPTS[0], width_px=100)), ALONE)
    asked = prompted(folder, dataclasses.replace(PROMPTS[0], width_px=136), output_dir=folder / "other")
    store = Store.open(asked.store[0])
    sd3 = {"in_channels": 2, "joint_attention_dim": 5, "pooled_projection_dim": 4, "patch_size": 2, "pos_embed_max_size": 64}
    family, given = Sd3(sd3, facts(text={"tokens": 5, "pooled": 4}, shows_padding=True)), encode_given(asked, store)
    with pytest.raises(UsageError, match="draw its size, 128x136 px, height first: patch_size is 2, expected a divisor of 16"):
        load_prompts(given, store, family)
    with pytest.raises(UsageError, match=r"draw its size, 128x136 px, height first: .*takes only square ones"):
        load_prompts(given, store, Dit({"in_channels": 2}, facts(text={"class_labels": 1})))


def test_a_run_without_room_for_its_prompts_is_done_without_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draw_latents", no_room)
    summary = train(prompted(folder, images_every=1, max_steps=2), ALONE)
    assert [path.name for path in summary.images] == ["loss.png"]


OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in ("pixart_sigma", "sd3")]


@pytest.mark.parametrize("packed", ["sdxl", "flux", *OTHERS], indirect=True)
def test_a_prompt_is_drawn_as_the_familys_pipeline_draws_it(packed: Packed, tmp_path: Path) -> None:
    """By diffusers' own pipeline, from the texts, with the same noise and scheduler."""
    import diffusers

    line = {"prompt": "a red cat", "negative_prompt": "the house", "seed": 5, "height": 16, "width": 24, "guidance": 3.0}
    (tmp_path / "p.jsonl").write_text(json.dumps(line), encoding="utf-8")
    call("ingest", "prompts", tmp_path / "p.jsonl", packed.store, "--model", packed.model).done()
    told_run: dict[str, Any] = {"num_images": 1, "image_prompts": (str(tmp_path / "p.safetensors"),)}
    bare = shutil.copytree(packed.model, tmp_path / "model", ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*"))
    asked = packed.config(tmp_path / "run", model=bare, image_steps=3, **told_run)
    run = built(asked)
    run.close()
    vae = drawing.drawing_vae(asked, run.loader.shares[0].store)
    assert vae is not None
    (one,) = prompt_batches(run._prompts, 4, 7.0, CPU, run.training.family)
    found = draw_latents(run.training, vae, one)

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(packed.model)
    pipeline.set_progress_bar_config(disable=True)
    more: dict[str, Any] = {"negative_prompt": "the house"}
    noise = one.noise
    if packed.family == "flux":
        noise, more = pipeline._pack_latents(noise, 1, *noise.shape[1:]), {}
    elif packed.family != "sd3":
        changed = {"clip_sample": False, "set_alpha_to_one": True, "timestep_spacing": "trailing"}
        pipeline.scheduler = diffusers.DDIMScheduler.from_config(pipeline.scheduler.config, **changed)
    if packed.family.startswith("pixart"):
        more |= {"clean_caption": False, "use_resolution_binning": False}

    def drawn(prompt: str) -> torch.Tensor:
        told = {"prompt": prompt, "height": 16, "width": 24, "guidance_scale": 3.0, "num_inference_steps": 3, "latents": noise}
        latents: torch.Tensor = pipeline(**told, **more, output_type="latent").images
        return latents.reshape_as(found) if packed.family != "flux" else pipeline._unpack_latents(latents, 16, 24, 2)

    expected, other = drawn("a red cat"), drawn("a blue dog")
    error = (found - expected).abs().max()
    assert error < 0.02 * (other - expected).abs().max(), (error, (other - expected).abs().max())


@pytest.mark.parametrize("packed", ["dit"], indirect=True)
def test_a_class_is_drawn_against_the_null_class(packed: Packed, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("dog\n2\n", encoding="utf-8")
    call("ingest", "prompts", tmp_path / "p.txt", packed.store, "--model", packed.model).done()
    drawn: dict[str, Any] = {"num_images": 1, "image_prompts": (str(tmp_path / "p.safetensors"),)}
    asked = packed.config(tmp_path / "run", max_steps=1, **drawn)
    train(asked, ALONE)
    written = json.loads((asked.output_dir / "images.json").read_bytes())
    assert [(one["caption"], one["height_px"], one["width_px"]) for one in written] == [("dog", 16, 16), ("2", 16, 16)]
    opened = Store.open(packed.store)
    model = json.loads((packed.model / "transformer" / "config.json").read_bytes())
    family = Dit(model, facts_of(opened, opened.buckets()))
    (one,) = prompt_batches(load_prompts(encode_given(asked, opened), opened, family), 4, 4.0, CPU, family)
    assert one.batch.class_labels is not None
    assert one.negative is not None
    assert one.negative.class_labels is not None
    assert (one.batch.class_labels.tolist(), one.negative.class_labels.tolist()) == ([1, 2], [3, 3])
    (tmp_path / "p.txt").write_text("dog\na dog\n", encoding="utf-8")
    refused = call("ingest", "prompts", tmp_path / "p.txt", packed.store, "--model", packed.model)
    assert refused.code == 1
    assert "line 2: 'a dog': caption that the model does not take: 'a dog' is not a class of the model" in refused.err
