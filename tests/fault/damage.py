"""Damage to a store's files: single bits flipped, one at a time, and files damaged at random, several at a time, and repaired.

A flip is a clean error if the store does not open, or `store verify` names a fault; it is harmless if neither is the case
and every reader's output over the whole store, in each of its generations, is byte for byte what it was.

After a repair every sample that is left is what it was, none that was dropped or replaced is back, no shard that was not
damaged has lost one, a second repair changes nothing, what was lost can be packed again, and then, once what is superseded
has been collected, nothing is wrong.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from bucketline.errors import BucketlineError, StoreError
from bucketline.store import Store, read_manifest
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.change.repair import repair
from bucketline.store.format.manifest import generations
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing, lock_store, publish
from tests.every_reader import digest_of_everything
from tests.fault.apart import apart
from tests.fault.ground import expect_sound
from tests.fault.record import COLUMNS_TOO, Asked, Kind, Outcome, Record, expect
from tests.kit import COLUMNS, IMAGES, Form, Held, Sample, by_id, flip_bit, samples_of

LONGEST_S = 60.0  # of all readers and a verification
FORMS = (("", IMAGES), (COLUMNS_TOO, COLUMNS))
DAMAGES = ("remove", "cut", "append", "flip", "blank", "exchange")
Contents = list[tuple[int | None, str]]  # a generation, or None for the newest, and the digest of all that readers give


def worn_store(path: Path, form: Form, num_rows: int) -> dict[str, Sample]:
    """Make a store of four shards, with replaced and dropped rows; return its live samples."""
    samples = samples_of({"train/64x64": num_rows, "train/8x8": 9, "val/64x128": 4})
    more = samples_of({"train/64x64": 25}, "more/")
    form.make_store(path, samples, samples[3:9], more, more[10:12])
    dropped = [samples[20].id, more[3].id]
    drop(path, dropped)
    return {sample.id: sample for sample in (*samples, *more) if sample.id not in dropped}


def kind_of(path: Path) -> str:
    """Return the kind of a file, as the table names it."""
    if path.parent.name == "generations":
        return "generations/*.json"
    return path.name if path.suffix == ".json" else path.suffix.partition("-")[0] + ("-N" if "-" in path.suffix else "")


def draw_flips(store: Path, count: int, draw: random.Random) -> Iterator[tuple[Path, int]]:
    """Draw bits: every second one evenly over all bytes, the others evenly over the kinds of files first."""
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = sorted({kind_of(path) for path in files})
    for n in range(count):
        chosen = files if n % 2 else [path for path in files if kind_of(path) == kinds[n // 2 % len(kinds)]]
        (path,) = draw.choices(chosen, weights=[path.stat().st_size for path in chosen])
        yield path, draw.randrange(path.stat().st_size * 8)


def contents(store: Path) -> Contents:
    """Return what every generation holds."""
    return [(n, digest_of_everything(Store.open(store, n))) for n in (None, *sorted(generations(store)))]


def used(store: Path, expected: Contents) -> Outcome:
    """Use a store of which one bit is another."""

    def is_as_it_was(some: Contents) -> bool:
        try:
            return all(digest_of_everything(Store.open(store, number)) == digest for number, digest in some)
        except BucketlineError:
            return False

    same = is_as_it_was(expected[:1])  # also where verify finds the flip: it must not end the process
    try:
        if verify(Store.open(store), lambda _: None, 1).corrupt:
            return Outcome.CLEAN_ERROR
    except StoreError:
        return Outcome.CLEAN_ERROR
    return Outcome.COMPLETED if same and is_as_it_was(expected[1:]) else Outcome.WRONG


def flipped_bits(asked: Asked) -> Iterator[Record]:
    """One bit of a store's files flipped, of a store of images and of one of columns of any kind."""

    def trial(path: Path, bit: int) -> Outcome:
        flip_bit(path, bit)
        ended = apart(partial(used, store, expected), LONGEST_S)
        flip_bit(path, bit)
        outcome = Outcome(ended.done())
        expect(outcome is not Outcome.WRONG, "the flip was not found", outcome)
        return outcome

    for (words, form), flips in zip(FORMS, (asked.of(150, 1200), asked.of(70, 600)), strict=True):
        store, records = asked.folder / f"flips{words}", dict[str, Record]()
        worn_store(store, form, num_rows=30)
        expected = apart(partial(contents, store), LONGEST_S).done()
        for path, bit in draw_flips(store, flips, random.Random(asked.seed)):
            fault = f"a bit flipped in {kind_of(path)}{words}"
            records.setdefault(fault, Record(fault, Kind.FLIP)).trial(f"bit {bit} of {path.name}", trial, path, bit)
        yield from (records[fault] for fault in sorted(records))


