"""A reader of stores by `lmdb`, `safetensors`, `msgpack`, `xxhash` and the page FORMAT.md, and nothing of Bucketline's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lmdb
import msgpack
import numpy as np
import safetensors
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "BF16": "<u2",
    "I32": "<i4",
    "I64": "<i8",
    "I8": "i1",
    "F8_E4M3": "u1",
    "U8": "u1",
    "U32": "<u4",
    "U64": "<u8",
    "U16": "<u2",
    "BOOL": "?",
    "F64": "<f8",
    "C64": "<c8",
    "I16": "<i2",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "F8_E4M3FNUZ": "u1",
    "F8_E5M2FNUZ": "u1",
}
deserialize: Any = safetensors.deserialize
Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]


def open_block(data: bytes) -> Arrays:
    return {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize(data)
    }


def metadata_of(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return found


@dataclass(slots=True)
class Shard:
    """All that one shard holds."""

    rows: dict[str, list[Arrays]] = field(default_factory=dict)  # bucket → row → columns
    captions: list[tuple[bytes, Arrays]] = field(default_factory=list)  # caption row → digest and tokens
    entries: dict[str, list[tuple[bytes, Arrays]]] = field(default_factory=dict)  # ragged group → digest and columns
    records: dict[bytes, dict[str, Any]] = field(default_factory=dict)


def axes_of(name: str, manifest: dict[str, Any]) -> dict[str, str]:
    """Return a block's metadata about its axes, after comparing the bucket's name with their sizes."""
    (bucket,) = (bucket for bucket in manifest["buckets"] if bucket["name"] == name)
    assert name == f"{bucket['split']}/{'x'.join(str(axis['size']) for axis in bucket['axes'])}"
    axes = [axis["name"] for axis in bucket["axes"]]
    return {} if axes == ["height_px", "width_px"] else {"axes": ",".join(axes)}


def entries_of(own: Arrays, group: dict[str, Any]) -> list[tuple[bytes, Arrays]]:
    """Return the entries of a block of a ragged group, each held against its checksum and the rule of its digest."""
    found = []
    for n, digest in enumerate(own["digest"]):
        begin, end = own["starts"][n : n + 2].tolist()
        columns = {name: own[name][n] for name in sorted(group["fixed"])}
        columns |= {name: own[name][begin:end] for name in sorted(group["tokens"])}
        data = b"".join(values.tobytes() for values in columns.values())
        assert xxhash.xxh3_64_intdigest(data + digest.tobytes()) == own["checksum"][n]
        if group["of"] == "rows":
            content = (end - begin).to_bytes(8, "little") + data
            assert hashlib.blake2b(content, digest_size=16).digest() == digest.tobytes()
        found.append((digest.tobytes(), columns))
    return found


def read_shard(store: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> Shard:
    shard = Shard()
    path = store / "shards" / f"{entry['name']}.lmdb"
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
        for key, value in txn.cursor():
            group, _, number = key.rpartition(b"/")
            if key.startswith(b"sample/"):
                shard.records[key[7:]] = msgpack.unpackb(value, unicode_errors="surrogateescape")
            elif key == b"meta":
                shard_id = bytes.fromhex(entry["shard_id"])
                meta = msgpack.unpackb(value)
                meta.pop("text_error", None)
                assert meta == {"format_version": 1, "shard": entry["name"], "shard_id": shard_id}
            elif group == b"text":
                own = open_block(value)
                assert metadata_of(value) == {"format": "bucketline.text/1", "first_row": str(len(shard.captions))}
                for n, digest in enumerate(own["digest"]):
                    begin, end = own["starts"][n : n + 2]
                    tokens = {name: own[name][begin:end] for name in manifest["text"]["tokens"]}
                    shard.captions.append((digest.tobytes(), tokens))
            elif group.startswith(b"ragged/"):
                ragged, own = group[7:].decode(), open_block(value)
                entries = shard.entries.setdefault(ragged, [])
                expected = {"format": "bucketline.ragged/1", "group": ragged, "first_row": str(len(entries))}
                assert metadata_of(value) == expected
                assert int.from_bytes(value[:8], "little") + 8 == manifest["ragged"][ragged]["header_bytes"]
                entries += entries_of(own, manifest["ragged"][ragged])
            else:
                name, own = group.decode(), open_block(value)
                rows = shard.rows.setdefault(name, [])
                assert len(number) == 8
                axes = axes_of(name, manifest)
                found = {"format": "bucketline.block/1", "bucket": name, "first_row": str(len(rows)), **axes}
                assert metadata_of(value) == found
                rows += [{column: values[k] for column, values in own.items()} for k in range(len(own["id"]))]
    return shard


def read_added(store: Path, entry: dict[str, Any], manifest: dict[str, Any], shard: Shard) -> None:
    """Read the added columns of a shard's rows, by the extents, into its rows."""
    for name, own in entry.get("added", {}).items():
        path = store / "shards" / f"{entry['name']}.{own['shard_id']}.lmdb"
        data, extents = path.read_bytes(), path.with_suffix(".extents").read_bytes()
        about, table = metadata_of(extents), open_block(extents)
        assert (json.loads(about["column"]), json.loads(about["rows_of"])) == (name, entry["shard_id"])
        assert xxhash.xxh3_128_hexdigest(data) == own["lmdb"]["digest"]
        with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
            meta = msgpack.unpackb(txn.get(b"meta"))
            assert meta == {"format_version": 1, "shard": path.stem, "shard_id": bytes.fromhex(own["shard_id"])}
        for bucket, (rows, blocks, first_block, dropped) in own["groups"].items():
            form, found = manifest["added"][name]["buckets"][bucket], 0
            assert (rows, dropped) == (len(shard.rows[bucket]), 0)
            for at in range(first_block, first_block + blocks):
                begin = int(table["offset"][at])
                block = data[begin : begin + int(table["length"][at])]
                axes = axes_of(bucket, manifest)
                expected = {"format": "bucketline.block/1", "bucket": bucket, "first_row": str(found), **axes}
                assert metadata_of(block) == expected
                columns = open_block(block)
                assert sorted(columns) == sorted(("checksum", "id", name))
                assert (columns[name].dtype.str[1:], list(columns[name].shape[1:])) == (
                    DTYPES[form["dtype"]].strip("<"),
                    form["shape"],
                )
                for k, row in enumerate(shard.rows[bucket][found : found + len(columns["id"])]):
                    assert row["id"].tobytes() == columns["id"][k].tobytes()
                    stored = sorted(("id", name), key=lambda one: (-columns[one].itemsize, one))
                    data_of_row = b"".join(columns[one][k].tobytes() for one in stored)
                    assert xxhash.xxh3_64_intdigest(data_of_row) == columns["checksum"][k]
                    row[name] = columns[name][k]
                found += len(columns["id"])
            assert found == rows


