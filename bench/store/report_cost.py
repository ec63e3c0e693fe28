"""Cost of `store report`: time and memory by the number of samples, and the size of the page."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = Mark(bound=1.5, is_at_most=True)  # of the large store's page over that of the small one
CHANNELS = 4
SIZES = [(384 + 32 * n, 384) for n in range(12)]  # height and width of the buckets: 12, each with as many cards as it may show


@dataclass(frozen=True, kw_only=True)
class ReportCost(Case):
    """Measure `store report` of a small and a large store: seconds, and the page in MiB.

    The latents are random, which makes previews that cannot be compressed, and in twelve buckets, which together show the 480
    samples that a page has by default. So the page is as large as that of any store with latents of this size.

    Example: python -m bucketline.bench.store.report_cost --samples 1000 100000
    """

    samples: tuple[int, int] = (1_000, 10_000)
    """Samples of the small and the large store."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.store import Store
        from bucketline.store.report.report import ReportOptions, write_report

        stores = [_kept(folder, count) for count in self.samples]
        sizes: dict[Path, float] = {}

        def seconds(path: Path) -> Callable[[int], float]:
            def measure(_: int) -> float:
                with tempfile.TemporaryDirectory() as place:
                    page, began = Path(place) / "report.html", time.perf_counter()
                    write_report(Store.open(path), page, ReportOptions())
                    took = time.perf_counter() - began
                    sizes[path] = page.stat().st_size / (1 << 20)
                return took

            return measure

        def mib(path: Path) -> Callable[[int], float]:
            return lambda _: sizes[path]

        timed = [Subject(name=f"{n:,} samples", measure=seconds(path)) for n, path in zip(self.samples, stores, strict=True)]
        results = summarise("report_cost", "s", timed, alternate(timed, self.repeats, warm_up=False))
        small, large = (f"page of {n:,} samples" for n in self.samples)
        paged = [
            Subject(name=small, measure=mib(stores[0])),
            Subject(name=large, measure=mib(stores[1]), limit=small, mark=MARK),
        ]
        return [*results, *summarise("report_cost", "MiB", paged, alternate(paged, 1, warm_up=False))]


def _kept(folder: Path, count: int) -> Path:
    """Return a store of `count` samples in `folder`; create it if missing."""
    path = folder / f"report-{count}.store"
    if path.exists():
        return path
    from bucketline.store import LatentColumn, StoreWriter

    print(f"making {path.name}", file=sys.stderr)
    making = folder / f"{path.name}.making"
    shutil.rmtree(making, ignore_errors=True)
    random = np.random.default_rng(0)
    with StoreWriter(
        making,
        encoders={"vae": {"scaling_factor": 1.0, "shift_factor": 0.0, "latent_channels": CHANNELS}},
        columns=[LatentColumn(channels=CHANNELS, dtype="F16")],
        max_captions=1,
    ) as writer:
        for n in range(count):
            height, width = SIZES[n % len(SIZES)]
            latent = random.standard_normal((CHANNELS, height // 8, width // 8), dtype=np.float32).astype(np.float16)
            writer.add(f"{n:08d}.png", f"train/{height}x{width}", {"latent": latent})
    making.rename(path)
    return path


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(ReportCost)


if __name__ == "__main__":
    sys.exit(main())
