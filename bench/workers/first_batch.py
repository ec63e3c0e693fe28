"""The process that `start --batch` measures.

`python -m bucketline.bench.workers.first_batch STORE BATCH_SIZE SHARE` creates a loader, sets it to SHARE of its first epoch
(0: the start, like a run that does not resume), takes one batch, and prints the time this took and the batch's step.
Everything is imported in advance.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bucketline.loader.config import LoaderConfig
from bucketline.loader.loader import Loader


def main() -> int:
    """Take one batch and print its time and step."""
    path, batch_size, share = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    begin = time.perf_counter()
    with Loader(path, LoaderConfig(batch_size=batch_size)) as loader:
        if share > 0:
            loader.load_state_dict({**loader.state_dict(), "step": int(share * loader.plan.steps_before(1))})
        batch = next(loader.forever())
        took_s = time.perf_counter() - begin
    print(json.dumps({"took_s": took_s, "step": batch.step}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
