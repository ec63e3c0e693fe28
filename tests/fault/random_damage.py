"""Damages files of a store at random, several at a time, and repairs it.

`python -m tests.fault.random_damage --trials 200 --seed 1` prints how the trials ended. After a repair every sample that is
left is what it was, none that was dropped or replaced is back, no shard that was left alone has lost one, a second repair
changes nothing, what was lost can be packed again, and then, once what is superseded has been collected, nothing is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.store import Store, read_manifest
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.change.repair import repair
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing, lock_store, publish
from tests.building import Sample, samples_of
from tests.reading import everything
from tests.store_forms import FORMS, Form

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.reading import Held


def make(path: Path, form: Form) -> dict[str, Sample]:
    """Make a store of four shards with replaced and dropped rows; return its live samples."""
    samples = samples_of({"train/64x64": 60, "train/8x8": 9, "val/64x128": 4})
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


def held(store: Store) -> dict[str, Held]:
    """Return all live samples by id, each compared with its checksum."""
    return {one.record.id: one for rows in everything(store).values() for one in rows}


def is_as_it_was(now: Held, before: Held) -> bool:
    """Return whether a sample is what it was: its columns, captions, and what of its record has a checksum."""
    fields = ("id", "bucket", "source_bytes", "source_mtime_ns", "content", "original_size", "captions")
    same = all(getattr(now.record, name) == getattr(before.record, name) for name in fields)
    return same and now.columns == before.columns and now.captions == before.captions


def trial(sound: Path, path: Path, every: dict[str, Sample], draw: random.Random, form: Form) -> str:
    """Damage a copy of a store, repair it, and pack again what was lost; return how much that was."""
    shutil.copytree(sound, path)
    before, owner = held(Store.open(path)), owners(path)
    files = sorted((path / "shards").iterdir())
    chosen = draw.sample(files, draw.randint(1, 3))
    what = []
    for file in chosen:
        damage = draw.choice(DAMAGES)
        damage(file, draw)
        what.append(f"{damage.__name__} {file.name}")
    try:
        done = repair(path, threads=1)
        now = held(Store.open(path))
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
        assert held(Store.open(path)).keys() == before.keys(), "a sample could not be packed again"
        with changing(path):
            collect(path, 0.0)
        assert verify(Store.open(path), lambda _: None, 1).corrupt == (), "a fault is left in the end"
    except Exception as error:
        raise ValueError(f"{', '.join(what)}: {error!r}") from error
    finally:
        shutil.rmtree(path)
    return "all" if len(now) == 0 else "nothing" if not lost else "some"


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


def run(trials: int, seed: int, folder: Path, form: Form) -> tuple[Counter[str], list[str]]:
    """Make so many trials on a store of a form; return how much was lost how often, and what went wrong."""
    every, draw = make(folder / "sound", form), random.Random(seed)
    counts: Counter[str] = Counter()
    failures = []
    for _ in range(trials):
        try:
            counts[trial(folder / "sound", folder / "s", every, draw, form)] += 1
        except ValueError as error:
            failures.append(str(error))
    return counts, failures


def main() -> int:
    """Print how the trials ended; 1 if one ended as it should not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=FORMS, default="images")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, failures = run(asked.trials, asked.seed, Path(folder), FORMS[asked.form])
    for lost, count in sorted(counts.items()):
        print(f"{lost} lost: {count}")
    for failure in failures:
        print(failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
