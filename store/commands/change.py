"""Commands that change a store, here or at a URL, and that carry it there and back."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bucketline.command_line import counted, default_cache, human_bytes, one_line, print_json, printable, refuse_below
from bucketline.errors import UsageError
from bucketline.option_value import ByteSize, Duration
from bucketline.options import Arg, Positional
from bucketline.store.commands.look import USUAL_SHARD, ChangingArguments, LocalStore, NewStore, StorePlace, StoreUrl, shown

if TYPE_CHECKING:
    from bucketline.store.change.compact import Collected
    from bucketline.store.change.repair import Repaired, RepairedShard
    from bucketline.store.remote.cache.folder import CachedStore


@dataclass(frozen=True, kw_only=True)
class Drop(ChangingArguments):
    """Drop samples from a store. Their bytes stay until `store compact`; older generations keep them.

    Their ids are withdrawn: the next packs leave these images out, also if they change. `ingest pack --take-back ID` packs one
    again. `store repair` drops the samples that cannot be read, and withdraws none.

    Example: store drop photos.store other0/0.png other2/2.png
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    ids: Annotated[Positional[tuple[str, ...]], Arg(metavar="[ID …]")] = ()
    """Sample ids: paths in the source, including the extension."""
    from_file: Annotated[Path | None, Arg(metavar="FILE")] = None
    """Read more ids from this file, one per line."""
    match: Annotated[str | None, Arg(metavar="GLOB")] = None
    """Drop the ids that match a pattern of *, ? and [abc], as for `store ls`; * also matches slashes. See --dry-run."""
    dry_run: bool = False
    """Check and report without changing the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.change.commit import drop, read_ids

        ids = (*self.ids, *(read_ids(self.from_file) if self.from_file else ()))
        done = drop(self.path_or_objects(self.store), ids, match=self.match, dry_run=self.dry_run)
        if self.json:
            report = {"generation": done.generation, "dropped": list(done.ids), "samples": done.samples}
            print_json({**report, "dry_run": self.dry_run})
        elif self.dry_run:
            print(f"{shown(self.store)}: would drop {counted(len(done.ids), 'sample')}, {done.samples} would stay")
        else:
            print(
                f"{shown(self.store)}: {counted(len(done.ids), 'sample')} dropped, {done.samples} stay; "
                f"generation {done.generation}"
            )
            print("  later packs leave out what was dropped; `ingest pack … --take-back ID` packs one again")
        return 0


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
        from bucketline.store.commands.look import byte_progress

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
    found = f"{counted(len(collected.generations), 'generation')} and {counted(len(collected.files), 'file')} {verb}"
    print(
        f"  {found}, {human_bytes(collected.disk_bytes)}" if collected.generations or collected.files else f"  nothing {verb}"
    )
    for name in collected.files:
        print(f"    {one_line(name)}")
    if collected.waiting:
        print(
            f"  {counted(len(collected.waiting), 'generation')} superseded less than {older_than} ago are kept, with the files "
            "only they use, for runs that may read them; `--gc --older-than 0s` removes them now, if no such run is left"
        )


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Create a new store from several. They must share the same encoders and rules, and no sample's id.

    Pull stores that are at a URL first, and push the new one.

    Example: store merge all.store photos.store more.store
    """

    out: Positional[NewStore]
    """Path of the new store; must not exist yet."""
    stores: Annotated[Positional[tuple[LocalStore, ...]], Arg(metavar="STORE [STORE …]")]
    """Paths of the input stores, opened read-only."""
    dry_run: bool = False
    """Check and report without writing."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.change.merge import merge
        from bucketline.store.commands.look import byte_progress

        with byte_progress("merge") as on_bytes:
            done = merge(self.out, self.stores, dry_run=self.dry_run, on_bytes=on_bytes)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        verb = "would get" if self.dry_run else "has"
        what = f"{counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}"
        print(f"{shown(self.out)} {verb} {what}, {human_bytes(done.num_bytes)} copied")
        return 0


_NAMED = 10  # number of dropped ids printed per shard; --json prints all


@dataclass(frozen=True, kw_only=True)
class Repair(ChangingArguments):
    """Repair a damaged store: read it once, keep readable samples and drop the rest. `store verify` names these before.

    Running the same `ingest pack` again restores dropped samples whose images the source still has. Missing or damaged
    sidecars are rebuilt. Damaged files stay until `store compact --gc`, because older generations may still read parts of
    them. Of a store at a URL, the damaged shards are got to a temporary folder.

    Example: store repair photos.store
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    threads: Annotated[int | None, Arg(metavar="INT")] = None
    """Number of shards to read in parallel. Default: number of CPU cores."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.change.repair import repair
        from bucketline.store.commands.look import bar_of_bytes
        from bucketline.store.format.manifest import read_manifest
        from bucketline.store.remote.generations import newest_generation

        refuse_below(1, threads=self.threads)
        place = self.path_or_objects(self.store)
        manifest = read_manifest(place) if isinstance(place, Path) else newest_generation(place)
        with bar_of_bytes("repair", sum(shard.data_bytes for shard in manifest.shards)) as on_bytes:
            done = repair(place, threads=self.threads, on_bytes=on_bytes)
        if self.json:
            print_json(asdict(done))
        else:
            self._print(done)
        return 0

    def _print(self, done: Repaired) -> None:
        if not done.shards:
            print(f"{shown(self.store)}: nothing to repair, all of {counted(done.samples, 'sample')} can be read")
            return
        for shard in done.shards:
            print(f"  shard {one_line(shard.shard)}: {printable(self._what(shard))}")
            for sample_id in shard.dropped_ids[:_NAMED]:
                print(f"    dropped: {one_line(sample_id)}")
            if (more := shard.dropped - min(len(shard.dropped_ids), _NAMED)) > 0:
                of_them = f"{shard.dropped - len(shard.dropped_ids)} of them without a readable name; --json names the others"
                print(f"    dropped: {counted(more, 'sample')}, {of_them}")
        dropped = counted(done.dropped, "sample")
        print(f"{shown(self.store)}: {dropped} dropped, {done.samples} stay; generation {done.generation}")
        if done.dropped:
            print("  run the same `ingest pack` again: it packs the dropped samples whose images the source still has")
        if any(shard.is_replaced for shard in done.shards):
            print(
                f"  the damaged files stay until `store compact {shown(self.store)} --gc --older-than 0s`, and `store verify` "
                "reports them until then"
            )

    def _what(self, shard: RepairedShard) -> str:
        lost = (
            f"; its rows lose {', '.join(shard.lost_columns)}, which `add_column` gives to them again"
            if shard.lost_columns
            else ""
        )
        if not shard.is_replaced:
            rebuilt = f"{', '.join(shard.restored)} rebuilt, nothing lost"
            return f"{rebuilt if shard.restored else 'all of its samples can be read'}{lost}"
        where = f" in {', '.join(shard.written)}" if shard.written else ""
        return f"{shard.kept} of {counted(shard.kept + shard.dropped, 'sample')} can be read{where}{lost}"


@dataclass(frozen=True, kw_only=True)
class Restore(ChangingArguments):
    """Make an earlier generation the newest one again. It has exactly the samples it had; nothing is rewritten.

    Every pack, drop, compact and repair publishes a generation; earlier ones stay until `store compact --gc`. Without
    GENERATION, list those that are there. What was newest until then stays a generation as well, and can be restored.

    Example: store restore photos.store 3
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    generation: Annotated[Positional[int | None], Arg(metavar="[GENERATION]")] = None
    """Number of the generation. Default: only list the generations."""
    dry_run: bool = False
    """Check and report without changing the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        if self.generation is None:
            return self._list()
        from bucketline.store.change.commit import restore

        before, after = restore(self.path_or_objects(self.store), self.generation, dry_run=self.dry_run)
        is_changed, own = after is not before, self.generation
        if self.json:
            report = {"restored": own, "generation": (before if self.dry_run else after).generation, "is_changed": is_changed}
            print_json({**report, "samples_before": before.samples, "samples": after.samples, "dry_run": self.dry_run})
            return 0
        samples = f"{counted(after.samples, 'sample')} (there {'was' if before.samples == 1 else 'were'} {before.samples})"
        if not is_changed:
            print(f"{shown(self.store)}: nothing to restore, generation {before.generation} already has what {own} had")
        elif self.dry_run:
            print(f"{shown(self.store)}: would restore generation {own}, {samples}")
        else:
            print(f"{shown(self.store)}: generation {own} restored, {samples}; generation {after.generation}")
        return 0

    def _list(self) -> int:
        from bucketline.store.change.commit import earlier_generations

        found = earlier_generations(self.path_or_objects(self.store))
        if self.json:
            listed = [{"generation": one.generation, "samples": one.samples, "published": at} for one, at in found]
            print_json({"generations": listed})
            return 0
        for n, (one, published) in enumerate(found):
            when = dt.datetime.fromtimestamp(published).astimezone().isoformat(" ", "minutes")
            mark = "" if n else ", the newest"
            print(f"generation {one.generation}: {counted(one.samples, 'sample')}, published {when}{mark}")
        return 0


# ---------------------------------------------------------------------------------------------------------------------- remote
# The commands that only stores in object storage need: `store push`, `pull`, and `cache` for what is kept on this machine.


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
        from bucketline.store.commands.look import Tally, byte_progress
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
        from bucketline.store.commands.look import Tally, byte_progress
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
            use = "in use" if store.is_open else "not in use"
            pinned, ring = human_bytes(store.pinned_bytes), human_bytes(store.ring_bytes)
            about = f"{human_bytes(store.num_bytes)}, {pinned} kept, {ring} passing through, {use}"
            print(f"{shown(store.url)} ({shown(store.folder)}): {about}")
        print(f"{shown(path)}: {counted(len(kept), 'store')}, {human_bytes(sum(store.num_bytes for store in kept))}")
        return 0
