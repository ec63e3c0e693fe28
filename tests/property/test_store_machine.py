"""A store under everything that can happen to it, held against a plain dict: id → sample; of latents, and of any columns.

Packing runs, with commits, and killed before, while and after their shard is sealed; drops, compactions and collections, cut
off or not; a crash between the two writes of a manifest; merges. Readers are held open throughout, and what they read is also
opened again by its generation's number.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from bucketline.errors import LockedError, StoreError
from bucketline.loader.batch import BATCH_PRESENT_PREFIX, COLUMN_PREFIX, LATENTS
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.store import Store, add_column, read_manifest
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import collect, compact
from bucketline.store.change.copy_rows import RowCopier
from bucketline.store.change.merge import merge
from bucketline.store.format.block import LATENT, sample_digest, stored_name
from bucketline.store.format.block import PRESENT_PREFIX as PRESENT_COLUMN
from bucketline.store.format.manifest import generation_path, write_manifest
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, changing, is_published, lock_store, newest_manifest, publish
from bucketline.store.write.seal import seal
from bucketline.store.write.shard_writer import ShardWriter
from tests.kit import CAPTIONS, FORMS, Form, Sample, everything, make_sample
from tests.loading import loaders_of, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.files.atomic_write import FileLock
    from bucketline.loader import Loader
    from bucketline.store import PartWriter
    from tests.kit import Held

IDS = ("a.png", "b/a.png", "b/c.png", "d.png", "e", "ä ö.png", "\udcff.png", "long/" * 120)
BUCKETS = ("train/64x64", "train/96x64", "val/64x64")
LARGE = 1 << 30
PREFIXES = (COLUMN_PREFIX, BATCH_PRESENT_PREFIX)
ADDED = "features/id"
MAX_CRASHES = 3  # of one run: what is left pending is sealed in a process of its own, a third of a second each
Content = dict[str, list["Held"]]
Columns = dict[str, dict[str, bytes]]  # by bucket and column
Drawn = list[tuple[str, str, list[str]]]

new_samples = st.lists(
    st.tuples(st.sampled_from(IDS), st.sampled_from(BUCKETS), st.lists(st.sampled_from(CAPTIONS), max_size=3, unique=True)),
    min_size=1,
    max_size=5,
    unique_by=lambda drawn: drawn[0],
)
shard_sizes = st.sampled_from([1_500, 4_000, LARGE])


@dataclass(kw_only=True)
class Packing:
    """A packing run under way."""

    lock: FileLock
    writer: PartWriter
    taken: dict[str, Sample]
    committed: dict[str, Sample]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A reader that was opened at some time, and what it gave then."""

    store: Store
    loaders: list[Loader]
    content: Content
    columns: Columns

    @property
    def is_collected(self) -> bool:
        return not generation_path(self.store.path, self.store.manifest.generation).exists()


def delivered(loaders: list[Loader]) -> Columns:
    with patch.object(ColdDetector, "is_cold", property(lambda _: False)):
        loaded = rows_of(loaders)
    return {
        bucket: {name: own.tobytes() for name, own in rows.items() if name == LATENTS or name.startswith(PREFIXES)}
        for bucket, rows in loaded.items()
    }


def as_delivered(form: Form, content: Content) -> Columns:
    found: Columns = {}
    for bucket, held in content.items():
        if held:
            names = [stored_name(role) for role in form.roles]
            found[bucket] = {
                LATENTS if name == LATENT else COLUMN_PREFIX + name: b"".join(one.columns[name] for one in held)
                for name in names
            }
            for name in names:
                if PRESENT_COLUMN + name in held[0].columns:
                    found[bucket][BATCH_PRESENT_PREFIX + name] = b"".join(one.columns[PRESENT_COLUMN + name] for one in held)
    return found


def sample_digest_of(sample_id: str) -> NDArray[np.uint8]:
    return np.frombuffer(sample_digest(sample_id), dtype=np.uint8)


def killed(writer: PartWriter) -> str:
    """Leave what a writer's death leaves: its shard as it was last committed, not locked. Return the shard's name."""
    shard = writer._shard
    assert shard is not None
    shard._env.close()
    shard._lock.release()
    return shard.name


