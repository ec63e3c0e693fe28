"""The demo's training: a small transformer learns six photographs by heart, and draws each by its caption.

python demo/subjects.py images OUT         the six photographs, square, a caption next to each
python demo/subjects.py model MODEL OUT    a model folder: MODEL's VAE and text encoder, and a small PixArt to train
python demo/subjects.py judge RUN IMAGES   real | drawn in RUN/subjects.png; exit 1 if the drawn ones are unlike the real
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from catalogue import PHOTOGRAPHS
from photographs import open_source
from PIL import Image, ImageDraw, ImageFont
from vae_quality import psnr_db

CAPTIONS = {
    "astronaut": "An astronaut in orange",
    "cat": "A tabby cat",
    "china": "A Chinese pavilion by a lake",
    "coffee": "A cup of coffee",
    "flower": "An orange dahlia",
    "motorcycle": "A red motorcycle",
}
SIDE_PX = 256
COMPARED_PX = 64  # finer detail is lost in the VAE, whatever the model has learned
LEAST_DB = 20.0  # PSNR of each drawn image to its photograph; the VAE by itself: 22 to 29
GAP_PX, TEXT_PX, LINE_PX = 8, 16, 26  # of the sheet
PER_ROW = 2  # pairs


def write_images(out: Path) -> None:
    """Write the middle square of each photograph, and its caption."""
    out.mkdir(parents=True, exist_ok=True)
    for photograph in PHOTOGRAPHS:
        if caption := CAPTIONS.get(photograph.name):
            image = open_source(photograph)[0].convert("RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.crop((left, top, left + side, top + side))
            square.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS).save(out / f"{photograph.name}.png")
            (out / f"{photograph.name}.txt").write_text(caption + "\n", encoding="utf-8")
    print(f"{len(CAPTIONS)} photographs of {SIDE_PX}x{SIDE_PX} px with a caption each, in {out}")


def write_model(model: Path, out: Path) -> None:
    """Write the model folder: `transformer/` has only a configuration, since training starts from random weights."""
    from bucketline.command_line import hide_warnings_of_torchao

    hide_warnings_of_torchao()
    from diffusers import FlowMatchEulerDiscreteScheduler, PixArtTransformer2DModel

    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.copytree(model / part, out / part, dirs_exist_ok=True)
    kind: Any = PixArtTransformer2DModel
    transformer = kind(
        num_attention_heads=4,
        attention_head_dim=64,
        num_layers=4,
        cross_attention_dim=256,
        in_channels=4,
        out_channels=4,
        sample_size=SIDE_PX // 8,
        patch_size=4,
        caption_channels=json.loads((out / "text_encoder" / "config.json").read_text(encoding="utf-8"))["hidden_size"],
        use_additional_conditions=False,
        # Its position embeddings are smooth. Ten times the frequencies tell neighbouring patches apart from the first step on:
        # after 420 steps the squared error of the drawn latents is 0.01; by the default 0.2, and the images are blots.
        interpolation_scale=0.1,
    )
    transformer.save_config(out / "transformer")
    scheduler: Any = FlowMatchEulerDiscreteScheduler
    scheduler().save_pretrained(out / "scheduler")
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    index = {part: index[part] for part in ("vae", "text_encoder", "tokenizer")} | {
        "_class_name": "PixArtSigmaPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: a transformer (PixArt) of {sum(one.numel() for one in transformer.parameters()):,} parameters to train")


def judge(run: Path, folder: Path) -> bool:
    """Write `subjects.png`, real | drawn with the prompt below, and return whether each drawn image is like its photograph.

    Each must be nearest to the photograph of its prompt, and at least `LEAST_DB` close to it.
    """
    names = {caption: name for name, caption in CAPTIONS.items()}
    prompts = [str(entry["caption"]) for entry in json.loads((run / "images.json").read_text(encoding="utf-8"))]
    newest = max((run / "images").iterdir())
    drawn = dict(zip(prompts, (Image.open(path).convert("RGB") for path in sorted(newest.glob("*.png"))), strict=True))
    real = {name: Image.open(folder / f"{name}.png").convert("RGB") for name in CAPTIONS}
    small = {name: image.resize((COMPARED_PX, COMPARED_PX), Image.Resampling.BOX) for name, image in real.items()}
    num_right, likeness = 0, {}
    for prompt, image in drawn.items():
        own = image.resize((COMPARED_PX, COMPARED_PX), Image.Resampling.BOX)
        found = {name: psnr_db(own, other) for name, other in small.items()}
        likeness[prompt] = found[names[prompt]]
        num_right += max(found, key=found.__getitem__) == names[prompt]
    contact_sheet([(real[names[prompt]], image, prompt) for prompt, image in drawn.items()]).save(run / "subjects.png")
    least = min(likeness, key=likeness.__getitem__)
    print(f"{num_right} of {len(drawn)} drawn images are nearest to the photograph of their prompt; expected {len(CAPTIONS)}")
    print(f'the least alike is "{least}": PSNR {likeness[least]:.1f} dB at {COMPARED_PX} px; expected {LEAST_DB:.0f} or more')
    return num_right == len(drawn) == len(CAPTIONS) and likeness[least] >= LEAST_DB


def contact_sheet(rows: list[tuple[Image.Image, Image.Image, str]]) -> Image.Image:
    """Return pairs of a real and a drawn image, what they are written below."""
    font = ImageFont.load_default(TEXT_PX)
    width, height = 2 * SIDE_PX + 3 * GAP_PX, SIDE_PX + LINE_PX + GAP_PX
    sheet = Image.new("RGB", (PER_ROW * width, -(-len(rows) // PER_ROW) * height + GAP_PX), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (real, drawn, prompt) in enumerate(rows):
        row, column = divmod(number, PER_ROW)
        top = row * height + GAP_PX
        for at, (image, text) in enumerate(((real, "real"), (drawn, f"drawn: {prompt}"))):
            left = column * width + GAP_PX + at * (SIDE_PX + GAP_PX)
            sheet.paste(image, (left, top))
            pen.text((left, top + SIDE_PX + 2), text, fill="black", font=font)
    return sheet


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in {"images": ["out"], "model": ["model", "out"], "judge": ["run", "images"]}.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
    given = parser.parse_args()
    if given.command == "judge":
        return 0 if judge(given.run, given.images) else 1
    if given.command == "model":
        write_model(given.model, given.out)
    else:
        write_images(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
