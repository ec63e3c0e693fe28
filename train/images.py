"""Images that a run draws: of prompts, or of stored captions next to the real images, by the family's pipeline of diffusers.

They are drawn with the averaged weights, stored embeddings and keyed noise. The pipeline's class is imported for the first
images: it takes seconds, most of them for text encoders' libraries.
Letters: B images of a batch, C latent channels, h and w latent height and width, H and W those of an image, L tokens (padded).
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from bucketline.errors import ModelError, TrainError, UsageError
from bucketline.families import vaes
from bucketline.files.atomic_write import write_durably
from bucketline.files.paths import IMAGES_FOLDER, redacted
from bucketline.loader import Batch, Loader, LoaderConfig, Remainder
from bucketline.loader.collate.buffers import captions_of
from bucketline.loader.plan.order import Purpose, normal
from bucketline.store.format.block import CLASS_LABELS, LATENT
from bucketline.torch_dtypes import TORCH_DTYPES
from bucketline.torch_setup import NoRoom, attempt, free_memory
from bucketline.train.checkpoint import folder_of_step, way_on
from bucketline.train.model import UNREADABLE, open_model_config, read_vae
from bucketline.train.noise import FlowSchedule, sample_noise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from bucketline.families.family import Family
    from bucketline.loader import WeightedStore
    from bucketline.store import Store
    from bucketline.store.format.text import RaggedSpec
    from bucketline.store.prompt_file import Prompt
    from bucketline.train.config import TrainConfig
    from bucketline.train.step import Training
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

PROMPTS_FOLDER = "prompts"  # in the run's
_ENCODED = ".safetensors"  # what `ingest prompts` has written
_FILES = (".txt", ".jsonl", ".json", ".ndjson", _ENCODED)
PER_ROW = 4  # images of a sheet; more if there are more rows than that
CELL_PX, GAP_PX = 384, 8  # of a sheet: the longest side of an image, and what is between two
FONT_PX, LINE_PX, MAX_LINES = 12, 15, 3  # of the caption below an image


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """A prompt, its embeddings, and the size of its latent."""

    id: str  # NAME/NUMBER
    prompt: Prompt
    columns: RaggedSpec  # of the embeddings
    embedding: dict[str, Any]  # by column, as the store's readers get a caption's
    negative: dict[str, Any]
    latent: tuple[int, int, int]  # C, h, w


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingBatch:
    """Images to draw, of one size and guidance."""

    batch: Batch  # of prompts, without latents
    negative: Batch | None  # the same with negative prompts or empty captions; None without classifier-free guidance
    noise: Tensor  # [B, C, h, w] float32, by the prompts' seeds or keyed by the samples
    guidance: float
    entries: tuple[dict[str, Json], ...]  # of images.json, a row each
    real: Tensor | None = None  # [B, C, h, w] float32, unscaled; of prompts None


DrawnSample = tuple["Mapping[str, Json]", "list[NDArray[np.uint8]]"]
"""An entry of images.json, and its images, [H, W, 3] each: of a caption the references in order and the real one, decoded from
the stored latents, then the generated one.
"""


def draw_images(
    training: Training,
    stores: Sequence[WeightedStore],
    prompts: Sequence[StoredPrompt],
    sheet: Path | None,
    *,
    steps_done: int,
    keeps: bool,
) -> bool:
    """Generate images with the averaged weights, write a contact sheet and a file of each; return whether there were any.

    They are of the prompts, or without any `--num-images` of stored captions, held-out ones if there are any. There are none,
    with a warning, without a VAE or enough memory. `sheet` None: only try, in two steps of the sampler, whether there will be.
    With sharding every rank must call this, and only one `keeps` the images.
    """
    if sheet is None:
        training = replace(training, config=replace(training.config, image_steps=2))  # by one, a shift to a last sigma is 0 / 0
    config = training.config
    if (vae := drawing_vae(config, stores[0].store)) is None:
        return False
    if prompts:
        device = next(training.model.parameters()).device
        in_training = config.sizes().get("batch_size")  # which fits, and is compiled
        at_most = training.family.most_drawn or in_training or PER_ROW
        batches = prompt_batches(prompts, at_most, guidance_of(training), device, training.family)
    else:
        batches = _caption_batches(training, stores)
    drawn = _drawn(training, vae, batches, keeps=keeps)
    torch.cuda.empty_cache()  # for the next step
    if isinstance(drawn, NoRoom):
        log.warning("no images: out of memory while drawing (%.200s); training is not affected", str(drawn).partition(". ")[0])
        return False
    if not drawn or sheet is None:
        return False
    order = {prompt.id: number for number, prompt in enumerate(prompts)}
    drawn = sorted(drawn, key=lambda one: order[str(one[0]["id"])]) if prompts else drawn[: config.num_images]
    write_images(drawn, sheet, config.output_dir / IMAGES_FOLDER / folder_of_step(steps_done))
    return True


def _drawn(training: Training, vae: nn.Module, batches: Iterable[DrawingBatch], *, keeps: bool) -> list[DrawnSample] | NoRoom:
    """Return the images of all batches, if memory is short decoded in tiles, whose edges may be visible."""
    invert, device = training.prep.scale.invert, next(training.model.parameters()).device
    sampled = attempt(lambda: [(one, invert(draw_latents(training, vae, one))) for one in batches])
    if isinstance(sampled, NoRoom):
        if isinstance(training.model, FSDPModule):
            raise TrainError(
                f"out of memory while drawing images ({sampled!s:.200}), and no rank can leave a sharded model by itself; "
                f"{way_on(training.config.output_dir)}, with --num-images 0"
            )
        return sampled
    if not keeps:
        return []

    def decode() -> list[DrawnSample]:
        vae.to(device)
        return [image for one, latents in sampled for image in _decode_batch(vae, one, latents)]

    drawn = attempt(decode)
    if isinstance(drawn, NoRoom) and hasattr(vae, "enable_tiling"):
        vae.enable_tiling()  # type: ignore[operator]
        drawn = attempt(decode)
    return drawn


def _decode_batch(vae: nn.Module, one: DrawingBatch, latents: Tensor) -> Iterator[DrawnSample]:
    stored = [each.float() for each in one.batch.references]
    decoded = zip(*(_decode(vae, given) for given in (*stored, one.real, latents) if given is not None), strict=True)
    for entry, weight, images in zip(one.entries, one.batch.weight.tolist(), decoded, strict=False):
        if weight > 0:
            yield entry, list(images)


@torch.no_grad()
def _decode(vae: nn.Module, latents: Tensor) -> NDArray[np.uint8]:
    """Decode unscaled latents, [B, C, h, w] float32, to images, [B, H, W, 3]."""
    pixels = vaes.vae_decode(vae, latents)
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def drawing_vae(config: TrainConfig, store: Store) -> nn.Module | None:
    """Load the model's VAE that decodes the store's latents, on the CPU; return None, with a warning, if there is none."""
    try:
        vae, other = read_vae(open_model_config(config.model, config.model_config), store.manifest.encoders)
    except (ModelError, *UNREADABLE) as error:  # also of a folder that has gone while the run trained
        vae, other = None, f"{config.model} has no VAE that can be loaded ({error})"
    if vae is None or other is not None:
        log.warning("no images: %s", other)
        return None
    if hasattr(vae, "enable_slicing"):
        vae.enable_slicing()  # type: ignore[operator] # one image at a time: training uses most of the memory
    return vae


# ------------------------------------------------------------------ the pipeline


@torch.no_grad()
def draw_latents(training: Training, vae: nn.Module, one: DrawingBatch) -> Tensor:
    """Return latents of the averaged model for a batch, in the model's scaling, [B, C, h, w] float32.

    With `negative` conditions, by classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598).
    """
    scheduler = _scheduler(training)
    latents = _keep_latents(scheduler)
    # A batch in the shape of a validation's runs its graphs; nothing is compiled for another.
    with training.averaged() as model, torch.compiler.set_stance("eager_on_recompile"):
        if training.family.embeds:
            _draw_by_pipeline(training, model, scheduler, vae, one)
        else:
            _draw_by_steps(training, model, scheduler, one)
    return training.family.unpacked(latents[-1], *one.noise.shape[2:]).float()


def guidance_of(training: Training) -> float:
    """Return the guidance of a run's images: its option, or what the model's pipeline takes by default."""
    asked = training.config.image_guidance
    return training.family.image_guidance if asked is None else asked


def _draw_by_pipeline(training: Training, model: nn.Module, scheduler: Any, vae: nn.Module, one: DrawingBatch) -> None:  # noqa: ANN401 - diffusers has no types
    family = training.family
    index = open_model_config(training.config.model, training.config.model_config).index
    pipeline = family.pipeline({family.folder: model, "scheduler": scheduler, "vae": vaes.stand_in(vae)}, index)
    pipeline.check_inputs = lambda *_args, **_more: None  # of sizes for a VAE that divides by 8, whatever this one does
    pipeline.set_progress_bar_config(disable=True)
    given, batches = call_of(training, vae, one)
    # In the precision of training; steps, and guidance between predictions, in 32 bits.
    with (
        training.autocast,
        model.register_forward_hook(lambda _, __, output: tree_map_only(torch.Tensor, torch.Tensor.float, output)),
    ):
        family.draw(pipeline, given, *batches)


def call_of(training: Training, vae: nn.Module, one: DrawingBatch) -> tuple[dict[str, Any], list[Batch]]:
    """Return the arguments of a pipeline's call that draws a batch, and the batches whose embeddings `Family.draw` adds."""
    family = training.family
    height, width = (side * vaes.px_per_latent(vae) for side in one.noise.shape[2:])
    batches = [one.batch]
    if one.negative is not None and family.is_guided(one.guidance):
        batches.append(one.negative)
    if family.joins_negative:
        num_tokens = max(own.tokens.shape[1] for own in batches)
        batches = [_padded(own, num_tokens) for own in batches]
    given = {
        "latents": family.packed(one.noise),
        "height": height,
        "width": width,
        "num_inference_steps": training.config.image_steps,
        "output_type": "latent",
        family.guidance_argument: one.guidance if family.is_told_guidance or len(batches) > 1 else family.no_guidance,
        **family.call_options,
    }
    return given, batches


