"""Flips single bits of a store's files, one at a time, and sees what comes of each.

`python -m tests.fault.bit_flips --flips 1000 --seed 1` prints a table by kind of file. A flip is *refused* where the store
does not open, *found* where `store verify` names a fault, and *unused* where neither is the case and every reader's output
over the whole store, in each of its generations, is byte for byte what it was before. Anything else is a failure: unnoticed,
a crash, a hang. Flips are made in a child process, which is started again where it dies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HANG_S = 60.0
OUTCOMES = ("refused", "found", "unused", "unnoticed", "crash", "hang")
GOOD = ("refused", "found", "unused")


def make(path: Path) -> Path:
    """Make a store of three shards, text, superseded and removed rows, and five generations."""
    from bucketline.store.format.hashing import sample_digest
    from bucketline.store.format.manifest import read_manifest
    from bucketline.store.write.publish import publish
    from tests.building import make_store, samples_of

    samples = samples_of({"train/64x64": 40, "train/8x8": 5, "val/64x128": 7})
    make_store(path, samples, samples[3:9], samples_of({"train/64x64": 12}, "more/"))
    publish(path, read_manifest(path), [], [sample_digest(sample.id) for sample in samples[20:24]])
    return path


def kind_of(path: Path) -> str:
    """Return the kind of a file, as the table names it."""
    if path.parent.name == "generations":
        return "generations/*.json"
    return path.name if path.suffix == ".json" else path.suffix.partition("-")[0] + ("-N" if "-" in path.suffix else "")


def draw_flips(store: Path, count: int, draw: random.Random) -> list[tuple[Path, int]]:
    """Draw bits: every second one evenly over all bytes, the others evenly over the kinds of files first."""
    files = sorted(path.relative_to(store) for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = sorted({kind_of(path) for path in files})
    flips = []
    for n in range(count):
        chosen = files if n % 2 else [path for path in files if kind_of(path) == kinds[n // 2 % len(kinds)]]
        (path,) = draw.choices(chosen, weights=[(store / path).stat().st_size for path in chosen])
        flips.append((path, draw.randrange((store / path).stat().st_size * 8)))
    return flips


class Child:
    """The process that flips, reads and verifies."""

    def __init__(self, store: Path) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.bit_flips", "--child", store], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def outcome(self, path: Path, bit: int) -> str:
        """Have one bit flipped; say what came of it."""
        stdin, stdout = _pipes(self._process)
        stdin.write(json.dumps([str(path), bit]).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], HANG_S)[0]:
            self.close()
            return "hang"
        line = stdout.readline()
        return str(json.loads(line)) if line else "crash"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process has no pipes")
    return process.stdin, process.stdout


def make_columns(path: Path) -> Path:
    """Make a store of columns of any kind and quantised text likewise."""
    from bucketline.store.change.drop import drop
    from tests.building import samples_of
    from tests.store_forms import COLUMNS

    samples = samples_of({"train/64x64": 20, "val/64x96": 5})
    COLUMNS.make_store(path, samples, samples[3:6], samples_of({"train/64x96": 4}, "more/"))
    drop(path, [sample.id for sample in samples[10:12]])
    return path


def run(count: int, seed: int, folder: Path, make: Callable[[Path], Path] = make) -> Counter[tuple[str, str]]:
    """Flip bits; give how many of each kind of file came to what."""
    sound = make(folder / "sound")
    counts: Counter[tuple[str, str]] = Counter()
    child: Child | None = None
    for path, bit in draw_flips(sound, count, random.Random(seed)):
        if child is None:
            shutil.rmtree(folder / "s", ignore_errors=True)
            shutil.copytree(sound, folder / "s")
            child = Child(folder / "s")
        outcome = child.outcome(path, bit)
        counts[kind_of(path), outcome] += 1
        if outcome not in GOOD:
            print(f"{outcome}: bit {bit} of {path}", flush=True)
        if outcome in ("crash", "hang"):
            child.close()
            child = None
    if child is not None:
        child.close()
    return counts


def flip_on_request(store: Path) -> None:
    """Be the child: flip each bit requested, use the store, flip it back."""
    from bucketline.errors import BucketlineError, StoreError
    from bucketline.store import Store
    from bucketline.store.verify.verify import verify
    from tests.every_reader import everything

    generations = sorted(int(path.stem) for path in (store / "generations").iterdir())

    def is_as_it_was(numbers: list[int | None]) -> bool:
        try:
            return all(everything(Store.open(store, number)) == expected[number] for number in numbers)
        except BucketlineError:
            return False

    def outcome() -> str:
        same = is_as_it_was([None])  # also where verify finds the flip: it must not end the process
        try:
            opened = Store.open(store)
        except StoreError:
            return "refused"
        if verify(opened, lambda _: None, 1).corrupt:
            return "found"
        return "unused" if same and is_as_it_was([*generations]) else "unnoticed"

    expected = {number: everything(Store.open(store, number)) for number in (None, *generations)}
    if outcome() != "unused":
        raise ValueError(f"{store} is not sound before anything is flipped")
    for line in sys.stdin:
        name, bit = json.loads(line)
        _flip(store / name, bit)
        found = outcome()
        _flip(store / name, bit)
        print(json.dumps(found), flush=True)


def _flip(path: Path, bit: int) -> None:
    """Flip a bit in place, without a moment at which the file is shorter."""
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, bit // 8)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


def main() -> int:
    """Print the table; 1 where a flip was neither found nor harmless."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--columns", action="store_true", help="of a store of columns of any kind")
    parser.add_argument("--child", type=Path)
    asked = parser.parse_args()
    if asked.child is not None:
        flip_on_request(asked.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        counts = run(asked.flips, asked.seed, Path(folder), make_columns if asked.columns else make)
    kinds = sorted({kind for kind, _ in counts})
    print(f"{'file':20}{'flips':>8}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES))
    for kind in [*kinds, "all"]:
        of_kind = [sum(counts[k, outcome] for k in (kinds if kind == "all" else [kind])) for outcome in OUTCOMES]
        print(f"{kind:20}{sum(of_kind):8}" + "".join(f"{count:11}" for count in of_kind))
    return int(any(count for (_, outcome), count in counts.items() if outcome not in GOOD))


if __name__ == "__main__":
    sys.exit(main())
