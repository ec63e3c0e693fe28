"""The whole of `ingest scan`: what packing a source would find, without an encoder."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.ingest.account import Account, Reject, by_reason
from bucketline.ingest.crop_loss import CropLoss, crop_losses_as_json, note_crop_loss
from bucketline.ingest.decode import decode, placed_by_header
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.framing import Framing, upscale_limit
from bucketline.ingest.grids import Grid, parse_grid
from bucketline.ingest.model_sizes import latent_sizes, model_grid
from bucketline.ingest.progress import counting_progress
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.sources.choose import open_source
from bucketline.ingest.split import held_out
from bucketline.store.block import Column, fixed_columns
from bucketline.store.manifest import bucket_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bucketline.ingest.config import ScanConfig
    from bucketline.ingest.encoders.caption_lengths import Lengths
    from bucketline.ingest.geometry import Placement
    from bucketline.ingest.sources.source import Listing, Source, SourceItem

RECORD_BYTES = 230  # of a sample record, without its id (twice) and its captions; measured: 199 to 231
NAMED = 10
_BATCH = 1000  # captions whose lengths are counted together
_DEFAULT_GRID = "area:512:64"
_DEFAULT_DOWNSCALE, _DEFAULT_CHANNELS = 8, 4  # Stable Diffusion 1's and SDXL's


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCount:
    """How many images a bucket would get."""

    name: str
    height_px: int
    width_px: int
    split: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanReport:
    """What `ingest scan --json` prints."""

    found: int
    source_bytes: int  # of the images that can be read
    smallest: tuple[int, int] | None  # height, width in px, by area, of the images that are not rejected
    median: tuple[int, int] | None
    largest: tuple[int, int] | None
    grid: str
    buckets: list[BucketCount]
    enlarged: int  # to fill their bucket
    crop_loss: dict[str, dict[str, float]]  # by bucket: how many images, the share cropped away (mean, max)
    rejected: int
    rejected_by_reason: dict[str, int]
    rejects: list[Reject]
    is_full: bool  # whether every picture was decoded
    without_caption: int
    captions: int  # texts that differ, of those that are kept
    text_family: str | None  # of encoders, by which the model takes captions; None without a model
    captions_too_long: int | None  # of these, longer than the encoder takes; None where that is not known
    captions_too_long_texts: list[str]  # the first ten
    captions_beyond: list[str]  # ids of images with more captions than are kept
    captions_without_image: list[str]
    passed_over: list[str]
    payload_bytes: int  # about what the store would hold; of 4 channels at an eighth without a model, of text as far as known
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a model's configurations say of columns."""

    grid: Grid
    downscale: int
    latent_channels: int
    text_family: str | None = None
    lengths: Lengths | None = None  # None where nothing is known of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One image, as far as it was looked at."""

    item: SourceItem
    num_bytes: int
    placement: Placement


def scan(config: ScanConfig) -> ScanReport:
    """Look at every image of a source.

    Raises:
        SourceError: where the source cannot be listed.
        ModelError, UsageError: where the model's folder or the grid is not what it should be.
    """
    started = time.monotonic()
    shape = _shape(config)
    source = open_source(config.source)
    listing = source.listing()
    # where a crop lies and what shows behind a picture change neither its bucket nor whether it is packed
    framing = Framing(grid=shape.grid, max_upscale=upscale_limit(config.max_upscale), min_size_px=config.min_size_px)
    seen: list[_Seen] = []
    account = Account()
    with counting_progress("scan", len(listing.items)) as on_image:
        for item, outcome in _looked_at(config, source, listing, framing, shape.lengths):
            if isinstance(outcome, RejectedError):
                account.reject(item.id, outcome)
            else:
                seen.append(outcome)
            on_image()
    return _report(config, shape, listing, seen, account, started)


def _shape(config: ScanConfig) -> _Shape:
    if config.model is None:
        grid = parse_grid(config.grid or _DEFAULT_GRID, step_px=_DEFAULT_DOWNSCALE * 8, align_px=_DEFAULT_DOWNSCALE)
        return _Shape(grid=grid, downscale=_DEFAULT_DOWNSCALE, latent_channels=_DEFAULT_CHANNELS)
    from bucketline.ingest.encoders.caption_lengths import open_caption_lengths

    model = open_model(config.model)
    downscale, channels = latent_sizes(model)
    family, lengths = open_caption_lengths(model)
    return _Shape(
        grid=model_grid(config.grid, model, downscale),
        downscale=downscale,
        latent_channels=channels,
        text_family=family,
        lengths=lengths,
    )


