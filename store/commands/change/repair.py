"""The command `store repair`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bucketline.command_line import counted, one_line, print_json, printable, refuse_below
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ChangingArguments, StorePlace, shown

if TYPE_CHECKING:
    from bucketline.store.change.repair import Repaired, RepairedShard

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
        from bucketline.store.commands.progress import bar_of_bytes
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
                unnamed = shard.dropped - len(shard.dropped_ids)
                of_them = f", {unnamed} of them without a readable name" if unnamed else "; --json names all"
                print(f"    dropped: {counted(more, 'more sample') if shard.dropped_ids else counted(more, 'sample')}{of_them}")
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
