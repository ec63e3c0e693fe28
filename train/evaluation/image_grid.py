"""The two image files of a run: the loss curve, and a grid of generated images, of prompts or below the real ones."""

from __future__ import annotations

import io
import itertools
import json
import logging
import unicodedata
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from torch.distributed.fsdp import FSDPModule

from bucketline.files.atomic_write import write_durably
from bucketline.loader import Batch, Loader, LoaderConfig, Remainder
from bucketline.loader.collate.columns import EMPTY, choose_captions
from bucketline.loader.mixture import once_each
from bucketline.train.evaluation.fonts import Fonts, fonts_for, warn_of_no_font
from bucketline.train.evaluation.prompts import PromptBatch, StoredPrompt, prompt_batches
from bucketline.train.evaluation.sampling import guidance_of, sample_latents
from bucketline.train.models.encoder_check import UNREADABLE, VAE_FOLDER, read_vae
from bucketline.train.models.load import locate
from bucketline.train.noising import sample_noise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from bucketline.loader import WeightedStore
    from bucketline.store import Store
    from bucketline.train.config import TrainConfig
    from bucketline.train.noise_schedule import ModelSchedule
    from bucketline.train.step import Training
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """Latents of one batch, not yet decoded."""

    of: Batch | PromptBatch
    real: Tensor | None  # [B, C, h, w] float32, unscaled; of prompts none
    generated: Tensor  # [B, C, h, w] float32, unscaled


def draw_samples(
    training: Training,
    schedule: ModelSchedule,
    shares: Sequence[WeightedStore],
    split: str,
    prompts: Sequence[StoredPrompt] = (),
    *,
    keeps: bool,
) -> list[DrawnSample]:
    """Generate images with the averaged weights: of the prompts, or without any `--num-images` of stored captions.

    None, with a warning, without a VAE or enough memory. With sharding every rank must call this, and only one `keeps` the
    images.
    """
    config = training.config
    if config.num_images == 0 or (vae := load_vae(config, shares[0].store)) is None:
        return []
    try:
        sampled = _sample_prompts(training, schedule, prompts) if prompts else _sample(training, schedule, shares, split)
    except torch.OutOfMemoryError as error:
        if isinstance(training.model, FSDPModule):  # other ranks wait for this one in the middle of the model
            raise
        _say_no_room("the model's pass", error)
        return []
    if not keeps:
        return []
    drawn = _decode_all(vae, sampled, [share.store for share in shares])
    if not prompts:
        return drawn[: config.num_images]
    order = {prompt.id: number for number, prompt in enumerate(prompts)}
    return sorted(drawn, key=lambda one: order[one.id])


def _sample_prompts(training: Training, schedule: ModelSchedule, prompts: Sequence[StoredPrompt]) -> list[_Sampled]:
    device, is_told = next(training.model.parameters()).device, training.family.is_told_guidance
    at_most = training.config.batch_size or PER_ROW  # what fits in training, and may have graphs
    sampled = []
    for one in prompt_batches(prompts, at_most, guidance_of(training), device, is_told=is_told):
        latents = sample_latents(training, schedule, one.batch, one.noise, one.negative, guidance=one.guidance)
        sampled.append(_Sampled(of=one, real=None, generated=training.prep.scale.invert(latents)))
    return sampled


def _sample(training: Training, schedule: ModelSchedule, shares: Sequence[WeightedStore], split: str) -> list[_Sampled]:
    num_images = training.config.num_images
    asked = LoaderConfig(batch_size=num_images, seed=training.config.seed, split=split, remainder=Remainder.PARTIAL, epochs=1)
    sampled: list[_Sampled] = []
    num_samples = 0
    device = next(training.model.parameters()).device
    is_guided = not training.family.is_told_guidance and guidance_of(training) != 1.0
    with (
        Loader(once_each(shares), asked, device=device) as loader,
        Loader(once_each(shares), replace(asked, caption_dropout=1.0), device=device) as dropping,
    ):
        for batch, dropped in zip(loader, dropping if is_guided else itertools.repeat(None), strict=False):
            noise = sample_noise(batch)
            latents = sample_latents(training, schedule, batch, noise, dropped)
            real = batch.latents.float()[:, : noise.shape[1]]  # for moments, the means
            sampled.append(_Sampled(of=batch, real=real, generated=training.prep.scale.invert(latents)))
            num_samples += int((batch.weight > 0).sum())
            if num_samples >= num_images:
                break
    return sampled


