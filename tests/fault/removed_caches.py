"""A loader reads a store on a server while somebody removes its cache, or a part of it, again and again; then nobody does."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from bucketline.bench.fixtures.server_process import ServerProcess
from bucketline.store.remote.urls import RemoteOptions
from tests.fault.record import Asked, Kind, Outcome, Record, outcome_of
from tests.fault.served import IMAGES, WrongPassError, check_cache, in_lines, one_pass, served

DEADLINE_S = 5.0
REMOVALS, BETWEEN_S = 4, 0.3  # of one pass
PARTS = (".", "*", "*/*")  # the cache, a store's folder, a shard's


def _remove(cache: Path, draw: random.Random, is_over: threading.Event) -> None:
    for _ in range(REMOVALS):
        if is_over.wait(draw.random() * BETWEEN_S):
            return
        part = draw.choice(PARTS)
        found = [cache] if part == "." else sorted(path for path in cache.glob(part) if path.is_dir())
        if found:
            shutil.rmtree(draw.choice(found), ignore_errors=True)


def removed_caches(asked: Asked) -> Iterator[Record]:
    """Passes in-process and by a private service, each with an empty cache, and a whole one after it."""
    record = Record(fault="the cache of a store on a server removed while it is read", kind=Kind.DISK)
    draw, store, cache = random.Random(asked.seed), served(asked.folder, IMAGES), asked.folder / "cache"
    options = RemoteOptions(cache=cache, deadline_s=DEADLINE_S)
    with ServerProcess(asked.folder / "served") as server:
        url = f"{server.url}/{store.name}"
        for number in range(asked.of(4, 40)):
            config, is_over = in_lines(batch_size=draw.choice([4, 16]), seed=number, epochs=2), threading.Event()
            thread = threading.Thread(target=_remove, args=(cache, random.Random(draw.random()), is_over))
            expected, service = store.digests(config), draw.choice([None, None, "auto"])
            thread.start()
            try:
                found = one_pass(url, expected, config, options, service=service)
                is_over.set()
                thread.join()
                if (again := one_pass(url, expected, config, options).errors) and len(again) > 1:  # one of what is gone
                    raise WrongPassError(f"after the last removal: {again[-1]}")
                check_cache(cache, store.local)
                record.add(Outcome.RECOVERED if found.errors else Outcome.COMPLETED)
            except WrongPassError as error:
                record.add(outcome_of(str(error)), f"{service or 'in-process'}: {error}")
            finally:
                is_over.set()
                thread.join()
                shutil.rmtree(cache, ignore_errors=True)
    yield record
