"""The page of `ingest peek SOURCE`: some images of a source with their crops and the captions that packing would store."""

from __future__ import annotations

import heapq
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.redact import redacted
from bucketline.ingest.images.decode import placed_by_header
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sheet.crops import LEGEND, crop_card, refuse_sheet
from bucketline.ingest.sheet.source_images import THUMBNAIL_PX
from bucketline.ingest.sources.open_source import open_source
from bucketline.pages.page import Card, Section, document, parts
from bucketline.store.format.hashing import draw

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.config import SourceArguments
    from bucketline.ingest.images.crop import Framing
    from bucketline.ingest.sources.source import Source, SourceItem

REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSheet:
    """The content of the page in numbers, as `ingest peek --json` prints it."""

    page: str
    found: int
    shown: int
    rejected: int  # of those shown


def source_sheet(
    place: str, arguments: SourceArguments, framing: Framing, page: Path, *, samples: int, max_captions: int
) -> SourceSheet:
    """Write the contact sheet of a source: some images, and how packing would crop and caption them."""
    source = open_source(place, arguments)
    refuse_sheet(page, source.local_paths)
    listing = arguments.listing_of(source)
    drawn = {item.id for item in heapq.nsmallest(samples, listing.items, key=lambda item: draw(item.id, "page"))}
    groups: dict[str, list[Card]] = {}
    for item in source.in_turn([item for item in listing.items if item.id in drawn]):
        bucket, card = _card(source, item, framing, max_captions)
        groups.setdefault(bucket, []).append(card)
    shown = sum(map(len, groups.values()))
    rejected = len(groups.get(REJECTED, []))
    ordered = sorted(groups.items(), key=lambda group: (group[0] == REJECTED, -len(group[1]), group[0]))
    shown_groups = [(name, counted(len(cards), "image"), cards) for name, cards in ordered]
    body = parts.gallery(shown_groups, "Search ids and captions", "wide")
    found = counted(len(listing.items), "image")
    data = document(
        title=redacted(place).rstrip("/").rpartition("/")[2] or "source",
        subtitle=f"{shown} of {found} of {redacted(place)}, drawn by hash",
        made_by="ingest peek",
        sections=[
            Section(
                anchor="images",
                title="Images",
                note=f"By bucket of the grid {framing.grid.name}, with the captions as they would be stored. {LEGEND}",
                body=body,
            )
        ],
    )
    write_or_explain(page, data)
    return SourceSheet(page=str(page), found=len(listing.items), shown=shown, rejected=rejected)


def _card(source: Source, item: SourceItem, framing: Framing, max_captions: int) -> tuple[str, Card]:
    """Return an image's bucket and its card."""
    captions = item.captions[:max_captions] or ("(the empty caption)",)
    try:
        if item.caption_error is not None:
            raise RejectedError(Reason.CAPTION, item.caption_error)
        data = source.read(item).data
        placement = placed_by_header(io.BytesIO(data), framing, item.id)
        return str(placement.bucket), crop_card(item.id, data, placement, THUMBNAIL_PX, captions)
    except RejectedError as error:
        return REJECTED, Card(images=[], title=item.id, problem=str(error), captions=captions)
