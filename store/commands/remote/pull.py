"""The command `store pull`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from bucketline.command_line import counted, human_bytes, print_json, refuse_below
from bucketline.options import Arg, Positional, Repeated
from bucketline.store.commands.place import ChangingArguments, LocalStore, StoreUrl


@dataclass(frozen=True, kw_only=True)
class Pull(ChangingArguments):
    """Get a store, or some of its rows, to a disk. If it is interrupted, run it again.

    If STORE is an older generation of the same store, only what it lacks is sent.

    Example: store pull s3://bucket/photos.store val.store --split val
    """

    url: Positional[StoreUrl]
    """Source: s3://, gs://, az://, https:// or file://."""
    store: Positional[LocalStore]
    """Path to write the store to."""
    split: Literal["train", "val"] | None = None
    """Only rows of this split, into a new store."""
    bucket: Annotated[Repeated[tuple[str, ...]], Arg(metavar="NAME")] = ()
    """Only rows of this bucket, such as train/1024x768, into a new store. Repeatable."""
    ids: Annotated[Repeated[tuple[str, ...]], Arg(metavar="PATTERN")] = ()
    """Only samples with this id, or whose id matches this pattern of * and ? (boats/*.png), into a new store. Repeatable."""
    generation: int | None = None
    """Generation to get. Default: the newest."""
    jobs: int = 4
    """Number of files to get at the same time."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.commands.progress import Tally, byte_progress
        from bucketline.store.sync.pull import pull
        from bucketline.store.sync.selection import PullSelection

        refuse_below(1, jobs=self.jobs)
        refuse_below(0, generation=self.generation)
        folder = self.objects(self.url)
        with byte_progress("pull") as on_bytes:
            report = Tally(on_bytes)
            done = pull(
                folder,
                self.store,
                PullSelection(split=self.split, buckets=self.bucket, ids=self.ids),
                generation=self.generation,
                jobs=self.jobs,
                on_total=report.expect,
                on_bytes=report.add,
            )
        if self.json:
            print_json(asdict(done))
            return 0
        copied = f", of {counted(done.copied, 'shard')} only some rows" if done.copied else ""
        print(
            f"{self.store}: {counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}, "
            f"generation {done.generation}; {human_bytes(done.num_bytes)} received{copied}"
        )
        return 0
