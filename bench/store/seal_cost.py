"""CPU time of sealing a shard, with the checksums of its file's lines and without."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.bench.fixtures.synthetic_store import StoreShape

VERSIONS = {1: "version 1", 3: "version 3, with line checksums"}


@dataclass(frozen=True, kw_only=True)
class SealCost(Case):
    """Measure the CPU time of sealing a shard, and of the part of it that reads the new file back and describes it.

    Two shards of the same rows and captions: one of version 1, one of version 3, whose extents also have a checksum of each
    8 MiB of the file, computed while it is read back. All files are in the page cache; the rest of sealing is writing the
    new file, whose CPU time the kernel spends as it sees fit.

    Example: python -m bucketline.bench.store.seal_cost --rows 2000
    """

    rows: int = 2000
    """Rows of the shard, each with a caption of 20 to 77 tokens of 768 x F16."""
    row_kib: int = 128
    """KiB per row of latents."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, latent_shape
        from bucketline.store.write.publish import prepare_store

        shape = StoreShape(num_shards=1, rows_per_shard=self.rows, latent_shape=latent_shape(self.row_kib))
        store = folder / "seal.store"
        shutil.rmtree(store, ignore_errors=True)
        prepare_store(store)
        subjects: list[Subject] = []
        for version, words in VERSIONS.items():
            pending = folder / f"seal-{version}.lmdb"
            _write_pending(store, shape, version).rename(pending)
            sealed = _sealed(store, pending).rename(folder / f"sealed-{version}.lmdb")
            limits: list[str | None] = [subject.name for subject in subjects] or [None, None]
            mark = Mark(bound=1.5, is_at_most=True) if subjects else None
            subjects += [
                Subject(name=f"read back, {words}", measure=_reading_back(sealed), limit=limits[0], mark=mark),
                Subject(name=f"seal, {words}", measure=_sealing(store, pending), limit=limits[1]),
            ]
        return summarise("seal_cost", "CPU-s/GB", subjects, alternate(subjects, self.repeats))


def _write_pending(store: Path, shape: StoreShape, version: int) -> Path:
    """Write a shard and commit it; return its file, which is not sealed."""
    import numpy as np

    from bucketline.bench.fixtures.synthetic_store import random_f16
    from bucketline.store import new_record
    from bucketline.store.format.hashing import caption_digest
    from bucketline.store.format.text_block import make_caption
    from bucketline.store.write.shard_writer import ShardWriter

    random, bucket = np.random.default_rng(0), shape.spec.bucket
    first, most = shape.tokens or (1, 1)
    empty = make_caption(shape.text, caption_digest(""), {"tokens": random_f16(random, (first, shape.token_width))}, {})
    writer = ShardWriter(store, "s", shape.text, empty, 1 << 40, version=version)
    for row in range(shape.rows_per_shard):
        sample_id = f"{row:06d}.png"
        tokens = random_f16(random, (int(random.integers(first, most + 1)), shape.token_width))
        writer.add_caption(make_caption(shape.text, caption_digest(sample_id), {"tokens": tokens}, {}))
        latents = {"latent": random_f16(random, shape.latent_shape)}
        record = new_record(sample_id, bucket, (sample_id,))
        writer.add(spec=shape.spec, latents=latents, record=record, captions=[caption_digest(sample_id)])
    writer.commit()
    writer.close()
    return writer.path


def _sealed(store: Path, pending: Path) -> Path:
    """Seal a copy of a pending shard; return its file, without its sidecars."""
    from bucketline.store.format.layout import pending_path, shard_paths
    from bucketline.store.write.seal import seal

    shutil.copyfile(pending, pending_path(store, "s"))
    seal(store, "s")
    paths = shard_paths(store, "s")
    for path in (paths.extents, paths.index):
        path.unlink()
    return paths.lmdb


def _reading_back(sealed: Path) -> Callable[[int], float]:
    from bucketline.store.write.seal import rebuilt_sidecars

    def measure(_: int) -> float:
        begun = time.process_time()
        rebuilt_sidecars(sealed)
        return (time.process_time() - begun) / (sealed.stat().st_size / 1e9)

    return measure


def _sealing(store: Path, pending: Path) -> Callable[[int], float]:
    from bucketline.store.format.layout import pending_path, shard_paths
    from bucketline.store.write.seal import seal

    paths = shard_paths(store, "s")

    def measure(_: int) -> float:
        shutil.copyfile(pending, pending_path(store, "s"))
        begun = time.process_time()
        seal(store, "s")
        took = time.process_time() - begun
        gigabytes = paths.lmdb.stat().st_size / 1e9
        for path in (paths.lmdb, paths.extents, paths.index):
            path.unlink()
        return took / gigabytes

    return measure


def main() -> int:
    """Write the shards, measure and print."""
    return run_case(SealCost)


if __name__ == "__main__":
    sys.exit(main())
