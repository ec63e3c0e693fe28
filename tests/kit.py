"""The kit of the tests: a form of store, samples drawn from their ids, a store of both, and a comparison of what it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from bucketline.store import (
    Axis,
    BlockSpec,
    Column,
    LatentColumn,
    MaskColumn,
    PartWriter,
    RaggedGroup,
    ReferenceColumn,
    RowColumn,
    SampleRecord,
    Store,
    StoreWriter,
    TextSpec,
    new_record,
    with_flipped,
)
from bucketline.store.format.block import CAPTIONS as CAPTION_ROWS
from bucketline.store.format.block import (
    CHECKSUM,
    DTYPES,
    PRESENT_PREFIX,
    TARGET,
    bytes_digest,
    caption_digest,
    fixed_columns,
    identity,
)
from bucketline.store.format.manifest import DroppedEntry, Manifest, dropped_path, read_manifest, sealed, write_manifest
from bucketline.store.format.schema import Schema, text_entry
from bucketline.store.format.text import TEXT_GROUP, Caption, dequantise, make_caption, quantise, quantised_spec
from bucketline.store.shard.meta import META_FORMAT, index_dtype
from bucketline.store.shard.sidecar import Sidecar
from bucketline.store.verify.shard import Fault
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import new_manifest, prepare_store
from bucketline.store.write.row_form import sizes_of
from bucketline.store.write.shard_writer import ShardWriter
from tests.independent_reader import read_store

Arrays = dict[str, NDArray[Any]]

MAX_CAPTIONS = 3
TOKEN_WIDTH, POOLED_WIDTH = 5, 6
TEXT = TextSpec(tokens=(Column(name="tokens", dtype="F16", shape=(TOKEN_WIDTH,)),))
CAPTIONS = ("a red barn", "snow", "two boats under a grey sky at noon", "")
FLOATS: dict[str, Any] = {"F16": "<f2", "F32": "<f4", "BF16": "<u2"}
ENCODERS: dict[str, Any] = {"vae": {"scaling_factor": 0.18215}, "text_encoder": {"width": TOKEN_WIDTH}}
RULES: dict[str, Any] = {"grid": "made by hand"}
SHARD_BYTES = 1 << 24

HEIGHT, WIDTH = Axis(name="height_px", step=8), Axis(name="width_px", step=8)
FRAMES = Axis(name="frames", step=4, first=1)
LENGTH = (RowColumn(role="target", dtype="F16", shape=(2, "length")),)
IMAGE_COLUMNS = (
    RowColumn(role="target", dtype="F16", shape=(2, HEIGHT, WIDTH), encoder="vae"),
    RowColumn(role="target/flipped", dtype="F16", shape=(2, HEIGHT, WIDTH), encoder="vae"),
    RowColumn(role="control/depth", dtype="BF16", shape=(1, HEIGHT, WIDTH), optional=True, encoder="depth"),
    RowColumn(role="control/depth/flipped", dtype="BF16", shape=(1, HEIGHT, WIDTH), optional=True, encoder="depth"),
    RowColumn(role="mask", dtype="U8", shape=("height_px", "width_px"), optional=True),
    RowColumn(role="features/dino", dtype="F8_E4M3", shape=(5,)),
    RowColumn(role="audio", dtype="F32", shape=(700,)),
)
ANY_ENCODERS = {
    "vae": {"scaling_factor": 0.5},
    "depth": {"name": "a depth model", "weights_hash": "12ab"},
    "codec": {"name": "a codec"},
}
AUDIO = RaggedGroup(
    columns=[Column(name="latent", dtype="BF16", shape=(3, 2)), Column(name="loud", dtype="BOOL", shape=())],
    fixed=[Column(name="rate", dtype="I32", shape=())],
    optional=True,
    encoder="codec",
)
POINTS = RaggedGroup(columns=[Column(name="xyz", dtype="F32", shape=(3,))], stored_once=False, mirrored="same")
LLAMA = RaggedGroup(columns=[Column(name="hidden", dtype="F16", shape=(7,))], of="captions")
GROUPS = {"audio": AUDIO, "points": POINTS, "llama": LLAMA}
PAIR_COLUMNS = with_flipped(
    [LatentColumn(channels=2), *(ReferenceColumn(n, channels=2) for n in range(3)), MaskColumn()]  # 0 to 3 references
)
SEEN = {
    "seen_images": RaggedGroup(columns=[Column(name="is_image", dtype="U8", shape=()), *TEXT.tokens]),
    "seen_empty": RaggedGroup(columns=TEXT.tokens),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample to be packed, with everything that must come back."""

    id: str
    bucket: str
    columns: Mapping[str, NDArray[Any]]  # by role, without those that it lacks
    captions: tuple[str, ...]
    record: SampleRecord

    @property
    def latent(self) -> NDArray[Any]:
        return self.columns[TARGET]


