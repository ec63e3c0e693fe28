"""A writer that several threads use, that a forked child has inherited, and rows that it refuses."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import BucketlineError, LockedError, UsageError
from bucketline.store import PartWriter, Store
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import lock_store
from tests.fault.apart import How, apart
from tests.kit import IMAGES, Sample, add_samples, embedding, samples_of, store_writer

BUCKET = "train/64x64"
SAMPLES = samples_of({BUCKET: 240, "val/8x8": 40})


def expect(path: Path, samples: list[Sample]) -> Store:
    store = Store.open(path)
    assert not verify(store, lambda _: None, 1).corrupt
    IMAGES.expect(store, samples)
    return store


@pytest.mark.parametrize("kind", ["store", "part"])
def test_what_several_threads_add_is_all_stored(tmp_path: Path, kind: str) -> None:
    with store_writer(tmp_path / "s", shard_bytes=1 << 14) as writer:
        used: PartWriter = writer if kind == "store" else writer.part("p")

        def add(samples: list[Sample]) -> None:
            add_samples(used, samples, commit_every=5)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, [SAMPLES[n::8] for n in range(8)]))
            if kind == "store":
                list(pool.map(lambda _: writer.publish(), range(3)))
        used.seal()
    store = expect(tmp_path / "s", SAMPLES)
    assert len(store.shards) > 1


def test_the_same_id_from_two_threads_is_refused_once(tmp_path: Path) -> None:
    refused = []
    with store_writer(tmp_path / "s") as writer:

        def add(sample: Sample) -> None:
            try:
                add_samples(writer, [sample])
            except UsageError as error:
                refused.append(str(error))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, [sample for sample in SAMPLES[:50] for _ in range(2)]))
    assert len(refused) == 50
    expect(tmp_path / "s", SAMPLES[:50])


@pytest.mark.parametrize("use", ["add", "commit", "seal", "publish", "part", "leave"])
def test_a_forked_child_of_a_writer_is_refused_and_changes_nothing(tmp_path: Path, use: str) -> None:
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, SAMPLES[:9])
        uses: dict[str, Callable[[], object]] = {
            "add": lambda: add_samples(writer, SAMPLES[9:10]),
            "commit": writer.commit,
            "seal": writer.seal,
            "publish": writer.publish,
            "part": lambda: writer.part("p"),
            "leave": lambda: writer.__exit__(None, None, None),
        }
        child = apart(lambda: uses[use]() and None)
        assert child.how is How.REFUSED
        assert f"process {os.getpid()} writes" in child.said
        assert "StoreWriter.part" in child.said
        with pytest.raises(LockedError, match=f'"pid": {os.getpid()}'):
            lock_store(tmp_path / "s")
        assert apart(lambda: writer.__exit__(ValueError, ValueError("x"), None)).how is How.DONE
        assert list((tmp_path / "s" / "pending").glob("g*.lock"))
        add_samples(writer, SAMPLES[10:20])
    expect(tmp_path / "s", [*SAMPLES[:9], *SAMPLES[10:20]])


def test_a_part_is_for_whichever_process_uses_it_first(tmp_path: Path) -> None:
    def fill(part: PartWriter, samples: list[Sample]) -> list[str]:
        with part:
            add_samples(part, samples)
        return part.sealed

    with store_writer(tmp_path / "s") as writer:
        inherited, own, sent = (writer.part(name) for name in ("inherited", "own", "sent"))
        assert apart(lambda: fill(inherited, SAMPLES[:5])).how is How.DONE
        add_samples(own, SAMPLES[5:7])
        refused = apart(lambda: fill(own, SAMPLES[7:9]))
        assert refused.how is How.REFUSED
        assert apart(lambda: fill(pickle.loads(pickle.dumps(sent)), SAMPLES[9:12])).how is How.DONE
        own.seal()
    expect(tmp_path / "s", [*SAMPLES[:7], *SAMPLES[9:12]])


def test_a_refused_row_leaves_nothing_in_its_shard(tmp_path: Path) -> None:
    sample, other = SAMPLES[3], SAMPLES[4]
    texts = {"a good caption": {"tokens": embedding("a good caption")}, "another": {"tokens": np.zeros((2, 3), dtype="<f2")}}
    good, bad = texts
    record = replace(sample.record, captions=(good, bad))
    columns = {"latent": sample.latent}
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, [other])
        with pytest.raises(BucketlineError, match="without an embedding"):
            writer.add_record(record, columns, {good: texts[good]})
        with pytest.raises(BucketlineError, match="another"):
            writer.add_record(record, columns, texts)
        with pytest.raises(BucketlineError, match="source_bytes"):
            writer.add_record(replace(record, captions=(good,), source_bytes=1 << 64), columns, {good: texts[good]})
    store = expect(tmp_path / "s", [other])
    (entry,) = store.manifest.shards
    assert entry.groups["text"].rows == 1 + len(set(other.captions) - {""})