def _decode_all(vae: nn.Module, sampled: Sequence[_Sampled], stores: Sequence[Store]) -> list[DrawnSample]:
    """Decode full images, or tiles with possibly visible edges if memory is short during training."""
    failure: Exception | None = None
    for is_tiled in (False, True):
        if is_tiled and hasattr(vae, "enable_tiling"):
            vae.enable_tiling()  # type: ignore[operator]
        try:
            vae.to(sampled[0].generated.device)
            return [drawn for one in sampled for drawn in _decode_batch(vae, one, stores)]
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # the traceback would keep the tensors of the failed call alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    _say_no_room("the VAE's decoding", failure)
    return []


def _say_no_room(what: str, error: Exception | None) -> None:
    log.warning(
        "no images: not enough device memory for %s in addition to training (%.200s); training is not affected", what, error
    )


def _decode_batch(vae: nn.Module, sampled: _Sampled, stores: Sequence[Store]) -> list[DrawnSample]:
    generated = decode(vae, sampled.generated)
    if isinstance(sampled.of, PromptBatch):
        return [
            DrawnSample(id=one.id, real=None, generated=image, caption=one.prompt.prompt, details=one.about)
            for one, image in zip(sampled.of.prompts, generated, strict=True)
        ]
    assert sampled.real is not None
    real, captions = decode(vae, sampled.real), captions_of(stores, sampled.of)
    return [
        DrawnSample(id=captions[i][0], real=real[i], generated=generated[i], caption=captions[i][1])
        for i, weight in enumerate(sampled.of.weight.tolist())
        if weight > 0
    ]


def load_vae(config: TrainConfig, store: Store) -> nn.Module | None:
    """Load the model's VAE that decodes the store's latents, on the CPU; return None, with a warning, if there is none."""
    folder, file = locate(config.model, config.model_config)
    try:
        vae, other = read_vae(folder / VAE_FOLDER, store.manifest.encoders, file)
    except UNREADABLE as error:
        log.warning("no images: %s has no VAE that can be loaded (%s)", folder / VAE_FOLDER, error)
        return None
    if other is not None:
        log.warning("no images: %s", other)
        return None
    if hasattr(vae, "enable_slicing"):
        vae.enable_slicing()  # type: ignore[operator] # one image at a time: training uses most of the memory
    return vae


@torch.no_grad()
def decode(vae: nn.Module, latents: Tensor) -> NDArray[np.uint8]:
    """Decode unscaled latents, [B, C, h, w] float32, to images, [B, H, W, 3]."""
    pixels: Tensor = vae.decode(latents, return_dict=False)[0]  # type: ignore[operator]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def captions_of(stores: Sequence[Store], batch: Batch) -> list[tuple[str, str]]:
    """Return each sample's id and the caption that the loader chose for it, by repeating the loader's draw."""
    texts = [_stored_captions(stores, digest.tobytes()) for digest in batch.ids.cpu().numpy()]
    chosen = choose_captions(np.array([len(captions) for _, captions in texts]), batch.keys.cpu().numpy())
    return [(name, "" if n == EMPTY else captions[n]) for (name, captions), n in zip(texts, chosen, strict=True)]


def _stored_captions(stores: Sequence[Store], digest: bytes) -> tuple[str, tuple[str, ...]]:
    for store in stores:
        if found := store.find_digest(digest):
            record = found[1]
            return record.id, record.captions[: store.manifest.max_captions]
    raise AssertionError(f"no sample has the digest {digest.hex()} of a batch's row")


LOSS_CURVE = "loss.png"
IMAGES = "images.png"
CELL_WIDTH = 2.6  # inches per image in the grid
PER_ROW = 4  # prompts
DPI, MAX_PX = 130, 60_000  # of a file; Agg and JPEG take fewer than 65,536 px a side
COLUMNS, LINES = 26, 4  # of a caption above an image; a Chinese character takes two columns


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSample:
    """A generated image of the grid, and the real one above it."""

    id: str
    real: NDArray[np.uint8] | None  # [H, W, 3], decoded from the stored latents; of a prompt None
    generated: NDArray[np.uint8]  # [H, W, 3], from noise and the stored embedding
    caption: str
    details: Mapping[str, Json] = field(default_factory=dict)  # of a prompt: what else it says


