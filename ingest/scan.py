"""`ingest scan` from end to end: the walk of a pack, whose images are counted in place of encoding and writing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.families.references import References
from bucketline.families.registry import family_of_pipeline
from bucketline.families.seen import SeenText
from bucketline.files.paths import redacted
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.images.crop import (
    Grid,
    crop_losses_as_json,
    fewer_buckets_note,
    latent_sizes,
    model_grid,
    parse_grid,
)
from bucketline.ingest.packed_index import hold_out_one
from bucketline.ingest.packing.run import TOKENS_PER_CHARACTER
from bucketline.ingest.partners.partner import PartnerForm, planned_form, refuse_unlike
from bucketline.ingest.pipeline.image_reader import Change, ImageReader
from bucketline.ingest.progress import counting_progress, look_limits
from bucketline.ingest.sources.dataset_file import is_dataset_file, naming_source, open_source, read_dataset_file
from bucketline.ingest.summary import Reject, RunSummary, by_number, by_reason, partner_notes
from bucketline.store.format.block import DTYPES, LatentKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bucketline.ingest.config import PackConfig, ScanConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.crop import Placement
    from bucketline.ingest.parallel.items import ItemParts
    from bucketline.ingest.pipeline.image_reader import ReadImage
    from bucketline.ingest.sources.dataset_file import DatasetEntry, DatasetFile
    from bucketline.ingest.sources.source import Listing, Source, SourceItem
    from bucketline.pages.page import Section

_DEFAULT_GRID = "area:512:64"
_DEFAULT_DOWNSCALE, _DEFAULT_CHANNELS = 8, 4  # Stable Diffusion 1's and SDXL's


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanReport:
    """Result of a scan, as `ingest scan --json` prints it."""

    found: int
    source_bytes: int  # of the images that are not rejected
    smallest: tuple[int, int] | None  # height, width in px of images that are not rejected, ordered by area
    median: tuple[int, int] | None
    largest: tuple[int, int] | None
    grid: str
    buckets: dict[str, int]  # number of images
    references: dict[str, int]  # number of images by their references, if any has some
    masks_of_zeros: list[str]  # ids of images whose mask is zero everywhere
    bytes_per_sample: dict[str, int]  # estimated, of what is stored, if there are references or masks
    enlarged: int  # images that would be enlarged to fill their bucket
    crop_loss: dict[str, dict[str, float]]  # by bucket: number of images, share cropped away (mean, max)
    rejected: int
    rejected_by_reason: dict[str, int]
    rejects: list[Reject]
    is_full: bool  # True if every image was decoded
    without_caption: int
    without_caption_ids: list[str]
    captions_from: dict[str, int]  # number of images per origin of their captions
    notes: list[str]  # what is left out of the source, or may be a misunderstanding
    captions: int  # number of different texts among the kept captions
    captions_beyond: list[str]  # ids of images with more than max_captions
    captions_without_image: list[str]
    passed_over: list[str]
    seconds: float


def counted_images(
    what: str,
    source: Source,
    items: ItemParts | Sequence[SourceItem],
    reader: ImageReader,
    config: PackConfig | ScanConfig,
    account: RunSummary,
) -> Iterator[ReadImage]:
    """Read what a pack would read, count what it would encode and reject, and yield the images; show the progress of `what`."""
    with counting_progress(what, len(items)) as on_image:
        for image in reader.walk(items, look_limits(source, config.decode_threads), account, on_image):
            if image.change is not Change.TEXT:
                account.count_packed(image.item.id, image.item.captions, image.placement, image.bucket, config.max_captions)
                account.count_partners(image.item.id, image.num_references, image.num_pairs, is_masked_out=image.is_masked_out)
            yield image
            on_image()


def scan(config: ScanConfig) -> tuple[DatasetFile | None, list[tuple[DatasetEntry | None, ScanReport]]]:
    """Scan every image of a source, or of each source of a data set file in its order. The sheet shows all of them."""
    each: list[tuple[DatasetEntry | None, ScanConfig]] = [(None, config)]
    file = read_dataset_file(Path(config.source), config.alone()) if is_dataset_file(config.source) else None
    if file is not None:
        if config.model is not None:
            refuse_unlike(config, file.sources, open_model(config.model, config.model_config))
        each = [(one, replace(config, source=one.path, **one.overrides(config.val_fraction))) for one in file.sources]
    if config.output is not None:
        from bucketline.ingest.peek import refuse_sheet

        for _, own in each:
            refuse_sheet(config.output, open_source(own.source, own).local_paths)
    reports: list[tuple[DatasetEntry | None, ScanReport]] = []
    sections: list[Section] = []
    for entry, own in each:
        with naming_source(config.source, entry):
            report, own_sections = _scan_source(own, len(each))
        reports.append((entry, report))
        sections += own_sections
    if config.output is not None:
        from bucketline.ingest.peek import write_sheet

        write_sheet(config.output, config.source, sections)
    return file, reports


def _scan_source(config: ScanConfig, num_sources: int) -> tuple[ScanReport, list[Section]]:
    """Scan every image of a source; with `output`, also return its sections of the sheet, which `num_sources` share."""
    started = time.monotonic()
    model = None if config.model is None else open_model(config.model, config.model_config)
    grid, channels, downscale = _grid(config, model)
    source = open_source(config.source, config)
    listing = config.listing_of(source)
    hold_out_one(listing.items, config.held_out, None)
    form = _form(config, model, listing)
    account = RunSummary()
    reader = ImageReader(
        source, None, None, config, grid, partners=form, px_per_latent=downscale, reads_headers=not config.full
    )
    images = counted_images("scan", source, listing.items, reader, config, account)
    seen = [replace(image, pixels=None, references=()) for image in images]
    sizes = {} if form.is_empty or not seen else _bytes_per_sample(config, model, form, seen, channels, downscale)
    report = _report(config, grid, listing, seen, account, sizes, started)
    if config.output is None:
        return report, []
    return report, _sheet(config, report, (source, listing), seen, reader.too_cropped, num_sources)


def _sheet(
    config: ScanConfig,
    report: ScanReport,
    place: tuple[Source, Listing],
    seen: list[ReadImage],
    too_cropped: list[tuple[str, Placement]],
    num_sources: int,
) -> list[Section]:
    from bucketline.ingest.peek import LEGEND, TOO_CROPPED, crop_sections, reject_section
    from bucketline.pages.page import Section

    images = {TOO_CROPPED: [*too_cropped]} if too_cropped else {}
    for image in seen:
        images.setdefault(image.bucket, []).append((image.item.id, image.placement))
    about = f"{counted(report.found, 'image')}, {len(report.rejects)} rejected. Grid {report.grid}, crop: {config.crop.value}"
    if config.max_crop < 1.0:
        about += f"; an image that would lose more than {100 * config.max_crop:.1f} % of its area is rejected (--max-crop)"
    about += f". {LEGEND} Sizes are height x width. Each bucket shows the images that lose most, largest loss first. "
    about += "Very narrow images are drawn wider than they are."
    limits = look_limits(place[0], config.decode_threads)
    table, sections = crop_sections(*place, images, limits, num_sources, config.max_captions)
    return [
        Section(anchor="source", title=redacted(config.source), note=about, body=table),
        *sections,
        *([reject_section(report.rejects, report.rejected_by_reason)] if report.rejects else []),
    ]


def _form(config: ScanConfig, model: ModelFolder | None, listing: Listing) -> PartnerForm:
    """Return what a pack would store of references and masks; refuses what no pack could store."""
    if model is not None:
        return planned_form(config, model, listing, None)
    if listing.num_references or config.partner_rules.has_references:
        raise UsageError(
            f"{redacted(config.source)} has references, and how large they become is for a model to say: add --model, or set "
            'references = "none" for this source in a data set file'
        )
    return PartnerForm(mask=config.partner_rules.mask_source)


def _bytes_per_sample(
    config: ScanConfig, model: ModelFolder | None, form: PartnerForm, seen: list[ReadImage], channels: int, downscale: int
) -> dict[str, int]:
    """Return about how many bytes a sample takes on average, by what they are; text is estimated by its characters."""
    flips, item = 1 + config.flip, DTYPES[config.dtype].itemsize
    per_px = channels * item * flips / downscale**2
    targets = sum(one.placement.bucket.height_px * one.placement.bucket.width_px for one in seen)
    references = sum(height * width for one in seen for height, width in one.reference_sizes)
    moments = 2 if config.latents == LatentKind.MOMENTS.value else 1
    sums = {"latent": targets * per_px * moments, "references": references * per_px}
    sums["mask"] = 0 if form.mask is None else targets * flips / downscale**2
    width = ((model.config("transformer") if model is not None else None) or {}).get("joint_attention_dim")
    if model is not None and isinstance(width, int):
        per_token = width * DTYPES[config.text_dtype or config.dtype].itemsize
        texts = [text for one in seen for text in one.item.captions[: config.max_captions]]
        sums["captions"] = sum(2 + int(len(text) * TOKENS_PER_CHARACTER) for text in texts) * per_token
        family = family_of_pipeline(str(model.index().get("_class_name")))
        if form.family is not None and form.family.text_sees and family is not None and issubclass(family, SeenText):
            area, pixels = form.family.text_area_px, model.pixels("processor")
            shown = References(most=1)
            sums["images in the text"] = per_token * sum(
                family.seen_tokens(pixels, [size if area is None else shown.size(*size, area) for size in one.reference_sizes])
                for one in seen
            )
    return {name: int(value / len(seen)) for name, value in sums.items() if value}


def _grid(config: ScanConfig, model: ModelFolder | None) -> tuple[Grid, int, int]:
    """Return the grid, and a latent's channels and px per latent pixel."""
    if model is None:
        step = _DEFAULT_DOWNSCALE * 8
        grid = parse_grid(config.grid or _DEFAULT_GRID, step_px=step, align_px=_DEFAULT_DOWNSCALE)
        return grid, _DEFAULT_CHANNELS, _DEFAULT_DOWNSCALE
    from bucketline.ingest.encoders.text_encoders import text_family_of
    from bucketline.ingest.encoders.vae import refuse_latents

    text_family_of(model, is_plain=config.text is not None)  # a model that no pack can use is refused here too
    kind, downscale, channels = latent_sizes(model)
    refuse_latents(kind, LatentKind(config.latents))
    return model_grid(config.grid, model, downscale), channels, downscale


