"""Cost of making batches with captions of 60 to 512 tokens: hot compared with memcpy, cold compared with O_DIRECT reads."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.batches import Batches
from bucketline.bench.cold_runs import DIRECT, MARK, ColdRun, _count, _per_round, _subject, plan_captions
from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, run_case, summarise
from bucketline.bench.memcpy import Copies
from bucketline.loader import LoaderConfig
from bucketline.loader.collate.buffer_pool import carve
from bucketline.loader.prefetch.readahead import AHEAD_BYTES, WINDOW
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class RaggedText(Case):
    """Measure how fast batches of ragged captions, padded to the longest of the store, and tiny latents are made.

    Batches are made as the loader's prefetch threads make them: planned, located, and copied into pooled buffers, each thread a
    batch of its own. `payload` counts only the bytes of real tokens; `written` all bytes of a batch, most of them tokens and
    padding. Each is compared with memcpy of as many bytes. The target is on `written`: compared with memcpy of only the
    payload, no padded stream can do much better than the payload's share of what it writes. When cold, every repeat is a fresh
    process that starts after the store's pages were dropped and reads through the loader's readahead, compared with O_DIRECT
    reads of the captions' lengths.

    Example: python -m bucketline.bench.loader.ragged_text --num-shards 32 --captions-per-shard 14
    """

    num_shards: int = 32
    """Shards of the store. A batch spans most of them."""
    captions_per_shard: int = 14
    """Captions per shard, about 2.3 MiB each if a token has 4096 numbers."""
    tokens: tuple[int, int] = (60, 512)
    """Minimum and maximum tokens per caption."""
    token_width: int = 4096
    """F16 numbers per token."""
    batch_size: int = 32
    """Captions per batch."""
    batches: int = 8
    """Batches per repeat; when cold, limited by the store's rows."""
    threads: tuple[int, ...] = (1, 2)
    """Hot: numbers of threads that make batches; each is measured."""
    depths: tuple[int, ...] = (4, 8, 16, 32)
    """Cold: thread counts of the O_DIRECT reads; the fastest is the limit."""
    ahead_mib: int = AHEAD_BYTES >> 20
    """Cold: MiB of batches between two stages of readahead, at least one batch. Default: the loader's own."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cold_runs import with_best_depth
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store
        from bucketline.bench.loader.ragged_text import cold_captions, hot_subjects
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards,
            rows_per_shard=self.captions_per_shard,
            latent_shape=(4, 8, 8),
            tokens=self.tokens,
            token_width=self.token_width,
        )
        path = kept_store(folder, shape)
        # cold first: pages that this process has mapped cannot be dropped
        with tempfile.TemporaryDirectory() as plans:
            cold = cold_captions(self, path, Path(plans))
            cold_results = with_best_depth("ragged_text", cold, alternate(cold, self.repeats))
        hot = hot_subjects(self, Store.open(path))
        hot_results = summarise("ragged_text", "GB/s", hot, alternate(hot, self.repeats))
        named = [("hot", result) for result in hot_results] + [("cold", result) for result in cold_results]
        return [replace(result, subject=f"{how}: {result.subject}") for how, result in named]


def main() -> int:
    """Make the store, measure and print."""
    return run_case(RaggedText)


if __name__ == "__main__":
    sys.exit(main())


MARKED_THREADS = (1, 2)


def hot_subjects(config: RaggedText, store: Store) -> list[Subject]:
    """Prepare the subjects, limits first."""
    batches = Batches(store, LoaderConfig(batch_size=config.batch_size))
    token_bytes = store.text.tokens[0].row_bytes
    payload, written = [], []
    for copy_plan in batches.planned(config.batches, WINDOW):
        (filled,) = batches.fill([copy_plan])
        payload.append(int(carve(filled.buffer, filled.fields)["token_mask"].sum()) * token_bytes)
        written.append(filled.num_bytes)
    copies = Copies(sum(shard.caption_bytes for shard in store.manifest.shards), batches.buffers)

    def made(num_threads: int, num_bytes: int) -> Callable[[], int]:
        def run() -> int:
            batches.fill(batches.planned(config.batches, WINDOW), num_threads)
            return num_bytes

        return run

    subjects = []
    for n in config.threads:
        for kind, lengths in (("payload", payload), ("written", written)):
            name = f"{kind}, {n} thread{'s' if n > 1 else ''}"
            mark = Mark(bound=0.9) if kind == "written" and n in MARKED_THREADS else None
            subjects += [
                Subject(name=f"memcpy of {name}", measure=rate(copies.memcpy(lengths, n))),
                Subject(name=f"gather, {name}", measure=rate(made(n, sum(lengths))), limit=f"memcpy of {name}", mark=mark),
            ]
    return subjects


def cold_captions(config: RaggedText, store: Path, plans: Path) -> list[Subject]:
    """Prepare the cold subjects of `ragged_text`."""
    num_rows = Store.open(store).buckets("train")[0].num_rows
    size, batches = config.batch_size, _count(config.batches, config.batch_size, num_rows, "captions")
    plan = _per_round(lambda number, path: plan_captions(store, size, batches, number, path), plans)
    run = ColdRun(reader="direct", store=str(store), plan="", batch_size=size, batches=batches)
    ours = replace(run, reader="batches")
    return [
        *(_subject(f"{DIRECT}, {n} threads", replace(run, threads=n), store, plan) for n in config.depths),
        _subject("gather, with readahead", replace(ours, ahead_mib=config.ahead_mib), store, plan, MARK),
        _subject("gather, no readahead", ours, store, plan),
    ]
