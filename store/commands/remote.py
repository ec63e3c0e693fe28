"""The commands that only stores in object storage need: `store push`, `pull`, and `cache` for what is kept on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bucketline.command_line import counted, default_cache, human_bytes, print_json, refuse_below
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ChangingArguments, LocalStore, StoreUrl, shown

if TYPE_CHECKING:
    from bucketline.store.remote.cache.folder import CachedStore


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
        from bucketline.store.commands.place import Tally, byte_progress
        from bucketline.store.sync.push_pull import push

        refuse_below(1, jobs=self.jobs)
        folder = self.objects(self.url)
        with byte_progress("push") as on_bytes:
            report = Tally(on_bytes)
            done = push(self.store, folder, jobs=self.jobs, on_total=report.expect, on_bytes=report.add)
        if self.json:
            print_json(asdict(done))
            return 0
        committed = "" if done.is_committed else ", which was there"
        print(
            f"{folder.url}: {counted(done.files, 'file')} with {human_bytes(done.num_bytes)} sent; generation "
            f"{done.generation} with {counted(done.samples, 'sample')}{committed}"
        )
        return 0


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
        from bucketline.store.commands.place import Tally, byte_progress
        from bucketline.store.sync.push_pull import pull

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


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Show or clear the cache of stores in object storage: what it holds (info), or remove what no process has open (clear).

    Example: store cache info
    """

    action: Annotated[Positional[Literal["info", "clear"]], Arg(metavar="{info,clear}")]
    """info or clear."""
    cache: Path | None = None
    """Folder of the cache; None: BUCKETLINE_CACHE, or bucketline in the user's cache directory."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.remote.cache.folder import cache_folder, is_cache

        path = self.cache or default_cache()
        removed: list[CachedStore] = []
        kept: list[CachedStore] = []
        if is_cache(path):
            folder = cache_folder(path)
            if self.action == "clear":
                removed, kept = folder.clear()
            else:
                kept = list(folder.stores())
        if self.json:
            print_json({"cache": str(path), "stores": list(map(asdict, kept)), "removed": list(map(asdict, removed))})
            return 0
        for store in removed:
            print(f"removed {shown(store.url)} ({shown(store.folder)}): {human_bytes(store.num_bytes)}")
        for store in kept:
            use = "open" if store.is_open else "not open"
            pinned, ring = human_bytes(store.pinned_bytes), human_bytes(store.ring_bytes)
            about = f"{human_bytes(store.num_bytes)}, {pinned} pinned, {ring} in the ring, {use}"
            print(f"{shown(store.url)} ({shown(store.folder)}): {about}")
        print(f"{shown(path)}: {counted(len(kept), 'store')}, {human_bytes(sum(store.num_bytes for store in kept))}")
        return 0
