"""Images for pages: stored latents decoded by their VAE, and a source's images with their crops drawn in."""

from __future__ import annotations

import base64
import heapq
import io
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageDraw

from bucketline.command_line import counted
from bucketline.errors import FingerprintError, UsageError
from bucketline.files.atomic_write import refuse_existing, write_or_explain
from bucketline.files.paths import overlap, redacted
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.images.crop import Framing, Grid, RejectedError, Size
from bucketline.ingest.images.decode import decode_image, placed_by_header
from bucketline.ingest.pipeline.model import chosen_device, refuse_no_cuda
from bucketline.ingest.progress import look_at
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.pages.page import Card, Section, document, jpeg, parts, percent, png, refuse_page, tinted
from bucketline.store.format.block import LATENT, MASK
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.read.samples import checked_row
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.crop import Placement
    from bucketline.ingest.pipeline.pool import WorkLimits
    from bucketline.ingest.sources.source import Listing, Source, SourceItem
    from bucketline.ingest.summary import Reject
    from bucketline.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeked:
    """The written image, as `ingest peek --json` prints it."""

    png: str
    id: str
    bucket: str
    height_px: int
    width_px: int
    captions: tuple[str, ...]


def refuse_image(store: Store, png: Path) -> None:
    if overlap(png, store.path):
        raise UsageError(f"{png} is inside the store {store.path}; choose a place outside it")
    if png.suffix.lower() != ".png":
        raise UsageError(f"{png} does not end in .png, and the image is written as a PNG; choose another name")
    refuse_existing(png, "file")


def peek(store: Store, sample_id: str, model: ModelFolder, path: Path, device: str) -> Peeked:
    """Decode a sample's latent (the mean of stored moments) and write it as an upright RGB image of its bucket's size.

    Its references follow to the right. What its mask leaves out is red.
    """
    refuse_image(store, path)
    shard, record = store.sample(sample_id)
    row = checked_row(store, store.shards.index(shard), record)
    spec = store.manifest.specs[record.bucket]
    column = spec.column(LATENT)
    refuse_no_cuda(device)
    model.part("vae")
    import torch  # once what can be refused without it is

    from bucketline.torch_dtypes import TORCH_DTYPES

    vae = decoding_vae(store.encoders.get("vae"), model, chosen_device(device, 0), column.dtype)
    decoded = []
    for name in (LATENT, *store.bucket(record.bucket).references):
        stored = torch.frombuffer(bytearray(row[name]), dtype=TORCH_DTYPES[column.dtype]).reshape(spec.column(name).shape)
        decoded.append(vae.decode(stored[None, : vae.latent_channels])[0])  # the means are the first half of moments
    images = [png(pixels) for pixels in decoded]
    if MASK in row:
        images[0] = tinted(images[0], np.frombuffer(row[MASK], np.uint8).reshape(spec.column(MASK).shape))
    write_or_explain(path, images[0] if len(images) == 1 else png(beside(images)))
    height_px, width_px = decoded[0].shape[:2]
    return Peeked(
        png=str(path), id=record.id, bucket=record.bucket, height_px=height_px, width_px=width_px, captions=record.captions
    )


def beside(images: Sequence[bytes]) -> NDArray[np.uint8]:
    """Return images next to each other, on white, `[H, W, 3]`."""
    opened = [Image.open(io.BytesIO(one)) for one in images]
    width, height = sum(one.width for one in opened) + GAP_PX * (len(opened) - 1), max(one.height for one in opened)
    sheet, left = Image.new("RGB", (width, height), "white"), 0
    for one in opened:
        sheet.paste(one, (left, 0))
        left += one.width + GAP_PX
    return np.asarray(sheet)


# ----------------------------------------------------------------------------------------------------------------------- crops

GAP_PX = 8  # between a target and its references
MAX_PER_BUCKET = 24
MAX_IN_ALL = 2000  # about 25 MB of thumbnails; with more than 83 buckets, each shows fewer than MAX_PER_BUCKET
MAX_REJECTS = 1000  # that the page lists
TOO_CROPPED = "Too much cropped away"  # the images that are rejected for it, in place of a bucket
_THUMBNAIL_PX = 240  # the longer side
NARROWEST_PX = 10  # the shorter side; a narrower image is drawn wider than it is
_LINE = (255, 96, 0)  # of the crop; orange is rare in photographs, and visible on black and on white
Cropped: TypeAlias = "tuple[str, Placement]"  # the id of an image of the source, and where its crop is
LEGEND = "The orange line is the crop; what is grey and hatched is lost."


