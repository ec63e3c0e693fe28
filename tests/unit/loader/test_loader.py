"""Iteration ends cleanly, failures reach the caller, and nothing is left running."""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, DeliveryError, PlanError, StoreError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.buffers import FilledBuffer
from bucketline.loader.collate.window import CopyPlan
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from tests.kit import add_samples, make_store, samples_of, store_writer
from tests.leftovers import wait_until


def fillers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bucketline-builder"]


def test_names_are_the_sample_ids_of_a_batchs_rows(store: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other.store", samples_of({"train/64x64": 3}, "other/"))
    with Loader([store, WeightedStore(store=other, repeats=2)], LoaderConfig(batch_size=3, epochs=1)) as loader:
        batches = list(loader.forever())
        names = [loader.names(batch) for batch in batches]
    assert [[sample_digest(name) for name in own] for own in names] == [
        [row.tobytes() for row in batch.ids.numpy()] for batch in batches
    ]
    found = {name for own in names for name in own if name.startswith("other/")}
    assert found == {f"other/train/64x64/{n}.png" for n in range(3)}
    with Loader(store, LoaderConfig(batch_size=3)) as alone, pytest.raises(StoreError, match="the batch is of another store"):
        alone.names(next(batch for batch, own in zip(batches, names, strict=True) if found & set(own)))


def test_a_loop_that_is_left_and_a_loader_that_is_dropped_end_their_thread(store: Store) -> None:
    config = LoaderConfig(batch_size=1, prefetch_bytes=1)
    with Loader(store, config) as loader:
        for _ in loader.forever():
            break
    assert fillers() == []
    loader = Loader(store, config)
    batch = next(loader.forever())
    assert len(fillers()) <= 1
    del loader
    gc.collect()
    assert fillers() == []
    assert torch.equal(batch.latents, batch.latents.clone())


REFUSED: dict[str, tuple[LoaderConfig, dict[str, int], type[Exception], str]] = {
    "another split": (
        LoaderConfig(batch_size=1, split="test"),
        {},
        PlanError,
        r"no rows in .*'test' \(.*: train, val",
    ),
    "an epoch without a batch": (
        LoaderConfig(batch_size=50, epochs=1, remainder=Remainder.DROP),
        {},
        PlanError,
        "the plan has no step",
    ),
    "no batch ever": (
        LoaderConfig(batch_size=50, remainder=Remainder.DROP),
        {},
        PlanError,
        "the plan has no step: .*; use a smaller batch, fewer GPUs, or a remainder",
    ),
    "a rank too high": (LoaderConfig(batch_size=1), {"rank": 2, "world_size": 2}, UsageError, "rank is 2 of 2 ranks"),
    "a rank below 0": (LoaderConfig(batch_size=1), {"rank": -1, "world_size": 2}, UsageError, "rank is -1 of 2 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_batches_is_refused_when_the_loader_is_made(store: Store, name: str) -> None:
    config, ranks, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        Loader(store, config, **ranks)  # type: ignore[arg-type]


def test_torchs_threads_are_as_many_as_before(store: Store) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Loader(store, LoaderConfig(batch_size=1)) as loader:
            next(loader.forever())
            assert torch.get_num_threads() == 2
            counted: list[int] = []
            thread = threading.Thread(target=lambda: counted.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert counted == [2]
    finally:
        torch.set_num_threads(before)


def test_a_filling_thread_copies_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = set[int]()
    fill = BatchBuilder.fill

    def counting(self: BatchBuilder, buffer: torch.Tensor, copy_plan: CopyPlan) -> FilledBuffer:
        started.wait()
        counted.add(torch.get_num_threads())
        return fill(self, buffer, copy_plan)

    monkeypatch.setattr(BatchBuilder, "fill", counting)
    started = threading.Event()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Loader(store, LoaderConfig(batch_size=1, threads=2)) as loader:
            batches = loader.forever()
            started.set()  # what the threads set for themselves, the loader has put back for all others now
            for _ in range(4):
                next(batches)
        assert counted == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("suffix", ["lmdb", "meta"])
def test_a_shard_that_is_gone_is_an_error_at_next_with_step_bucket_and_file_named(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    with Loader(tmp_path / "s", LoaderConfig(batch_size=2)) as loader:
        (tmp_path / "s" / "shards" / f"g1.{suffix}").unlink()  # before it is opened, and after the store was looked at
        with pytest.raises(StoreError, match=rf"step \d+, bucket train/\d+x\d+: .*g1.{suffix} is missing"):
            list(loader.forever())
        assert fillers() == []


def test_a_damaged_sidecar_is_an_error_at_next_not_a_batch_of_other_bytes(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    path = tmp_path / "s" / "shards" / "g0.meta"
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    with Loader(tmp_path / "s", LoaderConfig(batch_size=2, epochs=1)) as loader:
        with pytest.raises(CorruptError, match=r"step 0, bucket .*g0.meta is not the file that the manifest lists"):
            list(loader.forever())
        with pytest.raises(CorruptError, match="step 0"):
            list(loader.forever())


def test_a_failure_does_not_count_as_consumed(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    with Loader(tmp_path / "s", LoaderConfig(batch_size=4)) as loader:
        (tmp_path / "s" / "shards" / "g0.lmdb").rename(tmp_path / "s" / "away")
        with pytest.raises(StoreError):
            list(loader.forever())
        step = loader.state_dict()["step"]
        (tmp_path / "s" / "away").rename(tmp_path / "s" / "shards" / "g0.lmdb")
        assert next(loader.forever()).step == step


def test_packing_while_someone_reads_changes_nothing_under_them(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 10}))
    config = LoaderConfig(batch_size=2, epochs=2)
    with Loader(tmp_path, config) as loader:
        expected = [batch.ids.tolist() for batch in loader.forever()]
    with Loader(tmp_path, config) as loader:
        batches = loader.forever()
        found = [next(batches).ids.tolist()]
        with store_writer(tmp_path) as writer:
            add_samples(writer, samples_of({"train/64x64": 3}) + samples_of({"train/64x64": 9}, "more/"))
        assert writer.manifest.generation == 2
        found += [batch.ids.tolist() for batch in batches]
    assert found == expected
    with Loader(tmp_path, config) as loader:
        assert len(list(loader.forever())) == 19


def test_a_batch_with_tensors_of_two_devices_or_lengths_is_never_made(store: Store) -> None:
    from dataclasses import fields

    with Loader(store, LoaderConfig(batch_size=2)) as loader:
        batch = next(loader.forever())
    values = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    with pytest.raises(AssertionError, match=r"has tensors on \['cpu', 'meta'\]; they must share one device"):
        Batch(**{**values, "tokens": batch.tokens.to("meta")})
    with pytest.raises(AssertionError, match=r"has tensors of \[1, 2\] rows"):
        Batch(**{**values, "tokens": batch.tokens[:1]})


def test_what_a_caller_writes_into_a_batch_reaches_no_later_batch_and_not_the_store(store: Store) -> None:
    config = LoaderConfig(batch_size=2, epochs=3, prefetch_bytes=1)
    with Loader(store, config) as loader:
        expected = [batch.latents.clone() for batch in loader.forever()]
    before = store.bucket("train/64x64").read(np.arange(10), "latent")
    with Loader(store, config) as loader:
        for batch, wanted in zip(loader.forever(), expected, strict=True):
            assert torch.equal(batch.latents, wanted)
            for tensor in batch.tensors():
                tensor.zero_()
    assert np.array_equal(store.bucket("train/64x64").read(np.arange(10), "latent"), before)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_batches_in_the_same_order(store: Store, threads: int) -> None:
    config = LoaderConfig(batch_size=2, epochs=4, prefetch_bytes=1)
    with Loader(store, config) as one, Loader(store, replace(config, threads=threads)) as other:
        for expected, found in zip(one.forever(), other.forever(), strict=True):
            assert (found.step, found.bucket) == (expected.step, expected.bucket)
            assert all(torch.equal(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True))


def test_statistics_count_what_was_taken_by_bucket(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=2, epochs=2, prefetch_bytes=1)) as loader:
        assert loader.stats().batches == 0
        assert loader.stats().samples_per_s == loader.stats().waited == 0.0
        batches = loader.forever()
        taken = [next(batches) for _ in range(7)]
        stats = loader.stats()
        assert (stats.batches, stats.samples, stats.depth) == (7, 14, 2)
        assert {name: own // 2 for name, own in stats.by_bucket.items()} == Counter(batch.bucket for batch in taken)
        assert stats.ready <= 2
        assert stats.buffers >= 7
        assert stats.bytes >= sum(t.numel() * t.element_size() for b in taken for t in b.tensors())
        assert 0 < stats.waited_s <= stats.seconds
        assert 0 < stats.waited <= 1
        assert stats.samples_per_s == pytest.approx(14 / stats.seconds)
        assert stats.bytes_per_s == pytest.approx(stats.bytes / stats.seconds)
        taken.clear()
        rest = list(batches)
        assert loader.stats().batches == 7 + len(rest)
        loader.set_epoch(0)
        next(loader.forever())
        assert loader.stats().batches == 1


def test_a_thread_that_is_ended_from_outside_is_an_error_at_next_and_the_next_iteration_goes_on(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=1, prefetch_bytes=1)) as loader:
        batches = loader.forever()
        found = [next(batches).step]
        (thread,) = fillers()
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        with pytest.raises(DeliveryError, match=r"a prefetch thread was ended by SystemExit\(\)"):
            found += [batch.step for batch in batches]
        assert next(loader.forever()).step == found[-1] + 1 or len(found) == 1


@pytest.mark.parametrize("service", [None, "auto"])
def test_what_is_said_of_an_iteration_that_was_ended_stays_when_its_iterator_goes(store: Store, service: str | None) -> None:
    """The iterator asked its closed stream again, and as the interpreter went that was a traceback."""
    with Loader(store, LoaderConfig(batch_size=1), service=service) as loader:
        batches = loader.forever()
        next(batches)
        assert wait_until(lambda: loader.stats().ready)
    said = loader.stats()
    assert said.ready
    batches.close()  # type: ignore[attr-defined]
    assert loader.stats() == said


def test_a_store_a_loader_and_a_batch_are_printed_in_a_few_lines(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=3)) as loader:
        batch = next(iter(loader))
        shown = {"Store": str(store), "Loader": str(loader), "Batch": str(batch)}
    for kind, text in shown.items():
        assert text.startswith(kind)
        assert len(text.splitlines()) <= 20
    rows = sum(bucket.num_rows for bucket in store.buckets())
    assert f"{rows} rows in {len(store.buckets())} buckets" in shown["Store"]
    assert f"batch_size=3, epoch {loader.epoch}, step {loader.state_dict()['step']}, " in shown["Loader"]
    for name, tensor in batch.by_name().items():
        assert f"{name:<16} {list(tensor.shape)} {tensor.dtype}".replace("torch.", "") in shown["Batch"]
