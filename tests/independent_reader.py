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

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "?"}
DTYPES |= {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)}
DTYPES |= {f"F8_{form}": "u1" for form in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
deserialize: Any = safetensors.deserialize
Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]
Entries = list[tuple[bytes, Arrays]]  # digest and columns of each caption, or of each entry of a ragged group


def open_block(data: bytes) -> Arrays:
    return {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize(data)
    }


def metadata_of(data: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


@dataclass(slots=True)
class Shard:
    """All that one shard holds."""

    rows: dict[str, list[Arrays]] = field(default_factory=dict)  # bucket → row → columns
    entries: dict[str, Entries] = field(default_factory=dict)  # `text` or ragged group → row
    records: dict[bytes, dict[str, Any]] = field(default_factory=dict)


def values_of(path: Path, shard_id: str) -> dict[bytes, bytes]:
    """Return the values of a shard's file by key, after comparing its name and id."""
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
        found = dict(txn.cursor())
    meta = msgpack.unpackb(found.pop(b"meta"))
    meta.pop("text_error", None)
    assert meta == {"format_version": 1, "shard": path.stem, "shard_id": bytes.fromhex(shard_id)}
    return found


def expect_block(block: bytes, manifest: dict[str, Any], group: str, first_row: int, *, is_added: bool = False) -> None:
    """Compare a block's metadata, and the length of its header, with the manifest."""
    kind, _, name = group.partition("/")
    if kind == "text":
        about, header_bytes = {"format": "bucketline.text/1"}, manifest["text"]["header_bytes"]
    elif kind == "ragged":
        about, header_bytes = {"format": "bucketline.ragged/1", "group": name}, manifest["ragged"][name]["header_bytes"]
    else:
        (bucket,) = (bucket for bucket in manifest["buckets"] if bucket["name"] == group)
        assert group == f"{bucket['split']}/{'x'.join(str(axis['size']) for axis in bucket['axes'])}"
        about, header_bytes = {"format": "bucketline.block/1", "bucket": group}, bucket["header_bytes"]
        if (axes := [axis["name"] for axis in bucket["axes"]]) != ["height_px", "width_px"]:
            about["axes"] = ",".join(axes)
    assert metadata_of(block) == {**about, "first_row": str(first_row)}
    assert is_added or int.from_bytes(block[:8], "little") + 8 == header_bytes


def entries_of(own: Arrays, form: dict[str, Any]) -> Entries:
    """Return the captions or ragged entries of a block; of a ragged group, each is held against its checksum and digest."""
    found = []
    for n, digest in enumerate(own["digest"]):
        begin, end = own["starts"][n : n + 2].tolist()
        columns = {name: own[name][n] for name in sorted(form["fixed"])}
        columns |= {name: own[name][begin:end] for name in sorted(form["tokens"])}
        data = b"".join(values.tobytes() for values in columns.values())
        if "of" in form:
            assert xxhash.xxh3_64_intdigest(data + digest.tobytes()) == own["checksum"][n]
        if form.get("of") == "rows":
            content = (end - begin).to_bytes(8, "little") + data
            assert hashlib.blake2b(content, digest_size=16).digest() == digest.tobytes()
        found.append((digest.tobytes(), columns))
    return found


def read_shard(store: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> Shard:
    shard = Shard()
    for key, value in values_of(store / "shards" / f"{entry['name']}.lmdb", entry["shard_id"]).items():
        if key.startswith(b"sample/"):
            shard.records[key[7:]] = msgpack.unpackb(value, unicode_errors="surrogateescape")
            continue
        group, _, number = key.decode().rpartition("/")
        assert len(number) == 8
        own, name = open_block(value), group.removeprefix("ragged/")
        if group == "text" or name != group:
            entries = shard.entries.setdefault(name, [])
            expect_block(value, manifest, group, len(entries))
            entries += entries_of(own, manifest["text"] if group == "text" else manifest["ragged"][name])
        else:
            rows = shard.rows.setdefault(group, [])
            expect_block(value, manifest, group, len(rows))
            rows += [{column: values[k] for column, values in own.items()} for k in range(len(own["id"]))]
    return shard


def read_added(store: Path, entry: dict[str, Any], manifest: dict[str, Any], shard: Shard) -> None:
    """Read the added columns of a shard's rows, by the sidecar, into its rows."""
    for name, own in entry.get("added", {}).items():
        path = store / "shards" / f"{entry['name']}.{own['shard_id']}.lmdb"
        data, sidecar = path.read_bytes(), path.with_suffix(".meta").read_bytes()
        about, table = metadata_of(sidecar), open_block(sidecar)
        assert (json.loads(about["column"]), json.loads(about["rows_of"])) == (name, entry["shard_id"])
        assert xxhash.xxh3_128_hexdigest(data) == own["lmdb"]["digest"]
        values_of(path, own["shard_id"])
        for bucket, (rows, blocks, first_block, dropped) in own["groups"].items():
            form, found = manifest["added"][name]["buckets"][bucket], 0
            assert (rows, dropped) == (len(shard.rows[bucket]), 0)
            for at in range(first_block, first_block + blocks):
                begin = int(table["offset"][at])
                block = data[begin : begin + int(table["length"][at])]
                expect_block(block, manifest, bucket, found, is_added=True)
                columns = open_block(block)
                assert columns.keys() == {"checksum", "id", name}
                assert (columns[name].dtype, [*columns[name].shape[1:]]) == (np.dtype(DTYPES[form["dtype"]]), form["shape"])
                stored = sorted(("id", name), key=lambda column: (-columns[column].itemsize, column))
                for k, row in enumerate(shard.rows[bucket][found : found + len(columns["id"])]):
                    assert row["id"].tobytes() == columns["id"][k].tobytes()
                    content = b"".join(columns[column][k].tobytes() for column in stored)
                    assert xxhash.xxh3_64_intdigest(content) == columns["checksum"][k]
                    row[name] = columns[name][k]
                found += len(columns["id"])
            assert found == rows


def index_of(values: np.ndarray[Any, Any], encoders: int, shard_id: str) -> np.ndarray[Any, Any]:
    """Return the entries of an index, each held against its checksum."""
    fields: Any = [("digest", "V16"), ("content", "V16"), ("record_offset", "<u8"), ("source_bytes", "<u8")]
    fields += [("source_mtime_ns", "<i8"), ("captions", "<u8"), ("record_bytes", "<u4"), ("row", "<u4"), ("bucket", "<u2")]
    fields += [("cut", "<u2", (encoders,)), ("zeros", "u1", (-(74 + 2 * encoders) % 8,)), ("checksum", "<u8")]
    seed = int.from_bytes(bytes.fromhex(shard_id)[:8], "little")
    for entry in values:
        assert xxhash.xxh3_64_intdigest(entry[:-8].tobytes(), seed) == int.from_bytes(entry[-8:].tobytes(), "little")
    return values.reshape(-1).view(np.dtype(fields))


def dropped_rows(store: Path, manifest: dict[str, Any]) -> dict[tuple[str, str], set[int]]:
    """Return the dropped rows by shard and bucket."""
    counts = [(entry["name"], name, own[3]) for entry in manifest["shards"] for name, own in sorted(entry["groups"].items())]
    if (listed := manifest["dropped"]) is None:
        assert not any(count for *_, count in counts)
        return {}
    data = (store / "generations" / f"{listed['generation']}-{listed['digest']}.dropped").read_bytes()
    assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (listed["num_bytes"], listed["digest"])
    assert metadata_of(data) == {"format": "bucketline.dropped/1"}
    rows = iter(open_block(data)["rows"].tolist())
    found = {(shard, bucket): {next(rows) for _ in range(count)} for shard, bucket, count in counts}
    assert next(rows, None) is None
    assert all(len(found[shard, bucket]) == count for shard, bucket, count in counts)
    return found


def live_rows(store: Path) -> Iterator[tuple[Shard, str, Arrays, dict[str, Any]]]:
    manifest = json.loads((store / "manifest.json").read_text())
    dropped = dropped_rows(store, manifest)
    for entry in manifest["shards"]:
        shard = read_shard(store, entry, manifest)
        read_added(store, entry, manifest, shard)
        assert sum(map(len, shard.rows.values())) == entry["samples"] == len(shard.records)
        assert entry.get("ragged", {}).keys() | {"text"} == shard.entries.keys()
        for name, about in entry.get("ragged", {}).items():
            lengths = [len(own[next(iter(manifest["ragged"][name]["tokens"]))]) for _, own in shard.entries[name]]
            assert about == {"tokens": sum(lengths), "max_tokens": max(lengths)}
        assert shard.entries["text"][0][0] == hashlib.blake2b(b"", digest_size=16).digest()
        for bucket, rows in shard.rows.items():
            for number, columns in enumerate(rows):
                record = shard.records[columns["id"].tobytes()]
                assert (record["bucket"], record["row"]) == (bucket, number)
                if number not in dropped.get((entry["name"], bucket), ()):
                    yield shard, bucket, columns, record


def read_store(store: Path) -> dict[str, tuple[str, Arrays, dict[str, Any], list[Arrays]]]:
    """Return every live sample by id: its bucket, its columns, its record and its captions' columns."""
    found: dict[str, tuple[str, Arrays, dict[str, Any], list[Arrays]]] = {}
    for shard, bucket, columns, record in live_rows(store):
        assert record["id"] not in found
        captions = [shard.entries["text"][row][1] for row in record["caption_rows"]]
        found[record["id"]] = (bucket, columns, record, captions)
    return found


def read_entries(store: Path) -> dict[str, dict[str, list[Arrays]]]:
    """Return every live sample's ragged entries: id → group → those of its captions, or that of its row, or none."""
    groups = json.loads((store / "manifest.json").read_text())["ragged"]
    found: dict[str, dict[str, list[Arrays]]] = {}
    for shard, _, columns, record in live_rows(store):
        found[record["id"]] = own = {}
        for name, group in groups.items():
            entries, captions = shard.entries.get(name, []), shard.entries["text"]  # an optional group may have none
            digests = [digest for digest, _ in entries]
            if group["of"] == "captions":
                assert digests == [digest for digest, _ in captions]
                numbers = record["caption_rows"]
            else:
                assert len({*digests}) == len(digests) or not group["stored_once"]
                assert columns[f"ragged/{name}"] >= (-1 if group["optional"] else 0)
                numbers = [row] if (row := int(columns[f"ragged/{name}"])) >= 0 else []
            own[name] = [entries[row][1] for row in numbers]
    return found
