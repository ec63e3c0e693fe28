"""`loader seen`: at which steps, and how, a run has seen a sample."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.command_line import counted, one_line, print_json, print_json_line, printable
from bucketline.errors import UsageError
from bucketline.files.paths import why_unread
from bucketline.options import Arg, Positional, Repeated
from bucketline.store.remote.urls import RemoteArguments
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from bucketline.loader.seen import Seen, Sighting


_NAMED = 3  # ids that the run's stores do not have


@dataclass(frozen=True, kw_only=True)
class SeenCommand(RemoteArguments):
    """Print at which steps a run has seen a sample: on which rank, with which caption, crop and flip.

    It is computed from the run's `plans.jsonl`. The generations that the run read must still be there. Steps that cannot be
    told, and ids that the run's stores do not have, are named on stderr, and the exit code is 1. A sample that only pads a
    batch, with weight 0, is not seen.

    Example: loader seen --run runs/a --id cats/a.png
    """

    SECTION = "seen: samples to tell of"
    ONE_OF = (("id", "ids", "all"),)

    stores: Positional[tuple[str, ...]] = ()
    """Folders or URLs of the run's stores that have moved."""
    of_run: Annotated[Path, Arg(name="run", metavar="RUN")]
    """Folder of the run (up to its newest checkpoint), a checkpoint in it, or a JSON file with a loader's `state_dict()`, with
    the loop's `plans.jsonl` next to it if its plan changed."""
    id: Annotated[Repeated[tuple[str, ...]], Arg(metavar="ID")] = ()
    """Sample id: the path in the source, including the extension. May be repeated."""
    ids: Annotated[Path | None, Arg(metavar="FILE")] = None
    """Read sample ids from a file, one per line."""
    all: bool = False
    """List every sample of the run's split: how often it was seen, 0 for never, and at which steps first and last."""
    json: bool = False
    """Print one JSON object; with --all, JSON Lines."""

    def __post_init__(self) -> None:
        RemoteArguments.__post_init__(self)
        if (self.id or self.ids) and self.all:
            raise UsageError("--all is given with --id or --ids, expected one of them; leave the other out")

    def run(self) -> int:
        from bucketline.loader.seen import read_run

        run = read_run(self.of_run, "--run")
        from bucketline.loader.seen import Seen

        seen = Seen(run, self.stores, self.remote())
        faults = list(seen.unknown)
        if self.all:
            self._print_all(seen)
        else:
            faults += self._print_each(seen, run.steps)
        for fault in faults:
            print(f"error: {printable(fault)}", file=sys.stderr)
        return 1 if faults else 0

    def _ids(self) -> list[str]:
        if self.ids is None:
            return list(self.id)
        try:
            lines = self.ids.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--ids {self.ids} {why_unread(error)}; expected one sample id per line") from error
        return [*self.id, *filter(None, lines)]

    def _print_each(self, seen: Seen, steps: int) -> list[str]:
        """Print the steps of each sample; return what is wrong with ids that the run's stores do not have."""
        ids = self._ids()
        samples = [(sample_id, *sighted) for sample_id, sighted in zip(ids, seen.find(ids), strict=True)]
        if self.json:
            encoded = [
                {"id": sample_id, "count": len(sightings), "buckets": buckets, "seen": encode(sightings)}
                for sample_id, sightings, buckets in samples
            ]
            print_json({"steps": steps, "samples": encoded, "unknown": seen.unknown})
        for sample_id, sightings, buckets in samples if not self.json else ():
            where = f"in {', '.join(buckets)}" if buckets else "in no generation that the run read"
            times = {0: "never seen", 1: "seen once"}.get(len(sightings), f"seen {len(sightings)} times")
            print(f"{one_line(sample_id)}: {times} in {counted(steps, 'step')}, {where}")
            for sighting in sightings:
                print(f"  {printable(_line_of(sighting))}")
        missing = [repr(sample_id) for sample_id, _, buckets in samples if not buckets]
        named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        about = f"no generation that the run read has {named}; ids are paths in the source, with their extension"
        return [about] if missing else []

    def _print_all(self, seen: Seen) -> None:
        total = 0
        for sample_id, count, first, last in seen.every_sample():
            total += 1
            if self.json:
                steps: dict[str, Any] = {"first": first, "last": last} if count else {}
                print_json_line({"id": sample_id, "count": count, **steps})
            else:
                print(f"{one_line(sample_id)}\t{count}" + (f"\t{first}\t{last}" if count else ""))
        print(f"{counted(total, 'sample')}: id, times seen, first and last step", file=sys.stderr)


def _line_of(sighting: Sighting) -> str:
    caption = "the empty caption" if sighting.text is None else f"caption {sighting.caption} ({one_line(sighting.text)!s:.80})"
    flipped = ", flipped" if sighting.flipped else ""
    return (
        f"step {sighting.step} (epoch {sighting.epoch}) on rank {sighting.rank}, micro-batch {sighting.micro_step}, "
        f"position {sighting.position}: {caption}, crop at {sighting.crop[0]}, {sighting.crop[1]}{flipped}; "
        f"{sighting.store} generation {sighting.generation}"
    )
