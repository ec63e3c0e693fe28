"""The first batch that `first_batch` measures, as a process.

`python -m bucketline.bench.first_batching STORE BATCH_SIZE SHARE` makes a loader, sets it to SHARE of its first epoch (0: it is
left at the start, as a run that is no resume), takes one batch, and prints how long that took and which step it was.
Everything is imported before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bucketline.loader.config import LoaderConfig
from bucketline.loader.loader import Loader


def main() -> int:
    """Take the batch, print, end."""
    path, batch_size, share = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    begin = time.perf_counter()
    with Loader(path, LoaderConfig(batch_size=batch_size)) as loader:
        if share > 0:
            loader.load_state_dict({**loader.state_dict(), "step": int(share * loader.plan.steps_before(1))})
        batch = next(iter(loader))
        took_s = time.perf_counter() - begin
    print(json.dumps({"took_s": took_s, "step": batch.step}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
