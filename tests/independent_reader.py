"""A reader of stores by `lmdb`, `safetensors`, `msgpack`, `xxhash` and the page FORMAT.md, and nothing of Bucketline's."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import msgpack
import numpy as np
import safetensors
import xxhash

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "?"}
DTYPES |= {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)}
DTYPES |= {f"F8_{form}": "u1" for form in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
deserialize: Any = safetensors.deserialize
Json = dict[str, Any]
Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]
Groups = dict[str, list[Arrays]]  # rows by bucket, captions by `text`, entries by `ragged/NAME`


class Sample(NamedTuple):
    bucket: str
    columns: Arrays
    record: Json
    captions: list[Arrays]
    entries: Groups  # by ragged group: those of its captions, or that of its row, or none


def open_block(data: bytes) -> Arrays:
    return {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize(data)
    }


def metadata_of(data: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


def read_listed(path: Path, listed: Json) -> bytes:
    data = path.read_bytes()
    assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (listed["num_bytes"], listed["digest"])
    return data


def rows_of(block: Arrays) -> list[Arrays]:
    """Return the rows of a bucket's block, each held against its checksum."""
    order = sorted(block.keys() - {"checksum"}, key=lambda name: (-block[name].itemsize, name))
    rows = [{name: block[name][k] for name in order} for k in range(len(block["id"]))]
    for row, expected in zip(rows, block["checksum"], strict=True):
        assert xxhash.xxh3_64_intdigest(b"".join(values.tobytes() for values in row.values())) == expected
    return rows


def entries_of(block: Arrays, form: Json) -> list[Arrays]:
    """Return the captions or ragged entries of a block, each held against its checksum, and its digest if that is of it."""
    entries = []
    for n, digest in enumerate(block["digest"]):
        begin, end = block["starts"][n : n + 2].tolist()
        entry = {name: block[name][n] for name in sorted(form["fixed"])}
        entry |= {name: block[name][begin:end] for name in sorted(form["tokens"])}
        data = b"".join(values.tobytes() for values in entry.values())
        assert xxhash.xxh3_64_intdigest(data + digest.tobytes()) == block["checksum"][n]
        if form.get("of") == "rows":
            content = (end - begin).to_bytes(8, "little") + data
            assert hashlib.blake2b(content, digest_size=16).digest() == digest.tobytes()
        entries.append({**entry, "digest": digest})
    return entries


def read_block(block: bytes, manifest: Json, group: str, first_row: int, *, is_added: bool = False) -> list[Arrays]:
    """Return a block's rows or entries, after comparing its metadata, and the length of its header, with the manifest."""
    kind, _, name = group.partition("/")
    if kind == "text":
        about, form = {"format": "bucketline.text/1"}, manifest["text"]
    elif kind == "ragged":
        about, form = {"format": "bucketline.ragged/1", "group": name}, manifest["ragged"][name]
    else:
        (form,) = (bucket for bucket in manifest["buckets"] if bucket["name"] == group)
        sizes = {axis["name"]: str(axis["size"]) for axis in form["axes"]}
        assert group == f"{form['split']}/{'x'.join(sizes.values())}"
        about = {"format": "bucketline.block/1", "bucket": group}
        about |= {} if [*sizes] == ["height_px", "width_px"] else {"axes": ",".join(sizes)}
    assert metadata_of(block) == {**about, "first_row": str(first_row)}
    assert is_added or int.from_bytes(block[:8], "little") + 8 == form["header_bytes"]
    return entries_of(open_block(block), form) if "tokens" in form else rows_of(open_block(block))


def read_file(store: Path, name: str, entry: Json, manifest: Json, about: Json) -> tuple[Groups, dict[bytes, Json]]:
    """Return the rows and entries, and the records, of the file of a shard, or of the added column that `about` names."""
    path, groups, records = store / "shards" / f"{name}.lmdb", Groups(), dict[bytes, Json]()
    data, sidecar = read_listed(path, entry["lmdb"]), read_listed(path.with_suffix(".meta"), entry["meta"])
    noted, table = {key: json.loads(text) for key, text in metadata_of(sidecar).items()}, open_block(sidecar)
    assert data[noted["shard_id_at"] :][:16].hex() == noted["shard_id"] == entry["shard_id"]
    assert about.items() <= noted.items()
    places = [*zip(*(table[field].tolist() for field in ("offset", "length", "first_row", "rows")), strict=True)]
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as txn:
        for key, value in txn.cursor():
            if key == b"meta":
                meta = msgpack.unpackb(value)
                assert (meta["shard"], meta["shard_id"].hex()) == (name, entry["shard_id"])
            elif key.startswith(b"sample/"):
                records[key[7:]] = msgpack.unpackb(value, unicode_errors="surrogateescape")
            else:
                assert key.startswith(b"block/")
                group, number = key[6:-9].decode(), int(key[-8:])
                offset, length, first_row, count = places[entry["groups"][group][2] + number]
                rows = groups.setdefault(group, [])
                assert (data[offset : offset + length], first_row) == (value, len(rows))
                rows += read_block(value, manifest, group, first_row, is_added=bool(about))
                assert len(rows) == first_row + count
    assert {group: len(rows) for group, rows in groups.items()} == {group: own[0] for group, own in entry["groups"].items()}
    assert len(places) == sum(blocks for _, blocks, *_ in entry["groups"].values())
    return groups, records


