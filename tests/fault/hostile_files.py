"""Files of a store that lie, with right checksums and digests, and files edited at random: what every reader makes of them.

A lie with right checksums may get an answer; after a random edit, whose checksums are wrong, it must be the one before.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketline.errors import BucketlineError
from bucketline.store import Store
from bucketline.store.format.block import CHECKSUM, row_checksum
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.manifest import MANIFEST, read_manifest
from bucketline.store.format.safetensors_header import LENGTH_BYTES
from bucketline.store.shard.sidecar import PagedFile, encode_paged
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import publish
from tests.every_reader import digest_of_everything
from tests.fault.apart import How, apart
from tests.fault.ground import limit_memory
from tests.fault.record import COLUMNS_TOO, GOOD, Asked, Kind, Outcome, Record
from tests.kit import COLUMNS, IMAGES, Form, samples_of

BUCKET = "train/64x64"
NUMBERS = (0, 1, 7, 1 << 31, 1 << 32, (1 << 62) + 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MEMORY_BYTES = 1 << 30  # that a process may take beyond what it has at its beginning
CASE_S = 20.0  # after which readers and verify are taken to hang
RANDOM = "random"
KINDS = {"extents": "bucketline.extents/1", "index": "bucketline.index/1", "dropped": "bucketline.dropped/1"}


def sound_store(path: Path, form: Form) -> Path:
    """Make a store of two shards, the first with several blocks in two buckets and dropped rows."""
    samples = samples_of({BUCKET: 25, "val/8x8": 3})
    form.make_store(path, samples, [*samples[3:9], *samples_of({BUCKET: 4}, "more/")])
    return path


def answers(path: Path, expected: str | None) -> list[Outcome]:
    """Use a store in every way: what readers, then verify, make of it. Without an expected digest any answer will do."""

    def read() -> Outcome:
        found = digest_of_everything(Store.open(path))
        return Outcome.COMPLETED if expected in (None, found) else Outcome.WRONG

    def verified() -> Outcome:
        if verify(Store.open(path), lambda _: None, 1).corrupt:
            return Outcome.CLEAN_ERROR
        return Outcome.COMPLETED if expected is None else Outcome.WRONG

    found = []
    for use in (read, verified):
        try:
            found.append(use())
        except BucketlineError:
            found.append(Outcome.CLEAN_ERROR)
    return found


def entry_of(document: dict[str, Any], kind: str) -> dict[str, Any]:
    entry: dict[str, Any] = document["shards"][0][kind]
    return entry


def write_document(store: Path, document: dict[str, Any]) -> None:
    """Write a manifest with a right digest, whatever it says, as the newest generation's too."""
    newest = max((store / "generations").iterdir(), key=lambda path: int(path.stem))
    for digest in ("", None):
        document["digest"] = bytes_digest(_dumped(document)) if digest is None else digest
    for path in (store / MANIFEST, newest):
        path.write_bytes(_dumped(document))


