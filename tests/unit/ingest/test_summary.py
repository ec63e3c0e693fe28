"""Ranks' accounts add up, and rejects are listed in order."""

from __future__ import annotations

import json

from bucketline.ingest.images.crop import CropLoss, note_crop_loss
from bucketline.ingest.images.decode import Reason, RejectedError
from bucketline.ingest.summary import RunSummary, by_reason, check_identity, joined_summaries, rejects_as_lines


def test_accounts_of_several_ranks_are_added_up_in_every_part() -> None:
    one = RunSummary(packed=3, unchanged=1, without_caption=2, enlarged=1, captions_beyond=["a"], captions_truncated=4)
    other = RunSummary(packed=1, unchanged=5, without_caption=1, enlarged=3, captions_beyond=["b"], dropped=["c"])
    other.reject("z.png", RejectedError(Reason.EMPTY, "0 bytes"))
    one.reject("é\n.png", RejectedError(Reason.TOO_SMALL, "1x1"))
    one.reject("a.png", RejectedError(Reason.EMPTY, "0 bytes"))
    for account, bucket, lost in ((one, "a", 0.0), (one, "a", 0.25), (other, "a", 0.5), (other, "b", 0.25)):
        note_crop_loss(account.crop_losses, bucket, lost)
    whole = joined_summaries([one, other])
    assert whole.total == 3 + 1 + 1 + 5 + 3
    assert (whole.without_caption, whole.enlarged, whole.captions_truncated) == (3, 4, 4)
    assert (whole.captions_beyond, whole.dropped) == (["a", "b"], ["c"])
    check_identity(13, whole)
    assert whole.crop_losses == {"a": CropLoss(images=3, total=0.75, most=0.5), "b": CropLoss(images=1, total=0.25, most=0.25)}
    assert by_reason(whole) == {"empty file": 2, "too small": 1}
    lines = [json.loads(line) for line in rejects_as_lines(whole).splitlines()]
    assert [line["id"] for line in lines] == ["a.png", "z.png", "é\n.png"]
    assert set(lines[0]) == {"id", "reason", "detail"}