def _looked_at(
    config: ScanConfig, source: Source, listing: Listing, framing: Framing, lengths: Lengths | None
) -> Iterator[tuple[SourceItem, _Seen | RejectedError]]:
    """Look at the images in threads; give them in their order."""

    def look(item: SourceItem) -> _Seen | RejectedError:
        try:
            found = _look(config, source, item, framing)
            _refuse_unknown_classes(lengths, item.captions[: config.max_captions])
        except RejectedError as error:
            return error
        return found

    num_threads = config.decode_threads or min(4, os.cpu_count() or 1)
    running: deque[tuple[SourceItem, Future[_Seen | RejectedError]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="scan") as pool:
        try:
            for item in source.in_turn(listing.items):
                running.append((item, pool.submit(look, item)))
                if len(running) > 2 * num_threads:
                    first, future = running.popleft()
                    yield first, future.result()
            while running:
                first, future = running.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _look(config: ScanConfig, source: Source, item: SourceItem, framing: Framing) -> _Seen:
    num_bytes = source.stamp(item).num_bytes
    if config.full:
        data = source.read(item).data
        _refuse_bad_captions(item)
        placement = decode(data, framing, item.id).placement
    else:
        with source.opened(item) as file:
            _refuse_bad_captions(item)
            placement = placed_by_header(file, framing, item.id)
    return _Seen(item=replace(item, held=None), num_bytes=num_bytes, placement=placement)


def _refuse_bad_captions(item: SourceItem) -> None:
    if item.caption_error is not None:
        raise RejectedError(Reason.CAPTION, item.caption_error)


def _refuse_unknown_classes(lengths: Lengths | None, captions: Iterable[str]) -> None:
    refusals = (lengths.refusal(caption) for caption in captions) if lengths is not None else ()
    if refusal := next((found for found in refusals if found is not None), None):
        raise RejectedError(Reason.CLASS, refusal)


def _report(
    config: ScanConfig, shape: _Shape, listing: Listing, seen: list[_Seen], account: Account, started: float
) -> ScanReport:
    sizes = sorted((image.placement.source for image in seen), key=lambda size: (size[0] * size[1], size))
    buckets = _buckets(config, seen)
    texts = list({text: None for image in seen for text in (image.item.captions or ("",))[: config.max_captions]})
    lengths = _token_counts(shape.lengths, texts)
    too_long = [text for text, length in zip(texts, lengths, strict=False) if _is_too_long(shape.lengths, length)]
    return ScanReport(
        found=len(listing.items),
        source_bytes=sum(image.num_bytes for image in seen),
        smallest=sizes[0] if sizes else None,
        median=sizes[len(sizes) // 2] if sizes else None,
        largest=sizes[-1] if sizes else None,
        grid=shape.grid.name,
        buckets=buckets,
        enlarged=sum(image.placement.enlarged for image in seen),
        crop_loss=crop_losses_as_json(_crop_losses(config, seen)),
        rejected=len(account.rejects),
        rejected_by_reason=by_reason(account),
        rejects=sorted(account.rejects, key=lambda reject: reject.id),
        is_full=config.full,
        without_caption=sum(not image.item.captions for image in seen),
        captions=sum(bool(text) for text in texts),
        text_family=shape.text_family,
        captions_too_long=None if shape.lengths is None else len(too_long),
        captions_too_long_texts=too_long[:NAMED],
        captions_beyond=[image.item.id for image in seen if len(image.item.captions) > config.max_captions],
        captions_without_image=listing.orphans,
        passed_over=listing.passed_over,
        payload_bytes=_payload_bytes(config, shape, buckets, seen, lengths),
        seconds=round(time.monotonic() - started, 3),
    )


def _buckets(config: ScanConfig, seen: list[_Seen]) -> list[BucketCount]:
    counts: Counter[tuple[str, int, int]] = Counter()
    for image in seen:
        size = image.placement.bucket
        counts[_split(config, image), size.height_px, size.width_px] += 1
    return [
        BucketCount(name=bucket_name(split, height, width), height_px=height, width_px=width, split=split, samples=count)
        for (split, height, width), count in sorted(counts.items())
    ]


def _crop_losses(config: ScanConfig, seen: list[_Seen]) -> dict[str, CropLoss]:
    losses: dict[str, CropLoss] = {}
    for image in seen:
        size = image.placement.bucket
        bucket = bucket_name(_split(config, image), size.height_px, size.width_px)
        note_crop_loss(losses, bucket, image.placement.cropped_away)
    return losses


def _split(config: ScanConfig, image: _Seen) -> str:
    return "val" if held_out(image.item.id, config.val_fraction, config.split_by) else "train"


def _token_counts(lengths: Lengths | None, texts: list[str]) -> list[int]:
    if lengths is None:
        return []
    return [count for at in range(0, len(texts), _BATCH) for count in lengths.count(texts[at : at + _BATCH])]


def _is_too_long(lengths: Lengths | None, num_tokens: int) -> bool:
    return lengths is not None and num_tokens > lengths.max_tokens


def _payload_bytes(config: ScanConfig, shape: _Shape, buckets: list[BucketCount], seen: list[_Seen], counts: list[int]) -> int:
    """Estimate what the store would hold: rows by their buckets, texts by their tokens, records by their ids and captions."""
    total = 0
    for bucket in buckets:
        latent = Column(
            name="latent",
            dtype=config.dtype,
            shape=(shape.latent_channels, bucket.height_px // shape.downscale, bucket.width_px // shape.downscale),
        )
        columns = (*fixed_columns(config.max_captions), latent)
        total += bucket.samples * sum(column.row_bytes for column in columns)
    for image in seen:
        total += RECORD_BYTES + 2 * _num_bytes(image.item.id) + sum(_num_bytes(text) for text in image.item.captions)
    if shape.lengths is not None:
        total += sum(shape.lengths.stored_bytes(count, config.dtype) for count in counts)
    return total


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
