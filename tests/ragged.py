"""Stores with ragged groups: schemas, arrays drawn from names, and comparisons of what comes out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.store import Column, RaggedGroup, Store, StoreWriter
from bucketline.store.read.iter_samples import Selection, live_samples
from tests.free_columns import bits, tokens_of, values
from tests.independent_reader import read_entries, read_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import PartWriter, RowColumn
    from tests.free_columns import Item

    Arrays = dict[str, NDArray[Any]]

ENCODERS = {"codec": {"name": "a codec"}}
AUDIO = RaggedGroup(
    columns=[Column(name="latent", dtype="BF16", shape=(3, 2)), Column(name="loud", dtype="BOOL", shape=())],
    fixed=[Column(name="rate", dtype="I32", shape=())],
    optional=True,
    encoder="codec",
)
POINTS = RaggedGroup(columns=[Column(name="xyz", dtype="F32", shape=(3,))], stored_once=False, mirrored="same")
LLAMA = RaggedGroup(columns=[Column(name="hidden", dtype="F16", shape=(7,))], of="captions")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The contents of a store: its rows' columns, its ragged groups, and whether it has captions."""

    columns: Sequence[RowColumn]
    groups: Mapping[str, RaggedGroup] = field(default_factory=dict)
    has_text: bool = True

    def of(self, kind: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.of == kind]


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def entry_of(name: str, group: RaggedGroup, key: str) -> Arrays:
    """Return the entry of a caption, or of a row, drawn from its key: 0 to 5 tokens."""
    length, draw = number_of(f"{name} {key}") % 6, bits if group.allow_nonfinite else values
    found = {c.name: draw(key, Column(name=c.name, dtype=c.dtype, shape=(length, *c.shape))) for c in group.columns}
    return found | {c.name: draw(key, c) for c in group.fixed}


def row_entry(name: str, group: RaggedGroup, sample_id: str) -> Arrays | None:
    """Return a sample's entry: one of four, so that some are equal; of an optional group none for a third of the samples."""
    number = number_of(f"{sample_id} of {name}")
    return None if group.optional and number % 3 == 0 else entry_of(name, group, f"{number % 4}")


def caption_of(schema: Schema, text: str) -> dict[str, Any]:
    """Return a caption's mapping as it is given: its tokens, and its entry of each group of captions."""
    return {"tokens": tokens_of(text)} | {name: entry_of(name, schema.groups[name], text) for name in schema.of("captions")}


def writer_of(path: Path, schema: Schema, **more: Any) -> StoreWriter:
    text: dict[str, Any] = {}
    if schema.has_text:
        text = {"text": [Column(name="tokens", dtype="F16", shape=(3,))], "empty_caption": caption_of(schema, "")}
    return StoreWriter(
        path, columns=schema.columns, encoders=ENCODERS, ragged=schema.groups, **{"max_captions": 3, **text, **more}
    )


def add_all(writer: PartWriter, schema: Schema, items: Iterable[Item], *, commit_every: int = 3) -> None:
    for n, item in enumerate(items, 1):
        entries = {name: row_entry(name, schema.groups[name], item.id) for name in schema.of("rows")}
        given = {name: entry for name, entry in entries.items() if entry is not None}
        captions = {text: caption_of(schema, text) for text in item.captions}
        writer.add(item.id, item.bucket, item.columns, captions, given)
        if n % commit_every == 0:
            writer.commit()


def make_ragged(path: Path, schema: Schema, *shards: Sequence[Item], **more: Any) -> Store:
    """Make a store of the given shards, each published as a generation of its own."""
    with writer_of(path, schema, **more) as writer:
        for items in shards:
            add_all(writer, schema, items)
            writer.publish()
    return Store(path, writer.manifest)


def same(found: Mapping[str, Any], expected: Arrays) -> bool:
    """Return whether an entry has these columns, bit for bit."""
    return found.keys() == expected.keys() and all(
        (own.shape, own.tobytes()) == (expected[name].shape, expected[name].tobytes()) for name, own in found.items()
    )


def expect_independently(path: Path, schema: Schema, items: Iterable[Item]) -> None:
    """Compare what the independent reader finds with what was put in."""
    found, entries, expected = read_store(path), read_entries(path), {item.id: item for item in items}
    assert found.keys() == expected.keys()
    for name, item in expected.items():
        bucket, columns, record, tokens = found[name]
        assert (bucket, tuple(record["captions"])) == (item.bucket, item.captions)
        for column in schema.columns:
            own = item.columns.get(column.role)
            assert columns[column.name].tobytes() == (bytes(columns[column.name].nbytes) if own is None else own.tobytes())
            assert not column.optional or columns[f"present/{column.name}"] == (own is not None)
        texts = item.captions or ("",)
        if schema.has_text:
            assert all(same(own, {"tokens": tokens_of(text)}) for text, own in zip(texts, tokens, strict=True))
        for group_name, group in schema.groups.items():
            if group.of == "captions":
                wanted = [entry_of(group_name, group, text) for text in texts]
            else:
                entry = row_entry(group_name, group, name)
                wanted = [] if entry is None else [entry]
            assert len(entries[name][group_name]) == len(wanted)
            assert all(same(own, one) for own, one in zip(entries[name][group_name], wanted, strict=True)), group_name


