"""The command `store push`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bucketline.command_line import counted, human_bytes, print_json, refuse_below
from bucketline.options import Positional
from bucketline.store.commands.place import ChangingArguments, LocalStore, StoreUrl


@dataclass(frozen=True, kw_only=True)
class Push(ChangingArguments):
    """Send a store to object storage: s3://, gs://, az://, or file:// for a mounted disk.

    Only what is not there yet is sent, each file compared with its digest on the way. Readers see the new generation once all
    of it is there. If it is interrupted, run it again.

    Example: store push photos.store s3://bucket/photos.store
    """

    store: Positional[LocalStore]
    """Path to the store."""
    url: Positional[StoreUrl]
    """Target: a folder in a bucket, empty or with an earlier generation of the same store."""
    jobs: int = 4
    """Number of shards to send at the same time."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.commands.progress import Tally, byte_progress
        from bucketline.store.sync.push import push

        refuse_below(1, jobs=self.jobs)
        folder = self.objects(self.url)
        with byte_progress("push") as on_bytes:
            report = Tally(on_bytes)
            done = push(self.store, folder, jobs=self.jobs, on_total=report.expect, on_bytes=report.add)
        if self.json:
            print_json(asdict(done))
            return 0
        there = f", {human_bytes(done.sent.bytes_there)} were there" if done.sent.files_there else ""
        committed = "" if done.is_committed else ", which was there"
        print(
            f"{folder.url}: {counted(done.sent.files, 'file')} with {human_bytes(done.sent.num_bytes)} sent{there}; generation "
            f"{done.generation} with {counted(done.samples, 'sample')}{committed}"
        )
        return 0
