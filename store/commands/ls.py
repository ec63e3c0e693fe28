"""`store ls`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bucketline.command_line import one_line, print_json_line
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ReadingArguments, StorePlace, shown

if TYPE_CHECKING:
    from bucketline.store.read.iter_samples import Listed
    from bucketline.store.read.store import Store


@dataclass(frozen=True, kw_only=True)
class Ls(ReadingArguments):
    r"""List samples: id, tab, bucket, in shard, bucket and row order.

    Unprintable characters and backslashes are printed as Python escapes; --json prints ids unchanged.

    Example: store ls photos.store --split train --match 'coffee/*'
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    split: Literal["train", "val"] | None = None
    """List only this split. Default: both."""
    bucket: Annotated[str | None, Arg(metavar="NAME")] = None
    """List only this bucket, such as train/256x192. Default: all."""
    match: Annotated[str | None, Arg(metavar="GLOB")] = None
    """List only ids that match a pattern of *, ? and [abc]; * also matches slashes."""
    json: bool = False
    """Print JSON Lines: one object per sample with its row (in the store's bucket), shard, captions and source."""

    def run(self) -> int:
        from bucketline.store.read.iter_samples import Selection, live_samples

        store, num_listed = self.open_store(self.store), 0
        for listed in live_samples(store, Selection(split=self.split, bucket=self.bucket, match=self.match)):
            num_listed += 1
            if self.json:
                print_json_line(_report(store, listed))
            else:
                print(f"{one_line(listed.record.id)}\t{listed.record.bucket}")
        if num_listed == 0:
            asked = {"--split": self.split, "--bucket": self.bucket, "--match": self.match}
            given = " ".join(f"{option} {value!r}" for option, value in asked.items() if value is not None)
            print(f"no sample matches {given}" if given else f"{shown(self.store)} has no sample", file=sys.stderr)
        return 0


def _report(store: Store, listed: Listed) -> dict[str, Any]:
    record = listed.record
    return {
        "id": record.id,
        "bucket": record.bucket,
        "row": listed.row,
        "shard": store.shards[listed.shard].name,
        "captions": record.captions,
        "original_size": record.original_size,
        "source": record.source,
        "source_bytes": record.source_bytes,
    }
