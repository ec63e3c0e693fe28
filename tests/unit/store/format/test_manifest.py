"""The manifest is what was written, of a version that this reader knows, or it is refused with the reason."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.format.manifest import dump_manifest, parse_manifest, read_manifest, sealed, write_manifest
from tests.kit import edit_json, make_store, samples_of, tree


def test_a_manifest_comes_back_as_it_was_written(store: Store) -> None:
    found = read_manifest(store.path)
    assert found == store.manifest
    assert sealed(found) == found
    assert read_manifest(store.path, found.generation) == found


def test_every_generation_keeps_the_bytes_that_the_manifest_had(store: Store) -> None:
    newest = store.manifest.generation
    assert (store.path / "manifest.json").read_bytes() == (store.path / f"generations/{newest}.json").read_bytes()
    assert [read_manifest(store.path, n).generation for n in range(newest + 1)] == list(range(newest + 1))


def test_a_manifest_edited_by_hand_is_refused(copy: Path) -> None:
    edit_json(copy / "manifest.json", max_captions=3, generation=9)
    with pytest.raises(CorruptError, match=r"was edited by hand: its digest is .* copy .*generations/\d+.json to"):
        read_manifest(copy)


@pytest.mark.parametrize("version", [0, 2, 7])
def test_another_format_is_refused_with_both_versions_whatever_its_fields(version: int, copy: Path) -> None:
    (copy / "manifest.json").write_text(f'{{"format_version": {version}, "pages": []}}', encoding="ascii")
    with pytest.raises(StoreError, match=rf"has format version {version}, expected 1"):
        read_manifest(copy)


def bucket_edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["buckets"][0].update(changes)


def shard_edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["shards"][0].update(changes)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown field": (lambda d: d.update(comment="mine"), "unknown field 'comment'"),
    "a field less": (lambda d: d.pop("engine"), "lacks the field 'engine'"),
    "a number as text": (lambda d: d.update(generation="2"), "generation is '2', expected int"),
    "a negative number": (lambda d: d.update(generation=-1), "generation is -1, expected 0"),
    "a version as text": (lambda d: d.update(format_version="1"), "format_version is '1'"),
    "no version": (lambda d: d.pop("format_version"), "format_version"),
    "a list as an object": (lambda d: d.update(buckets={}), "buckets is {}, expected list"),
    "no list of shards": (lambda d: d.update(shards=5), "shards is 5, expected list"),
    "a bucket under another name": (bucket_edit(name="train/8x8"), "'train/8x8' is not the name of a bucket"),
    "a bucket of another size": (bucket_edit(axes=[{"name": "height_px", "size": 8}]), "the name of a bucket of train, 8"),
    "a bucket of another split": (bucket_edit(split="../../etc"), "is not the name of a bucket"),
    "another header": (bucket_edit(header_bytes=64), "header_bytes of train/64x128 is 64, its columns need"),
    "a bucket without columns": (bucket_edit(columns={}), "header_bytes"),
    "a bucket twice": (lambda d: d["buckets"].append(d["buckets"][0]), "listed twice"),
    "a shard twice": (lambda d: d["shards"].append(d["shards"][0]), "listed twice"),
    "a shard outside of the folder": (shard_edit(name="../../../etc/passwd"), "is not a shard name"),
    "a shard that is a number": (lambda d: d.update(shards=[5]), "shards"),
    "an empty shard": (lambda d: d.update(shards=[{}]), "shards"),
    "groups as a number": (shard_edit(groups=5), "groups"),
    "three numbers of a group": (shard_edit(groups={"text": [1, 2, 3]}), "expected 4 values: rows, blocks"),
    "a named group": (shard_edit(groups={"text": {"rows": 1, "blocks": 1, "first_block": 0, "dropped": 0}}), "groups.text is"),
    "a number of a group as text": (shard_edit(groups={"text": [1, 2, 3, "4"]}), "dropped"),
    "a negative number of a group": (shard_edit(groups={"text": [-1, 2, 3, 4]}), "rows"),
    "a shard of unknown buckets": (shard_edit(groups={"x": [1, 1, 0, 0]}), "'x'"),
    "no token column": (lambda d: d["text"].update(tokens={}), "expected one token column or more"),
    "an unknown dtype": (lambda d: d["text"]["tokens"]["tokens"].update(dtype="F8"), "the dtype 'F8'"),
    "an impossible shape": (lambda d: d["text"]["tokens"]["tokens"].update(shape=[1 << 50]), "impossible shape"),
    "more captions than the columns hold": (lambda d: d.update(max_captions=4), "in another form"),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_document_that_is_no_manifest_is_refused_by_field(case: str, store: Store) -> None:
    edit, message = EDITS[case]
    document = json.loads((store.path / "manifest.json").read_bytes())
    edit(document)
    with pytest.raises(CorruptError, match=f"item is damaged.*{re.escape(message)}"):
        parse_manifest(json.dumps(document).encode(), "item")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"5", b"[" * 200_000, b'{"a":' * 100_000, b"{}"])
def test_bytes_that_are_no_json_object_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"item is damaged"):
        parse_manifest(data, "item")
    assert gc.isenabled()


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    data = bytearray((make_store(tmp_path, samples_of({"train/64x64": 2})).path / "manifest.json").read_bytes())
    for bit in range(0, len(data) * 8, 5):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError):
            parse_manifest(bytes(data), "item")
        data[bit // 8] ^= 1 << bit % 8


def test_a_manifest_that_is_too_long_is_refused_before_anything_is_written(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, manifest = tree(copy), read_manifest(copy)
    for module in ("format.manifest", "write.publish", "verify.verify"):
        monkeypatch.setattr(f"bucketline.store.{module}.MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(StoreError, match=r"of 2 shards and 4 buckets has \d+ bytes, at most 1000 are read.*larger shards"):
        write_manifest(copy, replace(manifest, generation=9))
    assert tree(copy) == before


def test_a_group_takes_four_numbers_however_the_document_is_laid_out(store: Store) -> None:
    manifest, data = store.manifest, dump_manifest(store.manifest)
    document, group = json.loads(data), manifest.shards[0].groups["text"]
    assert document["shards"][0]["groups"]["text"] == [group.rows, group.blocks, group.first_block, group.dropped]
    assert b"\n" not in data[:-1]
    assert parse_manifest(json.dumps(document, indent=3).encode(), "m") == manifest
