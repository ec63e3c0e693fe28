"""Images that a run draws: of prompts and of captions, as the family's pipeline draws them, and the files that they leave."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from bucketline.errors import CorruptError, ModelError, UsageError
from bucketline.families.dit import Dit
from bucketline.families.flux import Flux
from bucketline.families.registry import FAMILIES
from bucketline.families.sd3 import Sd3
from bucketline.families.stable_diffusion import StableDiffusion
from bucketline.store import Store
from bucketline.store.prompt_file import decode_prompts
from bucketline.train import images
from bucketline.train.images import (
    CELL_PX,
    GAP_PX,
    LINE_PX,
    DrawingBatch,
    DrawnSample,
    contact_sheet,
    draw_latents,
    encode_given,
    load_prompts,
    prompt_batches,
    write_images,
)
from bucketline.train.model import facts_of
from bucketline.train.noise import sample_noise
from bucketline.train.report import draw_loss_curve
from bucketline.train.run import train
from tests.commands import call
from tests.family_models import tiny_vae
from tests.kit import flip_bit, make_sample
from tests.unit.train.tiny_run import (
    ALONE,
    PROMPTS,
    UNET,
    add_to_store,
    built,
    config,
    facts,
    losses,
    make_batch,
    make_training,
    write_prompts,
)

if TYPE_CHECKING:
    from bucketline.families.family import Family
    from bucketline.store.prompt_file import Prompt
    from bucketline.train.config import TrainConfig
    from bucketline.train.images import StoredPrompt
    from tests.unit.train.packed_families import Packed

CPU = torch.device("cpu")


def prompted(folder: Path, *prompts: Prompt, **changes: Any) -> TrainConfig:
    file = write_prompts(folder / "tiny.store", *(prompts or PROMPTS))
    return config(folder, **{"num_images": 1, "image_prompts": (file,), **changes})


def loaded(asked: TrainConfig) -> tuple[StoredPrompt, ...]:
    store = Store.open(asked.store[0])
    return load_prompts(encode_given(asked, store), store, StableDiffusion(UNET, facts_of(store, store.buckets())))


def test_grids_of_a_run_have_the_same_noise_and_leave_training_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, list[DrawnSample]] = {}
    write = images.write_images

    def noting(samples: list[DrawnSample], sheet: Path, folder: Path) -> None:
        grids[sheet.name] = samples
        write(samples, sheet, folder)

    monkeypatch.setattr(images, "write_images", noting)
    still = prompted(folder, max_steps=2, learning_rate=0.0, images_every=1)
    train(still, ALONE)
    name = still.image_prompts[0]
    assert list(grids) == ["step-00000001.png", "images.png"]
    first, last = grids.values()
    assert [(entry["id"], entry["caption"], generated.shape) for entry, (generated,) in first] == [
        (f"{name}/1", "a red barn", (128 // 4, 128 // 4, 3)),
        (f"{name}/2", "snow", (128 // 4, 64 // 4, 3)),
        (f"{name}/3", "a red barn", (128 // 4, 128 // 4, 3)),
    ]
    assert (first[0][1][0] != first[2][1][0]).any()
    assert all((before[1][0] == now[1][0]).all() for before, now in zip(first, last, strict=True))
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
    vae = images.drawing_vae(asked, Store.open(asked.store[0]))
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
    asked = prompted(folder, dataclasses.replace(PROMPTS[0], width_px=136), output_dir=folder / "other")
    store = Store.open(asked.store[0])
    sd3 = {"in_channels": 2, "joint_attention_dim": 5, "pooled_projection_dim": 4, "patch_size": 2, "pos_embed_max_size": 64}
    family, given = Sd3(sd3, facts(text={"tokens": 5, "pooled": 4}, shows_padding=True)), encode_given(asked, store)
    with pytest.raises(UsageError, match="draw its size, 128x136 px, height first: patch_size is 2, expected a divisor of 16"):
        load_prompts(given, store, family)
    with pytest.raises(UsageError, match="128x136, and the model is a DiTTransformer2DModel, which takes only square ones"):
        load_prompts(given, store, Dit({"in_channels": 2}, facts(text={"class_labels": 1})))


def test_a_model_without_a_vae_or_that_has_gone_costs_the_images_and_not_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config(folder)
    for gone in (folder / "model" / "vae", folder / "model"):
        shutil.rmtree(gone)
        assert images.drawing_vae(asked, Store.open(asked.store[0])) is None
    assert caplog.text.count("no images: ") == 2


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
    vae = images.drawing_vae(asked, run.loader.stores[0].store)
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
    call("ingest", "prompts", tmp_path / "p.txt", packed.store, "--model", packed.model).fails(
        "line 2: 'a dog': caption that the model does not take: 'a dog' is not a class of the model"
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["sd"], indirect=True)
def test_texts_and_a_file_are_encoded_once_as_by_ingest_prompts(packed: Packed, tmp_path: Path) -> None:
    store = Store.open(shutil.copytree(packed.store, tmp_path / "s.store"))
    lines = tmp_path / "lines.txt"
    lines.write_text("the house\na red cat\n", encoding="utf-8")
    given = ("a red cat", str(lines), "a  blue\ndog")
    asked = packed.config(tmp_path / "run", store=(store.path,), num_images=1, image_prompts=given, max_steps=1)
    train(asked, ALONE)
    drawn = json.loads((asked.output_dir / "images.json").read_bytes())
    assert [(one["id"], one["caption"]) for one in drawn] == [
        (f"{lines}/1", "the house"),
        (f"{lines}/2", "a red cat"),
        ("given text/2", "a blue dog"),
    ]
    call("ingest", "prompts", lines, store.path, "--model", packed.model).done()
    expected = decode_prompts(store.manifest, lines.with_suffix(".safetensors").read_bytes(), "expected")
    kept = asked.output_dir / "prompts"
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(before) == 3
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    bare = shutil.copytree(packed.model, tmp_path / "model", ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*"))
    asked = dataclasses.replace(asked, model=bare)
    found = encode_given(asked, store)  # a resume needs no text encoders
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    own = decode_prompts(store.manifest, found[str(lines)], "own")
    assert own.prompts == expected.prompts
    for text in ("the house", "a red cat", ""):
        of_run, of_set = own.embedding(text), expected.embedding(text)
        assert all(np.array_equal(of_run[name], of_set[name]) for name in of_set)
    lines.write_text("a blue dog\n", encoding="utf-8")
    again = encode_given(dataclasses.replace(asked, model=packed.model), store)
    assert [one.prompt for one in decode_prompts(store.manifest, again[str(lines)], "again").prompts] == ["a blue dog"]


@pytest.mark.parametrize("packed", ["sd"], indirect=True)
def test_prompts_that_cannot_be_encoded_end_the_run_with_the_reason(packed: Packed, tmp_path: Path) -> None:
    store = Store.open(packed.store)
    with pytest.raises(UsageError, match=r"--image-prompts none\.txt: there is no such file"):
        encode_given(packed.config(tmp_path, num_images=1, image_prompts=("none.txt",)), store)
    bare = shutil.copytree(packed.model, tmp_path / "model", ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*"))
    asked = packed.config(tmp_path, model=bare, num_images=1, image_prompts=("a red cat",))
    with pytest.raises(ModelError, match="model lacks the part tokenizer"):
        encode_given(asked, store)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_have_the_guidance_of_the_familys_pipeline(family: type[Family]) -> None:
    pipeline = getattr(diffusers, family.pipelines[0])
    assert hasattr(pipeline, "load_lora_weights") >= family.has_lora_loader  # PRX has a UNet's
    given = inspect.signature(pipeline.__call__).parameters
    found = [given[name].default for name in ("guidance_scale", "true_cfg_scale") if name in given]
    if issubclass(pipeline, diffusers.ModularPipeline):  # in the configuration of its guider
        found = [pipeline().guider.config.guidance_scale]
    by_a_second_model = "unconditional_transformer" in inspect.signature(pipeline.__init__).parameters
    assert family.is_guidable is not by_a_second_model
    expected = 1.0 if by_a_second_model else next(scale for scale in found if scale is not None)
    assert family.image_guidance == expected


def test_guidance_leads_away_from_the_empty_caption(tmp_path: Path) -> None:
    """One step of DDIM is affine in the prediction, so its results are mixed as the predictions are."""
    training = make_training(tmp_path)
    one_step = dataclasses.replace(training.config, image_steps=1)
    training = dataclasses.replace(training, config=one_step)
    batch, other = make_batch(2), make_batch(2, first=5)
    dropped = dataclasses.replace(batch, tokens=other.tokens)
    plain = DrawingBatch(batch=batch, negative=None, noise=sample_noise(batch), guidance=3.0, entries=())
    guided = draw_latents(training, tiny_vae(), dataclasses.replace(plain, negative=dropped))
    captioned, empty = (draw_latents(training, tiny_vae(), dataclasses.replace(plain, batch=one)) for one in (batch, dropped))
    assert not torch.equal(captioned, empty)
    torch.testing.assert_close(guided, empty + 3.0 * (captioned - empty), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_a_run_draws_against_the_same_rows_with_empty_captions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, guidance: float | None
) -> None:
    drawn: list[DrawingBatch] = []

    def noting(training: object, vae: object, one: DrawingBatch) -> torch.Tensor:
        drawn.append(one)
        return one.noise

    monkeypatch.setattr(images, "draw_latents", noting)
    train(config(folder, max_steps=1, num_images=2, image_guidance=guidance), ALONE)
    assert drawn
    for one in drawn:
        batch, dropped = one.batch, one.negative
        assert (dropped is None) is (guidance == 1.0)
        assert one.guidance == (guidance or 7.5)
        if dropped is not None:
            assert torch.equal(batch.ids, dropped.ids)
            assert torch.equal(batch.latents, dropped.latents)
            assert bool((dropped.tokens[0] == dropped.tokens[-1]).all())
            assert not torch.equal(batch.token_mask, dropped.token_mask) or not torch.equal(batch.tokens, dropped.tokens)


def test_a_distilled_model_is_told_no_guidance_in_training_and_the_images_in_drawing() -> None:
    family = Flux({"guidance_embeds": True}, facts())
    batch = dataclasses.replace(make_batch(2), text_fixed={"pooled": torch.zeros(2, 8)})

    def told(one: Family) -> list[float]:
        found: list[float] = one.arguments(torch.zeros(2, 4, 8, 8), torch.zeros(2), batch)["guidance"].tolist()
        return found

    assert (told(family), told(family.with_guidance(3.5)), told(family)) == ([1.0, 1.0], [3.5, 3.5], [1.0, 1.0])
    assert (family.image_guidance, Flux({"guidance_embeds": False}, facts()).image_guidance) == (3.5, 1.0)


CHINESE = "一只猫坐在窗边看雨"


def drawn(shade: int, height: int, width: int, *, real: int | None = None) -> DrawnSample:
    shades = [shade] if real is None else [real, shade]
    return {"id": f"cats/{shade}.png", "caption": str(shade)}, [
        np.full((height, width, 3), value, dtype=np.uint8) for value in shades
    ]


def test_each_image_is_a_file_of_its_own_size_and_the_sheet_has_all_of_them_in_rows(tmp_path: Path) -> None:
    samples = [drawn(10, 40, 20), drawn(20, 20, 40), drawn(30, 20, 20), drawn(40, 20, 20), drawn(50, 20, 20)]
    write_images(samples, tmp_path / "images.png", tmp_path / "images" / "step-00000007")
    files = sorted((tmp_path / "images" / "step-00000007").iterdir())
    assert [path.name for path in files] == ["01.png", "02.png", "03.png", "04.png", "05.png"]
    for path, one in zip(files, samples, strict=True):
        with Image.open(path) as image:
            assert np.array_equal(np.asarray(image), one[1][0])
    assert json.loads((tmp_path / "images.json").read_bytes()) == [entry for entry, _ in samples]
    with Image.open(tmp_path / "images.png") as sheet:
        side, high = 40 + GAP_PX, 40 + LINE_PX + GAP_PX
        assert sheet.size == (4 * side + GAP_PX, 2 * high + GAP_PX)
        places = [(number % 4 * side + GAP_PX, number // 4 * high + GAP_PX) for number in range(5)]
        assert [sheet.getpixel(place) for place in places] == [(n, n, n) for n in (10, 20, 30, 40, 50)]


def test_a_generated_image_is_below_the_real_one_and_large_ones_are_made_smaller() -> None:
    sheet = contact_sheet([drawn(10 * n, 1000, 500, real=5 * n) for n in range(1, 6)])
    width, height = CELL_PX // 2 + GAP_PX, CELL_PX + LINE_PX + GAP_PX
    assert sheet.size == (4 * width + GAP_PX, 4 * height + GAP_PX)
    shades = [[sheet.getpixel((GAP_PX, row * height + GAP_PX)) for row in range(4)]]
    assert shades == [[(n, n, n) for n in (5, 10, 25, 50)]]


def test_a_sheet_of_many_images_is_a_square() -> None:
    assert contact_sheet([({}, drawn(1, 8, 8)[1])] * 100).size == (168, 168)


LONG = "A tabby cat by a window "


@pytest.mark.parametrize(
    ("caption", "lines"), [("A cat\nby it", 1), (LONG * 2, 2), (LONG * 9, 3), ("a" * 300, 1), (CHINESE * 9, 1)]
)
def test_the_sheet_has_the_caption_below_each_image_and_never_beside_it(caption: str, lines: int) -> None:
    image = np.full((64, 192, 3), 255, dtype=np.uint8)
    sheet = np.asarray(contact_sheet([({"caption": caption}, [image])])).min(axis=2)
    assert sheet.shape == (64 + LINE_PX * lines + 2 * GAP_PX, 192 + 2 * GAP_PX)
    rows, columns = np.nonzero(sheet < 128)
    assert rows.min() > GAP_PX + 64 + LINE_PX * 0.1
    assert GAP_PX + 64 + LINE_PX * (lines - 1) < rows.max() < len(sheet) - GAP_PX + 2
    assert GAP_PX <= columns.min() < columns.max() < GAP_PX + 192


def test_a_lone_window_has_a_marker_and_ticks_are_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig

    def noting(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", noting)
    draw_loss_curve([{"step": 19, "loss": 0.5}], tmp_path / "loss.png")
    (axes,) = figures[0].axes
    assert axes.lines[0].get_marker() == "o"
    assert list(np.asarray(axes.lines[0].get_xdata())) == [20]
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_a_run_leaves_the_captions_next_to_the_images(folder: Path) -> None:
    path = folder / "chinese.store"
    rows = {"train/128x128": 9, "val/128x128": 3}
    made = [make_sample(f"{name}/{n}.png", name, (f"{CHINESE} {n}",)) for name, count in rows.items() for n in range(count)]
    add_to_store(path, made)
    asked = config(folder, store=(path,), max_steps=2, num_images=2, images_every=1)
    train(asked, ALONE)
    for file in (asked.output_dir / "images.json", asked.output_dir / "images" / "step-00000001.json"):
        for entry in (entries := json.loads(file.read_text(encoding="utf-8"))):
            assert entry["caption"] == f"{CHINESE} {entry['id'].removeprefix('val/128x128/').removesuffix('.png')}"
        assert len(entries) == 2
