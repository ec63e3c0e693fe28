"""Processes that commit to one store at once: the proof that every writer can commit for itself.

Each makes sealed shards of a row or a few and commits each by `commit_change`, as `store drop` commits: on a disk it waits for
the store's lock, in object storage it tries again after a pause. No process tells another anything.

    python -m tests.fault.commits --writers 64 --commits 20 --place s3

prints as JSON what came of it: generations, rows that are missing, retries, seconds, and seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from bucketline.store import Store
from bucketline.store.change.commit import WorkFolder, commit_change
from bucketline.store.format.manifest import Manifest
from bucketline.store.read.samples import Selection, live_samples
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import push
from bucketline.store.write.publish import ChangeBase, existing_manifest, prepare_store, with_shards
from tests.fault.apart import Apart
from tests.kit import make_sample, make_store, write_shard
from tests.object_storage import CREDENTIALS, s3_on_loopback

BUCKET, BEFORE = "train/8x8", "before"
LONGEST_S = 3000.0


def commit_one(place: Path | ObjectFolder, made: Path, cache: Path, name: str) -> tuple[int, float]:
    """Seal a shard of a row and commit it; return the number of tries and the seconds that the commit took."""
    tries = 0

    def change(base: ChangeBase) -> Manifest:
        nonlocal tries
        tries += 1
        return with_shards(base, {name} - base.manifest.known_shards, ())

    write_shard(made, name, [make_sample(f"{name}.png", BUCKET)])
    begun = time.monotonic()
    work = None if isinstance(place, Path) else WorkFolder(made=made, cache=cache)
    commit_change(place, change, adopting=False, work=work)
    return tries, time.monotonic() - begun


def committed(folder: Path, endpoint: str | None, writers: int, commits: int) -> dict[str, float]:
    """Let `writers` processes commit to one store at once, in object storage if there is an `endpoint`."""
    store = make_store(folder / "s", [make_sample(f"{BEFORE}.png", BUCKET)]).path

    def there() -> Path | ObjectFolder:
        if endpoint is None:
            return store
        return ObjectFolder.open("s3://bucket/s", RemoteOptions(endpoint=endpoint, deadline_s=LONGEST_S))

    def write(number: int) -> list[tuple[int, float]]:
        place, made = there(), store if endpoint is None else folder / f"made-{number}"
        prepare_store(made)
        while not (folder / "go").exists():
            time.sleep(0.01)
        return [commit_one(place, made, folder / "cache", f"w{number:03d}-{k:03d}") for k in range(commits)]

    def send() -> None:
        if isinstance(place := there(), ObjectFolder):
            push(store, place)

    def look() -> list[object]:
        place = there()
        if isinstance(place, Path):
            opened = Store(place, existing_manifest(place))
        else:
            opened = Store.at(place, newest_generation(place, lists=True), folder / "cache")
        return [opened.manifest.generation, *(listed.record.id for listed in live_samples(opened, Selection()))]

    Apart(send).ended(LONGEST_S).done()  # in a process of its own, as the next: a connection does not outlive a fork
    first = Apart(look).ended(LONGEST_S).done()
    forked = [Apart(partial(write, number)) for number in range(writers)]
    begun, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    (folder / "go").touch()
    found = [tuple(one) for process in forked for one in process.ended(LONGEST_S).done()]
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    last, *ids = Apart(look).ended(LONGEST_S).done()
    expected = {f"{BEFORE}.png"} | {f"w{n:03d}-{k:03d}.png" for n in range(writers) for k in range(commits)}
    assert len(ids) == len(set(ids)), "a row is listed twice"
    return {
        "generations": last - first[0],
        "lost": len(expected - set(ids)),  # rows that were committed and are not in the newest generation
        "retries": sum(tries for tries, _ in found) - len(found),
        "most_tries": max(tries for tries, _ in found),  # of a commit
        "longest_s": round(max(took for _, took in found), 3),  # a commit, with its waits
        "seconds": round(seconds, 3),
        "cpu_s": round(after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime, 3),  # of all writers
    }


@contextmanager
def server() -> Iterator[str]:
    """Run the tests' S3 server in a process of its own, and yield its address."""
    reader, writer = os.pipe()
    until_closed, hold = os.pipe()

    def serve() -> None:
        os.close(hold)
        with s3_on_loopback() as endpoint:
            os.write(writer, endpoint.encode() + b"\n")
            os.read(until_closed, 1)

    process = Apart(serve)
    os.close(until_closed)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            yield lines.readline().strip()
    finally:
        os.close(hold)
        process.ended()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--commits", type=int, default=20, help="of each writer")
    parser.add_argument("--place", choices=("disk", "s3"), default="disk")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commits-") as folder:
        found = run(Path(folder), asked.writers, asked.commits, is_far=asked.place == "s3")
    print(json.dumps(found))
    return int(found["lost"] > 0 or found["retries"] > 10 * asked.writers * asked.commits)


def run(folder: Path, writers: int, commits: int, *, is_far: bool) -> dict[str, float]:
    """Let writers commit to a new store in a folder, or on a server of its own."""
    if not is_far:
        return committed(folder, None, writers, commits)
    import urllib.request

    with server() as endpoint, patch.dict(os.environ, CREDENTIALS):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        return committed(folder, endpoint, writers, commits)


if __name__ == "__main__":
    sys.exit(main())
