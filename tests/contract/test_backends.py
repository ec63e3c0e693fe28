"""A loader behaves the same whoever reads: threads of its process, a private service, or one that it reaches by a socket."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, DeliveryError, StateError, UsageError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress, WeightedStore
from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from tests.commands import kept_port
from tests.conditioned import Form, conditioned_store
from tests.kit import PAIR_ROWS, PAIRS, SEEING, add_samples, flip_bit, make_store, samples_of, store_writer
from tests.leftovers import children, held, in_child, left_since, wait_until
from tests.serving import serving, serving_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.loader import Batch

BACKENDS = ("threads", "url", "auto", "unix", "unix only", "tcp", "tcp only")  # only: without stores of the client's own
CONFIG = LoaderConfig(batch_size=2, epochs=2, prefetch_bytes=1)


@dataclass(kw_only=True)
class Backend:
    """One way to read stores."""

    name: str
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def reads(self, *stores: Store | WeightedStore) -> Iterator[Callable[..., Loader]]:
        """Yield what opens a loader of these stores; the last one is closed at the end."""
        opened: list[Loader] = []
        given: Any = list(stores)

        def loader(config: LoaderConfig, **options: Any) -> Loader:
            for one in opened:
                one.close()
            if self.name == "url":
                config = replace(config, cache=str(self.folder / "cache"), cache_bytes="1GiB")
            if "world_size" in options:  # nothing else says that the ranks read the same
                shares = [one if isinstance(one, WeightedStore) else WeightedStore(one) for one in stores]
                options["generation"] = [one.store.manifest.generation for one in shares]
            opened[:] = [Loader(given, config, **self.options, **options)]
            return opened[0]

        try:
            if self.name == "url":
                given[:] = [self._pushed(one) for one in stores]
            if self.name == "auto":
                self.options = {"service": "auto"}
            if self.name in ("threads", "url", "auto"):
                yield loader
            else:
                shares = [one if isinstance(one, WeightedStore) else WeightedStore(one) for one in stores]
                with serving_here(self.folder, *(f"{one.store.path}:{one.repeats}" for one in shares)) as served:
                    self.options = {"service": served.tcp if self.name.startswith("tcp") else f"unix:{served.socket}"}
                    if self.name.endswith("only"):
                        given = None
                    yield loader
        finally:
            for one in opened:
                one.close()

    def _pushed(self, share: Store | WeightedStore) -> str:
        one = share if isinstance(share, WeightedStore) else WeightedStore(share)
        url = f"file://{self.folder}/pushed/{one.store.path.name}"
        push(one.store.path, ObjectFolder.open(url))
        return f"{url}:{one.repeats}"


# A private service is the one over a unix socket, in a process that takes a second to start.
@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name == "auto" else name for name in BACKENDS])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return Backend(name=request.param, folder=tmp_path)


def values(batch: Batch) -> tuple[Any, ...]:
    tensors = {name: tensor.contiguous() for name, tensor in batch.by_name().items()}
    return (
        *(batch.step, batch.micro_step, batch.epoch, batch.bucket, batch.latent_kind),
        *((name, one.dtype, one.shape, one.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, one in tensors.items()),
    )


def state_of(loader: Loader) -> dict[str, Any]:
    state: dict[str, Any] = loader.state_dict()
    return {**state, "stores": [{**one, "path": ""} for one in state["stores"]]}


def expected_of(stores: Any, config: LoaderConfig, **options: Any) -> list[tuple[Any, ...]]:
    with Loader(stores, config, **options) as loader:
        return [values(batch) for batch in loader.forever()]


CONFIGS = {
    "epochs": LoaderConfig(batch_size=2, epochs=3),
    "accumulation": LoaderConfig(batch_size=3, accumulation=2, epochs=2, seed=7, caption_dropout=0.3, prefetch_bytes=1),
    "validation": LoaderConfig(batch_size=4, split="val", epochs=1, remainder="partial", verify=True),
    "plain reads": LoaderConfig(batch_size=1, epochs=2, threads=3, plain_reads=True),
    "stored order": LoaderConfig(batch_size=2, epochs=1, window=0, remainder="drop"),
    "a window": LoaderConfig(batch_size=2, epochs=2, window=16, lanes=2),
}


# A private service gets the messages of the one over a unix socket: two configurations tell whether all of one has arrived.
OF_AUTO = ("accumulation", "validation")
READ = [
    pytest.param(backend, name, marks=pytest.mark.slow if backend == "auto" else ())
    for backend in BACKENDS
    for name in CONFIGS
    if backend != "auto" or name in OF_AUTO
]


@pytest.mark.parametrize(("backend", "name"), READ, indirect=["backend"])
def test_batches_states_and_statistics_are_those_of_threads(store: Store, backend: Backend, name: str) -> None:
    config = CONFIGS[name]
    with backend.reads(store) as loader:
        for rank in range(2):
            with Loader(store, config, rank=rank, world_size=2) as own:
                other = loader(config, rank=rank, world_size=2)
                assert (other.plan.digest, len(other)) == (own.plan.digest, len(own))
                assert [values(batch) for batch in other.forever()] == [values(batch) for batch in own.forever()]
                assert state_of(other) == state_of(own)
                mine, theirs = own.stats(), other.stats()
                assert (theirs.by_bucket, theirs.samples, theirs.bytes) == (mine.by_bucket, mine.samples, mine.bytes)


def test_flips_pooled_embeddings_and_lengths_that_differ_are_delivered(tmp_path: Path, backend: Backend) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form(dtype="BF16"))
    config = LoaderConfig(batch_size=3, epochs=2, flip=0.5, caption_dropout=0.5, pad_multiple=2, remainder="partial")
    with backend.reads(store) as loader:
        assert [values(batch) for batch in loader(config).forever()] == expected_of(store, config)


def test_pairs_masks_and_text_that_sees_images_are_delivered(tmp_path: Path, backend: Backend) -> None:
    pairs = PAIRS.make_store(tmp_path / "p", PAIRS.samples(PAIR_ROWS, "p"))
    plain = make_store(tmp_path / "i", samples_of({"train/64x64": 7}, "i"))
    seeing = SEEING.make_store(tmp_path / "s", SEEING.samples(PAIR_ROWS))
    config = LoaderConfig(batch_size=2, epochs=2, caption_dropout=0.5, verify=True, remainder="partial")
    for stores, own in (
        ([pairs, plain], config),
        ([pairs], replace(config, flip=0.5)),
        ([seeing], replace(config, pad_multiple=4)),
        ([seeing], replace(config, verify=False)),
    ):
        with backend.reads(*stores) as loader:
            found = [values(batch) for batch in loader(own).forever()]
        assert found == expected_of(stores, own)


def test_several_stores_are_one_each_as_often_as_asked_for(tmp_path: Path, backend: Backend) -> None:
    first, second = (make_store(tmp_path / n, samples_of({"train/64x64": 11, "train/96x64": 5}, n)) for n in ("a", "b"))
    stores = [WeightedStore(first), WeightedStore(second, 2)]
    config = LoaderConfig(batch_size=3, epochs=2, row_weights=(1.0, 0.5))
    with backend.reads(*stores) as loader:
        found = [values(batch) for batch in loader(config).forever()]
    assert found == expected_of(stores, config)
    assert len(found) == 32


def test_epochs_are_chosen_and_one_that_is_over_is_followed_by_the_next(store: Store, backend: Backend) -> None:
    with Loader(store, CONFIG) as own, backend.reads(store) as open_loader:
        other = open_loader(CONFIG)
        for loader in (own, other):
            loader.set_epoch(1)
        assert len(own) == len(other)
        assert [values(batch) for batch in other] == [values(batch) for batch in own]
        with pytest.raises(UsageError, match="all 2 epochs were delivered"):
            next(iter(other))
        for loader in (own, other):
            loader.set_epoch(0)
            assert next(iter(loader)).step == 0
            assert loader.epoch == 1
        assert [values(batch) for batch in other] == [values(batch) for batch in own]


def test_names_are_those_of_the_rows(store: Store, backend: Backend) -> None:
    with Loader(store, CONFIG) as own, backend.reads(store) as loader:
        other = loader(CONFIG)
        for mine, theirs in zip(own, other, strict=True):
            assert other.names(theirs) == own.names(mine) != []


def test_every_batch_stays_what_it_was_however_many_are_held(store: Store, backend: Backend) -> None:
    config = LoaderConfig(batch_size=4, epochs=8, prefetch_bytes=1)
    expected = expected_of(store, config)
    with backend.reads(store) as loader:
        other = loader(config)
        kept = list(other.forever())
        assert other.stats().buffers >= len(kept) > 30
        other.close()
        assert [values(batch) for batch in kept] == expected


def test_a_loop_that_holds_one_batch_at_a_time_uses_a_few_buffers(store: Store, backend: Backend) -> None:
    config = LoaderConfig(batch_size=4, prefetch_bytes=1)
    with backend.reads(store) as loader:
        other = loader(config)
        for _ in islice(other.forever(), 60):
            pass
        assert other.stats().buffers <= 8


def test_an_iteration_continues_where_the_last_one_stood_and_a_state_moves_both_ways(store: Store, backend: Backend) -> None:
    config = LoaderConfig(batch_size=2, epochs=3)
    with backend.reads(store) as loader:
        other = loader(config)
        batches = other.forever()
        found = [values(next(batches)) for _ in range(5)]
        second = other.forever()
        found.append(values(next(second)))
        with pytest.raises(UsageError, match="another iterator of the same loader was started"):
            next(batches)
        state = other.state_dict()
        with Loader(store, config) as own:
            own.load_state_dict(state)
            found.append(values(next(own.forever())))
            state = own.state_dict()
        other = loader(config)
        other.load_state_dict(state)
        found += [values(batch) for batch in other.forever()]
        with pytest.raises(StateError, match="seed was 0"):
            loader(replace(config, seed=1)).load_state_dict(state)
    assert found == expected_of(store, config)


def test_a_bad_row_is_named_in_its_turn_and_the_next_iteration_meets_it_again(tmp_path: Path, backend: Backend) -> None:
    samples = samples_of({"train/64x64": 30})
    store = make_store(tmp_path / "s", samples)
    bucket = store.bucket("train/64x64")
    place = 8 * int(bucket.locate(np.array([7])).offsets(bucket.spec, "latent")[0])
    config = LoaderConfig(batch_size=5, epochs=1, verify=True)
    with backend.reads(store) as loader:
        damaged = tmp_path / "pushed" / "s" if backend.name == "url" else store.path
        for path in damaged.rglob("*.lmdb"):
            flip_bit(path, place)
        other, steps = loader(config), list[int]()
        for _ in range(2):
            with pytest.raises(CorruptError, match=r"step \d, bucket train/64x64: |line \d+ of"):
                steps.extend(batch.step for batch in other.forever())
        if backend.name != "url":  # whose lines are compared as they arrive
            with pytest.raises(CorruptError, match=rf"sample '{samples[7].id}'"):
                next(other.forever())
    assert steps == list(range(len(steps)))
    assert other.state_dict()["step"] == len(steps)


def test_each_epoch_reads_the_newest_generation_if_the_stores_are_followed(tmp_path: Path, backend: Backend) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 9}, "0/"))
    config = LoaderConfig(batch_size=2, seed=3)
    with backend.reads(store) as loader:
        other = loader(config, follow=True)
        found = [values(batch) for batch in other]
        with store_writer(store.path, shard_names="h{}") as writer:
            add_samples(writer, samples_of({"train/64x64": 9}, "1/"))
            writer.publish()
        if backend.name == "url":
            push(store.path, ObjectFolder.open(f"file://{tmp_path}/pushed/s"))
        found += [values(batch) for batch in other]
        state = state_of(other)
    expected = []
    for epoch in range(2):
        with Loader(Store.open(store.path, epoch + 1), config) as own:
            own.set_epoch(epoch)
            expected += [values(batch) for batch in own]
            assert epoch == 0 or state_of(own) == state
    assert found == expected


def test_a_loop_that_is_left_leaves_nothing_and_what_is_in_use_stays_valid(store: Store, backend: Backend) -> None:
    expected = expected_of(store, LoaderConfig(batch_size=1, epochs=1))
    with backend.reads(store) as loader:
        other = loader(LoaderConfig(batch_size=1, threads=2))
        next(other.forever())  # a URL's client and its cache stay open
        other.close()
        before = held()
        other.set_epoch(0)
        batch = next(other.forever())
        other.close()
        assert values(batch) == expected[0]

        def fail() -> None:
            for each in other.forever():
                raise ValueError(each.step)

        with pytest.raises(ValueError, match=r"^1$"):
            fail()
        del batch
        other.close()
        gc.collect()
        wait_until(lambda: not left_since(before))
        assert left_since(before) == {}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking while threads run is what is tested
def test_a_forked_child_iterates_on_its_own_and_changes_nothing_for_its_parent(store: Store, backend: Backend) -> None:
    expected = expected_of(store, CONFIG)
    with backend.reads(store) as loader:
        other = loader(CONFIG)
        batches = other.forever()
        kept = [next(batches) for _ in range(3)]

        def new_iteration() -> bool:
            found = [values(batch) for batch in other.forever()]
            other.close()
            return found == expected[3:]

        def same_loop() -> bool:
            kept.clear()  # the parent holds these still: their end here must not free its memory
            found = [values(batch) for batch in batches]
            other.close()
            return found == expected[3:]

        def only_ends() -> bool:
            nonlocal batches, other
            del batches, other
            return True

        assert [in_child(work) for work in (new_iteration, same_loop, only_ends)] == [0, 0, 0]
        assert [values(batch) for batch in batches] == expected[3:]
        assert [values(batch) for batch in kept] == expected[:3]


def test_a_loader_continues_in_another_process_from_its_state(store: Store, backend: Backend) -> None:
    with backend.reads(store) as loader:
        other = loader(CONFIG)
        batches = other.forever()
        for _ in range(4):
            next(batches)
        data = pickle.dumps(other)
        expected = [values(batch) for batch in batches]
        with pickle.loads(data) as again:
            assert [values(batch) for batch in again.forever()] == expected


def test_several_loaders_read_at_once(store: Store, backend: Backend) -> None:
    config = LoaderConfig(batch_size=1, epochs=2, prefetch_bytes=1)
    with backend.reads(store) as loader:
        first = loader(config, rank=0, world_size=3)
        options, found = dict(backend.options), dict[int, list[object]]()
        given = None if backend.name.endswith("only") else [share.store for share in first.stores]
        options["generation"] = store.manifest.generation

        def read(rank: int) -> None:
            with Loader(given, first.config, rank=rank, world_size=3, **options) as own:
                found[rank] = [values(batch) for batch in own.forever()]

        threads = [threading.Thread(target=read, args=(rank,)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        found[0] = [values(batch) for batch in first.forever()]
        for thread in threads:
            thread.join(timeout=240)
    assert found == {rank: expected_of(store, config, rank=rank, world_size=3) for rank in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "unix", "tcp"])
def test_a_service_that_is_killed_is_an_error_and_the_next_iteration_continues(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path / "large.store", samples_of({"train/2048x2048": 64}))  # 32 MiB: more than sockets hold
    config = LoaderConfig(batch_size=4, epochs=1, prefetch_bytes=1)
    found: list[tuple[Any, ...]] = []
    others, errors = children(), 0
    with ExitStack() as using:
        port = using.enter_context(kept_port())
        where = {"auto": "auto", "unix": str(tmp_path / "sock"), "tcp": f"tcp://{port}"}[name]
        loader = using.enter_context(Loader(store, config, service=ServiceAddress(where, deadline_s=0.5)))
        expected = expected_of(store, config)
        for is_killed in (True, True, False):
            if len(found) == len(expected):
                break  # all the others were ready when the second one was killed
            with nullcontext() if name == "auto" else serving(tmp_path / "sock", store.path, options=("--at", f"tcp://{port}")):
                batches = loader.forever()
                found.append(values(next(batches)))
                victims = children() - others
                assert victims
                for victim in victims if is_killed else ():
                    os.kill(int(victim), signal.SIGKILL)
                try:
                    found.extend(values(batch) for batch in batches)  # those that were ready
                except DeliveryError:
                    errors += 1
                    assert is_killed
    assert found == expected
    assert errors
