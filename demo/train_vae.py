"""Train or measure the demo's VAE: a small AutoencoderKL with 8x downsampling and 4 latent channels.

    python demo/train_vae.py                # train from scratch, about half an hour on one core
    python demo/train_vae.py --evaluate     # measure the shipped one, about a minute

The training data is the demo's photographs that are not held out, and the colour images of the npm
package @lobehub/fluent-emoji-3d (MIT), fetched by `npm pack`. The held-out photographs are only measured.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import platform
import random
import shutil
import subprocess
import tarfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import diffusers
import numpy as np
import torch
from catalogue import PHOTOGRAPHS, Photograph
from diffusers import AutoencoderKL
from photographs import VAL_FRACTION, held_out_photographs, open_source
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.nn import functional
from vae_quality import Vae, measure, reconstructions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEMO = Path(__file__).resolve().parent
SHIPPED = DEMO / "vae"
EMOJI_PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0"
PIXELS_PER_STEP = 8 * 64 * 64
"""The area of a batch in pixels, for any shape: 8 squares of 64 px, or 2 of 128 px."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The hyperparameters of a training run; stored in RECORD.json."""

    steps: int = 8_000
    seed: int = 0
    peak_lr: float = 1.2e-3
    warmup_steps: int = 200
    ema_decay: float = 0.998
    kl_weight: float = 1e-3  # on the KL per latent element, in nats; the other terms are means over pixels
    kl_ramp_steps: int = 1_000
    gradient_weight: float = 0.5
    colour_weight: float = 0.25  # without it, reconstructions were still grey at 1,600 steps
    export_every_steps: int = 1_600


def new_vae() -> Vae:
    """Return the untrained model: 1.9 million parameters, so that its fp16 weights stay under 4 MB."""
    kind: Vae = AutoencoderKL
    return kind(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 96),
        layers_per_block=1,
        norm_num_groups=16,
        mid_block_add_attention=False,
        sample_size=128,
    )


def emoji(cache: Path) -> list[Image.Image]:
    """Return the package's images, RGBA, 256 px square; npm fetches them to `cache` on first use."""
    cache.mkdir(parents=True, exist_ok=True)
    archives = sorted(cache.glob("lobehub-fluent-emoji-3d-*.tgz"))
    if not archives:
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"npm is not installed, and {EMOJI_PACKAGE} is not in {cache}: install npm")
        subprocess.run([npm, "pack", EMOJI_PACKAGE, "--silent"], cwd=cache, check=True, stdout=subprocess.DEVNULL)
        archives = sorted(cache.glob("lobehub-fluent-emoji-3d-*.tgz"))
    images = []
    with tarfile.open(archives[-1]) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".webp") else None
            if file is not None:
                images.append(Image.open(io.BytesIO(file.read())).convert("RGBA"))
    return images


