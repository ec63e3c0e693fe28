"""Edit pairs: emoji as flat drawings and in 3D, from two npm packages, and a tiny Kontext model to learn them with.

    python demo/pairs.py images OUT        OUT/flat and OUT/3d, captions beside the latter, and OUT/pairs.toml
    python demo/pairs.py model OUT         OUT/model: a VAE of these images, and everything else at random
    python demo/pairs.py judge OUT RUN     a sheet of before, drawn and true in RUN/pairs.png

`examples/runs/edit-pairs` calls them, and trains between the last two. The packages are @lobehub/fluent-emoji-flat, SVGs of
nothing but filled paths, and @lobehub/fluent-emoji-3d, WebPs; both name a file by its code points.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

PACKAGES = {"flat": "@lobehub/fluent-emoji-flat@1.1.0", "3d": "@lobehub/fluent-emoji-3d@1.1.0"}
SMOOTH = 4  # a drawing is made so many times larger, and reduced
CURVE = 6  # straight lines of a curve
PATH = re.compile(r'<path d="([^"]+)" fill="(#?\w+)"/>')
WORD = re.compile(r"[A-Za-z]|-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?")  # a command of a path, or a number
TONES = {0x1F3FB: "light skin", 0x1F3FC: "medium-light skin", 0x1F3FD: "medium skin", 0x1F3FE: "medium-dark skin"}
TONES[0x1F3FF] = "dark skin"

DATA_SET = """\
[source]
path = "3d"
references = ["flat"]
"""
PX_PER_LATENT, CHANNELS = 4, 12
TEXT_WIDTH = 64
NEAREST = 0.75  # of the drawn images are to be nearest to their own true one; others of its kind differ by the skin only
GAP_PX, HEAD_PX = 4, 76  # of the sheet: between images, and at the left for the names of the rows


def package(name: str, cache: Path) -> dict[str, bytes]:
    """Return the images of a package by their code points, such as `1f44b-1f3fd`; npm fetches it to `cache` on first use."""
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / (name.strip("@").replace("/", "-").replace("@", "-") + ".tgz")
    if not archive.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"npm is not installed, and {archive} is not there: install npm")
        subprocess.run([npm, "pack", name, "--silent"], cwd=cache, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(archive) as files:
        images = (one for one in files if one.name.endswith((".svg", ".webp")))
        return {Path(one.name).stem: read.read() for one in images if (read := files.extractfile(one)) is not None}


def outlines(path: str) -> list[list[tuple[float, float]]]:
    """Return the closed lines of an SVG path, with its curves as straight lines."""
    words, found = WORD.findall(path)[::-1], list[list[tuple[float, float]]]()
    command, now, control = "", (0.0, 0.0), (0.0, 0.0)

    def point() -> tuple[float, float]:
        first, second = float(words.pop()), float(words.pop())
        return (now[0] + first, now[1] + second) if command.islower() else (first, second)

    while words:
        if words[-1].isalpha():
            command = words.pop()
        kind, before = command.upper(), now
        if kind == "Z":
            now = found[-1][0]
            continue
        if kind in "HV":
            value = float(words.pop()) + command.islower() * now[kind == "V"]
            now = (value, now[1]) if kind == "H" else (now[0], value)
        elif kind in "ML":
            now = point()
        else:
            mirrored = (2 * now[0] - control[0], 2 * now[1] - control[1])
            first, second, end = point() if kind == "C" else mirrored, point(), point()
            for t in (n / CURVE for n in range(1, CURVE)):
                weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
                x, y = (sum(w * p[n] for w, p in zip(weights, (before, first, second, end), strict=True)) for n in (0, 1))
                found[-1].append((x, y))
            now, control = end, second
        if kind not in "CS":
            control = now
        if kind == "M":
            found.append([now])
            command = "l" if command.islower() else "L"
        else:
            found[-1].append(now)
    return found


def drawing(svg: str, side_px: int) -> Image.Image | None:
    """Return a flat emoji on white; None if it has more than filled paths, such as gradients."""
    if re.search(r"<(?!path|/?svg)|url\(", svg) or svg.count("<path") != len(PATH.findall(svg)):
        return None
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None, svg[:200]
    side = SMOOTH * side_px
    scale, image = side / max(float(box[1]), float(box[2])), Image.new("RGB", (side, side), "white")
    for path, colour in PATH.findall(svg):
        shape = Image.new("1", image.size)
        for line in outlines(path):
            part = Image.new("1", image.size)
            ImageDraw.Draw(part).polygon([(x * scale, y * scale) for x, y in line], fill=1)
            shape = ImageChops.logical_xor(shape, part)  # a line within another is a hole
        image.paste(colour, mask=shape)
    return image.reduce(SMOOTH)


def on_white(webp: bytes, side_px: int) -> Image.Image:
    """Return a 3D emoji on white."""
    with Image.open(io.BytesIO(webp)) as opened:
        emoji = opened.convert("RGBA")
    ground = Image.new("RGBA", emoji.size, "white")
    return Image.alpha_composite(ground, emoji).convert("RGB").resize((side_px, side_px), Image.Resampling.LANCZOS)


def instruction(name: str) -> str:
    """Return a pair's caption: what is to be done, and with what.

    >>> instruction("1f44b-1f3fd")
    'Make it 3D: waving hand sign, medium skin'
    """
    codes = [int(code, 16) for code in name.split("-")]
    words = [TONES.get(code) or unicodedata.name(chr(code), "").lower() for code in codes if code not in (0xFE0F, 0x200D)]
    return "Make it 3D: " + ", ".join(word for word in words if word)


def write_images(out: Path, side_px: int, cache: Path) -> None:
    """Write the pairs, those of one base emoji in one folder: `3d/1f44b/1f44b-1f3fd.png` and the same in `flat/`."""
    flat, real = (package(name, cache) for name in PACKAGES.values())
    num_pairs = 0
    for name in sorted(flat.keys() & real.keys()):
        before = drawing(flat[name].decode(), side_px)
        if before is None:
            continue
        before_path, path = (out / kind / name.partition("-")[0] / f"{name}.png" for kind in PACKAGES)
        for to, image in ((before_path, before), (path, on_white(real[name], side_px))):
            to.parent.mkdir(parents=True, exist_ok=True)
            image.save(to)
        path.with_suffix(".txt").write_text(instruction(name) + "\n", encoding="utf-8")
        num_pairs += 1
    (out / "pairs.toml").write_text(DATA_SET, encoding="utf-8")
    print(f"{num_pairs} pairs of a flat emoji and the same in 3D, {side_px} px square, in {out}")


def patch_vae(images: list[Path]) -> Any:  # noqa: ANN401 - diffusers has no types
    """Return an AutoencoderDC that needs no training: a latent pixel has the principal components of 4 by 4 px.

    Each is divided by the root of its standard deviation, which makes fine detail louder. Halvings and doublings
    only move pixels into channels and back. The decoder's last norm divides by the root mean square of a pixel's channels:
    beside the three colours there is a constant one, large enough to make that constant.
    """
    import torch
    from diffusers import AutoencoderDC

    kind: Any = AutoencoderDC
    widths, each, none = (4, 16, 64), (1, 1, 1), ((), (), ())
    vae = kind(
        latent_channels=CHANNELS,
        encoder_out_shortcut=False,
        decoder_in_shortcut=False,
        **{
            f"{half}_{field}": value
            for half in ("encoder", "decoder")
            for field, value in {
                "block_types": ("ResBlock",) * 3,
                "block_out_channels": widths,
                "layers_per_block": each,
                "qkv_multiscales": none,
            }.items()
        },
    )
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(path)) for path in images])).permute(0, 3, 1, 2) / 127.5 - 1
    colours, large = torch.eye(4, 3), 100.0
    with torch.no_grad():
        for weight in vae.parameters():
            weight.zero_()
        vae.encoder.conv_in.weight[:, :, 1, 1] = colours
        patches = vae.encoder.conv_in(pixels)
        for block in vae.encoder.down_blocks:
            patches = block(patches)
        patches = patches.permute(0, 2, 3, 1).flatten(0, 2)  # [N, 64]
        mean = patches.mean(dim=0)
        values, vectors = torch.linalg.eigh((patches - mean).T.cov())
        std, axes = values.flip(0)[:CHANNELS].sqrt(), vectors.flip(1)[:, :CHANNELS]
        scales = std.sqrt()
        vae.encoder.conv_out.weight[:, :, 1, 1] = (axes / scales).T
        vae.encoder.conv_out.bias[:] = -(mean @ axes) / scales
        vae.decoder.conv_in.weight[:, :, 1, 1] = axes * scales
        vae.decoder.conv_in.bias[:] = mean
        vae.decoder.conv_in.bias[48:] = large
        vae.decoder.norm_out.weight[:] = large / 2  # the root mean square of a pixel's four channels
        vae.decoder.norm_out.bias[:] = 2  # what follows takes what is above 0
        vae.decoder.conv_out.weight[:, :, 1, 1] = colours.T
        vae.decoder.conv_out.bias[:] = -2
        vae.register_to_config(scaling_factor=float(std.mean().rsqrt()))
    return vae


def write_model(out: Path) -> None:
    """Write the model folder: `transformer/` has only a configuration, since training starts from random weights."""
    from bucketline.command_line import hide_warnings_of_torchao

    hide_warnings_of_torchao()
    import tokenizers
    import torch
    import transformers
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    torch.manual_seed(0)
    model = out / "model"
    patch_vae(sorted((out).glob("*/*/*.png"))[::8]).save_pretrained(model / "vae")
    captions = [path.read_text(encoding="utf-8").strip() for path in sorted((out / "3d").glob("*/*.txt"))]
    words = sorted({word for caption in captions for word in re.findall(r"\w+|[^\w\s]", caption)})
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    ends = ["<|startoftext|>", "<|endoftext|>"]
    clip = transformers.CLIPTokenizer(
        vocab={word: n for n, word in enumerate([*letters, *(f"{letter}</w>" for letter in letters), *ends])},
        merges=[],
        model_max_length=77,
    )
    clip.save_pretrained(model / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": len(clip) - 2, "eos_token_id": len(clip) - 1, "pad_token_id": len(clip) - 1}
    text: Any = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=len(clip), **sizes, **special))
    text.save_pretrained(model / "text_encoder")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{word}", -4.0) for word in words)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), tokenizers.pre_tokenizers.Metaspace()]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    t5 = transformers.T5TokenizerFast(tokenizer_object=backend, extra_ids=0, model_max_length=32)
    t5.save_pretrained(model / "tokenizer_2")
    widths = {"d_model": TEXT_WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    encoder: Any = transformers.T5EncoderModel(transformers.T5Config(vocab_size=len(t5), **widths))
    encoder.save_pretrained(model / "text_encoder_2")
    kind: Any = FluxTransformer2DModel
    transformer = kind(
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=2,
        attention_head_dim=64,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 28, 28),
    )
    transformer.save_config(model / "transformer")
    scheduler: Any = FlowMatchEulerDiscreteScheduler
    scheduler().save_pretrained(model / "scheduler")
    parts = {
        "vae": ["diffusers", "AutoencoderDC"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    index = {"_class_name": "FluxKontextPipeline", **parts}
    (model / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    num_parameters = sum(one.numel() for one in transformer.parameters())
    print(f"{model}: a transformer (Flux.1 Kontext) of {num_parameters:,} parameters to train")


def judge(out: Path, run: Path) -> float:
    """Write the sheet, and return the share of the drawn images that are nearer to their own true one than to any other."""
    ids = [str(entry["id"]) for entry in json.loads((run / "images.json").read_text(encoding="utf-8"))]
    newest = max((run / "images").iterdir())
    rows = {
        "before": [Image.open(out / "flat" / one).convert("RGB") for one in ids],
        "drawn": [Image.open(path).convert("RGB") for path in sorted(newest.glob("*.png"))],
        "true": [Image.open(out / "3d" / one).convert("RGB") for one in ids],
    }
    side = rows["true"][0].width
    step, height = side + GAP_PX, 3 * (side + GAP_PX)
    half = -(-len(ids) // 2)
    sheet = Image.new("RGB", (HEAD_PX + half * step, 2 * height + GAP_PX), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    for row, (name, images) in enumerate(rows.items()):
        for part in (0, 1):
            top = GAP_PX + part * height + row * step
            pen.text((GAP_PX, top + side / 2), name, fill="black", font=font, anchor="lm")
            for column, image in enumerate(images[part * half : (part + 1) * half]):
                sheet.paste(image, (HEAD_PX + column * step, top))
    sheet.save(run / "pairs.png")
    drawn, true = (np.stack([np.asarray(image, dtype=np.float32) for image in rows[name]]) for name in ("drawn", "true"))
    errors = np.square(drawn[:, None] - true[None]).mean(axis=(2, 3, 4))  # [drawn, true]
    right = int((errors.argmin(axis=1) == np.arange(len(ids))).sum())
    print(f"{right} of {len(ids)} drawn images are nearest to their own true one, of held-out pairs; expected {NEAREST:.0%}")
    print(f"Before, drawn and true:\n  {(run / 'pairs.png').resolve().as_uri()}")
    return right / len(ids)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("images", "model", "judge"):
        command = commands.add_parser(name)
        command.add_argument("out", type=Path)
        if name == "images":
            command.add_argument("--side-px", type=int, default=64)
            command.add_argument("--cache", type=Path, default=Path(__file__).parent.parent / "build" / "emoji")
        if name == "judge":
            command.add_argument("run", type=Path)
    given = parser.parse_args()
    if given.command == "judge":
        return 0 if judge(given.out, given.run) >= NEAREST else 1
    if given.command == "model":
        write_model(given.out)
    else:
        write_images(given.out, given.side_px, given.cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
