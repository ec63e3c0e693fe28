"""`ingest pack --publish-every`: readers see what is packed so far, and the end is that of any pack."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketline.ingest.packing.share import SharePacker
from bucketline.ingest.pipeline.slice_packer import RowWriter
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.format.manifest import Manifest
from bucketline.store.remote.generations import newest_generation
from bucketline.store.sync.push_pull import pull
from bucketline.store.sync.working import WorkingStore
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import LocalTarget, StoreTarget
from tests.commands import forked_ranks
from tests.fault.same_store import compare
from tests.kit import everything
from tests.models import SMALL, pack
from tests.object_storage import in_memory

ALWAYS = ("--batch-size", "2", "--publish-every", "0.001s")  # at each look between images


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each shard that a period ends be ready before the next image, so that there are many generations."""
    end_shard, publish_due = RowWriter.end_shard, SharePacker.publish_due

    def sealing(writer: RowWriter) -> None:
        end_shard(writer)
        end_shard(writer)  # taken once the first is carried out
        while writer._thread.is_alive() and not writer._waiting.empty():
            os.sched_yield()

    def publishing(own: SharePacker) -> None:
        while len(own.packer.ready) < len(own.packer.sealed):
            os.sched_yield()
        publish_due(own)

    monkeypatch.setattr(RowWriter, "end_shard", sealing)
    monkeypatch.setattr(SharePacker, "publish_due", publishing)


def on_publish(monkeypatch: pytest.MonkeyPatch, kind: type[StoreTarget], look: Callable[[StoreTarget, Manifest], None]) -> None:
    """Have `look` called after each generation that is published."""
    publish = kind.publish

    def looking(target: StoreTarget, *args: Any, **named: Any) -> Manifest:
        published = publish(target, *args, **named)
        look(target, published)
        return published

    monkeypatch.setattr(kind, "publish", looking)


@pytest.mark.usefixtures("in_turn")
def test_readers_see_each_generation_meanwhile(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "damaged.png").write_bytes(b"nothing")
    seen: list[int] = []

    def look(target: StoreTarget, manifest: Manifest) -> None:
        store = Store.open(target.path)
        assert store.manifest == manifest
        assert not verify(store, lambda _: None, 1).corrupt
        seen.append(manifest.samples)

    on_publish(monkeypatch, LocalTarget, look)
    done = pack(source, tmp_path / "s", model, *ALWAYS).done()
    report = done.json
    assert (report["found"], report["packed"], report["rejected"]) == (15, 14, 1)
    assert seen == sorted(set(seen))  # more each time
    last = len(seen)
    assert (seen[-1], report["generation"], report["generations_meanwhile"]) == (14, last, last - 1)
    assert last > 3
    plain = pack(source, tmp_path / "plain", model, "--batch-size", "2").json
    assert plain["generations_meanwhile"] == 0
    assert compare(tmp_path / "s", tmp_path / "plain").faults == []
    again = pack(source, tmp_path / "s", model, *ALWAYS).json
    assert (again["unchanged"], again["generation"], again["generations_meanwhile"]) == (14, last, 0)


@pytest.mark.usefixtures("in_turn")
def test_what_is_replaced_dropped_and_pruned_is_as_without_it(packed: Path, tmp_path: Path, model: Path) -> None:
    shutil.copytree(tmp_path / "s", tmp_path / "plain")
    images = sorted(packed.rglob("*.png"))
    images[0].unlink()
    images[1].write_bytes(b"nothing")
    for n, image in enumerate(images[2:6]):
        image.write_bytes(images[7 + n].read_bytes())
    more = ("--prune=1", "--batch-size", "2")
    plain = pack(packed, tmp_path / "plain", model, *more).json
    done = pack(packed, tmp_path / "s", model, *more, "--publish-every", "0.001s").json
    for name in ("packed", "unchanged", "rejected", "dropped_ids", "pruned_ids"):
        assert done[name] == plain[name]
    assert (done["packed"], done["dropped"], done["pruned"]) == (4, 1, 1)
    assert done["generations_meanwhile"] > 0
    assert compare(tmp_path / "s", tmp_path / "plain").faults == []


@pytest.mark.usefixtures("in_turn")
def test_a_store_at_a_url_gets_generations(source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen, dropped = in_memory(), list[int](), list[str]()

    def look(_: StoreTarget, manifest: Manifest) -> None:
        if not manifest.shards:
            return  # of the new store
        newest = newest_generation(place)
        assert newest == manifest
        seen.append(newest.samples)
        if len(seen) == 2:  # somebody changes the store meanwhile
            pull(place, tmp_path / "second.store")
            held = everything(Store.open(tmp_path / "second.store"))
            dropped.append(next(iter(held.values()))[0].record.id)
            drop(place, dropped)

    on_publish(monkeypatch, WorkingStore, look)
    done = pack(source, place.url, model, *ALWAYS, "--work", tmp_path / "work").json
    assert (done["packed"], done["generation"]) == (14, newest_generation(place).generation)
    assert done["generations_meanwhile"] > 3
    pull(place, tmp_path / "pulled.store")
    pack(source, tmp_path / "plain", model)
    drop(tmp_path / "plain", dropped)
    assert compare(tmp_path / "pulled.store", tmp_path / "plain").faults == []
    assert not list(place.names("pending"))


@pytest.mark.usefixtures("in_turn")
def test_ranks_publish_together(source: Path, tmp_path: Path, model: Path) -> None:
    done = forked_ranks(2, "ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--json", *ALWAYS).done()
    assert (done.json["packed"], done.json["found"]) == (14, 14)
    assert done.json["generations_meanwhile"] > 0
    store = Store.open(tmp_path / "s")
    assert len({shard.name[:-5] for shard in store.shards}) == 2  # both ranks' shards
    pack(source, tmp_path / "plain", model)
    assert compare(tmp_path / "s", tmp_path / "plain").faults == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--publish-every", "soon"), "--publish-every is 'soon', expected a number and s, m, h or d"),
        (("--publish-every", "0s"), "expected more than 0"),
        (("--publish-every", "1m", "--recaption"), "replaces all captions in one generation"),
    ],
)
def test_what_cannot_be_is_refused(source: Path, tmp_path: Path, model: Path, given: tuple[str, ...], said: str) -> None:
    pack(source, tmp_path / "s", model, *given).fails(said, code=2)
    assert not (tmp_path / "s").exists()
