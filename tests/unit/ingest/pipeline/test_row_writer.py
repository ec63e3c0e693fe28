"""The writing thread may end at any moment, by any error: nobody waits for it, the error is raised, and the locks are free."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest

from bucketline.errors import StoreError
from bucketline.ingest.pipeline.slice_packer import BATCHES_WAITING, EncodedBatch, RowWriter
from bucketline.store.format.block import caption_digest
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import adopt, lock_store, publish
from bucketline.store.write.shard_writer import ShardWriter
from tests.fault.apart import How, apart
from tests.fault.same_store import committed_ids
from tests.kit import Sample, empty_store, open_writer, samples_of, spec_of

BUCKET = "train/64x64"
ENOUGH = 3 * BATCHES_WAITING  # batches: more than the queue takes, whatever the thread has come to
SAMPLES = samples_of({BUCKET: ENOUGH})
HUNG_S = 60.0  # on a busy machine; it takes a fraction of a second


class Defect(BaseException):
    """An exception that no `except Exception` catches."""


def full_disk() -> None:
    raise StoreError("the disk is full")


def no_memory() -> None:
    raise MemoryError


def defect() -> None:
    raise Defect("of nobody's making")


def batch_of(sample: Sample, *, begins_shard: bool) -> EncodedBatch:
    row = (sample.record, {"latent": sample.latent}, [caption_digest("")])
    return EncodedBatch(spec=spec_of(BUCKET), begins_shard=begins_shard, rows=[row])


def write(store: Path, *, batches: int, batches_a_shard: int, stop: BaseException | None = None) -> list[str]:
    """Write batches of one sample each, and give the names of the shards that were sealed."""
    numbers = itertools.count()
    writer = RowWriter(lambda: open_writer(store, f"a{next(numbers)}"))
    with writer:
        for n, sample in enumerate(SAMPLES[:batches]):
            writer.put(batch_of(sample, begins_shard=n > 0 and n % batches_a_shard == 0))
        if stop is not None:
            raise stop
    return writer.sealed


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    """Return the kind of the error that the work ended in, and its words."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - it is what is requested
        return type(error).__name__, str(error)
    return "no error", ""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A call of a shard writer's method that fails, the `call`-th, and what is handed over until then."""

    method: str
    call: int = 0
    batches: int = 2
    batches_a_shard: int = ENOUGH
    stop: BaseException | None = None  # ends the thread that encodes, after the last batch

    def arrange(self, fail: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        calls, method = itertools.count(), getattr(ShardWriter, self.method)

        def failing(*args: object, **named: object) -> object:
            if next(calls) == self.call:
                fail()
            return method(*args, **named)

        monkeypatch.setattr(ShardWriter, self.method, failing)


MOMENTS = {
    "sealing the last shard": Moment(method="seal"),
    "sealing one of several": Moment(method="seal", call=1, batches=ENOUGH, batches_a_shard=2),
    "committing after a stop": Moment(method="commit", stop=KeyboardInterrupt()),
    "writing, with more to come than the queue takes": Moment(method="add", call=1, batches=ENOUGH),
    "beginning a shard": Moment(method="__init__", batches=ENOUGH),
    "beginning a second shard": Moment(method="__init__", call=1, batches=ENOUGH, batches_a_shard=2),
    "giving a shard up": Moment(method="close"),
}


@pytest.mark.parametrize(
    ("fail", "expected"),
    [(full_disk, ("StoreError", "disk is full")), (no_memory, ("StoreError", "memory")), (defect, ("Defect", "making"))],
)
@pytest.mark.parametrize("name", MOMENTS)
def test_an_error_of_the_writing_thread_is_raised_at_any_moment_and_nobody_waits(
    name: str, fail: Callable[[], None], expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, manifest = MOMENTS[name], empty_store(tmp_path)
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 1)  # a row is committed as soon as it is added
    monkeypatch.setattr(shard_writer, "FLUSH_AFTER_S", -1.0)
    moment.arrange(fail, monkeypatch)
    ended = apart(
        lambda: outcome(
            lambda: write(tmp_path, batches=moment.batches, batches_a_shard=moment.batches_a_shard, stop=moment.stop)
        ),
        HUNG_S,
    )
    assert ended.how is How.DONE, ended.said
    kind, words = ended.gave
    assert (kind, expected[1] in words) == (expected[0], True), (kind, words)

    monkeypatch.undo()
    committed = committed_ids(tmp_path)
    with lock_store(tmp_path):
        assert publish(tmp_path, manifest, adopt(tmp_path, manifest), ()).samples == len(committed)
    assert (len(committed) > 0) == (name != "beginning a shard")


def test_the_locks_are_free_as_soon_as_the_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)

    def refuse(*_: object) -> None:
        raise lmdb.DiskError("mdb_env_sync: Input/output error")

    monkeypatch.setattr("bucketline.store.write.seal._write_anew", refuse)

    def work() -> tuple[str, str, list[str]]:
        kind, words = outcome(lambda: write(tmp_path, batches=2, batches_a_shard=ENOUGH))
        return kind, words, [path.name for path in (tmp_path / "pending").glob("*.lock")]

    ended = apart(work, HUNG_S)
    assert ended.how is How.DONE, ended.said
    kind, words, locks = ended.gave
    assert kind == "StoreError"
    assert "a0.lmdb cannot be sealed: mdb_env_sync: Input/output error; " in words
    assert locks == []
    assert committed_ids(tmp_path) == {sample.id for sample in SAMPLES[:2]}