def dropped_rows(store: Path, entry: dict[str, Any]) -> dict[str, set[int]]:
    if entry["dropped"] is None:
        return {}
    data = (store / "shards" / f"{entry['name']}.dropped-{entry['dropped']['generation']}").read_bytes()
    groups = json.loads(metadata_of(data)["groups"])
    rows = open_block(data)["rows"].tolist()
    return {name: set(rows[place["first"] : place["first"] + place["count"]]) for name, place in groups.items()}


def live_rows(store: Path) -> Iterator[tuple[Shard, str, Arrays, dict[str, Any]]]:
    manifest = json.loads((store / "manifest.json").read_text())
    for entry in manifest["shards"]:
        shard, dropped = read_shard(store, entry, manifest), dropped_rows(store, entry)
        read_added(store, entry, manifest, shard)
        assert sum(map(len, shard.rows.values())) == entry["samples"] == len(shard.records)
        for name, entries in shard.entries.items():
            lengths = [len(own[next(iter(manifest["ragged"][name]["tokens"]))]) for _, own in entries]
            assert entry["ragged"][name] == {"tokens": sum(lengths), "max_tokens": max(lengths)}
        assert entry.get("ragged", {}).keys() == shard.entries.keys()
        for bucket, rows in shard.rows.items():
            for number, columns in enumerate(rows):
                record = shard.records[columns["id"].tobytes()]
                assert (record["bucket"], record["row"]) == (bucket, number)
                if number not in dropped.get(bucket, ()):
                    yield shard, bucket, columns, record
        for digest, _ in shard.captions[:1]:
            assert digest == hashlib.blake2b(b"", digest_size=16).digest()


def read_store(store: Path) -> dict[str, tuple[str, Arrays, dict[str, Any], list[Arrays]]]:
    found: dict[str, tuple[str, Arrays, dict[str, Any], list[Arrays]]] = {}
    for shard, bucket, columns, record in live_rows(store):
        assert record["id"] not in found
        tokens = [shard.captions[row][1] for row in record["caption_rows"]]
        found[record["id"]] = (bucket, columns, record, tokens)
    return found


def read_entries(store: Path) -> dict[str, dict[str, list[Arrays]]]:
    """Return every live sample's ragged entries: id → group → those of its captions, or that of its row, or none."""
    groups = json.loads((store / "manifest.json").read_text()).get("ragged", {})
    found: dict[str, dict[str, list[Arrays]]] = {}
    for shard, _, columns, record in live_rows(store):
        found[record["id"]] = own = {}
        for name, group in groups.items():
            if group["of"] == "captions":
                assert len(shard.entries[name]) == len(shard.captions)
                entries = [shard.entries[name][row] for row in record["caption_rows"]]
                assert [digest for digest, _ in entries] == [shard.captions[row][0] for row in record["caption_rows"]]
            else:
                number = int(columns[f"ragged/{name}"])
                assert number >= (-1 if group["optional"] else 0)
                entries = [shard.entries[name][number]] if number >= 0 else []
            own[name] = [arrays for _, arrays in entries]
    for entry_shard in {id(shard): shard for shard, *_ in live_rows(store)}.values():
        for name, entries in entry_shard.entries.items():
            if groups[name]["of"] == "rows" and groups[name]["stored_once"]:
                assert len({digest for digest, _ in entries}) == len(entries)
    return found
