"""Damage to a store's files: single bits flipped, one at a time, and files damaged at random, several at a time, and repaired.

A flip is a clean error if the store does not open, or `store verify` names a fault; it is harmless if neither is the case
and every reader's output over the whole store, in each of its generations, is byte for byte what it was.

After a repair every sample that is left is what it was, none that was dropped or replaced is back, no shard that was not
damaged has lost one, a second repair changes nothing, what was lost can be packed again, and then, once what is superseded
has been collected, nothing is wrong.

Files of a store that lie, with right checksums and digests, and files edited at random: what every reader makes of them.

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

from bucketline.errors import BucketlineError, StoreError
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import collect
from bucketline.store.change.repair import repair
from bucketline.store.format.block import CHECKSUM, LENGTH_BYTES, bytes_digest, checksum, row_checksum
from bucketline.store.format.manifest import MANIFEST, generation_path, generations, read_manifest
from bucketline.store.shard.sidecar import encode_dropped, encode_sidecar
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing, lock_store, publish
from tests.every_reader import digest_of_everything
from tests.fault.apart import apart
from tests.fault.ground import expect_sound, limit_memory
from tests.fault.record import COLUMNS_TOO, GOOD, Asked, Kind, Outcome, Record, expect
from tests.kit import COLUMNS, IMAGES, Form, Held, Sample, by_id, dropped_list, flip_bit, parts_of, samples_of

LONGEST_S = 60.0  # of all readers and a verification
FORMS = (("", IMAGES), (COLUMNS_TOO, COLUMNS))
DAMAGES = ("remove", "cut", "append", "flip", "blank", "exchange")
Contents = list[tuple[int | None, str]]  # a generation, or None for the newest, and the digest of all that readers give


def worn_store(path: Path, form: Form, num_rows: int) -> dict[str, Sample]:
    """Make a store of four shards, with replaced and dropped rows; return its live samples."""
    samples = samples_of({"train/64x64": num_rows, "train/8x8": 9, "val/64x128": 4})
    more = samples_of({"train/64x64": 25}, "more/")
    form.make_store(path, samples, samples[3:9], more, more[10:12])
    dropped = [samples[20].id, more[3].id]
    drop(path, dropped)
    return {sample.id: sample for sample in (*samples, *more) if sample.id not in dropped}


def kind_of(path: Path) -> str:
    if path.parent.name == "generations":
        return f"generations/*{path.suffix}"
    return path.name if path.suffix == ".json" else path.suffix.partition("-")[0] + ("-N" if "-" in path.suffix else "")


def draw_flips(store: Path, count: int, draw: random.Random) -> Iterator[tuple[Path, int]]:
    """Draw bits: every second one evenly over all bytes, the others evenly over the kinds of files first."""
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = sorted({kind_of(path) for path in files})
    for n in range(count):
        chosen = files if n % 2 else [path for path in files if kind_of(path) == kinds[n // 2 % len(kinds)]]
        (path,) = draw.choices(chosen, weights=[path.stat().st_size for path in chosen])
        yield path, draw.randrange(path.stat().st_size * 8)


def contents(store: Path) -> Contents:
    return [(n, digest_of_everything(Store.open(store, n))) for n in (None, *sorted(generations(store)))]


def used(store: Path, expected: Contents) -> Outcome:
    """Use a store of which one bit is another."""

    def is_as_it_was(some: Contents) -> bool:
        try:
            return all(digest_of_everything(Store.open(store, number)) == digest for number, digest in some)
        except BucketlineError:
            return False

    same = is_as_it_was(expected[:1])  # also where verify finds the flip: it must not end the process
    try:
        if verify(Store.open(store), lambda _: None, 1).corrupt:
            return Outcome.CLEAN_ERROR
    except StoreError:
        return Outcome.CLEAN_ERROR
    return Outcome.COMPLETED if same and is_as_it_was(expected[1:]) else Outcome.WRONG


def flipped_bits(asked: Asked) -> Iterator[Record]:
    """One bit of a store's files flipped, of a store of images and of one of columns of any kind."""

    def trial(path: Path, bit: int) -> Outcome:
        flip_bit(path, bit)
        ended = apart(partial(used, store, expected), LONGEST_S)
        flip_bit(path, bit)
        outcome = Outcome(ended.done())
        expect(outcome is not Outcome.WRONG, "the flip was not found", outcome)
        return outcome

    for (words, form), flips in zip(FORMS, (asked.of(75, 1200), asked.of(35, 600)), strict=True):
        store, records = asked.folder / f"flips{words}", dict[str, Record]()
        worn_store(store, form, num_rows=30)
        expected = apart(partial(contents, store), LONGEST_S).done()
        for path, bit in draw_flips(store, flips, asked.draw):
            fault = f"a bit flipped in {kind_of(path)}{words}"
            records.setdefault(fault, Record(fault, Kind.FLIP)).trial(f"bit {bit} of {path.name}", trial, path, bit)
        yield from (records[fault] for fault in sorted(records))


