"""Shards that another machine makes and sends: they are committed as if they had been made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.store.read.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.parts import PartStore, SentShard, take_sent
from bucketline.store.sync.push_pull import pull
from bucketline.store.sync.working import WorkingStore
from tests.kit import COLUMNS, IMAGES, Form, everything, samples_of
from tests.object_storage import in_memory


def sent_by_a_part(part: PartStore, form: Form, name: str, rows: dict[str, int]) -> list[SentShard]:
    """Return the shards that another machine makes of some samples, and sends."""
    folder, sender = part.begin(name)
    with sender:
        with form.part(folder, name) as writer:
            form.add(writer, samples_of(rows, f"{name}/"))
        for shard in writer.sealed:
            sender.put(shard)
        sender.finish(lambda: None)
    return part.finish(folder, writer.sealed)


def pack_by_parts(objects: ObjectFolder, work: Path, form: Form, *names: str, is_ended: bool = True) -> None:
    """Pack as a driver does whose shards are made elsewhere; without `is_ended`, it ends before it commits."""
    working = WorkingStore(objects, work)
    with working.held(), working.writing(form.writer(work)._schema) as manifest:
        part = PartStore(objects, work.with_name("workers"), manifest)
        assert part.open().manifest == manifest
        sealed = []
        for name in names:
            sent = sent_by_a_part(part, form, name, {"train/64x64": 5, "val/64x64": 2})
            take_sent(work, sent)
            sealed += [shard.name for shard in sent]
        part.close()
        if is_ended:
            working.publish(manifest, sealed)


def ids_of(objects: ObjectFolder, path: Path) -> set[str]:
    pull(objects, path)
    return {held.record.id.partition("/")[0] for rows in everything(Store.open(path)).values() for held in rows}


@pytest.mark.parametrize("form", [IMAGES, COLUMNS], ids=["images", "columns"])
def test_what_parts_have_sent_is_committed_and_their_folders_are_gone(tmp_path: Path, form: Form) -> None:
    objects = in_memory()
    pack_by_parts(objects, tmp_path / "work", form, "a", "b")
    assert ids_of(objects, tmp_path / "s") == {"a", "b"}
    assert not list((tmp_path / "workers").iterdir())


def test_what_was_taken_before_the_driver_ended_is_adopted_by_the_next(tmp_path: Path) -> None:
    objects = in_memory()
    pack_by_parts(objects, tmp_path / "work", IMAGES, "a", is_ended=False)
    assert not list(objects.names("generations"))
    pack_by_parts(objects, tmp_path / "work", IMAGES, "b")
    assert ids_of(objects, tmp_path / "s") == {"a", "b"}


def test_a_part_removes_what_killed_ones_left_and_leaves_living_ones_alone(tmp_path: Path) -> None:
    objects, parent = in_memory(), tmp_path / "workers"
    working = WorkingStore(objects, tmp_path / "work")
    with working.held(), working.writing(IMAGES.writer(tmp_path / "s")._schema) as m:
        living = PartStore(objects, parent, m)
        killed = PartStore(objects, parent, m)
        killed._lock.release()  # as the kernel does
        PartStore(objects, parent, m).close()
    assert living.path.exists()
    assert not killed.path.exists()
