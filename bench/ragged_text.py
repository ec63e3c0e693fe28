"""What delivering captions of 60 to 512 tokens costs: hot beside memcpy, cold beside O_DIRECT reads."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bucketline.bench.harness import Case, Result, alternate, run_case, summarise


@dataclass(frozen=True, kw_only=True)
class RaggedText(Case):
    """Measure the delivery of ragged captions, padded to the longest of the store.

    `payload` counts the real tokens' bytes alone, `written` the padding as well, which is delivered too; each beside memcpy of
    as many bytes. The mark is on `written`: beside memcpy of the payload alone, no padded delivery can do much better than the
    payload's share of what it writes. Cold, every repeat is a process of its own, after the store's pages were dropped, beside
    O_DIRECT reads of the same lengths.

    Example: python -m bucketline.bench.ragged_text --num-shards 32 --captions-per-shard 14
    """

    num_shards: int = 32
    """Shards of the store; a batch spans most of them."""
    captions_per_shard: int = 14
    """Captions of a shard, of about 2.3 MiB each where a token has 4096 numbers."""
    tokens: tuple[int, int] = (60, 512)
    """Tokens of a caption, from, to."""
    token_width: int = 4096
    """F16 numbers of a token."""
    batch_size: int = 32
    """Captions of a batch."""
    batches: int = 8
    """Batches of one repeat; cold, at most as many as the store has distinct captions for."""
    threads: tuple[int, ...] = (1, 2)
    """Threads that copy, hot; each number is measured."""
    depths: tuple[int, ...] = (4, 8, 16, 32)
    """Threads of O_DIRECT reads, cold; the fastest is the limit."""
    ahead: int = 2
    """Batches asked for ahead, cold."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cold_subjects import cold_captions, with_best_depth
        from bucketline.bench.hot_captions import hot_subjects
        from bucketline.bench.synthetic_store import StoreShape, kept_store
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
    """Make the store, measure, print."""
    return run_case(RaggedText)


if __name__ == "__main__":
    sys.exit(main())
