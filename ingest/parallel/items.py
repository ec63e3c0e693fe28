"""Which rank packs which sample, and the items of a source as ranks keep them."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.ingest.sources.partner_names import Partner
from bucketline.ingest.sources.source import SourceItem
from bucketline.ingest.summary import as_line
from bucketline.store.format.block import sample_digest
from bucketline.store.shard.reader import KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.sources.source import Listing


def rank_of(digest: bytes, world_size: int) -> int:
    """Return the rank that packs a sample. It depends only on the digest of the sample's id, not on other samples."""
    return int.from_bytes(digest[:8], "little") % world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples that one rank packs."""

    rank: int
    world_size: int

    def of(self, keys: NDArray[np.bytes_]) -> NDArray[np.bool_]:
        """Return for each sample, given `as_keys` of the digests, whether this rank packs it; agrees with `rank_of`."""
        numbers = np.ascontiguousarray(keys).view("<u8")[::2]  # keys may be a field of an index
        mine: NDArray[np.bool_] = numbers % self.world_size == self.rank
        return mine


# ------------------------------------------------------------------------------------------------------------------ item parts
# Split a listing: each rank keeps the items that it packs, as JSON; rank 0 keeps an outline of all items.
#
# An item takes 430 to 610 bytes as Python objects, about the size of its id and captions when packed, and about 24 bytes in
# the outline.

_PART_ITEMS = 1000  # items per part


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Rank 0's summary of a listing, for N images with C captions."""

    keys: NDArray[np.bytes_]  # [N] digests of the ids, in the listing's order
    num_captions: NDArray[np.int32]  # [N]
    caption_chars: NDArray[np.int32]  # [C] lengths, image after image
    listing: Listing  # without its items
    without_caption: bytes  # lines of `without_caption.jsonl`, rejects included

    @property
    def num_items(self) -> int:
        return len(self.keys)


class ItemParts:
    """The items of one rank in the listing's order, unpacked during iteration."""

    def __init__(self, parts: Sequence[bytes] = ()) -> None:
        """Take the output of `pack_items`."""
        self.parts: list[bytes] = []
        self._num_items = 0
        for part in parts:
            self.append(part, len(unpack_items(part)))

    def append(self, part: bytes, num_items: int) -> None:
        self.parts.append(part)
        self._num_items += num_items

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[SourceItem]:
        for part in self.parts:
            yield from unpack_items(part)


def take_apart(listing: Listing, world_size: int) -> tuple[Outline, list[ItemParts]]:
    """Return a listing's outline and each rank's items. Empties `listing.items` in the process, to free memory."""
    items = listing.items
    digests, num_captions, caption_chars, without_caption = bytearray(), array("i"), array("i"), bytearray()
    slices = [ItemParts() for _ in range(world_size)]
    waiting: list[list[SourceItem]] = [[] for _ in range(world_size)]
    items.reverse()  # popped from the end one by one
    while items:
        item = items.pop()
        digest = sample_digest(item.id)
        digests += digest
        num_captions.append(len(item.captions))
        if not item.captions:
            without_caption += as_line(item.id)
        caption_chars.extend(map(len, item.captions))
        rank = rank_of(digest, world_size)
        own = waiting[rank]
        own.append(item)
        if len(own) == _PART_ITEMS:
            slices[rank].append(pack_items(own), len(own))
            own.clear()
    for rank, own in enumerate(waiting):
        if own:
            slices[rank].append(pack_items(own), len(own))
    outline = Outline(
        keys=np.frombuffer(bytes(digests), dtype=KEY),
        num_captions=np.array(num_captions, dtype=np.int32),
        caption_chars=np.array(caption_chars, dtype=np.int32),
        listing=listing,
        without_caption=bytes(without_caption),
    )
    return outline, slices


def pack_items(items: Sequence[SourceItem]) -> bytes:
    """Serialise items as JSON: id, captions, caption error, whether that is temporary, split, position, and partners if any."""
    fields = [
        (item.id, item.captions, item.caption_error, item.is_caption_out_of_reach, item.held_out, item.at, *_partners(item))
        for item in items
    ]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def unpack_items(part: bytes) -> list[SourceItem]:
    return [
        SourceItem(
            id=sample_id,
            captions=tuple(captions),
            caption_error=error,
            is_caption_out_of_reach=is_out_of_reach,
            held_out=is_held_out,
            at=tuple(at),
            partners=tuple(
                Partner(kind=kind, name=name, place=place, at=tuple(own))
                for kind, name, place, own in (more[0] if more else ())
            ),
            partner_error=more[1] if more else None,
        )
        for sample_id, captions, error, is_out_of_reach, is_held_out, at, *more in json.loads(
            part.decode("utf-8", "surrogatepass")
        )
    ]


def _partners(item: SourceItem) -> tuple[list[tuple[str, str, int, tuple[int, ...]]], str | None] | tuple[()]:
    if not item.partners and item.partner_error is None:
        return ()
    return [(own.kind, own.name, own.place, own.at) for own in item.partners], item.partner_error
