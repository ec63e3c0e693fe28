"""Cost of writing rows with `StoreWriter`: against LMDB's own puts, by row, and memory over many rows."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.apart import apart, private_kib
from bucketline.bench.harness import Case, Clock, Mark, Result, Subject, compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

OF_PUTS, US_A_TINY_ROW, FLAT = (Mark(bound=bound, is_at_most=True) for bound in (1.5, 30, 1.1))
ROW, TINY_ROW = (4, 80, 112), (4, 4, 4)  # latents of 70 KiB and 128 bytes
OURS = "StoreWriter"
DRAWN = 512  # rows that differ; they come again
A_TRANSACTION = 256  # rows of LMDB's


@dataclass(frozen=True, kw_only=True)
class Write(Case):
    """Measure writing rows, sealing and publishing by `StoreWriter`, next to LMDB's own puts of the same bytes.

    Rows of 70 KiB and of 128 bytes, without captions, in one bucket and one shard. LMDB has a key of 8 bytes for each row, in
    order, 256 of them a transaction, which is synchronised. Values are drawn in advance. CPU is that of the process.

    Example: python -m bucketline.bench write --rows 1000 --repeats 3
    """

    rows: int = 4000
    """Rows of 70 KiB."""
    tiny_rows: int = 8000
    """Rows of 128 bytes."""

    def measure(self, folder: Path) -> list[Result]:
        found = list[Result]()
        for name, count, shape in (("rows of 70 KiB", self.rows, ROW), ("tiny rows", self.tiny_rows, TINY_ROW)):
            puts = Subject(name="LMDB's puts", measure=_us_a_row(put_rows, folder, count, shape))
            ours = Subject(name=OURS, measure=_us_a_row(write_rows, folder, count, shape), limit=puts.name)
            marked = replace(ours, marks={"CPU": OF_PUTS} if shape == ROW else {})
            found += compare(f"write, {name}", {"CPU": "us/row", "wall": "us/row"}, [puts, marked], self.repeats)
        tiny = next(one for one in found if one.case == "write, tiny rows, CPU" and one.subject == OURS)
        found.append(replace(tiny, case=f"{tiny.case}, itself", limit_ratio=tiny.median, mark=US_A_TINY_ROW))
        return found


@dataclass(frozen=True, kw_only=True)
class WriteMemory(Case):
    """Measure by how many MiB writing small rows with `StoreWriter` grows a fresh process: few and many rows.

    Peak of the private memory (RssAnon, sampled), from before the first row until the store is published.

    Example: python -m bucketline.bench write --memory --rows 40000 160000
    """

    repeats: int = 1
    """Repeats per subject; a fresh process has nothing to warm up."""
    rows: tuple[int, int] = (40_000, 160_000)
    """Rows of the small and the large store, of 128 bytes each: the small one has a whole shard, which is sealed in memory."""

    def measure(self, folder: Path) -> list[Result]:
        few, many = (
            Subject(name=f"{count:,} rows", measure=lambda _, n=count: {"": apart(grown_mib, folder / "grown", n)})  # type: ignore[misc]
            for count in self.rows
        )
        subjects = [few, replace(many, limit=few.name, mark=FLAT)]
        return compare("write, memory", {"": "MiB"}, subjects, self.repeats, warm_up=False)


def _us_a_row(
    write: Callable[[Path, int, list[NDArray[Any]]], None], folder: Path, count: int, shape: tuple[int, ...]
) -> Callable[[int], dict[str, float]]:
    def measure(_: int) -> dict[str, float]:
        place, rows = folder / "written", _rows(min(count, DRAWN), shape)
        shutil.rmtree(place, ignore_errors=True)
        clock = Clock()
        write(place, count, rows)
        seconds, cpu_s = clock.spent()
        shutil.rmtree(place)
        return {"CPU": cpu_s / count * 1e6, "wall": seconds / count * 1e6}

    return measure


def _rows(count: int, shape: tuple[int, ...]) -> list[NDArray[Any]]:
    import numpy as np

    from bucketline.bench.fixtures.values import random_f16

    random = np.random.default_rng(0)
    return [random_f16(random, shape) for _ in range(count)]


def put_rows(place: Path, count: int, rows: list[NDArray[Any]]) -> None:
    """Put rows into an LMDB file, in order of their keys."""
    import lmdb

    place.mkdir()
    size = 2 * count * (rows[0].nbytes + 4096) + (64 << 20)
    with lmdb.open(str(place / "rows.lmdb"), subdir=False, map_size=size) as env:
        for first in range(0, count, A_TRANSACTION):
            with env.begin(write=True) as transaction:
                for number in range(first, min(first + A_TRANSACTION, count)):
                    transaction.put(number.to_bytes(8, "big"), rows[number % len(rows)].tobytes(), append=True)


def write_rows(place: Path, count: int, rows: list[NDArray[Any]], shard_bytes: int = 1 << 34) -> None:
    """Write, seal and publish a store of rows without captions."""
    from bucketline.store import LatentColumn, StoreWriter

    bucket = f"train/{8 * rows[0].shape[1]}x{8 * rows[0].shape[2]}"
    columns, encoders = [LatentColumn(channels=len(rows[0]))], {"vae": {"made": "at random"}}
    with StoreWriter(place, columns=columns, encoders=encoders, shard_bytes=shard_bytes) as writer:
        for number in range(count):
            writer.add(f"{number:08d}.png", bucket, {"latent": rows[number % len(rows)]})


def grown_mib(place: str, count: int) -> float:
    """Return by how many MiB writing rows grows this process at most."""
    import threading

    rows, peak, is_over = _rows(DRAWN, TINY_ROW), [0], threading.Event()
    write_rows(Path(place) / "first", DRAWN, rows)  # imports everything
    before = private_kib()

    def watch() -> None:
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], private_kib())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        write_rows(Path(place) / "second", count, rows, 1 << 23)
    finally:
        is_over.set()
        watching.join()
        shutil.rmtree(place)
    return (peak[0] - before) / 1024
