"""Every command of a store does its work on columns of any kind: nothing is lost, and what is damaged is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from bucketline.errors import FingerprintError, StoreError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.store import RowColumn, Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.change.repair import repair
from bucketline.store.format.block import row_checksum
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.kit import ANY, ANY_ENCODERS, FRAMES, HEIGHT, WIDTH, Form, Sample, flip_bit

VIDEO = (
    RowColumn(role="target", dtype="F16", shape=(2, FRAMES, HEIGHT, WIDTH), encoder="vae"),
    RowColumn(role="mask", dtype="BOOL", shape=("frames",), optional=True),
)
FORMS = {
    "images": (ANY, {"train/64x64": 11, "val/64x96": 5}),
    "video": (Form(columns=VIDEO), {"train/9x16x16": 8, "train/1x16x24": 5}),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[Form, dict[str, int]]:
    return FORMS[request.param]


def check(store: Store, items: list[Sample], form: Form = ANY) -> None:
    assert not verify(store, lambda _: None, 1).corrupt
    form.expect(store, items)


def test_drop_compact_and_continue(form: tuple[Form, dict[str, int]], tmp_path: Path) -> None:
    made, rows = form
    items, more = made.samples(rows), made.samples(rows, "more/")
    made.make_store(tmp_path / "s", items, more)
    drop(tmp_path / "s", [items[0].id, more[-1].id])
    kept = [*items[1:], *more[:-1]]
    check(Store.open(tmp_path / "s"), kept, made)
    compacted = compact(tmp_path / "s", shard_bytes=1 << 30, gc_older_than_s=0)
    assert (compacted.rows, compacted.dropped) == (len(kept), 2)
    check(Store.open(tmp_path / "s"), kept, made)
    assert Store.open(tmp_path / "s").manifest.format_version == 1
    newer = made.sample(items[1].id, items[1].bucket, captions=("another",))
    with made.writer(tmp_path / "s") as writer:
        made.add(writer, [newer])
    check(Store.open(tmp_path / "s"), [newer, *kept[1:]], made)


def test_merge_and_mix_stores_of_the_same_columns_only(form: tuple[Form, dict[str, int]], tmp_path: Path) -> None:
    made, rows = form
    parts = [made.samples(rows, f"{name}/") for name in "ab"]
    stores = [made.make_store(tmp_path / name, items) for name, items in zip("ab", parts, strict=True)]
    merge(tmp_path / "merged", [store.path for store in stores])
    check(Store.open(tmp_path / "merged"), [*parts[0], *parts[1]], made)
    batch_size = 3
    config = LoaderConfig(batch_size=batch_size, epochs=1, columns=made.roles, verify=True)
    with Loader([stores[0], WeightedStore(store=stores[1], repeats=2)], config) as loader:
        assert sum(len(batch.ids) for batch in loader) > 2 * batch_size
    required = [
        column if column.role != "mask" else RowColumn(role="mask", dtype=column.dtype, shape=column.shape)
        for column in made.columns
    ]
    without = Form(columns=required)
    other = without.make_store(tmp_path / "c", [without.sample("c", next(iter(rows)))])
    with pytest.raises(FingerprintError, match=r"columns\.mask\.optional = True, .* with False"):
        merge(tmp_path / "no", [stores[0].path, other.path])
    with pytest.raises(FingerprintError, match=r"columns\.mask\.optional is True in the first and False"):
        Loader([stores[0], other], config)


def test_stores_of_other_axes_are_not_mixed(tmp_path: Path) -> None:
    stores = []
    for axes in (("mels", "frames"), ("height_px", "width_px")):
        one = Form(columns=[RowColumn(role="target", dtype="F8_E5M2", shape=axes)])
        stores.append(one.make_store(tmp_path / axes[0], one.samples({"train/8x20": 4})))
    with pytest.raises(FingerprintError, match=r"buckets\.train/8x20\.axes is .*mels.* in the first and .*height_px"):
        Loader(stores, LoaderConfig(batch_size=2))
    with pytest.raises(FingerprintError, match=r"buckets\.train/8x20\.axes = .*mels"):
        merge(tmp_path / "no", [store.path for store in stores])


def test_repair_keeps_the_rows_that_can_be_read(form: tuple[Form, dict[str, int]], tmp_path: Path) -> None:
    made, rows = form
    items = made.samples(rows)
    store = made.make_store(tmp_path / "s", items)
    bucket = store.bucket(items[0].bucket)
    place = bucket.locate(np.array([2])).offsets(bucket.spec, "mask")
    flip_bit(store.shards[0].paths.lmdb, 8 * int(place[0]))
    (fault,) = [fault for fault in verify(store, lambda _: None, 1).corrupt if fault.row is not None]
    assert fault.sample == items[2].id
    repair(tmp_path / "s")
    assert not verify(Store.open(tmp_path / "s"), lambda _: None, 1, shards_only=True).corrupt
    made.expect(Store.open(tmp_path / "s"), [item for item in items if item.id != items[2].id])


def test_a_presence_that_is_neither_is_a_fault(tmp_path: Path) -> None:
    store = ANY.make_store(tmp_path / "s", ANY.samples({"train/64x64": 3}))
    bucket = store.bucket("train/64x64")
    spec, located = bucket.spec, bucket.locate(np.array([1]))
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    row = {column.name: bucket.read(np.array([1]), column.name).tobytes() for column in spec.columns}
    row["present/mask"] = b"\x07"
    changed = {"present/mask": b"\x07", "checksum": row_checksum(spec, row).to_bytes(8, "little")}
    for name, value in changed.items():
        at = int(located.offsets(spec, name)[0])
        data[at : at + len(value)] = value
    path.write_bytes(data)
    errors = [fault.error for fault in verify(store, lambda _: None, 1).corrupt]
    assert "the row's present/mask is 7, expected 0 or 1" in errors


def test_commands_show_and_export_every_column(form: tuple[Form, dict[str, int]], tmp_path: Path) -> None:
    made, rows = form
    columns, items = made.columns, made.samples(rows)
    made.make_store(tmp_path / "s", items)
    report = call("store", "info", tmp_path / "s", "--json").json
    assert report["format_version"] == 1
    for bucket in report["buckets"]:
        assert bucket["name"] == f"{bucket['split']}/{'x'.join(str(bucket[axis]) for axis in bucket['axes'])}"
        shown = {column["role"]: column for column in bucket["columns"].values() if "role" in column}
        assert {role: (column["dtype"], column["optional"]) for role, column in shown.items()} == {
            column.role: (column.dtype, column.optional) for column in columns
        }
    told = call("store", "info", tmp_path / "s").out
    assert all(column.role in told for column in columns)
    assert "mask (optional)" in told
    listed = call("store", "ls", tmp_path / "s").out.splitlines()
    assert sorted(listed) == sorted(f"{item.id}\t{item.bucket}" for item in items)
    assert call("store", "get", tmp_path / "s", items[1].id, "-o", tmp_path / "one").code == 0
    assert call("store", "export", tmp_path / "s", tmp_path / "all", "--format", "safetensors").code == 0
    lines = [json.loads(line) for line in (tmp_path / "all" / "samples.jsonl").read_text().splitlines()]
    files = {line["id"]: (tmp_path / "all" / line["file"]).read_bytes() for line in lines}
    assert files[items[1].id] == (tmp_path / "one").read_bytes()
    assert files.keys() == {item.id for item in items}
    wanted = [column for column in columns if column.dtype in ("F16", "U8", "F32", "BOOL")]
    for item in items:
        tensors = load(files[item.id]) if columns is VIDEO else {}
        for column in wanted if tensors else []:
            if column.role in item.columns:
                assert np.array_equal(tensors[column.name], item.columns[column.role])
    shutil.rmtree(tmp_path / "all")


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = ANY.make_store(tmp_path / "s", ANY.samples({"train/64x64": 1}))
    with pytest.raises(StoreError, match=r"train/64x64 has no column 'depth'; it has .*control/depth"):
        store.bucket("train/64x64").read(np.array([0]), "depth")
    assert ANY_ENCODERS.keys() == store.manifest.encoders.keys()


def test_verify_names_the_damaged_line_where_nothing_names_it_more_exactly(tmp_path: Path) -> None:
    form = Form(columns=[RowColumn(role="target", dtype="U8", shape=("length",))])
    store = form.make_store(tmp_path / "s", form.samples({f"train/{3 << 20}": 4}))
    assert not verify(store, lambda _: None, 1).corrupt
    shard = store.shards[0]
    flip_bit(shard.paths.lmdb, 8 * (shard.entry.lmdb.num_bytes - 1))  # behind all blocks
    damaged, digest = [fault.error for fault in verify(store, lambda _: None, 1).corrupt]
    assert damaged == f"{shard.paths.lmdb.name}: bytes 8388608 to 16777216 do not match the checksum of their line"
    assert "has the digest" in digest


def test_rebuilt_extents_have_the_checksums_of_the_lines(tmp_path: Path) -> None:
    items = ANY.samples({"train/64x64": 6})
    store = ANY.make_store(tmp_path / "s", items)
    path = store.shards[0].paths.extents
    before = path.read_bytes()
    flip_bit(path, 8 * (len(before) - 5))
    assert verify(Store.open(store.path), lambda _: None, 1).corrupt
    repair(tmp_path / "s")
    assert path.read_bytes() == before
    check(Store.open(tmp_path / "s"), items)