@dataclass(frozen=True, kw_only=True)
class Held:
    """One sample as a store gives it; what depends on the shard it is in is followed, not kept."""

    record: SampleRecord  # without row and caption rows
    columns: dict[str, bytes]  # without checksum and caption rows
    captions: tuple[bytes, ...]  # each caption's columns, in the row's order
    entries: Mapping[str, list[Any]] = field(default_factory=dict)  # by ragged group: of each caption, or of the row


# what is drawn from a name


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "little")


def bits(name: str, column: Column) -> NDArray[Any]:
    """Return any bits that a column can hold: NaN and infinite values among them."""
    data = np.random.default_rng(seed_of(f"{name} {column.name}")).integers(0, 256, column.row_bytes, dtype="u1")
    if column.dtype == "BOOL":
        data &= 1
    return data.view(column.numpy_dtype).reshape(column.shape)


def values(name: str, column: Column) -> NDArray[Any]:
    """Return finite values: of floats small ones, as bits where numpy lacks the dtype."""
    drawn = bits(name, column)
    if column.dtype in ("F64", "F32", "F16"):
        return np.nan_to_num(drawn.view(f"i{column.item_bytes}").astype(column.numpy_dtype) / 128)
    return drawn & 0x3F if column.dtype.startswith(("BF", "F8")) else drawn


def embedding(caption: str) -> NDArray[np.float16]:
    """Return what stands for a caption's tokens, `[T, D]`: one per word, and one more."""
    return np.random.default_rng(seed_of(caption)).normal(size=(len(caption.split()) + 1, TOKEN_WIDTH)).astype("<f2")


def loud_tokens(text: str, width: int) -> NDArray[np.float32]:
    """Return tokens that are to be quantised, `[T, D]`: one per word and one more, with a large channel."""
    tokens = np.random.default_rng(seed_of(text)).normal(size=(len(text.split()) + 1, width)).astype("<f4")
    tokens[:, 3] *= 50
    return tokens


def after_images(caption: str) -> Arrays:
    """Return a caption's tokens in a store that sees images: those after the images; the empty caption has none."""
    return {"tokens": embedding(caption) if caption else np.zeros((0, TOKEN_WIDTH), "<f2")}


def spec_of(bucket: str, dtype: str = "F16") -> BlockSpec:
    """Return a bucket's columns: two latent channels, an eighth of the size."""
    latent = LatentColumn(channels=2, dtype=dtype).in_bucket(bucket)
    return BlockSpec(bucket=bucket, columns=(*fixed_columns(MAX_CAPTIONS), latent))


def make_sample(sample_id: str, bucket: str, captions: tuple[str, ...] = (), dtype: str = "F16", version: int = 0) -> Sample:
    """Make a sample of an image whose values depend only on its id and version."""
    random = np.random.default_rng(seed_of(f"{version}:{sample_id}"))
    shape = spec_of(bucket).column("latent").shape
    latent = (
        random.integers(0, 1 << 16, shape).astype("<u2") & 0xBFFF  # below 2, so never NaN
        if dtype == "BF16"
        else random.normal(size=shape).astype(FLOATS[dtype])
    )
    height, width = (int(side) for side in random.integers(64, 4000, 2))
    size = new_record(sample_id, bucket, captions)
    box_height, box_width = size.resized
    record = replace(
        size,
        source_bytes=int(random.integers(1, 1 << 30)),
        source_mtime_ns=int(random.integers(1, 1 << 60)),
        content=identity(f"{version}:{sample_id}".encode("utf-8", "surrogateescape")),
        original_size=(height, width),
        resized=(box_height + 4, box_width + 2),
        crop=(2, 1, box_height, box_width),
        crop_in_source=(0, 0, height, width),
    )
    return Sample(id=sample_id, bucket=bucket, columns={TARGET: latent}, captions=captions, record=record)


