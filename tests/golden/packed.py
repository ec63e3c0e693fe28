"""Stores packed of real photographs: what readers, exports and loaders find in them, after a pack, a second one and a drop."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.family_models import write_pipeline
from tests.golden.digests import of_bytes
from tests.golden.forking import CallFailedError, forked, program
from tests.models import write_model
from tests.photographs import crop_of

NUM_IMAGES = 24
MTIME_NS = 1_700_000_000_123_456_789  # of every file: records have it
GRID = "64x96,96x64,64x64"
TAGS = ("a red cat", "the house of the dog", "a blue house", "green", "the dog")
# By name: the source, the model, and the options of a pack.
PACKS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "as it is": ("folder", "bert", ()),
    "tar": ("images.tar", "bert", ()),
    "moments, mirrored": ("folder", "bert", ("--latents", "moments", "--flip", "--crop", "random", "--dtype", "bf16")),
    "samples": ("folder", "bert", ("--latents", "sample", "--max-crop", 0.5, "--min-size-px", 120)),
    "int8": ("folder", "bert", ("--text-dtype", "int8", "--shuffle-tags", "2:1:3", "--caption-template", "a of {caption}")),
    "fp8": ("folder", "bert", ("--text-dtype", "fp8", "--dtype", "fp32", "--val-fraction", "0.3:folder")),
    "sd": ("folder", "sd", ()),
    "sdxl": ("folder", "sdxl", ("--flip",)),
}
USUAL = {"--grid": GRID, "--min-size-px": 32, "--val-fraction": 0.2, "--text": "plain"}
FORMATS = {
    "as it is": ("safetensors", "webdataset"),
    "sd": ("kohya",),
    "sdxl": ("kohya", "safetensors"),
}
LOADED: tuple[dict[str, Any], ...] = (
    {"batch_size": 3, "seed": 1, "verify": True},
    {"batch_size": 2, "seed": 2, "caption_dropout": 0.3, "remainder": "partial"},
    {"batch_pixels": 4 * 64 * 96, "window": 16, "lanes": 1, "text": "stored"},
)


def packed(work: Path) -> dict[str, Any]:
    work.mkdir(parents=True)
    forked(lambda: _write(work), work / "log")
    found: dict[str, Any] = {}
    for name in PACKS:
        try:
            found[name] = _packed(work, name)
        except CallFailedError as error:
            found[name] = f"failed: {error}".replace(str(work), "")
    return found


def _packed(work: Path, name: str) -> dict[str, Any]:
    source, model, options = PACKS[name]
    store, log = work / "s", work / "log"
    shutil.rmtree(store, ignore_errors=True)
    place = work / source
    first = _pack(work, place, store, model, USUAL, *options)
    found: dict[str, Any] = {"pack": first, "rows": _rows(work, store)}
    if name.startswith("moments") or name == "sdxl":
        more: dict[str, Any] = {"flip": 0.5}
    else:
        more = {}
    found["batches"] = [_in_child(work, lambda asked=asked: _batches(store, {**asked, **more})) for asked in LOADED]
    found["exports"] = {kind: _exported(work, store, kind) for kind in FORMATS.get(name, ())}
    if name == "as it is":
        _change(place)
        found["second pack"] = _pack(work, place, store, model, {}, "--prune")
        found["its rows"] = _rows(work, store)
        forked(program("bucketline.store.cli:main", ("drop", store, "0/000.jpg", "1/001.png")), log)
        found["after a drop"] = _in_child(work, lambda: _batches(store, {**LOADED[0], "remainder": "partial"}))
        forked(program("bucketline.store.cli:main", ("compact", store)), log)
        found["after compact"] = _rows(work, store)
        _write_images(work)  # as they were
    forked(program("bucketline.store.cli:main", ("verify", store)), log)
    return found


def _pack(work: Path, source: Path, store: Path, model: str, usual: dict[str, Any], *more: object) -> Any:
    chosen = {**usual}
    given = [*more]
    for option in [one for one in given if one in chosen]:
        del chosen[str(option)]
    if model != "bert":
        chosen.pop("--text", None)
    words = [word for pair in chosen.items() for word in pair]
    call = program("bucketline.ingest.cli:main", ("pack", source, store, "--model", work / model, *words, *given, "--json"))
    said = json.loads(forked(call, work / "log", stdout_only=True))
    counted = ("found", "packed", "unchanged", "rejected", "without_caption", "payload_bytes", "rejected_by_reason", "pruned")
    return {key: said[key] for key in counted if key in said}


def _rows(work: Path, store: Path) -> Any:
    """Return a digest of each of the rows, in the order of `store ls`, and of all values of all of them."""
    listed = forked(program("bucketline.store.cli:main", ("ls", store, "--json")), work / "log", stdout_only=True)
    records = [json.loads(line) for line in listed.splitlines()]
    for record in records:
        record.pop("shard", None)
    values = _exported(work, store, "safetensors")
    return {"records": [json.dumps(record) for record in records], "values": values}


def _exported(work: Path, store: Path, kind: str) -> Any:
    out = work / "exported"
    shutil.rmtree(out, ignore_errors=True)
    forked(program("bucketline.store.cli:main", ("export", store, out, "--format", kind)), work / "log")
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    names = [str(path.relative_to(out)) for path in paths]
    return {
        "files": len(names),
        "names": of_bytes(*map(str.encode, names)),
        "bytes": of_bytes(*(p.read_bytes() for p in paths)),
    }


def _in_child(work: Path, call: Any) -> Any:
    out = work / "result.json"

    def in_child() -> None:
        out.write_text(json.dumps(call()), encoding="utf-8")

    forked(in_child, work / "log")
    found: Any = json.loads(out.read_bytes())
    return found


def _batches(store: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the batches of an epoch: bucket and ids of each, and a digest of each tensor over all of them."""
    from bucketline.loader import Loader, LoaderConfig

    order: list[Any] = []
    tensors: dict[str, list[bytes]] = {}
    with Loader(store, LoaderConfig(**asked)) as loader:
        for batch in loader:
            order.append(f"{batch.bucket}: {' '.join(loader.names(batch))}")
            for name, array in batch.numpy().items():
                tensors.setdefault(name, []).extend((str(array.shape).encode(), array.tobytes()))
    return {"order": order, "tensors": {name: of_bytes(*parts) for name, parts in sorted(tensors.items())}}


