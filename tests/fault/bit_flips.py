"""Flips single bits of a store's files, one at a time, and sees what comes of each.

A flip is a clean error if the store does not open, or `store verify` names a fault; it is harmless if neither is the case
and every reader's output over the whole store, in each of its generations, is byte for byte what it was before. Anything
else is a failure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bucketline.errors import BucketlineError, StoreError
from bucketline.store import Store
from bucketline.store.format.manifest import generations
from bucketline.store.verify.verify import verify
from tests.every_reader import digest_of_everything
from tests.fault.apart import How, apart
from tests.fault.random_damage import worn_store
from tests.fault.record import COLUMNS_TOO, Asked, Kind, Outcome, Record
from tests.kit import COLUMNS, IMAGES, flip_bit

LONGEST_S = 60.0  # of all readers and a verification
Contents = list[tuple[int | None, str]]  # a generation, or None for the newest, and the digest of all that readers give


def kind_of(path: Path) -> str:
    """Return the kind of a file, as the table names it."""
    if path.parent.name == "generations":
        return "generations/*.json"
    return path.name if path.suffix == ".json" else path.suffix.partition("-")[0] + ("-N" if "-" in path.suffix else "")


def draw_flips(store: Path, count: int, draw: random.Random) -> list[tuple[Path, int]]:
    """Draw bits: every second one evenly over all bytes, the others evenly over the kinds of files first."""
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = sorted({kind_of(path) for path in files})
    flips = []
    for n in range(count):
        chosen = files if n % 2 else [path for path in files if kind_of(path) == kinds[n // 2 % len(kinds)]]
        (path,) = draw.choices(chosen, weights=[path.stat().st_size for path in chosen])
        flips.append((path, draw.randrange(path.stat().st_size * 8)))
    return flips


def contents(store: Path) -> Contents:
    """Return what every generation holds."""
    return [(n, digest_of_everything(Store.open(store, n))) for n in (None, *sorted(generations(store)))]


def outcome(store: Path, expected: Contents) -> Outcome:
    """Use a store of which one bit is another."""

    def is_as_it_was(some: Contents) -> bool:
        try:
            return all(digest_of_everything(Store.open(store, number)) == digest for number, digest in some)
        except BucketlineError:
            return False

    same = is_as_it_was(expected[:1])  # also where verify finds the flip: it must not end the process
    try:
        opened = Store.open(store)
    except StoreError:
        return Outcome.CLEAN_ERROR
    if verify(opened, lambda _: None, 1).corrupt:
        return Outcome.CLEAN_ERROR
    return Outcome.COMPLETED if same and is_as_it_was(expected[1:]) else Outcome.WRONG


def flipped_bits(asked: Asked) -> Iterator[Record]:
    """One bit of a store's files flipped, of a store of images and of one of columns of any kind."""
    for words, form, flips in (("", IMAGES, asked.of(150, 1200)), (COLUMNS_TOO, COLUMNS, asked.of(70, 600))):
        store, records = asked.folder / f"flips{words}", dict[str, Record]()
        worn_store(store, form, num_rows=30)
        expected = apart(partial(contents, store), LONGEST_S).gave
        for path, bit in draw_flips(store, flips, random.Random(asked.seed)):
            flip_bit(path, bit)
            ended = apart(partial(outcome, store, expected), LONGEST_S)
            flip_bit(path, bit)
            fault = f"a bit flipped in {kind_of(path)}{words}"
            record = records.setdefault(fault, Record(fault=fault, kind=Kind.FLIP))
            found = Outcome(ended.gave) if ended.how is How.DONE else ended.outcome
            record.add(found, f"bit {bit} of {path.name}: {ended.said}")
        yield from (records[fault] for fault in sorted(records))
