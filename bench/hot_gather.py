"""What delivering batches costs beside memcpy of the same bytes, with the page cache hot. `make bench` runs it.

Three subjects in alternation, one thread each: `memcpy` of a batch's bytes, the bare gather of latents, and the loader end
to end (latents, tokens, masks, sizes). Prints a table, and with `--json` one object: {case, subject, unit, median, q1, q3,
repeats, limit_ratio} a line, under a header of hardware and versions.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tyro

from bucketline import __version__
from bucketline.bench.synthetic_store import make_store
from bucketline.commands import print_json
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.gather import Gather
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class HotGather:
    """Measure hot delivery beside memcpy.

    Example: python -m bucketline.bench.hot_gather --num-shards 32 --json
    """

    num_shards: int = 32
    """Shards of the store; a batch spans most of them."""
    rows_per_shard: int = 64
    """Rows of a shard, of 128 KiB each."""
    batch_size: int = 32
    """Rows of a batch."""
    batches: int = 48
    """Batches of one repeat."""
    repeats: int = 7
    """Repeats of each subject, in alternation."""
    json: bool = False
    """Print one JSON object."""


LATENT_SHAPE = (4, 128, 128)


def measure(config: HotGather, store: Store) -> list[dict[str, Any]]:
    """Time each subject and give a result a subject; rates are in GB/s of the bytes delivered."""
    torch.set_num_threads(1)
    bucket = store.buckets("train")[0]
    column = bucket.spec.column("latent")
    gather = Gather(store)
    batch_bytes = config.batch_size * column.row_bytes
    out = torch.empty(batch_bytes, dtype=torch.uint8)
    # as large as the store's rows: a source that stays in the processor's cache would be no limit
    source = torch.empty((bucket.num_rows // config.batch_size, batch_bytes), dtype=torch.uint8).random_()
    rows = torch.empty((config.batch_size, *LATENT_SHAPE), dtype=torch.float16)
    random = np.random.default_rng(0)
    located = [bucket.locate(random.integers(0, bucket.num_rows, config.batch_size)) for _ in range(config.batches)]
    loader = Loader(store, LoaderConfig(batch_size=config.batch_size))

    def memcpy() -> int:
        for number in range(config.batches):
            out.copy_(source[number % len(source)])
        return config.batches * batch_bytes

    def gather_latents() -> int:
        for place in located:
            gather.rows(place, column, rows)
        return config.batches * batch_bytes

    def end_to_end() -> int:
        num_bytes = 0
        for number, batch in enumerate(loader, 1):
            num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors())
            if number == config.batches:
                return num_bytes
        return num_bytes

    subjects: dict[str, Callable[[], int]] = {"memcpy": memcpy, "gather": gather_latents, "loader": end_to_end}
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(config.repeats + 1):  # the first one warms the page cache, and is not counted
        for name, run in subjects.items():
            begin = time.perf_counter()
            num_bytes = run()
            if repeat:
                rates[name].append(num_bytes / (time.perf_counter() - begin) / 1e9)
    loader.close()
    limit = statistics.median(rates["memcpy"])
    return [
        {
            "case": "hot_gather",
            "subject": name,
            "unit": "GB/s",
            "median": round(statistics.median(values), 3),
            "q1": round(statistics.quantiles(values, n=4)[0], 3),
            "q3": round(statistics.quantiles(values, n=4)[2], 3),
            "repeats": config.repeats,
            "limit_ratio": round(statistics.median(values) / limit, 3),
        }
        for name, values in rates.items()
    ]


def main() -> None:
    """Make the store, measure, print."""
    config = tyro.cli(HotGather, config=(tyro.conf.FlagCreatePairsOff,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.store"
        make_store(path, num_shards=config.num_shards, rows_per_shard=config.rows_per_shard, latent_shape=LATENT_SHAPE)
        results = measure(config, Store.open(path))
    header = {
        "bucketline": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    if config.json:
        print_json({"header": header, "results": results})
        return
    print(", ".join(f"{name} {value}" for name, value in header.items()))
    for result in results:
        print(
            f"{result['subject']:>8}  {result['median']:7.2f} {result['unit']} "
            f"({result['q1']:.2f} to {result['q3']:.2f}), {result['limit_ratio']:.2f} of memcpy"
        )


if __name__ == "__main__":
    main()
