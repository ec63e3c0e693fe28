"""`python -m tests.golden.timed`: what commands and loaders take in this checkout, as JSON: wall and CPU seconds.

`--turns A B --rounds 7`: in two checkouts by turns, and the medians of both; for changes that must cost nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden.forking import import_once, program

NUM_IMAGES = 96
ROWS, STEPS, EPOCHS = 1024, 60, 60
BATCH = 16


def once(work: Path) -> dict[str, list[float]]:
    """Return wall and CPU seconds of each measure; each runs in a process of its own that has imported everything."""
    from tests import object_storage

    import_once()
    _timed(lambda: _write(work))
    os.environ.update(object_storage.CREDENTIALS)
    found: dict[str, list[float]] = {}
    with object_storage.s3_on_loopback() as endpoint:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/timed", method="PUT")).close()
        for name, call in _measures(work, endpoint).items():
            found[name] = _timed(call)
    return found


def _measures(work: Path, endpoint: str) -> dict[str, Callable[[], object]]:
    store, ingest = "bucketline.store.cli:main", "bucketline.ingest.cli:main"
    rules = ("--val-fraction", 0.1, "--grid", "64x96,96x64", "--min-size-px", 32)
    pack = ("pack", work / "photos", work / "s", "--model", work / "sd", *rules)
    url, remote = "s3://timed/rows", ("--endpoint", endpoint)
    rows, cached = work / "rows", partial(_epochs, url, endpoint=endpoint, cache=work / "cache")
    to = ("--store", work / "s", "--model", work / "sd", "--output-dir", work / "run")
    training = (*to, "--batch-size", 4, "--num-images", 0)
    return {
        "pack": program(ingest, pack),
        "second pack": program(ingest, pack),
        "write": lambda: _write_rows(rows),
        "verify": program(store, ("verify", rows)),
        "export": program(store, ("export", rows, work / "out", "--format", "webdataset")),
        "push": program(store, ("push", rows, url, *remote)),
        "drop": program(store, ("drop", rows, "1", "2", "3")),
        "first batch": lambda: _epochs(rows, batches=1),
        "hot epochs": lambda: _epochs(rows, epochs=EPOCHS),
        "private service": lambda: _epochs(rows, epochs=EPOCHS, service="auto"),
        "streamed epoch": cached,
        "train": program("bucketline.train.main:main", (*training, "--max-steps", STEPS)),
    }


def _timed(call: Callable[[], object]) -> list[float]:
    """Run a call in a child, and return its wall and CPU seconds, with those of its own children."""
    begun = time.perf_counter()
    child = os.fork()
    if not child:
        code: object = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            code = call() or 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code if isinstance(code, int) else 1)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"a measure ended with {status}")
    return [round(time.perf_counter() - begun, 4), round(used.ru_utime + used.ru_stime, 4)]


def _epochs(
    store: Path | str, *, epochs: int = 1, batches: int | None = None, service: str | None = None, **config: Any
) -> None:
    from bucketline.loader import Loader, LoaderConfig

    with Loader(store, LoaderConfig(batch_size=BATCH, **config), service=service) as loader:
        for _ in range(epochs):
            for n, batch in enumerate(loader, 1):
                assert len(batch.weight) == BATCH
                if n == batches:
                    return


def _write(work: Path) -> None:
    from tests.family_models import write_pipeline
    from tests.photographs import crop_of

    write_pipeline(work / "sd", "sd")
    (work / "photos").mkdir()
    for n in range(NUM_IMAGES):
        crop_of(n, *((130, 190), (190, 130))[n % 2]).convert("RGB").save(work / "photos" / f"{n}.jpg", quality=90)
        (work / "photos" / f"{n}.txt").write_text(f"a red cat of the house {n}\n", encoding="utf-8")


def _write_rows(path: Path) -> None:
    import numpy as np

    from bucketline.store import Column, LatentColumn, StoreWriter

    text, empty = (Column(name="tokens", dtype="F16", shape=(64,)),), {"tokens": np.zeros((1, 64), "<f2")}
    latent = np.random.default_rng(0).normal(size=(4, 64, 64)).astype("<f2")
    columns, encoders = (LatentColumn(channels=4, dtype="F16"),), {"vae": {"scaling_factor": 0.5}}
    with StoreWriter(path, columns=columns, text=text, empty_caption=empty, encoders=encoders, shard_bytes=1 << 24) as writer:
        for n in range(ROWS):
            tokens = {"tokens": np.full((20, 64), n % 100, "<f2")}
            writer.add(f"{n}", "train", {"target": latent + np.float16(n % 50)}, {f"caption {n}": tokens})
            if n % 64 == 63:
                writer.commit()


def by_turns(checkouts: tuple[Path, Path], rounds: int) -> dict[str, Any]:
    """Return the medians of each measure in two checkouts, and the medians of the ratios of the second to the first."""
    figures: list[list[dict[str, list[float]]]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            command = [sys.executable, "-m", "tests.golden.timed"]
            done = subprocess.run(command, cwd=checkouts[which], stdout=subprocess.PIPE, check=True)
            figures[which].append(json.loads(done.stdout))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    found: dict[str, Any] = {}
    for name in figures[0][0]:
        for at, unit in enumerate(("wall", "CPU")):
            first, second = ([one[name][at] for one in own] for own in figures)
            ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
            own = {"first": statistics.median(first), "second": statistics.median(second), "least": [min(first), min(second)]}
            found[f"{name}, {unit}"] = {**own, "ratio": round(ratio, 3)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.timed", description=__doc__)
    parser.add_argument("--turns", nargs=2, type=Path, metavar=("A", "B"), help="two checkouts")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if asked.turns:
        print(json.dumps(by_turns((asked.turns[0], asked.turns[1]), asked.rounds), indent=1))
        return 0
    work = Path(tempfile.mkdtemp(prefix="timed-"))
    try:
        print(json.dumps(once(work), indent=1))
    finally:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
