"""Files of a store that lie, with right checksums and digests: what every reader makes of them. Run in a process of its own.

`python -m tests.fault.hostile_files --seed 1 --edits 150` prints, for each kind of file, how many lies were told, how many
ended in an error of Bucketline's, and how many got an answer (a lie with right checksums may; after a random edit, whose
checksums are wrong, the answer must be the one before). Anything else is a failure, and named.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import BucketlineError
from bucketline.store import Store
from bucketline.store.format.block import CHECKSUM, row_checksum
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.manifest import MANIFEST, read_manifest
from bucketline.store.format.safetensors_header import LENGTH_BYTES
from bucketline.store.shard.sidecar import PagedFile, encode_paged
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import publish
from tests.building import samples_of
from tests.every_reader import everything
from tests.store_forms import FORMS, Form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

BUCKET = "train/64x64"
NUMBERS = (0, 1, 7, 1 << 31, 1 << 32, (1 << 62) + 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MEMORY_BYTES = 1 << 30  # that a process may take beyond what it has at its beginning
CASE_S = 10  # after which a reader is taken to hang
KINDS = {"extents": "bucketline.extents/1", "index": "bucketline.index/1", "dropped": "bucketline.dropped/1"}


def sound_store(path: Path, form: Form) -> Path:
    """Make a store of two shards, the first with several blocks in two buckets and dropped rows."""
    samples = samples_of({BUCKET: 25, "val/8x8": 3})
    form.make_store(path, samples, [*samples[3:9], *samples_of({BUCKET: 4}, "more/")])
    return path


class Lies:
    """Writes lies to one store, one after the other, and counts what comes of them."""

    def __init__(self, folder: Path, form: Form) -> None:
        """Make the store that is sound."""
        self.sound = sound_store(folder / "sound", form)
        self.path = folder / "s"
        self.expected = everything(Store.open(self.sound))
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []

    def tell(self, kind: str, name: str, lie: Callable[[Path], None]) -> None:
        """Change a copy of the store, and use it in every way."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.sound, self.path)
        lie(self.path)
        for what, use in (("read", self._read), ("verify", self._verify)):
            signal.alarm(CASE_S)
            try:
                outcome = use(kind)
            except BucketlineError:
                outcome = "refused"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure, and the next case follows
                outcome = f"failed: {error!r:.300}"
            signal.alarm(0)
            if outcome not in ("refused", "answered"):
                self.failures.append(f"{kind}, {name}: {what} {outcome}")
            self.counts[kind, f"{what} {outcome.split(':')[0]}"] += 1

    def _read(self, kind: str) -> str:
        same = everything(Store.open(self.path)) == self.expected
        return "answered" if same or kind != "random" else "failed: other rows than were written"

    def _verify(self, kind: str) -> str:
        sound = not verify(Store.open(self.path), lambda _: None, 1).corrupt
        return "failed: found nothing" if sound and kind == "random" else "answered" if sound else "refused"


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


def tell_all(lies: Lies, draw: random.Random, edits: int, share: float) -> None:
    """Write all lies, or a share of them, drawn; and make random edits of random files."""
    sound = lies.sound
    told: list[tuple[str, str, Callable[[Path], None]]] = []

    def tell(kind: str, name: str, lie: Callable[[Path], None], *, always: bool = False) -> None:
        if always or draw.random() < share:
            told.append((kind, name, lie))

    for kind in KINDS:
        for name, data in (*sidecar_lies(sound, kind), *header_lies(sound, kind)):
            tell(kind, name, lambda store, kind=kind, data=data: replace_file(store, kind, data))  # type: ignore[misc]
    for name, data in overflowing(sound):
        tell("extents", name, lambda store, data=data: replace_file(store, "extents", data), always=True)  # type: ignore[misc]
    for name, data in block_lies(sound, draw):
        tell("blocks", name, lambda store, data=data: replace_file(store, "lmdb", data))  # type: ignore[misc]
    for name, document in manifest_lies(json.loads((sound / MANIFEST).read_bytes())):
        tell("manifest", name, lambda store, document=document: write_document(store, document))  # type: ignore[misc]
    for name, data in sidecar_lies(sound, "extents"):
        tell("adopted", name, lambda store, data=data: adopted(store, data))  # type: ignore[misc]
    for _ in range(edits):
        path = draw.choice(sorted(p.relative_to(sound) for p in sound.rglob("*") if p.is_file() and p.stat().st_size))
        size = min((sound / path).stat().st_size, draw.choice([300, 1 << 20]))
        at, part = draw.randrange(size), draw.randbytes(draw.choice([1, 2, 8, 64]))
        if part.startswith((sound / path).read_bytes()[at : at + len(part)]):
            continue  # it says already what the edit would say
        tell("random", f"{path} {at} {part!r}", lambda store, a=(path, at, part): edit(store, *a), always=True)  # type: ignore[misc]
    for case in told:
        lies.tell(*case)


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


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


def tell_within_limits(seed: int, edits: int, share: float, form: Form) -> Lies:
    """Write false contents in this process, which may take little more memory from here on, and only so long for each."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"no answer in {CASE_S} s")

    signal.signal(signal.SIGALRM, too_long)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        lies = Lies(Path(folder), form)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY_BYTES, hard))
        tell_all(lies, random.Random(seed), edits, share)
    return lies


def main() -> int:
    """Write the lies and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edits", type=int, default=500)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--form", choices=FORMS, default="images")
    asked = parser.parse_args()
    lies = tell_within_limits(asked.seed, asked.edits, asked.share, FORMS[asked.form])
    for (kind, outcome), count in sorted(lies.counts.items()):
        print(f"{kind:10} {outcome:20} {count:5}")
    for failure in lies.failures:
        print(failure)
    return 1 if lies.failures else 0


if __name__ == "__main__":
    sys.exit(main())
