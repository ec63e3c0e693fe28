"""Ragged groups in every layer of a store: what is refused, what is damaged, what is left after a change."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from bucketline.errors import CorruptError, FingerprintError, StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.window import PendingBatch
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.store import Column, RaggedGroup, RowColumn, Store
from bucketline.store.change.merge import merge
from bucketline.store.change.repair import repair
from bucketline.store.format.manifest import dump_manifest, parse_manifest, read_manifest, sealed
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.shard.mapped import ZERO_BYTES
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.verify.verify import verify
from bucketline.store.write import shard_writer
from tests.commands import call
from tests.kit import AUDIO, LLAMA, POINTS, RAGGED, Form, expect_independently, faults, flip_bit, row_entry
from tests.loading import expect_loaded

ITEMS = RAGGED.samples({"train/3": 9, "train/5": 4, "val/3": 3})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return RAGGED.make_store(tmp_path_factory.mktemp("ragged") / "s", ITEMS)


@pytest.fixture
def copy(made: Store, tmp_path: Path) -> Path:
    merge(tmp_path / "s", [made.path])
    return tmp_path / "s"


def damage(path: Path, name: str, number: int) -> None:
    store = Store.open(path)
    spec = store.ragged_spec(name)
    located = store.locate_entries(spec, np.array([0]), np.array([number]))
    block = {own.name: own for own in spec.tensors(int(located.entries[0]), int(located.tokens[0]))}
    at = int(located.data[0]) + block["digest"].begin + 16 * int(located.row_in_block[0])
    flip_bit(store.shards[0].paths.lmdb, 8 * at)


# writing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": "shards"}, "of='captions' or of='rows'"),
        ({"mirrored": "other"}, "expected None or 'same'"),
        ({"of": "captions", "optional": True}, "one entry for each caption"),
        ({"of": "captions", "stored_once": False}, "one entry for each caption"),
        ({"columns": []}, "one token column or more"),
        ({"columns": [Column(name="starts", dtype="U8", shape=())]}, "none of starts, checksum, digest"),
        ({"columns": [Column(name="A", dtype="U8", shape=())]}, "of a to z"),
        ({"fixed": [Column(name="hidden", dtype="U8", shape=())]}, "each name once"),
        ({"fixed": [Column(name="none", dtype="U8", shape=(0,))]}, "holds nothing"),
    ],
)
def test_an_impossible_group_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RaggedGroup(**{"columns": LLAMA.columns, **change})


@pytest.mark.parametrize(
    ("groups", "has_text", "message"),
    [
        ({"text": POINTS}, True, "not the name of a ragged group"),
        ({"Audio": POINTS}, True, "not the name of a ragged group"),
        ({"tokens": LLAMA}, True, "name of a text column"),
        ({"llama": LLAMA}, False, "no text column"),
        ({"audio": dataclasses.replace(AUDIO, encoder="other")}, True, "names the encoder 'other'"),
    ],
)
def test_groups_that_do_not_go_together_are_refused(groups: Any, has_text: bool, message: str, tmp_path: Path) -> None:  # noqa: FBT001
    with pytest.raises(UsageError, match=message):
        Form(columns=RAGGED.columns, groups=groups, text=RAGGED.text if has_text else None).writer(tmp_path / "s")


def latent_of(count: int) -> dict[str, Any]:
    return {"latent": np.zeros((count, 3, 2), "<u2"), "loud": np.zeros(count, "?"), "rate": np.array(1, "<i4")}


@pytest.mark.parametrize(
    ("ragged", "captions", "message"),
    [
        ({}, {}, "sample 'a', ragged group 'points' is missing"),
        ({"points": np.zeros((2, 3), "<f8")}, {}, "column of 'points', 'xyz' takes F32 .* got float64"),
        ({"points": np.zeros((2, 4), "<f4")}, {}, r"takes F32 \[2, 3\], got float32 \[2, 4\]"),
        ({"points": np.float32(3)}, {}, "sample 'a', ragged group 'points'"),
        ({"points": np.full((1, 3), np.nan, "<f4")}, {}, "ragged group 'points': column 'xyz' is NaN"),
        ({"points": {"xy": np.zeros((1, 3), "<f4")}}, {}, "has the columns"),
        ({"audio": np.zeros((1, 3, 2), "<u2"), "points": np.zeros((1, 3), "<f4")}, {}, "give an array for each by name"),
        ({"audio": {**latent_of(2), "loud": np.zeros(3, "?")}, "points": np.zeros((1, 3), "<f4")}, {}, r"BOOL \[2\], got"),
        ({"point": np.zeros((1, 3), "<f4")}, {}, "has the ragged group 'point'"),
        ({"llama": np.zeros((1, 7), "<f2")}, {}, "what belongs to a caption is given with it"),
        ({"points": np.zeros((1, 3), "<f4")}, {"x": {"tokens": np.zeros((1, 5), "<f2")}}, "'llama' is missing"),
        (
            {"points": np.zeros((1, 3), "<f4")},
            {"x": {"tokens": np.zeros((1, 5), "<f2"), "llama": np.full((1, 7), np.inf, "<f2")}},
            "caption 'x', ragged group 'llama': column 'hidden' is NaN",
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_name(
    ragged: dict[str, Any], captions: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with RAGGED.writer(tmp_path / "s") as writer:
        with pytest.raises(UsageError, match=message):
            writer.add("a", "train", {"target": np.zeros((2, 3), "<f2")}, captions, ragged)
        RAGGED.add(writer, ITEMS[:3])
    assert not faults(tmp_path / "s")
    expect_independently(tmp_path / "s", RAGGED, ITEMS[:3])


def test_a_row_that_does_not_fit_leaves_no_entry(tmp_path: Path) -> None:
    with RAGGED.writer(tmp_path / "s") as writer:
        with pytest.raises(UsageError, match="takes F16"):
            writer.add("a", "train/3", {"target": np.zeros((2, 3), "<f4")}, {}, {"points": np.ones((1, 3), "<f4")})
        RAGGED.add(writer, ITEMS[:2])
    assert read_manifest(tmp_path / "s").shards[0].groups["ragged/points"].rows == 2


def test_equal_entries_are_stored_once_per_shard_only_if_that_is_the_rule(made: Store) -> None:
    (shard,) = made.manifest.shards
    given = [entry for item in ITEMS if (entry := row_entry("audio", AUDIO, item.id)) is not None]
    different = {b"".join(own.tobytes() for own in entry.values()) for entry in given}
    assert shard.groups["ragged/audio"].rows == len(different) < len(given)
    assert shard.groups["ragged/points"].rows == len(ITEMS)
    assert shard.groups["ragged/llama"].rows == shard.groups["text"].rows


def test_another_encoder_of_a_group_is_refused(copy: Path) -> None:
    other = Form(columns=RAGGED.columns, groups={**RAGGED.groups, "llama": dataclasses.replace(LLAMA, allow_nonfinite=True)})
    with other.writer(copy):
        pass
    wider = dataclasses.replace(POINTS, columns=[Column(name="xyz", dtype="F32", shape=(4,))])
    for groups in ({**RAGGED.groups, "points": wider}, {"audio": AUDIO}, {}):
        with pytest.raises(FingerprintError, match="ragged"), Form(columns=RAGGED.columns, groups=groups).writer(copy):
            pass


def test_long_entries_do_not_wait_for_their_rows_to_fill_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 1 << 14)
    monkeypatch.setattr(shard_writer, "LONG_BYTES", 1 << 13)
    schema = Form(columns=RAGGED.columns, groups={"points": POINTS}, text=None)
    with schema.writer(tmp_path / "s") as writer:
        for n in range(12):
            points = np.full((400 + n, 3), n, "<f4")
            writer.add(f"{n}", "train", {"target": np.zeros((2, 3), "<f2")}, {}, {"points": points})
            assert writer._shard is not None
            assert writer._shard._new_bytes < 1 << 15
    (shard,) = Store.open(tmp_path / "s").shards
    assert shard.entry.groups["ragged/points"].blocks > shard.entry.groups["train/3"].blocks == 1
    assert not faults(tmp_path / "s")


def test_what_a_killed_part_had_committed_is_adopted_with_its_entries(tmp_path: Path) -> None:
    writer = RAGGED.writer(tmp_path / "s").__enter__()
    part = pickle.loads(pickle.dumps(writer.part("r0")))
    RAGGED.add(part, ITEMS, commit_every=len(ITEMS))
    part.close()
    with pytest.warns(UserWarning, match="has not been sealed"):
        writer.__exit__(None, None, None)
    with RAGGED.writer(tmp_path / "s"):
        pass
    assert not faults(tmp_path / "s")
    expect_independently(tmp_path / "s", RAGGED, ITEMS)


# reading


def test_entries_of_a_cold_store_are_requested_ahead(made: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = BatchBuilder.ask_tokens

    def noted(builder: BatchBuilder, batch: PendingBatch) -> None:
        asked.append(batch.bucket.name)
        ask(builder, batch)

    monkeypatch.setattr(BatchBuilder, "ask_tokens", noted)
    monkeypatch.setattr(ColdDetector, "is_cold", True)
    assert expect_loaded(made.path, RAGGED, ITEMS, verify=True, caption_dropout=0.0) == 13
    assert asked


@pytest.mark.slow
def test_a_service_delivers_the_same(made: Store) -> None:
    config = LoaderConfig(batch_size=3, ragged=("audio", "points", "llama"), epochs=1)
    with Loader(made.path, config) as own, Loader(made.path, config, service="auto") as served:
        for one, other in zip(own, served, strict=True):
            first, second = one.by_name(), other.by_name()
            assert list(first) == list(second)
            assert all(first[name].tolist() == second[name].tolist() for name in first if first[name].dtype.itemsize != 2)
            assert one.to("meta").ragged["audio"].columns["latent"].shape == one.ragged["audio"].columns["latent"].shape


def test_a_store_in_object_storage_is_read_through_its_cache(made: Store, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket/a.store"
    push(made.path, ObjectFolder.open(url))
    store = Store.open(url, remote=RemoteOptions(cache=tmp_path / "cache"))
    RAGGED.expect(store, ITEMS)
    forms: list[dict[str, Any]] = [{}, {"verify": True}, {"plain_reads": True}, {"pad_multiple": 2}]
    for n, options in enumerate(forms):
        store = Store.open(url, remote=RemoteOptions(cache=tmp_path / f"cache{n}"))
        assert expect_loaded(store, RAGGED, ITEMS, **options) == 13
    pull(ObjectFolder.open(url), tmp_path / "pulled")
    expect_independently(tmp_path / "pulled", RAGGED, ITEMS)


def test_only_the_groups_that_are_requested_are_delivered(made: Store) -> None:
    with Loader(made, LoaderConfig(batch_size=2, ragged=("points",), epochs=1)) as loader:
        batch = next(loader.forever())
    assert batch.ragged.keys() == {"points"}
    assert batch.ragged["points"].present is None
    assert batch.to("meta").ragged["points"].columns["xyz"].shape == batch.ragged["points"].columns["xyz"].shape
    with Loader(made, LoaderConfig(batch_size=2, epochs=1)) as loader:
        assert not next(loader.forever()).ragged
    for ragged in (("sound",), ("points", "points")):
        with pytest.raises(UsageError, match="expected some of these, each once"):
            Loader(made, LoaderConfig(batch_size=2, ragged=ragged))


def test_flips_refuse_a_group_of_rows_without_mirror_images(tmp_path: Path) -> None:
    columns = (*RAGGED.columns, RowColumn(role="target/flipped", dtype="F16", shape=(2, "length")))
    schema = dataclasses.replace(RAGGED, columns=columns)
    made = schema.make_store(tmp_path / "s", schema.samples({"train/3": 4}))
    with pytest.raises(UsageError, match=r"'audio' of .* has no entries of mirror images"):
        Loader(made, LoaderConfig(batch_size=2, ragged=("audio",), flip=0.5))
    with Loader(made, LoaderConfig(batch_size=2, ragged=("points", "llama"), flip=1.0)) as loader:
        assert bool(next(loader.forever()).flipped.all())


def test_stores_with_other_groups_are_neither_mixed_nor_merged(made: Store, tmp_path: Path) -> None:
    groups = {**RAGGED.groups, "audio": dataclasses.replace(AUDIO, stored_once=False)}
    other = dataclasses.replace(RAGGED, groups=groups).make_store(tmp_path / "o", ITEMS[:2])
    with pytest.raises(FingerprintError, match="stored_once"):
        Loader([made, other], LoaderConfig(batch_size=2))
    with pytest.raises(FingerprintError, match="stored_once"):
        merge(tmp_path / "m", [made.path, other.path])
    more = RAGGED.samples({"train/3": 3}, "more/")
    assert expect_loaded([made, RAGGED.make_store(tmp_path / "p", more)], RAGGED, [*ITEMS, *more]) == 16


def test_an_unknown_group_or_a_caption_that_is_not_there(made: Store) -> None:
    bucket = made.bucket("train/3")
    assert bucket.read_ragged(0, "llama", 3) is None
    with pytest.raises(StoreError, match="has no ragged group 'sound'; it has audio, points, llama"):
        bucket.read_ragged(0, "sound")


def test_tokens_longer_than_the_zeros_of_the_map_are_delivered_too(tmp_path: Path) -> None:
    column = Column(name="plane", dtype="U8", shape=(ZERO_BYTES + 8,))
    planes = RaggedGroup(columns=[column], fixed=[dataclasses.replace(column, name="one")])
    schema = Form(columns=RAGGED.columns, groups={"planes": planes}, text=None)
    items = schema.samples({"train/3": 3})
    schema.make_store(tmp_path / "s", items)
    assert expect_loaded(tmp_path / "s", schema, items) == 3


def test_a_group_of_which_a_shard_or_the_store_has_no_entry(tmp_path: Path) -> None:
    schema = Form(columns=RAGGED.columns, groups={"audio": AUDIO}, text=None)
    items = schema.samples({"train/3": 12})
    without = [item for item in items if row_entry("audio", AUDIO, item.id) is None]
    rest = [item for item in items if item not in without]
    store = schema.make_store(tmp_path / "s", without)
    assert "ragged/audio" not in store.manifest.shards[0].groups
    assert expect_loaded(store, schema, without) == expect_loaded(store, schema, without, plain_reads=True) == len(without) > 1
    with schema.writer(tmp_path / "s") as writer:
        schema.add(writer, rest)
    store = Store.open(tmp_path / "s")
    assert [len(shard.entry.ragged) for shard in store.shards] == [0, 1]
    assert not faults(tmp_path / "s")
    for options in ({"verify": True}, {"plain_reads": True}):
        assert expect_loaded(store, schema, items, **options) == len(items)


# damage


@pytest.mark.parametrize("name", ["audio", "points", "llama"])
def test_a_damaged_entry_is_named_with_its_samples_and_repaired(name: str, copy: Path) -> None:
    store = Store.open(copy)
    users = set()
    for bucket in store.buckets():
        for row, sample_id in enumerate(bucket.sample_ids(np.arange(bucket.num_rows))):
            column = "captions" if name == "llama" else f"ragged/{name}"
            if 1 in bucket.read(np.array([row]), column).reshape(-1).tolist():
                users.add(sample_id)
    assert users
    damage(copy, name, 1)
    found = [fault for fault in faults(copy) if fault.bucket is not None]
    assert [(fault.bucket, fault.row, set(fault.samples)) for fault in found] == [(f"ragged/{name}", 1, users)]
    (bucket_name,) = {item.bucket for item in ITEMS if item.id == min(users)}
    shard, record = store.sample(min(users))
    with pytest.raises(CorruptError, match=f"{name} entry 1: its bytes do not match"):
        Store.open(copy).read_entry(name, store.shards.index(shard), 1)
    if any(user.startswith("train") for user in users):
        with (
            Loader(copy, LoaderConfig(batch_size=2, epochs=1, ragged=(name,), verify=True)) as loader,
            pytest.raises(CorruptError, match=f"sample '.*{name} entry 1: its bytes do not match"),
        ):
            list(loader)
    assert record.bucket == bucket_name
    assert repair(copy).dropped == len(users)
    left = [item for item in ITEMS if item.id not in users]
    assert not verify(Store.open(copy), lambda _: None, 1, shards_only=True).corrupt  # the damaged file is still there
    expect_independently(copy, RAGGED, left)


def test_impossible_starts_are_refused_before_they_are_used(copy: Path) -> None:
    store = Store.open(copy)
    located = store.locate_entries(store.ragged_spec("points"), np.array([0]), np.array([2]))
    path, at = store.shards[0].paths.lmdb, int(located.starts_offsets()[0])
    data = bytearray(path.read_bytes())
    data[at : at + 16] = (1 << 60).to_bytes(8, "little") + (1 << 61).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="points entry 2 has the `starts`"):
        Store.open(copy).read_entry("points", 0, 2)
    with (
        Loader(copy, LoaderConfig(batch_size=2, epochs=1, ragged=("points",))) as loader,
        pytest.raises(CorruptError, match=r"sample 'train/3/\d', .*points entry \d has the `starts`"),
    ):
        list(loader)
    assert any("`starts` does not run from 0" in fault.error for fault in faults(copy))


def test_a_row_that_names_an_entry_beyond_the_shards_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = shard_writer.ShardWriter._number_of
    wrong = lambda self, group, entry: 99 if group == "ragged/audio" and entry is None else number(self, group, entry)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.ShardWriter, "_number_of", wrong)
        RAGGED.make_store(tmp_path / "s", ITEMS)
    found = [fault.error for fault in faults(tmp_path / "s")]
    lacking = [item.id for item in ITEMS if row_entry("audio", AUDIO, item.id) is None]
    assert len(found) == len(lacking) > 0
    assert all(error.startswith("the row has audio entry 99, the shard has") for error in found)
    with pytest.raises(CorruptError, match="no block of ragged/audio holds row 99"):
        RAGGED.expect(Store.open(tmp_path / "s"), ITEMS)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["ragged"].clear(),
        lambda d: d.pop("ragged"),
        lambda d: d["ragged"].pop("audio"),
        lambda d: d["ragged"]["audio"].update(of="shards"),
        lambda d: d["ragged"]["audio"].update(mirrored="other"),
        lambda d: d["ragged"]["audio"].update(header_bytes=64),
        lambda d: d["ragged"]["audio"].update(encoder="nobody"),
        lambda d: d["ragged"]["llama"].update(optional=True),
        lambda d: d["ragged"]["points"]["tokens"]["xyz"].update(shape=[0]),
        lambda d: d["ragged"].update(text=d["ragged"].pop("points")),
        lambda d: d["shards"][0]["ragged"].pop("points"),
        lambda d: d["shards"][0]["ragged"]["points"].update(tokens=1 << 50),
        lambda d: d["shards"][0]["ragged"]["points"].update(max_tokens=1 << 50),
        lambda d: d["shards"][0]["groups"].pop("ragged/points"),
        lambda d: d["shards"][0]["groups"].update({"ragged/llama": d["shards"][0]["groups"]["ragged/points"]}),
        lambda d: d["shards"][0]["groups"].update({"ragged/x": d["shards"][0]["groups"]["ragged/points"]}),
        lambda d: d["buckets"][0]["columns"].pop("ragged/points"),
        lambda d: d["buckets"][0]["columns"]["ragged/points"].update(dtype="I64"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: Any, made: Store) -> None:
    document = json.loads(dump_manifest(made.manifest))
    change(document)
    with pytest.raises(CorruptError, match="is damaged"):
        parse_manifest(json.dumps(document).encode(), "x")
    assert parse_manifest(dump_manifest(sealed(made.manifest)), "x") == made.manifest


# commands


def test_the_commands_show_and_export_entries(made: Store, tmp_path: Path) -> None:
    shown = call("store", "info", made.path)
    assert "ragged audio: " in shown.out
    assert "latent BF16 [T, 3, 2], loud BOOL [T], rate I32 [], T at most 5" in shown.out
    report = json.loads(call("store", "info", made.path, "--json").out)["ragged"]
    assert (report["llama"]["of"], report["points"]["entries"]) == ("captions", len(ITEMS))
    (item,) = [item for item in ITEMS if item.captions and row_entry("audio", AUDIO, item.id) is not None][:1]
    points, audio = row_entry("points", POINTS, item.id), row_entry("audio", AUDIO, item.id)
    assert points is not None
    assert audio is not None
    assert call("store", "get", made.path, item.id, "-o", tmp_path / "a.safetensors").code == 0
    assert call("store", "export", made.path, tmp_path / "e", "--format", "safetensors").code == 0
    lines = map(json.loads, (tmp_path / "e" / "samples.jsonl").read_text().splitlines())
    (line,) = [one for one in lines if one["id"] == item.id]
    assert (tmp_path / "e" / line["file"]).read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    assert found["ragged.points.xyz"].numpy().tobytes() == points["xyz"].tobytes()
    assert int(found["ragged.audio.rate"]) == int(audio["rate"])
    assert tuple(found["ragged.audio.latent"].shape) == audio["latent"].shape
    for n, text in enumerate(item.captions):
        hidden = RAGGED.caption(text)["llama"]["hidden"]
        assert found[f"caption.{n}.ragged.llama.hidden"].numpy().tobytes() == hidden.tobytes()
