"""The cost of captions in a store, and the savings of a shorter --max-tokens: from captions' lengths, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import human_bytes
from bucketline.families.family import Padding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.text.token_statistics import CaptionLengths
    from bucketline.ingest.encoders.text_columns import CaptionLength

COVERED = (0.99, 0.9)  # shares of the captions that a shorter --max-tokens would leave whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorter:
    """A shorter --max-tokens."""

    max_tokens: int
    covers: float  # the share of the captions that it leaves whole
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCost:
    """The cost of captions, each text once, without the empty one."""

    dtype: str  # of stored tokens
    token_bytes: int
    median_bytes: int  # of a caption
    p99_bytes: int  # 99th percentile
    share_of_row: float  # of an image's row with one caption of median length
    share_of_store: float
    shorter: list[Shorter]  # empty if the family has no --max-tokens, or nothing would be saved


def text_cost(
    known: CaptionLengths, measured: Sequence[CaptionLength], row_bytes: float, payload_bytes: int
) -> TextCost | None:
    """Return the cost of captions; None without any.

    `measured`: of the store's captions, the empty one first. `row_bytes`: of an image without its captions, on average;
    `payload_bytes`: of the store.
    """
    own = measured[1:]
    if not own:
        return None
    columns = known.columns
    sizes = np.array([columns.fixed_bytes + length.num_tokens * columns.token_bytes for length in own])
    median, p99 = (int(size) for size in np.percentile(sizes, (50, 99), method="higher"))
    text_bytes = sum(columns.fixed_bytes + length.num_tokens * columns.token_bytes for length in measured)
    return TextCost(
        dtype=columns.tokens[0].dtype,
        token_bytes=columns.token_bytes,
        median_bytes=median,
        p99_bytes=p99,
        share_of_row=round(median / (median + row_bytes), 4),
        share_of_store=round(text_bytes / payload_bytes, 4),
        shorter=_shorter(known, measured),
    )


def _shorter(known: CaptionLengths, measured: Sequence[CaptionLength]) -> list[Shorter]:
    """Return the lengths that cover most captions, if --max-tokens sets a length and they are below it."""
    lengths = np.array([length.num_open for length in measured if length.num_open is not None])
    if known.open_length is None or len(lengths) < len(measured):
        return []
    found: list[Shorter] = []
    for share in COVERED:
        limit = int(np.percentile(lengths[1:], 100 * share, method="higher"))
        if limit >= known.open_length or limit in [one.max_tokens for one in found]:
            continue
        if known.padding is Padding.VALID:
            saved = int((np.minimum(lengths, known.open_length) - np.minimum(lengths, limit)).sum())
        else:
            saved = len(lengths) * (known.open_length - limit)
        covers = round(float((lengths[1:] <= limit).mean()), 4)
        found.append(Shorter(max_tokens=limit, covers=covers, saved_bytes=saved * known.columns.token_bytes))
    return [one for one in found if one.saved_bytes]


def text_cost_as_lines(cost: TextCost | None, padding: str | None) -> list[str]:
    """Return the cost for people; nothing without captions."""
    if cost is None:
        return []
    stored = "all positions" if padding == Padding.MAX_LENGTH else "valid tokens only"
    sizes = f"{human_bytes(cost.median_bytes)} (median; 99th percentile {human_bytes(cost.p99_bytes)})"
    token = f"{stored}, {human_bytes(cost.token_bytes)} a token as {cost.dtype}"
    shares = f"{cost.share_of_row:.0%} of a row, {cost.share_of_store:.0%} of the store"
    whole = "of the captions whole"
    return [
        f"a caption takes {sizes}: {token}; {shares}",
        *(
            f"--max-tokens {one.max_tokens} would save {human_bytes(one.saved_bytes)} and leave {one.covers:.1%} {whole}"
            for one in cost.shorter
        ),
    ]