def _draw_by_steps(training: Training, model: nn.Module, scheduler: Any, one: DrawingBatch) -> None:  # noqa: ANN401 - likewise
    """Draw for a family whose pipeline takes no embeddings, with the steps that the scheduler has by itself."""
    noise = training.prep.schedule
    mu = {"mu": noise.mu(*one.noise.shape[2:])} if isinstance(noise, FlowSchedule) else {}
    scheduler.set_timesteps(training.config.image_steps, device=one.noise.device, **mu)
    told = replace(training, family=training.family.with_guidance(one.guidance))
    latents = one.noise
    for timestep in scheduler.timesteps:
        timesteps = timestep.repeat(len(latents))
        prediction = told.predict(model, latents, timesteps, one.batch).float()
        if one.negative is not None:
            plain = told.predict(model, latents, timesteps, one.negative).float()
            prediction = plain + one.guidance * (prediction - plain)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]


def _scheduler(training: Training) -> Any:  # noqa: ANN401 - likewise
    """Return diffusers' scheduler with the trained objective.

    Source: Song et al. 2020, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), with trailing timesteps, since only the
    last one is near pure noise: Lin et al. 2023 (arXiv 2305.08891).
    """
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    schedule = training.prep.schedule
    if isinstance(schedule, FlowSchedule):
        flow: Any = FlowMatchEulerDiscreteScheduler.from_config(schedule.config)
        # Both are for pipelines of diffusion models, whose UNet may be trained as a flow.
        flow.init_noise_sigma = 1.0
        flow.scale_model_input = lambda sample, _timestep=None: sample
        return flow
    return DDIMScheduler.from_config(
        schedule.config,
        clip_sample=False,
        thresholding=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        steps_offset=1,  # not used with these timesteps; pipelines warn of another
    )