def damage(how: str, path: Path, draw: random.Random) -> None:
    """Damage a file: remove it, cut it short, append, flip bits, have zeros as after a power loss, or another of its kind."""
    others = [other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path]
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return
    if how == "exchange":
        if others:
            shutil.copy(draw.choice(others), path)
        return
    if how == "cut":
        os.truncate(path, draw.randrange(len(data)))
        return
    if how == "append":
        data += draw.randbytes(draw.randint(1, 9000))
    elif how == "flip":
        for bit in draw.sample(range(len(data) * 8), draw.randint(1, 5)):
            data[bit // 8] ^= 1 << bit % 8
    else:
        begin = draw.randrange(len(data))
        end = min(len(data), begin + draw.choice((1, 512, 4096, 40_000)))
        data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def is_as_it_was(now: Held, before: Held) -> bool:
    """Return whether a sample is what it was: its columns, captions, and what of its record has a checksum."""
    fields = ("id", "bucket", "source_bytes", "source_mtime_ns", "content", "original_size", "captions")
    same = all(getattr(now.record, name) == getattr(before.record, name) for name in fields)
    return same and now.columns == before.columns and now.captions == before.captions


def repaired(path: Path, damaged: set[str], every: dict[str, Sample], before: dict[str, Held], form: Form) -> Outcome:
    """Repair a store of which some shards are damaged, and pack again what was lost."""
    owner = owners(path.with_name("sound"))
    done = repair(path, threads=1)
    now = by_id(Store.open(path))
    lost = before.keys() - now.keys()
    expect(not now.keys() - before.keys(), "a sample is back that was not there")
    expect(all(is_as_it_was(now[i], before[i]) for i in now), "a sample is not what it was")
    expect((done.dropped, done.samples) == (len(lost), len(now)), "samples were lost that were not counted")
    expect({i for shard in done.shards for i in shard.dropped_ids} <= lost, "a sample is named that is not lost")
    expect({owner[i] for i in lost} <= damaged, "a shard lost samples that nobody damaged")
    expect(not verify(Store.open(path), lambda _: None, 1, shards_only=True).corrupt, "faults: one is left")
    manifest = (path / "manifest.json").read_bytes()
    expect(not repair(path, threads=1).shards, "a second repair found something")
    expect((path / "manifest.json").read_bytes() == manifest, "a second repair changed something")
    if lost:
        with form.part(path, "again") as writer:
            form.add(writer, [every[i] for i in sorted(lost)])
        with lock_store(path):
            publish(path, read_manifest(path), writer.sealed, ())
    expect(by_id(Store.open(path)).keys() == before.keys(), "missing: a sample that could not be packed again")
    with changing(path):
        collect(path, 0.0)
    expect_sound(path)
    return Outcome.RECOVERED


def owners(path: Path) -> dict[str, str]:
    """Return the name of each live sample's shard."""
    store = Store.open(path)
    found: dict[str, str] = {}
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        shards = bucket.locate(rows).shard
        found |= {i: store.shards[int(n)].name for i, n in zip(bucket.sample_ids(rows), shards, strict=True)}
    return found


def damaged_files(asked: Asked) -> Iterator[Record]:
    """Files of a store removed, cut, overwritten or exchanged, then a repair and the same samples packed again."""
    for (words, form), trials in zip(FORMS, (asked.of(12, 200), asked.of(12, 100)), strict=True):
        folder, draw = asked.folder / f"damage{words}", random.Random(asked.seed)
        sound, path = folder / "sound", folder / "s"
        every = worn_store(sound, form, num_rows=60)
        before = by_id(Store.open(sound))
        record = Record(f"a store's files damaged, repaired and packed again{words}", Kind.DISK)
        for _ in range(trials):
            shutil.copytree(sound, path)
            files = sorted((path / "shards").iterdir())
            chosen = {file: draw.choice(DAMAGES) for file in draw.sample(files, draw.randint(1, 3))}
            for file, how in chosen.items():
                damage(how, file, draw)
            what = ", ".join(f"{how} {file.name}" for file, how in chosen.items())
            record.trial(what, repaired, path, {file.name.partition(".")[0] for file in chosen}, every, before, form)
            shutil.rmtree(path)
        yield record