class Crops:
    """Endless random training images: regions of photographs, and emoji on plain or photographic backgrounds."""

    def __init__(self, photographs: Sequence[Image.Image], stickers: Sequence[Image.Image], seed: int) -> None:
        """Draw from RGB photographs and RGBA stickers; the seed determines the sequence."""
        self._photographs = photographs
        self._stickers = stickers
        self._random = random.Random(seed)  # noqa: S311  (images, not secrets)

    def batch(self) -> Tensor:
        """Return a random batch: float32 [B, 3, H, W] in -1..1, of a random shape, H and W multiples of 8 px."""
        height_px, width_px = self._random.choice([(64, 64)] * 5 + [(96, 64), (64, 96), (96, 96), (128, 128)])
        count = max(2, PIXELS_PER_STEP // (height_px * width_px))
        images = [self._image(width_px, height_px) for _ in range(count)]
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        return pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0).contiguous()

    def _image(self, width_px: int, height_px: int) -> Image.Image:
        region = self.region(width_px, height_px)
        if self._random.random() < 0.4:
            region = self._with_sticker(region)
        return self._recoloured(region)

    def region(self, width_px: int, height_px: int) -> Image.Image:
        """Cut a random region, from about the size of the crop up to the full photograph, and resize it."""
        photograph = self._random.choice(self._photographs)
        largest = min(photograph.width / width_px, photograph.height / height_px)
        zoom = math.exp(self._random.uniform(math.log(0.9), math.log(max(largest, 1.0)))) if largest > 0.9 else largest
        box_width, box_height = zoom * width_px, zoom * height_px
        left = self._random.uniform(0, max(photograph.width - box_width, 0))
        top = self._random.uniform(0, max(photograph.height - box_height, 0))
        box = (left, top, min(left + box_width, photograph.width), min(top + box_height, photograph.height))
        return photograph.resize((width_px, height_px), Image.Resampling.BICUBIC, box=box)

    def _with_sticker(self, ground: Image.Image) -> Image.Image:
        if self._random.random() < 0.5:
            first, second = (Image.new("RGB", ground.size, self._colour()) for _ in range(2))
            ramp = Image.linear_gradient("L").rotate(self._random.choice((0, 90))).resize(ground.size)
            ground = Image.composite(first, second, ramp)
        sticker = self._random.choice(self._stickers)
        side = int(max(ground.size) * math.exp(self._random.uniform(math.log(0.5), math.log(2.2))))
        sticker = sticker.resize((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
        left = self._random.randint(-side // 2, ground.width - side // 2)
        top = self._random.randint(-side // 2, ground.height - side // 2)
        ground.paste(sticker, (left, top), sticker)
        return ground

    def _colour(self) -> tuple[int, int, int]:
        return self._random.randrange(256), self._random.randrange(256), self._random.randrange(256)

    def _recoloured(self, image: Image.Image) -> Image.Image:
        if self._random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self._random.random() < 0.15:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        if self._random.random() < 0.2:
            bands = list(image.split())
            self._random.shuffle(bands)
            image = Image.merge("RGB", bands)
        if self._random.random() < 0.4:
            image = ImageEnhance.Color(image).enhance(self._random.uniform(0.0, 1.6))
            image = ImageEnhance.Brightness(image).enhance(self._random.uniform(0.5, 1.3))
        return image


def gradients(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences of neighbouring pixels of [B, 3, H, W], vertically and horizontally."""
    return pixels[:, :, 1:] - pixels[:, :, :-1], pixels[:, :, :, 1:] - pixels[:, :, :, :-1]


def colour_differences(pixels: Tensor) -> Tensor:
    """Return red minus green and blue minus green, [B, 2, H, W]."""
    return pixels[:, 0::2] - pixels[:, 1:2]


def distance(output: Tensor, target: Tensor, recipe: Recipe) -> Tensor:
    """Return the loss between two float32 batches [B, 3, H, W]: squared error, gradients, and absolute error at four scales."""
    loss = 2.0 * functional.mse_loss(output, target)
    for a, b in zip(gradients(output), gradients(target), strict=True):
        loss = loss + recipe.gradient_weight * functional.l1_loss(a, b)
    for _ in range(4):
        colour_error = functional.l1_loss(colour_differences(output), colour_differences(target))
        loss = loss + functional.l1_loss(output, target) + recipe.colour_weight * colour_error
        output, target = functional.avg_pool2d(output, 2), functional.avg_pool2d(target, 2)
    return loss


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate: linear warm-up, then cosine decay to zero."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.peak_lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def train(model: Vae, recipe: Recipe, crops: Crops) -> Iterator[tuple[int, Vae]]:
    """Train the model; yield (steps done, averaged model) every `export_every_steps` and at the end."""
    averaged = new_vae().requires_grad_(False).eval()
    averaged.load_state_dict(model.state_dict())
    weights, averages = list(model.parameters()), list(averaged.parameters())
    optimizer = torch.optim.AdamW(weights, lr=recipe.peak_lr, betas=(0.9, 0.99), weight_decay=1e-4)
    started, shown = time.monotonic(), 0.0
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        target = crops.batch()
        with torch.autocast("cpu", torch.bfloat16):
            posterior = model.encode(target).latent_dist
            output = model.decode(posterior.sample()).sample
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
        kl_weight = recipe.kl_weight * min(1.0, step / recipe.kl_ramp_steps)
        loss = distance(output.float(), target, recipe) + kl_weight * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        torch._foreach_lerp_(averages, weights, 1.0 - min(recipe.ema_decay, (step + 1) / (step + 10)))
        shown = 0.98 * shown + 0.02 * float(loss.detach())
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started
            print(f"{step + 1} steps, {seconds:.0f} s, loss {shown:.4f}, KL {float(kl.detach()):.2f} nats", flush=True)
        if (step + 1) % recipe.export_every_steps == 0 or step + 1 == recipe.steps:
            yield step + 1, averaged


@torch.no_grad()
def scaling_factor(vae: Vae, photographs: Sequence[Image.Image], seed: int) -> float:
    """Return 1 / the standard deviation of sampled latents of the training photographs, about 128 px square."""
    torch.manual_seed(seed)
    crops = Crops(photographs, (), seed)
    latents = []
    for _ in range(64):
        images = [np.asarray(crops.region(128, 128)) for _ in range(4)]
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        latents.append(vae.encode(pixels).latent_dist.sample())
    return 1.0 / float(torch.cat(latents).std())


def export(vae: Vae, folder: Path, factor: float) -> Vae:
    """Save the model with fp16 weights, and return it as a user loads it, in fp32."""
    half = new_vae()
    half.load_state_dict(vae.state_dict())
    half.register_to_config(scaling_factor=round(factor, 5))
    half.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    return load(folder)


def load(folder: Path) -> Vae:
    """Load a saved model in fp32 for measuring."""
    kind: Vae = AutoencoderKL
    return kind.from_pretrained(folder, torch_dtype=torch.float32).eval()


def figures(vae: Vae, folder: Path, held_out: Sequence[Photograph]) -> dict[str, object]:
    """Return the model's measurements and properties."""
    names = {photograph.name for photograph in held_out}
    seen = [photograph for photograph in PHOTOGRAPHS if photograph.name not in names]
    return {
        "psnr_unseen_db": measure(vae, held_out),
        "psnr_training_db": measure(vae, seen),
        "val_fraction": VAL_FRACTION,
        "num_parameters": sum(parameter.numel() for parameter in vae.parameters()),
        "weights_bytes": (folder / "diffusion_pytorch_model.safetensors").stat().st_size,
        "weights_dtype": "F16",
        "scaling_factor": vae.config.scaling_factor,
    }


def write_record(
    folder: Path, measured: dict[str, object], earlier: dict[str, object] | None, recipe: Recipe, progress: tuple[int, float]
) -> None:
    """Write RECORD.json: the measurements, the recipe, and the record of the VAE that training continued from."""
    steps, seconds = progress
    record = measured | {
        "steps_done": steps,
        "training_seconds": round(seconds),
        "threads": torch.get_num_threads(),
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "emoji": EMOJI_PACKAGE,
        },
        "went_on_from": earlier,
    }
    (folder / "RECORD.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="only measure the VAE in --out")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="the VAE's folder (default: demo/vae)")
    parser.add_argument("--from", dest="start", type=Path, help="start from this VAE's weights instead of random ones")
    parser.add_argument("--cache", type=Path, default=DEMO.parent / "build" / "emoji", help="folder for npm's archive")
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held_out = held_out_photographs()
    if options.evaluate:
        print(json.dumps(figures(load(options.out), options.out, held_out), indent=2))
        return
    recipe = Recipe(steps=options.steps, seed=options.seed)
    training = [image for photograph in PHOTOGRAPHS if photograph not in held_out for image in open_source(photograph)]
    training = [image.convert("RGB") for image in training]
    crops = Crops(training, emoji(options.cache), recipe.seed)
    started = time.monotonic()
    torch.manual_seed(recipe.seed)
    model, earlier = new_vae(), None
    if options.start is not None:
        model.load_state_dict(load(options.start).state_dict())
        earlier = json.loads((options.start / "RECORD.json").read_text())
    for steps, averaged in train(model, recipe, crops):
        seconds = time.monotonic() - started
        vae = export(averaged, options.out, scaling_factor(averaged, training, recipe.seed))
        measured = figures(vae, options.out, held_out)
        write_record(options.out, measured, earlier, recipe, (steps, seconds))
        reconstructions(vae, held_out).save(options.out / "reconstructions.png", optimize=True)
        print(json.dumps(measured["psnr_unseen_db"]), flush=True)


if __name__ == "__main__":
    main()