def samples_of(rows: Mapping[str, int], prefix: str = "", dtype: str = "F16") -> list[Sample]:
    """Make samples of images for each bucket, `{bucket: rows}`, with none to four captions each."""
    return [
        make_sample(f"{prefix}{bucket}/{n}.png", bucket, tuple(f"{CAPTIONS[k]} {n % 7}" for k in range(n % 5 % 4)), dtype)
        for bucket, count in rows.items()
        for n in range(count)
    ]


# a form, its stores, and what they hold


def _own_columns(sample: Sample) -> Mapping[str, NDArray[Any]]:
    return sample.columns


def _embed(text: str) -> Arrays:
    return {"tokens": embedding(text)}


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of store: how samples of it are drawn, written and compared. By default it has columns of seven roles."""

    columns: Sequence[RowColumn] = IMAGE_COLUMNS
    encoders: Mapping[str, Any] = field(default_factory=lambda: ANY_ENCODERS)
    groups: Mapping[str, RaggedGroup] = field(default_factory=dict)
    text: TextSpec | None = TEXT
    embed: Callable[[str], Mapping[str, NDArray[Any]]] = _embed  # a caption, as it is given to a writer, without groups
    given: Callable[[Sample], Mapping[str, NDArray[Any]]] = _own_columns  # a sample's arrays by role

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that a loader can request."""
        return tuple(column.role for column in self.columns if not column.role.endswith("/flipped"))

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis.name for column in self.columns for axis in column.axes))

    def groups_of(self, kind: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.of == kind]

    def sample(self, name: str, bucket: str, *, without: Iterable[str] = (), captions: tuple[str, ...] = ()) -> Sample:
        """Return a sample whose arrays follow from its id. `without`: roles that it lacks."""
        sizes, lacking = sizes_of(bucket, self.axes), {role + suffix for role in without for suffix in ("", "/flipped")}
        drawn = {
            column.role: (bits if column.allow_nonfinite else values)(name, column.in_sizes(bucket, sizes))
            for column in self.columns
            if column.role not in lacking
        }
        record = new_record(name, bucket, captions, self.axes)
        return Sample(id=name, bucket=bucket, columns=drawn, captions=captions, record=record)

    def samples(self, rows: Mapping[str, int], prefix: str = "") -> list[Sample]:
        """Return samples of each bucket. Of the optional columns every third row lacks the first, every fifth all."""
        optional = [column.role for column in self.columns if column.optional and not column.role.endswith("/flipped")]
        return [
            self.sample(
                f"{prefix}{bucket}/{n}",
                bucket,
                without=optional if n % 5 == 4 else optional[:1] if n % 3 == 2 else (),
                captions=tuple(f"{'very ' * k}number {n}" for k in range(n % 3)) if self.text else (),
            )
            for bucket, count in rows.items()
            for n in range(count)
        ]

    def caption(self, text: str) -> dict[str, Any]:
        return {**self.embed(text), **{name: entry_of(name, self.groups[name], text) for name in self.groups_of("captions")}}

    def entries(self, sample: Sample) -> dict[str, Arrays | None]:
        return {name: row_entry(name, self.groups[name], sample.id) for name in self.groups_of("rows")}

    def writer(self, path: Path, **more: Any) -> StoreWriter:
        text = {"text": self.text, "empty_caption": self.caption("")} if self.text else {}
        own: dict[str, Any] = {"encoders": self.encoders, "rules": RULES, "max_captions": MAX_CAPTIONS, **text}
        return StoreWriter(path, columns=self.columns, ragged=self.groups, **{**own, "shard_bytes": SHARD_BYTES, **more})

    def add(self, writer: PartWriter, samples: Iterable[Sample], *, commit_every: int = 7) -> None:
        """Add samples and commit now and then; a commit makes a block, so that a bucket has several.

        Of a sample without a record of its own the bucket follows from the shapes of its arrays.
        """
        for n, sample in enumerate(samples, 1):
            captions = {text: self.caption(text) for text in sample.captions}
            entries = {name: entry for name, entry in self.entries(sample).items() if entry is not None}
            if sample.record == new_record(sample.id, sample.bucket, sample.captions, self.axes):
                writer.add(sample.id, sample.record.split, self.given(sample), captions, entries)
            else:
                writer.add_record(sample.record, self.given(sample), captions, entries)
            if n % commit_every == 0:
                writer.commit()

    def part(self, path: Path, name: str) -> PartWriter:
        """Return a writer of shards, `NAME-0` and so on, that publishes nothing and takes no lock of the store."""
        return PartWriter(path, self.writer(path)._form, f"{name}-{{}}", SHARD_BYTES)

    def make_store(self, path: Path, *shards: Sequence[Sample], **more: Any) -> Store:
        """Make a store of the given shards, `g0`, `g1` and so on, each published as a generation of its own."""
        with self.writer(path, **{"shard_names": "g{}", **more}) as writer:
            for samples in shards:
                self.add(writer, samples)
                writer.publish()
        return Store(path, writer.manifest)

    def stored(self, sample: Sample) -> dict[str, bytes]:
        """Return the columns that must come back, by name: zeros of those that it lacks."""
        given, sizes, found = self.given(sample), sizes_of(sample.bucket, self.axes), dict[str, bytes]()
        for column in self.columns:
            has = column.role in given
            found[column.name] = given[column.role].tobytes() if has else bytes(column.in_sizes("", sizes).row_bytes)
            if column.optional:
                found[PRESENT_PREFIX + column.name] = bytes([has])
        return found

    def delivered(self, text: str) -> bytes:
        """Return a caption's columns as readers get them, in the order of their names."""
        if self.text is None:
            return b""
        own = dict(self.embed(text))
        if self.text.is_quantised:
            own["tokens"] = dequantise(quantise(own["tokens"], self.text.tokens[0].dtype))
        return b"".join(own[name].tobytes() for name in sorted(own))

    def held(self, sample: Sample) -> Held:
        texts = sample.captions or ("",)
        entries = {name: [packed(entry)] for name, entry in self.entries(sample).items()}
        for name in self.groups_of("captions"):
            entries[name] = [packed(entry_of(name, self.groups[name], text)) for text in texts[:MAX_CAPTIONS]]
        captions = tuple(self.delivered(text) for text in texts)
        return Held(record=sample.record, columns=self.stored(sample), captions=captions, entries=entries)

    def is_sample(self, held: Held, sample: Sample) -> bool:
        expected = self.held(sample)
        own = {name: value for name, value in held.columns.items() if name in expected.columns}
        return replace(held, columns=own) == expected

    def expect(self, store: Store, samples: Iterable[Sample]) -> None:
        """Compare all live samples of a store with what was put in, bit for bit."""
        found, expected = by_id(store), {sample.id: sample for sample in samples}
        assert found.keys() == expected.keys()
        for name, sample in expected.items():
            assert self.is_sample(found[name], sample), (name, found[name], self.held(sample))
        for bucket in store.buckets():
            for column in self.columns:
                assert bucket.spec.column(column.name) == column.in_sizes(bucket.name, sizes_of(bucket.name, self.axes))