def _keep_latents(scheduler: Any) -> list[Tensor]:  # noqa: ANN401 - likewise
    """Return a list that has the latents of the scheduler's last step: some pipelines return unscaled ones."""
    latents: list[Tensor] = []
    step = scheduler.step

    @functools.wraps(step)
    def kept(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - likewise
        found = step(*args, **options)
        latents[:] = [found[0]]
        return found

    scheduler.step = kept
    return latents


def _padded(one: Batch, num_tokens: int) -> Batch:
    more = num_tokens - one.tokens.shape[1]
    return replace(one, tokens=pad(one.tokens, (0, 0, 0, more)), token_mask=pad(one.token_mask, (0, more)))


# ------------------------------------------------------------------ what is drawn


def encode_given(config: TrainConfig, store: Store) -> dict[str, bytes]:
    """Return the prompts of `--image-prompts`, texts and files, by name, each as `ingest prompts` writes a file.

    Each text file is encoded once, as the captions of `store` are, and kept in the run's folder: a resume needs no text
    encoders. Their memory is free before the model is loaded.
    """
    is_file = {one: os.path.isfile(one) for one in config.image_prompts}  # noqa: PTH113 - a text may be too long for a path
    files = [Path(one) for one in is_file if is_file[one] or Path(one).suffix.lower() in _FILES]
    found: dict[str, bytes] = {}
    for file in files:
        if not is_file[str(file)]:
            raise UsageError(f"--image-prompts {file}: there is no such file")
        data = file.read_bytes()
        found[str(file)] = data if file.suffix == _ENCODED else _encoded(config, store, data, file)
    if texts := [" ".join(one.split()) for one in is_file if Path(one) not in files]:
        found["given text"] = _encoded(config, store, "".join(f"{text}\n" for text in texts).encode(), None)
    return found


def _encoded(config: TrainConfig, store: Store, data: bytes, file: Path | None) -> bytes:
    """Return a text file's prompts encoded, if need be; the texts of the command line are one without a name."""
    kept = config.output_dir / PROMPTS_FOLDER / f"{hashlib.blake2b(data, digest_size=8).hexdigest()}{_ENCODED}"
    if kept.exists():
        return kept.read_bytes()
    from bucketline.ingest.encoders.model_folder import open_model
    from bucketline.ingest.prompts import encoded_prompts

    kept.parent.mkdir(parents=True, exist_ok=True)
    if file is None:
        write_durably(file := kept.with_suffix(".txt"), data)
    model = open_model(str(config.model), config.model_config)
    encoded, _, cut = encoded_prompts(file, store.manifest, redacted(str(store.place)), model, "auto")
    free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for text in cut:
        log.warning("--image-prompts: %.80s is longer than the text encoder accepts (truncated)", text)
    write_durably(kept, encoded)
    return encoded


def load_prompts(given: Mapping[str, bytes], store: Store, family: Family) -> tuple[StoredPrompt, ...]:
    """Return the prompts that a run draws, each once; `given`: what `encode_given` returns."""
    from bucketline.store.prompt_file import decode_prompts

    bucket = store.buckets()[0]
    factor = bucket.height_px // bucket.spec.column(LATENT).shape[1]
    found: dict[Prompt, StoredPrompt] = {}
    for name, data in given.items():
        own = decode_prompts(store.manifest, data, name)
        for number, prompt in enumerate(own.prompts, 1):
            latent = family.store.latent_channels, prompt.height_px // factor, prompt.width_px // factor
            size = f"{prompt.height_px}x{prompt.width_px}"
            drawing = type(family)(family.config, replace(family.store, latent_sizes=((size, *latent[1:]),)))
            if wrong := [one for one in drawing.expects() if not one.is_met]:
                raise UsageError(
                    f"--image-prompts {name}, prompt {number}: the model cannot draw its size, {size} px, height first: "
                    f"{wrong[0].field} is {wrong[0].found}, expected {wrong[0].wanted}; give the prompts other sizes"
                )
            one = StoredPrompt(
                id=f"{name}/{number}",
                prompt=prompt,
                columns=own.spec.delivered,
                embedding=own.embedding(prompt.prompt),
                negative=own.embedding(prompt.negative_prompt),
                latent=latent,
            )
            found.setdefault(prompt, one)
    return tuple(found.values())


def _entry(one: StoredPrompt) -> dict[str, Json]:
    about = asdict(one.prompt)
    return {"id": one.id, "caption": about.pop("prompt"), **about}


def prompt_batches(
    prompts: Sequence[StoredPrompt], at_most: int, guidance: float, device: torch.device, family: Family
) -> Iterator[DrawingBatch]:
    """Yield prompts in batches of one size and guidance, `at_most` so many, on a device; each time the same.

    `guidance`: of prompts without one.
    """
    groups: dict[tuple[float, tuple[int, int, int]], list[StoredPrompt]] = {}
    for one in prompts:
        own = guidance if one.prompt.guidance is None else one.prompt.guidance
        groups.setdefault((own, one.latent), []).append(one)
    for (strength, _), group in groups.items():
        for at in range(0, len(group), at_most):
            part = tuple(group[at : at + at_most])
            yield DrawingBatch(
                batch=_batch(part, [one.embedding for one in part]).to(device),
                negative=_batch(part, [one.negative for one in part]).to(device) if family.is_guided(strength) else None,
                noise=normal(torch.tensor([one.prompt.seed for one in part], device=device), Purpose.NOISE, part[0].latent),
                guidance=strength,
                entries=tuple(_entry(one) for one in part),
            )


def _batch(prompts: Sequence[StoredPrompt], embeddings: Sequence[dict[str, Any]]) -> Batch:
    """Return a batch of conditions without latents: as of images of the prompts' sizes that were not cropped."""
    spec = prompts[0].columns
    own = [{c.name: _tensor(one[c.name], c.dtype) for c in (*spec.tokens, *spec.fixed)} for one in embeddings]
    column = spec.tokens[0].name
    lengths = torch.tensor([len(one[column]) for one in own])
    tokens = torch.nn.utils.rnn.pad_sequence([one[column] for one in own], batch_first=True)
    sizes = torch.tensor([[one.prompt.height_px, one.prompt.width_px] for one in prompts], dtype=torch.int32)
    count = len(prompts)
    return Batch(
        step=0,
        micro_step=0,
        epoch=0,
        bucket=f"prompts/{sizes[0, 0]}x{sizes[0, 1]}",
        columns={},
        tokens=tokens,
        token_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        original_size=sizes,
        crop=torch.zeros_like(sizes),
        target_size=sizes,
        weight=torch.ones(count),
        keys=torch.tensor([one.prompt.seed for one in prompts]),
        ids=torch.zeros(count, 16, dtype=torch.uint8),
        flipped=torch.zeros(count, dtype=torch.bool),
        text_fixed={c.name: torch.stack([one[c.name] for one in own]) for c in spec.fixed},
        class_labels=tokens[:, 0, 0] if column == CLASS_LABELS else None,
    )


def _tensor(values: Any, dtype: str) -> Tensor:  # noqa: ANN401 - a numpy array of any dtype
    return torch.from_numpy(values.copy()).view(TORCH_DTYPES[dtype])


def _caption_batches(training: Training, stores: Sequence[WeightedStore]) -> Iterator[DrawingBatch]:
    """Yield the first `--num-images` samples, held-out ones if there are any, each with one of its captions."""
    split = "val" if any(weighted.store.buckets("val") for weighted in stores) else "train"
    config, guidance, device = training.config, guidance_of(training), next(training.model.parameters()).device
    at_most = training.family.most_drawn or config.num_images
    asked = LoaderConfig(batch_size=at_most, seed=config.seed, split=split, remainder=Remainder.PARTIAL, epochs=1)
    is_guided = training.family.is_guided(guidance)
    each, num_samples = [weighted.store for weighted in stores], 0
    with (
        Loader(each, asked, device=device) as loader,
        Loader(each, replace(asked, caption_dropout=1.0), device=device) as dropping,
    ):
        for batch, dropped in zip(loader, dropping if is_guided else itertools.repeat(None), strict=False):
            noise = sample_noise(batch)
            chosen = captions_of(each, batch)
            yield DrawingBatch(
                batch=batch,
                negative=dropped,
                noise=noise,
                guidance=guidance,
                entries=tuple({"id": one.id, "caption": one.text} for one in chosen),
                real=batch.latents.float()[:, : noise.shape[1]],  # for moments, the means
            )
            num_samples += int((batch.weight > 0).sum())
            if num_samples >= config.num_images:
                return


# ------------------------------------------------------------------ the files


def write_images(drawn: Sequence[DrawnSample], sheet: Path, folder: Path) -> None:
    """Write a contact sheet, JSON next to it, and in a folder each generated image: 01.png and so on, in the same order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (_, images) in enumerate(drawn, 1):
        write_durably(folder / f"{number:02d}.png", _png(Image.fromarray(images[-1])))
    write_durably(sheet, _png(contact_sheet(drawn)))
    entries = [entry for entry, _ in drawn]
    sheet.with_suffix(".json").write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def contact_sheet(drawn: Sequence[DrawnSample]) -> Image.Image:
    """Return the images in rows from left to right, their captions below; large ones are made smaller.

    Each generated one is below its real one, which is marked as real; with references, it is below these and above the real
    one. Chinese, Japanese and Korean letters are boxes.
    """
    from matplotlib import get_data_path  # whose font has Latin, Greek, Cyrillic and Arabic letters

    labelled = [_in_order(str(entry.get("caption", "")), images) for entry, images in drawn]
    cells = [[Image.fromarray(image) for _, image in own] for own in labelled]
    for image in (every := [image for cell in cells for image in cell]):
        image.thumbnail((CELL_PX, CELL_PX))
    columns = min(len(cells), max(PER_ROW, math.isqrt(len(cells))))
    width, height = (GAP_PX + max(sides) for sides in zip(*(image.size for image in every), strict=True))
    font = ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), FONT_PX)
    texts = [[_lines(text, width - GAP_PX, font) for text, _ in own] for own in labelled]
    height += LINE_PX * max(len(lines) for own in texts for lines in own)
    most = max(map(len, cells))
    num_rows = -(-len(cells) // columns) * most
    sheet = Image.new("RGB", (columns * width + GAP_PX, num_rows * height + GAP_PX), "white")
    pen = ImageDraw.Draw(sheet)
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        for at, (image, lines) in enumerate(zip(cell, texts[number], strict=True), most - len(cell)):
            left, top = column * width + GAP_PX, (row * most + at) * height + GAP_PX
            sheet.paste(image, (left, top))
            pen.text((left, top + image.height), "\n".join(lines), "black", font, spacing=LINE_PX - FONT_PX)
    return sheet


def _in_order(caption: str, images: Sequence[NDArray[np.uint8]]) -> list[tuple[str, NDArray[np.uint8]]]:
    """Return a sample's images from top to bottom, each with what is written below it."""
    *stored, generated = images
    if len(stored) < 2:
        return [*(("real", image) for image in stored), (caption, generated)]
    *references, real = stored
    return [*(("before", image) for image in references), (caption, generated), ("real", real)]


def _lines(text: str, width_px: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """Return a text in lines of a width, at most MAX_LINES; an ellipsis stands for what is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        lines[-1:] = [longer] if not lines or font.getlength(longer) <= width_px else [lines[-1], word]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"{lines[MAX_LINES - 1]} …"]
    for number in range(len(lines)):
        while len(lines[number]) > 1 and font.getlength(lines[number]) > width_px:
            lines[number] = f"{lines[number][:-2]}…"
    return lines


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
