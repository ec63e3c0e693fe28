"""Contact sheet of a scan: which images to show, their thumbnails with the crop drawn in, and the checks of its path."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from bucketline.errors import UsageError
from bucketline.files.atomic_folder import refuse_existing
from bucketline.files.paths import overlap
from bucketline.ingest.images.bucket_grid import Grid, Size
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.decode import decode_image
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits
from bucketline.ingest.progress import counting_progress
from bucketline.ingest.sheet.page import SheetSection, Thumbnail
from bucketline.pages.image_files import jpeg
from bucketline.store.format.manifest import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.images.geometry import Placement
    from bucketline.ingest.sources.source import Listing, Source, SourceItem

MAX_PER_BUCKET = 24
MAX_IN_ALL = 2000  # about 25 MB of thumbnails; with more than 83 buckets, each shows fewer than MAX_PER_BUCKET
_THUMBNAIL_PX = 240  # the longer side
NARROWEST_PX = 10  # the shorter side; a narrower image is drawn wider than it is
_LINE = (255, 96, 0)  # of the crop; orange is rare in photographs, and visible on black and on white


@dataclass(frozen=True, slots=True, kw_only=True)
class Cropped:
    """An image of the source and where its crop is."""

    id: str
    placement: Placement


def refuse_sheet(path: Path, local_paths: Iterable[Path]) -> None:
    """Check that a sheet can be written to `path`.

    Raises:
        UsageError: if it exists, its folder does not, it is in the source or in a store, or its name does not end in .html.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: the sheet is written as HTML; name a file that ends in .html")
    if inside := next((source for source in local_paths if overlap(path, source)), None):
        raise UsageError(f"{path} is in the source {inside}; choose a place outside it")
    if store := next((folder for folder in path.resolve().parents if (folder / MANIFEST).is_file()), None):
        raise UsageError(f"{path} is in the store {store}; choose a place outside it")
    refuse_existing(path, "file")


def sections_of(
    source: Source, listing: Listing, images: Mapping[str, Sequence[Cropped]], room: WorkLimits, num_sources: int = 1
) -> list[SheetSection]:
    """Decode the images that lose most, and return the sections by the largest loss of an image, largest first.

    `num_sources`: of the page, which share its MAX_IN_ALL images.

    Raises:
        SourceError: if the source changed during the scan.
    """
    chosen = worst(images, MAX_IN_ALL // num_sources)
    placements = {image.id: image.placement for shown in chosen.values() for image in shown}
    thumbnails: dict[str, Thumbnail] = {}

    def look(item: SourceItem) -> Thumbnail:
        return _thumbnail(source, item, placements[item.id])

    items = [item for item in listing.items if item.id in placements]  # in the listing's order, which a stream needs
    with (
        counting_progress("sheet", len(items)) as on_image,
        OrderedPool(source.in_turn(items), look, lambda _: 0, room) as ahead,
    ):
        for item, future in ahead.results(lambda: None):
            thumbnails[item.id] = future.result()
            on_image()
    sections = [_section(name, images[name], [thumbnails[image.id] for image in shown]) for name, shown in chosen.items()]
    return sorted(sections, key=lambda section: (-section.most, -section.mean, section.name))


def _section(name: str, images: Sequence[Cropped], shown: list[Thumbnail]) -> SheetSection:
    losses = [image.placement.cropped_away for image in images]
    return SheetSection(name=name, images=len(images), mean=sum(losses) / len(losses), most=max(losses), shown=shown)


def worst(images: Mapping[str, Iterable[Cropped]], max_in_all: int) -> dict[str, list[Cropped]]:
    """Return of each bucket the images that lose most, largest loss first, at most MAX_PER_BUCKET and about `max_in_all`."""
    most = min(MAX_PER_BUCKET, max(1, max_in_all // max(1, len(images))))
    return {
        bucket: heapq.nsmallest(most, cropped, key=lambda image: (-image.placement.cropped_away, image.id))
        for bucket, cropped in images.items()
    }


def _thumbnail(source: Source, item: SourceItem, placement: Placement) -> Thumbnail:
    """Read and decode an image, reduce it, and draw its crop; safe to call from several threads.

    Raises:
        SourceError: if the source changed during the scan.
    """
    height_px, width_px = placement.source
    known = Thumbnail(id=item.id, height_px=height_px, width_px=width_px, lost=placement.cropped_away)
    try:
        pixels = whole_image(source.read(item).data, placement.source, _THUMBNAIL_PX)
    except RejectedError as error:
        return replace(known, problem=str(error))
    shown = Image.fromarray(pixels)
    if min(shown.size) < NARROWEST_PX:
        shown = shown.resize((max(shown.width, NARROWEST_PX), max(shown.height, NARROWEST_PX)))
    drawn = with_crop(np.asarray(shown), placement)
    return replace(known, jpeg=jpeg(drawn), shown_px=drawn.shape[:2])


def whole_image(data: bytes, source: tuple[int, int], longest: int) -> NDArray[np.uint8]:
    """Decode a file as for packing, only to a size of at most `longest` px a side; `source`: its upright height and width.

    Raises:
        RejectedError: if packing would reject it, with the reason.
    """
    scale = min(1.0, longest / max(source))
    height_px, width_px = (max(1, round(scale * side)) for side in source)
    size = Size(height_px, width_px)
    framing = Framing(grid=Grid(name=str(size), sizes=(size,)), jpeg_draft=True)  # a grid of this one size
    return decode_image(data, framing, "").pixels


def with_crop(pixels: NDArray[np.uint8], placement: Placement) -> NDArray[np.uint8]:
    """Fade and hatch what the crop loses, and draw a line around what it keeps.

    `pixels` is the whole image in any size, `[h, w, 3]`; so is the result. It is drawn into the pixels, not laid over them by
    the page, so that it is printed as it is seen.
    """
    return with_box(pixels, placement.crop_in_source, placement.source)


def with_box(pixels: NDArray[np.uint8], box: Sequence[int], source: Sequence[int]) -> NDArray[np.uint8]:
    """Return the same as `with_crop`, by the crop (top, left, height, width) in an image of height and width `source`."""
    height, width = pixels.shape[:2]
    top, left, crop_height, crop_width = box
    down, across = height / source[0], width / source[1]
    rows = _span(top * down, (top + crop_height) * down, height)
    columns = _span(left * across, (left + crop_width) * across, width)
    if rows == (0, height) and columns == (0, width):
        return pixels
    grey = pixels.mean(axis=2, keepdims=True)
    stripes = (np.add.outer(np.arange(height), np.arange(width)) % 8 < 2)[..., None]
    faded = 0.35 * grey + 0.65 * 150 - 40 * stripes  # towards a mid-grey, which differs from black and from white
    drawn = np.repeat(faded.astype(np.uint8), 3, axis=2)
    drawn[slice(*rows), slice(*columns)] = pixels[slice(*rows), slice(*columns)]
    image = Image.fromarray(drawn)
    line = (columns[0], rows[0], columns[1] - 1, rows[1] - 1)
    is_wide = min(line[2] - line[0], line[3] - line[1]) > NARROWEST_PX
    ImageDraw.Draw(image).rectangle(line, outline=_LINE, width=2 if is_wide else 1)
    return np.asarray(image)


def _span(begin: float, end: float, length: int) -> tuple[int, int]:
    """Round a span to whole pixels, at least one."""
    first = min(round(begin), length - 1)
    return first, max(first + 1, min(round(end), length))
