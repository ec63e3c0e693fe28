"""Web servers whose answers are lies: wrong and huge lengths, endless generations, cut answers, redirects, no ranges, drips.

Every lie about every kind of object is told to `store info`, `store pull` and a loader, each in a process of its own. A
trial is good if the process ends within the deadline, with an error of ours or with what is right, and has taken little memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.loader import Loader, LoaderConfig
from bucketline.store.format.manifest import dump_manifest, read_manifest, sealed
from tests.commands import call
from tests.fault.apart import How, apart
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.fault.served import IMAGES, Served, digest_of, served
from tests.object_storage import CREDENTIALS

DEADLINE_S = 3.0
LIMIT_S = 30.0  # of a process: a pull gets several files one after the other, each within the deadline
MOST_BYTES = 512 << 20  # that a process may take more than before; the store has 16 MB
OBJECTS = ("manifest.json", "generations/2.json", ".extents", ".index", ".lmdb")
LIES = (
    Fault.LONG_LENGTH,
    Fault.SHORT_LENGTH,
    Fault.HUGE_LENGTH,
    Fault.SHORT_HEAD,
    Fault.MORE,
    Fault.CUT,
    Fault.RESET,
    Fault.WRONG_BYTE,
    Fault.ZEROS,
    Fault.WHOLE,
    Fault.OTHER_RANGE,
    Fault.REDIRECT_LOOP,
    Fault.ELSEWHERE,
    Fault.DRIP,
    Fault.STALL_BODY,
    Fault.FORBIDDEN,
)
CONFIG = LoaderConfig(batch_size=8, epochs=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A store, and what a process does with it at a URL."""

    store: Served
    folder: Path

    def run(self, what: str, url: str) -> dict[str, Any]:
        """Be the process: return its exit code, what it said, whether what it got is wrong, and its memory."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        doing: Callable[[str, Path], dict[str, Any]] = getattr(self, f"_{what}")
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as own:  # stalled threads still write
            found = doing(url, Path(own))
        return {**found, "num_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}

    def _info(self, url: str, own: Path) -> dict[str, Any]:
        ran = call("store", "info", url, "--cache", own / "cache", "--deadline", DEADLINE_S)
        return {"code": ran.code, "err": ran.err, "wrong": ""}

    def _pull(self, url: str, own: Path) -> dict[str, Any]:
        ran = call("store", "pull", url, own / "a.store", "--deadline", DEADLINE_S)
        wrong = ""
        if ran.code == 0:
            names = [path.name for path in (self.store.local / "shards").iterdir()]
            same = [
                (own / "a.store" / "shards" / name).read_bytes() == (self.store.local / "shards" / name).read_bytes()
                for name in names
            ]
            wrong = "" if all(same) else f"{names[same.index(False)]} differs"
        return {"code": ran.code, "err": ran.err, "wrong": wrong}

    def _bucket_info(self, endpoint: str, own: Path) -> dict[str, Any]:
        os.environ.update(CREDENTIALS)
        reached = (f"s3://{self.store.name}", "--endpoint", endpoint, "--deadline", DEADLINE_S)
        ran = call("store", "info", *reached, "--cache", own / "cache")
        return {"code": ran.code, "err": ran.err, "wrong": "" if ran.code else "found nothing wrong"}

    def _bucket_pull(self, endpoint: str, own: Path) -> dict[str, Any]:
        os.environ.update(CREDENTIALS)
        reached = (f"s3://{self.store.name}", own / "a.store", "--endpoint", endpoint, "--deadline", DEADLINE_S)
        ran = call("store", "pull", *reached)
        return {"code": ran.code, "err": ran.err, "wrong": ""}

    def _loader(self, url: str, own: Path) -> dict[str, Any]:
        config = dataclasses.replace(CONFIG, cache=str(own / "cache"), deadline=DEADLINE_S)
        with Loader(url, config) as loader:
            found = [digest_of(batch) for batch in loader.forever()]
        return {"code": 0, "err": "", "wrong": "" if found == self.store.digests(CONFIG) else "differs from the local store"}


def _endless(store: Served) -> Callable[[str], bytes | None]:
    manifest = read_manifest(store.local)

    def made(path: str) -> bytes | None:
        number = path.removeprefix(f"/{store.name}/generations/").removesuffix(".json")
        return dump_manifest(sealed(dataclasses.replace(manifest, generation=int(number)))) if number.isdecimal() else None

    return made


def _judged(victim: Victim, what: str, url: str) -> tuple[Outcome, str]:
    ended = apart(partial(victim.run, what, url), LIMIT_S)
    if ended.how is not How.DONE:
        return ended.outcome, ended.said
    gave = ended.gave
    if gave["wrong"]:
        return Outcome.WRONG, gave["wrong"]
    if gave["num_bytes"] > MOST_BYTES:
        return Outcome.DEFECT, f"took {gave['num_bytes'] >> 20} MiB of memory"
    if gave["code"] and ("Traceback" in gave["err"] or "error: " not in gave["err"]):
        return Outcome.DEFECT, gave["err"][-400:]
    return (Outcome.CLEAN_ERROR if gave["code"] else Outcome.COMPLETED), ""


def _lists_without_end(folder: Path, victim: Victim, store: Served) -> Record:
    """Let a bucket's lists begin again after their last page."""
    record = Record(fault="a bucket that lies: lists without end", kind=Kind.HOSTILE)
    with RangeServer(folder / "served") as server:
        server.lists_have_an_end = False
        for what in ("bucket_info", "bucket_pull"):
            outcome, said = _judged(victim, what, server.url)
            record.add(outcome, f"{what} of {store.name}: {said}")
    return record


def hostile_servers(asked: Asked) -> Iterator[Record]:
    """Try every lie, with a record for each."""
    draw = random.Random(asked.seed)
    store = served(asked.folder, IMAGES)
    store.digests(CONFIG)
    victim = Victim(store=store, folder=asked.folder)
    cases = list(itertools.product(("info", "pull", "loader"), OBJECTS))
    with RangeServer(asked.folder / "served") as elsewhere:
        for lie in LIES:
            record = Record(fault=f"a web server that lies: {lie}", kind=Kind.HOSTILE)
            for what, name in draw.sample(cases, asked.of(3, len(cases))):
                schedule = Schedule([lie] * 100_000, concerns=lambda path, name=name: path.endswith(name))  # type: ignore[misc]
                with RangeServer(asked.folder / "served", schedule=schedule, drip_s=60.0, elsewhere=elsewhere.url) as server:
                    outcome, said = _judged(victim, what, f"{server.url}/{store.name}")
                record.add(outcome, f"{what}, {name}: {said}")
            yield record
        yield _lists_without_end(asked.folder, victim, store)
        record = Record(fault="a web server that lies: generations without end", kind=Kind.HOSTILE)
        with RangeServer(asked.folder / "served", made=_endless(store)) as server:
            for what in ("info", "pull", "loader"):
                outcome, said = _judged(victim, what, f"{server.url}/{store.name}")
                record.add(outcome, f"{what}: {said}")
        yield record
