"""Handwritten digits by their classes, and how many of the drawn ones are what was asked.

A run whose images a classifier can count; `demo/run_digits` is all of it.

    python demo/digits.py images OUT    scikit-learn's 1,797 digits as images, with their classes
    python demo/digits.py model OUT     a model folder: the demo's VAE, and a small class-conditional DiT to train
    python demo/digits.py prompts OUT   eight prompts for each class
    python demo/digits.py judge RUN     a sheet of the drawn digits, and the share that a classifier takes for what was asked

The digits are those of the installed scikit-learn wheel; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIDE_PX, MARGIN_PX = 32, 2  # of an image, and around its digit
EACH = 8  # drawn digits of a class
GUIDANCE = 3.0  # by the pipeline's 4, the digits of a class are much alike
GAP_PX, HEAD_PX = 2, 28  # of the sheet: between the digits, and above them, for what was asked
LEAST = 0.9  # of them are to be recognised
CLASSES = range(10)


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the digits, `[1797, 8, 8]` from 0 (paper) to 255 (ink), and their classes, `[1797]`."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.round(found.images * (255 / 16)).astype(np.uint8), found.target


def as_image(digit: NDArray[np.uint8]) -> Image.Image:
    """Return a digit, `[8, 8]`, white on black, enlarged with smooth edges."""
    image, side = Image.new("L", (SIDE_PX, SIDE_PX)), SIDE_PX - 2 * MARGIN_PX
    image.paste(Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC), (MARGIN_PX, MARGIN_PX))
    return image


def as_digit(image: Image.Image) -> NDArray[np.uint8]:
    """Return what `as_image` was made from, `[8, 8]`."""
    end = SIDE_PX - MARGIN_PX
    return np.asarray(image.convert("L").crop((MARGIN_PX, MARGIN_PX, end, end)).resize((8, 8), Image.Resampling.BOX))


def write_images(out: Path) -> None:
    """Write each digit into the folder of its class, and the classes as captions."""
    with_lines = []
    for number, (digit, label) in enumerate(zip(*digits(), strict=True)):
        path = out / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        as_image(digit).save(path)
        with_lines.append(json.dumps({"file_name": str(path.relative_to(out)), "text": str(label)}))
    (out / "metadata.jsonl").write_text("\n".join(with_lines) + "\n", encoding="utf-8")


def write_model(out: Path) -> None:
    """Write the model folder: `transformer/` has only a configuration, since training starts from random weights."""
    from model import write_vae

    from bucketline.command_line import hide_warnings_of_torchao

    hide_warnings_of_torchao()
    from diffusers import DDIMScheduler, DiTTransformer2DModel

    write_vae(out)
    dit: Any = DiTTransformer2DModel
    model = dit(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        sample_size=SIDE_PX // 8,
        patch_size=1,
        num_embeds_ada_norm=len(CLASSES),
        norm_elementwise_affine=False,
    )
    model.save_config(out / "transformer")
    scheduler: Any = DDIMScheduler
    scheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False).save_pretrained(
        out / "scheduler"
    )
    index = {
        "_class_name": "DiTPipeline",
        "id2label": {str(label): str(label) for label in CLASSES},
        "scheduler": ["diffusers", "DDIMScheduler"],
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: a DiT of {sum(parameter.numel() for parameter in model.parameters()):,} parameters to train")


def write_prompts(out: Path) -> None:
    """Write a line for each digit that is to be drawn: eight of each class, each with a seed of its own."""
    drawn = [(label, n) for n in range(EACH) for label in CLASSES]
    lines = [json.dumps({"prompt": str(label), "seed": label * EACH + n, "guidance": GUIDANCE}) for label, n in drawn]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def judge(run: Path) -> float:
    """Write `digits.png`, a column for each class, and return the share of the drawn digits that is recognised.

    The classifier has seen the real digits only, not the VAE and not the model.
    """
    from sklearn.svm import SVC

    values, labels = digits()
    classifier = SVC(gamma=0.001, C=10).fit(values.reshape(len(values), -1) / 16, labels)
    asked = [int(drawn["caption"]) for drawn in json.loads((run / "images.json").read_text(encoding="utf-8"))]
    newest = max((run / "images").iterdir())
    images = [Image.open(path).convert("RGB") for path in sorted(newest.glob("*.png"))]
    found = classifier.predict(np.stack([as_digit(image).ravel() / 16 for image in images]))
    step = SIDE_PX + GAP_PX
    sheet = Image.new("RGB", (step * len(CLASSES) + GAP_PX, step * EACH + GAP_PX), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, len(CLASSES))
        sheet.paste(image, (GAP_PX + column * step, GAP_PX + row * step))
    sheet = sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.BICUBIC)
    sheet = ImageOps.pad(sheet, (sheet.width, sheet.height + HEAD_PX), color="white", centering=(0, 1))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(HEAD_PX * 0.6)
    for label in CLASSES:
        pen.text(((2 * label + 1) * step, HEAD_PX / 2), str(label), fill="black", font=font, anchor="mm")
    sheet.save(run / "digits.png")
    right = int((found == np.array(asked)).sum())
    print(f"{right} of {len(asked)} drawn digits are what was asked, by a classifier of the real ones; expected {LEAST:.0%}")
    print(f"What the model drew, a column for each digit:\n  {(run / 'digits.png').resolve().as_uri()}")
    return right / len(asked)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("images", "model", "prompts", "judge"))
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    if given.what == "judge":
        share = judge(given.path)
        return 0 if share >= LEAST else 1
    {"images": write_images, "model": write_model, "prompts": write_prompts}[given.what](given.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
