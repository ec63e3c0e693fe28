"""The command `store pull`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bucketline.command_line import counted, human_bytes, print_json, refuse_below
from bucketline.options import Positional
from bucketline.store.commands.place import ChangingArguments, LocalStore, StoreUrl


@dataclass(frozen=True, kw_only=True)
class Pull(ChangingArguments):
    """Get a store to a disk. If it is interrupted, run it again.

    If STORE is an older generation of the same store, only what it lacks is sent.

    Example: store pull s3://bucket/photos.store photos.store
    """

    url: Positional[StoreUrl]
    """Source: s3://, gs://, az://, https:// or file://."""
    store: Positional[LocalStore]
    """Path to write the store to."""
    jobs: int = 4
    """Number of files to get at the same time."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.commands.progress import Tally, byte_progress
        from bucketline.store.sync.pull import pull

        refuse_below(1, jobs=self.jobs)
        folder = self.objects(self.url)
        with byte_progress("pull") as on_bytes:
            report = Tally(on_bytes)
            done = pull(folder, self.store, jobs=self.jobs, on_total=report.expect, on_bytes=report.add)
        if self.json:
            print_json(asdict(done))
            return 0
        print(
            f"{self.store}: {counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}, "
            f"generation {done.generation}; {human_bytes(done.num_bytes)} received"
        )
        return 0
