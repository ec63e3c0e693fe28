"""The opens that `open_cost` measures; and as a process, what one takes in memory.

`python -m bucketline.bench.opening STORE LOCATE`, LOCATE being `true` or `false`, prints by how many KiB its memory grew.
Everything is imported before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from bucketline.store import Store


def open_store(path: Path) -> Store:
    """Open a store and name its buckets."""
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
        raise AssertionError(f"{path}: the last rows of its shards were located in the shards {located.shard.tolist()}")
    return store


def memory_kib() -> dict[str, int]:
    """Give VmRSS, and of that RssAnon, which leaves out the pages of mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {"resident_kib": int(found["VmRSS"].split()[0]), "private_kib": int(found["RssAnon"].split()[0])}


def main() -> int:
    """Open, and print what it took while the store is open."""
    path, locate = Path(sys.argv[1]), json.loads(sys.argv[2])
    before = memory_kib()
    store = (open_and_locate if locate else open_store)(path)
    after = memory_kib()
    print(json.dumps({"rows": store.manifest.samples, **{name: after[name] - before[name] for name in before}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