def entry_of(name: str, group: RaggedGroup, key: str) -> Arrays:
    """Return the entry of a caption, or of a row, drawn from its key: 0 to 5 tokens."""
    length, draw = seed_of(f"{name} {key}") % 6, bits if group.allow_nonfinite else values
    found = {c.name: draw(key, replace(c, shape=(length, *c.shape))) for c in group.columns}
    return found | {c.name: draw(key, c) for c in group.fixed}


def row_entry(name: str, group: RaggedGroup, sample_id: str) -> Arrays | None:
    """Return a sample's entry: one of four, so that some are equal; of an optional group none for a third of the samples."""
    number = seed_of(f"{sample_id} of {name}")
    return None if group.optional and number % 3 == 0 else entry_of(name, group, f"{number % 4}")


def packed(entry: Mapping[str, NDArray[Any]] | None) -> dict[str, Any] | None:
    """Return an entry in a form that is compared bit for bit."""
    return None if entry is None else {name: (own.shape, own.tobytes()) for name, own in entry.items() if name != "digest"}


def expect_independently(path: Path, form: Form, samples: Iterable[Sample]) -> None:
    """Compare what the independent reader finds with what was put in."""
    found, expected = read_store(path), {sample.id: form.held(sample) for sample in samples}
    assert found.keys() == expected.keys()
    for name, held in expected.items():
        bucket, columns, record, tokens, entries = found[name]
        assert (bucket, tuple(record["captions"])) == (held.record.bucket, held.record.captions)
        assert {own: columns[own].tobytes() for own in held.columns} == held.columns
        for column in form.columns:
            assert columns[column.name].shape == column.in_sizes(bucket, sizes_of(bucket, form.axes)).shape
        assert not form.text or tuple(own["tokens"].tobytes() for own in tokens) == held.captions
        assert {group: [packed(entry) for entry in own] or [None] for group, own in entries.items()} == held.entries