def damage(how: str, path: Path, draw: random.Random) -> None:
    """Damage a file: remove it, cut it short, append, flip bits, have zeros as after a power loss, or another of its kind."""
    others = [other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path]
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return
    if how == "exchange":
        if others:
            shutil.copy(draw.choice(others), path)
        return
    if how == "cut":
        os.truncate(path, draw.randrange(len(data)))
        return
    if how == "append":
        data += draw.randbytes(draw.randint(1, 9000))
    elif how == "flip":
        for bit in draw.sample(range(len(data) * 8), draw.randint(1, 5)):
            data[bit // 8] ^= 1 << bit % 8
    else:
        begin = draw.randrange(len(data))
        end = min(len(data), begin + draw.choice((1, 512, 4096, 40_000)))
        data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def is_as_it_was(now: Held, before: Held) -> bool:
    """Return whether a sample is what it was: its columns, captions, and what of its record has a checksum."""
    fields = ("id", "bucket", "source_bytes", "source_mtime_ns", "content", "original_size", "captions")
    same = all(getattr(now.record, name) == getattr(before.record, name) for name in fields)
    return same and now.columns == before.columns and now.captions == before.captions


def repaired(path: Path, damaged: set[str], every: dict[str, Sample], before: dict[str, Held], form: Form) -> Outcome:
    owner = owners(path.with_name("sound"))
    done = repair(path, threads=1)
    now = by_id(Store.open(path))
    lost = before.keys() - now.keys()
    expect(not now.keys() - before.keys(), "a sample is back that was not there")
    expect(all(is_as_it_was(now[i], before[i]) for i in now), "a sample is not what it was")
    expect((done.dropped, done.samples) == (len(lost), len(now)), "samples were lost that were not counted")
    expect({i for shard in done.shards for i in shard.dropped_ids} <= lost, "a sample is named that is not lost")
    expect({owner[i] for i in lost} <= damaged, "a shard lost samples that nobody damaged")
    expect(not verify(Store.open(path), lambda _: None, 1, shards_only=True).corrupt, "faults: one is left")
    manifest = (path / "manifest.json").read_bytes()
    expect(not repair(path, threads=1).shards, "a second repair found something")
    expect((path / "manifest.json").read_bytes() == manifest, "a second repair changed something")
    if lost:
        with form.part(path, "again") as writer:
            form.add(writer, [every[i] for i in sorted(lost)])
        with lock_store(path):
            publish(path, read_manifest(path), writer.sealed, ())
    expect(by_id(Store.open(path)).keys() == before.keys(), "missing: a sample that could not be packed again")
    with changing(path):
        collect(path, 0.0)
    expect_sound(path)
    return Outcome.RECOVERED


def owners(path: Path) -> dict[str, str]:
    store = Store.open(path)
    found: dict[str, str] = {}
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        shards = bucket.locate(rows).shard
        found |= {i: store.shards[int(n)].name for i, n in zip(bucket.sample_ids(rows), shards, strict=True)}
    return found


def damaged_files(asked: Asked) -> Iterator[Record]:
    """Files of a store removed, cut, overwritten or exchanged, then a repair and the same samples packed again."""
    for (words, form), trials in zip(FORMS, (asked.of(12, 200), asked.of(12, 100)), strict=True):
        folder, draw = asked.folder / f"damage{words}", asked.draw
        sound, path = folder / "sound", folder / "s"
        every = worn_store(sound, form, num_rows=60)
        before = by_id(Store.open(sound))
        record = Record(f"a store's files damaged, repaired and packed again{words}", Kind.DISK)
        for _ in range(trials):
            shutil.copytree(sound, path)
            files = sorted([*(path / "shards").iterdir(), *(path / "generations").glob("*.dropped")])
            chosen = {file: draw.choice(DAMAGES) for file in draw.sample(files, draw.randint(1, 3))}
            for file, how in chosen.items():
                damage(how, file, draw)
            what = ", ".join(f"{how} {file.name}" for file, how in chosen.items())
            of_list = {entry.name for entry in read_manifest(sound).shards if entry.live_samples < entry.samples}
            damaged = {file.name.partition(".")[0] for file in chosen}
            damaged |= of_list if dropped_list(sound).name in {file.name for file in chosen} else set()
            record.trial(what, repaired, path, damaged, every, before, form)
            shutil.rmtree(path)
        yield record


BUCKET = "train/64x64"
NUMBERS = (0, 1, 7, 1 << 31, 1 << 32, (1 << 62) + 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SHAPES: tuple[Any, ...] = (
    *([0, 1 << 61, 1 << 61], [1 << 61, 8], [1] * 4042658, [[1]], [], [-1], "1", [True], [1 << 62] * 4000, [0] * 4000, [1.0]),
)
METADATA: tuple[object, ...] = (
    *(None, 0, -1, 1 << 70, "x" * 50, [], {}, [[]], {BUCKET: None}, {BUCKET: {"first": 0, "count": 1 << 62}}),
)
MEMORY_BYTES = 1 << 30  # that a process may take beyond what it has at its beginning
CASE_S = 20.0  # after which readers and verify are taken to hang
RANDOM = "random"
KINDS = {"meta": "bucketline.shard/1"}
Lies = Iterator[tuple[str, bytes]]  # what it says, and the file's content
Tensors = list[tuple[str, str, NDArray[Any]]]


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


def write_document(store: Path, document: dict[str, Any]) -> None:
    """Write a manifest with a right digest, whatever it says, as the newest generation's too."""
    newest = generation_path(store, max(generations(store)))
    document["digest"] = ""
    document["digest"] = bytes_digest(dumped(document))
    for path in (store / MANIFEST, newest):
        path.write_bytes(dumped(document))


def with_dropped(store: Path, data: bytes) -> None:
    """Write another list of dropped rows, and a manifest that has its digest and length, whatever it says."""
    listed = {"generation": 1, "digest": bytes_digest(data), "num_bytes": len(data)}
    (store / "generations" / f"1-{listed['digest']}.dropped").write_bytes(data)
    write_document(store, {**json.loads((store / MANIFEST).read_bytes()), "dropped": listed})


def dumped(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode("ascii") + b"\n"


def file_of(store: Path, kind: str) -> Path:
    return store / "shards" / f"g0.{kind}"


def replace_file(store: Path, kind: str, data: bytes) -> None:
    """Put other bytes in the place of a file of the first shard, and let the manifest agree."""
    document = json.loads((store / MANIFEST).read_bytes())
    file_of(store, kind).write_bytes(data)
    document["shards"][0][kind].update(num_bytes=len(data), digest=bytes_digest(data))
    write_document(store, document)


def paged(store: Path, kind: str) -> tuple[Tensors, dict[str, Any]]:
    return parts_of(file_of(store, kind), KINDS[kind])


def sidecar_lies(store: Path, kind: str) -> Lies:
    tensors, metadata = paged(store, kind)
    for t, (name, dtype, values) in enumerate(tensors):

        def instead(*own: tuple[str, str, NDArray[Any]], t: int = t) -> bytes:
            return encode_sidecar([*tensors[:t], *own, *tensors[t + 1 :]], metadata)

        changed: list[tuple[str, Any]] = [
            ("reversed", values[::-1]),
            ("cut", values[:-1]),
            ("doubled", np.concatenate([values, values])),
            ("none", values[:0]),
            ("same", np.broadcast_to(values[:1], values.shape)),
        ]
        for n, number in enumerate(NUMBERS):
            at, other = (0, len(values) // 2, len(values) - 1)[n % 3], values.copy()
            flat, bits = other[at : at + 1].reshape(-1), 8 * other.itemsize
            flat[:] = np.array([number % (1 << bits)], dtype="<u8").astype(f"<u{other.itemsize}").view(other.dtype)
            changed += [(f"[{at}] = {number}", other), (f"all = {number}", np.broadcast_to(flat[:1], values.shape))]
        for what, other in changed:
            yield f"{name} {what}", instead((name, dtype, other))
        yield f"without {name}", instead()
        yield f"{name} as bytes", instead((name, "U8", values.view("u1")))
    yield "unaligned", encode_sidecar([("odd", "U8", np.zeros(3, "u1")), *tensors], metadata)
    for key in metadata:
        for value in METADATA:
            yield f"metadata {key} = {value!r:.40}", encode_sidecar(tensors, {**metadata, key: value})


def dropped_lies(store: Path) -> Lies:
    """Yield lists of dropped rows with other rows, and with other headers."""
    data = dropped_list(store).read_bytes()
    room = int.from_bytes(data[:LENGTH_BYTES], "little")
    header, body = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + room]), data[LENGTH_BYTES + room :]
    rows = np.frombuffer(body, "<u4")
    for what, other in (("reversed", rows[::-1]), ("cut", rows[:-1]), ("the same", np.repeat(rows[:1], len(rows)))):
        yield f"rows {what}", encode_dropped([other])
    for number in NUMBERS:
        yield f"a row {number}", encode_dropped([rows[:-1], np.array([number % (1 << 32)], "<u4")])
    for shape in SHAPES:
        yield f"shape {shape!r:.40}", _header({**header, "rows": {**header["rows"], "shape": shape}}) + body
    for dtype in ("I32", "F32", "U8", "X"):
        yield f"dtype {dtype}", _header({**header, "rows": {**header["rows"], "dtype": dtype}}) + body
    yield "another format", _header({**header, "__metadata__": {"format": "bucketline.extents/1"}}) + body
    for length in (0, 7, room - 1, room + 1, 1 << 31, (1 << 64) - 1):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    yield "nothing but a length", data[:8]


def overflowing(store: Path) -> Lies:
    """Yield sidecars whose numbers come out right once they have passed 2⁶⁴."""
    tensors, metadata = paged(store, "meta")
    place = metadata["entry"]["groups"][BUCKET][2]
    for first_row, rows in ((0, 1 << 60), (-(1 << 62), (1 << 62) + 7), (0, (1 << 61) + 7), (-(1 << 63), (1 << 63) + 7)):
        changed = [(name, dtype, values.copy()) for name, dtype, values in tensors]
        for name, _, values in changed:
            if name in ("first_row", "rows"):
                values[place] = (first_row if name == "first_row" else rows) % (1 << 64)
        yield f"first row {first_row}, rows {rows}", encode_sidecar(changed, metadata)


def header_lies(store: Path, kind: str) -> Lies:
    """Yield sidecars with another header, its own checksum left as it was or not."""
    data = file_of(store, kind).read_bytes()
    room = int.from_bytes(data[:LENGTH_BYTES], "little")
    header, body = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + room]), data[LENGTH_BYTES + room :]
    names = [name for name in header if name != "__metadata__"]
    for name in (names[0], names[-1]):
        begin, end = header[name]["data_offsets"]
        for shape in SHAPES:
            own = {**header[name], "shape": shape}
            yield f"shape {shape!r:.40}", _with_header({**header, name: own}, body)
            emptied = {**header, name: {**own, "data_offsets": [begin, begin]}}
            yield f"empty shape {shape!r:.40}", _with_header(emptied, body[:begin] + body[end:])
    for length in (0, 7, room - 1, room + 1, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    yield "nested metadata", _with_header({**header, "__metadata__": {"format": "[" * 50_000}}, body)
    yield "nothing but a length", data[:8]
    yield "empty", b""


def _header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
    return len(text).to_bytes(8, "little") + text


def _with_header(header: dict[str, Any], body: bytes) -> bytes:
    head = _header(header)
    return head + b"".join(checksum(part).to_bytes(8, "little") for part in (head, body[16:])) + body[16:]


def manifest_lies(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]

    def leaves(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys if isinstance(value, dict) or at[-2:-1] == ("groups",) else keys[:1]:
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


def block_lies(store: Path, draw: random.Random) -> Lies:
    """Yield shard files in which a block's header or content lies, rows' checksums made right again."""
    opened = Store.open(store)
    shard, data = opened.shards[0], opened.shards[0].paths.lmdb.read_bytes()
    for group in shard.entry.groups:
        begin = int(shard.block_ranges(group, np.array([0])).offset[0])
        room = int.from_bytes(data[begin : begin + 8], "little")
        for length in (0, 1, room + 64, 1 << 20, 1 << 40, (1 << 64) - 1):
            yield f"{group}: header of {length} bytes", put(data, begin, length.to_bytes(8, "little"))
        digits = [n for n, byte in enumerate(data[begin + 8 : begin + 8 + room]) if chr(byte).isdigit()]
        for at in draw.choices(digits, k=12):
            yield f"{group}: digit at {at}", put(data, begin + 8 + at, str(draw.randrange(10)).encode())
    for row in (0, 1):
        at = int(opened.locate_entries(opened.text, np.array([0]), np.array([row])).starts_offsets()[0])
        for number in (*NUMBERS, (1 << 64) - 5):
            yield f"starts[{row}] = {number}", put(data, at, number.to_bytes(8, "little"))
            yield f"starts[{row + 1}] = {number}", put(data, at + 8, number.to_bytes(8, "little"))
    for number in (-2, -(1 << 31), (1 << 31) - 1, 1000):
        yield f"captions {number}", with_row(store, {"captions": np.array([number] * 3, "<i4").tobytes()})


def with_row(store: Path, changes: dict[str, bytes]) -> bytes:
    """Return the first shard's file with other values in the first row, its checksum made right."""
    opened = Store.open(store)
    own, data = opened.bucket(BUCKET), opened.shards[0].paths.lmdb.read_bytes()
    place = own.locate(np.array([0]))
    at = {column.name: int(place.offsets(own.spec, column.name)[0]) for column in own.columns}
    row = {column.name: data[at[column.name] :][: column.row_bytes] for column in own.columns} | changes
    row[CHECKSUM] = row_checksum(own.spec, row).to_bytes(8, "little")
    for name, value in row.items():
        data = put(data, at[name], value)
    return data


def put(data: bytes, at: int, part: bytes) -> bytes:
    return data[:at] + part + data[at + len(part) :]


Lie = tuple[str, str, "Callable[[Path], object]"]  # the kind of file, what it says, and what makes it say that


def lies_about(sound: Path, draw: random.Random, edits: int, share: float) -> Iterator[Lie]:
    """Yield all lies, or a share of them, drawn, and random edits of random files."""
    yield from (lie for lie in _by_kind(sound, draw) if draw.random() < share)
    for name, data in overflowing(sound):
        yield "meta", name, partial(replace_file, kind="meta", data=data)
    for _ in range(edits):
        path = draw.choice(sorted(p.relative_to(sound) for p in sound.rglob("*") if p.is_file() and p.stat().st_size))
        whole = (sound / path).read_bytes()
        at, part = draw.randrange(min(len(whole), draw.choice([300, 1 << 20]))), draw.randbytes(draw.choice([1, 2, 8, 64]))
        edited = put(whole, at, part)[: len(whole)]
        if edited != whole:
            yield RANDOM, f"{path} {at} {part!r}", lambda store, path=path, data=edited: (store / path).write_bytes(data)  # type: ignore[misc]


def _by_kind(sound: Path, draw: random.Random) -> Iterator[Lie]:
    for kind in KINDS:
        for name, data in (*sidecar_lies(sound, kind), *header_lies(sound, kind)):
            yield kind, name, partial(replace_file, kind=kind, data=data)
    for name, data in dropped_lies(sound):
        yield "dropped", name, partial(with_dropped, data=data)
    for name, data in block_lies(sound, draw):
        yield "blocks", name, partial(replace_file, kind="lmdb", data=data)
    for name, document in manifest_lies(json.loads((sound / MANIFEST).read_bytes())):
        yield "manifest", name, partial(write_document, document=document)
    for name, data in sidecar_lies(sound, "meta"):
        yield "adopted", name, partial(adopted, meta=data)


def adopted(store: Path, meta: bytes) -> None:
    """Let the next pack find the first shard unlisted, with another sidecar; what it refuses changes nothing."""
    shutil.copy(store / "generations" / "0.json", store / MANIFEST)
    (store / "shards" / "g0.meta").write_bytes(meta)
    try:
        publish(store, read_manifest(store), ["g0"], ())
    except BucketlineError:
        return


def lying_files(asked: Asked) -> Iterator[Record]:
    """Write all lies to a copy of a store, one after the other; who reads it may take little more memory, and only so long."""

    def trial(path: Path, sound: Path, lie: Callable[[Path], None], expected: str | None) -> Outcome:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(sound, path)
        lie(path)
        found = [Outcome(one) for one in apart(partial(answers, path, expected), CASE_S).done()]
        expect(not {*found} - {*GOOD}, "readers or verify took it for what it was not", Outcome.WRONG)
        return found[-1]

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else asked.folder) as folder:
        limit_memory(MEMORY_BYTES)
        for words, form in FORMS:
            sound, path, records = Path(folder, f"sound{words}"), Path(folder, f"s{words}"), dict[str, Record]()
            sound_store(sound, form)
            expected = apart(lambda sound=sound: digest_of_everything(Store.open(sound)), CASE_S).done()  # type: ignore[misc]
            lies = lies_about(sound, asked.draw, asked.of(50, 500), 0.1 if asked.is_quick else 1.0)
            for kind, name, lie in lies:
                is_edit = kind == RANDOM
                fault = ("a store's file edited at random" if is_edit else f"{kind} that lie, with right checksums") + words
                record = records.setdefault(fault, Record(fault, Kind.HOSTILE))
                record.trial(name, trial, path, sound, lie, expected if is_edit else None)
            yield from (records[fault] for fault in sorted(records))
