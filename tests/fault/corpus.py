"""The seeds of the fuzzed parsers: a few sound files each, small, and whatever a fuzzer found that they must survive.

`python -m tests.fault.corpus` writes the sound ones again; inputs that found a defect are put next to them by hand.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.store.format.manifest import MANIFEST
from bucketline.store.format.sample_record import encode_record
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.train.checkpoint import VERSION, RunState
from bucketline.typed_json import encode
from tests.fault.fuzz import IMPORT, IMPORTS
from tests.fault.small_caches import write_cache
from tests.kit import ANY, AUDIO, LENGTH, LLAMA, Form, make_sample, make_store

if TYPE_CHECKING:
    from collections.abc import Iterator

CORPUS = Path(__file__).parent / "corpus"
NOISE = b"\0\xff\x80\x7f\x01 \"'{}[],:.9-e\n"


def inputs(parser: str) -> list[bytes]:
    """Return a parser's seeds."""
    return [path.read_bytes() for path in sorted((CORPUS / parser).iterdir())]


def mutated(parser: str, count: int, seed: int) -> Iterator[bytes]:
    """Yield the seeds, then so many inputs made of them by small changes: bytes replaced, taken out, doubled, put together."""
    draw, seeds = random.Random(seed), inputs(parser)
    yield from seeds
    for _ in range(count):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice([1, 1, 2, 5])):
            at, length = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8, 50])
            how = draw.randrange(4)
            if how == 0:
                data[at : at + length] = bytes(draw.choice(NOISE) for _ in range(length))
            elif how == 1:
                del data[at : at + length]
            elif how == 2:
                data[at:at] = data[at : at + length] * draw.choice([1, 3, 100])
            else:
                data[at:] = draw.choice(seeds)[at:]
        yield bytes(data)


def sound() -> Iterator[tuple[str, bytes]]:
    """Yield the sound seeds, by the path that each has in the corpus."""
    samples = [make_sample(f"{n}.png", bucket, ("a red barn",)) for n, bucket in enumerate(("train/8x8", "val/8x16") * 3)]
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "s", samples, samples[:1])
        yield "manifest/sound.json", (store.path / MANIFEST).read_bytes()
        free = ANY.make_store(Path(folder) / "free", ANY.samples({"train/8x8": 2, "val/8x16": 1}))
        yield "manifest/columns.json", (free.path / MANIFEST).read_bytes()
        form = Form(columns=LENGTH, groups={"audio": AUDIO, "llama": LLAMA})
        ragged = form.make_store(Path(folder) / "ragged", form.samples({"train/3": 4}))
        yield "manifest/ragged.json", (ragged.path / MANIFEST).read_bytes()
        place = ragged.shards[0].block_ranges("ragged/audio", np.array([0]))
        yield "block/ragged", bytes(ragged.shards[0].read(int(place.offset[0]), int(place.length[0])))
        yield "sidecar/ragged.extents", ragged.shards[0].paths.extents.read_bytes()
        for path in sorted((store.path / "shards").iterdir()):
            if path.stem == "g0" and path.suffix != ".lmdb":
                yield f"sidecar/sound{path.suffix}", path.read_bytes()
        shard = store.shards[0]
        for group, name in ((TEXT_GROUP, "text"), ("train/8x8", "rows")):
            place = shard.block_ranges(group, np.array([0]))
            yield f"block/{name}", bytes(shard.read(int(place.offset[0]), int(place.length[0])))
    yield "record/sound", encode_record(samples[0].record)
    state = RunState(
        version=VERSION,
        steps_done=3,
        loader={"step": 3},
        window=None,
        config={"seed": 0},
    )
    yield "checkpoint/state.json", json.dumps(encode(state)).encode()
    yield "checkpoint/digests.json", b'{"state.json": [1, "00"]}'
    yield "captions/lines.txt", "a red barn\r\n\n  snow \u2028 ü\n".encode()
    yield "captions/list.json", b'{"text": ["a", "b"], "caption": "c"}'
    for kind in IMPORTS:
        with tempfile.TemporaryDirectory() as folder:
            yield f"{IMPORT}{kind}/sound", write_cache(kind, Path(folder))
    tar = _tar()
    yield from (
        ("tar/plain.tar", tar),
        ("tar/packed.tar.gz", gzip.compress(tar, mtime=0)),
        ("tar/packed.tar.bz2", bz2.compress(tar)),
    )


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("a.png", b"no image"), ("a.txt", b"a caption"), ("ü" * 60 + "/b.jpg", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("c.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


def main() -> int:
    """Write the sound seeds."""
    for name, data in sound():
        (CORPUS / name).parent.mkdir(parents=True, exist_ok=True)
        (CORPUS / name).write_bytes(data)
        print(f"{len(data):8} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