def everything(store: Store) -> dict[str, list[Held]]:
    """Return all live rows, in order, by bucket; each is held against its checksum, and found by its id and by its number."""
    return {bucket.name: _rows(store, bucket.name) for bucket in store.buckets()}


def by_id(store: Store) -> dict[str, Held]:
    found = [held for rows in everything(store).values() for held in rows]
    assert len({held.record.id for held in found}) == len(found)
    return {held.record.id: held for held in found}


def ids_of(place: Store | Path) -> list[str]:
    store = place if isinstance(place, Store) else Store.open(place)
    return [name for bucket in store.buckets() for name in bucket.sample_ids(np.arange(bucket.num_rows))]


def faults(place: Store | Path) -> tuple[Fault, ...]:
    return verify(place if isinstance(place, Store) else Store.open(place), lambda _: None, 1).corrupt


def _rows(store: Store, name: str) -> list[Held]:
    bucket, groups = store.bucket(name), store.manifest.ragged
    rows = np.arange(bucket.num_rows)
    located, ids = bucket.locate(rows), bucket.sample_ids(rows)
    # a verified read of one column reads its whole row
    columns = {column.name: bucket.read(rows, column.name, verify=column.name == CHECKSUM) for column in bucket.columns}
    held = []
    for n, sample_id in enumerate(ids):
        shard, record = store.sample(sample_id)
        ordinal = int(located.shard[n])
        assert shard is store.shards[ordinal]
        assert (record.id, record.bucket, record.row) == (sample_id, name, int(located.row[n]))
        caption_rows = [row for row in columns[CAPTION_ROWS][n].tolist() if row >= 0]
        assert tuple(caption_rows) == record.caption_rows[: store.manifest.max_captions]
        read = [store.read_caption(ordinal, row) for row in record.caption_rows]
        captions = tuple(b"".join(one[key].tobytes() for key in sorted(one)) for one in read)
        entries = {
            group: [packed(bucket.read_ragged(n, group, k)) for k in range(len(caption_rows) if own.of == "captions" else 1)]
            for group, own in groups.items()
        }
        own = {key: own[n].tobytes() for key, own in columns.items() if key not in (CHECKSUM, CAPTION_ROWS)}
        held.append(Held(record=replace(record, row=0, caption_rows=()), columns=own, captions=captions, entries=entries))
    return held


# forms


def images(dtype: str = "F16", encoders: Mapping[str, Any] = ENCODERS) -> Form:
    return Form(columns=(LatentColumn(channels=2, dtype=dtype),), encoders=encoders)


def quantised(dtype: str, width: int = 72, encoders: Mapping[str, Any] = ENCODERS) -> Form:
    """Return a form of images whose tokens are quantised, with a pooled embedding."""

    def embed(text: str) -> Arrays:
        return {"tokens": loud_tokens(text, width), "pooled": loud_tokens(text, POOLED_WIDTH)[0].astype("<f2")}

    encoder = {**encoders["text_encoder"], "width": width, "stored_dtype": dtype}
    text = quantised_spec(dtype, width, (Column(name="pooled", dtype="F16", shape=(POOLED_WIDTH,)),))
    return replace(images(encoders={**encoders, "text_encoder": encoder}), text=text, embed=embed)