def _write(work: Path) -> None:
    write_model(work / "bert")
    for family in ("sd", "sdxl"):
        write_pipeline(work / family, family)
    _write_images(work)
    with tarfile.open(work / "images.tar", "w") as archive:
        for path in _files(work / "folder"):
            archive.add(path, path.relative_to(work / "folder"))
    os.utime(work / "images.tar", ns=(MTIME_NS, MTIME_NS))


def _write_images(work: Path) -> None:
    folder = work / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    for n in range(NUM_IMAGES):
        height, width = ((120 + 7 * n % 40, 180), (190, 130 + 5 * n % 30), (140, 145))[n % 3]
        path = folder / str(n % 2) / f"{n:03d}.{'jpg' if n % 2 == 0 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        quality: dict[str, Any] = {} if n % 2 else {"quality": 92}
        crop_of(n, height, width).convert("RGB").save(path, **quality)
        if n % 5:
            path.with_suffix(".txt").write_text(
                f"{TAGS[n % 5]}, {TAGS[n % 3]}, {TAGS[n % 4]}\n{TAGS[n % 2]}\n", encoding="utf-8"
            )
    (folder / "broken.jpg").write_bytes(b"not an image")
    for path in _files(folder):
        os.utime(path, ns=(MTIME_NS, MTIME_NS))


def _change(folder: Path) -> None:
    crop_of(90, 130, 150).convert("RGB").save(folder / "0" / "new.png")
    crop_of(91, 150, 130).convert("RGB").save(folder / "0" / "002.jpg", quality=92)
    (folder / "1" / "003.txt").write_text("a red dog\n", encoding="utf-8")
    (folder / "0" / "004.jpg").unlink()
    for path in _files(folder):
        os.utime(path, ns=(MTIME_NS, MTIME_NS + 5 * (path.name in ("new.png", "002.jpg", "003.txt"))))


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())
