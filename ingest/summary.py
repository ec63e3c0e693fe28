"""Summary of a run. Every image found is packed, unchanged, rejected or withdrawn; `check_identity` verifies the sum."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from bucketline.command_line import counted, per_second
from bucketline.errors import AccountError
from bucketline.ingest.images.crop import CropLoss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bucketline.ingest.images.crop import Placement, RejectedError

WITHOUT_CAPTION = "without_caption.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A rejected image."""

    id: str
    reason: str
    detail: str


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """Counts of what happened to the images of one rank."""

    packed: int = 0
    latents_kept: int = 0  # packed images whose latents were reused from the store
    moved: int = 0  # packed images that the store had in its other split
    unchanged: int = 0
    withdrawn: int = 0  # left out, since `store drop` withdrew their ids
    rejects: list[Reject] = field(default_factory=list)
    without_caption: int = 0  # packed with the empty caption
    enlarged: int = 0  # packed images that were enlarged to fill their bucket
    crop_losses: dict[str, CropLoss] = field(default_factory=dict)  # by bucket
    buckets: dict[str, int] = field(default_factory=dict)  # packed images
    references: dict[str, int] = field(default_factory=dict)  # packed images by their number of references, of stores with some
    pairs: int = 0  # of these references: those that have their target's place
    zero_masks: list[str] = field(default_factory=list)  # ids of packed images whose mask is zero everywhere
    left_out: dict[str, int] = field(default_factory=dict)  # what imported samples have that a store does not take
    captions_beyond: list[str] = field(default_factory=list)  # ids with more captions than a row holds
    dropped: list[str] = field(default_factory=list)  # ids whose existing row is dropped, because the image is now rejected
    unreadable: int = 0  # rejects that could not be read at present, though the image may be fine
    unreadable_first: list[str] = field(default_factory=list)  # their ids, of each rank the first
    kept: list[str] = field(default_factory=list)  # ids of unreadable images whose existing row stays
    stage_seconds: dict[str, float] = field(default_factory=dict)  # see `StageTimer`
    has_encoded: bool = False  # an encoder was needed, and compared with the store's
    on_shared_cores: bool = False  # the encoders ran on the CPU

    def count_packed(self, sample_id: str, captions: Sequence[str], placed: Placement, bucket: str, max_captions: int) -> None:
        self.packed += 1
        self.without_caption += not captions
        self.enlarged += placed.enlarged
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        lost = CropLoss(images=1, total=placed.cropped_away, most=placed.cropped_away)
        self.crop_losses[bucket] = self.crop_losses.get(bucket, CropLoss()) + lost
        if len(captions) > max_captions:
            self.captions_beyond.append(sample_id)

    def count_partners(self, sample_id: str, num_references: int | None, num_pairs: int, *, is_masked_out: bool) -> None:
        """Count a packed image by its references, None if the store has none, and note one whose mask is zero everywhere."""
        self.pairs += num_pairs
        if num_references is not None:
            self.references[str(num_references)] = self.references.get(str(num_references), 0) + 1
        if is_masked_out:
            self.zero_masks.append(sample_id)

    def reject(self, sample_id: str, error: RejectedError, *, is_stored: bool = False) -> None:
        """Record a rejected image, and whether its existing row, if any, is dropped or kept."""
        self.rejects.append(Reject(id=sample_id, reason=error.reason.value, detail=error.detail))
        self.unreadable += error.is_passing
        if error.is_passing and not self.unreadable_first:
            self.unreadable_first.append(sample_id)
        if is_stored:
            (self.kept if error.is_passing else self.dropped).append(sample_id)

    @property
    def total(self) -> int:
        return self.packed + self.unchanged + len(self.rejects) + self.withdrawn


def joined_summaries(accounts: Iterable[RunSummary]) -> RunSummary:
    """Merge the summaries of all ranks into one."""
    whole = RunSummary()
    for account in accounts:
        for name in (one.name for one in fields(RunSummary)):
            mine, own = getattr(whole, name), getattr(account, name)
            if isinstance(mine, dict):
                mine.update({key: mine[key] + value if key in mine else value for key, value in own.items()})
            else:  # counts and lists; of what is true or false, whether it is for one of them
                setattr(whole, name, mine or own if isinstance(mine, bool) else mine + own)
    whole.rejects.sort(key=lambda reject: reject.id)
    whole.dropped.sort()
    whole.kept.sort()
    whole.unreadable_first.sort()
    return whole


def check_identity(found: int, account: RunSummary) -> None:
    """Check that found = packed + unchanged + rejected + withdrawn."""
    if found != account.total:
        raise AccountError(
            f"the account does not add up: {found} images found, {account.packed} packed + {account.unchanged} unchanged "
            f"+ {len(account.rejects)} rejected + {account.withdrawn} withdrawn = {account.total}; nothing was published, "
            "please report this"
        )


def by_number(counts: dict[str, int]) -> dict[str, int]:
    """Return counts by a number, in its order."""
    return {number: counts[number] for number in sorted(counts, key=int)}


def partner_notes(account: RunSummary) -> list[str]:
    """Return notes that count the packed images by their references, and name those whose mask is zero everywhere."""
    notes = []
    if account.references:
        counts = (f"{counted(images, 'image')} with {number}" for number, images in by_number(account.references).items())
        pairs = f"; {counted(account.pairs, 'reference')} of their image's size, cropped with it" if account.pairs else ""
        notes.append(f"references: {', '.join(counts)}{pairs}")
    if account.zero_masks:
        named = ", ".join(account.zero_masks[:10]) + ", …" * (len(account.zero_masks) > 10)
        number = counted(len(account.zero_masks), "image")
        notes.append(f"{number} with a mask that is zero everywhere, or 1 of 255 at most, so that it adds nothing: {named}")
    return notes


def rejects_as_lines(account: RunSummary) -> bytes:
    lines = (json.dumps({"id": r.id, "reason": r.reason, "detail": r.detail}) + "\n" for r in account.rejects)
    return "".join(lines).encode("ascii")


def without_caption_as_lines(listed: bytes, account: RunSummary) -> bytes:
    """Return the content of `without_caption.jsonl`: images without a caption, except rejects.

    `listed` has a line for each image without a caption, rejects included.
    """
    rejected = {as_line(reject.id) for reject in account.rejects}
    return b"".join(line for line in listed.splitlines(keepends=True) if line not in rejected)


def as_line(sample_id: str) -> bytes:
    """Return the line of one image in `without_caption.jsonl`."""
    return (json.dumps({"id": sample_id}) + "\n").encode("ascii")


def by_reason(account: RunSummary) -> dict[str, int]:
    """Count the rejects by reason, most frequent first."""
    return dict(Counter(reject.reason for reject in account.rejects).most_common())


def took(number: int, seconds: float, noun: str) -> str:
    """Return how long a run took, with its rate if it took a second or more."""
    rate = f" ({per_second(number / seconds, noun)})" if number and seconds >= 1 else ""
    return f"in {seconds:.1f} s{rate}"


def plus_withdrawn(count: int) -> str:
    """Return the term of withdrawn images in the sum of a summary's first line; empty if there are none."""
    return f" + {count} withdrawn" if count else ""


def print_withdrawn(count: int) -> None:
    """Print how many images were left out because `store drop` withdrew them, and how to take one back."""
    if count:
        print(f"  withdrawn: {count} (store drop); --take-back ID packs one again")
