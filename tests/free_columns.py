"""Stores of columns of any kind: what is put in, drawn from a name, and what comes out, by sample."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.store import Axis, Column, RowColumn, Store, StoreWriter
from bucketline.store.format.columns import PRESENT_PREFIX
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.write.row_form import sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import PartWriter

TOKEN_WIDTH = 3
HEIGHT, WIDTH = Axis(name="height_px", step=8), Axis(name="width_px", step=8)
FRAMES = Axis(name="frames", step=4, first=1)
IMAGE_COLUMNS = (
    RowColumn(role="target", dtype="F16", shape=(2, HEIGHT, WIDTH), encoder="vae"),
    RowColumn(role="target/flipped", dtype="F16", shape=(2, HEIGHT, WIDTH), encoder="vae"),
    RowColumn(role="control/depth", dtype="BF16", shape=(1, HEIGHT, WIDTH), optional=True, encoder="depth"),
    RowColumn(role="control/depth/flipped", dtype="BF16", shape=(1, HEIGHT, WIDTH), optional=True, encoder="depth"),
    RowColumn(role="mask", dtype="U8", shape=("height_px", "width_px"), optional=True),
    RowColumn(role="features/dino", dtype="F8_E4M3", shape=(5,)),
    RowColumn(role="audio", dtype="F32", shape=(700,)),
)
ENCODERS = {"vae": {"scaling_factor": 0.5}, "depth": {"name": "a depth model", "weights_hash": "12ab"}}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One sample as it is put in: its arrays by role, without those that it lacks, and its captions."""

    id: str
    bucket: str
    columns: dict[str, NDArray[Any]]
    captions: tuple[str, ...] = field(default=())


def bits(name: str, column: Column) -> NDArray[Any]:
    """Return any bits that a column can hold, drawn from a name: NaN and infinite values among them."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {column.name}".encode()).digest()[:8], "little")
    data = np.random.default_rng(seed).integers(0, 256, column.row_bytes, dtype="u1")
    if column.dtype == "BOOL":
        data &= 1
    return data.view(column.numpy_dtype).reshape(column.shape)


def values(name: str, column: Column) -> NDArray[Any]:
    """Return finite values: of floats small ones, as bits where numpy lacks the dtype."""
    drawn = bits(name, column)
    if column.dtype in ("F64", "F32", "F16"):
        return np.nan_to_num(drawn.view(f"i{column.item_bytes}").astype(column.numpy_dtype) / 128)
    return drawn & 0x3F if column.dtype.startswith(("BF", "F8")) else drawn


def make_item(
    name: str, bucket: str, columns: Sequence[RowColumn], *, without: Iterable[str] = (), captions: tuple[str, ...] = ()
) -> Item:
    """Return a sample of a bucket whose values follow from its id. `without`: roles that it lacks."""
    axes = tuple(dict.fromkeys(axis.name for column in columns for axis in column.axes))
    sizes = sizes_of(bucket, axes)
    drawn = {c.role: (bits if c.allow_nonfinite else values)(name, c.in_sizes(bucket, sizes)) for c in columns}
    lacking = {role + suffix for role in without for suffix in ("", "/flipped")}
    return Item(id=name, bucket=bucket, columns={k: v for k, v in drawn.items() if k not in lacking}, captions=captions)


def items_of(rows: Mapping[str, int], columns: Sequence[RowColumn] = IMAGE_COLUMNS, prefix: str = "") -> list[Item]:
    """Return samples of each bucket. Of the optional columns every third row lacks the first, every fifth all."""
    optional = [column.role for column in columns if column.optional and not column.role.endswith("/flipped")]
    made = []
    for bucket, count in rows.items():
        for n in range(count):
            without = optional if n % 5 == 4 else optional[:1] if n % 3 == 2 else ()
            captions = tuple(f"{'very ' * k}number {n}" for k in range(n % 3))
            made.append(make_item(f"{prefix}{bucket}/{n}", bucket, columns, without=without, captions=captions))
    return made


def tokens_of(text: str) -> NDArray[Any]:
    """Return a caption's tokens, one for each word and one more."""
    column = Column(name="tokens", dtype="F16", shape=(len(text.split()) + 1, TOKEN_WIDTH))
    return values(text, column)


def free_writer(path: Path, columns: Sequence[RowColumn] = IMAGE_COLUMNS, **more: Any) -> StoreWriter:
    text: dict[str, Any] = {
        "text": [Column(name="tokens", dtype="F16", shape=(TOKEN_WIDTH,))],
        "empty_caption": {"tokens": tokens_of("")},
    }
    return StoreWriter(path, columns=columns, **{"encoders": ENCODERS, **text, "max_captions": 3, **more})


def add_items(writer: PartWriter, items: Iterable[Item], *, commit_every: int = 7) -> None:
    """Add samples, each to the bucket that follows from its shapes, and commit now and then."""
    for n, item in enumerate(items, 1):
        captions = {text: {"tokens": tokens_of(text)} for text in item.captions}
        writer.add(item.id, item.bucket.partition("/")[0], item.columns, captions)
        if n % commit_every == 0:
            writer.commit()


def make_free_store(path: Path, *shards: Sequence[Item], columns: Sequence[RowColumn] = IMAGE_COLUMNS, **more: Any) -> Store:
    """Make a store of the given shards, each published as a generation of its own."""
    with free_writer(path, columns, **more) as writer:
        for items in shards:
            add_items(writer, items)
            writer.publish()
    return Store(path, writer.manifest)


def stored_items(store: Store) -> dict[str, Item]:
    """Return all live samples by id, every row held against its checksum, absent values held against zeros."""
    roles, ordinals = store.manifest.columns, {shard.name: n for n, shard in enumerate(store.shards)}
    found = {}
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        own = {column.name: bucket.read(rows, column.name, verify=True) for column in bucket.columns}
        for n, sample_id in enumerate(bucket.sample_ids(rows)):
            columns = {}
            for name, entry in roles.items():
                if entry.optional and not own[PRESENT_PREFIX + name][n]:
                    assert not any(own[name][n].tobytes())
                else:
                    columns[entry.role] = own[name][n]
            shard, record = store.sample(sample_id)
            for text, row in zip(record.captions, record.caption_rows if record.captions else (), strict=True):
                stored = store.read_caption(ordinals[shard.name], row)["tokens"]
                assert stored.tobytes() == tokens_of(text).tobytes()
            found[sample_id] = Item(id=sample_id, bucket=bucket.name, columns=columns, captions=record.captions)
    return found


def expect_same(found: Mapping[str, Item], items: Iterable[Item]) -> None:
    """See that exactly these samples are there, bit for bit."""
    expected = {item.id: item for item in items}
    assert found.keys() == expected.keys()
    for name, item in expected.items():
        own = found[name]
        assert (own.bucket, own.captions, own.columns.keys()) == (item.bucket, item.captions, item.columns.keys()), name
        for role, value in item.columns.items():
            stored = own.columns[role]
            assert (stored.dtype, stored.shape) == (value.dtype, value.shape), (name, role)
            assert stored.tobytes() == value.tobytes(), (name, role)


def every_dtype() -> list[RowColumn]:
    """Return a column of each dtype, of a few shapes, all of which take any bits."""
    shapes: list[tuple[int | str | Axis, ...]] = [(2, "length"), (), (3,), (Axis(name="length", step=2),)]
    return [
        RowColumn(role=f"features/{dtype}", dtype=dtype, shape=shapes[n % 4], optional=n % 3 == 0, allow_nonfinite=True)
        for n, dtype in enumerate(DTYPES)
    ]