def read_added(store: Path, entry: Json, manifest: Json, groups: Groups) -> None:
    """Read the added columns of a shard's rows into them."""
    for name, own in entry["added"].items():
        about = {"column": name, "rows_of": entry["shard_id"]}
        added, _ = read_file(store, f"{entry['name']}.{own['shard_id']}", own, manifest, about)
        for bucket, values in added.items():
            form = manifest["added"][name]["buckets"][bucket]
            for row, value in zip(groups[bucket], values, strict=True):
                assert value.keys() == {"id", name}
                assert row["id"].tobytes() == value["id"].tobytes()
                assert (value[name].dtype, [*value[name].shape]) == (np.dtype(DTYPES[form["dtype"]]), form["shape"])
                row[name] = value[name]


def index_of(values: np.ndarray[Any, Any], encoders: int, shard_id: str) -> np.ndarray[Any, Any]:
    """Return the entries of an index, each held against its checksum."""
    fields: Any = [("digest", "V16"), ("content", "V16"), ("record_offset", "<u8"), ("source_bytes", "<u8")]
    fields += [("source_mtime_ns", "<i8"), ("captions", "<u8"), ("record_bytes", "<u4"), ("row", "<u4"), ("bucket", "<u2")]
    fields += [("cut", "<u2", (encoders,)), ("zeros", "u1", (-(74 + 2 * encoders) % 8,)), ("checksum", "<u8")]
    seed = int.from_bytes(bytes.fromhex(shard_id)[:8], "little")
    for entry in values:
        assert xxhash.xxh3_64_intdigest(entry[:-8].tobytes(), seed) == int.from_bytes(entry[-8:].tobytes(), "little")
    return values.reshape(-1).view(np.dtype(fields))


def dropped_rows(store: Path, manifest: Json) -> dict[tuple[str, str], list[int]]:
    """Return the dropped rows by shard and group."""
    rows, found = iter(list[int]()), {}
    if (listed := manifest["dropped"]) is not None:
        data = read_listed(store / "generations" / f"{listed['generation']}-{listed['digest']}.dropped", listed)
        assert metadata_of(data) == {"format": "bucketline.dropped/1"}
        rows = iter(open_block(data)["rows"].tolist())
    for entry in manifest["shards"]:
        for group, (count, _, _, dropped) in sorted(entry["groups"].items()):
            own = found[entry["name"], group] = [*islice(rows, dropped)]
            assert (len(own), own) == (dropped, sorted({*own} & {*range(count)}))
    assert next(rows, None) is None
    return found


def read_store(store: Path) -> dict[str, Sample]:
    """Return every live sample by its id."""
    manifest, samples = json.loads((store / "manifest.json").read_text()), dict[str, Sample]()
    dropped = dropped_rows(store, manifest)
    for entry in manifest["shards"]:
        groups, records = read_file(store, entry["name"], entry, manifest, {})
        read_added(store, entry, manifest, groups)
        captions, buckets = groups["text"], [group for group in groups if group.startswith(("train/", "val/"))]
        assert captions[0]["digest"].tobytes() == hashlib.blake2b(b"", digest_size=16).digest()
        for name, about in entry["ragged"].items():
            own, group = groups[f"ragged/{name}"], manifest["ragged"][name]
            lengths, digests = [len(one[min(group["tokens"])]) for one in own], [one["digest"].tobytes() for one in own]
            assert about == {"tokens": sum(lengths), "max_tokens": max(lengths)}
            assert group["of"] == "rows" or digests == [caption["digest"].tobytes() for caption in captions]
            assert group["of"] == "captions" or not group["stored_once"] or len({*digests}) == len(own)
        assert sum(len(groups[bucket]) for bucket in buckets) == entry["samples"] == len(records)
        for bucket, (row, columns) in ((name, own) for name in buckets for own in enumerate(groups[name])):
            record = records[columns["id"].tobytes()]
            assert (record["bucket"], record["row"]) == (bucket, row)
            if row not in dropped[entry["name"], bucket]:
                assert record["id"] not in samples
                entries = {}
                for name, group in manifest["ragged"].items():
                    numbers = record["caption_rows"] if group["of"] == "captions" else [int(columns[f"ragged/{name}"])]
                    assert min(numbers) >= (-1 if group["optional"] else 0)
                    entries[name] = [groups[f"ragged/{name}"][number] for number in numbers if number >= 0]
                own = [captions[number] for number in record["caption_rows"]]
                salt = b"\0" + columns["id"].tobytes() if {"seen_images", "seen_empty"} <= manifest["ragged"].keys() else b""
                for text, caption in zip(record["captions"] or [""], own, strict=True):
                    key = text.encode("utf-8", "surrogateescape") + (salt if text else b"")
                    assert caption["digest"].tobytes() == hashlib.blake2b(key, digest_size=16).digest()
                samples[record["id"]] = Sample(bucket, columns, record, own, entries)
    return samples
