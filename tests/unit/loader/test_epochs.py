"""One `for` is one epoch: rows, order, weights and keys are those of an independent model, in every way to have a loader."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from torch.utils.data import DataLoader

from bucketline.errors import BucketlineError, DeliveryError, StateError, UsageError
from bucketline.loader import BatchDataset, Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.collate.buffer_pool import BufferPool
from bucketline.loader.prefetch.threads import ThreadStream
from tests.epoch_oracle import Oracle, epochs_of, micros, rows_of
from tests.kit import make_store, samples_of
from tests.serving import serving_here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.store import Store

BATCH = 4
WAYS = ("process", "service", "network")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a store of 13 and 7 rows, neither a multiple of a batch."""
    return make_store(
        tmp_path_factory.mktemp("epochs") / "s", samples_of({"train/64x64": 13, "train/96x64": 7, "val/64x64": 5})
    )


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to have a loader of a store."""

    store: Store
    socket: Path
    port: int

    def open(self, way: str, config: LoaderConfig) -> Loader:
        if way == "network":
            return Loader(None, config, service=f"tcp://{self.port}")
        return Loader(self.store, config, service=self.socket if way == "service" else None)


@pytest.fixture(scope="module")
def ways(tiny: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with serving_here(tmp_path_factory.mktemp("served"), tiny.path) as found:
        yield Ways(tiny, found.socket, found.port)


def oracle(store: Store, **changes: Any) -> Oracle:
    return Oracle(**{"rows": rows_of([(store, 1)]), "batch_size": BATCH, **changes})


def saved(loader: Loader) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def fail_within(loader: Loader) -> None:
    for _ in loader:
        raise ZeroDivisionError


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epochs", [None, 3])
def test_each_for_is_the_next_epoch(ways: Ways, tiny: Store, way: str, epochs: int | None) -> None:
    expected = oracle(tiny, epochs=epochs)
    with ways.open(way, LoaderConfig(batch_size=BATCH, epochs=epochs)) as loader:
        for epoch in range(3):
            assert (loader.epoch, len(loader)) == (epoch, len(expected.epoch(epoch)))
            assert micros(loader) == expected.epoch(epoch)
    orders = [[one.ids for one in expected.epoch(epoch)] for epoch in range(3)]
    keys = {key for epoch in range(3) for one in expected.epoch(epoch) for key in one.keys}
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert len(keys) == sum(len(one.keys) for epoch in range(3) for one in expected.epoch(epoch))  # no draw comes twice


@pytest.mark.parametrize("remainder", Remainder)
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1)])
def test_two_ranks_and_two_micro_batches_are_those_of_the_model(
    tiny: Store, remainder: Remainder, ranks: int, accumulation: int
) -> None:
    config = LoaderConfig(batch_size=2, accumulation=accumulation, epochs=2, remainder=remainder, seed=9)
    expected = oracle(tiny, batch_size=2, accumulation=accumulation, ranks=ranks, epochs=2, remainder=remainder, seed=9)
    lengths = []
    for rank in range(ranks):
        with Loader(tiny, config, rank=rank, world_size=ranks) as loader:
            found = epochs_of(loader, 2)
        assert found == [expected.epoch(epoch, rank) for epoch in range(2)]
        lengths.append([len(own) for own in found])
    assert lengths == lengths[:1] * ranks


def test_all_rows_are_delivered_even_in_one_epoch(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 66}))
    with Loader(store, LoaderConfig(batch_size=8, epochs=1)) as loader:
        found = micros(loader)
    real = [row for one in found for row, weight in zip(one.ids, one.weight, strict=True) if weight > 0]
    assert (len(found), len(real), len(set(real))) == (9, 66, 66)
    assert [sum(one.weight) for one in found] == [8] * 8 + [2]


def test_a_mixture_delivers_each_row_as_often_as_it_repeats(tiny: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", samples_of({"train/64x64": 3}, "other/"))
    shares = [WeightedStore(store=tiny), WeightedStore(store=other, repeats=2)]
    expected = oracle(tiny, rows=rows_of([(tiny, 1), (other, 2)]), epochs=2)
    with Loader(shares, LoaderConfig(batch_size=BATCH, epochs=2)) as loader:
        assert epochs_of(loader, 2) == [expected.epoch(0), expected.epoch(1)]


@pytest.mark.filterwarnings("ignore:this epoch has no batch")
def test_an_epoch_of_too_few_rows_for_a_batch_is_empty_and_the_next_one_has_it(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 3}))
    expected = oracle(store, batch_size=5)
    with Loader(store, LoaderConfig(batch_size=5)) as loader:
        assert epochs_of(loader, 4) == [expected.epoch(number) for number in range(4)]
        assert [len(expected.epoch(number)) for number in range(4)] == [0, 1, 0, 1]
        state = saved(loader)
    assert state["epoch"] == 4
    with Loader(store, LoaderConfig(batch_size=5)) as loader:
        loader.load_state_dict(state)
        assert epochs_of(loader, 2) == [expected.epoch(4), expected.epoch(5)]


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_without_a_batch_is_said_and_the_batches_of_all_epochs_are_found(ways: Ways, way: str) -> None:
    with ways.open(way, LoaderConfig(batch_size=40)) as loader:
        said = r"no batch: .*fill a global batch, which takes 40, .* has 13 rows; use a smaller batch, .*forever\(\)"
        with pytest.warns(UserWarning, match=said) as found:
            assert micros(loader) == []
        assert [Path(one.filename).name for one in found] == ["epoch_oracle.py"]  # the line of the caller's `for`
        assert [batch.epoch for batch in islice(loader.forever(), 2)] == [
            3,
            5,
        ]  # 13 rows fill 40 in four passes, 7 in six


@pytest.mark.parametrize("way", WAYS)
def test_after_a_break_the_next_for_is_the_next_epoch(ways: Ways, tiny: Store, way: str) -> None:
    expected = oracle(tiny)
    with ways.open(way, LoaderConfig(batch_size=BATCH)) as loader:
        for batch in loader:
            assert batch.step == 0
            break
        assert micros(loader) == expected.epoch(1)
        with pytest.raises(ZeroDivisionError):
            fail_within(loader)
        assert loader.epoch == 3
        assert micros(loader) == expected.epoch(3)
        length = len(expected.epoch(4))
        assert len(list(islice(loader, length))) == length  # all of it, but the loop did not reach the end
        assert micros(loader) == expected.epoch(5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epochs", [None, 3])
def test_after_any_batch_a_state_resumes_with_what_remains_of_its_epoch(
    ways: Ways, tiny: Store, way: str, epochs: int | None
) -> None:
    expected, config = oracle(tiny, epochs=epochs), LoaderConfig(batch_size=BATCH, epochs=epochs)
    states = []
    with Loader(tiny, config) as loader:
        for _ in range(2):
            states += [saved(loader), *(saved(loader) for _ in loader)]
    all_ = [one for epoch in range(3) for one in expected.epoch(epoch)]
    with ways.open(way, config) as second:
        for state in states[:: 1 if way == "process" else 3]:
            second.load_state_dict(state)
            begin = all_[state["step"]]
            rest = [one for one in expected.epoch(begin.epoch) if one.step >= begin.step]
            assert len(second) == len(expected.epoch(begin.epoch))  # of the whole epoch
            assert (second.epoch, micros(second)) == (begin.epoch, rest)
            if begin.epoch < 2:
                assert micros(second) == expected.epoch(begin.epoch + 1)


def test_another_world_size_resumes_within_an_epoch_and_at_its_end(tiny: Store) -> None:
    expected = oracle(tiny, epochs=2)
    with Loader(tiny, LoaderConfig(batch_size=BATCH, epochs=2)) as one_rank:
        batches = iter(one_rank)
        states = [saved(one_rank), *(saved(one_rank) for _ in batches)]
    two = oracle(tiny, batch_size=2, ranks=2, epochs=2)
    for state in states:
        for rank in range(2):
            with Loader(tiny, LoaderConfig(batch_size=2, epochs=2), rank=rank, world_size=2) as loader:
                loader.load_state_dict(state)
                assert loader.epoch == (state["step"] >= len(two.epoch(0)))
                assert micros(loader) == [one for one in two.epoch(loader.epoch - 1, rank) if one.step >= state["step"]]
    assert [one.ids for one in expected.epoch(1)] == [
        left.ids + right.ids for left, right in zip(two.epoch(1, 0), two.epoch(1, 1), strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_rewinding_loader_begins_at_the_same_batch_every_time(ways: Ways, tiny: Store, way: str) -> None:
    expected = oracle(tiny, epochs=1).epoch(0)
    with ways.open(way, LoaderConfig(batch_size=BATCH, rewind=True)) as loader:
        for taken in (2, 3, len(expected), 1, len(expected) + 1):
            assert micros(islice(loader, taken)) == expected[:taken]
            assert (loader.epoch, len(loader)) == (0, len(expected))
        first, second = iter(loader), iter(loader)
        assert micros([next(first)]) == micros([next(second)]) == expected[:1]
        second.close()  # type: ignore[attr-defined]
        batches = iter(loader)
        next(batches)
        state = saved(loader)
    with ways.open(way, LoaderConfig(batch_size=BATCH, rewind=True)) as loader:
        loader.load_state_dict(state)
        assert [micros(loader), micros(loader)] == [expected[1:], expected]
        loader.load_state_dict(saved(loader))  # at its end
        assert micros(loader) == expected


def test_rewinding_through_several_epochs_is_refused() -> None:
    with pytest.raises(UsageError, match="rewind is set and epochs is 3; each `for` reads the same epoch"):
        LoaderConfig(batch_size=1, rewind=True, epochs=3)


@pytest.mark.parametrize("way", WAYS)
def test_after_the_last_of_epochs_another_for_is_refused_with_the_remedy(ways: Ways, tiny: Store, way: str) -> None:
    with ways.open(way, LoaderConfig(batch_size=BATCH, epochs=1)) as loader:
        first = micros(loader)
        assert len(loader) == 0
        for _ in range(2):
            with pytest.raises(UsageError, match=r"all 1 epoch was delivered \(epochs=1\).*None.*rewind=True.*set_epoch\(0\)"):
                next(iter(loader))
            assert micros(loader.forever()) == []  # nothing remains
        loader.set_epoch(0)
        assert micros(loader) == first == oracle(tiny, epochs=1).epoch(0)


@pytest.mark.parametrize("way", WAYS)
def test_forever_reads_epoch_after_epoch_from_where_it_was_stopped(ways: Ways, tiny: Store, way: str) -> None:
    expected = [one for epoch in range(3) for one in oracle(tiny, epochs=3).epoch(epoch)]
    with ways.open(way, LoaderConfig(batch_size=BATCH, epochs=3)) as loader:
        assert micros(islice(loader.forever(), 3)) == expected[:3]
        assert micros(islice(loader.forever(), 4)) == expected[3:7]
        assert micros(loader.forever()) == expected[7:]
    with ways.open(way, LoaderConfig(batch_size=BATCH)) as loader:
        assert [batch.step for batch in islice(loader.forever(), 40)] == list(range(40))


@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_that_was_replaced_says_so(ways: Ways, tiny: Store, way: str) -> None:
    with ways.open(way, LoaderConfig(batch_size=BATCH)) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(UsageError, match=r"another iterator of the same loader was started.*another loader for each loop"):
            next(first)
        assert next(first, None) is None  # a generator that raised has ended
        loader.set_epoch(5)
        with pytest.raises(UsageError, match=r"set_epoch\(\) was called"):
            next(second)
        third = iter(loader)
        next(third)
        loader.load_state_dict(saved(loader))
        with pytest.raises(UsageError, match=r"load_state_dict\(\) was called"):
            next(third)


def test_an_iterator_that_was_at_its_end_or_closed_is_not_blamed(tiny: Store) -> None:
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
        first = iter(loader)
        num_batches = len(loader)
        assert [(len(loader), loader.epoch) for _ in islice(first, num_batches)] == [(num_batches, 0)] * num_batches
        second = iter(loader)
        assert next(second).epoch == 1
        assert next(first, None) is None
        second.close()  # type: ignore[attr-defined]
        assert next(second, None) is None
        third = iter(loader)
        next(third)
        loader.close()
        assert next(third, None) is None
        fourth = iter(loader)
        assert next(fourth).epoch == 3


def test_setting_the_epoch_that_comes_anyway_changes_nothing(tiny: Store) -> None:
    expected = oracle(tiny)
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert micros(loader) == expected.epoch(epoch)
        next(iter(loader))
        state = saved(loader)
        loader.set_epoch(7)
        assert (loader.epoch, len(loader)) == (7, len(expected.epoch(7)))
        assert micros(loader) == expected.epoch(7)
        loader.load_state_dict(state)
        loader.set_epoch(3)  # as loops with a DistributedSampler do, also after a resume
        assert micros(loader) == expected.epoch(3)[1:]
        loader.set_epoch(3)
        assert micros(loader) == expected.epoch(3)
        with pytest.raises(UsageError, match="epoch is -1, expected 0 or more"):
            loader.set_epoch(-1)


def test_the_stream_stays_open_between_two_epochs(tiny: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[ThreadStream] = []
    begin = ThreadStream.__init__

    def noted(self: ThreadStream, *arguments: Any, **named: Any) -> None:
        begun.append(self)
        begin(self, *arguments, **named)

    monkeypatch.setattr(ThreadStream, "__init__", noted)
    with Loader(tiny, LoaderConfig(batch_size=BATCH, epochs=4)) as loader:
        epochs_of(loader, 3)
        assert len(list(islice(loader, len(loader)))) == len(oracle(tiny, epochs=4).epoch(3))
        assert len(begun) == 1
        assert not begun[0].is_alive()  # nothing is left after the last epoch


def test_a_failure_of_the_loader_itself_is_continued_at_the_same_batch(tiny: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = oracle(tiny)
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
        batches = iter(loader)
        taken = micros(islice(batches, 2))
        take = ThreadStream.next

        def fails(_: ThreadStream) -> None:
            raise DeliveryError("the server is gone")

        monkeypatch.setattr(ThreadStream, "next", fails)
        with pytest.raises(DeliveryError):
            next(batches)
        monkeypatch.setattr(ThreadStream, "next", take)
        assert taken + micros(loader) == expected.epoch(0)
        monkeypatch.setattr(ThreadStream, "next", lambda _: None)  # ends before the epoch does
        with pytest.raises(DeliveryError, match=r"the batches ended before step 4, and the epoch has steps to 8"):
            next(iter(loader))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_ends_the_first_batch_leaves_a_loader_that_iterates(
    error: type[BaseException], tiny: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise error

    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(BufferPool, "__init__", fails)
            with pytest.raises(error):
                next(iter(loader))
        assert micros(loader) == oracle(tiny).epoch(0)


def test_memory_that_runs_short_within_an_epoch_is_continued_at_the_same_batch(
    tiny: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: BufferPool) -> NoReturn:
        raise MemoryError

    # Of 20 batches, threads have filled at most five: one is taken, two are ready, and each thread waits with one.
    with Loader(tiny, LoaderConfig(batch_size=1, threads=2, prefetch_bytes=1)) as loader:
        batches = iter(loader)
        taken = micros(islice(batches, 1))
        with monkeypatch.context() as patch:
            patch.setattr(BufferPool, "take", fails)
            with pytest.raises(MemoryError):
                taken.extend(micros([batch])[0] for batch in batches)  # what came before stays
        assert taken + micros(loader) == oracle(tiny, batch_size=1).epoch(0)


def test_threads_end_if_their_start_is_interrupted(tiny: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:  # noqa: FBT001, FBT002 - its signature
            super().acquire(blocking, timeout)
            raise KeyboardInterrupt

    begun: list[ThreadStream] = []
    start = ThreadStream.start

    def noted(stream: ThreadStream) -> None:
        begun.append(stream)
        start(stream)

    monkeypatch.setattr(ThreadStream, "start", noted)
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Semaphore", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        assert [stream.is_alive() for stream in begun] == [False]
        assert micros(loader) == oracle(tiny).epoch(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_another_process_reads_the_epochs_that_this_one_would(tiny: Store) -> None:
    expected = oracle(tiny)
    context = multiprocessing.get_context("fork")
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
        next(iter(loader))
        queue: Any = context.Queue()
        process: Any = context.Process(target=_read_two, args=(loader, queue))
        process.start()
        found = queue.get(timeout=120)
        process.join()
        with pickle.loads(pickle.dumps(loader)) as sent:  # as a spawned process gets it
            assert found == [expected.epoch(1), expected.epoch(2)] == epochs_of(sent, 2) == epochs_of(loader, 2)


def test_a_copy_takes_up_the_window_of_any_state_as_its_original_does(tiny: Store) -> None:
    whole, windowed = LoaderConfig(batch_size=BATCH), LoaderConfig(batch_size=BATCH, window=16)
    with Loader(tiny, whole) as one, Loader(tiny, windowed) as other:
        states = [other.state_dict(), one.state_dict()]
    with Loader(tiny, whole) as loader:
        loader.load_state_dict(states[0])
        with pickle.loads(pickle.dumps(loader)) as sent:
            for state in (states[1], states[0]):
                loader.load_state_dict(state)
                sent.load_state_dict(state)
                assert sent.config == loader.config
                assert epochs_of(sent, 2) == epochs_of(loader, 2)


def _read_two(loader: Loader, queue: Any) -> None:
    queue.put(epochs_of(loader, 2))
    queue.close()
    queue.join_thread()
    os._exit(0)


def test_torchs_dataloader_reads_epoch_after_epoch(tiny: Store) -> None:
    expected = oracle(tiny, remainder=Remainder.PARTIAL)
    config = LoaderConfig(batch_size=BATCH, remainder=Remainder.PARTIAL)
    with Loader(tiny, config) as loader:
        batches: DataLoader[Any] = DataLoader(BatchDataset(loader), batch_size=None)
        for epoch in range(3):
            assert len(batches) == len(expected.epoch(epoch))
            assert micros(batches) == expected.epoch(epoch)
        next(iter(batches))
        state = BatchDataset(loader).state_dict()
    with Loader(tiny, config) as loader:
        dataset = BatchDataset(loader)
        dataset.load_state_dict(state)
        again: DataLoader[Any] = DataLoader(dataset, batch_size=None)
        assert [micros(again), micros(again)] == [expected.epoch(3)[1:], expected.epoch(4)]


def test_a_state_of_other_epochs_continues_where_both_read_the_same_rows(tiny: Store) -> None:
    two, three = (LoaderConfig(batch_size=BATCH, epochs=epochs) for epochs in (2, 3))
    with Loader(tiny, two) as loader:
        list(loader)
        middle = saved(loader)
        list(loader)
        end = saved(loader)
    with Loader(tiny, three) as loader:
        loader.load_state_dict(middle)
        assert epochs_of(loader, 2) == [oracle(tiny, epochs=3).epoch(epoch) for epoch in (1, 2)]
        with pytest.raises(
            StateError, match=r"a loader with epochs=2, whose last batches were padded, and this one has epochs=3"
        ):
            loader.load_state_dict(end)
    with Loader(tiny, two) as loader:
        loader.load_state_dict(end)
        assert loader.epoch == 2
        with pytest.raises(UsageError, match="all 2 epochs were delivered"):
            next(iter(loader))
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as endless:
        list(islice(endless.forever(), 9))
        late = saved(endless)
    with Loader(tiny, LoaderConfig(batch_size=BATCH, epochs=1)) as loader, pytest.raises(StateError, match="give more epochs"):
        loader.load_state_dict(late)


@pytest.mark.parametrize(("device", "found"), [(None, "cpu"), ("cpu", "cpu"), (torch.device("cpu"), "cpu"), (0, "cuda:0")])
def test_a_device_may_be_a_number(tiny: Store, device: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with Loader(tiny, LoaderConfig(batch_size=BATCH), device=device) as loader:
        assert str(loader.device) == found


@pytest.mark.parametrize("device", ["", False, -1, 1.0, "gpu", "meta", [], "cuda:x"])
def test_another_device_is_refused_by_name(tiny: Store, device: Any) -> None:
    with pytest.raises(BucketlineError, match=r"device is .*, expected cpu, cuda, cuda:N, N or None"):
        Loader(tiny, LoaderConfig(batch_size=BATCH), device=device)


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda")])
def test_a_gpu_is_refused_where_there_is_none_when_the_loader_is_made(
    tiny: Store, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"device is cuda.*, and this process sees 0 GPUs, expected cpu, .*; see nvidia-smi"):
        Loader(tiny, LoaderConfig(batch_size=BATCH), device=device)


@pytest.mark.parametrize("service", [True, 1, b"socket"])
def test_a_service_that_is_no_path_is_refused_by_name(tiny: Store, service: Any) -> None:
    with pytest.raises(UsageError, match=r"service is .* of type .*, expected a `loader serve`: "):
        Loader(tiny, LoaderConfig(batch_size=BATCH), service=service)
