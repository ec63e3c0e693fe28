"""Damages files of a store at random, several at a time, and repairs it.

After a repair every sample that is left is what it was, none that was dropped or replaced is back, no shard that was not
damaged has lost one, a second repair changes nothing, what was lost can be packed again, and then, once what is superseded
has been collected, nothing is wrong.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bucketline.store import Store, read_manifest
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.change.repair import repair
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing, lock_store, publish
from tests.fault.record import COLUMNS_TOO, Asked, Kind, Outcome, Record, outcome_of
from tests.kit import COLUMNS, IMAGES, Form, Held, Sample, by_id, samples_of


def worn_store(path: Path, form: Form, num_rows: int) -> dict[str, Sample]:
    """Make a store of four shards, with replaced and dropped rows; return its live samples."""
    samples = samples_of({"train/64x64": num_rows, "train/8x8": 9, "val/64x128": 4})
    more = samples_of({"train/64x64": 25}, "more/")
    form.make_store(path, samples, samples[3:9], more, more[10:12])
    drop(path, [samples[20].id, more[3].id])
    return {sample.id: sample for sample in (*samples, *more) if sample.id not in (samples[20].id, more[3].id)}


def remove(path: Path, draw: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def cut(path: Path, draw: random.Random) -> None:
    """Cut the file short."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def append(path: Path, draw: random.Random) -> None:
    """Append to the file."""
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 9000)))


def flip(path: Path, draw: random.Random) -> None:
    """Flip up to five bits."""
    data = bytearray(path.read_bytes())
    for bit in draw.sample(range(len(data) * 8), draw.randint(1, 5)):
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def blank(path: Path, draw: random.Random) -> None:
    """Have zeros in the place of a part, as after a power loss."""
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((1, 512, 4096, 40_000)))
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def exchange(path: Path, draw: random.Random) -> None:
    """Have another file of its kind in its place."""
    others = [other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path]
    if others:
        shutil.copy(draw.choice(others), path)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (remove, cut, append, flip, blank, exchange)


def is_as_it_was(now: Held, before: Held) -> bool:
    """Return whether a sample is what it was: its columns, captions, and what of its record has a checksum."""
    fields = ("id", "bucket", "source_bytes", "source_mtime_ns", "content", "original_size", "captions")
    same = all(getattr(now.record, name) == getattr(before.record, name) for name in fields)
    return same and now.columns == before.columns and now.captions == before.captions


def trial(sound: Path, path: Path, every: dict[str, Sample], draw: random.Random, form: Form) -> None:
    """Damage a copy of a store, repair it, and pack again what was lost."""
    shutil.copytree(sound, path)
    before, owner = by_id(Store.open(path)), owners(path)
    files = sorted((path / "shards").iterdir())
    chosen = draw.sample(files, draw.randint(1, 3))
    what = []
    for file in chosen:
        damage = draw.choice(DAMAGES)
        damage(file, draw)
        what.append(f"{damage.__name__} {file.name}")
    try:
        done = repair(path, threads=1)
        now = by_id(Store.open(path))
        lost = before.keys() - now.keys()
        assert not now.keys() - before.keys(), "a sample is back that was not there"
        assert all(is_as_it_was(now[i], before[i]) for i in now), "a sample is not what it was"
        assert (done.dropped, done.samples) == (len(lost), len(now)), "samples were lost that were not counted"
        assert {i for shard in done.shards for i in shard.dropped_ids} <= lost, "a sample is named that is not lost"
        touched = {file.name.partition(".")[0] for file in chosen}
        assert {owner[i] for i in lost} <= touched, "a shard lost samples that nobody damaged"
        assert verify(Store.open(path), lambda _: None, 1, shards_only=True).corrupt == (), "a fault is left"
        manifest = (path / "manifest.json").read_bytes()
        assert repair(path, threads=1).shards == (), "a second repair found something"
        assert (path / "manifest.json").read_bytes() == manifest, "a second repair changed something"
        pack_again(path, [every[i] for i in sorted(lost)], form)
        assert by_id(Store.open(path)).keys() == before.keys(), "a sample could not be packed again"
        with changing(path):
            collect(path, 0.0)
        assert verify(Store.open(path), lambda _: None, 1).corrupt == (), "a fault is left in the end"
    except Exception as error:
        raise ValueError(f"{', '.join(what)}: {error!r}") from error
    finally:
        shutil.rmtree(path)


def owners(path: Path) -> dict[str, str]:
    """Return the name of each live sample's shard."""
    store = Store.open(path)
    found: dict[str, str] = {}
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        shards = bucket.locate(rows).shard
        found |= {i: store.shards[int(n)].name for i, n in zip(bucket.sample_ids(rows), shards, strict=True)}
    return found


def pack_again(path: Path, samples: list[Sample], form: Form) -> None:
    """Pack samples as the next run would."""
    if samples:
        with form.part(path, "again") as writer:
            form.add(writer, samples)
        with lock_store(path):
            publish(path, read_manifest(path), writer.sealed, ())


def damaged_files(asked: Asked) -> Iterator[Record]:
    """Files of a store removed, cut, overwritten or exchanged, then a repair and the same samples packed again."""
    for words, form, trials in (("", IMAGES, asked.of(12, 200)), (COLUMNS_TOO, COLUMNS, asked.of(12, 100))):
        folder, draw = asked.folder / f"damage{words}", random.Random(asked.seed)
        every = worn_store(folder / "sound", form, num_rows=60)
        record = Record(fault=f"a store's files damaged, repaired and packed again{words}", kind=Kind.DISK)
        for _ in range(trials):
            try:
                trial(folder / "sound", folder / "s", every, draw, form)
                record.add(Outcome.RECOVERED)
            except ValueError as error:
                record.add(outcome_of(str(error)), str(error))
        yield record
