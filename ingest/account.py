"""The account of a run: every image found is packed, unchanged or rejected, and that is checked, not assumed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.errors import AccountError
from bucketline.ingest.crop_loss import CropLoss, add_crop_losses

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bucketline.ingest.rejects import RejectedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """An image that was refused."""

    id: str
    reason: str
    detail: str


@dataclass(slots=True, kw_only=True)
class Account:
    """What became of one rank's images."""

    packed: int = 0
    unchanged: int = 0
    rejects: list[Reject] = field(default_factory=list)
    without_caption: int = 0  # packed with the empty caption
    enlarged: int = 0  # packed, and enlarged to fill their bucket
    crop_losses: dict[str, CropLoss] = field(default_factory=dict)  # by bucket
    captions_beyond: list[str] = field(default_factory=list)  # ids with more captions than a row holds
    captions_truncated: int = 0  # longer than the text encoder takes
    dropped: list[str] = field(default_factory=list)  # ids whose older row goes, because they became rejects
    stage_seconds: dict[str, float] = field(default_factory=dict)  # see `stages.Stages`

    def reject(self, sample_id: str, error: RejectedError) -> None:
        """Note a refused image."""
        self.rejects.append(Reject(id=sample_id, reason=error.reason.value, detail=error.detail))

    @property
    def total(self) -> int:
        return self.packed + self.unchanged + len(self.rejects)


def joined(accounts: Iterable[Account]) -> Account:
    """Add the ranks' accounts up."""
    whole = Account()
    for account in accounts:
        whole.packed += account.packed
        whole.unchanged += account.unchanged
        whole.without_caption += account.without_caption
        whole.enlarged += account.enlarged
        add_crop_losses(whole.crop_losses, account.crop_losses)
        whole.captions_truncated += account.captions_truncated
        whole.rejects += account.rejects
        whole.captions_beyond += account.captions_beyond
        whole.dropped += account.dropped
        for stage, seconds in account.stage_seconds.items():
            whole.stage_seconds[stage] = whole.stage_seconds.get(stage, 0.0) + seconds
    whole.rejects.sort(key=lambda reject: reject.id)
    return whole


def check_identity(found: int, account: Account) -> None:
    """Check that found = packed + unchanged + rejected.

    Raises:
        AccountError: where an image was lost or counted twice; the numbers are named.
    """
    if found != account.total:
        raise AccountError(
            f"the account does not add up: {found} images found, {account.packed} packed + {account.unchanged} unchanged "
            f"+ {len(account.rejects)} rejected = {account.total}; nothing was published, please report this"
        )


def rejects_as_lines(account: Account) -> bytes:
    """Give the content of `rejects.jsonl`."""
    lines = (json.dumps({"id": r.id, "reason": r.reason, "detail": r.detail}) + "\n" for r in account.rejects)
    return "".join(lines).encode("ascii")


def by_reason(account: Account) -> dict[str, int]:
    """Count the rejects by reason, most frequent first."""
    return dict(Counter(reject.reason for reject in account.rejects).most_common())