def expect_read(store: Store, schema: Schema, items: Iterable[Item]) -> None:
    """Compare what `Store` reads with plain reads with what was put in."""
    expected, seen = {item.id: item for item in items}, set()
    for listed in live_samples(store, Selection()):
        item, bucket = expected[listed.record.id], store.bucket(listed.record.bucket)
        seen.add(item.id)
        for name, group in schema.groups.items():
            for n, text in enumerate(item.captions or ("",)):
                wanted = entry_of(name, group, text) if group.of == "captions" else row_entry(name, group, item.id)
                found = bucket.read_ragged(listed.row, name, n if group.of == "captions" and n < 3 else 0)
                if n < 3 or group.of == "rows":
                    assert (found is None) == (wanted is None)
                    assert found is None or wanted is None or same(found, wanted)
    assert seen == expected.keys()


def expect_loaded(stores: Any, schema: Schema, items: Iterable[Item], **options: Any) -> int:
    """Compare a pass of the loader with what was put in; return how many rows it delivered."""
    expected, num_rows = {item.id: item for item in items if item.bucket.startswith("train/")}, 0
    if not expected:
        return 0
    settings: dict[str, Any] = {"batch_size": 2, "epochs": 1, "remainder": Remainder.PARTIAL, "ragged": tuple(schema.groups)}
    config = LoaderConfig(**{**settings, "columns": tuple(column.role for column in schema.columns), **options})
    with Loader(stores, config) as loader:
        for batch in loader:
            arrays = batch.numpy().arrays
            for n, name in enumerate(loader.names(batch)):
                num_rows += int(batch.weight[n])
                _expect_row(arrays, n, schema, expected[name])
    return num_rows


def _expect_row(arrays: Mapping[str, NDArray[Any]], n: int, schema: Schema, item: Item) -> None:
    for column in schema.columns:
        own = item.columns.get(column.role)
        found = arrays["latents" if column.role == "target" else f"columns.{column.role}"][n]
        assert found.tobytes() == (bytes(found.nbytes) if own is None else own.tobytes())
        assert not column.optional or arrays[f"present.{column.role}"][n] == (own is not None)
    assert any(_has_caption(arrays, n, schema, text) for text in item.captions[:3] or ("",)), item
    for name in schema.of("rows"):
        entry = row_entry(name, schema.groups[name], item.id)
        assert not schema.groups[name].optional or arrays[f"ragged.{name}.present"][n] == (entry is not None)
        assert _is_entry(arrays, n, name, schema.groups[name], entry)


def _has_caption(arrays: Mapping[str, NDArray[Any]], n: int, schema: Schema, text: str) -> bool:
    """Return whether a row has a caption's tokens, and its entry of each group: all of the same caption."""
    if schema.has_text:
        own, tokens = tokens_of(text), arrays["tokens"][n]
        if tokens[: len(own)].tobytes() != own.tobytes() or tokens[len(own) :].any():
            return False
    groups = {name: schema.groups[name] for name in schema.of("captions")}
    return all(_is_entry(arrays, n, name, group, entry_of(name, group, text)) for name, group in groups.items())


def _is_entry(arrays: Mapping[str, NDArray[Any]], n: int, name: str, group: RaggedGroup, entry: Arrays | None) -> bool:
    length = 0 if entry is None else len(entry[group.columns[0].name])
    mask = arrays[f"ragged.{name}.mask"][n]
    if arrays[f"ragged.{name}.lengths"][n] != length or mask.sum() != length or not mask[:length].all():
        return False
    for column in group.columns:
        found = arrays[f"ragged.{name}.columns.{column.name}"][n]
        if found.shape != (len(mask), *column.shape) or any(found[length:].tobytes()):
            return False
        if entry is not None and found[:length].tobytes() != entry[column.name].tobytes():
            return False
    for column in group.fixed:
        found = arrays[f"ragged.{name}.fixed.{column.name}"][n]
        if found.tobytes() != (bytes(column.row_bytes) if entry is None else entry[column.name].tobytes()):
            return False
    return True