def every_dtype() -> Form:
    """Return a form with a column of each dtype, of a few shapes, all of which take any bits."""
    shapes: list[tuple[int | str | Axis, ...]] = [(2, "length"), (), (3,), (Axis(name="length", step=2),)]
    return Form(
        columns=[
            RowColumn(role=f"features/{dtype}", dtype=dtype, shape=shapes[n % 4], optional=n % 3 == 0, allow_nonfinite=True)
            for n, dtype in enumerate(DTYPES)
        ]
    )


def _columns_of_images(sample: Sample) -> dict[str, NDArray[Any]]:
    """Return arrays that follow from an image's content; of the optional columns some samples lack one, some both."""
    name, sizes = sample.record.content.hex(), sizes_of(sample.bucket, COLUMNS.axes)
    lacks = {"control/depth": sample.record.content[0] % 3 == 0, "mask": sample.record.content[1] % 2 == 0}
    has = [column for column in IMAGE_COLUMNS if not lacks.get(column.role.removesuffix("/flipped"), False)]
    return {**{column.role: values(name, column.in_sizes(sample.bucket, sizes)) for column in has}, **sample.columns}


@cache
def _loud(text: str) -> Arrays:
    return {"tokens": loud_tokens(text, 40)}  # not a multiple of 32, which a scale is for


IMAGES = images()
COLUMNS = Form(text=quantised_spec("I8", 40), embed=_loud, given=_columns_of_images)
FORMS = {"images": IMAGES, "columns": COLUMNS}  # that hold the same samples
ANY = Form()
PAIRS = Form(columns=PAIR_COLUMNS, encoders=ENCODERS)
SEEING = replace(PAIRS, groups=SEEN, embed=after_images)  # the same, whose text sees the images
PAIR_ROWS = {f"train/{size}": 5 for size in ("64x64x0x0x0x0x0x0", "64x96x64x64x0x0x0x0", "64x96x64x64x72x32x8x8")}
RAGGED = Form(columns=LENGTH, groups=GROUPS)
add_samples = IMAGES.add


def store_writer(path: Path, *, dtype: str = "F16", encoders: Mapping[str, Any] = ENCODERS, **more: Any) -> StoreWriter:
    return images(dtype, encoders).writer(path, **more)


def make_store(path: Path, *shards: Sequence[Sample], dtype: str = "F16") -> Store:
    return images(dtype).make_store(path, *shards)


# shards of images and files, by hand


def caption_of(text: str) -> Caption:
    return make_caption(TEXT, caption_digest(text), {"tokens": embedding(text)}, {})


def contents(encoders: Mapping[str, Any] | None = None) -> Schema:
    return Schema(encoders=dict(encoders or ENCODERS), rules=RULES, max_captions=MAX_CAPTIONS, text=text_entry(TEXT))


def open_writer(store: Path, name: str) -> ShardWriter:
    return ShardWriter(store, name, {TEXT_GROUP: TEXT}, {TEXT_GROUP: caption_of("")}, SHARD_BYTES)


def add(writer: ShardWriter, sample: Sample, dtype: str = "F16") -> None:
    for text in sample.captions:
        writer.add_caption({TEXT_GROUP: caption_of(text)})
    writer.add(
        spec=spec_of(sample.bucket, dtype),
        latents={"latent": sample.latent},
        record=sample.record,
        captions=[caption_digest(text) for text in sample.captions] or [caption_digest("")],
    )


def write_shard(store: Path, name: str, samples: Iterable[Sample], *, commit_every: int = 7, dtype: str = "F16") -> None:
    writer = open_writer(store, name)
    for n, sample in enumerate(samples, 1):
        add(writer, sample, dtype)
        if n % commit_every == 0:
            writer.commit()
    writer.seal()


def leave_pending(store: Path, name: str, samples: Iterable[Sample]) -> Path:
    """Leave a pending shard as a run does that is killed after a commit; return its file."""
    writer = open_writer(store, name)
    for sample in samples:
        add(writer, sample)
    writer.commit()
    writer.close()
    return writer.path


def empty_store(path: Path) -> Manifest:
    prepare_store(path)
    return write_manifest(path, new_manifest(contents()))