def refuse_sheet(path: Path, local_paths: Iterable[Path]) -> None:
    if store := next((folder for folder in path.resolve().parents if (folder / MANIFEST).is_file()), None):
        raise UsageError(f"{path} is in the store {store}; choose a place outside it")
    refuse_page(path, [("source", source) for source in local_paths])


def write_sheet(path: Path, source: str, sections: Sequence[Section]) -> None:
    """Write the sheet of a scan. Sections of several sources have the same anchors, so each gets one of its own."""
    shown = [replace(section, anchor=f"section-{number}") for number, section in enumerate(sections)]
    title = f"Crops of {redacted(source)}"
    write_or_explain(path, document(title=title, subtitle="", made_by="ingest scan", sections=shown))


def crop_sections(
    source: Source,
    listing: Listing,
    images: Mapping[str, Sequence[Cropped]],
    room: WorkLimits,
    num_sources: int = 1,
    max_captions: int = 8,
) -> tuple[str, list[Section]]:
    """Decode the images that lose most, and return a table of the buckets, and a section of each.

    They are ordered by the largest loss of an image, largest first, and have their captions as they would be stored.
    `num_sources`: of the page, which share its MAX_IN_ALL images.
    """
    chosen = worst(images, MAX_IN_ALL // num_sources)
    placements = dict(itertools.chain(*chosen.values()))
    cards: dict[str, Card] = {}

    def look(item: SourceItem) -> Card:
        return crop_card(item.id, source.read(item)[0], placements[item.id], _THUMBNAIL_PX, item.captions[:max_captions])

    items = [item for item in listing.items if item.id in placements]  # in the listing's order
    for item, card in look_at("sheet", source, items, look, room):
        if isinstance(card, RejectedError):
            card = Card(images=[], title=item.id, notes=[_note(placements[item.id])], problem=str(card))  # noqa: PLW2901 - in its place
        cards[item.id] = card
    found = {name: [placement.cropped_away for _, placement in own] for name, own in images.items()}
    order = sorted(found, key=lambda name: (name == TOO_CROPPED, -max(found[name]), -sum(found[name]) / len(found[name]), name))
    rows = [(name, len(own), percent(sum(own) / len(own)), percent(max(own))) for name in order for own in [found[name]]]
    table = parts.table(("bucket", "images", "lost on average", "lost at most"), rows)
    return table, [_bucket_section(row, found[row[0]], [cards[one] for one, _ in chosen[row[0]]]) for row in rows]


def _bucket_section(row: tuple[str, int, str, str], losses: Sequence[float], cards: Sequence[Card]) -> Section:
    name, num_images, average, most = row
    note = f"{counted(num_images, 'image')}, {average} lost on average, {most} at most"
    body = parts.sheet(cards, "medium")
    if (more := len(losses) - len(cards)) > 0:
        least = sorted(losses, reverse=True)[len(cards) - 1]
        body += parts.dim(f"and {more} more, which lose {percent(least)} or less")
    return Section(anchor=name, title=name, note=note, body=body)


def reject_section(rejects: Sequence[Reject], by_reason: Mapping[str, int]) -> Section:
    """Return the rejected images, counted by reason and listed."""
    body = parts.table(("reason", "images"), by_reason.items())
    listed = [(one.id, one.reason, one.detail) for one in rejects[:MAX_REJECTS]]
    body += parts.table(("image", "reason", "found"), listed, texts=3)
    if (more := len(rejects) - MAX_REJECTS) > 0:
        body += parts.dim(f"and {more} more; ingest scan --json names all")
    return Section(anchor="rejected", title="Rejected", note=counted(len(rejects), "image"), body=body)


def worst(images: Mapping[str, Iterable[Cropped]], max_in_all: int) -> dict[str, list[Cropped]]:
    """Return of each bucket the images that lose most, largest loss first, at most MAX_PER_BUCKET and about `max_in_all`."""
    most = min(MAX_PER_BUCKET, max(1, max_in_all // max(1, len(images))))
    return {
        bucket: heapq.nsmallest(most, cropped, key=lambda image: (-image[1].cropped_away, image[0]))
        for bucket, cropped in images.items()
    }


def crop_card(name: str, data: bytes, placement: Placement, longest: int, captions: Sequence[str]) -> Card:
    """Decode an image's file, reduce it, and draw its crop; safe to call from several threads."""
    pixels = whole_image(data, placement.source, longest)
    if min(pixels.shape[:2]) < NARROWEST_PX:
        height, width = (max(side, NARROWEST_PX) for side in pixels.shape[:2])
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height)))
    image = jpeg(with_box(pixels, placement.crop_in_source, placement.source))
    return Card(images=[image], title=name, notes=[_note(placement)], captions=captions)


