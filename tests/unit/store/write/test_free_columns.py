"""Columns of any dtype, shape and role: every bit comes back, every command does its work, and what does not fit is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, FingerprintError, UsageError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.store import Axis, LatentColumn, RowColumn, Store, StoreWriter
from bucketline.store.change.merge import merge
from bucketline.store.change.repair import repair
from bucketline.store.format.block import DTYPES
from bucketline.store.format.manifest import parse_manifest
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.kit import (
    ANY,
    ANY_ENCODERS,
    FRAMES,
    HEIGHT,
    IMAGE_COLUMNS,
    WIDTH,
    Form,
    Sample,
    every_dtype,
    everything,
    faults,
    flip_bit,
    flip_row,
    read_with_safetensors,
)

ROWS = {"train/64x64": 9, "train/64x96": 4, "val/64x64": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ANY.make_store(tmp_path_factory.mktemp("free") / "s", ANY.samples(ROWS))


def check(store: Store, items: list[Sample], form: Form = ANY) -> None:
    assert not faults(store)
    form.expect(store, items)


def test_columns_of_seven_roles_come_back_bit_for_bit(made: Store) -> None:
    check(made, ANY.samples(ROWS))
    manifest = made.manifest
    assert manifest.columns["latent"].role == "target"
    assert manifest.columns["control/depth"].encoder == "depth"
    assert {name for name, column in manifest.columns.items() if column.optional} == {
        *("control/depth", "control/depth/flipped", "mask")
    }
    assert made.bucket("train/64x96").axes == {"height_px": 64, "width_px": 96}


def test_every_dtype_comes_back_bit_for_bit_in_buckets_of_one_axis(tmp_path: Path) -> None:
    form = every_dtype()
    assert {column.dtype for column in form.columns} == set(DTYPES)
    items = form.samples({"train/2": 5, "train/750": 4})
    store = form.make_store(tmp_path / "s", items)
    check(store, items, form)
    assert store.sample(items[0].id)[1].original_size == (0, 0)


def test_video_goes_to_buckets_of_frames_height_and_width(tmp_path: Path) -> None:
    columns = [
        RowColumn(role="target", dtype="BF16", shape=(2, FRAMES, HEIGHT, WIDTH)),
        RowColumn(role="control/first", dtype="U8", shape=("height_px", "width_px", 3)),
    ]
    form = Form(columns=columns)
    items = form.samples({"train/81x16x24": 3, "train/1x16x24": 2})
    store = form.make_store(tmp_path / "s", items)
    check(store, items, form)
    bucket = store.bucket("train/81x16x24")
    assert bucket.axes == {"frames": 81, "height_px": 16, "width_px": 24}
    assert (bucket.height_px, bucket.width_px) == (16, 24)
    assert bucket.spec.column("latent").shape == (2, 21, 2, 3)
    assert store.sample("train/1x16x24/0")[1].original_size == (16, 24)


def test_images_latents_alone_need_no_roles(tmp_path: Path) -> None:
    latent = np.ones((4, 8, 12), dtype=np.float16)
    target = [RowColumn(role="target", dtype="F16", shape=(4, HEIGHT, WIDTH))]
    for number, columns in enumerate(([LatentColumn(channels=4)], target)):
        with StoreWriter(tmp_path / str(number), columns=columns) as writer:
            writer.add("a.png", "train", {columns[0].role: latent})
            writer.add("b.png", "train/64x96", {"latent": latent})
        assert writer.manifest.columns == {}
        assert Store.open(tmp_path / str(number)).bucket("train/64x96").num_rows == 2


def test_tensors_are_taken_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "target": torch.randn(2, 6).to(torch.bfloat16),
        "features/a": torch.randn(6).to(torch.float8_e4m3fn),
        "features/b": torch.randn(6).to(torch.float8_e5m2),
        "features/c": torch.randn(6, requires_grad=True),
        "mask": torch.randn(6) > 0,
    }
    dtypes = ("BF16", "F8_E4M3", "F8_E5M2", "F32", "BOOL")
    shapes: list[tuple[int | str, ...]] = [(2, "length"), *[("length",)] * 4]
    columns = [RowColumn(role=r, dtype=d, shape=s) for r, d, s in zip(tensors, dtypes, shapes, strict=True)]
    with StoreWriter(tmp_path / "s", columns=columns) as writer:
        writer.add("a", "train", tensors)
        with pytest.raises(UsageError, match=r"column 'features/a' .* takes F8_E4M3 \[6\], got float32"):
            writer.add("b", "train", {**tensors, "features/a": torch.randn(6)})
    ((found,),) = everything(Store.open(tmp_path / "s")).values()
    for column in columns:
        expected = tensors[column.role].detach().view(torch.uint8).numpy().tobytes()
        assert found.columns[column.name] == expected, column.role


NAN_BITS = {
    "F64": 0x7FF8 << 48,
    "F32": 0x7FC00000,
    "F16": 0x7C00,
    "BF16": 0xFF80,
    "F8_E4M3": 0xFF,
    "F8_E5M2": 0xFC,
    "F8_E8M0": 0xFF,
    "F8_E4M3FNUZ": 0x80,
    "F8_E5M2FNUZ": 0x80,
    "C64": 0x7F800000 << 32,
}


@pytest.mark.parametrize("dtype", NAN_BITS)
def test_what_is_not_finite_is_refused_by_name_unless_it_is_allowed(dtype: str, tmp_path: Path) -> None:
    size = DTYPES[dtype].itemsize
    value = np.zeros(4, dtype=f"u{size}")
    zeros = value.view(DTYPES[dtype])
    spoilt = value.copy()
    spoilt[2] = NAN_BITS[dtype]
    for allowed in (False, True):
        columns = [RowColumn(role="target", dtype=dtype, shape=("length",), allow_nonfinite=allowed)]
        with StoreWriter(tmp_path / str(allowed), columns=columns) as writer:
            writer.add("fine", "train", {"target": zeros})
            if allowed:
                writer.add("bad", "train", {"target": spoilt.view(DTYPES[dtype])})
            else:
                with pytest.raises(UsageError, match="sample 'bad': column 'latent' is NaN or infinite"):
                    writer.add("bad", "train", {"target": spoilt.view(DTYPES[dtype])})


def image(**changes: Any) -> dict[str, Any]:
    columns = {**ANY.sample("x", "train/64x96").columns, **changes}
    return {role: value for role, value in columns.items() if value is not None}


REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "two widths": (
        ("train", image(mask=np.zeros((64, 90), "u1"))),
        "'x': by .* 'mask' its width_px is 90, by that of 'target' 96",
    ),
    "too few dimensions": (("train", image(target=np.zeros((8, 12), "f2"))), r"'target' has the shape \[8, 12\], expected \[2"),
    "another fixed dimension": (("train", image(**{"features/dino": np.zeros(6, "u1")})), r"takes F8_E4M3 \[5\], got .* \[6\]"),
    "a column less": (("train", image(audio=None)), "'x' has the columns .*, expected .*'audio'"),
    "only a mirror image": (
        ("train", image(**{"control/depth": None})),
        "'control/depth/flipped' without 'control/depth'; give both",
    ),
    "no mirror image": (("train", image(**{"control/depth/flipped": None})), "has the column 'control/depth' without"),
    "another bucket than that of the shapes": (("train/64x64", image()), r"bucket train/64x64 takes"),
    "no split": (("test", image()), "'test' is not a bucket; expected train or val, and height x width"),
    "a bucket of other axes": (("train/64", image()), "'train/64' is not a bucket"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_does_not_fit_is_refused_and_the_writer_continues(case: str, tmp_path: Path) -> None:
    (split, columns), words = REFUSED[case]
    with ANY.writer(tmp_path / "s") as writer:
        with pytest.raises(UsageError, match=words):
            writer.add("x", split, columns)
        ANY.add(writer, ANY.samples({"train/64x96": 2}))
    check(Store.open(tmp_path / "s"), ANY.samples({"train/64x96": 2}))


def column(**changes: Any) -> RowColumn:
    return RowColumn(**{"role": "target", "dtype": "F16", "shape": (4, "length"), **changes})


FORMS: dict[str, tuple[Callable[[], list[RowColumn]], str]] = {
    "a strange role": (lambda: [column(role="depth")], "'depth' is not a column's role; expected target, mask"),
    "a role of two names": (lambda: [column(role="control/a/b")], "'control/a/b' is not a column's role"),
    "a role named flipped": (lambda: [column(role="control/flipped")], "'control/flipped' is not a column's role"),
    "a strange dtype": (lambda: [column(dtype="F4")], "column 'target' has the dtype 'F4', expected one of F64"),
    "a strange axis": (lambda: [column(shape=(Axis(name="Länge"),))], "has the impossible axis"),
    "a role twice": (lambda: [column(), column()], "expected each of them once"),
    "no axis": (lambda: [column(shape=(4,))], "no column has an axis"),
    "only the mirror image": (lambda: [column(role="target/flipped")], "'target/flipped' has no counterpart"),
    "another mirror image": (
        lambda: [column(), column(role="target/flipped", optional=True)],
        "'target/flipped' has no counterpart",
    ),
    "an encoder that is not described": (lambda: [column(encoder="clip")], "names the encoder 'clip', encoders has"),
}


@pytest.mark.parametrize("case", FORMS)
def test_columns_that_do_not_go_together_are_refused(case: str, tmp_path: Path) -> None:
    form, words = FORMS[case]
    with pytest.raises(UsageError, match=words):
        StoreWriter(tmp_path / "s", columns=form(), encoders=ANY_ENCODERS)
    assert not (tmp_path / "s").exists()


OTHERS: dict[str, tuple[list[RowColumn], str]] = {
    "a role less": ([*IMAGE_COLUMNS[:-1]], r"columns\.audio"),
    "no longer optional": (
        [*IMAGE_COLUMNS[:4], RowColumn(role="mask", dtype="U8", shape=("height_px", "width_px")), *IMAGE_COLUMNS[5:]],
        r"columns\.mask\.optional = True, this run has False",
    ),
    "of images' latents": ([*IMAGE_COLUMNS[:2]], r"the store was made with columns\.audio"),
    "another dtype": (
        [*IMAGE_COLUMNS[:-1], RowColumn(role="audio", dtype="F64", shape=(700,))],
        r"audio\.dtype = F32, this run has F64",
    ),
    "other axes": (
        [*IMAGE_COLUMNS[:-1], RowColumn(role="audio", dtype="F32", shape=(700, "seconds"))],
        r"buckets\.train/64x64\.axes = \['height_px', 'width_px'\], this run has .*'seconds'",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_store_of_other_columns_is_refused(case: str, made: Store) -> None:
    columns, words = OTHERS[case]
    before = (made.path / "manifest.json").read_bytes()
    with pytest.raises(FingerprintError, match=words), Form(columns=columns).writer(made.path):
        raise AssertionError
    assert (made.path / "manifest.json").read_bytes() == before


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no table of columns": (lambda d: d.pop("columns"), "lacks the field 'columns'"),
    "an empty one, of video": (
        lambda d: [
            d.update(columns={}, shards=[]),
            d["buckets"][0].update(axes=[{"name": "frames", "size": 1}], name="train/1"),
        ],
        "bucket train/1 is not one of images",
    ),
    "a bucket with a height of its own": (lambda d: d["buckets"][0].update(height_px=64), "unknown field 'height_px'"),
    "a role that is not the name's": (lambda d: d["columns"]["mask"].update(role="audio"), "'mask' has the role 'audio'"),
    "a strange role": (lambda d: d["columns"].update(x=d["columns"]["mask"]), "column 'x' has the role 'mask'"),
    "a lonely mirror image": (lambda d: d["columns"].pop("control/depth"), "'control/depth/flipped' has no counterpart"),
    "an unknown encoder": (lambda d: d["encoders"].pop("depth"), "names the encoder 'depth', encoders has ['codec', 'vae']"),
    "a column less in a bucket": (lambda d: d["columns"].pop("audio"), "has the column 'audio', which has no role"),
    "a presence of none": (lambda d: d["columns"]["mask"].update(optional=False), "'present/mask', which has no role"),
    "an axis twice": (lambda d: d["buckets"][0]["axes"][0].update(name="width_px"), "has axes of the names"),
    "another size": (lambda d: d["buckets"][0]["axes"][0].update(size=8), "is not the name of a bucket of train, 8x"),
    "an axis less": (lambda d: d["buckets"][0]["axes"].pop(), "is not the name of a bucket of train, 64"),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_damaged_manifest_is_refused_by_field(case: str, made: Store) -> None:
    change, words = EDITS[case]
    document = json.loads((made.path / "manifest.json").read_bytes())
    change(document)
    with pytest.raises(CorruptError, match=f"item is damaged.*{re.escape(words)}"):
        parse_manifest(json.dumps(document).encode(), "item")


VIDEO = (
    RowColumn(role="target", dtype="F16", shape=(2, FRAMES, HEIGHT, WIDTH), encoder="vae"),
    RowColumn(role="mask", dtype="BOOL", shape=("frames",), optional=True),
)
KINDS = {
    "images": (ANY, {"train/64x64": 11, "val/64x96": 5}),
    "video": (Form(columns=VIDEO), {"train/9x16x16": 8, "train/1x16x24": 5}),
}


@pytest.fixture(params=KINDS)
def form(request: pytest.FixtureRequest) -> tuple[Form, dict[str, int]]:
    return KINDS[request.param]


def test_merge_and_mix_stores_of_the_same_columns_only(form: tuple[Form, dict[str, int]], tmp_path: Path) -> None:
    made, rows = form
    stores = [made.make_store(tmp_path / name, made.samples(rows, f"{name}/")) for name in "ab"]
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
    flip_row(store, items[0].bucket, 2, "mask")
    (fault,) = [fault for fault in faults(store) if fault.row is not None]
    assert fault.sample == items[2].id
    repair(tmp_path / "s")
    assert not verify(Store.open(tmp_path / "s"), lambda _: None, 1, shards_only=True).corrupt
    made.expect(Store.open(tmp_path / "s"), [item for item in items if item.id != items[2].id])


def test_commands_show_and_export_every_column(form: tuple[Form, dict[str, int]], tmp_path: Path) -> None:
    made, rows = form
    items = made.samples(rows)
    made.make_store(tmp_path / "s", items)
    for bucket in call("store", "info", tmp_path / "s", "--json").json["buckets"]:
        assert bucket["name"] == f"{bucket['split']}/{'x'.join(str(bucket[axis]) for axis in bucket['axes'])}"
        shown = {column["role"]: column for column in bucket["columns"].values() if "role" in column}
        assert {role: (column["dtype"], column["optional"]) for role, column in shown.items()} == {
            column.role: (column.dtype, column.optional) for column in made.columns
        }
    told = call("store", "info", tmp_path / "s").out
    assert all(column.role in told for column in made.columns)
    assert "mask (optional)" in told
    assert call("store", "export", tmp_path / "s", tmp_path / "all", "--format", "safetensors").code == 0
    lines = [json.loads(line) for line in (tmp_path / "all" / "samples.jsonl").read_text().splitlines()]
    files = {line["id"]: read_with_safetensors((tmp_path / "all" / line["file"]).read_bytes()) for line in lines}
    assert files.keys() == {item.id for item in items}
    for item in items:
        for column in made.columns:
            if column.role in item.columns:
                assert bytes(files[item.id][column.name]["data"]) == item.columns[column.role].tobytes()


def test_verify_names_the_damaged_line_where_nothing_names_it_more_exactly(tmp_path: Path) -> None:
    form = Form(columns=[RowColumn(role="target", dtype="U8", shape=("length",))])
    store = form.make_store(tmp_path / "s", form.samples({f"train/{3 << 20}": 4}))
    assert not faults(store)
    shard = store.shards[0]
    flip_bit(shard.paths.lmdb, 8 * (shard.entry.lmdb.num_bytes - 1))  # behind all blocks
    damaged, digest = [fault.error for fault in faults(store)]
    assert damaged == f"{shard.paths.lmdb.name}: bytes 8388608 to 16777216 do not match the checksum of their line"
    assert "has the digest" in digest