class StoreMachine(RuleBasedStateMachine):
    """The rules; `live` is what `manifest.json` gives, `newest` what the newest generation holds: a writer continues from that.

    They differ after a crash between the two writes. `left` is what a crash left for the next writer to take in.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.folder = Path(tempfile.mkdtemp(prefix="bucketline-machine-"))
        self.path = self.folder / "s"
        self.live: dict[str, Sample] = {}
        self.newest: dict[str, Sample] = {}
        self.left: dict[str, Sample] = {}
        self.packing: Packing | None = None
        self.readers: list[Reader] = []
        self.number = self.crashes = 0

    @initialize(drawn=new_samples)
    def begin(self, drawn: Drawn) -> None:
        samples = self._made(drawn)
        self.form.make_store(self.path, samples)
        self.live = self.newest = {sample.id: sample for sample in samples}

    def _made(self, drawn: Drawn) -> list[Sample]:
        self.number += 1
        return [make_sample(name, bucket, tuple(captions), version=self.number) for name, bucket, captions in drawn]

    def _settled(self) -> None:
        """Note that a writer has continued from the newest generation, and taken in what a crash left."""
        self.live = self.newest = self.newest | self.left
        self.left = {}

    # packing

    @precondition(lambda self: self.packing is None)
    @rule(drawn=new_samples)
    def start_packing(self, drawn: Drawn) -> None:
        lock = lock_store(self.path)
        manifest = newest_manifest(self.path)
        assert manifest is not None
        if not is_published(self.path, manifest):
            manifest = write_manifest(self.path, manifest)
        publish(self.path, manifest, adopt(self.path, manifest), (), taken_back=IDS)  # what was dropped may come again
        self._settled()
        self.number += 1
        writer = self.form.part(self.path, f"p{self.number:04d}")
        self.packing = Packing(lock=lock, writer=writer, taken={}, committed={})
        self._write(drawn)

    @precondition(lambda self: self.packing is None)
    @rule(parts=st.lists(new_samples, min_size=1, max_size=3), torn=st.booleans())
    def pack(self, parts: list[Drawn], torn: bool) -> None:  # noqa: FBT001
        self.start_packing(parts[0])
        for drawn in parts[1:]:
            self.commit_and_write(drawn)
        self.finish_packing(torn)

    @precondition(lambda self: self.packing is None and self.crashes < MAX_CRASHES)
    @rule(parts=st.lists(new_samples, min_size=2, max_size=3), is_sealed=st.booleans())
    def pack_and_be_killed(self, parts: list[Drawn], is_sealed: bool) -> None:  # noqa: FBT001
        self.start_packing(parts[0])
        for drawn in parts[1:]:
            self.commit_and_write(drawn)
        self.kill_packing(is_sealed)

    @precondition(lambda self: self.packing is not None)
    @rule(drawn=new_samples)
    def commit_and_write(self, drawn: Drawn) -> None:
        """Write to the end what was taken, then take more."""
        assert self.packing is not None
        self.packing.writer.commit()
        self.packing.committed |= self.packing.taken
        self.packing.taken = {}
        self._write(drawn)

    def _write(self, drawn: Drawn) -> None:
        assert self.packing is not None
        for sample in self._made(drawn):
            if sample.id not in self.packing.taken | self.packing.committed:
                self.form.add(self.packing.writer, [sample])
                self.packing.taken[sample.id] = sample

    @precondition(lambda self: self.packing is not None)
    @rule(torn=st.booleans())
    def finish_packing(self, torn: bool) -> None:  # noqa: FBT001
        assert self.packing is not None
        packing, self.packing = self.packing, None
        packing.writer.seal()
        before = (self.path / "manifest.json").read_bytes()
        publish(self.path, read_manifest(self.path), packing.writer.sealed, ())
        self.newest = self.live | packing.committed | packing.taken
        if torn:
            (self.path / "manifest.json").write_bytes(before)
        else:
            self._settled()
        packing.lock.release()

    @precondition(lambda self: self.packing is not None and self.crashes < MAX_CRASHES)
    @rule(is_sealed=st.booleans())
    def kill_packing(self, is_sealed: bool) -> None:  # noqa: FBT001
        """Leave what a killed process leaves: no seal, or one that nobody published, and the lock's file still there."""
        assert self.packing is not None
        packing, self.packing = self.packing, None
        self.crashes += 1
        name = killed(packing.writer)
        if is_sealed:
            seal(self.path, name)
        packing.lock.release()
        self.left = packing.committed

    @precondition(lambda self: self.packing is not None)
    @rule()
    def change_while_packing(self) -> None:
        with patch("bucketline.store.write.publish.WAIT_S", 0.0):
            with pytest.raises(LockedError):
                compact(self.path, shard_bytes=LARGE)
            with pytest.raises(LockedError):
                drop(self.path, list(self.live) or ["none"])

    # changing

    @precondition(lambda self: self.packing is None and self.live)
    @rule(data=st.data(), torn=st.booleans())
    def drop_samples(self, data: st.DataObject, torn: bool) -> None:  # noqa: FBT001
        if there := sorted(self.newest | self.left):
            self.drop_these(data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True)), torn)

    def drop_these(self, gone: list[str], torn: bool) -> None:  # noqa: FBT001
        before = (self.path / "manifest.json").read_bytes()
        drop(self.path, gone)
        self.newest = {name: sample for name, sample in (self.newest | self.left).items() if name not in gone}
        self.left = {}
        if torn:
            (self.path / "manifest.json").write_bytes(before)
        else:
            self._settled()

    @precondition(lambda self: self.packing is None)
    @rule(sample_id=st.sampled_from(IDS))
    def drop_what_is_not_there(self, sample_id: str) -> None:
        if sample_id not in self.newest | self.left:
            with pytest.raises(StoreError, match="nothing was dropped"):
                drop(self.path, [sample_id])
            self._settled()

    @precondition(lambda self: self.packing is None)
    @rule(shard_bytes=shard_sizes, torn=st.booleans())
    def compact_shards(self, shard_bytes: int, torn: bool) -> None:  # noqa: FBT001
        with changing(self.path):
            self._settled()
        before, content = (self.path / "manifest.json").read_bytes(), everything(Store.open(self.path))
        compact(self.path, shard_bytes=shard_bytes)
        after = Store.open(self.path)
        assert everything(after) == content  # in the same order too
        assert after.manifest.dropped is None
        if torn:
            (self.path / "manifest.json").write_bytes(before)

    @precondition(lambda self: self.packing is None and self.crashes < MAX_CRASHES)
    @rule(is_sealed=st.booleans(), is_noticed=st.booleans())
    def kill_a_compact(self, is_sealed: bool, is_noticed: bool) -> None:  # noqa: FBT001
        """Leave copies of all rows that no generation lists, sealed or pending; the next writer must not take them in."""
        with changing(self.path) as manifest:
            self._settled()
            self.number += 1
            copier = RowCopier(Store(self.path, manifest), self.number)
            if is_sealed:
                copier.copy(range(len(manifest.shards)), LARGE)
            elif manifest.samples:
                writer = self.form.part(self.path, "copy")
                room = copier._room(0)
                assert isinstance(room, ShardWriter)
                writer._shard = room
                self.form.add(writer, self.live.values())
                writer.commit()
                killed(writer)
        if is_noticed:
            with changing(self.path) as after:
                assert after == manifest

    @rule(is_killed=st.booleans())
    def add_a_column(self, is_killed: bool) -> None:  # noqa: FBT001
        """Add a column to the newest rows that lack it; killed, or while packing, its files stay unlisted."""
        if is_killed and self.packing is None:
            publishing = patch("bucketline.store.change.add_column._with_column", side_effect=InterruptedError)
            with publishing, pytest.raises(StoreError):
                add_column(self.path, ADDED, sample_digest_of)
            self.live = self.newest  # the lock's holder has continued from the newest generation
        elif self.packing is not None:
            no_wait = patch("bucketline.store.write.publish.WAIT_S", 0.0)
            with no_wait, pytest.raises(LockedError, match="the values are kept"):
                add_column(self.path, ADDED, sample_digest_of)
        else:
            add_column(self.path, ADDED, sample_digest_of)
            self.live = self.newest
            store = Store.open(self.path)
            assert all(not bucket.rows_without(ADDED) for bucket in store.buckets())

    @precondition(lambda self: self.packing is None)
    @rule(cut_off=st.booleans())
    def collect_all(self, cut_off: bool) -> None:  # noqa: FBT001
        with changing(self.path) as manifest:
            self._settled()
            if cut_off:
                for name in collect(self.path, 0, dry_run=True).files:
                    if name.endswith(".lmdb"):
                        (self.path / "shards" / name).unlink()
                # what is left of the older generations is no longer promised to their readers
                self.readers = [reader for reader in self.readers if reader.store.manifest == manifest]
            else:
                collect(self.path, 0)

    @precondition(lambda self: self.packing is None and self.number < 40)
    @rule(drawn=new_samples, comes_last=st.booleans())
    def merge_with_another(self, drawn: Drawn, comes_last: bool) -> None:  # noqa: FBT001
        others = {sample.id: sample for sample in self._made(drawn)}
        other, out = self.folder / f"other{self.number}", self.folder / f"merged{self.number}"
        self.form.make_store(other, list(others.values()))
        stores = [self.path, other] if comes_last else [other, self.path]
        if others.keys() & self.live.keys():
            with pytest.raises(StoreError, match="in two stores"):
                merge(out, stores)
            assert not out.exists()
            return
        merge(out, stores)
        self.path, self.left = out, {}
        self.live = self.newest = self.live | others if comes_last else others | self.live

    # reading

    @precondition(lambda self: len(self.readers) < 4)
    @rule()
    def hold_a_reader(self) -> None:
        store = Store.open(self.path)
        loaders = loaders_of(store, columns=self.form.roles)
        self.readers.append(Reader(store=store, loaders=loaders, content=everything(store), columns=delivered(loaders)))

    @precondition(lambda self: self.readers)
    @rule()
    def look_through_the_readers(self) -> None:
        for reader in self.readers:
            assert delivered(reader.loaders) == reader.columns  # mapped: it outlasts the files
            try:
                assert everything(reader.store) == reader.content
                if not reader.is_collected:
                    assert everything(Store.open(reader.store.path, reader.store.manifest.generation)) == reader.content
            except StoreError as error:
                if not reader.is_collected or "is missing" not in str(error):
                    raise
        self.readers = [reader for reader in self.readers if not reader.is_collected]

    @rule()
    def read_everything(self) -> None:
        store = Store.open(self.path)
        content = everything(store)
        found = {held.record.id: held for rows in content.values() for held in rows}
        assert found.keys() == self.live.keys()
        assert sum(map(len, content.values())) == len(found) == store.manifest.samples
        assert all(self.form.is_sample(found[sample_id], sample) for sample_id, sample in self.live.items())
        assert delivered(loaders_of(store, columns=self.form.roles)) == as_delivered(self.form, content)
        for sample_id, held in found.items():
            assert held.columns.get(ADDED, sample_digest(sample_id)) == sample_digest(sample_id)
        for sample_id in set(IDS) - self.live.keys():
            with pytest.raises(StoreError, match="has no sample"):
                store.sample(sample_id)

    def teardown(self) -> None:
        try:
            if self.packing is not None:
                self.packing.writer.close()
                self.packing.lock.release()
            if (self.path / "manifest.json").exists():
                self.read_everything()
                if self.readers:
                    self.look_through_the_readers()
                assert verify(Store.open(self.path), lambda _: None).corrupt == ()
        finally:
            shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("form", "examples"),
    [
        ("images", 2),
        pytest.param("images", 15, marks=pytest.mark.slow),
        pytest.param("columns", 15, marks=pytest.mark.slow),
    ],
)
def test_a_store_is_a_dict_whatever_happens_to_it(form: str, examples: int) -> None:
    machine: Any = lambda: StoreMachine(FORMS[form])  # noqa: E731
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25))