def draw_loss_curve(lines: Sequence[dict[str, Json]], path: Path) -> None:
    """Plot the training loss per window, the validation loss, and the loss of predicting zero."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    # A window's line has its last step, counted from 0; a validation's has the steps done.
    training = [(_number(line, "step") + 1, _number(line, "loss")) for line in lines if line.get("loss") is not None]
    validation = [(_number(line, "step"), _number(line, "val_loss")) for line in lines if "val_loss" in line]
    zero = [(_number(line, "step"), _number(line, "val_zero_loss")) for line in lines if "val_zero_loss" in line]
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", linewidth=1, label="training, mean per window")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", label="validation, averaged weights")
        axes.plot(*zip(*zero, strict=True), color="grey", linestyle="--", label="validation, predicting zero")
    axes.set_title("Loss")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean squared error of the prediction")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if training or validation:
        axes.legend()
    _save(figure, path)


def draw_grid(samples: Sequence[DrawnSample], path: Path, *, title: str) -> None:
    """Draw real images above generated ones, one captioned column per sample; or prompts' images, a few in a row.

    Write the captions to a JSON file next to it.
    """
    rows = [samples[at : at + PER_ROW] for at in range(0, len(samples), PER_ROW)] if samples[0].real is None else [samples] * 2
    tallest = max(drawn.generated.shape[0] / drawn.generated.shape[1] for drawn in samples)
    captions = 1.4 if samples[0].real is not None else 0.6 + 0.8 * len(rows)  # inches of text, with the title
    size = (max(6.0, CELL_WIDTH * len(rows[0])), len(rows) * CELL_WIDTH * tallest + captions)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    fonts = fonts_for("".join(wrapped(text) for drawn in samples for text in (drawn.caption, f"[{drawn.id}]")))
    for cell in axes.flat:
        cell.set_xticks([])
        cell.set_yticks([])
    for cell in axes[-1, len(rows[-1]) :]:
        cell.set_axis_off()
    for number, row in enumerate(rows):
        for cell, drawn in zip(axes[number], row, strict=False):
            is_real = drawn.real is not None and number == 0
            cell.imshow(drawn.real if is_real else drawn.generated, interpolation="nearest")
            if drawn.real is None or is_real:
                text = "\n".join(filter(None, (_writable(drawn, fonts), _settings(drawn))))
                cell.set_title(text, fontsize=8, fontfamily=list(fonts.families), parse_math=False)
    if samples[0].real is not None:
        axes[0, 0].set_ylabel("real, decoded\nfrom the store", fontsize=9)
        axes[1, 0].set_ylabel("generated from\nits caption", fontsize=9)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)
    entries = [{"id": drawn.id, "caption": drawn.caption, **drawn.details} for drawn in samples]
    path.with_suffix(".json").write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _settings(drawn: DrawnSample) -> str:
    """Return what tells prompts of one text apart.

    >>> import numpy as np
    >>> image = np.zeros((8, 8, 3), "u1")
    >>> _settings(DrawnSample(id="default/1", real=None, generated=image, caption="", details={"seed": 7, "guidance": 2.0}))
    'seed 7, guidance 2.0'
    """
    named = ((name, drawn.details.get(name)) for name in ("seed", "guidance"))
    return ", ".join(f"{name} {value}" for name, value in named if value is not None)


def _writable(drawn: DrawnSample, fonts: Fonts) -> str:
    """Return the title of a sample: its caption, or its id if the fonts lack more than a quarter of the characters."""
    text = wrapped(drawn.caption)
    letters = [letter for letter in text if not letter.isspace()]
    num_missing = sum(letter in fonts.missing for letter in letters)
    if num_missing:
        warn_of_no_font()
    if 4 * num_missing > len(letters):
        text = wrapped(f"[{drawn.id}]")
    return "".join("?" if letter in fonts.missing else letter for letter in text)


def wrapped(text: str) -> str:
    """Wrap a caption to the width of an image and truncate it after a few lines; drop zero-width characters."""
    shown = "".join(" " if letter.isspace() else letter for letter in text if letter.isspace() or _is_shown(letter))
    wide = Text(" ".join(shown.split())).wrap(Console(), COLUMNS)
    lines = [line.plain.rstrip() for line in wide]
    if len(lines) > LINES:
        cut = lines[LINES - 1]
        while cell_len(cut) > COLUMNS - 2:
            cut = cut.rpartition(" ")[0] or cut[:-1]
        lines = [*lines[: LINES - 1], f"{cut} …"]
    return "\n".join(lines) or "(no caption)"


def _is_shown(letter: str) -> bool:
    """Return whether a character is visible: control characters, joiners and variation selectors are not."""
    return unicodedata.category(letter) not in ("Cc", "Cf", "Cs") and not 0xFE00 <= ord(letter) <= 0xFE0F


def _save(figure: Figure, path: Path) -> None:
    """Save the figure as a PNG, atomically, with the Agg backend, regardless of window system and user configuration."""
    FigureCanvasAgg(figure)
    png = io.BytesIO()
    figure.savefig(png, dpi=min(DPI, MAX_PX / max(figure.get_size_inches())), format="png")
    write_durably(path, png.getvalue())


def _number(line: dict[str, Json], field: str) -> float:
    value = line[field]
    assert isinstance(value, int | float)
    return value
