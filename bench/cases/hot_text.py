"""Cost of delivering captions as large as Flux's, in F16 and quantised: samples per second, CPU time, and bytes on the disk."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLAIN = "F16"
WAYS = (  # name, dtype, how the tokens are delivered
    (PLAIN, PLAIN, "dequantised"),
    ("I8, dequantised by the loader", "I8", "dequantised"),
    ("I8, as stored", "I8", "stored"),
    ("F8_E4M3, dequantised by the loader", "F8_E4M3", "dequantised"),
    ("F8_E4M3, as stored", "F8_E4M3", "stored"),
)


@dataclass(frozen=True, kw_only=True)
class HotText(Case):
    """Measure a loader's samples per second from stores that differ only in how captions' tokens are stored.

    Every caption has all tokens, as Flux stores them. `disk` is what a sample takes of the store's files. Batches are taken
    after every row was delivered once. CPU time is that of all threads meanwhile. All are compared with F16.

    Example: python -m bucketline.bench hot --text --rows 96 --repeats 3
    """

    rows: int = 384
    """Rows of each store, each with a caption of its own."""
    num_tokens: int = 512
    """Tokens per caption."""
    token_width: int = 4096
    """Values per token."""
    latent_side: int = 64
    """Latent positions per side, with 16 channels: 64 is an image of 512 px."""
    batch_size: int = 8
    """Rows per batch."""
    batches: int = 24
    """Batches per repeat."""
    threads: int = 1
    """Prefetch threads."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store

        shape = StoreShape(
            num_shards=1,
            rows_per_shard=self.rows,
            latent_shape=(16, self.latent_side, self.latent_side),
            tokens=(self.num_tokens, self.num_tokens),
            token_width=self.token_width,
        )
        paths = {dtype: kept_store(folder, replace(shape, text_dtype=dtype)) for dtype in dict.fromkeys(way[1] for way in WAYS)}
        results = self._summarise("MiB/sample", [_disk(dtype, path, self.rows) for dtype, path in paths.items()], 1)
        for unit in ("samples/s", "CPU-ms/sample"):
            hot = [
                _subject(name if unit == "samples/s" else f"CPU: {name}", self._hot(paths[dtype], form, unit))
                for name, dtype, form in WAYS
            ]
            results += self._summarise(unit, hot, self.repeats)
        return results

    def _summarise(self, unit: str, subjects: list[Subject], repeats: int) -> list[Result]:
        plain = subjects[0].name
        compared = [one if one.name == plain else replace(one, beside=(plain,)) for one in subjects]
        return summarise("hot, text", unit, compared, alternate(compared, repeats))

    def _hot(self, path: Path, form: str, unit: str) -> Callable[[int], float]:
        from bucketline.loader import Loader, LoaderConfig, TextForm

        asked = LoaderConfig(batch_size=self.batch_size, threads=self.threads, text=TextForm(form))
        num_samples = self.batches * self.batch_size

        def measure(_: int) -> float:
            for file in path.rglob("*.lmdb"):  # some systems drop pages that nobody has read for a minute
                file.read_bytes()
            with Loader(Store.open(path), asked) as loader:
                batches = loader.forever()
                for _ in range(math.ceil(self.rows / self.batch_size) + loader.stats().depth):
                    next(batches)
                while loader.stats().ready:
                    next(batches)
                begin, cpu_begin = time.perf_counter(), time.process_time()
                for _ in range(self.batches):
                    next(batches)
                if unit == "samples/s":
                    return num_samples / (time.perf_counter() - begin)
                return (time.process_time() - cpu_begin) * 1e3 / num_samples

        return measure


def _subject(name: str, measure: Callable[[int], float]) -> Subject:
    return Subject(name=name, measure=measure)


def _disk(dtype: str, path: Path, rows: int) -> Subject:
    def measure(_: int) -> float:
        return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()) / rows / (1 << 20)

    return Subject(name=f"disk: {dtype}", measure=measure)


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(HotText)


if __name__ == "__main__":
    sys.exit(main())
