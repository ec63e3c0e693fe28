"""A listing dealt out to ranks, and held against a store: each image once, in little memory, in one pass over the store."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import CorruptError
from bucketline.ingest.images.crop import CropLoss
from bucketline.ingest.packed_index import PackedIndex, not_in_source, unknown
from bucketline.ingest.parallel.items import ItemParts, take_apart
from bucketline.ingest.sources.source import Listing, SourceItem
from bucketline.ingest.summary import Reject, RunSummary
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.format.block import sample_digest
from bucketline.store.format.schema import captions_checksum
from bucketline.store.shard.reader import SealedShard
from bucketline.typed_json import decode, encode
from tests.kit import flip_bit, make_sample, make_store, samples_of

ODD = [
    SourceItem(id="a\udcff.png", captions=("\ud800", "日本", ""), at=(1, 2, 1 << 80)),
    SourceItem(id="b.png", captions=(), caption_error="b.txt: Input/output error", is_caption_out_of_reach=True),
]


def items_of(count: int) -> list[SourceItem]:
    captions = ("a photograph of a red barn under a grey sky at noon",)
    return [SourceItem(id=f"folder/{n:08d}.jpg", captions=captions[: n % 3], at=(n,)) for n in range(count)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_item_comes_to_one_rank_as_it_was_and_in_order(world_size: int) -> None:
    items = items_of(2500) + ODD
    outline, slices = take_apart(Listing(items=list(items), orphans=["o"], empty_folders=["e"]), world_size)
    dealt = [list(ItemParts(own.parts)) for own in slices]
    place = {item.id: n for n, item in enumerate(items)}
    assert sorted((item for own in dealt for item in own), key=lambda item: place[item.id]) == items
    for own in dealt:
        assert own == sorted(own, key=lambda item: place[item.id])
    assert [len(own) for own in slices] == [len(own) for own in dealt]
    assert (outline.num_items, outline.listing.orphans, outline.listing.empty_folders) == (2502, ["o"], ["e"])
    assert outline.keys.tolist() == [sample_digest(item.id).rstrip(b"\0") for item in items]
    assert outline.num_captions.tolist() == [len(item.captions) for item in items]
    assert outline.caption_chars.tolist() == [len(text) for item in items for text in item.captions]


def test_what_a_rank_keeps_of_a_listing_is_small() -> None:
    count = 30_000
    texts = [f"a photograph of {n} red barns" for n in range(count)]  # objects of their own, as a source gives them
    num_text_bytes = sum(len(text) + len("folder/00000000.jpg") for text in texts)
    listing = Listing(items=[SourceItem(id=f"folder/{n:08d}.jpg", captions=(text,)) for n, text in enumerate(texts)])
    del texts
    tracemalloc.start()
    kept = take_apart(listing, 4)
    own = kept[1][1]
    others = kept[1][:1] + kept[1][2:]
    del kept[1][:], others
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(own) > count / 5
    assert not listing.items
    # digests, caption counts and lengths of all; of its own, a quarter, ids and captions and 30 bytes each
    assert now < count * (16 + 4 + 4) + (num_text_bytes + 30 * count) / 3


def test_an_account_goes_through_json() -> None:
    account = RunSummary(packed=3, unreadable=1, kept=["a\udc80"], crop_losses={"b": CropLoss(images=1, total=0.1, most=0.1)})
    account.rejects.append(Reject(id="x", reason="r", detail="d"))
    account.stage_seconds["decode"] = 0.25
    assert decode(RunSummary, encode(account)) == account


def test_new_and_gone_images_are_those_that_a_look_up_shard_by_shard_finds(tmp_path: Path) -> None:
    shards = [samples_of({"train/8x8": 5, "val/8x16": 3}, f"{n}/") for n in range(6)]
    shards.append([*shards[0][:2], *shards[3][5:7]])  # packed again
    store = make_store(tmp_path / "s", *shards)
    drop(store.path, [shards[1][0].id, shards[0][1].id])
    store = Store.open(store.path)
    ids = {sample.id for samples in shards for sample in samples}
    live = {sample_id for sample_id in ids if any(shard.find(sample_digest(sample_id)) for shard in store.shards)}
    assert len(live) == len(ids) - 2
    listed = [*sorted(ids)[::3], "new.png", shards[1][0].id]
    outline, _ = take_apart(Listing(items=[SourceItem(id=sample_id, captions=()) for sample_id in listed]), 1)
    assert [i for i, is_new in zip(listed, unknown(store, outline), strict=True) if is_new] == [
        sample_id for sample_id in listed if sample_id not in live
    ]
    gone = not_in_source(store, outline)
    assert gone.ids() == sorted(live - set(listed))
    assert {*gone.digests()} == {sample_digest(sample_id) for sample_id in gone.ids()}
    assert len(gone.ids(4)) == 4
    empty = Store.open(make_store(tmp_path / "t").path)
    assert unknown(empty, outline).all()
    assert not_in_source(empty, outline).ids() == []


def test_a_listing_is_not_held_against_every_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [samples_of({"train/8x8": 4}, f"{n}/") for n in range(12)]
    store = make_store(tmp_path / "s", *shards)
    items = [SourceItem(id=sample.id, captions=()) for samples in shards for sample in samples]
    outline, _ = take_apart(Listing(items=items), 1)
    searched: list[int] = []
    positions = SealedShard.positions

    def counting(self: SealedShard, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        searched.append(len(keys))
        return positions(self, keys)

    monkeypatch.setattr(SealedShard, "positions", counting)
    assert not unknown(store, outline).any()
    assert not_in_source(store, outline).ids() == []
    assert sum(searched) <= 48  # each sample in a shard of its own at most; it was each in all twelve


BUCKETS = {"train/64x64": 9, "val/64x64": 3, "train/64x96": 5}


def test_what_is_found_is_what_a_look_up_shard_by_shard_finds(tmp_path: Path) -> None:
    first, second = samples_of(BUCKETS), samples_of({"train/64x96": 4, "train/32x32": 6}, "new/")
    again = [make_sample(sample.id, "train/32x32", ("changed",), version=1) for sample in first[::4]]
    store = make_store(tmp_path / "s", first, second, again)  # the last shard supersedes rows of the first
    gone = [second[0].id, first[1].id, again[0].id]
    drop(store.path, gone)
    store = Store.open(store.path)
    known = PackedIndex(store)
    ids = {sample.id for sample in (*first, *second)}
    for sample_id in (*ids, "never packed"):
        digest = sample_digest(sample_id)
        entry = next((found for shard in store.shards if (found := shard.find(digest)) is not None), None)
        sample = known.find(sample_id)
        assert (sample is None) == (entry is None), sample_id
        if entry is not None and sample is not None:
            named = (sample.source_bytes, sample.source_mtime_ns, sample.captions, sample.content)
            assert named == (entry.source_bytes, entry.source_mtime_ns, entry.captions, entry.content)
    assert {sample_id for sample_id in ids if known.find(sample_id)} == ids - set(gone)
    changed = known.find(again[1].id)
    assert changed is not None
    assert (changed.content, changed.captions) == (again[1].record.content, captions_checksum(("changed",)))


def test_a_store_without_a_sample_has_none(tmp_path: Path) -> None:
    assert PackedIndex(make_store(tmp_path / "s")).find("a.png") is None
    store = make_store(tmp_path / "t", samples_of({"train/64x64": 2}))
    drop(store.path, [sample.id for sample in samples_of({"train/64x64": 2})])
    assert PackedIndex(Store.open(store.path)).find("train/64x64/0.png") is None


def test_a_damaged_index_is_an_error_before_anything_is_packed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of(BUCKETS))
    index = store.shards[0].paths.meta
    flip_bit(index, 8 * (index.stat().st_size - 9))
    with pytest.raises(CorruptError):
        PackedIndex(Store.open(store.path))
