"""The opens that `start` measures; run as a process, it prints the memory that one takes.

`python -m bucketline.bench.workers.open_store STORE LOCATE`, with LOCATE `true` or `false`, prints by how many KiB its memory
grew. Everything is imported in advance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from bucketline.store import Store


def open_store(path: Path) -> Store:
    """Open a store and list its buckets."""
    store = Store.open(path)
    store.buckets()
    return store


def open_and_locate(path: Path) -> Store:
    """Open a store and locate the last row of each of its shards."""
    store = Store.open(path)
    (bucket,) = store.buckets()
    ends = np.cumsum([shard.groups[bucket.name].rows for shard in store.manifest.shards])
    located = bucket.locate(ends - 1)
    if located.shard.tolist() != list(range(len(store.shards))):
        raise AssertionError(f"{path}: the last rows of its shards were located in shards {located.shard.tolist()}")
    return store


def memory_kib() -> dict[str, int]:
    """Return VmRSS, and its part RssAnon, which excludes the pages of mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {"resident_kib": int(found["VmRSS"].split()[0]), "private_kib": int(found["RssAnon"].split()[0])}


def main() -> int:
    """Open the store, and print the growth in memory while it is open."""
    path, locate = Path(sys.argv[1]), json.loads(sys.argv[2])
    before = memory_kib()
    store = (open_and_locate if locate else open_store)(path)
    after = memory_kib()
    print(json.dumps({"rows": store.manifest.samples, **{name: after[name] - before[name] for name in before}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
