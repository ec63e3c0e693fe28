"""The command `store compact`."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_bytes, one_line, print_json
from bucketline.errors import UsageError
from bucketline.option_value import ByteSize, Duration
from bucketline.options import Positional
from bucketline.store.commands.place import USUAL_SHARD, ChangingArguments, StorePlace, shown

if TYPE_CHECKING:
    from bucketline.store.change.garbage_collect import Collected


OLDER_THAN = Duration(seconds=86400.0)


@dataclass(frozen=True, kw_only=True)
class Compact(ChangingArguments):
    """Rewrite shards with dropped rows, join small ones. Row order is kept.

    Readers of older generations keep their files until garbage collection.

    Example: store compact photos.store --gc --older-than 24h
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    shard_size: ByteSize = USUAL_SHARD
    """Shard size, such as 512MiB. Shards smaller than a quarter of it are joined."""
    gc: bool = False
    """Afterwards, remove generations superseded longer ago than --older-than, and the files only they use."""
    older_than: Duration | None = None
    """Minimum time since a generation was superseded, for --gc: 90m, 7d, 0s. Default: 24h."""
    dry_run: bool = False
    """Report what would change without changing it."""
    json: bool = False
    """Print the result as one JSON object."""

    def __post_init__(self) -> None:
        ChangingArguments.__post_init__(self)
        if self.older_than is not None and not self.gc:
            raise UsageError(f"--older-than {self.older_than} requires --gc; add --gc, or leave it out")

    def run(self) -> int:
        from bucketline.store.change.compact import compact
        from bucketline.store.commands.progress import byte_progress

        older_than = self.older_than or OLDER_THAN
        gc_older_than_s, shard_bytes, dry_run = older_than.seconds if self.gc else None, self.shard_size.num_bytes, self.dry_run
        with byte_progress("compact") as on_bytes:
            place = self.path_or_objects(self.store)
            done = compact(place, shard_bytes=shard_bytes, gc_older_than_s=gc_older_than_s, dry_run=dry_run, on_bytes=on_bytes)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        if done.rewritten:
            verb, about = ("would be rewritten", "about ") if self.dry_run else (f"rewritten as {len(done.written)}", "")
            rows = f"{counted(done.rows, 'row')} kept, {counted(done.dropped, 'dropped row')}"
            print(
                f"{shown(self.store)}: {counted(len(done.rewritten), 'shard')} {verb}; {rows} left "
                f"out, {human_bytes(done.before_bytes)} to {about}{human_bytes(done.after_bytes)}; generation {done.generation}"
            )
        else:
            print(f"{shown(self.store)}: nothing to compact, there are no dropped rows and no small neighbouring shards")
        if done.collected is not None:
            _print_collected(done.collected, older_than, is_dry=self.dry_run)
        elif done.rewritten and not self.dry_run:
            print(
                "  the old files stay for readers of older generations; "
                f"`store compact {shown(self.store)} --gc` removes them later"
            )
        return 0


def _print_collected(collected: Collected, older_than: Duration, *, is_dry: bool) -> None:
    verb = "would be removed" if is_dry else "removed"
    print(
        f"  {counted(len(collected.generations), 'generation')} and {counted(len(collected.files), 'file')} {verb}, "
        f"{human_bytes(collected.disk_bytes)}"
    )
    for name in collected.files:
        print(f"    {one_line(name)}")
    if collected.waiting:
        last = max(waiting.until for waiting in collected.waiting)
        until = dt.datetime.fromtimestamp(last).astimezone().isoformat(" ", "minutes")
        what = counted(len(collected.waiting), "generation")
        print(
            f"  {what} superseded less than {older_than} ago are kept, with the files only they use, for runs that may "
            f"read them; `--gc` removes the last of them after {until}, `--gc --older-than 0s` removes them now, if no such "
            "run is left"
        )
