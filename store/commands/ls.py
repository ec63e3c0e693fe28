"""`store ls`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bucketline.commands import one_line, print_json_line

if TYPE_CHECKING:
    from bucketline.store.listing import Listed
    from bucketline.store.reader import Store


@dataclass(frozen=True, kw_only=True)
class Ls:
    r"""List the samples: a line each, with the id, a tab and the bucket, by shard, bucket and row.

    Characters that would break a line, and the backslash, are escaped as Python escapes them; --json has every id as it is.

    Example: store ls photos.store --split train --match 'coffee/*'
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
    """The store's folder."""
    split: Literal["train", "val"] | None = None
    """Samples of this split alone."""
    bucket: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Samples of this bucket alone, such as train/256x192."""
    match: Annotated[str | None, tyro.conf.arg(metavar="GLOB")] = None
    """Samples whose id fits a pattern of *, ? and [abc]; * takes slashes too."""
    json: bool = False
    """Print JSON Lines: an object a sample, with its row (as Bucket counts), shard, captions and source."""

    def run(self) -> int:
        from bucketline.store.listing import Selection, live_samples
        from bucketline.store.reader import Store

        store, num_listed = Store.open(self.store), 0
        for listed in live_samples(store, Selection(split=self.split, bucket=self.bucket, match=self.match)):
            num_listed += 1
            if self.json:
                print_json_line(_report(store, listed))
            else:
                print(f"{one_line(listed.record.id)}\t{listed.record.bucket}")
        if num_listed == 0:
            asked = {"--split": self.split, "--bucket": self.bucket, "--match": self.match}
            given = " ".join(f"{option} {value!r}" for option, value in asked.items() if value is not None)
            print(f"no sample matches {given}" if given else f"{self.store} has no sample", file=sys.stderr)
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
