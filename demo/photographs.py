"""Write the demo's source folder: real photographs and crops of them, each with its captions.

    python demo/photographs.py OUT

The photographs are files of the installed scikit-image and scikit-learn wheels; nothing is downloaded.
OUT has one folder per photograph, with mixed sizes, aspect ratios, modes and formats like a real data set.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from catalogue import PHOTOGRAPHS, Crop, Form, Photograph, Saved
from PIL import ExifTags, Image, ImageDraw

from bucketline.ingest.rules import SplitBy, held_out

if TYPE_CHECKING:
    from collections.abc import Iterator

VAL_FRACTION = 0.2
"""The demo packs with `--val-fraction 0.2:folder`, which holds out cat, clock, rocket and tissue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """An image file to write."""

    stem: str
    image: Image.Image
    captions: tuple[str, ...]
    form: Form


def held_out_photographs() -> tuple[Photograph, ...]:
    """Return the photographs whose folders are held out for validation."""
    return tuple(
        photograph
        for photograph in PHOTOGRAPHS
        if held_out(f"{photograph.name}/whole.{photograph.saved}", VAL_FRACTION, SplitBy.FOLDER)
    )


def find_in_wheel(file: str) -> Path:
    """Return the path of a wheel's data file, such as `skimage/data/coffee.png`, without importing the package."""
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed, and {file} is a part of it: run `make env`")
    path = Path(spec.submodule_search_locations[0]) / rest
    if not path.is_file():
        raise SystemExit(f"{path} is not there: this release of {package} no longer carries {rest}")
    return path


def open_source(photograph: Photograph) -> list[Image.Image]:
    """Return a photograph's decoded files, in their original modes."""
    images: list[Image.Image] = []
    for file in photograph.files:
        with Image.open(find_in_wheel(file)) as image:
            image.load()
            image.info.clear()
            images.append(image)
    return images


def cut(source: Image.Image, crop: Crop) -> Image.Image:
    """Cut a crop out of its photograph and convert it to the mode of its form; upright."""
    top, left, height, width = crop.box_px
    if top + height > source.height or left + width > source.width:
        raise ValueError(f"crop {crop.name}: box {crop.box_px} leaves its image of {source.height}x{source.width} px")
    part = source.crop((left, top, left + width, top + height))
    match crop.form:
        case Form.CUT_OUT:
            outside = Image.new("L", part.size, 0)
            ImageDraw.Draw(outside).ellipse((0, 0, width - 1, height - 1), fill=255)
            part.putalpha(outside)
        case Form.PALETTE:
            part = part.quantize(colors=64, dither=Image.Dither.NONE)
        case Form.GREY:
            part = part.convert("L")
        case Form.AS_IS | Form.TURNED:
            pass
    return part


def images(photograph: Photograph) -> Iterator[ImageFile]:
    """Yield a photograph's full views, then its crops; upright."""
    sources = open_source(photograph)
    for view, (source, captions) in enumerate(zip(sources, photograph.wholes, strict=True), start=1):
        stem = "whole" if len(sources) == 1 else f"whole_{view}"
        yield ImageFile(stem=stem, image=source, captions=captions, form=Form.AS_IS)
    for crop in photograph.crops:
        yield ImageFile(stem=crop.name, image=cut(sources[crop.view], crop), captions=crop.captions, form=crop.form)


def write_image(image: ImageFile, folder: Path, saved: Saved) -> Path:
    """Write an image and its captions, one per line; forms that JPEG does not support are saved as PNG."""
    if image.form in {Form.CUT_OUT, Form.PALETTE}:
        saved = Saved.PNG
    path = folder / f"{image.stem}.{saved}"
    pixels, exif = image.image, Image.Exif()
    if image.form is Form.TURNED:
        pixels = pixels.transpose(Image.Transpose.ROTATE_90)
        exif[ExifTags.Base.Orientation] = 6  # "rotate by 90 degrees clockwise to display"
    if saved is Saved.JPEG:
        pixels.save(path, quality=92, exif=exif)
    else:
        pixels.save(path, compress_level=6)
    path.with_suffix(".txt").write_text("\n".join(image.captions) + "\n", encoding="utf-8")
    return path


def write_folder(out: Path) -> int:
    """Write the complete source folder; return the number of images."""
    num_images = 0
    for photograph in PHOTOGRAPHS:
        folder = out / photograph.name
        folder.mkdir(parents=True, exist_ok=True)
        for image in images(photograph):
            write_image(image, folder, photograph.saved)
            num_images += 1
    return num_images


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, new or empty")
    out: Path = parser.parse_args().out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out} exists and is not an empty folder: name a new one, or remove it")
    num_images = write_folder(out)
    names = ", ".join(photograph.name for photograph in held_out_photographs())
    print(f"{num_images} images of {len(PHOTOGRAPHS)} photographs, whole and in crops, in {out}")
    print(f"  folders that --val-fraction {VAL_FRACTION}:folder holds out for validation: {names}")


if __name__ == "__main__":
    main()
