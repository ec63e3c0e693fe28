"""Cost of `ingest pack`'s work on a listing, before and after encoding, by samples and shards; and its memory per rank."""

from __future__ import annotations

import sys
import time
import tracemalloc
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.ingest.parallel.item_parts import Outline
    from bucketline.ingest.sources.source import Listing

CAPTION = "a photograph of two boats under a grey sky at noon, {}"  # about 60 characters
# a cost of samples times shards would give 16 at the largest default; values above 1 come from opening a shard (0.3 ms) and
# from colder caches
LINEAR = Mark(bound=2.5, is_at_most=True)


@dataclass(frozen=True, kw_only=True)
class ListingAgainstStore(Case):
    """Measure rank 0's work in a run without new images, except listing and publishing's own files, in μs per sample.

    The source has exactly the store's images. The steps are: find new images (to check disk space), find samples that are no
    longer in the source, build each rank's index of packed images, and find rows replaced by those of other shards, with half
    of the shards new. Times are CPU time of one thread, with the stores' sidecars in the page cache. The limit is the smallest
    store's figure, so a cost that grows only with the samples stays near 1. The stores' payload is holes.

    Bytes are those that Python and numpy hold per image of the listing: as it comes from a source, and as kept by rank 0 and
    by another rank once each rank has its images. Ids and captions take about a hundred bytes here.

    Example: python -m bucketline.bench scale --listing --samples 250000 1000000 --shards 50 200
    """

    repeats: int = 3
    """Repeats per subject, in alternation. The first round is a warm-up and not counted."""
    samples: tuple[int, ...] = (250_000, 500_000, 1_000_000)
    """Samples per store, and images per listing."""
    shards: tuple[int, ...] = (50, 100, 200)
    """Shards per store; each is combined with each number of samples."""
    ranks: int = 8
    """Ranks that share a listing when its memory is measured."""

    def measure(self, folder: Path) -> list[Result]:
        timed: list[Subject] = []
        for samples in self.samples:
            for shards in self.shards:
                timed += _timed(folder, samples, shards)
        held = [Subject(name=name, measure=measure) for name, measure in self._kept().items()]
        limits = {step: subject.name for subject in reversed(timed) for step in [subject.name.partition(":")[0]]}
        timed = [
            Subject(name=subject.name, measure=subject.measure, limit=limits[step], mark=LINEAR)
            for subject in timed
            for step in [subject.name.partition(":")[0]]
        ]
        return [
            *summarise("scale, listing", "μs/sample", timed, alternate(timed, self.repeats)),
            *summarise("scale, listing", "B/image", held, alternate(held, 1, warm_up=False)),
        ]

    def _kept(self) -> dict[str, Callable[[int], float]]:
        count = min(self.samples)
        names = {
            "as it comes from a source": lambda: _listing(count),
            "kept by rank 0 of 1": lambda: _dealt(count, 1, 0),
            f"kept by rank 0 of {self.ranks}": lambda: _dealt(count, self.ranks, 0),
            f"kept by rank 1 of {self.ranks}": lambda: _dealt(count, self.ranks, 1),
        }
        return {f"listing {name}": partial(_bytes_an_image, make, count) for name, make in names.items()}


def _timed(folder: Path, samples: int, shards: int) -> list[Subject]:
    """Make a store and return the subjects that use it."""
    from bucketline.bench.fixtures.sparse_store import kept_sparse_store
    from bucketline.ingest.listing_diff import not_in_source, unknown
    from bucketline.ingest.pipeline.packed_index import PackedIndex
    from bucketline.store import Store
    from bucketline.store.folder import LocalFolder
    from bucketline.store.write.change_base import ChangeBase
    from bucketline.store.write.publish import replaced

    path = kept_sparse_store(folder, shards, samples)
    outlines: list[Outline] = []

    def outline() -> Outline:
        if not outlines:
            outlines.append(_outline_of(path))
        return outlines[0]

    def publishing() -> None:
        manifest = Store.open(path).manifest
        entries, half = manifest.shards, len(manifest.shards) // 2
        base = ChangeBase(LocalFolder(path), replace(manifest, shards=entries[:half]), 1, path)
        if replaced(base, entries[half:], ()) != list(entries):
            raise AssertionError(f"{path}: rows were replaced, and no sample is there twice")

    def new() -> None:
        if unknown(Store.open(path), outline()).any():
            raise AssertionError(f"{path}: images are new, and all are its own")

    def gone() -> None:
        if len(not_in_source(Store.open(path), outline())):
            raise AssertionError(f"{path}: samples are not in the source, and all are")

    steps: dict[str, Callable[[], object]] = {
        "which are new": new,
        "which are gone": gone,
        "what a rank looks up in": lambda: PackedIndex(Store.open(path)),
        "which rows give way": publishing,
    }
    outline()  # outside the first figure
    return [
        Subject(name=f"{step}: {samples:,} samples, {shards} shards", measure=partial(_microseconds, act, samples))
        for step, act in steps.items()
    ]


def _microseconds(act: Callable[[], object], samples: int, _: int) -> float:
    begin = time.process_time()
    act()
    return (time.process_time() - begin) / samples * 1e6


def _outline_of(path: Path) -> Outline:
    """Return the outline of a source whose images are the store's samples."""
    from bucketline.bench.fixtures.sparse_store import sample_ids
    from bucketline.ingest.parallel.item_parts import take_apart
    from bucketline.ingest.sources.source import Listing, SourceItem
    from bucketline.store import Store

    shards = Store.open(path).manifest.shards
    ids = chain.from_iterable(sample_ids(shard.name, shard.samples) for shard in shards)
    items = [SourceItem(id=sample_id, captions=()) for sample_id in sorted(ids)]
    return take_apart(Listing(items=items), 1)[0]


def _listing(count: int) -> Listing:
    from bucketline.ingest.sources.source import Listing, SourceItem

    items = [SourceItem(id=f"photographs/{n // 1000:05d}/{n:09d}.jpg", captions=(CAPTION.format(n),)) for n in range(count)]
    return Listing(items=items)


def _dealt(count: int, num_ranks: int, rank: int) -> object:
    """Return what a rank keeps: its images, and on rank 0 also the outline of all images."""
    from bucketline.ingest.parallel.item_parts import take_apart

    outline, slices = take_apart(_listing(count), num_ranks)
    return (outline, slices[0]) if rank == 0 else slices[rank]


def _bytes_an_image(make: Callable[[], object], count: int, _: int) -> float:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        now = tracemalloc.get_traced_memory()[0]
        del made
    finally:
        tracemalloc.stop()
    return (now - before) / count


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(ListingAgainstStore)


if __name__ == "__main__":
    sys.exit(main())