def _report(
    config: ScanConfig,
    grid: Grid,
    listing: Listing,
    seen: list[ReadImage],
    account: RunSummary,
    bytes_per_sample: dict[str, int],
    started: float,
) -> ScanReport:
    sizes = sorted((image.placement.source for image in seen), key=lambda size: (size[0] * size[1], size))
    texts = {text for image in seen for text in image.item.captions[: config.max_captions]}
    return ScanReport(
        found=len(listing.items),
        source_bytes=sum(image.stamp.num_bytes for image in seen),
        smallest=sizes[0] if sizes else None,
        median=sizes[len(sizes) // 2] if sizes else None,
        largest=sizes[-1] if sizes else None,
        grid=grid.name,
        buckets=dict(sorted(account.buckets.items())),
        references=by_number(account.references),
        masks_of_zeros=account.zero_masks,
        bytes_per_sample=bytes_per_sample,
        enlarged=account.enlarged,
        crop_loss=crop_losses_as_json(account.crop_losses),
        rejected=len(account.rejects),
        rejected_by_reason=by_reason(account),
        rejects=sorted(account.rejects, key=lambda reject: reject.id),
        is_full=config.full,
        without_caption=account.without_caption,
        without_caption_ids=[image.item.id for image in seen if not image.item.captions],
        captions_from=dict(listing.captions_from.most_common()),
        notes=[
            *listing.notes,
            *partner_notes(account),
            *fewer_buckets_note([one.placement for one in seen if not one.bucket.startswith("val/")]),
        ],
        captions=len(texts),
        captions_beyond=account.captions_beyond,
        captions_without_image=listing.orphans,
        passed_over=listing.passed_over,
        seconds=round(time.monotonic() - started, 3),
    )