def test_a_store_of_columns_is_a_dict_after_each_thing_that_can_happen_to_it() -> None:
    """Every rule once or twice on a store of any columns, in an order in which the next one has something to lose."""
    machine = StoreMachine(FORMS["columns"])

    def some(*numbers: int, bucket: int = 0) -> Drawn:
        return [(IDS[n], BUCKETS[(n + bucket) % 3], [*CAPTIONS[: n % 4]]) for n in numbers]

    try:
        machine.begin(some(0, 1, 2, 3))
        machine.hold_a_reader()
        machine.pack([some(4, 5), some(1, 6, bucket=1)], torn=False)
        machine.read_everything()
        machine.add_a_column(is_killed=True)
        machine.start_packing(some(2, 7))
        machine.change_while_packing()
        machine.add_a_column(is_killed=False)
        machine.commit_and_write(some(0, bucket=2))
        machine.kill_packing(is_sealed=False)
        machine.read_everything()
        machine.drop_these([IDS[7], IDS[3]], torn=False)
        machine.read_everything()
        machine.add_a_column(is_killed=False)
        machine.hold_a_reader()
        machine.read_everything()
        machine.pack_and_be_killed([some(3), some(5)], is_sealed=True)
        machine.drop_these([IDS[4]], torn=True)
        machine.look_through_the_readers()
        machine.kill_a_compact(is_sealed=True, is_noticed=True)
        machine.drop_what_is_not_there(IDS[4])
        machine.compact_shards(4_000, torn=False)
        machine.read_everything()
        machine.add_a_column(is_killed=False)
        machine.merge_with_another(some(1, 7), comes_last=True)
        machine.merge_with_another(some(7), comes_last=True)
        machine.pack([some(2)], torn=True)
        machine.collect_all(cut_off=False)
        machine.compact_shards(LARGE, torn=True)
        machine.collect_all(cut_off=True)
        machine.look_through_the_readers()
    finally:
        machine.teardown()
