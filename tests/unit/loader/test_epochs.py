"""One `for` is one epoch: rows, order, weights and keys are those of an independent model, in every way to have a loader."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from bucketline.errors import DeliveryError, StateError, UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder, loader, make_plan
from bucketline.loader.collate.buffers import BufferPool
from bucketline.loader.plan.plan import plan_of
from bucketline.loader.prefetch.stream import Stream
from bucketline.store import Store
from tests.epoch_oracle import Oracle, epochs_of, micros, rows_of
from tests.kit import add_samples, make_store, samples_of, store_writer
from tests.serving import serving_here

if TYPE_CHECKING:
    from collections.abc import Iterator


BATCH = 4
WAYS = ("process", "service", "network")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Store:
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


@pytest.mark.parametrize("way", WAYS[1:])
def test_what_is_read_by_a_service_is_what_the_model_says(ways: Ways, tiny: Store, way: str) -> None:
    """In this process any sequence is held against the model by `tests/property/test_epochs.py`."""
    expected, config = oracle(tiny), LoaderConfig(batch_size=BATCH)
    with ways.open(way, config) as loader:
        assert (micros(loader), loader.epoch, len(loader)) == (expected.epoch(0), 1, len(expected.epoch(1)))
        for batch in loader:
            assert batch.epoch == 1
            break
        with pytest.raises(ZeroDivisionError):
            next(1 / 0 for _ in loader)
        assert micros(islice(loader.forever(), 2)) == expected.epoch(2)[1:3]
        states = [saved(loader), *(saved(loader) for _ in loader)]
        loader.set_epoch(7)
        assert micros(loader) == expected.epoch(7)
    with ways.open(way, config) as loader:
        for state in states:
            loader.load_state_dict(state)
            assert micros(loader) == [one for one in expected.epoch(state["epoch"]) if one.step >= state["step"]]
    with ways.open(way, LoaderConfig(batch_size=BATCH, rewind=True)) as loader:
        first = oracle(tiny, epochs=1).epoch(0)
        assert [micros(islice(loader, 2)), micros(loader)] == [first[:2], first]


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


def test_after_the_last_of_epochs_another_for_is_refused_with_the_remedy(tiny: Store) -> None:
    with Loader(tiny, LoaderConfig(batch_size=BATCH, epochs=1)) as loader:
        first = micros(loader)
        assert len(loader) == 0
        for _ in range(2):
            with pytest.raises(UsageError, match=r"all 1 epoch was delivered \(epochs=1\).*None.*rewind=True.*set_epoch\(0\)"):
                next(iter(loader))
            assert micros(loader.forever()) == []  # nothing remains
        loader.set_epoch(0)
        assert micros(loader) == first == oracle(tiny, epochs=1).epoch(0)


def test_an_iterator_that_was_replaced_says_so(tiny: Store) -> None:
    with Loader(tiny, LoaderConfig(batch_size=BATCH)) as loader:
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


def test_the_stream_stays_open_between_two_epochs(tiny: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Stream] = []
    begin = Stream.__init__

    def noted(self: Stream, *arguments: Any, **named: Any) -> None:
        begun.append(self)
        begin(self, *arguments, **named)

    monkeypatch.setattr(Stream, "__init__", noted)
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
        take = Stream.next

        def fails(_: Stream) -> None:
            raise DeliveryError("the server is gone")

        monkeypatch.setattr(Stream, "next", fails)
        with pytest.raises(DeliveryError):
            next(batches)
        monkeypatch.setattr(Stream, "next", take)
        assert taken + micros(loader) == expected.epoch(0)
        monkeypatch.setattr(Stream, "next", lambda _: None)  # ends before the epoch does
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
            patch.setattr(BufferPool, "acquire", fails)
            with pytest.raises(MemoryError):
                taken.extend(micros([batch])[0] for batch in batches)  # what came before stays
        assert taken + micros(loader) == oracle(tiny, batch_size=1).epoch(0)


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


@pytest.mark.parametrize("device", ["", False, -1, 1.0, "gpu", "meta", [], "cuda:x", "cuda", 0, torch.device("cuda")])
def test_a_device_that_is_not_there_is_refused_when_the_loader_is_made(
    tiny: Store, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    is_gpu = str(device) in ("cuda", "0")
    with pytest.raises(UsageError, match="this process sees 0 GPUs" if is_gpu else r"device is .*, expected cpu, cuda, cuda:N"):
        Loader(tiny, LoaderConfig(batch_size=BATCH), device=device)


# How large a batch is: fixed, or by a budget, the same for a bucket each time; senseless settings are refused by name.


PIXELS = {"train/64x64": 4096, "train/96x64": 6144, "train/64x128": 8192}


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        ({"batch_pixels": 16_384}, (4, 2, 2)),
        ({"batch_pixels": 24_576, "batch_multiple": 2}, (6, 4, 2)),
        ({"batch_pixels": 1, "batch_multiple": 3}, (3, 3, 3)),
        ({"batch_tokens": 256}, (4, 2, 2)),
        ({"batch_tokens": 1000, "batch_multiple": 4}, (12, 8, 4)),
        ({"batch_size": 5}, (5, 5, 5)),
    ],
)
def test_a_budget_gives_each_bucket_as_many_rows_as_fit_in_multiples_and_one_multiple_at_least(
    store: Store, budget: dict[str, int], rows: tuple[int, int, int]
) -> None:
    config = LoaderConfig(**budget, accumulation=3, epochs=6)  # type: ignore[arg-type]
    expected = dict(zip(PIXELS, rows, strict=True))
    plan = make_plan(store, config, world_size=2)
    assert {bucket.name: bucket.global_batch for bucket in plan.buckets} == {name: 6 * n for name, n in expected.items()}
    with Loader(store, config, rank=1, world_size=2) as loader:
        found = {(batch.bucket, len(batch.latents), len(batch.weight)) for batch in loader.forever()}
    assert found == {(name, n, n) for name, n in expected.items() if any(name == bucket for bucket, *_ in found)}
    assert len(found) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no batch size given: pass batch_size, batch_pixels or batch_tokens"),
        ({"batch_size": 2, "batch_pixels": 5}, "set by batch_size 2 and batch_pixels 5, expected exactly one"),
        ({"batch_tokens": 2, "batch_pixels": 5}, "set by batch_pixels 5 and batch_tokens 2, expected exactly one"),
        ({"batch_pixels": 0}, "batch_pixels is 0, expected 1 or more"),
        ({"batch_tokens": -1}, "batch_tokens is -1, expected 1 or more"),
        ({"batch_pixels": 5, "batch_multiple": 0}, "batch_multiple is 0, expected 1 or more"),
        ({"batch_size": 5, "batch_multiple": 4}, "batch_multiple is 4 with a batch_size of 5"),
        ({"batch_size": 5, "window": 15}, "window is 15, expected 16 or more, or 0"),
        ({"batch_size": 1, "lanes": 2}, "lanes is 2 with window None"),
        ({"batch_size": 1, "lanes": 2, "window": 0}, "lanes is 2 with window 0"),
        ({"batch_size": 1, "rewind": True, "epochs": 3}, "rewind is set and epochs is 3"),
        *(
            ({"batch_size": 1, name: 0}, f"{name} is 0, exp")
            for name in ("batch_size", "accumulation", "prefetch_bytes", "epochs")
        ),
        *(({"batch_size": 1, "seed": value}, f"seed is {value}, expected") for value in (-1, 1 << 63)),
        *(({"batch_size": 1, "caption_dropout": value}, f"caption_dropout is {value}, expected") for value in (-0.1, 1.1)),
    ],
)
def test_a_senseless_setting_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LoaderConfig(**changes)


def test_plain_words_are_the_choices_of_their_names_and_others_are_refused() -> None:
    for remainder in Remainder:
        assert LoaderConfig(batch_size=1, remainder=str(remainder)).remainder is remainder  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="remainder is 'keep', expected carry or drop or partial"):
        LoaderConfig(batch_size=1, remainder="keep")  # type: ignore[arg-type]


# A loader that has been started reads ahead before its first batch is requested, and makes each plan once.


CONFIG = LoaderConfig(batch_size=2, accumulation=2, seed=3)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []

    def noting(*given: object) -> object:
        made.append(given)
        return plan_of(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "plan_of", noting)
    return made


def first(one: Loader, count: int = 5) -> list[torch.Tensor]:
    return [batch.ids for batch, _ in zip(one.forever(), range(count), strict=False)]


def test_batches_wait_before_the_first_is_asked_for_and_are_the_same(store: Store) -> None:
    with Loader(store, CONFIG) as plain, Loader(store, CONFIG) as ahead:
        expected = first(plain)
        stream = ahead.start()
        deadline = time.monotonic() + 30
        while ahead.stats().ready == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ahead.stats().ready > 0
        assert ahead.start() is stream
        assert all(torch.equal(*pair) for pair in zip(first(ahead), expected, strict=True))


def test_a_loader_that_was_started_elsewhere_reads_where_its_state_is_by_then(store: Store) -> None:
    with Loader(store, CONFIG) as plain, Loader(store, CONFIG) as ahead:
        first(plain, 4)
        ahead.start()
        ahead.load_state_dict(plain.state_dict())
        assert all(torch.equal(*pair) for pair in zip(first(ahead), first(plain), strict=True))


def test_an_open_a_like_one_and_a_newer_generation_make_a_plan_once_each(tmp_path: Path, plans: list[object]) -> None:
    store = make_store(tmp_path / "s.store", samples_of({"train/64x64": 6}, "a/"))
    with Loader(store.path, CONFIG, follow=True) as one:
        assert len(plans) == 1
        with Loader(store.path, CONFIG, like=one) as other:
            assert other.plan is one.plan
            assert all(torch.equal(*pair) for pair in zip(first(other), first(one), strict=True))
        assert len(plans) == 1
        with store_writer(tmp_path / "s.store") as writer:
            add_samples(writer, samples_of({"train/64x64": 4}, "b/"))
        with Loader(store.path, CONFIG, like=one) as other:
            assert other.state_dict()["stores"] == one.state_dict()["stores"], "not the generation that is there by now"
        next(iter(one))
        assert len(plans) == 2