def rewrite_manifest(store: Path, **changes: Any) -> None:
    """Write a manifest with other values and a right digest, as a program with a defect would."""
    write_manifest(store, sealed(replace(read_manifest(store), **changes)))


def replace_file(store: Path, kind: str, data: bytes) -> None:
    """Write another file of the first shard, and a manifest that has its digest and length. `kind`: `meta` and so on."""
    first, *rest = read_manifest(store).shards
    (store / "shards" / f"{first.name}.{kind}").write_bytes(data)
    changed = replace(first, **{kind: replace(getattr(first, kind), digest=bytes_digest(data), num_bytes=len(data))})
    rewrite_manifest(store, shards=(changed, *rest))


def parts_of(path: Path, kind: str = META_FORMAT) -> tuple[list[tuple[str, str, NDArray[Any]]], dict[str, Any]]:
    """Return a sidecar's tensors, as `encode_sidecar` takes them, and its metadata."""
    file = Sidecar(path, path.read_bytes(), kind)
    dtypes = {tensor.name: tensor.dtype for tensor in file._tensors.values() if tensor.name != "checksum"}
    return [(name, dtype, file.column(name).copy()) for name, dtype in dtypes.items()], dict(file.metadata)


def index_of(tensors: list[tuple[str, str, NDArray[Any]]], metadata: dict[str, Any]) -> NDArray[Any]:
    """Return the index of a shard's sidecar; what is changed in it changes the tensors."""
    (index,) = (values for name, _, values in tensors if name == "index")
    return index.reshape(-1).view(index_dtype(len(metadata["entry"]["cut"])))


def replace_dropped(store: Path, data: bytes) -> Path:
    """Write another list of dropped rows, and a manifest that has its digest and length."""
    path = dropped_list(store).parent / f"1-{bytes_digest(data)}.dropped"
    path.write_bytes(data)
    rewrite_manifest(store, dropped=DroppedEntry(generation=1, digest=bytes_digest(data), num_bytes=len(data)))
    return path


def dropped_list(store: Path) -> Path:
    """Return the path of the list of the newest generation's dropped rows."""
    listed = read_manifest(store).dropped
    assert listed is not None
    return dropped_path(store, listed)


def read_with_safetensors(data: bytes) -> dict[str, dict[str, Any]]:
    deserialize: Any = safetensors.deserialize
    return dict(deserialize(data))


def edit_json(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text(encoding="ascii"))
    document.update(changes)
    path.write_text(json.dumps(document), encoding="ascii")


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def place_of(store: Store, bucket_name: str, row: int, column: str = "latent") -> tuple[Path, int]:
    bucket = store.bucket(bucket_name)
    located = bucket.locate(np.array([row]))
    return store.shards[int(located.shard[0])].paths.lmdb, int(located.offsets(bucket.spec, column)[0])


def flip_row(store: Store | Path, bucket_name: str, row: int, column: str = "latent") -> str:
    store = store if isinstance(store, Store) else Store.open(store)
    (sample_id,) = store.bucket(bucket_name).sample_ids(np.array([row]))
    path, at = place_of(store, bucket_name, row, column)
    flip_bit(path, 8 * at + 1)
    return sample_id


def flip_caption(store: Store | Path, caption: int) -> None:
    """Flip a bit of the first token of one of the first shard's captions."""
    store = store if isinstance(store, Store) else Store.open(store)
    located = store.locate_entries(store.text, np.array([0]), np.array([caption]))
    first = np.frombuffer(store.shards[0].read(int(located.starts_offsets()[0]), 8), "<i8")
    flip_bit(store.shards[0].paths.lmdb, 8 * int(located.token_offsets("tokens", first)[0]))


def without_locks(store: Path) -> dict[str, bytes]:
    """Return a store's `tree` without its locks, which a refused command leaves, too."""
    return {name: data for name, data in tree(store).items() if "lock" not in name}


def tree(folder: Path) -> dict[str, bytes]:
    """Return every path under a folder with its content, to see that nothing was left behind; folders end in a slash."""
    return {
        str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def untouched(folder: Path, seen: Callable[[Path], dict[str, bytes]] = tree) -> Iterator[None]:
    """Expect that a folder is after a block what it was before."""
    before = seen(folder)
    yield
    assert seen(folder) == before