def _note(placement: Placement) -> str:
    height, width = placement.source
    enlarged = ", enlarged" if placement.enlarged else ""
    return f"{height}x{width} px, {percent(placement.cropped_away)} cropped away{enlarged}"


def whole_image(data: bytes, source: tuple[int, int], longest: int) -> NDArray[np.uint8]:
    """Decode a file as for packing, only to a size of at most `longest` px a side; `source`: its upright height and width."""
    scale = min(1.0, longest / max(source))
    height_px, width_px = (max(1, round(scale * side)) for side in source)
    size = Size(height_px, width_px)
    framing = Framing(grid=Grid(name=str(size), sizes=(size,)), jpeg_draft=True)  # a grid of this one size
    return decode_image(data, framing, "")[0]


def with_box(pixels: NDArray[np.uint8], box: Sequence[int], source: Sequence[int]) -> NDArray[np.uint8]:
    """Fade and hatch what a crop loses, and draw a line around what it keeps.

    `pixels` is the whole image in any size, `[h, w, 3]`; so is the result. `box`: the crop (top, left, height, width) in an
    image of height and width `source`. It is drawn into the pixels, not laid over them by the page, so that it is printed as
    it is seen.
    """
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


# --------------------------------------------------------------------------------------------------------------- source images

THUMBNAIL_PX = 160  # the longer side
_ANY_SIZE = Framing(grid=Grid(name="1x1", sizes=(Size(1, 1),)))


def source_images(job: Mapping[str, Any], _: BinaryIO | None = None) -> dict[str, tuple[str, str]]:
    """Return of each id a JPEG in base64, or "" and the problem.

    `job`: the source, and of each id the crop in its image (top, left, height, width), or None.
    """
    source, boxes = open_source(job["source"]), job["boxes"]
    items = [item for item in source.listing().items if item.id in boxes]
    found = dict.fromkeys(boxes, ("", "no longer in the source"))
    for item in source.in_turn(items):
        try:
            shown = _thumbnail(source.read(item)[0], boxes[item.id])
        except Exception:  # noqa: BLE001 - any file of a stranger; the reject's own reason is next to it
            found[item.id] = ("", "cannot be decoded")
            continue
        found[item.id] = (base64.b64encode(shown).decode("ascii"), "")
    return found


def _thumbnail(data: bytes, box: Sequence[int] | None, longest: int = THUMBNAIL_PX) -> bytes:
    """Return an image file's content as an upright JPEG of at most `longest` px; `box`: the crop, or None if there is none.

    The image is decoded as for packing, so that it looks as it was packed, and a file that cannot be packed is not shown as one
    that can.
    """
    upright = placed_by_header(io.BytesIO(data), _ANY_SIZE, "").source
    pixels = whole_image(data, upright, longest)
    return jpeg(pixels if box is None else with_box(pixels, box, upright))


# --------------------------------------------------------------------------------------------------------------------- decoded

DECIDING = ("class", "config_hash", "weights_hash")  # fields of a VAE's provenance that determine its decoder's output


def decoding_vae(stored: object, model: ModelFolder, device: torch.device, dtype: str) -> VaeEncoder:
    """Return the model's VAE, checked to be the one that the store records in `encoders.vae`."""
    vae = VaeEncoder(model, device, dtype, encode_dtype="F32")
    before = {name: stored.get(name) for name in DECIDING} if isinstance(stored, dict) else {}
    now = {name: vae.provenance[name] for name in DECIDING}
    if difference := first_difference(before, now, "encoders.vae"):
        field, stored_value, present_value = difference
        raise FingerprintError(
            f"the store was made with {field} = {stored_value!s:.200}, {model.name} has {present_value!s:.200}; "
            "name the model that the store was packed with"
        )
    return vae


def thumbnails(job: Mapping[str, Any], data: BinaryIO) -> list[str]:
    """Return latents of the job's shapes, F32 in `data`, decoded, as JPEGs in base64: for `store report`."""
    vae = decoding_vae(job["vae"], open_model(job["model"], job["model_config"]), chosen_device(job["device"], 0), "F32")
    found = []
    for shape in job["shapes"]:
        latent = np.frombuffer(bytearray(data.read(4 * int(np.prod(shape)))), dtype="<f4").reshape(shape)
        (image,) = vae.decode(torch.from_numpy(latent)[None].float())
        found.append(base64.b64encode(jpeg(image, THUMBNAIL_PX)).decode("ascii"))
    return found