def _dumped(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode("ascii") + b"\n"


def replace_file(store: Path, kind: str, data: bytes) -> None:
    """Put other bytes in the place of a file of the first shard, and let the manifest agree."""
    document = json.loads((store / MANIFEST).read_bytes())
    entry = entry_of(document, kind)
    suffix = f"dropped-{entry['generation']}" if kind == "dropped" else kind
    (store / "shards" / f"g0.{suffix}").write_bytes(data)
    entry.update(num_bytes=len(data), digest=bytes_digest(data))
    write_document(store, document)


def file_of(store: Path, kind: str) -> Path:
    entry = read_manifest(store).shards[0]
    return store / "shards" / f"g0.{f'dropped-{entry.dropped.generation}' if kind == 'dropped' and entry.dropped else kind}"


def paged(store: Path, kind: str) -> tuple[list[tuple[str, str, NDArray[Any]]], dict[str, Any]]:
    """Return a sidecar's tensors and metadata, copied."""
    path = file_of(store, kind)
    file = PagedFile(path, path.stat().st_size, KINDS[kind])
    dtypes = {tensor.name: tensor.dtype for tensor in file._tensors.values()}
    return [(name, dtypes[name], file.column(name).copy()) for name in dtypes if name != "page_checksum"], dict(file.metadata)


def sidecar_lies(store: Path, kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield other contents of a sidecar, each with right checksums."""
    tensors, metadata = paged(store, kind)
    for t, (name, dtype, values) in enumerate(tensors):
        changed: list[tuple[str, Any]] = [
            ("reversed", values[::-1]),
            ("cut", values[:-1]),
            ("doubled", np.concatenate([values, values])),
            ("none", values[:0]),
            ("same", np.broadcast_to(values[:1], values.shape)),
        ]
        for n, number in enumerate(NUMBERS):
            at = (0, len(values) // 2, len(values) - 1)[n % 3]
            other = values.copy()
            flat = other[at : at + 1].reshape(-1)
            flat[:] = (
                np.array([number % (1 << 8 * other.itemsize)], dtype="<u8").astype(f"<u{other.itemsize}").view(other.dtype)
            )
            changed += [(f"[{at}] = {number}", other), (f"all = {number}", np.broadcast_to(flat[:1], values.shape))]
        for what, other in changed:
            yield f"{name} {what}", encode_paged([*tensors[:t], (name, dtype, other), *tensors[t + 1 :]], metadata)
        yield f"without {name}", encode_paged([*tensors[:t], *tensors[t + 1 :]], metadata)
        yield f"{name} as bytes", encode_paged([*tensors[:t], (name, "U8", values.view("u1")), *tensors[t + 1 :]], metadata)
    odd = ("odd", "U8", np.zeros(3, "u1"))
    yield "unaligned", encode_paged([odd, *tensors], metadata)
    for key in metadata:
        others: tuple[object, ...] = (
            None,
            0,
            -1,
            1 << 70,
            "x" * 50,
            [],
            {},
            [[]],
            {BUCKET: None},
            {BUCKET: {"first": 0, "count": 1 << 62}},
        )
        for value in others:
            yield f"metadata {key} = {value!r:.40}", encode_paged(tensors, {**metadata, key: value})


def overflowing(store: Path) -> Iterator[tuple[str, bytes]]:
    """Yield extents whose numbers come out right once they have passed 2⁶⁴."""
    tensors, metadata = paged(store, "extents")
    place = metadata["groups"][BUCKET]["first_block"]
    for first_row, rows in ((0, 1 << 60), (-(1 << 62), (1 << 62) + 7), (0, (1 << 61) + 7), (-(1 << 63), (1 << 63) + 7)):
        changed = [(name, dtype, values.copy()) for name, dtype, values in tensors]
        for name, _, values in changed:
            if name == "first_row":
                values[place] = first_row % (1 << 64)
            if name == "rows":
                values[place] = rows % (1 << 64)
        yield f"first row {first_row}, rows {rows}", encode_paged(changed, metadata)


def header_lies(store: Path, kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield sidecars with another header, its own checksum left as it was or not."""
    data = file_of(store, kind).read_bytes()
    room = int.from_bytes(data[:LENGTH_BYTES], "little")
    header, body = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + room]), data[LENGTH_BYTES + room :]
    names = [name for name in header if name != "__metadata__"]
    shapes: tuple[Any, ...] = (
        [0, 1 << 61, 1 << 61],
        [1 << 61, 8],
        [1] * 40,
        [[1]],
        [],
        [-1],
        "1",
        [True],
        [1 << 62] * 4000,
        [0] * 4000,
        [1.0],
    )
    for name in (names[0], names[-1]):
        for shape in shapes:
            begin, end = header[name]["data_offsets"]
            yield f"shape {shape!r:.40}", _with_header({**header, name: {**header[name], "shape": shape}}, body)
            emptied = {**header, name: {**header[name], "shape": shape, "data_offsets": [begin, begin]}}
            yield f"empty shape {shape!r:.40}", _with_header(emptied, body[:begin] + body[end:])
    for length in (0, 7, room - 1, room + 1, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    yield "nested metadata", _with_header({**header, "__metadata__": {"format": "[" * 50_000}}, body)
    yield "nothing but a length", data[:8]
    yield "empty", b""


def _with_header(header: dict[str, Any], body: bytes) -> bytes:
    from bucketline.store.format.hashing import checksum

    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
    head = len(text).to_bytes(8, "little") + text
    return head + checksum(head).to_bytes(8, "little") + body[8:]


def manifest_lies(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield manifests in which one number or name is another."""
    deep: Any = 1
    for _ in range(400):
        deep = [deep]

    def leaves(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict):
            for key in value:
                yield from leaves(value[key], (*at, key))
        elif isinstance(value, list):
            for key in range(len(value) if at[-2:-1] == ("groups",) else min(len(value), 1)):
                yield from leaves(value[key], (*at, key))
        yield at

    wrong: tuple[Any, ...] = (*NUMBERS, -1, None, "", "../../x", "x" * 5000, [], {}, deep, [1 << 62] * 3000, 1e999, True)
    for n, at in enumerate(at for at in leaves(document, ()) if at and at != ("digest",)):
        for value in (wrong[(n + k) % len(wrong)] for k in range(0, len(wrong), 5)):
            other = copy.deepcopy(document)
            inner = other
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = value
            yield f"{'.'.join(map(str, at))} = {value!r:.40}", other


def block_lies(store: Path, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield shard files in which a block's header or content lies, rows' checksums made right again."""
    opened = Store.open(store)
    shard, data = opened.shards[0], opened.shards[0].paths.lmdb.read_bytes()
    for group in shard.entry.groups:
        place = shard.block_ranges(group, np.array([0]))
        begin = int(place.offset[0])
        room = int.from_bytes(data[begin : begin + 8], "little")
        for length in (0, 1, room + 64, 1 << 20, 1 << 40, (1 << 64) - 1):
            yield f"{group}: header of {length} bytes", _put(data, begin, length.to_bytes(8, "little"))
        text = data[begin + 8 : begin + 8 + room]
        for _ in range(12):
            at = draw.choice([n for n, byte in enumerate(text) if chr(byte).isdigit()])
            yield f"{group}: digit at {at}", _put(data, begin + 8 + at, str(draw.randrange(10)).encode())
    yield from _starts_lies(opened, data)
    bucket = opened.bucket(BUCKET)
    located = bucket.locate(np.array([0]))
    row = {c.name: shard.read(int(located.offsets(bucket.spec, c.name)[0]), c.row_bytes) for c in bucket.columns}
    for number in (-2, -(1 << 31), (1 << 31) - 1, 1000):
        row["captions"] = np.array([number] * 3, "<i4").tobytes()
        row[CHECKSUM] = row_checksum(bucket.spec, row).to_bytes(8, "little")
        changed = data
        for name in ("captions", CHECKSUM):
            changed = _put(changed, int(located.offsets(bucket.spec, name)[0]), row[name])
        yield f"captions {number}", changed


def _starts_lies(store: Store, data: bytes) -> Iterator[tuple[str, bytes]]:
    for row in (0, 1):
        at = int(store.locate_captions(np.array([0]), np.array([row])).starts_offsets()[0])
        for number in (*NUMBERS, (1 << 64) - 5):
            yield f"starts[{row}] = {number}", _put(data, at, number.to_bytes(8, "little"))
            yield f"starts[{row + 1}] = {number}", _put(data, at + 8, number.to_bytes(8, "little"))


def _put(data: bytes, at: int, part: bytes) -> bytes:
    return data[:at] + part + data[at + len(part) :]


Lie = tuple[str, str, "Callable[[Path], None]"]  # the kind of file, what it says, and what makes it say that


def lies_about(sound: Path, draw: random.Random, edits: int, share: float) -> Iterator[Lie]:
    """Yield all lies, or a share of them, drawn, and random edits of random files."""
    yield from (lie for lie in _by_kind(sound, draw) if draw.random() < share)
    for name, data in overflowing(sound):
        yield "extents", name, partial(replace_file, kind="extents", data=data)
    for _ in range(edits):
        path = draw.choice(sorted(p.relative_to(sound) for p in sound.rglob("*") if p.is_file() and p.stat().st_size))
        size = min((sound / path).stat().st_size, draw.choice([300, 1 << 20]))
        at, part = draw.randrange(size), draw.randbytes(draw.choice([1, 2, 8, 64]))
        if not part.startswith((sound / path).read_bytes()[at : at + len(part)]):  # else it says already what the edit would
            yield RANDOM, f"{path} {at} {part!r}", partial(edit, path=path, at=at, part=part)


def _by_kind(sound: Path, draw: random.Random) -> Iterator[Lie]:
    for kind in KINDS:
        for name, data in (*sidecar_lies(sound, kind), *header_lies(sound, kind)):
            yield kind, name, partial(replace_file, kind=kind, data=data)
    for name, data in block_lies(sound, draw):
        yield "blocks", name, partial(replace_file, kind="lmdb", data=data)
    for name, document in manifest_lies(json.loads((sound / MANIFEST).read_bytes())):
        yield "manifest", name, partial(write_document, document=document)
    for name, data in sidecar_lies(sound, "extents"):
        yield "adopted", name, partial(adopted, extents=data)


def edit(store: Path, path: Path, at: int, part: bytes) -> None:
    data = (store / path).read_bytes()
    (store / path).write_bytes(_put(data, at, part)[: len(data)])


def adopted(store: Path, extents: bytes) -> None:
    """Let the next pack find the first shard unlisted, with other extents; what it refuses changes nothing."""
    first = store / "generations" / "0.json"
    shutil.copy(first, store / MANIFEST)
    (store / "shards" / "g0.extents").write_bytes(extents)
    try:
        publish(store, read_manifest(store), ["g0"], ())
    except BucketlineError:
        return


def lying_files(asked: Asked) -> Iterator[Record]:
    """Write all lies to a copy of a store, one after the other; who reads it may take little more memory, and only so long."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else asked.folder) as folder:
        limit_memory(MEMORY_BYTES)
        for words, form in (("", IMAGES), (COLUMNS_TOO, COLUMNS)):
            sound, path, records = Path(folder, f"sound{words}"), Path(folder, f"s{words}"), dict[str, Record]()
            sound_store(sound, form)
            expected = apart(lambda sound=sound: digest_of_everything(Store.open(sound)), CASE_S).gave  # type: ignore[misc]
            for kind, name, lie in lies_about(
                sound, random.Random(asked.seed), asked.of(100, 500), 0.2 if asked.is_quick else 1.0
            ):
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(sound, path)
                lie(path)
                ended = apart(partial(answers, path, expected if kind == RANDOM else None), CASE_S)
                found = [Outcome(one) for one in ended.gave] if ended.how is How.DONE else [ended.outcome]
                bad = next((one for one in found if one not in GOOD), found[-1])
                fault = (
                    "a store's file edited at random" if kind == RANDOM else f"{kind} that lie, with right checksums"
                ) + words
                record = records.setdefault(fault, Record(fault=fault, kind=Kind.HOSTILE))
                record.add(bad, f"{name}: {ended.said}")
            yield from (records[fault] for fault in sorted(records))
