"""Cost of columns that are stored and not requested: three of seven delivered, compared with three of three."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from pathlib import Path

REQUESTED = ("target", "control/depth", "control/edges")
OTHERS = ("control/pose", "reference/style", "features/dino", "features/clip")


@dataclass(frozen=True, kw_only=True)
class HotColumns(Case):
    """Measure a loader's batches of three columns, hot, from a store of seven and from one of only these three.

    All columns have the same shape and dtype. A figure is that of `hot`: a loop that takes batches without touching them,
    after every row has been delivered once.

    Example: python -m bucketline.bench hot --columns --num-shards 8
    """

    num_shards: int = 8
    """Shards of each store."""
    rows_per_shard: int = 64
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of each column."""
    batch_size: int = 16
    """Rows per batch."""
    batches: int = 96
    """Batches per repeat."""
    prefetch_mib: int = 64
    """MiB of batches filled ahead."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cases.hot import Hot, delivering
        from bucketline.loader import LoaderConfig
        from bucketline.store import Store

        asked = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20, columns=REQUESTED)
        sizes = {name: getattr(self, name) for name in ("num_shards", "rows_per_shard", "batch_size", "batches")}
        subjects: list[Subject] = []
        for roles in (REQUESTED, (*REQUESTED, *OTHERS)):
            store = Store.open(_kept_store(folder, self, roles))
            limit = subjects[0].name if subjects else None
            subjects.append(
                Subject(
                    name=f"three of {len(roles)} columns",
                    measure=delivering(Hot(**sizes), store, asked, None),
                    limit=limit,
                    mark=Mark(bound=0.97) if limit else None,
                )
            )
        return summarise("hot, columns", "GB/s", subjects, alternate(subjects, self.repeats))


def _kept_store(folder: Path, config: HotColumns, roles: tuple[str, ...]) -> Path:
    """Return the store with columns of these roles in `folder`; create it if missing."""
    import numpy as np

    from bucketline.bench.fixtures.synthetic_store import latent_shape, random_f16
    from bucketline.store import Axis, RowColumn, StoreWriter

    channels, height, width = latent_shape(config.row_kib)
    path = folder / f"{config.num_shards}x{config.rows_per_shard}-{config.row_kib}-of-{len(roles)}.store"
    making = path.with_suffix(".making")
    if not path.exists():
        shutil.rmtree(making, ignore_errors=True)
        print(f"making {path.name}", file=sys.stderr)
        random = np.random.default_rng(0)
        axes = (Axis(name="height_px", step=8), Axis(name="width_px", step=8))
        columns = [RowColumn(role=role, dtype="F16", shape=(channels, *axes)) for role in roles]
        with StoreWriter(making, columns=columns, shard_bytes=1 << 40) as writer:
            for number in range(config.num_shards * config.rows_per_shard):
                values = {role: random_f16(random, (channels, height, width)) for role in roles}
                writer.add(f"{number}.png", "train", values)
                if number % config.rows_per_shard == config.rows_per_shard - 1:
                    writer.seal()
        making.rename(path)
    return path


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(HotColumns)


if __name__ == "__main__":
    sys.exit(main())
